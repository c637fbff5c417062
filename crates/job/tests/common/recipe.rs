//! The recipe of every simulated job.

use baton_recipe::JobSpec;

/// Only the `cluster` section and the number of virtual ranks matter here.
const RECIPE: &str = r#"
name = "simulated"
[model]
arch = "resnet18"
num_classes = 10
[data]
train = "train.beton"
val = "val.beton"
[train]
epochs = 1
global_batch = 64
resolution = 32
virtual_ranks = 16
[optimizer]
kind = "sgd"
[schedule]
kind = "constant"
lr = 0.1
"#;

pub(crate) fn recipe() -> JobSpec {
    match JobSpec::from_toml(RECIPE, &[]) {
        Ok(spec) => spec,
        Err(error) => panic!("the simulation's recipe is invalid: {error}"),
    }
}
