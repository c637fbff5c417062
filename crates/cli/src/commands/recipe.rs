//! `baton recipe`

use std::{fs, path::Path};

use baton_job::{JobSpec, exit::Failure};
use clap::Subcommand;

use crate::{
    failure::{bad_input, failed},
    output,
};

/// Look at recipes
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Check(Check),
}

/// Check a recipe and print it with every default filled in
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe check recipes/digits_cpu.toml
  baton recipe check recipes/digits_cpu.toml --set train.epochs=3 --set cluster.device=cpu --json")]
pub(crate) struct Check {
    /// The recipe
    #[arg(value_name = "FILE")]
    recipe: std::path::PathBuf,
    /// Change one value, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Print JSON instead of TOML
    #[arg(long)]
    json: bool,
}

pub(super) fn run(Command::Check(args): &Command) -> Result<(), Failure> {
    let spec = read(&args.recipe, &args.overrides)?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&spec).map_err(|error| failed(error.to_string()))?,
        false => toml::to_string(&spec).map_err(|error| failed(error.to_string()))?,
    };
    output::line(text.trim_end());
    Ok(())
}

/// Reads a recipe file and applies changes.
pub(crate) fn read(path: &Path, overrides: &[String]) -> Result<JobSpec, Failure> {
    let named = |problem: String| bad_input(format!("{}: {problem}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
    JobSpec::from_toml(&text, overrides).map_err(|error| named(error.to_string()))
}
