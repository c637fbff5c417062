//! Writing checkpoints while training goes on.
//!
//! After an agreed update every rank copies its slice of the state, and a thread of its own writes the
//! copy. Whether a rank is still at it travels with the gradient, so that all learn after the same update
//! that every shard is durable. Then rank 0 writes the manifest, which is the commit, in the same manner.
//! One checkpoint is written at a time: who wishes one meanwhile gets the state after this one's end, and for
//! one that the recipe asks for training waits.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use baton_checkpoint::{
    Flat, Float, FrozenEntry, Layout, Manifest, RegionInfo, Retention, SaveId, ShardEntry, Store,
    TensorInfo,
};
use baton_collectives::Collective;
use baton_job::{
    JobId, Rank,
    message::{Commit, Restore, SaveProblem, SaveTimes},
};
use baton_recipe::{JobSpec, Step, progress::Progress};

use crate::{
    Error, Job, Learner,
    agree::gather,
    learner::{Region, TensorPlace},
    state_copy::StateCopy,
};

/// The checkpoint that is being written, and the memory that it is written from.
#[derive(Debug, Default)]
pub(crate) struct Saver {
    phase: Phase,
    spare: StateCopy,
    /// Of generations that ended, possibly behind a store that does not answer.
    abandoned: Vec<Phase>,
    wanted: bool,
    /// What rank 0 has written in this generation of what training leaves as it is.
    frozen: Option<Vec<FrozenEntry>>,
}

#[derive(Debug, Default)]
enum Phase {
    #[default]
    Idle,
    /// Every rank writes its shard.
    Writing { save: Save, shard: Task<(Result<Written, SaveProblem>, StateCopy)> },
    /// Rank 0 writes the manifest; nobody else has a thread.
    Committing { save: Save, manifest: Option<Task<Result<Commit, SaveProblem>>> },
}

/// A rank's files.
#[derive(Debug)]
struct Written {
    shard: ShardEntry,
    /// On rank 0, if that was not written before.
    frozen: Option<Vec<FrozenEntry>>,
}

/// A thread, or why there is none.
type Task<T> = Result<JoinHandle<T>, SaveProblem>;

/// What all of a checkpoint but its shards is made of.
#[derive(Debug)]
struct Save {
    step: Step,
    /// On rank 0 alone.
    commit: Option<(Manifest, Retention)>,
    began: Instant,
    /// How long training stood still for it.
    stall: Duration,
}

impl Saver {
    /// Whether a checkpoint is being written.
    pub(crate) fn is_at_work(&self) -> bool {
        self.at_work_on().is_some()
    }

    /// The checkpoint that is being written, and seconds since its beginning.
    pub(crate) fn at_work_on(&self) -> Option<(Step, f64)> {
        match &self.phase {
            Phase::Idle => None,
            Phase::Writing { save, .. } | Phase::Committing { save, .. } => {
                Some((save.step, save.began.elapsed().as_secs_f64()))
            }
        }
    }

    /// This rank's vote: whether the others have to wait for it before the next phase.
    pub(crate) fn is_busy(&mut self) -> bool {
        self.abandoned.retain(Phase::is_running);
        self.phase.is_running() || !self.abandoned.is_empty()
    }

    /// Asks for a checkpoint once this one is written.
    pub(crate) fn want_another(&mut self) {
        self.wanted = true;
    }

    /// Whether one was asked for meanwhile; the question answers the wish.
    pub(crate) fn take_wish(&mut self) -> bool {
        std::mem::take(&mut self.wanted)
    }

    /// Copies this rank's slice of the state after `progress` and begins to write it.
    pub(crate) fn start<L: Learner>(
        &mut self,
        learner: &mut L,
        progress: &Progress,
        id: SaveId,
        restore: &Restore,
        job: &Job,
        collective: &dyn Collective,
    ) {
        let began = Instant::now();
        let (rank, world_size) = (collective.rank(), collective.world_size());
        let commit = (rank == Rank(0)).then(|| {
            let manifest = draft(learner, progress, id, world_size, job.id, &job.spec);
            (manifest, retention(id, restore, job))
        });
        let mut copy = std::mem::take(&mut self.spare);
        let taken = copy.take(learner, rank, world_size);
        let is_due = rank == Rank(0) && self.frozen.is_none();
        let frozen = is_due.then(|| frozen_copies(learner)).transpose();
        let stall = began.elapsed();
        let store = Arc::clone(&job.store);
        let shard = spawn(move || {
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
        self.phase = Phase::Writing { save: Save { step: id.step, commit, began, stall }, shard };
    }

    /// The next phase, or the end, told to all ranks alike. To be called by all after the same update,
    /// when none is busy; waits for those that are.
    pub(crate) fn advance(
        &mut self,
        job: &Job,
        collective: &mut dyn Collective,
    ) -> Result<Option<Result<Commit, SaveProblem>>, Error> {
        match std::mem::take(&mut self.phase) {
            Phase::Idle => Ok(None),
            Phase::Writing { save, shard } => {
                let (written, copy) =
                    joined(shard).unwrap_or_else(|problem| (Err(problem), StateCopy::default()));
                self.spare = copy;
                let mine = written.map(|written| {
                    self.frozen = written.frozen.or(self.frozen.take());
                    written.shard
                });
                let shards: Vec<Result<ShardEntry, SaveProblem>> = gather(collective, &mine)?;
                let shards = match shards.into_iter().collect::<Result<Vec<_>, _>>() {
                    Ok(shards) => shards,
                    Err(problem) => return Ok(Some(Err(problem))),
                };
                let manifest = save.commit.clone().map(|(manifest, retention)| {
                    let store = Arc::clone(&job.store);
                    let frozen = self.frozen.clone().unwrap_or_default();
                    let manifest = Manifest { shards, frozen, ..manifest };
                    let (began, stall) = (save.began, save.stall);
                    spawn(move || {
                        let commit = store.commit(&manifest).map_err(problem)?;
                        let took = took(began, stall);
                        prune(&store, &retention);
                        Ok(Commit { took: Some(took), ..commit })
                    })
                });
                self.phase = Phase::Committing { save, manifest };
                Ok(None)
            }
            Phase::Committing { save: _, manifest } => {
                let mine = match manifest {
                    Some(task) => joined(task).and_then(|committed| committed),
                    // Told below by rank 0.
                    None => Err(String::new().into()),
                };
                let results: Vec<Result<Commit, SaveProblem>> = gather(collective, &mine)?;
                let of_rank_0 = results.into_iter().next();
                let committed =
                    of_rank_0.unwrap_or_else(|| Err("rank 0 told no result".to_owned().into()));
                if committed.is_err() {
                    // Perhaps somebody has removed it.
                    self.frozen = None;
                }
                Ok(Some(committed))
            }
        }
    }

    /// Goes through the phases that are left, if any.
    pub(crate) fn finish(
        &mut self,
        job: &Job,
        collective: &mut dyn Collective,
    ) -> Result<Option<Result<Commit, SaveProblem>>, Error> {
        while self.is_at_work() {
            if let Some(result) = self.advance(job, collective)? {
                return Ok(Some(result));
            }
        }
        Ok(None)
    }

    /// Leaves what is being written to its end, which nobody waits for: the fence decides whether it may
    /// still commit.
    pub(crate) fn abandon(&mut self) {
        self.wanted = false;
        self.frozen = None;
        self.abandoned.push(std::mem::take(&mut self.phase));
    }
}

impl Phase {
    /// Whether this rank's part of it is still being done.
    fn is_running(&self) -> bool {
        match self {
            Self::Idle => false,
            Self::Writing { shard, .. } => is_running(shard),
            Self::Committing { manifest, .. } => manifest.as_ref().is_some_and(is_running),
        }
    }
}

/// Writes the state of `learner` as the checkpoint of step 0 that a job of this recipe begins with.
///
/// # Errors
/// The store holds checkpoints, or cannot be written.
pub fn write_first<L: Learner>(
    learner: &mut L,
    job: JobId,
    spec: &JobSpec,
    store: &Store,
) -> Result<Commit, Error> {
    if let Some(newest) = store.list()?.first() {
        return Err(Error::Mismatch(format!(
            "{} holds checkpoints already (the newest is {}); give a folder of its own to the new run",
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

/// What training leaves as it is, in host memory.
struct FrozenCopy {
    region: &'static str,
    float: Float,
    words: Vec<f32>,
}

fn frozen_copies<L: Learner>(learner: &mut L) -> Result<Vec<FrozenCopy>, baton_collectives::Error> {
    let frozen = learner.regions().into_iter().filter_map(|region| {
        let float = region.frozen?;
        let words = region.buffer.to_host();
        Some(words.map(|words| FrozenCopy { region: region.name, float, words }))
    });
    frozen.collect()
}

fn write_frozen(
    store: &Store,
    id: SaveId,
    copies: Vec<FrozenCopy>,
) -> Result<Vec<FrozenEntry>, baton_checkpoint::Error> {
    let write = |copy: FrozenCopy| store.write_frozen(&id, copy.region, copy.float, copy.words);
    copies.into_iter().map(write).collect()
}

fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
    let thread = thread::Builder::new().name("checkpoint".to_owned()).spawn(work);
    thread.map_err(|error| format!("there is no thread to write it ({error})").into())
}

fn is_running<T>(task: &Task<T>) -> bool {
    task.as_ref().is_ok_and(|thread| !thread.is_finished())
}

fn joined<T>(task: Task<T>) -> Result<T, SaveProblem> {
    let panicked = "the thread that writes it has panicked; this is a bug";
    task?.join().map_err(|_| panicked.to_owned().into())
}

fn problem(error: baton_checkpoint::Error) -> SaveProblem {
    let fence = match error {
        baton_checkpoint::Error::Fenced { fence, .. } => Some(fence),
        _ => None,
    };
    SaveProblem { message: error.to_string(), fence }
}

/// The manifest but for its files.
fn draft<L: Learner>(
    learner: &mut L,
    progress: &Progress,
    id: SaveId,
    world_size: u32,
    job: JobId,
    spec: &JobSpec,
) -> Manifest {
    let Layout { regions, tensors } = layout(learner);
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
        seed: spec.seed,
        virtual_ranks: spec.train.virtual_ranks,
        world_size,
        layout: Layout::version(&tensors),
        regions: trained.map(|Flat { name, len, .. }| RegionInfo { name, len }).collect(),
        frozen: Vec::new(),
        tensors,
        shards: Vec::new(),
        created_unix_seconds: since_epoch.as_secs(),
    }
}

fn retention(id: SaveId, restore: &Restore, job: &Job) -> Retention {
    Retention {
        keep_last: job.spec.checkpoint.keep_last,
        keep_best: job.spec.checkpoint.keep_best,
        keep_every_epochs: job.spec.checkpoint.keep_every_epochs,
        restore: restore.clone(),
        generation: id.generation,
    }
}

fn took(began: Instant, stall: Duration) -> SaveTimes {
    SaveTimes { stall_seconds: stall.as_secs_f64(), seconds: began.elapsed().as_secs_f64() }
}

fn prune(store: &Store, retention: &Retention) {
    for warning in store.prune(retention).warnings {
        tracing::warn!("{warning}");
    }
}

/// How a learner lays out its state.
pub(crate) fn layout<L: Learner>(learner: &mut L) -> Layout {
    let regions = learner.regions();
    let flat = |region: &Region<'_>| {
        let float = region.frozen.unwrap_or_default();
        Flat {
            name: region.name.to_owned(),
            float,
            len: region.buffer.len() * size_of::<f32>() / float.bytes(),
            frozen: region.frozen.is_some(),
        }
    };
    let regions = regions.iter().map(flat).collect();
    Layout { regions, tensors: learner.tensors().into_iter().map(tensor_info).collect() }
}

fn tensor_info(place: TensorPlace) -> TensorInfo {
    TensorInfo {
        name: place.name,
        shape: place.shape,
        region: place.region.to_owned(),
        offset: place.offset,
        channels_last: place.channels_last,
    }
}
