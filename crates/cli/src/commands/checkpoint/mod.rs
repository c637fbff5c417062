//! `baton checkpoint`

mod cp;
mod diff;
mod export;
pub(crate) mod folder;
mod import;
mod keeping;
mod ls;
mod merge;
mod rm;
#[cfg(test)]
mod samples;
mod verify;

use baton_job::exit::{Failure, OK};
use clap::Subcommand;

use super::control;
use crate::connect::CoordinatorFlags;

/// List, verify, compare, copy, export, merge, import, remove and save checkpoints
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Ls(ls::Args),
    Verify(verify::Args),
    Diff(diff::Args),
    Cp(cp::Args),
    Export(export::Args),
    Import(import::Args),
    Merge(merge::Args),
    Rm(rm::Args),
    /// Save after the current step and continue training
    #[command(after_help = "\
Examples:
  baton checkpoint now
  baton watch          shows when it is durable")]
    Now {
        #[command(flatten)]
        target: CoordinatorFlags,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command and returns its exit code if it succeeded.
pub(super) async fn run(command: Command) -> Result<u8, Failure> {
    let done = match command {
        Command::Ls(args) => ls::run(args).await,
        Command::Verify(args) => verify::run(args).await,
        Command::Diff(args) => return diff::run(args).await,
        Command::Cp(args) => cp::run(args).await,
        Command::Export(args) => export::run(args).await,
        Command::Import(args) => return import::run(args).await,
        Command::Merge(args) => merge::run(args).await,
        Command::Rm(args) => rm::run(args).await,
        Command::Now { target, json } => control::checkpoint(&target, json).await,
    };
    done.map(|()| OK)
}
