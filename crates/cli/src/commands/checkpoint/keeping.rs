//! The retention rule of the run that wrote a store's checkpoints.

use baton_checkpoint::{Entry, PruneDecision, Retention, Store, prune_decisions};
use baton_job::{
    Generation,
    exit::Failure,
    message::{Restore, Rollback},
};
use serde::Deserialize;

use super::folder::store_failure;

/// The retention settings of a manifest's recipe. A recipe of an older Baton may lack some fields.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RetentionRecipe {
    checkpoint: RetentionSettings,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RetentionSettings {
    keep_last: u32,
    keep_best: bool,
    keep_every_epochs: u32,
}

/// All checkpoints, newest first, and the retention of the run that wrote the newest.
pub(super) fn listed(
    store: &Store,
    rollbacks: &[Rollback],
) -> Result<(Vec<Entry>, Retention), Failure> {
    let entries = store.list().map_err(store_failure)?;
    let fence = store.fence().map_err(store_failure)?;
    let newest = entries.iter().find_map(|entry| entry.state.manifest());
    let claimant = match newest {
        Some(newest) => store.claimant(newest.generation).map_err(store_failure)?,
        None => None,
    };
    let begun = claimant.and_then(|claimant| claimant.not_before);
    let retention = retention(&entries, begun, fence, rollbacks);
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

/// The retention rule by the recipe of the newest complete checkpoint, whose run removes nothing older than `begun`. If
/// that is not known, as of a copied checkpoint, it is assumed to have written all checkpoints of the same job only.
fn retention(
    entries: &[Entry],
    begun: Option<Generation>,
    fence: Generation,
    rollbacks: &[Rollback],
) -> Retention {
    let complete = || entries.iter().filter_map(|entry| entry.state.manifest());
    let newest = complete().next();
    let recipe =
        newest.and_then(|newest| serde_json::from_str::<RetentionRecipe>(&newest.recipe).ok());
    let RetentionSettings { keep_last, keep_best, keep_every_epochs } =
        recipe.unwrap_or_default().checkpoint;
    let of_job =
        complete().filter(|manifest| newest.is_some_and(|newest| newest.job == manifest.job));
    let first_of_job = || of_job.map(|manifest| manifest.generation).min().unwrap_or_default();
    let not_before = begun.unwrap_or_else(first_of_job);
    let rollbacks = rollbacks.to_vec();
    Retention {
        keep_last,
        keep_best,
        keep_every_epochs,
        restore: Restore { not_before, rollbacks, ..Restore::default() },
        generation: fence,
    }
}
