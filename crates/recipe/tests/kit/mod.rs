//! The recipe for tests of any crate; it depends only on `baton_recipe`.

#![allow(clippy::panic, reason = "a test may fail loudly")]
#![allow(dead_code, reason = "each crate uses its part")]

use baton_recipe::JobSpec;

/// A recipe with only the required values; its images do not exist.
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

/// [`RECIPE`] with two lists of changes in the form of `--set`: those of all tests in a file, and those of one test.
pub(crate) fn recipe(common: &[&str], specific: &[&str]) -> JobSpec {
    let changes: Vec<String> =
        common.iter().chain(specific).map(|&change| change.to_owned()).collect();
    match JobSpec::from_toml(RECIPE, &changes) {
        Ok(spec) => spec,
        Err(error) => panic!("{error}"),
    }
}
