//! `baton-coordinator`: one per job. Assigns ranks, writes the journal, answers users.
//!
//! The rules are in `baton_job::engine`; this program runs that engine. [`job`] is the loop that owns the engine and
//! [`journal`] its durable state; [`metrics`], [`logs`] and [`traces`] are for observation, training does not need
//! them; [`node_service`] and [`job_service`] translate gRPC, [`incoming`] accepts connections, and [`serve`] combines
//! all of them.

#![forbid(unsafe_code)]

mod args;
mod begin;
mod body_deadline;
mod claim;
mod clock;
mod diagnosis;
mod disk;
mod endpoint;
mod incoming;
mod job;
mod job_service;
mod journal;
mod journal_copy;
mod lease;
mod logs;
mod mesh_secret;
mod metrics;
mod node_service;
mod place;
mod profile;
mod report;
mod report_limits;
mod serve;
mod served;
mod take_over;
#[cfg(test)]
mod takeovers;
mod traces;

use std::{
    io::{self, Write as _},
    process::ExitCode,
    sync::Arc,
};

use baton_job::exit;
use clap::{Parser, Subcommand};

/// Coordinates one training job: assigns ranks to agents, answers queries, and continues after a restart.
#[derive(Debug, Parser)]
#[command(version = baton_build_info::VERSION, after_help = EXIT_CODES)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a job until it ends; without a recipe, wait for one.
    Serve(args::Args),
}

const EXIT_CODES: &str = "\
Exit codes: 0 completed, or ended by a signal; 75 drained (the same command continues); 3 stopped by a \
user; 4 a limit of the recipe is reached and the state is saved (the same command continues once \
the limit is raised); 2 bad input, or training that diverges (do not requeue); 1 anything else.

Example:
  baton-coordinator serve --recipe recipes/digits_cpu.toml --run-dir runs/digits_cpu
  baton-coordinator serve --run-dir runs/next        waits for `baton submit RECIPE`";

fn main() -> ExitCode {
    // A file that becomes too large for `ulimit -f` is an error like a full disk. Fails only for signals that may not be
    // caught.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let Command::Serve(args) = Args::parse().command;
    match serve::run(&args) {
        Ok(Some(outcome)) => ExitCode::from(outcome.exit_code()),
        Ok(None) => ExitCode::from(exit::OK),
        Err(failure) => {
            // Always as plain text, because `baton up` and people look for this line in the log.
            // `eprintln!` panics if the disk of the log is full.
            let _ = writeln!(io::stderr(), "error: {failure}");
            ExitCode::from(exit::Outcome::Failed { failure }.exit_code())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Commands without `--json`, with the reason.
    const WITHOUT_JSON: [(&str, &str); 1] = [(
        "serve",
        "runs until the job ends; its address is in coordinator.json of the run folder",
    )];

    #[test]
    fn every_command_that_prints_a_result_has_json() {
        let command = Args::command();
        let prints_text = |command: &&clap::Command| {
            command.get_arguments().all(|flag| flag.get_long() != Some("json"))
        };
        let without = command.get_subcommands().filter(prints_text).map(clap::Command::get_name);
        assert!(without.eq(WITHOUT_JSON.map(|(command, _)| command)));
    }
}
