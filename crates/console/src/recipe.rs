//! Recipe files, by path or by name.

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton_job::exit::Failure;
use baton_recipe::JobSpec;

use crate::failure::bad_input;

/// Reads a recipe file and applies changes.
pub fn read(path: &Path, overrides: &[String]) -> Result<JobSpec, Failure> {
    parsed(path, overrides).map(|(_, spec)| spec)
}

/// The text of a recipe file that is a good recipe with these changes.
pub fn checked(path: &Path, overrides: &[String]) -> Result<String, Failure> {
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
pub fn find(file_or_name: &Path) -> PathBuf {
    let named = Path::new(RECIPES).join(format!("{}.toml", file_or_name.display()));
    if !file_or_name.exists() && named.exists() { named } else { file_or_name.to_owned() }
}

/// Something is wrong with a recipe.
pub fn about(path: &Path, problem: impl std::fmt::Display) -> Failure {
    bad_input(format!("{}: {problem}", path.display()))
}
