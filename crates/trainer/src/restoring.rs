//! Restores a checkpoint on all ranks, for any number of ranks that wrote it.
//!
//! Rank 0 chooses the checkpoint and skips damaged ones. Every rank reads and verifies some of the files, so that each
//! file is read once, and sends what it read to the others. A local checkpoint that is newer than all in the store is read
//! by one rank of its machine.

use std::{
    cell::Cell,
    cmp::Reverse,
    num::NonZeroUsize,
    ops::Range,
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use baton_checkpoint::{
    self as checkpoint, LayoutMapping, Manifest, ResumePoint, SaveId, ShardEntry, Store, slice_of,
};
use baton_collectives::Collective;
use baton_job::{
    Generation, Rank,
    message::{Restored, StateSource},
};
use baton_recipe::{
    progress::{Outdated, Progress},
    schedule::learning_rate,
};
use serde::{Deserialize, Serialize};

use crate::{
    BuildLearner, Error, Learner, TrainingJob,
    agree::{AgreedState, RestoreContext, RestorePlan, StateProvider, gather},
    local_saves::{FoundCheckpoint, FoundLocally},
    saving::layout,
};

/// Command of rank 0 to all ranks.
#[derive(Debug, Serialize, Deserialize)]
enum RestoreCommand {
    /// Read your share of this checkpoint and report the result.
    Read(Box<Manifest>),
    /// This rank reads the local checkpoint of this number that it has offered; report the result.
    ReadLocal(Rank, usize),
    /// Begin training with this state.
    Begin(Box<RestorePlan>),
}

/// The local checkpoints that a machine has, each with its node: those that training could continue from, and damaged ones
/// with the reason.
#[derive(Debug, Serialize, Deserialize)]
struct LocalOffer {
    usable: Vec<(SaveId, String)>,
    damaged: Vec<(SaveId, String, String)>,
}

/// Result of reading a rank's share of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
enum ReadResult {
    Read,
    /// The checkpoint is damaged or incomplete.
    Damaged(String),
    /// The read failed for a reason that is not the checkpoint.
    Failed(String),
}

/// Finds the checkpoint that the [`Restore`] rule names and loads this rank's share of it into `learner`. Without a
/// checkpoint, rank 0 sets the initial state.
///
/// [`Restore`]: baton_job::message::Restore
pub(crate) fn restore<L: Learner>(
    collective: &mut dyn Collective,
    (learner, build): (&mut L, &BuildLearner<L>),
    context: RestoreContext<'_>,
) -> Result<RestorePlan, Error> {
    let (mut offers, mut found) = (Vec::new(), FoundLocally::default());
    if context.job.spec.checkpoint.has_local() {
        found = context.local.find(context.job, context.restore);
        let usable = found.usable.iter().map(|found| (found.manifest.id(), found.node.clone()));
        let offer = LocalOffer { usable: usable.collect(), damaged: found.damaged };
        offers = gather(collective, &offer)?;
    }
    let local = LocalReader { offered: found.usable, build, has_read: Cell::new(false) };
    let mut mine = match collective.rank() {
        Rank(0) => {
            let plan = choose((offers, &local), collective, learner, context)?;
            Some(RestoreCommand::Begin(Box::new(plan)))
        }
        _ => None,
    };
    loop {
        match exchange_command(collective, mine.take())? {
            RestoreCommand::Read(manifest) => {
                // Rank 0 decides what to do about damage.
                let _damage = read_share(&context.job.store, &manifest, collective, learner)?;
            }
            RestoreCommand::ReadLocal(holder, number) => {
                let _damage = local.read((holder, number), collective, learner)?;
            }
            RestoreCommand::Begin(plan) => {
                if matches!(plan.provider, StateProvider::Seed) {
                    local.renew(learner)?;
                }
                return Ok(*plan);
            }
        }
    }
}

/// Sends the command of rank 0 to all ranks; the other ranks pass `None`.
fn exchange_command(
    collective: &mut dyn Collective,
    mine: Option<RestoreCommand>,
) -> Result<RestoreCommand, Error> {
    let commands: Vec<Option<RestoreCommand>> = gather(collective, &mine)?;
    commands.into_iter().next().flatten().ok_or(Error::Bug("rank 0 sent no restore command"))
}

/// Rank 0 chooses the checkpoint; meanwhile the other ranks follow its commands. A local checkpoint that a machine `offers`
/// is used if it is newer than all good ones in the store.
fn choose<L: Learner>(
    (offers, local): (Vec<LocalOffer>, &LocalReader<'_, L>),
    collective: &mut dyn Collective,
    learner: &mut L,
    context: RestoreContext<'_>,
) -> Result<RestorePlan, Error> {
    let (mut usable, mut damaged) = (Vec::new(), Vec::new());
    for (rank, offer) in (0..).map(Rank).zip(offers) {
        let checkpoints = (0..).zip(offer.usable);
        usable.extend(checkpoints.map(|(number, (id, node))| LocalChoice {
            holder: (rank, number),
            node,
            id,
        }));
        damaged.extend(offer.damaged);
    }
    if usable.is_empty() && damaged.is_empty() {
        return choose_in_store(local, collective, learner, context);
    }
    usable.sort_by_key(|local| (Reverse(local.id), local.holder));
    let mut gone = Vec::new();
    // By their sizes only: who reads a newest one need not read the others.
    let in_store = match context.job.store.find(context.restore, &mut |_, _| Ok(())) {
        Ok(found) => found.filter(|found| found.other_store.is_none()),
        Err(checkpoint::Error::NoUsableCheckpoint { .. }) => None,
        Err(checkpoint::Error::CheckpointsGone { name, location }) => {
            // The store is lost, or its disk is not there: what a machine has is used if nothing is lost by that.
            gone.push(checkpoint::gone(&name, &location));
            let saved = context.restore.last_saved.map(|(_, step)| step);
            usable.retain(|local| Some(local.id.step) >= saved);
            None
        }
        Err(error) => return Err(error.into()),
    };
    let mut take_newer = |than: Option<SaveId>| -> Vec<_> {
        usable.extract_if(.., |local| Some(local.id) > than).collect()
    };
    let in_store = in_store.map(|found| found.manifest.id());
    damaged.sort();
    damaged.dedup();
    let describe =
        |(id, node, problem): (SaveId, String, String)| (id, describe_local(id, &node, &problem));
    let mut skipped: Vec<(SaveId, String)> = damaged.into_iter().map(describe).collect();
    let newer = take_newer(in_store);
    let rule = (local, in_store, &mut skipped);
    if let Some(mut plan) = choose_local(newer, rule, collective, learner, context)? {
        name_skipped(&mut plan, &skipped, &gone);
        return Ok(plan);
    }
    let stored = choose_in_store(local, collective, learner, context);
    let (best_in_store, skipped_in_store) = match &stored {
        Ok(plan) => match &plan.agreed.source {
            StateSource::Checkpoint(found) => (SaveId::parse(&found.name), found.skipped.clone()),
            StateSource::Fresh { .. } | StateSource::Survivor { .. } => (None, Vec::new()),
        },
        Err(Error::Checkpoint(checkpoint::Error::NoUsableCheckpoint {
            skipped: damaged, ..
        })) => (None, damaged.clone()),
        Err(_) => return stored,
    };
    // Newer ones in the store were damaged.
    let newer = if best_in_store < in_store { take_newer(best_in_store) } else { Vec::new() };
    let has_newer = !newer.is_empty();
    let rule = (local, best_in_store, &mut skipped);
    if let Some(mut plan) = choose_local(newer, rule, collective, learner, context)? {
        name_skipped(&mut plan, &skipped, &skipped_in_store);
        return Ok(plan);
    }
    let mut plan = match has_newer {
        // What ranks had read of the one in the store was overwritten.
        true => choose_in_store(local, collective, learner, context)?,
        false => stored?,
    };
    name_skipped(&mut plan, &skipped, &skipped_in_store);
    Ok(plan)
}

/// Names the checkpoints that were skipped for that of the plan: local ones that are newer, or copies of it on other nodes,
/// and those of the store.
fn name_skipped(plan: &mut RestorePlan, local: &[(SaveId, String)], in_store: &[String]) {
    let (used, has_copies, named) = match &mut plan.agreed.source {
        StateSource::Checkpoint(restored) => {
            (SaveId::parse(&restored.name), restored.local_of.is_some(), &mut restored.skipped)
        }
        StateSource::Fresh { skipped } => (None, false, skipped),
        StateSource::Survivor { .. } => return,
    };
    let is_named = |id: SaveId| Some(id) > used || (has_copies && Some(id) == used);
    let local = local.iter().filter(|(id, _)| is_named(*id)).map(|(_, text)| text);
    *named = local.chain(in_store).cloned().collect();
}

/// A local checkpoint: the rank that has offered it and its number there.
struct LocalChoice {
    holder: (Rank, usize),
    node: String,
    id: SaveId,
}

/// Text for a local checkpoint that cannot be used.
fn describe_local(id: SaveId, node: &str, problem: &str) -> String {
    format!("{} of node {node} ({problem})", id.name())
}

/// The reader, the newest good checkpoint in the store, and what cannot be used.
type LocalRule<'a, 'b, L> = (&'a LocalReader<'b, L>, Option<SaveId>, &'a mut Vec<(SaveId, String)>);

/// The first of these local checkpoints that can be used, if one can; the newest good one in the store is `in_store`.
fn choose_local<L: Learner>(
    newest: Vec<LocalChoice>,
    (local, in_store, skipped): LocalRule<'_, '_, L>,
    collective: &mut dyn Collective,
    learner: &mut L,
    context: RestoreContext<'_>,
) -> Result<Option<RestorePlan>, Error> {
    for LocalChoice { holder, node, id } in newest {
        exchange_command(collective, Some(RestoreCommand::ReadLocal(holder.0, holder.1)))?;
        let (manifest, damage) = local.read(holder, collective, learner)?;
        let program = learner.program().map(str::to_owned);
        // As with one in the store: training does not begin anew because the recipe is another one.
        let location = format!("the local checkpoints of node {node}");
        let changes = changes(&manifest, context, program.as_deref(), &location)?;
        moves(&manifest, learner)?;
        if let Some(problem) = damage {
            // Nodes that share a disk offer the same ones.
            let text = (id, describe_local(id, &node, &problem));
            if !skipped.contains(&text) {
                skipped.push(text);
            }
            continue;
        }
        let provider = StateProvider::One(holder.0);
        let mut plan = plan(&manifest, manifest.generation, changes, provider, context);
        // As if its save in the store had been lost: it is saved there first.
        let position = &mut plan.agreed.position;
        (position.progress.saved, position.durable) = (Some(position.progress.step), in_store);
        if let StateSource::Checkpoint(restored) = &mut plan.agreed.source {
            restored.local_of = Some(node);
        }
        return Ok(Some(plan));
    }
    Ok(None)
}

/// Rank 0 chooses the checkpoint in the store.
fn choose_in_store<L: Learner>(
    local: &LocalReader<'_, L>,
    collective: &mut dyn Collective,
    learner: &mut L,
    context: RestoreContext<'_>,
) -> Result<RestorePlan, Error> {
    let RestoreContext { job: TrainingJob { spec, store, .. }, restore, .. } = context;
    // Ok: the recipe's changes since the checkpoint. Err: the checkpoint is intact but cannot be used.
    let mut accepted = Ok((Vec::new(), Outdated::Nothing));
    let mut alone = false;
    let program = learner.program().map(str::to_owned);
    let found = store.find(restore, &mut |found_in, manifest| {
        let location = found_in.location();
        let read = changes(manifest, context, program.as_deref(), location).and_then(|changes| {
            moves(manifest, learner)?;
            // Other ranks may have no access to a folder that a user names.
            alone = found_in.location() != store.location();
            if alone {
                let all: Vec<_> = manifest.shards.iter().collect();
                return Ok((
                    changes,
                    read(found_in, manifest, &all, Rank(0), jobs(1), learner)?.err(),
                ));
            }
            exchange_command(collective, Some(RestoreCommand::Read(Box::new(manifest.clone()))))?;
            Ok((changes, read_share(found_in, manifest, collective, learner)?))
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
    let (changes, outdated) = accepted?;
    let Some(ResumePoint { manifest, other_store, skipped }) = found else {
        local.renew(learner)?;
        let begin = Progress { pointwise: learner.measure_pointwise()?, ..Progress::default() };
        let position = context.position(begin, None, Generation(0));
        let provider = match spec.model.pretrained.is_empty() {
            true => StateProvider::Seed,
            false => {
                learner.initialise()?;
                learner.load_initial()?;
                StateProvider::One(Rank(0))
            }
        };
        let agreed = AgreedState { source: StateSource::fresh(), position };
        return Ok(RestorePlan { agreed, provider });
    };
    // The generations of another store are not those of this run: it has none of this run's rollbacks.
    let written_by = other_store.as_ref().map_or(manifest.generation, |_| Generation(0));
    let provider = match alone {
        true => StateProvider::One(Rank(0)),
        false => StateProvider::Readers(Box::new(manifest.clone())),
    };
    let mut plan = plan(&manifest, written_by, (changes, outdated), provider, context);
    if let StateSource::Checkpoint(restored) = &mut plan.agreed.source {
        restored.skipped = skipped;
        let is_own = other_store.is_none() && manifest.job == context.job.id;
        restored.commit = is_own.then(|| manifest.to_commit());
    }
    Ok(plan)
}

/// The plan to begin with a checkpoint of generation `written_by` of this store.
fn plan(
    manifest: &Manifest,
    written_by: Generation,
    (changes, outdated): (Vec<String>, Outdated),
    provider: StateProvider,
    context: RestoreContext<'_>,
) -> RestorePlan {
    let TrainingJob { id, spec, inputs, .. } = context.job;
    let mut progress = manifest.progress.clone();
    let is_evaluated = progress.evaluated_at == Some(progress.step);
    progress.discard(outdated);
    if manifest.job != *id {
        // That job has reported its own evaluations.
        progress.newest_evaluations.clear();
    }
    let has_moved = inputs.plan().end_used_up_epoch(&mut progress);
    // The next evaluation belongs in a checkpoint of this run: that of the other recipe keeps its own.
    let saves_again = has_moved || (is_evaluated && outdated == Outdated::Evaluations);
    if saves_again {
        progress.saved = None;
    }
    let durable = (!saves_again).then(|| manifest.id());
    let position = context.position(progress, durable, written_by);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let restored = Restored {
        name: manifest.name(),
        local_of: None,
        skipped: Vec::new(),
        changes,
        world_size: manifest.world_size,
        age_seconds: since_epoch.as_secs().saturating_sub(manifest.created_unix_seconds),
        lr: learning_rate(spec, inputs.plan(), &position.progress),
        // Set once every rank has the state.
        seconds: 0.0,
        commit: None,
    };
    let agreed = AgreedState { source: StateSource::Checkpoint(restored), position };
    RestorePlan { agreed, provider }
}

/// What a rank needs to read the local checkpoints that it has offered.
struct LocalReader<'a, L: Learner> {
    offered: Vec<FoundCheckpoint>,
    build: &'a BuildLearner<L>,
    /// Whether the learner has values of a local checkpoint.
    has_read: Cell<bool>,
}

impl<L: Learner> LocalReader<'_, L> {
    /// Reads the whole state of a checkpoint on the rank that has offered it as this number. All ranks get the same result: the manifest, and
    /// what is wrong, if anything: the learner has no valid state then.
    fn read(
        &self,
        (holder, number): (Rank, usize),
        collective: &mut dyn Collective,
        learner: &mut L,
    ) -> Result<(Manifest, Option<String>), Error> {
        let mine = self.offered.get(number).filter(|_| collective.rank() == holder);
        let manifests: Vec<Option<Manifest>> =
            gather(collective, &mine.map(|mine| mine.manifest.clone()))?;
        let read = mine.map_or(Ok(Ok(())), |FoundCheckpoint { manifest, store, .. }| {
            let all: Vec<_> = manifest.shards.iter().collect();
            match read(store, manifest, &all, FROZEN_READER, jobs(1), learner) {
                // No damage of a local checkpoint ends a job: the store has an older one. `choose_local` reports a
                // state that does not fit.
                Err(error @ (Error::Checkpoint(_) | Error::Mismatch(_))) => {
                    Ok(Err(error.to_string()))
                }
                read => read,
            }
        });
        let damage = share_result(read, collective)?;
        self.has_read.set(self.has_read.get() || mine.is_some());
        let manifest = manifests.into_iter().nth(holder.0 as usize).flatten();
        let manifest = manifest.ok_or(Error::Bug("the holder of a local checkpoint sent none"))?;
        Ok((manifest, damage))
    }

    /// Makes the learner one that was never used: training begins anew.
    fn renew(&self, learner: &mut L) -> Result<(), Error> {
        if !self.has_read.take() {
            return Ok(());
        }
        let new = (self.build)()?;
        if new.program() != learner.program() {
            return Err(Error::Mismatch(
                "the file of the network was replaced while the job started: start it again"
                    .to_owned(),
            ));
        }
        *learner = new;
        Ok(())
    }
}

/// Reads this rank's share of the files. All ranks get the same result: the checkpoint's damage, if any.
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
    share_result(read, collective)
}

/// The damage that any rank has found while it read.
fn share_result(
    read: Result<Result<(), String>, Error>,
    collective: &mut dyn Collective,
) -> Result<Option<String>, Error> {
    let result = match &read {
        Ok(Ok(())) => ReadResult::Read,
        Ok(Err(problem)) => ReadResult::Damaged(problem.clone()),
        Err(error) => ReadResult::Failed(error.to_string()),
    };
    let results = gather(collective, &result)?;
    let _mine = read?;
    let mut damage = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            ReadResult::Read => {}
            ReadResult::Damaged(problem) => damage = damage.or(Some(problem)),
            ReadResult::Failed(problem) => return Err(Error::Peer { rank, problem }),
        }
    }
    Ok(damage)
}

/// Number of files to read at a time, assuming that all ranks are on this machine.
fn jobs(world_size: u32) -> NonZeroUsize {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    NonZeroUsize::new(cores / world_size.max(1) as usize).unwrap_or(NonZeroUsize::MIN)
}

/// Reads some of the files into `learner`, on rank 0 also the frozen regions. The inner error describes what is
/// damaged, if the checkpoint is the reason for a failure.
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
        // Zero where the checkpoint has no values, as in a state that was never used.
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

/// Sends the values that each rank has read to all other ranks.
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
    for frozen in manifest.state_layout().regions.iter().filter(|region| region.frozen) {
        give(FROZEN_READER, &frozen.name, 0..frozen.words())?;
    }
    Ok(())
}

/// The rank that reads the frozen regions.
const FROZEN_READER: Rank = Rank(0);

/// The rank that reads the file that `writer` wrote.
fn reader_of(writer: Rank, world_size: u32) -> Rank {
    Rank(writer.0 % world_size.max(1))
}

/// Differences between the checkpoint's recipe and data and these ones that affect the weights, and which of its results
/// they outdate.
fn changes(
    manifest: &Manifest,
    context: RestoreContext<'_>,
    program: Option<&str>,
    location: &str,
) -> Result<(Vec<String>, Outdated), Error> {
    let RestoreContext { job: TrainingJob { id, spec, inputs, .. }, restore, .. } = context;
    let mut changes = spec.changes_since(&manifest.recipe);
    let mut outdated = manifest.outdated_in(spec, Some(inputs.summary()), program);
    if manifest.program.as_deref().is_some_and(|digest| program != Some(digest)) {
        changes.push(format!("the network in {} is another one", spec.model.definition()));
    }
    let (data, samples) = (inputs.summary(), inputs.plan().samples);
    let sets = manifest.data.iter().flat_map(|saved| {
        let train = data.train.difference(&saved.train);
        let val = data.val.difference(&saved.val);
        [("training", &spec.data.train, train), ("validation", &spec.data.val, val)]
    });
    for (name, set, difference) in sets {
        if let Some(difference) = difference {
            changes.push(format!("the {name} set {set} has {difference}"));
        }
    }
    if let Some(before) = manifest.train_samples.filter(|before| *before != samples) {
        let set = &spec.data.train;
        changes.push(format!("the training set {set} has {samples} samples instead of {before}"));
        outdated = outdated.max(Outdated::Loss);
    }
    // What changed since this run's own checkpoints was not there when the user allowed changes.
    let is_allowed = restore.allow_recipe_change && manifest.job != *id;
    if changes.is_empty() || is_allowed {
        return Ok((changes, outdated));
    }
    Err(Error::Mismatch(format!(
        "checkpoint {} in {location} was written by another recipe ({}): use that recipe, or another \
         checkpoint.dir, or continue from this one with --allow-recipe-change, or start a new run with \
         --no-auto-resume",
        manifest.name(),
        changes.join(", ")
    )))
}

/// Positions of the checkpoint's values in the learner, whose layout may be newer. Fails if a changed recipe has
/// another model or optimizer, whose state has another shape.
fn moves<L: Learner>(manifest: &Manifest, learner: &mut L) -> Result<LayoutMapping, Error> {
    LayoutMapping::between(&manifest.state_layout(), &layout(learner)).map_err(|problems| {
        let shown = problems.iter().take(SHOWN_PROBLEMS).map(String::as_str);
        let mut shown = shown.collect::<Vec<_>>().join("; ");
        if problems.len() > SHOWN_PROBLEMS {
            shown += &format!("; and {} more", problems.len() - SHOWN_PROBLEMS);
        }
        Error::Mismatch(format!(
            "checkpoint {} does not fit this recipe's state: {shown}; model, optimizer, ema and \
             precision.compute must keep its shape; to begin with its weights alone, export them and \
             set model.pretrained",
            manifest.name()
        ))
    })
}

const SHOWN_PROBLEMS: usize = 3;
