//! `baton checkpoint`

mod export;
mod folder;
mod ls;
mod now;
mod verify;

use baton_job::exit::Failure;
use clap::Subcommand;

/// List, prove, export and take checkpoints
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Ls(ls::Args),
    Verify(verify::Args),
    Export(export::Args),
    Now(now::Args),
}

pub(super) async fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Ls(args) => ls::run(args).await,
        Command::Verify(args) => verify::run(args).await,
        Command::Export(args) => export::run(args).await,
        Command::Now(args) => now::run(args).await,
    }
}
