//! The retention rule of the run that wrote a store's checkpoints.

use baton_checkpoint::{
    Claimant, Entry, GuardedSteps, PruneDecision, Retention, Store, prune_decisions,
};
use baton_job::{
    Generation,
    exit::Failure,
    message::{Restore, Rollback},
};
use baton_recipe::spec::Guard;
use serde::Deserialize;

use super::folder::store_failure;

/// The retention settings of a recipe. One of an older Baton may lack some fields.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RetentionRecipe {
    checkpoint: RetentionSettings,
    guard: GuardSettings,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
struct GuardSettings {
    enabled: bool,
    window: u32,
    accuracy_collapse: f64,
}

impl Default for GuardSettings {
    fn default() -> Self {
        let Guard { enabled, window, accuracy_collapse, .. } = Guard::default();
        Self { enabled, window, accuracy_collapse }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RetentionSettings {
    keep_last: u32,
    keep_best: bool,
    keep_every_epochs: u32,
}

/// All checkpoints, newest first, and the retention of the run that used the store last.
pub(super) fn listed(
    store: &Store,
    rollbacks: &[Rollback],
) -> Result<(Vec<Entry>, Retention), Failure> {
    let entries = store.list().map_err(store_failure)?;
    let fence = store.fence().map_err(store_failure)?;
    let claimant = store.claimant(fence).map_err(store_failure)?;
    let retention = retention(&entries, claimant.as_ref(), fence, rollbacks);
    Ok((entries, retention))
}

/// All checkpoints, newest first, each with whether the next save keeps it.
pub(super) fn with_decisions(
    store: &Store,
    rollbacks: &[Rollback],
) -> Result<Vec<(Entry, PruneDecision)>, Failure> {
    let (entries, retention) = listed(store, rollbacks)?;
    let decisions = prune_decisions(&entries, &retention);
    Ok(entries.into_iter().zip(decisions).collect())
}

/// The retention rule of the claimant. Without one, as in a store of copies, it is that of the newest complete checkpoint,
/// whose job is assumed to have begun with the first of its own.
fn retention(
    entries: &[Entry],
    claimant: Option<&Claimant>,
    fence: Generation,
    rollbacks: &[Rollback],
) -> Retention {
    let complete = || entries.iter().filter_map(|entry| entry.state.manifest());
    let newest = complete().next();
    let recipes = [claimant.map(|found| &found.recipe), newest.map(|newest| &newest.recipe)];
    let recipe = recipes.into_iter().flatten().find_map(|recipe| serde_json::from_str(recipe).ok());
    let RetentionRecipe { checkpoint, guard } = recipe.unwrap_or_default();
    let GuardSettings { enabled, window, accuracy_collapse } = guard;
    let guard = Guard { enabled, window, accuracy_collapse, ..Guard::default() };
    let RetentionSettings { keep_last, keep_best, keep_every_epochs } = checkpoint;
    let of_job =
        complete().filter(|manifest| newest.is_some_and(|newest| newest.job == manifest.job));
    let first_of_job = || of_job.map(|manifest| manifest.generation).min().unwrap_or_default();
    let begun = claimant.and_then(|claimant| claimant.not_before);
    let not_before = begun.unwrap_or_else(first_of_job);
    let rollbacks = rollbacks.to_vec();
    Retention {
        keep_last,
        keep_best,
        keep_every_epochs,
        guard: GuardedSteps::of(&guard),
        restore: Restore { not_before, rollbacks, ..Restore::default() },
        generation: fence,
    }
}
