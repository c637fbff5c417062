//! `baton data`

mod bench;
mod encoding;
mod inspect;
mod split;
mod synth;
mod table;
mod tokenize;
mod verify;
mod window;
mod write;

use std::path::Path;

use baton_data::{Beton, shards::is_remote, write::Error as WriteError};
use baton_job::exit::Failure;
use clap::Subcommand;

use crate::{
    failure::{bad_input, failed},
    output,
};

/// Write, inspect, verify and measure data sets
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Write(write::Args),
    Table(table::Args),
    Window(window::Args),
    Tokenize(tokenize::Args),
    #[command(subcommand)]
    Synth(synth::Command),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Bench(bench::Args),
}

pub(super) fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Write(args) => write::run(&args),
        Command::Table(args) => table::run(args),
        Command::Window(args) => window::run(args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Synth(command) => synth::run(&command),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Bench(args) => bench::run(&args),
    }
}

/// Classifies an error: a retry may help if the machine caused it, but not if the input is wrong.
fn write_failure(error: WriteError) -> Failure {
    match error {
        WriteError::Io { operation: "open" | "read", .. } => bad_input(error),
        WriteError::Io { .. }
        | WriteError::Busy { .. }
        | WriteError::Thread(_)
        | WriteError::Jpeg(_)
        | WriteError::Ended => failed(error),
        _ => bad_input(error),
    }
}

/// An older file had names of classes, and this one has none.
fn note_other_classes(list: &Path) {
    output::note(format_args!(
        "{} was written with another file, and does not name the classes of this one: remove it",
        list.display()
    ));
}

/// Opens a file on this machine.
fn open(path: &Path) -> Result<Beton, Failure> {
    if path.to_str().is_some_and(|path| matches!(is_remote(path), Ok(true))) {
        let path = path.display();
        return Err(bad_input(format!(
            "{path} is in a bucket, which only training reads: copy the file to this machine"
        )));
    }
    Beton::open(path).map_err(failure)
}

/// Classifies an error: a retry may help if the machine caused it, but not if the data is wrong.
fn failure(error: baton_data::Error) -> Failure {
    match error {
        baton_data::Error::Thread(_)
        | baton_data::Error::Decoder(_)
        | baton_data::Error::Panicked => failed(error),
        _ => bad_input(error),
    }
}

/// Classifies an error, as the others.
pub(super) fn text_failure(error: baton_text::Error) -> Failure {
    match error {
        baton_text::Error::Write(error) => write_failure(error),
        baton_text::Error::Read(error) => failure(error),
        baton_text::Error::Thread(_) => failed(error),
        _ => bad_input(error),
    }
}

/// Parses a share.
fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("not in 0 to 1".to_owned()) }
}
