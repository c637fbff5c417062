//! Finding and reading recipe files, by path or by name.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use baton_access::bounded::{MAX_RECIPE_BYTES, read_text};
use baton_data::installed;
use baton_job::exit::Failure;
use baton_recipe::{JobSpec, spec::Resolved};

use crate::failure::bad_input;

/// Reads a recipe file and applies `overrides`, each `KEY=VALUE`.
///
/// # Errors
/// What is wrong with the recipe, in one line.
pub fn read(path: &Path, overrides: &[String]) -> Result<JobSpec, Failure> {
    resolved(path, overrides).map(|resolved| resolved.spec)
}

/// As [`read`], with the origin of each value.
///
/// # Errors
/// What is wrong with the recipe, in one line.
pub fn resolved(path: &Path, overrides: &[String]) -> Result<Resolved, Failure> {
    Resolved::read(path, overrides, text).map_err(|error| about(path, error))
}

/// The text of a recipe file.
///
/// # Errors
/// The file cannot be read, or is no text.
pub fn text(path: &Path) -> io::Result<String> {
    read_text(path, MAX_RECIPE_BYTES).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => {
            io::Error::new(error.kind(), "is not a text file; is it the recipe?")
        }
        io::ErrorKind::NotFound if is_name(path) => io::Error::new(error.kind(), unknown_name()),
        _ => error,
    })
}

fn is_name(path: &Path) -> bool {
    path.extension().is_none() && path.components().count() == 1
}

fn unknown_name() -> String {
    let here = Path::new(RECIPES);
    let folders = [Some(here.to_owned()), installed(here)];
    let entries = folders.into_iter().flatten().filter_map(|folder| fs::read_dir(folder).ok());
    let files = entries.flatten().flatten().map(|entry| entry.path());
    let recipes = files.filter(|file| file.extension().is_some_and(|kind| kind == "toml"));
    let names: BTreeSet<String> =
        recipes.filter_map(|file| Some(file.file_stem()?.to_string_lossy().into_owned())).collect();
    match names.len() {
        0 => "there is no such file, and no folder recipes/ here: name the file of a recipe"
            .to_owned(),
        _ => {
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            format!("there is no such file or recipe; recipes that have a name: {names}")
        }
    }
}

/// Folder of the recipes that can be given by name.
const RECIPES: &str = "recipes";

/// Path of a recipe given by path, or by its name in `recipes/`, here or of those that came with the programs.
pub fn find(file_or_name: &Path) -> PathBuf {
    let named = Path::new(RECIPES).join(format!("{}.toml", file_or_name.display()));
    if file_or_name.exists() {
        return file_or_name.to_owned();
    }
    let here = named.exists().then(|| named.clone());
    here.or_else(|| installed(&named)).unwrap_or_else(|| file_or_name.to_owned())
}

/// The error for a problem with a recipe.
pub fn about(path: &Path, problem: impl std::fmt::Display) -> Failure {
    bad_input(format!("{}: {problem}", path.display()))
}
