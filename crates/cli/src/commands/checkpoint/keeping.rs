//! The rule by which the run that wrote some checkpoints keeps them.

use baton_checkpoint::{Entry, Retention, Store, Verdict, judge};
use baton_job::{
    Generation,
    exit::Failure,
    message::{Restore, Rollback},
};
use baton_proto::v1::GetStatusResponse;
use serde::Deserialize;

use super::folder::about;

/// What the recipe in a manifest says of keeping. A recipe of an older Baton may lack a field.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Recipe {
    checkpoint: Keep,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Keep {
    keep_last: u32,
    keep_best: bool,
    keep_every_epochs: u32,
}

/// All checkpoints, newest first, and the retention of the run that wrote the newest.
pub(super) fn listed(
    store: &Store,
    rollbacks: &[Rollback],
) -> Result<(Vec<Entry>, Retention), Failure> {
    let entries = store.list().map_err(about)?;
    let fence = store.fence().map_err(about)?;
    let retention = retention(&entries, fence, rollbacks);
    Ok((entries, retention))
}

/// All checkpoints, newest first, each with what becomes of it at the next save.
pub(super) fn judged(
    store: &Store,
    rollbacks: &[Rollback],
) -> Result<Vec<(Entry, Verdict)>, Failure> {
    let (entries, retention) = listed(store, rollbacks)?;
    let verdicts = judge(&entries, &retention);
    Ok(entries.into_iter().zip(verdicts).collect())
}

/// The ways back that a coordinator has told of.
pub(super) fn rollbacks(status: Option<&GetStatusResponse>) -> Vec<Rollback> {
    let incidents = status.map(|status| status.incidents.as_slice()).unwrap_or_default();
    incidents.iter().filter_map(|incident| incident.rollback).map(Rollback::from).collect()
}

/// The retention by the newest whole checkpoint's recipe. Its run is all that its job wrote: no
/// checkpoint tells whether the job took over those of another one.
fn retention(entries: &[Entry], fence: Generation, rollbacks: &[Rollback]) -> Retention {
    let whole = || entries.iter().filter_map(|entry| entry.state.manifest());
    let newest = whole().next();
    let recipe = newest.and_then(|newest| serde_json::from_str::<Recipe>(&newest.recipe).ok());
    let Keep { keep_last, keep_best, keep_every_epochs } = recipe.unwrap_or_default().checkpoint;
    let ours = whole().filter(|manifest| newest.is_some_and(|newest| newest.job == manifest.job));
    let not_before = ours.map(|manifest| manifest.generation).min().unwrap_or(Generation(0));
    let rollbacks = rollbacks.to_vec();
    Retention {
        keep_last,
        keep_best,
        keep_every_epochs,
        restore: Restore { not_before, rollbacks, ..Restore::default() },
        generation: fence,
    }
}
