//! How all ranks come to hold a checkpoint, whatever the number of ranks was that wrote it.
//!
//! Rank 0 chooses, and passes over what is damaged. Every rank reads and verifies some of the files, so that
//! each is read once, and gives what it read to the others.

use std::{
    num::NonZeroUsize,
    ops::Range,
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use baton_checkpoint::{self as checkpoint, Found, Manifest, Moves, ShardEntry, Store, slice_of};
use baton_collectives::Collective;
use baton_job::{
    Generation, Rank,
    message::{Restore, Restored, StateSource},
};
use baton_recipe::{JobSpec, progress::Progress, schedule::learning_rate};
use serde::{Deserialize, Serialize};

use crate::{
    Error, Learner,
    agree::{Agreed, Basis, Plan, Source, gather},
    saving::layout,
};

/// What rank 0 tells all ranks to do.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Read their share of this checkpoint, and tell how it went.
    Read(Box<Manifest>),
    /// Begin with this.
    Begin(Box<Plan>),
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

/// Finds the checkpoint that the [`Restore`] rule names and fills `learner` with this rank's share of it, or
/// on rank 0 with what training begins from without one.
///
/// [`Restore`]: baton_job::message::Restore
pub(crate) fn restore<L: Learner>(
    collective: &mut dyn Collective,
    learner: &mut L,
    basis: Basis<'_>,
) -> Result<Plan, Error> {
    let mut mine = match collective.rank() {
        Rank(0) => Some(Order::Begin(Box::new(choose(collective, learner, basis)?))),
        _ => None,
    };
    loop {
        match order(collective, mine.take())? {
            Order::Read(manifest) => {
                // What is wrong with it is rank 0's business.
                let _damage = read_share(basis.store, &manifest, collective, learner)?;
            }
            Order::Begin(plan) => return Ok(*plan),
        }
    }
}

/// Rank 0's word, which every rank gets.
fn order(collective: &mut dyn Collective, mine: Option<Order>) -> Result<Order, Error> {
    let orders: Vec<Option<Order>> = gather(collective, &mine)?;
    orders.into_iter().next().flatten().ok_or(Error::Bug("rank 0 does not say what to restore"))
}

/// Rank 0's part: the others follow its orders meanwhile.
fn choose<L: Learner>(
    collective: &mut dyn Collective,
    learner: &mut L,
    basis: Basis<'_>,
) -> Result<Plan, Error> {
    let Basis { spec, agenda, store, restore } = basis;
    // What makes a checkpoint unusable without being damage to it.
    let mut accepted = Ok(Vec::new());
    let mut alone = false;
    let found = store.find_by(restore, &mut |place, manifest| {
        let read = changes(manifest, spec, restore, place.location()).and_then(|changes| {
            moves(manifest, learner)?;
            // Perhaps nobody else sees a folder that a user names.
            alone = place.location() != store.location();
            if alone {
                let all: Vec<_> = manifest.shards.iter().collect();
                return Ok((
                    changes,
                    read(place, manifest, &all, Rank(0), jobs(1), learner)?.err(),
                ));
            }
            order(collective, Some(Order::Read(Box::new(manifest.clone()))))?;
            Ok((changes, read_share(place, manifest, collective, learner)?))
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
    let Some(Found { manifest, skipped, .. }) = found else {
        let position = basis.position(Progress::default(), None, Generation(0));
        let source = match spec.model.pretrained.is_empty() {
            true => Source::Seed,
            false => {
                learner.initialise()?;
                learner.load_initial()?;
                Source::One(Rank(0))
            }
        };
        return Ok(Plan { agreed: Agreed { source: StateSource::Fresh, position }, source });
    };
    let durable = Some(manifest.progress.step);
    let position = basis.position(manifest.progress.clone(), durable, manifest.generation);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let restored = Restored {
        name: manifest.name(),
        skipped,
        changes,
        world_size: manifest.world_size,
        age_seconds: since_epoch.as_secs().saturating_sub(manifest.created_unix_seconds),
        lr: learning_rate(spec, agenda, &position.progress),
        // Known when everybody has it.
        seconds: 0.0,
    };
    let source = match alone {
        true => Source::One(Rank(0)),
        false => Source::Readers(Box::new(manifest)),
    };
    Ok(Plan { agreed: Agreed { source: StateSource::Checkpoint(restored), position }, source })
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
    let read = read(store, manifest, &mine, collective.rank(), jobs(world_size), learner);
    let outcome = match &read {
        Ok(Ok(())) => Outcome::Read,
        Ok(Err(problem)) => Outcome::Damaged(problem.clone()),
        Err(error) => Outcome::Failed(error.to_string()),
    };
    let outcomes = gather(collective, &outcome)?;
    let _mine = read?;
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

/// Files that are read at a time, if all ranks are on this machine.
fn jobs(world_size: u32) -> NonZeroUsize {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    NonZeroUsize::new(cores / world_size.max(1) as usize).unwrap_or(NonZeroUsize::MIN)
}

/// Reads some of the files into `learner`, on rank 0 also what training left as it was; in words what is
/// wrong with the checkpoint, if that is why it cannot be read.
fn read<L: Learner>(
    store: &Store,
    manifest: &Manifest,
    shards: &[&ShardEntry],
    rank: Rank,
    jobs: NonZeroUsize,
    learner: &mut L,
) -> Result<Result<(), String>, Error> {
    let moves = moves(manifest, learner)?;
    let mut regions = learner.regions();
    if !moves.is_identity() {
        // What the checkpoint does not hold, as in a state that was never used.
        for region in &mut regions {
            region.buffer.copy_from_host(&vec![0.0; region.buffer.len()])?;
        }
    }
    let mut copied = Ok(());
    let mut copy = |name: &str, offset: usize, values: &[f32]| {
        for part in moves.parts(name, offset..offset + values.len()) {
            if let Some(region) = regions.iter_mut().find(|region| region.name == part.region)
                && copied.is_ok()
            {
                let mut target = region.buffer.reborrow().narrow(part.to);
                copied = target.copy_from_host(&values[part.from]);
            }
        }
    };
    let mut read = store.load(manifest, shards, jobs, &mut copy);
    if rank == FROZEN_READER && read.is_ok() {
        read = store.load_frozen(manifest, &mut copy);
    }
    copied?;
    match read {
        Ok(()) => Ok(Ok(())),
        Err(error) => Ok(Err(store.damage(error)?)),
    }
}

/// Gives every rank what the others have read.
pub(crate) fn exchange<L: Learner>(
    manifest: &Manifest,
    collective: &mut dyn Collective,
    learner: &mut L,
) -> Result<(), Error> {
    let world_size = collective.world_size();
    let moves = moves(manifest, learner)?;
    let mut regions = learner.regions();
    let mut give = |reader: Rank, region: &str, slice: Range<usize>| {
        for part in moves.parts(region, slice) {
            if let Some(region) = regions.iter_mut().find(|region| region.name == part.region) {
                collective.broadcast(reader, region.buffer.reborrow().narrow(part.to))?;
            }
        }
        Ok::<_, Error>(())
    };
    for shard in &manifest.shards {
        let reader = reader_of(shard.rank, world_size);
        for region in &manifest.regions {
            give(reader, &region.name, slice_of(region.len, shard.rank, manifest.world_size))?;
        }
    }
    for frozen in manifest.places().regions.iter().filter(|region| region.frozen) {
        give(FROZEN_READER, &frozen.name, 0..frozen.words())?;
    }
    Ok(())
}

/// Who reads what training left as it was.
const FROZEN_READER: Rank = Rank(0);

/// Who reads the file that `writer` wrote.
fn reader_of(writer: Rank, world_size: u32) -> Rank {
    Rank(writer.0 % world_size.max(1))
}

/// What affects the weights and is not as in the checkpoint's recipe.
fn changes(
    manifest: &Manifest,
    spec: &JobSpec,
    restore: &Restore,
    location: &str,
) -> Result<Vec<String>, Error> {
    let changes = spec.changes_since(&manifest.recipe);
    if changes.is_empty() || restore.allow_recipe_change {
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

/// Where the checkpoint's values belong in the learner, whose layout may be newer. A changed recipe may have
/// another model or optimizer, whose state is another one.
fn moves<L: Learner>(manifest: &Manifest, learner: &mut L) -> Result<Moves, Error> {
    Moves::between(&manifest.places(), &layout(learner)).map_err(|problems| {
        let shown = problems.iter().take(SHOWN_PROBLEMS).map(String::as_str);
        let mut shown = shown.collect::<Vec<_>>().join("; ");
        if problems.len() > SHOWN_PROBLEMS {
            shown += &format!("; and {} more", problems.len() - SHOWN_PROBLEMS);
        }
        Error::Mismatch(format!(
            "checkpoint {} does not fit this recipe's state: {shown}; model, optimizer, ema and \
             precision.compute must keep its shape; to begin with its weights alone export them and set \
             model.pretrained",
            manifest.name()
        ))
    })
}

const SHOWN_PROBLEMS: usize = 3;
