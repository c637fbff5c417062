//! `baton`: start a job, look at it, steer it.
//!
//! | module | what it does |
//! |---|---|
//! | [`commands`] | one file per command |
//! | [`up`] | `baton up`: coordinator and agent on this machine, supervised to the end of the job |
//! | [`top`] | `baton top`: the dashboard |
//! | [`supervise`] | child processes, and how often they may be started again |
//! | [`connect`] | finds the coordinator and calls it |
//! | [`render`], [`json`] | a status as text and as JSON; pure |
//! | [`display`] | progress on a terminal, as plain lines, as JSON lines |
//!
//! `baton aws` is in `baton-aws`; what all commands share (output, errors, numbers for people) in `baton-console`.

#![forbid(unsafe_code)]

mod commands;
mod connect;
mod display;
mod json;
mod render;
mod supervise;
#[cfg(test)]
mod testing;
mod top;
mod up;

use std::process::ExitCode;

use baton_console::{clean, failure, human, output};
use baton_job::exit::Outcome;
use clap::Parser;

use crate::failure::failed;

fn main() -> ExitCode {
    let cli = commands::Cli::parse();
    // On this one thread, because the kernel tells a child of its parent's death when the *thread*
    // that started it ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(cli.run()),
        Err(error) => Err(failed(format!("cannot start: {error}"))),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            output::error(&failure);
            ExitCode::from(Outcome::Failed { failure }.exit_code())
        }
    }
}
