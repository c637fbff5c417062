//! The recipe of tests, for any crate: it needs `baton_recipe` alone.

#![allow(clippy::panic, reason = "a test may fail loudly")]
#![allow(dead_code, reason = "each crate uses its part")]

use baton_recipe::JobSpec;

/// No more than a recipe must say, of images that are not there.
pub(crate) const RECIPE: &str = r#"
name = "demo"
[model]
arch = "resnet18"
num_classes = 10
[data]
train = "train.beton"
val = "val.beton"
[train]
epochs = 2
global_batch = 64
resolution = 32
[optimizer]
kind = "sgd"
momentum = 0.9
[schedule]
kind = "constant"
lr = 0.1
"#;

/// [`RECIPE`] with two lists of changes, as `--set` makes them: those of all tests of a file, and of one.
pub(crate) fn recipe(of_all: &[&str], of_one: &[&str]) -> JobSpec {
    let changes: Vec<String> = of_all.iter().chain(of_one).map(|&one| one.to_owned()).collect();
    match JobSpec::from_toml(RECIPE, &changes) {
        Ok(spec) => spec,
        Err(error) => panic!("{error}"),
    }
}
