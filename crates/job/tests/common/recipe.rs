//! The recipe of every simulated job.

use baton_recipe::JobSpec;

#[path = "../../../recipe/tests/kit/mod.rs"]
mod kit;

/// Only the `cluster` section and the number of virtual ranks have an effect here.
pub(crate) fn recipe() -> JobSpec {
    kit::recipe(&["name=simulated", "train.epochs=1", "train.virtual_ranks=16"], &[])
}
