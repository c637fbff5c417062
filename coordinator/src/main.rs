//! `baton-coordinator`: one per job. Assigns ranks, keeps the journal, answers users.
//!
//! The rules are in `baton_job::engine`; this is its shell. [`job`] is the loop that owns the
//! machine, [`journal`] its memory, [`metrics`], [`logs`] and [`traces`] what only people read,
//! [`node_service`] and [`job_service`] translate gRPC, [`incoming`] lets clients in, [`serve`] puts them together.

#![forbid(unsafe_code)]

mod args;
mod begin;
mod clock;
mod diagnosis;
mod endpoint;
mod incoming;
mod job;
mod job_service;
mod journal;
mod logs;
mod metrics;
mod node_service;
mod report;
mod serve;
mod served;
mod traces;

use std::process::ExitCode;

use baton_job::exit;
use clap::{Parser, Subcommand};

/// Coordinates one training job: assigns ranks to agents, survives its own death, answers queries.
#[derive(Debug, Parser)]
#[command(version, after_help = EXIT_CODES)]
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
Exit codes: 0 completed, or told to quit; 75 drained (the same command continues); 3 stopped by a \
user; 4 a budget of the recipe's limits is used up and state is saved (the same command continues once \
the limit is raised); 2 bad input, or training that diverges (do not requeue); 1 anything else.

Example:
  baton-coordinator serve --recipe recipes/digits_cpu.toml --run-dir runs/digits_cpu
  baton-coordinator serve --run-dir runs/next        `baton submit RECIPE` gives it a job";

fn main() -> ExitCode {
    let Command::Serve(args) = Args::parse().command;
    match serve::run(&args) {
        Ok(Some(outcome)) => ExitCode::from(outcome.exit_code()),
        Ok(None) => ExitCode::from(exit::OK),
        Err(failure) => {
            // In the plain, as `baton up` and people look for this line in the log.
            eprintln!("error: {failure}");
            ExitCode::from(exit::Outcome::Failed { failure }.exit_code())
        }
    }
}
