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
mod clock;
mod diagnosis;
mod disk;
mod endpoint;
mod incoming;
mod job;
mod job_service;
mod journal;
mod logs;
mod mesh_secret;
mod metrics;
mod node_service;
mod report;
mod report_limits;
mod serve;
mod served;
mod traces;

use std::process::ExitCode;

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
    let Command::Serve(args) = Args::parse().command;
    match serve::run(&args) {
        Ok(Some(outcome)) => ExitCode::from(outcome.exit_code()),
        Ok(None) => ExitCode::from(exit::OK),
        Err(failure) => {
            // Always as plain text, because `baton up` and people look for this line in the log.
            eprintln!("error: {failure}");
            ExitCode::from(exit::Outcome::Failed { failure }.exit_code())
        }
    }
}
