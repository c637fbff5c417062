//! `baton model`

mod inspect;

use baton_job::exit::Failure;
use clap::Subcommand;

/// Look into programs that torch.export wrote
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Inspect(inspect::Args),
}

pub(super) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Inspect(args) => inspect::run(args),
    }
}
