//! The retention rule of the run that wrote a store's checkpoints.

use baton_checkpoint::{Entry, PruneDecision, Retention, Store, prune_decisions};
use baton_job::{
    Generation,
    exit::Failure,
    message::{Restore, Rollback},
};
use baton_proto::v1::GetStatusResponse;
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
    let retention = retention(&entries, fence, rollbacks);
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

/// The rollbacks that a coordinator has reported.
pub(super) fn rollbacks(status: Option<&GetStatusResponse>) -> Vec<Rollback> {
    let incidents = status.map(|status| status.incidents.as_slice()).unwrap_or_default();
    incidents.iter().filter_map(|incident| incident.rollback).map(Rollback::from).collect()
}

/// The retention rule by the recipe of the newest complete checkpoint. Its run is assumed to have written all
/// checkpoints of the same job, because a checkpoint does not record whether the job took over those of another job.
fn retention(entries: &[Entry], fence: Generation, rollbacks: &[Rollback]) -> Retention {
    let complete = || entries.iter().filter_map(|entry| entry.state.manifest());
    let newest = complete().next();
    let recipe =
        newest.and_then(|newest| serde_json::from_str::<RetentionRecipe>(&newest.recipe).ok());
    let RetentionSettings { keep_last, keep_best, keep_every_epochs } =
        recipe.unwrap_or_default().checkpoint;
    let of_run =
        complete().filter(|manifest| newest.is_some_and(|newest| newest.job == manifest.job));
    let not_before = of_run.map(|manifest| manifest.generation).min().unwrap_or(Generation(0));
    let rollbacks = rollbacks.to_vec();
    Retention {
        keep_last,
        keep_best,
        keep_every_epochs,
        restore: Restore { not_before, rollbacks, ..Restore::default() },
        generation: fence,
    }
}
