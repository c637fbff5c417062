//! `baton model`

mod import;
mod inspect;

use baton_job::exit::Failure;
use baton_language::StoredKind;
use clap::{Subcommand, ValueEnum};

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

/// Number format of the weights in a new model folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NewDtype {
    F32,
    F16,
    Bf16,
    Same,
}

impl NewDtype {
    /// The format; `None`: that of the model.
    pub(crate) fn kind(self) -> Option<StoredKind> {
        match self {
            Self::F32 => Some(StoredKind::F32),
            Self::F16 => Some(StoredKind::F16),
            Self::Bf16 => Some(StoredKind::Bf16),
            Self::Same => None,
        }
    }

    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Classifies an error: a retry may help if the machine caused it.
pub(crate) fn language_failure(error: baton_language::Error) -> Failure {
    if error.may_pass() { failed(error) } else { bad_input(error) }
}
