//! How all ranks come to hold a checkpoint, whatever the number of ranks was that wrote it.
//!
//! Rank 0 chooses, and passes over what is damaged. Every rank reads and verifies some of the files, so that
//! each is read once, and gives what it read to the others.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use baton_checkpoint::{self as checkpoint, Manifest, Store, slice_of};
use baton_collectives::Collective;
use baton_job::{
    Generation, JobSpec, Rank,
    message::{Restore, Restored, StateSource},
    progress::{Agenda, Progress},
    schedule::learning_rate,
};
use serde::{Deserialize, Serialize};

use crate::{
    Error, Learner,
    agree::{Agreed, Plan, Source, gather, position},
};

/// What rank 0 tells the others to do.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Read their share of this checkpoint, and tell how it went.
    Read(Box<Reading>),
    /// Begin with this, of which all was read, or else rank 0 has made it.
    Begin(Agreed),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Reading {
    location: String,
    manifest: Manifest,
}

/// How a rank's reading went.
#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Read,
    /// The checkpoint is no good.
    Damaged(String),
    /// Nothing is known of the checkpoint.
    Failed(String),
}

/// Finds the checkpoint that `restore` names and fills `learner` with this rank's share of it, or on rank 0
/// with what training begins from without one.
pub(crate) fn restore<L: Learner>(
    collective: &mut dyn Collective,
    learner: &mut L,
    spec: &JobSpec,
    agenda: &Agenda,
    store: &Store,
    restore: &Restore,
) -> Result<Plan, Error> {
    let (agreed, read) = match collective.rank() {
        Rank(0) => {
            let (agreed, read) = choose(collective, learner, spec, agenda, store, restore)?;
            let mut orders = gather(collective, &Some(Order::Begin(agreed)))?;
            match orders.swap_remove(0) {
                Some(Order::Begin(agreed)) => (agreed, read),
                _ => return Err(out_of_order()),
            }
        }
        _ => follow(collective, learner, store)?,
    };
    let source = match read {
        Some(manifest) => Source::Readers(Box::new(manifest)),
        // All ranks built the same, unless rank 0 has read a file.
        None if spec.model.pretrained.is_empty() => Source::Everybody,
        None => Source::One(Rank(0)),
    };
    Ok(Plan { agreed, source })
}

/// Rank 0's part.
fn choose<L: Learner>(
    collective: &mut dyn Collective,
    learner: &mut L,
    spec: &JobSpec,
    agenda: &Agenda,
    store: &Store,
    restore: &Restore,
) -> Result<(Agreed, Option<Manifest>), Error> {
    // What makes a checkpoint unusable without being damage to it.
    let mut accepted = Ok(Vec::new());
    let found = store.find_by(restore, &mut |store, manifest| {
        let checked = changes(manifest, spec, restore, store.location())
            .and_then(|changes| fits(manifest, learner).map(|()| changes));
        let read = checked.and_then(|changes| {
            let location = store.location().to_owned();
            let reading = Reading { location, manifest: manifest.clone() };
            gather(collective, &Some(Order::Read(Box::new(reading))))
                .and_then(|_: Vec<Option<Order>>| read_share(store, manifest, collective, learner))
                .map(|damage| (changes, damage))
        });
        match read {
            Ok((changes, damage)) => {
                accepted = Ok(changes);
                damage.map_or(Ok(()), |problem| {
                    Err(checkpoint::Error::Damaged { name: manifest.name(), problem })
                })
            }
            Err(error) => {
                accepted = Err(error);
                Ok(())
            }
        }
    })?;
    let changes = accepted?;
    let Some(found) = found else {
        learner.load_initial()?;
        let position = position(Progress::default(), None, Generation(0), agenda, restore);
        return Ok((Agreed { source: StateSource::Fresh, position }, None));
    };
    let manifest = found.manifest;
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
    Ok((Agreed { source, position }, Some(manifest)))
}

/// The part of the others: what they begin with, and the last checkpoint they read of.
fn follow<L: Learner>(
    collective: &mut dyn Collective,
    learner: &mut L,
    store: &Store,
) -> Result<(Agreed, Option<Manifest>), Error> {
    let mut last = None;
    loop {
        let orders: Vec<Option<Order>> = gather(collective, &None::<Order>)?;
        match orders.into_iter().next().flatten() {
            Some(Order::Read(reading)) => {
                let Reading { location, manifest } = *reading;
                let elsewhere = match location == store.location() {
                    true => None,
                    false => Some(Store::open_existing(&location)?),
                };
                let store = elsewhere.as_ref().unwrap_or(store);
                read_share(store, &manifest, collective, learner)?;
                last = Some(manifest);
            }
            Some(Order::Begin(agreed)) => {
                let is_read = matches!(agreed.source, StateSource::Checkpoint(_));
                return Ok((agreed, last.filter(|_| is_read)));
            }
            None => return Err(out_of_order()),
        }
    }
}

/// Reads this rank's share of the files, and tells all ranks alike what is wrong with the checkpoint.
fn read_share<L: Learner>(
    store: &Store,
    manifest: &Manifest,
    collective: &mut dyn Collective,
    learner: &mut L,
) -> Result<Option<String>, Error> {
    let world_size = collective.world_size();
    let is_mine = |rank| reader_of(rank, world_size) == collective.rank();
    let mine: Vec<_> = manifest.shards.iter().filter(|shard| is_mine(shard.rank)).collect();
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let jobs = NonZeroUsize::new(cores / world_size.max(1) as usize).unwrap_or(NonZeroUsize::MIN);

    let mut regions = learner.regions();
    let mut copied = Ok(());
    let read = store.load(manifest, &mine, jobs, &mut |name, offset, values| {
        if let Some(region) = regions.iter_mut().find(|region| region.name == name)
            && copied.is_ok()
        {
            let mut part = region.buffer.reborrow().narrow(offset..offset + values.len());
            copied = part.copy_from_host(values);
        }
    });
    let mut failure = copied.err().map(Error::from);
    let outcome = match (&failure, read) {
        (Some(error), _) => Outcome::Failed(error.to_string()),
        (None, Ok(())) => Outcome::Read,
        (None, Err(error)) => match store.damage(error) {
            Ok(problem) => Outcome::Damaged(problem),
            Err(error) => {
                let text = error.to_string();
                failure = Some(error.into());
                Outcome::Failed(text)
            }
        },
    };
    let outcomes = gather(collective, &outcome)?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    let mut damage = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Outcome::Read => {}
            Outcome::Damaged(problem) => damage = damage.or(Some(problem)),
            Outcome::Failed(problem) => return Err(Error::Peer { rank, problem }),
        }
    }
    Ok(damage)
}

/// Gives every rank what the others have read.
pub(crate) fn exchange<L: Learner>(
    manifest: &Manifest,
    collective: &mut dyn Collective,
    learner: &mut L,
) -> Result<(), Error> {
    let world_size = collective.world_size();
    for shard in &manifest.shards {
        let reader = reader_of(shard.rank, world_size);
        for region in learner.regions() {
            let slice = slice_of(region.buffer.len(), shard.rank, manifest.world_size);
            collective.broadcast(reader, region.buffer.narrow(slice))?;
        }
    }
    Ok(())
}

/// Who reads the file that `writer` wrote.
fn reader_of(writer: Rank, world_size: u32) -> Rank {
    Rank(writer.0 % world_size.max(1))
}

fn out_of_order() -> Error {
    Error::Mismatch("rank 0 does not say what to restore; this is a bug".to_owned())
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
