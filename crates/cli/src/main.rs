//! `baton`: start a job, watch it, control it.
//!
//! | module | what it does |
//! |---|---|
//! | [`commands`] | one file per command |
//! | [`up`] | `baton up`: runs and supervises coordinator and agent on this machine until the job ends |
//! | [`sweep`] | `baton sweep`: many runs of a recipe, and their comparison |
//! | [`top`] | `baton top`: the dashboard |
//! | [`supervise`] | child processes and their restarts |
//! | [`connect`] | finds the coordinator and calls it |
//! | [`render`], [`json`] | a status as text and as JSON; pure functions |
//! | [`saved_report`] | the report of a job that has ended |
//! | [`display`] | progress on a terminal, as plain lines, or as JSON lines |
//!
//! `baton aws` is in `baton-aws`. Code shared by all commands (output, errors, numbers as text) is in `baton-console`.

#![forbid(unsafe_code)]

mod commands;
mod connect;
mod display;
mod json;
mod render;
mod saved_report;
mod supervise;
mod sweep;
#[cfg(test)]
mod testing;
mod top;
mod up;

use std::process::ExitCode;

use baton_console::{clean, failure, human, output, signals};
use baton_job::exit::Outcome;
use clap::Parser;

use crate::failure::failed;

fn main() -> ExitCode {
    let cli = commands::Cli::parse();
    signals::ignore_file_size_signal();
    // On this thread only, because the kernel signals a child about its parent's death when the *thread* that started
    // the child ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(cli.run()),
        Err(error) => Err(failed(format!("cannot start: {error}"))),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            output::error(&failure);
            ExitCode::from(Outcome::Failed { failure }.exit_code())
        }
    }
}
