//! `baton model`

mod import;
mod inspect;

use baton_job::exit::Failure;
use clap::Subcommand;

use crate::failure::{bad_input, failed};

/// Look into programs that torch.export wrote, and import language models
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Inspect(inspect::Args),
    Import(import::Args),
}

pub(super) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Inspect(args) => inspect::run(args),
        Command::Import(args) => import::run(args),
    }
}

/// Classifies an error: a retry may help if the machine caused it.
pub(crate) fn language_failure(error: baton_language::Error) -> Failure {
    if error.may_pass() { failed(error) } else { bad_input(error) }
}
