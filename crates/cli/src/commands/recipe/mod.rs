//! `baton recipe`

mod check;
pub(crate) mod diff;
mod get;
mod samples;
mod show;
mod summary;

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton_job::exit::{Failure, OK};
use baton_recipe::{JobSpec, spec};
use clap::Subcommand;
use serde::Serialize;

pub(crate) use self::samples::Samples;
use crate::failure::bad_input;

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

/// Reads a recipe file and applies changes.
pub(crate) fn read(path: &Path, overrides: &[String]) -> Result<JobSpec, Failure> {
    parsed(path, overrides).map(|(_, spec)| spec)
}

/// The text of a recipe file that is a good recipe with these changes.
pub(crate) fn checked(path: &Path, overrides: &[String]) -> Result<String, Failure> {
    parsed(path, overrides).map(|(text, _)| text)
}

fn parsed(path: &Path, overrides: &[String]) -> Result<(String, JobSpec), Failure> {
    let text = fs::read_to_string(path).map_err(|error| about(path, error))?;
    let spec = JobSpec::from_toml(&text, overrides).map_err(|error| about(path, error))?;
    Ok((text, spec))
}

/// The folder in which recipes are looked for by name.
const RECIPES: &str = "recipes";

/// A recipe file, or the one of this name in `recipes/`.
pub(crate) fn find(file_or_name: &Path) -> PathBuf {
    let named = Path::new(RECIPES).join(format!("{}.toml", file_or_name.display()));
    if !file_or_name.exists() && named.exists() { named } else { file_or_name.to_owned() }
}

/// Something is wrong with a recipe.
pub(crate) fn about(path: &Path, problem: impl std::fmt::Display) -> Failure {
    bad_input(format!("{}: {problem}", path.display()))
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
