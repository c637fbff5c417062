//! What coordinator, agent and rank say to each other.
//!
//! All of it travels as JSON: between coordinator and agent in the frames of `proto/`, between agent and
//! rank over a socket pair. So every number is finite. A message about a generation names it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    exit::{Failure, Outcome},
    ids::{Generation, JobId, LocalRank, NodeId, Rank},
};
use baton_recipe::{
    Step,
    guard::{BatchMark, Diagnosis},
    progress::{Accuracy, Extent, Progress},
};

/// Where a generation takes its state from when none of its ranks holds any: the newest whole
/// checkpoint of generation `not_before` or later, else `path`, else fresh weights.
///
/// One rule for three wishes: auto-resume is `not_before = 0`; `--no-auto-resume` is the job's first
/// generation; `--resume PATH` is that with a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restore {
    /// Checkpoints of earlier generations belong to another run.
    pub not_before: Generation,
    /// A checkpoint named by the user.
    pub path: Option<String>,
    /// A checkpoint of a recipe that leads to other weights is taken too, if its state has this one's
    /// shape.
    #[serde(default)]
    pub allow_recipe_change: bool,
    /// Times that training went wrong, in order: what was computed since counts no more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rollbacks: Vec<Rollback>,
}

impl Restore {
    /// The rollback that made a state or a checkpoint worthless, if one did. Fresh weights and `path`
    /// are always good.
    #[must_use]
    pub fn condemned_by(&self, generation: Generation, step: Step) -> Option<&Rollback> {
        self.rollbacks.iter().find(|rollback| rollback.condemns(generation, step))
    }
}

/// Training went wrong, and goes on from before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollback {
    /// The generation that goes on; states and checkpoints of earlier ones are good only if they are
    /// of a step before `before`.
    pub generation: Generation,
    /// The first step that is no good.
    pub before: Step,
    /// A batch to leave out from now on, with the one before it; without one the learning rate is
    /// lowered.
    pub skip: Option<BatchMark>,
}

impl Rollback {
    /// Whether what `generation` held or saved after `step` updates is no good.
    #[must_use]
    pub fn condemns(&self, generation: Generation, step: Step) -> bool {
        generation < self.generation && step >= self.before
    }
}

/// Where a generation's state came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum StateSource {
    /// Nothing to resume: weights from the seed.
    Fresh,
    /// Ranks of the generation before held it in memory.
    Survivor {
        /// The rank, in the new numbering, that gave its state to the others.
        rank: Rank,
    },
    /// A committed checkpoint.
    Checkpoint(Restored),
}

/// A checkpoint that was resumed from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Restored {
    /// Its name in the store.
    pub name: String,
    /// Why newer ones were passed over; empty if none was.
    pub skipped: Vec<String>,
    /// What this recipe changes of the one that it was written by, a value a line.
    pub changes: Vec<String>,
    /// Ranks that wrote it.
    pub world_size: u32,
    /// Seconds since it was committed.
    pub age_seconds: u64,
    /// Learning rate that training goes on with.
    pub lr: f64,
    /// Seconds from the search for it until every rank had its state.
    pub seconds: f64,
}

/// A checkpoint that is whole and durable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// Its name in the store.
    pub name: String,
    /// The generation that wrote it.
    pub generation: Generation,
    /// Updates made.
    pub step: Step,
    /// Accuracy at that step, if it was evaluated there.
    pub accuracy: Option<Accuracy>,
    /// Size of all its files.
    pub bytes: u64,
    /// What it cost; known where it was written, not where it is found.
    #[serde(default)]
    pub took: Option<SaveTimes>,
}

/// How long a checkpoint took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveTimes {
    /// Seconds that training stood still on rank 0, for a copy of the state.
    pub stall_seconds: f64,
    /// Seconds from there until it was committed.
    pub seconds: f64,
}

/// Coordinator → agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Directive {
    /// A new generation: run these ranks. Processes that live keep their state and get new numbers.
    Launch(Launch),
    /// Every rank is ready: meet at these addresses (index = rank).
    Begin {
        /// Of this generation.
        generation: Generation,
        /// `host:port` of each rank's listener; the same for all agents.
        #[serde(with = "shared")]
        peers: Arc<[String]>,
    },
    /// Save after the current step and go on.
    Checkpoint {
        /// Of this generation.
        generation: Generation,
    },
    /// Save after the current step and stop.
    Drain {
        /// Of this generation.
        generation: Generation,
        /// Who asked, in words.
        reason: String,
    },
    /// Stand still after the current step, or go on.
    Hold(Hold),
    /// The answer to a beat.
    Heard {
        /// Its number.
        number: u64,
    },
    /// Start processes in these places, to be ready when the node is needed; they get no rank as yet. Those
    /// that were to be ready before and are not are replaced.
    Warm {
        /// Which.
        local_ranks: Vec<LocalRank>,
    },
    /// The job goes on without this node: stop whatever runs and leave.
    Release {
        /// Why the node must go, in words.
        reason: String,
    },
    /// The job is over: stop whatever runs and leave.
    Dismiss {
        /// How it ended.
        outcome: Outcome,
    },
}

/// A list that many messages share. serde has this as its feature `rc`.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(list: &Arc<[String]>, to: S) -> Result<S::Ok, S::Error> {
        list.as_ref().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Arc<[String]>, D::Error> {
        Vec::deserialize(from).map(Into::into)
    }
}

/// The coordinator's answer to [`Hello`], before any directive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The job that it serves.
    pub job_id: JobId,
    /// The recipe as JSON.
    pub recipe_json: String,
    /// The checkpoint store.
    pub checkpoint_location: String,
}

/// One agent's part of a new generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Its number.
    pub generation: Generation,
    /// Ranks in all.
    pub world_size: u32,
    /// Ranks of this node; may be none.
    pub ranks: Vec<(Rank, LocalRank)>,
    /// Local ranks whose process hangs and must be killed rather than kept.
    pub replace: Vec<LocalRank>,
    /// Where state comes from if no rank holds any.
    pub restore: Restore,
    /// Whether training stands still until told otherwise.
    pub hold: Hold,
}

/// Whether training stands still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// Rises with every change, so that a late word changes nothing; 0 before the first.
    pub number: u64,
    /// Whether it does.
    pub paused: bool,
}

/// Who an agent is: the first thing it says on every connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// The node's name.
    pub node: NodeId,
    /// Ranks it can run.
    pub slots: u32,
    /// What it runs already, if this is a reconnect.
    pub holding: Option<Holding>,
}

/// The ranks an agent runs, told on reconnect: what the coordinator may have missed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holding {
    /// Their generation.
    pub generation: Generation,
    /// Those alive or done, each with where it stands.
    pub ranks: Vec<(Rank, RankPhase)>,
    /// The last checkpoint they committed.
    pub commit: Option<Commit>,
}

/// Where a live rank stands in its generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankPhase {
    /// Spawned or told to join; not yet listening.
    Joining,
    /// Listening, waiting for `Begin`.
    Ready {
        /// `host:port` of its listener.
        address: String,
        /// Its last finished step, if it holds state.
        step: Option<Step>,
    },
    /// Told to meet the others; not yet training.
    Meeting,
    /// Training.
    Training,
    /// Its collective broke; it holds its state and waits for a new generation.
    Waiting,
    /// Training went wrong; it waits for a new generation.
    Diverged(Diagnosis),
    /// Finished: all epochs, or drained.
    Done {
        /// Which of the two.
        outcome: Outcome,
        /// Digest of the final state, equal on all ranks.
        digest: String,
    },
}

/// Agent → coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// First on every connection.
    Hello(Hello),
    /// A rank spoke or ended.
    Rank {
        /// Its generation when it did.
        generation: Generation,
        /// Its number there.
        rank: Rank,
        /// What it said.
        news: RankNews,
    },
    /// The node must go (signal, spot notice): the others go on without it, or the job is saved and stopped.
    DrainRequested {
        /// Why, in words.
        reason: String,
        /// When its machine ends, in seconds from now, if that is known.
        seconds_left: Option<f64>,
    },
    /// A process that has no rank as yet could take one.
    Warm {
        /// Its place.
        local_rank: LocalRank,
    },
    /// A process that has no rank as yet ended.
    WarmFailed {
        /// Its place.
        local_rank: LocalRank,
        /// How.
        failure: Failure,
    },
    /// The node may have to go soon: its ranks were asked for a checkpoint.
    Advised {
        /// Why, in words.
        reason: String,
    },
    /// Something about one of the node's GPUs that its user should know.
    GpuWarning {
        /// One line: which, what, what to do.
        message: String,
    },
    /// The agent lives, and how its machine does. About once a second.
    Beat(Beat),
}

/// A sign of life of an agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Beat {
    /// Rises by one.
    pub number: u64,
    /// From the last beat that was answered to its answer.
    pub round_trip: Option<Duration>,
    /// How the machine does, if that was measured since the last beat.
    pub vitals: Option<Vitals>,
}

/// How a machine does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Vitals {
    /// The machine without its GPUs.
    pub host: Host,
    /// Its GPUs, each by its local rank.
    pub gpus: Vec<Gpu>,
}

/// How a machine does, but for its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Its host name.
    pub name: String,
    /// Share of all its cores that is busy, 0..1, over the time since it was last told.
    pub cpu: f64,
    /// Its cores.
    pub cpus: u32,
    /// Bytes of memory that cannot be had.
    pub memory_used: u64,
    /// Bytes of memory in all.
    pub memory_total: u64,
    /// Bytes free on the disk that holds the run folder.
    pub disk_free: u64,
    /// Its size in bytes.
    pub disk_total: u64,
    /// Bytes received per second over the network, loopback left out.
    pub received_per_second: f64,
    /// Bytes sent per second.
    pub sent_per_second: f64,
}

/// How a GPU does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its CUDA device on its node, which is the local rank that it serves.
    pub index: u32,
    /// Its name, as the driver tells it.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Share of the last second that a kernel ran on it, 0..1, if it tells.
    pub utilisation: Option<f64>,
    /// Bytes of its memory in use, by whomever.
    pub memory_used: u64,
    /// Bytes of its memory in all.
    pub memory_total: u64,
    /// Degrees Celsius, if it tells.
    pub celsius: Option<f64>,
    /// Watts that it draws, if it tells.
    pub watts: Option<f64>,
}

/// What is told about a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RankNews {
    /// It listens and can meet the others.
    Ready {
        /// `host:port` of its listener.
        address: String,
        /// Its last finished step, if it holds state.
        step: Option<Step>,
    },
    /// It met the others; now it takes the state. Told by every rank.
    Met,
    /// It has the state; training begins.
    Started {
        /// Where the state came from.
        source: StateSource,
        /// Where training stands.
        progress: Progress,
    },
    /// One or more updates were made. Told by rank 0 alone.
    Stepped(StepNews),
    /// An evaluation ended. Told by rank 0 alone.
    Evaluated {
        /// After this many updates.
        step: Step,
        /// After this many passes.
        epoch: baton_recipe::Epoch,
        /// What was found.
        accuracy: Accuracy,
        /// What was found with the averaged weights, if the recipe has them.
        ema: Option<Accuracy>,
        /// Which part of the validation set was looked at.
        extent: Extent,
    },
    /// Training went wrong; it waits for a new generation. Told by every rank.
    Diverged(Diagnosis),
    /// The job completes before its last epoch. Told by rank 0 alone.
    EndsEarly {
        /// Why, in words.
        reason: String,
    },
    /// How its loader does. Told by every rank about once a second while it trains.
    Loader(LoaderNews),
    /// It lives, and what it does. Told by every rank about once a second.
    Pulse(Pulse),
    /// A checkpoint was committed. Told by rank 0 alone.
    Saved(Commit),
    /// A checkpoint is due while another is being written: training waits for that one's end. Told by
    /// rank 0 alone.
    SaveWaits {
        /// Updates made.
        step: Step,
        /// The checkpoint that is being written.
        behind: Step,
        /// Seconds since that one was begun.
        seconds: f64,
    },
    /// All ranks agreed to stop after this update. Told by rank 0 alone.
    Stopping {
        /// Updates made.
        step: Step,
    },
    /// The last state is copied; what is left is to write it. Told by rank 0 alone.
    Copied {
        /// Updates made.
        step: Step,
    },
    /// A save failed; training goes on.
    SaveFailed(SaveProblem),
    /// Its collective broke; it keeps its state and waits for a new generation.
    Lost {
        /// What broke.
        detail: String,
    },
    /// It is done and leaves.
    Done {
        /// Completed or drained.
        outcome: Outcome,
        /// Digest of the final state, equal on all ranks.
        digest: String,
    },
    /// Its process ended before it was done. Told by the agent.
    Exited(Failure),
}

/// Why there is no checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveProblem {
    /// One line: what, where, what to do.
    pub message: String,
    /// The generation that has the checkpoint store, if that is why.
    pub fence: Option<Generation>,
}

impl From<String> for SaveProblem {
    fn from(message: String) -> Self {
        Self { message, fence: None }
    }
}

/// Numbers of the latest update.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepNews {
    /// Updates made.
    pub step: Step,
    /// Passes made.
    pub epoch: baton_recipe::Epoch,
    /// Updates in all, once the job is complete.
    pub total_steps: u64,
    /// Batches of the present pass.
    pub steps_per_epoch: u64,
    /// Batches of the present pass that are behind: [`Agenda::step_of_epoch`].
    ///
    /// [`Agenda::step_of_epoch`]: baton_recipe::progress::Agenda::step_of_epoch
    #[serde(default)]
    pub step_of_epoch: u64,
    /// Mean training loss of the update's batch.
    pub loss: f64,
    /// The task's metrics of the update's batch, but for its loss, by their names.
    #[serde(flatten)]
    pub metrics: BTreeMap<String, f64>,
    /// Learning rate of the update.
    pub lr: f64,
    /// L2 norm of the whole gradient before clipping.
    #[serde(default)]
    pub gradient_norm: Option<f64>,
    /// Factor on the loss, of fp16 only.
    #[serde(default)]
    pub loss_scale: Option<f64>,
    /// Side of the images in pixels; 0 for arrays.
    #[serde(default)]
    pub resolution: u32,
    /// Samples of a full update.
    #[serde(default)]
    pub global_batch: u64,
    /// Samples per second over the last seconds, all ranks.
    pub samples_per_second: f64,
    /// Share of time this rank waited for its loader, 0..1.
    pub loader_wait: f64,
}

impl StepNews {
    /// How long an update takes at the present rate, if that is known.
    #[must_use]
    pub fn seconds_per_step(&self) -> Option<f64> {
        (self.samples_per_second > 0.0).then(|| self.global_batch as f64 / self.samples_per_second)
    }
}

/// What a rank does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// It takes its state: from the others, a checkpoint, or a file.
    #[default]
    Restoring,
    /// It waits for its loader.
    Loading,
    /// It computes a gradient or an update.
    Computing,
    /// It is in a collective: it waits for other ranks, or for the way to them.
    Exchanging,
    /// It evaluates.
    Evaluating,
    /// It copies or waits for a checkpoint.
    Saving,
    /// It stands still because a user asked for that.
    Paused,
}

impl Activity {
    /// In words, after "it is".
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Restoring => "restoring",
            Self::Loading => "loading",
            Self::Computing => "computing",
            Self::Exchanging => "exchanging",
            Self::Evaluating => "evaluating",
            Self::Saving => "saving",
            Self::Paused => "paused",
        }
    }
}

/// What a rank does at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pulse {
    /// What.
    pub activity: Activity,
    /// Seconds it has been at it.
    pub seconds: f64,
    /// Updates made.
    pub step: Step,
    /// Seconds that an update of late took of this rank's own time, exchanges left out; 0 before the first.
    pub own_step_seconds: f64,
}

/// How one rank's loader does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoaderNews {
    /// Share of the last seconds that the rank's training waited for its loader, 0..1.
    pub wait: f64,
    /// Finished batches that wait for training.
    pub ready: u32,
    /// The most finished batches there can be.
    pub room: u32,
    /// Samples that could not be used and were replaced or left out, since the process started.
    pub skipped: u64,
    /// What was wrong with the last of them: one line with file, sample and byte.
    pub last_skipped: Option<String>,
}

/// Agent → rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RankCommand {
    /// Take this place in a new generation; whatever ran before is over.
    Join {
        /// The generation.
        generation: Generation,
        /// The number in it.
        rank: Rank,
        /// Ranks in all.
        world_size: u32,
        /// Where state comes from if no rank holds any.
        restore: Restore,
        /// Whether to stand still until told otherwise.
        paused: bool,
    },
    /// Meet the others.
    Begin {
        /// Of this generation.
        generation: Generation,
        /// `host:port` of each rank.
        peers: Vec<String>,
    },
    /// Vote to stand still, or to go on.
    Hold {
        /// Of this generation.
        generation: Generation,
        /// Which of the two.
        paused: bool,
    },
    /// Vote for a save.
    Checkpoint {
        /// Of this generation.
        generation: Generation,
    },
    /// Vote for a save and stop.
    Drain {
        /// Of this generation.
        generation: Generation,
        /// Who asked, in words.
        reason: String,
    },
}

/// Rank → agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankSays {
    /// The generation it speaks of.
    pub generation: Generation,
    /// What it says.
    pub news: RankNews,
}
