//! Recipe files, by path or by name.

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton_job::exit::Failure;
use baton_recipe::{JobSpec, spec::Resolved};

use crate::failure::bad_input;

/// Reads a recipe file and applies changes.
///
/// # Errors
/// What is wrong with it, in one line.
pub fn read(path: &Path, overrides: &[String]) -> Result<JobSpec, Failure> {
    resolved(path, overrides).map(|resolved| resolved.spec)
}

/// As [`read`], and where its values come from.
///
/// # Errors
/// As there.
pub fn resolved(path: &Path, overrides: &[String]) -> Result<Resolved, Failure> {
    Resolved::read(path, overrides, |path| fs::read_to_string(path))
        .map_err(|error| about(path, error))
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
