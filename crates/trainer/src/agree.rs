//! How the ranks of a new generation come to hold the same state.
//!
//! Whoever made the most updates gives its state to all: no step is lost while one rank that made it
//! lives. If nobody holds any, rank 0 reads the checkpoint that the [`Restore`] rule names and gives
//! that: whatever the number of ranks was when it was written, there is one way of taking state.

use std::{
    collections::BTreeMap,
    time::{SystemTime, UNIX_EPOCH},
};

use baton_checkpoint::{Manifest, Store};
use baton_collectives::Collective;
use baton_job::{
    Generation, JobSpec, Rank, Step,
    message::{Restore, Restored, StateSource},
    progress::{Agenda, Progress},
    schedule::learning_rate,
};
use serde::{Deserialize, Serialize};

use crate::{Error, Learner};

/// The state to begin with.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Agreed {
    pub(crate) source: StateSource,
    pub(crate) position: Position,
}

/// Where a rank stands: replicated like the state itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Position {
    pub(crate) progress: Progress,
    /// Step of the last checkpoint that was committed; `progress.saved` counts failed tries too.
    pub(crate) durable: Option<Step>,
    /// Times that training went back before: a state from before the last one counts no more.
    pub(crate) rollbacks: usize,
}

/// What was found out before any state moves.
pub(crate) struct Plan {
    pub(crate) agreed: Agreed,
    /// Who gives its state, if anybody has to.
    pub(crate) giver: Option<Rank>,
}

/// Agrees on where to begin. On rank 0 this may fill `learner` from a checkpoint.
pub(crate) fn plan<L: Learner>(
    collective: &mut dyn Collective,
    held: Option<&Position>,
    learner: &mut L,
    spec: &JobSpec,
    agenda: &Agenda,
    store: &Store,
    restore: &Restore,
) -> Result<Plan, Error> {
    let mine = held.map(|position| position.progress.step);
    let steps: Vec<Option<Step>> = gather(collective, &mine)?;
    let furthest = steps.iter().flatten().max().copied();
    let holder = steps.iter().position(|step| step.is_some() && *step == furthest);
    let root = Rank(u32::try_from(holder.unwrap_or(0)).unwrap_or_default());

    let offer = match held {
        _ if collective.rank() != root => None,
        Some(position) => {
            let source = StateSource::Survivor { rank: root };
            Some(Agreed { source, position: position.clone() })
        }
        None => Some(restored(learner, spec, agenda, store, restore)?),
    };
    let mut offers: Vec<Option<Agreed>> = gather(collective, &offer)?;
    let agreed = offers
        .get_mut(root.0 as usize)
        .and_then(Option::take)
        .ok_or_else(|| Error::Mismatch(format!("rank {root} offered no state; this is a bug")))?;
    let all_have_it = steps.iter().all(|step| step.is_some() && *step == furthest);
    // All ranks built the same, unless rank 0 has read a file.
    let fresh = agreed.source == StateSource::Fresh && spec.model.pretrained.is_empty();
    Ok(Plan { agreed, giver: (!all_have_it && !fresh).then_some(root) })
}

/// Moves the state that [`plan`] found to those who lack it.
pub(crate) fn carry_out<L: Learner>(
    giver: Option<Rank>,
    collective: &mut dyn Collective,
    learner: &mut L,
) -> Result<(), Error> {
    let Some(giver) = giver else { return Ok(()) };
    for region in learner.regions() {
        collective.broadcast(giver, region.buffer)?;
    }
    Ok(())
}

/// Every rank's value, by rank.
pub(crate) fn gather<T: Serialize + for<'de> Deserialize<'de>>(
    collective: &mut dyn Collective,
    mine: &T,
) -> Result<Vec<T>, Error> {
    let all = collective.all_gather_bytes(&serde_json::to_vec(mine)?)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(Error::from)).collect()
}

fn restored<L: Learner>(
    learner: &mut L,
    spec: &JobSpec,
    agenda: &Agenda,
    store: &Store,
    restore: &Restore,
) -> Result<Agreed, Error> {
    // What makes a checkpoint unusable without being damage to it.
    let mut accepted = Ok(Vec::new());
    let found = store.find_by(restore, &mut |store, manifest| {
        accepted = changes(manifest, spec, restore, store.location())
            .and_then(|changes| fits(manifest, learner).map(|()| changes));
        if accepted.is_err() {
            return Ok(());
        }
        let mut regions = learner.regions();
        let mut copied = Ok(());
        store.load(manifest, &mut |name, offset, values| {
            if let Some(region) = regions.iter_mut().find(|region| region.name == name)
                && copied.is_ok()
            {
                let mut part = region.buffer.reborrow().narrow(offset..offset + values.len());
                copied = part.copy_from_host(values);
            }
        })?;
        if let Err(error) = copied {
            accepted = Err(error.into());
        }
        Ok(())
    })?;
    let changes = accepted?;
    let Some(found) = found else {
        learner.load_initial()?;
        let position = position(Progress::default(), None, Generation(0), agenda, restore);
        return Ok(Agreed { source: StateSource::Fresh, position });
    };
    let manifest = &found.manifest;
    let durable = Some(manifest.progress.step);
    let position =
        position(manifest.progress.clone(), durable, manifest.generation, agenda, restore);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let source = StateSource::Checkpoint(Restored {
        name: manifest.name(),
        skipped: found.skipped,
        changes,
        world_size: manifest.world_size,
        age_seconds: since_epoch.as_secs().saturating_sub(manifest.created_unix_seconds),
        lr: learning_rate(spec, agenda, &position.progress),
        // Known when everybody has it.
        seconds: 0.0,
    });
    Ok(Agreed { source, position })
}

/// In which values that decide the weights the recipe differs from that of the checkpoint.
fn changes(
    manifest: &Manifest,
    spec: &JobSpec,
    restore: &Restore,
    location: &str,
) -> Result<Vec<String>, Error> {
    if manifest.recipe_hash == spec.recipe_hash() {
        return Ok(Vec::new());
    }
    let changes: Vec<String> = match serde_json::from_str::<JobSpec>(&manifest.recipe) {
        Ok(written_by) => {
            written_by.differences_in_weights(spec).iter().map(ToString::to_string).collect()
        }
        Err(_) => vec!["its recipe is of another version of Baton".to_owned()],
    };
    if restore.allow_recipe_change {
        return Ok(changes);
    }
    Err(Error::Mismatch(format!(
        "checkpoint {} in {location} was written by another recipe ({}): use that recipe, or another \
         checkpoint.dir, or go on with this one by --allow-recipe-change, or start anew with \
         --no-auto-resume",
        manifest.name(),
        changes.join(", ")
    )))
}

/// A changed recipe may have another model or optimizer, whose state has another shape.
fn fits<L: Learner>(manifest: &Manifest, learner: &mut L) -> Result<(), Error> {
    let regions = learner.regions();
    let mine = regions.iter().map(|region| (region.name, region.buffer.len()));
    let theirs = manifest.regions.iter().map(|region| (region.name.as_str(), region.len));
    let (mine, theirs): (BTreeMap<_, _>, BTreeMap<_, _>) = (mine.collect(), theirs.collect());
    if mine == theirs {
        return Ok(());
    }
    Err(Error::Mismatch(format!(
        "checkpoint {} holds {theirs:?} values, and this recipe's state is {mine:?}: model, optimizer, ema \
         and precision.compute must keep its shape; to begin with its weights alone export them and set \
         model.pretrained",
        manifest.name()
    )))
}

/// Where training stands with a state that `written_by` left, and what it has to do otherwise since.
fn position(
    mut progress: Progress,
    durable: Option<Step>,
    written_by: Generation,
    agenda: &Agenda,
    restore: &Restore,
) -> Position {
    for rollback in restore.rollbacks.iter().filter(|r| r.generation > written_by) {
        match rollback.skip {
            Some(batch) => progress.skips.extend(agenda.with_the_one_before(batch)),
            None => progress.lr_cuts += 1,
        }
    }
    Position { progress, durable, rollbacks: restore.rollbacks.len() }
}
