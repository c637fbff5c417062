//! `baton recipe`

mod check;
pub(crate) mod diff;
mod ffcv;
mod get;
mod import;
mod show;
mod summary;

use std::path::Path;

pub(crate) use baton_console::{
    Samples,
    recipe::{about, find, read, resolved, text},
};
use baton_job::exit::{Failure, OK};
use baton_language::{AdapterLayout, DecoderModel, LanguageModel, model::read_decoder};
use baton_program::Program;
use baton_recipe::{JobSpec, spec};
use baton_text::Tokenizer;
use clap::Subcommand;
use serde::Serialize;

/// Show, check, compare and import recipes
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Show(show::Args),
    Check(check::Args),
    Diff(diff::Args),
    Get(get::Args),
    Import(import::Args),
}

/// Runs the command and returns its exit code if it succeeded.
pub(super) async fn run(command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Show(args) => show::run(args).map(|()| OK),
        Command::Check(args) => check::run(args).map(|()| OK),
        Command::Diff(args) => diff::run(args),
        Command::Get(args) => get::run(args).await.map(|()| OK),
        Command::Import(args) => import::run(args).map(|()| OK),
    }
}

/// The program of a recipe; `None` if its network is another one.
///
/// # Errors
/// The program cannot be read, or not be trained with this recipe.
pub(crate) fn program(spec: &JobSpec) -> Result<Option<Program>, String> {
    if !spec.model.arch.is_program() {
        return Ok(None);
    }
    let program = Program::of_recipe(spec);
    let program = program.and_then(|(program, _)| program.check_images(spec).map(|()| program));
    program.map(Some).map_err(|error| format!("model.program: {error}"))
}

/// The language model of a recipe, by its `config.json` alone, and what is trained of it; `None` if its network is another
/// one.
///
/// # Errors
/// The description cannot be read, or the adapter does not fit it.
pub(crate) fn decoder(
    spec: &JobSpec,
) -> Result<Option<(DecoderModel, Option<AdapterLayout>)>, String> {
    if !spec.model.arch.is_causal_lm() {
        return Ok(None);
    }
    let (_, decoder) = read_decoder(Path::new(&spec.model.path)).map_err(|error| {
        format!("model.path: {error}; a plan needs only this file of the model")
    })?;
    let adapter = spec.adapter.as_ref().map(|adapter| AdapterLayout::new(&decoder, adapter));
    Ok(Some((decoder, adapter.transpose()?)))
}

/// Checks the language model of a recipe, if it is on this machine.
///
/// # Errors
/// The model cannot be read, or not be trained with this recipe.
pub(crate) fn language_model(spec: &JobSpec) -> Result<(), String> {
    if !spec.model.arch.is_causal_lm() || !Path::new(&spec.model.path).exists() {
        return Ok(());
    }
    LanguageModel::of_recipe(spec).map_err(|error| format!("model.path: {error}"))?;
    if spec.evaluation.generate.is_some() {
        Tokenizer::load(&spec.model.path)
            .map_err(|error| format!("evaluation.generate: {error}"))?;
    }
    Ok(())
}

/// The error for an invalid recipe, with all its faults.
fn invalid(path: &Path, faults: Vec<spec::Violation>) -> Failure {
    about(path, spec::Error::Invalid(faults))
}

/// The name of a choice in a recipe.
fn word(choice: &impl Serialize) -> String {
    match serde_json::to_value(choice) {
        Ok(serde_json::Value::String(word)) => word,
        // A choice that has further values.
        Ok(serde_json::Value::Object(values)) => {
            values.get("kind").and_then(|kind| kind.as_str()).unwrap_or_default().to_owned()
        }
        _ => String::new(),
    }
}
