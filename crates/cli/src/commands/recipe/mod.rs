//! `baton recipe`

mod check;
pub(crate) mod diff;
mod get;
mod show;
mod summary;

use std::path::Path;

pub(crate) use baton_console::{
    Samples,
    recipe::{about, find, read, resolved},
};
use baton_job::exit::{Failure, OK};
use baton_recipe::spec;
use clap::Subcommand;
use serde::Serialize;

/// Look at recipes, check and compare them
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Show(show::Args),
    Check(check::Args),
    Diff(diff::Args),
    Get(get::Args),
}

/// Runs the command; the exit code of one that did what it should.
pub(super) async fn run(command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Show(args) => show::run(args).map(|()| OK),
        Command::Check(args) => check::run(args).map(|()| OK),
        Command::Diff(args) => diff::run(args),
        Command::Get(args) => get::run(args).await.map(|()| OK),
    }
}

/// All that is wrong with a recipe.
fn broken(path: &Path, faults: Vec<spec::Violation>) -> Failure {
    about(path, spec::Error::Invalid(faults))
}

/// The word that a recipe has for a choice.
fn word(choice: &impl Serialize) -> String {
    match serde_json::to_value(choice) {
        Ok(serde_json::Value::String(word)) => word,
        // A choice with values of its own.
        Ok(serde_json::Value::Object(values)) => {
            values.get("kind").and_then(|kind| kind.as_str()).unwrap_or_default().to_owned()
        }
        _ => String::new(),
    }
}
