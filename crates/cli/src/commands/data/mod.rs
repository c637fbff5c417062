//! `baton data`

mod write;

use baton_job::exit::Failure;
use clap::Subcommand;

/// Make data sets
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Write(write::Args),
}

pub(super) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Write(args) => write::run(args),
    }
}
