//! Writes checkpoints while training continues.
//!
//! After an update on which all ranks agree, every rank copies its slice of the state, and a separate thread writes the
//! copy. The gradient's votes include whether a rank is still writing, so that all ranks detect after the same update
//! that every shard is durable. Then rank 0 writes the manifest, also in a separate thread; its creation commits the
//! checkpoint. Only one checkpoint is written at a time: a user's request that arrives meanwhile is served after the
//! current one. If the recipe asks for a checkpoint meanwhile, training waits for the current one.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use baton_checkpoint::{
    FlatRegion, Float, FrozenEntry, GuardedSteps, Manifest, RegionInfo, Retention, SaveId,
    ShardEntry, StateLayout, Store, TensorInfo,
};
use baton_collectives::Collective;
use baton_job::{
    Generation, JobId, Rank,
    message::{Commit, Restore, SaveProblem, SaveTimes},
};
use baton_recipe::{JobSpec, Step, progress::Progress};
use tracing::trace_span;

use crate::{
    Error, Learner, TrainingJob,
    agree::gather,
    learner::{Region, TensorLocation},
    profile,
    state_copy::StateCopy,
};

/// The checkpoint that is being written, and the memory for its copy of the state.
#[derive(Debug, Default)]
pub(crate) struct Saver {
    phase: SavePhase,
    spare: StateCopy,
    /// Saves of earlier generations that may still be running, for example because the store does not answer.
    abandoned: Vec<SavePhase>,
    another_requested: bool,
    /// The position after an evaluation of a state whose checkpoint may not be committed yet.
    evaluation: Option<Progress>,
    /// On rank 0: the frozen regions that it has written in this generation.
    frozen: Option<Vec<FrozenEntry>>,
    /// On rank 0: the thread that removes old checkpoints. Only a rollback and the end of the job wait for it: in a slow store
    /// it takes longer than a save.
    removal: Option<JoinHandle<()>>,
    /// What to keep in the next removal, which begins after the running one.
    next_removal: Option<Retention>,
}

#[derive(Debug, Default)]
enum SavePhase {
    #[default]
    Idle,
    /// Every rank writes its shard.
    Writing { save: Save, shard: Task<(Result<Written, SaveProblem>, StateCopy)> },
    /// Rank 0 writes the manifest; the other ranks have no thread.
    Committing { save: Save, manifest: Option<Task<Result<Commit, SaveProblem>>> },
    /// Rank 0 adds an evaluation to a committed checkpoint.
    AddingEvaluation { added: Option<(Task<Result<(), SaveProblem>>, Retention)> },
}

/// The files that a rank has written.
#[derive(Debug)]
struct Written {
    shard: ShardEntry,
    /// On rank 0: the frozen regions, unless they were written before.
    frozen: Option<Vec<FrozenEntry>>,
}

/// A running thread, or the reason why it could not be started.
type Task<T> = Result<JoinHandle<T>, SaveProblem>;

/// What is known about the checkpoint that is being written, except its shards.
#[derive(Debug)]
struct Save {
    id: SaveId,
    /// On rank 0 only: the manifest to write, and which older checkpoints to keep.
    commit: Option<(Manifest, Retention)>,
    started: Instant,
    /// Time that training was paused for the copy.
    stall: Duration,
}

impl Saver {
    /// Whether anything is being written.
    pub(crate) fn is_active(&self) -> bool {
        !matches!(self.phase, SavePhase::Idle)
    }

    /// Step of the checkpoint that is being written, and seconds since its start.
    pub(crate) fn active_save(&self) -> Option<(Step, f64)> {
        match &self.phase {
            SavePhase::Idle | SavePhase::AddingEvaluation { .. } => None,
            SavePhase::Writing { save, .. } | SavePhase::Committing { save, .. } => {
                Some((save.id.step, save.started.elapsed().as_secs_f64()))
            }
        }
    }

    /// This rank's vote: whether it is still writing, so that the others must wait before the next phase.
    pub(crate) fn is_busy(&mut self) -> bool {
        self.abandoned.retain(SavePhase::is_running);
        self.phase.is_running() || !self.abandoned.is_empty()
    }

    /// Requests another checkpoint after the current one is written.
    pub(crate) fn request_another(&mut self) {
        self.another_requested = true;
    }

    /// Whether another checkpoint was requested meanwhile; clears the request.
    pub(crate) fn take_request(&mut self) -> bool {
        std::mem::take(&mut self.another_requested)
    }

    /// Copies this rank's slice of the state after `progress` and starts to write it.
    pub(crate) fn start<L: Learner>(
        &mut self,
        learner: &mut L,
        progress: &Progress,
        id: SaveId,
        restore: &Restore,
        job: &TrainingJob,
        collective: &dyn Collective,
    ) {
        let started = Instant::now();
        // This checkpoint contains all evaluations so far.
        self.evaluation = None;
        let (rank, world_size) = (collective.rank(), collective.world_size());
        let commit = (rank == Rank(0)).then(|| {
            let manifest = draft(learner, progress, id, world_size, job.id, &job.spec);
            let manifest = Manifest { data: Some(job.inputs.summary().clone()), ..manifest };
            (manifest, retention(id.generation, restore, job))
        });
        let copying = trace_span!(target: profile::TARGET, "copy the state").entered();
        let mut copy = std::mem::take(&mut self.spare);
        let taken = copy.take(learner, rank, world_size);
        let is_due = rank == Rank(0) && self.frozen.is_none();
        let frozen = is_due.then(|| frozen_copies(learner)).transpose();
        drop(copying);
        let stall = started.elapsed();
        let store = Arc::clone(&job.store);
        // A removal would remove frozen regions to which no manifest refers yet.
        let has_frozen = matches!(&frozen, Ok(Some(copies)) if !copies.is_empty());
        let removal = self.removal.take_if(|_| has_frozen);
        let shard = spawn(move || {
            if removal.map(JoinHandle::join).is_some_and(|ended| ended.is_err()) {
                tracing::warn!("{REMOVAL_PANICKED}");
            }
            let _span = trace_span!(target: profile::TARGET, "write the state").entered();
            let write = || -> Result<Written, SaveProblem> {
                let failed = |error: baton_collectives::Error| SaveProblem::from(error.to_string());
                let frozen = taken.and(frozen).map_err(failed)?;
                let snapshot = copy.snapshot().map_err(failed)?;
                let shard = store.write_shard(&id, rank, world_size, snapshot).map_err(problem)?;
                let frozen = frozen.map(|copies| write_frozen(&store, id, copies)).transpose();
                Ok(Written { shard, frozen: frozen.map_err(problem)? })
            };
            (write(), copy)
        });
        self.phase = SavePhase::Writing { save: Save { id, commit, started, stall }, shard };
    }

    /// Ends the current phase and starts the next one; after the last one it returns the result, which is the same on
    /// all ranks. All ranks must call it after the same update. It waits for ranks that are still busy.
    pub(crate) fn advance(
        &mut self,
        job: &TrainingJob,
        collective: &mut dyn Collective,
    ) -> Result<Option<Result<Commit, SaveProblem>>, Error> {
        match std::mem::take(&mut self.phase) {
            SavePhase::Idle => Ok(None),
            SavePhase::Writing { save, shard } => {
                let (written, copy) =
                    join(shard).unwrap_or_else(|problem| (Err(problem), StateCopy::default()));
                self.spare = copy;
                let mine = written.map(|written| {
                    self.frozen = written.frozen.or(self.frozen.take());
                    written.shard
                });
                let shards: Vec<Result<ShardEntry, SaveProblem>> = gather(collective, &mine)?;
                let shards = match shards.into_iter().collect::<Result<Vec<_>, _>>() {
                    Ok(shards) => shards,
                    Err(problem) => {
                        save.discard(&job.store, &problem, collective);
                        return Ok(Some(Err(problem)));
                    }
                };
                let manifest = save.commit.clone().map(|(manifest, _)| {
                    let store = Arc::clone(&job.store);
                    let frozen = self.frozen.clone().unwrap_or_default();
                    let manifest = Manifest { shards, frozen, ..manifest };
                    let (started, stall) = (save.started, save.stall);
                    spawn(move || {
                        let _span = trace_span!(target: profile::TARGET, "commit").entered();
                        let commit = store.commit(&manifest).map_err(problem)?;
                        Ok(Commit { took: Some(save_times(started, stall)), ..commit })
                    })
                });
                self.phase = SavePhase::Committing { save, manifest };
                Ok(None)
            }
            SavePhase::Committing { save, manifest } => {
                let mine = match manifest {
                    Some(task) => join(task).and_then(|committed| committed),
                    // Rank 0 has the result.
                    None => Err(String::new().into()),
                };
                let results: Vec<Result<Commit, SaveProblem>> = gather(collective, &mine)?;
                let of_rank_0 = results.into_iter().next();
                let committed =
                    of_rank_0.unwrap_or_else(|| Err("rank 0 sent no result".to_owned().into()));
                match (&committed, save.commit) {
                    (Ok(_), Some((_, retention))) => self.remove_old(&job.store, retention),
                    (Ok(_), None) => {}
                    (Err(problem), commit) => {
                        let save = Save { commit, ..save };
                        save.discard(&job.store, problem, collective);
                        // The files of frozen regions may have been removed: write them again with the next checkpoint.
                        self.frozen = None;
                    }
                }
                Ok(Some(committed))
            }
            SavePhase::AddingEvaluation { added } => {
                match added.map(|(task, retention)| (join(task).flatten(), retention)) {
                    Some((Ok(()), retention)) => self.remove_old(&job.store, retention),
                    Some((Err(problem), _)) => {
                        tracing::warn!("a checkpoint lacks its evaluation: {}", problem.message);
                    }
                    None => {}
                }
                Ok(None)
            }
        }
    }

    /// Notes the position after an evaluation of the state of the newest checkpoint.
    pub(crate) fn note_evaluation(&mut self, progress: Progress) {
        self.evaluation = Some(progress);
    }

    /// Starts to add the noted evaluation to the committed checkpoint `to`, if it belongs to its step. `by` is the
    /// current generation and its rule for restoring.
    pub(crate) fn add_evaluation(
        &mut self,
        to: SaveId,
        by: (Generation, &Restore),
        job: &TrainingJob,
        rank: Rank,
    ) {
        if self.is_active() {
            return;
        }
        let Some(progress) = self.evaluation.take_if(|progress| progress.step == to.step) else {
            return;
        };
        let added = (rank == Rank(0)).then(|| {
            let store = Arc::clone(&job.store);
            let generation = by.0;
            let adding =
                spawn(move || store.add_evaluation(to, &progress, generation).map_err(problem));
            (adding, retention(generation, by.1, job))
        });
        self.phase = SavePhase::AddingEvaluation { added };
    }

    /// Starts to remove the checkpoints that `retention` does not keep, or does so after the removal that is running.
    fn remove_old(&mut self, store: &Arc<Store>, retention: Retention) {
        if self.removal.as_ref().is_some_and(|removal| !removal.is_finished()) {
            self.next_removal = Some(retention);
            return;
        }
        self.next_removal = None;
        self.join_removal();
        let store = Arc::clone(store);
        match spawn_named("removal", move || prune(&store, &retention)) {
            Ok(removal) => self.removal = Some(removal),
            Err(problem) => tracing::warn!("old checkpoints stay: {}", problem.message),
        }
    }

    /// Starts the removal that is due after the last one, once that has ended.
    pub(crate) fn continue_removal(&mut self, store: &Arc<Store>) {
        if let Some(retention) = self.next_removal.take() {
            self.remove_old(store, retention);
        }
    }

    fn join_removal(&mut self) {
        if self.removal.take().map(JoinHandle::join).is_some_and(|ended| ended.is_err()) {
            tracing::warn!("{REMOVAL_PANICKED}");
        }
    }

    /// Waits until the old checkpoints are removed.
    pub(crate) fn finish_removal(&mut self, store: &Store) {
        self.join_removal();
        if let Some(retention) = self.next_removal.take() {
            prune(store, &retention);
        }
    }

    /// At the end of the job, removes those too that were kept in case training has diverged; on rank 0.
    pub(crate) fn remove_at_end(
        &mut self,
        (generation, restore): (Generation, &Restore),
        job: &TrainingJob,
    ) {
        let usual = retention(generation, restore, job);
        if usual.guard.is_some() {
            self.next_removal = Some(Retention { guard: None, ..usual });
        }
    }

    /// Removes old checkpoints before a rollback, those too that an interruption has left, and waits for it on all ranks: which
    /// checkpoint training goes back to must not depend on how fast the store removes others, as long as that takes less than
    /// `cluster.collective_seconds`.
    pub(crate) fn remove_before_rollback(
        &mut self,
        (generation, restore): (Generation, &Restore),
        job: &TrainingJob,
        collective: &mut dyn Collective,
    ) -> Result<(), Error> {
        if collective.rank() == Rank(0) {
            self.next_removal = Some(retention(generation, restore, job));
            self.finish_removal(&job.store);
        }
        gather(collective, &()).map(drop)
    }

    /// Runs the remaining phases, if any, and waits for their end.
    pub(crate) fn finish(
        &mut self,
        job: &TrainingJob,
        collective: &mut dyn Collective,
    ) -> Result<Option<Result<Commit, SaveProblem>>, Error> {
        while self.is_active() {
            if let Some(result) = self.advance(job, collective)? {
                return Ok(Some(result));
            }
        }
        Ok(None)
    }

    /// Lets the current save run to its end without waiting for it. The fence decides whether it may still commit.
    pub(crate) fn abandon(&mut self) {
        self.another_requested = false;
        self.evaluation = None;
        self.frozen = None;
        self.next_removal = None;
        self.abandoned.push(std::mem::take(&mut self.phase));
    }
}

impl Save {
    /// Removes what this rank has written of a save that failed, unless a newer generation decides about it. Other ranks
    /// may already try again, perhaps under the same name, so only its own file.
    fn discard(&self, store: &Store, problem: &SaveProblem, collective: &dyn Collective) {
        if problem.fence.is_none() && !problem.exists {
            store.discard_shard(self.id, collective.rank(), collective.world_size());
        }
    }
}

impl SavePhase {
    /// Whether this rank's thread of this phase is still running.
    fn is_running(&self) -> bool {
        match self {
            Self::Idle => false,
            Self::Writing { shard, .. } => is_running(shard),
            Self::Committing { manifest, .. } => manifest.as_ref().is_some_and(is_running),
            Self::AddingEvaluation { added } => {
                added.as_ref().is_some_and(|(task, _)| is_running(task))
            }
        }
    }
}

/// Writes the state of `learner` as the checkpoint of step 0, from which a job of this recipe can start.
///
/// # Errors
/// The store holds checkpoints, or cannot be written.
pub fn write_initial_checkpoint<L: Learner>(
    learner: &mut L,
    job: JobId,
    spec: &JobSpec,
    store: &Store,
) -> Result<Commit, Error> {
    if let Some(newest) = store.list()?.first() {
        return Err(Error::Mismatch(format!(
            "{} contains checkpoints already (the newest is {}); choose an empty folder for the new run",
            store.location(),
            newest.name
        )));
    }
    let id = SaveId { generation: store.fence()?, step: Step(0) };
    let mut copy = StateCopy::default();
    copy.take(learner, Rank(0), 1)?;
    let shard = store.write_shard(&id, Rank(0), 1, copy.snapshot()?)?;
    let frozen = write_frozen(store, id, frozen_copies(learner)?)?;
    let progress = Progress { saved: Some(id.step), ..Progress::default() };
    let manifest = draft(learner, &progress, id, 1, job, spec);
    Ok(store.commit(&Manifest { shards: vec![shard], frozen, ..manifest })?)
}

/// Copy of a frozen region in host memory.
pub(crate) struct FrozenCopy {
    region: &'static str,
    float: Float,
    /// The contents as 32-bit words, whatever the number format is.
    words: Vec<f32>,
}

pub(crate) fn frozen_copies<L: Learner>(
    learner: &mut L,
) -> Result<Vec<FrozenCopy>, baton_collectives::Error> {
    let frozen = learner.regions().into_iter().filter_map(|region| {
        let float = region.frozen?;
        let words = region.buffer.to_host();
        Some(words.map(|words| FrozenCopy { region: region.name, float, words }))
    });
    frozen.collect()
}

pub(crate) fn write_frozen(
    store: &Store,
    id: SaveId,
    copies: Vec<FrozenCopy>,
) -> Result<Vec<FrozenEntry>, baton_checkpoint::Error> {
    let write = |copy: FrozenCopy| store.write_frozen(&id, copy.region, copy.float, copy.words);
    copies.into_iter().map(write).collect()
}

fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
    spawn_named("checkpoint", work)
}

fn spawn_named<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Task<T> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map_err(|error| format!("cannot start its thread ({error})").into())
}

fn is_running<T>(task: &Task<T>) -> bool {
    task.as_ref().is_ok_and(|thread| !thread.is_finished())
}

fn join<T>(task: Task<T>) -> Result<T, SaveProblem> {
    let panicked = "the thread that writes it panicked; this is a bug";
    task?.join().map_err(|_| panicked.to_owned().into())
}

fn problem(error: baton_checkpoint::Error) -> SaveProblem {
    let fence = match error {
        baton_checkpoint::Error::Fenced { fence, .. } => Some(fence),
        _ => None,
    };
    let exists = matches!(error, baton_checkpoint::Error::Exists(_));
    SaveProblem { message: error.to_string(), fence, exists }
}

/// A manifest that does not list its files yet.
pub(crate) fn draft<L: Learner>(
    learner: &mut L,
    progress: &Progress,
    id: SaveId,
    world_size: u32,
    job: JobId,
    spec: &JobSpec,
) -> Manifest {
    let StateLayout { regions, tensors } = layout(learner);
    let trained = regions.into_iter().filter(|region| !region.frozen);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Manifest {
        version: baton_checkpoint::VERSION,
        job,
        arch: spec.model.arch.name().to_owned(),
        recipe: spec.to_json(),
        generation: id.generation,
        step: progress.step,
        progress: progress.clone(),
        train_samples: None,
        data: None,
        program: learner.program().map(str::to_owned),
        seed: spec.seed,
        virtual_ranks: spec.train.virtual_ranks,
        world_size,
        layout: StateLayout::version(&tensors),
        regions: trained.map(|FlatRegion { name, len, .. }| RegionInfo { name, len }).collect(),
        frozen: Vec::new(),
        tensors,
        shards: Vec::new(),
        created_unix_seconds: since_epoch.as_secs(),
    }
}

fn retention(generation: Generation, restore: &Restore, job: &TrainingJob) -> Retention {
    Retention {
        keep_last: job.spec.checkpoint.keep_last,
        keep_best: job.spec.checkpoint.keep_best,
        keep_every_epochs: job.spec.checkpoint.keep_every_epochs,
        guard: GuardedSteps::of(&job.spec.guard),
        restore: restore.clone(),
        generation,
    }
}

fn save_times(started: Instant, stall: Duration) -> SaveTimes {
    SaveTimes { stall_seconds: stall.as_secs_f64(), seconds: started.elapsed().as_secs_f64() }
}

const REMOVAL_PANICKED: &str = "the thread that removes old checkpoints panicked; this is a bug";

fn prune(store: &Store, retention: &Retention) {
    let _span = trace_span!(target: profile::TARGET, "remove old checkpoints").entered();
    for warning in store.prune(retention).warnings {
        tracing::warn!("{warning}");
    }
}

/// The layout of the learner's state.
pub(crate) fn layout<L: Learner>(learner: &mut L) -> StateLayout {
    let regions = learner.regions();
    let flat = |region: &Region<'_>| {
        let float = region.frozen.unwrap_or_default();
        FlatRegion {
            name: region.name.to_owned(),
            float,
            len: region.buffer.len() * size_of::<f32>() / float.bytes(),
            frozen: region.frozen.is_some(),
        }
    };
    let regions = regions.iter().map(flat).collect();
    StateLayout { regions, tensors: learner.tensors().into_iter().map(tensor_info).collect() }
}

fn tensor_info(location: TensorLocation) -> TensorInfo {
    TensorInfo {
        name: location.name,
        shape: location.shape,
        region: location.region.to_owned(),
        offset: location.offset,
        channels_last: location.channels_last,
        integers: location.integers,
    }
}
