//! `baton checkpoint`

mod bar;
mod cp;
mod diff;
mod export;
mod folder;
mod import;
mod keeping;
mod ls;
mod now;
mod rm;
#[cfg(test)]
mod samples;
mod verify;

use baton_job::exit::{Failure, OK};
use clap::Subcommand;

/// List, prove, compare, copy, export, import, remove and take checkpoints
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Ls(ls::Args),
    Verify(verify::Args),
    Diff(diff::Args),
    Cp(cp::Args),
    Export(export::Args),
    Import(import::Args),
    Rm(rm::Args),
    Now(now::Args),
}

/// Runs the command; the exit code of one that did what it should.
pub(super) async fn run(command: Command) -> Result<u8, Failure> {
    let done = match command {
        Command::Ls(args) => ls::run(args).await,
        Command::Verify(args) => verify::run(args).await,
        Command::Diff(args) => return diff::run(args).await,
        Command::Cp(args) => cp::run(args).await,
        Command::Export(args) => export::run(args).await,
        Command::Import(args) => return import::run(args).await,
        Command::Rm(args) => rm::run(args).await,
        Command::Now(args) => now::run(args).await,
    };
    done.map(|()| OK)
}
