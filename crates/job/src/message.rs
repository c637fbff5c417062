//! Messages between coordinator, agent and rank.
//!
//! All of them are sent as JSON: between coordinator and agent in the frames of `proto/`, between agent and rank
//! over a socket pair. JSON has no NaN or infinity, so every number must be finite. A message about a generation
//! contains that generation's number.
//!
//! Both sides are of one version, so fields may change: then raise the protocol's number in `proto/src/frame.rs`.
//! [`Commit`] with [`SaveTimes`], [`Restore`] and [`Rollback`] are also in the journal, and [`StepReport`] in diagnosis
//! files: their fields are only added, each with `#[serde(default)]`.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    exit::{Failure, Outcome},
    ids::{Generation, JobId, LocalRank, NodeId, Rank},
    mesh_secret::MeshSecret,
};
use baton_recipe::{
    Step,
    guard::{BatchMark, Diagnosis},
    progress::{Accuracy, Extent, Progress},
};

/// Where a generation takes its state from if none of its ranks holds state: the newest complete checkpoint of
/// generation `not_before` or later, otherwise `path`, otherwise fresh weights.
///
/// One rule covers three cases: for auto-resume `not_before` is 0; for `--no-auto-resume` it is the job's first
/// generation; for `--resume PATH` it is the job's first generation, and `path` is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restore {
    /// Oldest generation whose checkpoints may be used; older ones belong to another run.
    pub not_before: Generation,
    /// Checkpoint named by the user.
    pub path: Option<String>,
    /// Also accept a checkpoint of a recipe that leads to different weights, if its state has the same shape as this
    /// recipe's.
    #[serde(default)]
    pub allow_recipe_change: bool,
    /// Rollbacks so far, in order; states and checkpoints that they invalidate are not used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rollbacks: Vec<Rollback>,
    /// Rollbacks that only invalidate and change nothing else: those of the run before, which had another recipe, and a
    /// collapse that ended the job.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub invalidated: Vec<Rollback>,
    /// Generation and step of the newest checkpoint that the job has saved. If it is valid, but the store has no
    /// checkpoint at all, the job ends instead of beginning again: most likely a disk is not mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_saved: Option<(Generation, Step)>,
    /// The jobs that this one continues with another recipe, in order: their local checkpoints may be used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub continued: Vec<JobId>,
}

impl Restore {
    /// The rollback that invalidated a state or a checkpoint, if one did. Fresh weights and `path` are always valid.
    #[must_use]
    pub fn invalidated_by(&self, generation: Generation, step: Step) -> Option<&Rollback> {
        self.all_invalidated().find(|rollback| rollback.invalidates(generation, step))
    }

    /// The rollback that makes a checkpoint a last resort, if one does.
    #[must_use]
    pub fn suspected_by(&self, generation: Generation, step: Step) -> Option<&Rollback> {
        self.all_invalidated().find(|rollback| rollback.suspects(generation, step))
    }

    /// Sort key of checkpoints that are a last resort, by generation and step: the oldest state is the least suspect.
    #[must_use]
    pub fn last_resort_key(generation: Generation, step: Step) -> (Step, Reverse<Generation>) {
        (step, Reverse(generation))
    }

    /// All rollbacks that invalidate states and checkpoints.
    pub fn all_invalidated(&self) -> impl Iterator<Item = &Rollback> {
        self.rollbacks.iter().chain(&self.invalidated)
    }
}

/// A rollback after a divergence: training continues from an earlier state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollback {
    /// The generation that continues; states and checkpoints of earlier generations are valid only if they are
    /// from a step before `before`.
    pub generation: Generation,
    /// The first invalid step: that in which training diverged, whose loss does not depend on the learning rate.
    pub before: Step,
    /// The first step whose state may be damaged: it and later ones are used only if there are no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspect_from: Option<Step>,
    /// A batch to skip from now on, together with the batch before it; if absent, the learning rate is lowered
    /// instead.
    pub skip: Option<BatchMark>,
}

impl Rollback {
    /// Whether this rollback makes what `generation` saved after `step` updates a last resort.
    #[must_use]
    pub fn suspects(&self, generation: Generation, step: Step) -> bool {
        generation < self.generation && self.suspect_from.is_some_and(|from| step >= from)
    }

    /// Whether this rollback invalidates what `generation` held or saved after `step` updates.
    #[must_use]
    pub fn invalidates(&self, generation: Generation, step: Step) -> bool {
        generation < self.generation && step >= self.before
    }
}

/// Where a generation's state came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum StateSource {
    /// Nothing to resume: weights from the seed.
    Fresh {
        /// Local checkpoints that cannot be used, with the reason.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        skipped: Vec<String>,
    },
    /// Ranks of the previous generation held the state in memory.
    Survivor {
        /// The rank, in the new generation's numbering, that sent its state to the others.
        rank: Rank,
    },
    /// A committed checkpoint.
    Checkpoint(Restored),
}

impl StateSource {
    /// Weights from the seed, with nothing skipped.
    #[must_use]
    pub fn fresh() -> Self {
        Self::Fresh { skipped: Vec::new() }
    }
}

/// A checkpoint from which training resumed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Restored {
    /// Name in the store.
    pub name: String,
    /// The node on whose own disk it was; absent if it was in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_of: Option<String>,
    /// Why newer checkpoints were skipped, one reason each; empty if none was skipped.
    pub skipped: Vec<String>,
    /// Differences between this recipe and the one that wrote the checkpoint, one value per line.
    pub changes: Vec<String>,
    /// Number of ranks that wrote it.
    pub world_size: u32,
    /// Seconds since it was committed.
    pub age_seconds: u64,
    /// Learning rate with which training continues.
    pub lr: f64,
    /// Seconds from the start of the search for it until every rank had its state.
    pub seconds: f64,
    /// What this job reported when it wrote it, unless another job did or it is on a node's own disk: the coordinator may
    /// not have received that, or may have lost it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<Commit>,
}

/// A complete and durable checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// Name in the store.
    pub name: String,
    /// The generation that wrote it.
    pub generation: Generation,
    /// Updates made.
    pub step: Step,
    /// Accuracy at that step, if an evaluation took place there.
    pub accuracy: Option<Accuracy>,
    /// Size of all its files in bytes.
    pub bytes: u64,
    /// Time it took; known only to the process that wrote it, not when it is found in a store.
    #[serde(default)]
    pub took: Option<SaveTimes>,
    /// Whether the store had no fence of this generation: it is another one than the coordinator's, or has lost its files.
    #[serde(default)]
    pub fence_lost: bool,
}

/// How long a checkpoint took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveTimes {
    /// Seconds that training on rank 0 was blocked while the state was copied.
    pub stall_seconds: f64,
    /// Seconds from the start of the copy until the commit.
    pub seconds: f64,
}

/// Coordinator → agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Directive {
    /// A new generation: run these ranks. Running processes keep their state and get new ranks.
    Launch(Launch),
    /// Every rank is ready: connect the ranks at these addresses (index = rank).
    Begin {
        /// The generation.
        generation: Generation,
        /// `host:port` of each rank's listener; the same list for all agents.
        #[serde(with = "shared")]
        peers: Arc<[String]>,
        /// With which the ranks recognise each other; the coordinator's loop puts it in.
        secret: MeshSecret,
    },
    /// Save after the current step and continue.
    Checkpoint {
        /// The generation.
        generation: Generation,
    },
    /// Save after the current step and stop.
    Drain {
        /// The generation.
        generation: Generation,
        /// Who requested it and why, as text.
        reason: String,
    },
    /// Record the next steps as a profile.
    Profile {
        /// The generation.
        generation: Generation,
        /// Name of the profile in the store.
        name: String,
        /// Number of steps.
        steps: u32,
    },
    /// Pause after the current step, or resume.
    Pause(PauseState),
    /// Acknowledges a heartbeat.
    HeartbeatAck {
        /// Number of that heartbeat.
        number: u64,
    },
    /// Start processes in these slots, so that they are ready when the node is needed; they have no rank yet.
    /// Processes of an earlier such request that are not ready yet are replaced.
    Warm {
        /// The slots.
        local_ranks: Vec<LocalRank>,
    },
    /// The job continues without this node: stop all ranks and exit.
    Release {
        /// Why the node is leaving, as text.
        reason: String,
    },
    /// The job is over: stop all ranks and exit.
    Dismiss {
        /// How it ended.
        outcome: Outcome,
    },
}

/// Serialization of a list that many messages share. serde offers the same under its feature `rc`.
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

/// The coordinator's answer to [`Hello`], sent before any directive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The coordinator's job.
    pub job_id: JobId,
    /// The recipe as JSON.
    pub recipe_json: String,
    /// Location of the checkpoint store.
    pub checkpoint_location: String,
}

/// One agent's part of a new generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Number of the generation.
    pub generation: Generation,
    /// Number of ranks on all nodes.
    pub world_size: u32,
    /// Ranks of this node; may be empty.
    pub ranks: Vec<(Rank, LocalRank)>,
    /// Local ranks whose process hangs: it must be killed and replaced.
    pub replace: Vec<LocalRank>,
    /// Where state comes from if no rank holds state.
    pub restore: Restore,
    /// Whether training is paused until it is resumed.
    pub pause: PauseState,
}

/// Whether training is paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseState {
    /// Version: increases with every change, and older versions are ignored; 0 before the first change.
    pub number: u64,
    /// Whether training is paused.
    pub paused: bool,
}

/// Introduces an agent: its first message on every connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// The node's name.
    pub node: NodeId,
    /// Number of ranks that it can run.
    pub slots: u32,
    /// The job, once the agent knows it.
    #[serde(default)]
    pub job: Option<JobId>,
    /// Whether training of that job is paused, as this agent knows.
    #[serde(default)]
    pub pause: PauseState,
    /// Ranks that it runs already, if this is a reconnect.
    pub running: Option<RunningRanks>,
}

impl Hello {
    /// The hello of an agent that knows neither the job nor of a pause.
    #[must_use]
    pub fn new(node: NodeId, slots: u32, running: Option<RunningRanks>) -> Self {
        Self { node, slots, job: None, pause: PauseState::default(), running }
    }
}

/// The ranks that an agent runs, sent on reconnect because the coordinator may have missed reports about them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunningRanks {
    /// Their generation.
    pub generation: Generation,
    /// Ranks that are running or done, each with its phase.
    pub ranks: Vec<(Rank, RankPhase)>,
    /// Local ranks whose processes may hold state.
    pub holders: BTreeSet<LocalRank>,
    /// The last checkpoint that they committed.
    pub commit: Option<Commit>,
    /// The newest updates that rank 0 reported, oldest first, if it runs here.
    pub steps: Vec<StepReport>,
    /// Its newest evaluations ([`RankReport::Evaluated`]), oldest first; only the last one with its texts.
    pub evaluations: Vec<RankReport>,
}

/// Phase of a running rank in its generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankPhase {
    /// Spawned, or asked to join; not yet listening.
    Joining,
    /// Listening, and waiting for `Begin`.
    Ready {
        /// `host:port` of its listener.
        address: String,
        /// Its last finished step, if it holds state.
        step: Option<Step>,
    },
    /// Connecting to the other ranks; not yet training.
    Meeting,
    /// Training.
    Training,
    /// One of its collective operations failed; it holds its state and waits for a new generation.
    Waiting,
    /// Training diverged; it waits for a new generation.
    Diverged(Diagnosis),
    /// Finished: completed all epochs, or drained.
    Done {
        /// Completed or drained.
        outcome: Outcome,
        /// Digest of the final state, equal on all ranks.
        digest: String,
    },
}

impl RankPhase {
    /// Whether the process may hold state.
    pub(crate) fn may_hold_state(&self) -> bool {
        match self {
            Self::Ready { step, .. } => step.is_some(),
            Self::Joining | Self::Meeting | Self::Training | Self::Waiting | Self::Diverged(_) => {
                true
            }
            Self::Done { .. } => false,
        }
    }
}

/// Agent → coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentReport {
    /// First message on every connection.
    Hello(Hello),
    /// A rank sent a report, or its process ended.
    Rank {
        /// Generation of the rank at that time.
        generation: Generation,
        /// The rank in that generation.
        rank: Rank,
        /// The report.
        report: RankReport,
    },
    /// The node is leaving (shutdown signal, interruption notice): the job continues without it, or is saved and
    /// stopped.
    NodeDeparting {
        /// Why, as text.
        reason: String,
        /// Seconds from now until the machine is taken away, if known.
        seconds_left: Option<f64>,
    },
    /// A process without a rank is ready to take one.
    Warm {
        /// Its slot.
        local_rank: LocalRank,
    },
    /// A process without a rank ended.
    WarmFailed {
        /// Its slot.
        local_rank: LocalRank,
        /// Why it ended.
        failure: Failure,
    },
    /// The node may have to leave soon (rebalance recommendation): its ranks were asked for a checkpoint.
    CheckpointAdvised {
        /// Why, as text.
        reason: String,
    },
    /// A problem with one of the node's GPUs that the user should see.
    GpuWarning {
        /// One line: which GPU, what happened, what to do.
        message: String,
    },
    /// The agent is alive; includes machine statistics. Sent about once a second.
    Heartbeat(AgentHeartbeat),
}

/// Heartbeat of an agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AgentHeartbeat {
    /// Number of the heartbeat; increases by one.
    pub number: u64,
    /// Time from the last acknowledged heartbeat to its acknowledgement.
    pub round_trip: Option<Duration>,
    /// Machine statistics, if they were measured since the last heartbeat.
    pub stats: Option<MachineStats>,
}

/// Statistics of a machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineStats {
    /// The machine, excluding its GPUs.
    pub host: HostStats,
    /// Its GPUs, ordered by local rank.
    pub gpus: Vec<GpuStats>,
}

/// Statistics of a machine, excluding its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostStats {
    /// Host name.
    pub name: String,
    /// CPU use of all cores together since the last report, 0..1.
    pub cpu: f64,
    /// Number of cores.
    pub cpus: u32,
    /// Memory that is not available, in bytes.
    pub memory_used: u64,
    /// Total memory in bytes.
    pub memory_total: u64,
    /// Free space in bytes on the disk that holds the run folder.
    pub disk_free: u64,
    /// Size of that disk in bytes.
    pub disk_total: u64,
    /// Bytes received per second over the network, excluding loopback.
    pub received_per_second: f64,
    /// Bytes sent per second over the network, excluding loopback.
    pub sent_per_second: f64,
}

/// Statistics of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuStats {
    /// CUDA device number on its node, equal to the local rank that uses it.
    pub index: u32,
    /// Name, as reported by the driver.
    pub name: String,
    /// UUID.
    pub uuid: String,
    /// Share of the last second during which a kernel ran on it, 0..1, if the driver reports it.
    pub utilisation: Option<f64>,
    /// Memory in use by any process, in bytes.
    pub memory_used: u64,
    /// Total memory in bytes.
    pub memory_total: u64,
    /// Temperature in degrees Celsius, if the driver reports it.
    pub celsius: Option<f64>,
    /// Power draw in watts, if the driver reports it.
    pub watts: Option<f64>,
}

/// Most ranks that a rank names as not reached: all of them, from thousands of ranks, would be hundreds of megabytes.
pub const MAX_UNREACHED: usize = 64;

/// A report about a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RankReport {
    /// It listens, and the other ranks can connect to it.
    Ready {
        /// `host:port` of its listener.
        address: String,
        /// Its last finished step, if it holds state.
        step: Option<Step>,
    },
    /// It is connected to the other ranks and now restores the state. Sent by every rank.
    Met,
    /// It has the state; training begins. Sent by every rank.
    Started {
        /// Where the state came from.
        source: StateSource,
        /// Progress of training.
        progress: Progress,
    },
    /// One or more updates were made. Sent by rank 0 only.
    Stepped(StepReport),
    /// An evaluation ended. Sent by rank 0 only.
    Evaluated {
        /// Updates made before it.
        step: Step,
        /// Epochs completed before it.
        epoch: baton_recipe::Epoch,
        /// The result.
        accuracy: Accuracy,
        /// The result with the averaged weights (EMA), if the recipe averages them.
        ema: Option<Accuracy>,
        /// Which part of the validation set was evaluated.
        extent: Extent,
        /// Some of the texts that a language model wrote, shortened.
        texts: Vec<GeneratedText>,
    },
    /// Training diverged; the rank waits for a new generation. Sent by every rank.
    Diverged(Diagnosis),
    /// The job completes before its last epoch. Sent by rank 0 only.
    EndsEarly {
        /// Why, as text.
        reason: String,
    },
    /// State of its data loader. Sent by every rank about once a second while it trains.
    Loader(LoaderReport),
    /// It is alive; includes its current activity. Sent by every rank about once a second.
    Heartbeat(RankHeartbeat),
    /// A checkpoint was committed. Sent by rank 0 only.
    Saved(Commit),
    /// A checkpoint is due while another is still being written: training waits until that one is finished. Sent
    /// by rank 0 only.
    SaveWaits {
        /// Updates made.
        step: Step,
        /// Step of the checkpoint that is being written.
        behind: Step,
        /// Seconds since that checkpoint was begun.
        seconds: f64,
    },
    /// All ranks agreed to stop after this update. Sent by rank 0 only.
    Stopping {
        /// Updates made.
        step: Step,
    },
    /// The last state is copied and has yet to be written. Sent by rank 0 only.
    Copied {
        /// Updates made.
        step: Step,
    },
    /// A save failed; training continues.
    SaveFailed(SaveProblem),
    /// The local checkpoint of its node is complete. Sent by the rank that completed it.
    SavedLocally {
        /// Updates made.
        step: Step,
        /// Seconds from the copy of the state until this rank had written its part.
        seconds: f64,
    },
    /// A local checkpoint failed; training continues. Sent by the rank that could not write its part, unless its last one
    /// failed too.
    LocalSaveFailed {
        /// One line: what, where, what to do.
        message: String,
    },
    /// Its part of a profile is written, or could not be.
    Profiled {
        /// Name of the profile.
        name: String,
        /// What, where, what to do; absent if it is written.
        problem: Option<String>,
    },
    /// One of its collective operations failed; it keeps its state and waits for a new generation.
    Lost {
        /// The error.
        detail: String,
        /// Ranks that it could not connect to, or waited for until the time was over; at most [`MAX_UNREACHED`].
        #[serde(default)]
        unreached: Vec<Rank>,
    },
    /// It is done, and its process exits.
    Done {
        /// Completed or drained.
        outcome: Outcome,
        /// Digest of the final state, equal on all ranks.
        digest: String,
    },
    /// Its process ended before it was done. Sent by the agent.
    Exited(Failure),
}

/// Why a save failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveProblem {
    /// One line: what, where, what to do.
    pub message: String,
    /// The newer generation that has claimed the checkpoint store, if that is the reason.
    pub fence: Option<Generation>,
    /// Whether a checkpoint of this generation and step is committed already.
    pub exists: bool,
}

impl From<String> for SaveProblem {
    fn from(message: String) -> Self {
        Self { message, ..Self::default() }
    }
}

/// Metrics of the latest update.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Updates made.
    pub step: Step,
    /// Epochs completed.
    pub epoch: baton_recipe::Epoch,
    /// Total number of updates in the complete job.
    pub total_steps: u64,
    /// Number of batches in the current epoch.
    pub steps_per_epoch: u64,
    /// Number of batches of the current epoch that are done: [`TrainingPlan::step_of_epoch`].
    ///
    /// [`TrainingPlan::step_of_epoch`]: baton_recipe::progress::TrainingPlan::step_of_epoch
    #[serde(default)]
    pub step_of_epoch: u64,
    /// Mean training loss of the update's batch.
    pub loss: f64,
    /// The task's metrics of the update's batch by name, excluding the loss.
    #[serde(flatten)]
    pub metrics: BTreeMap<String, f64>,
    /// Learning rate of the update.
    pub lr: f64,
    /// L2 norm of the whole gradient before clipping.
    #[serde(default)]
    pub gradient_norm: Option<f64>,
    /// Loss scale; only with fp16.
    #[serde(default)]
    pub loss_scale: Option<f64>,
    /// Side length of the images in pixels; 0 for arrays.
    #[serde(default)]
    pub resolution: u32,
    /// Number of samples in a full update.
    #[serde(default)]
    pub global_batch: u64,
    /// Samples per second of all ranks over the last few seconds.
    pub samples_per_second: f64,
    /// Share of time that this rank waited for its loader, 0..1.
    pub loader_wait: f64,
}

impl StepReport {
    /// Seconds per update at the current rate, if known.
    #[must_use]
    pub fn seconds_per_step(&self) -> Option<f64> {
        (self.samples_per_second > 0.0).then(|| self.global_batch as f64 / self.samples_per_second)
    }
}

/// Current activity of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// It restores its state: from another rank, a checkpoint, or a file.
    #[default]
    Restoring,
    /// It waits for its loader.
    Loading,
    /// It computes a gradient or an update.
    Computing,
    /// It is in a collective operation: it waits for other ranks or for the network.
    Exchanging,
    /// It evaluates.
    Evaluating,
    /// It copies its state for a checkpoint, or waits for one.
    Saving,
    /// It is paused because a user requested it.
    Paused,
}

impl Activity {
    /// As text, to follow "it is".
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

/// Most texts that a language model wrote in an evaluation which are reported.
pub const MAX_SHOWN_TEXTS: usize = 3;

/// A text that a language model wrote in an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneratedText {
    /// Position of its sample in the validation set.
    pub sample: u64,
    /// What the model was given.
    pub prompt: String,
    /// The sample's own completion.
    pub reference: String,
    /// What the model wrote.
    pub text: String,
}

/// Progress of an evaluation, all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationProgress {
    /// Samples evaluated.
    pub samples: u64,
    /// Samples to evaluate.
    pub total: u64,
    /// Texts that a language model has written.
    pub texts: u64,
    /// Texts to write, after all samples are evaluated.
    pub total_texts: u64,
    /// Seconds since its start.
    pub seconds: f64,
}

impl EvaluationProgress {
    /// Whether no text was begun.
    fn samples_are_first(&self) -> bool {
        !self.has_texts() || self.samples < self.total
    }

    /// Samples evaluated per second; absent before the first.
    #[must_use]
    pub fn samples_per_second(&self) -> Option<f64> {
        // With texts, only part of the time was for samples.
        let is_known = self.samples > 0 && self.seconds > 0.0 && self.samples_are_first();
        is_known.then(|| self.samples as f64 / self.seconds)
    }

    /// Whether a language model writes texts too. How long they will be is not known.
    fn has_texts(&self) -> bool {
        self.total_texts > 0
    }

    /// Estimated seconds from its start to its end, at least with texts; absent before the first sample.
    #[must_use]
    pub fn total_seconds(&self) -> Option<f64> {
        if self.has_texts() {
            return Some(self.seconds);
        }
        Some(self.total as f64 / self.samples_per_second()?)
    }

    /// Estimated seconds to its end; absent before the first sample, and with texts.
    #[must_use]
    pub fn seconds_left(&self) -> Option<f64> {
        if self.has_texts() {
            return None;
        }
        Some((self.total_seconds()? - self.seconds).max(0.0))
    }
}

/// Heartbeat of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankHeartbeat {
    /// Its current activity.
    pub activity: Activity,
    /// Seconds since that activity began.
    pub seconds: f64,
    /// Updates made.
    pub step: Step,
    /// Seconds of this rank's own work per recent update, excluding collectives; 0 before the first update.
    pub own_step_seconds: f64,
    /// The evaluation in progress, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<EvaluationProgress>,
}

/// State of one rank's data loader.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoaderReport {
    /// Share of the last few seconds that the rank waited for its loader, 0..1.
    pub wait: f64,
    /// Number of finished batches that wait for training.
    pub ready: u32,
    /// Capacity: maximum number of finished batches that can wait for training.
    pub capacity: u32,
    /// Number of samples that could not be used and were replaced or skipped since the process started.
    pub skipped: u64,
    /// What was wrong with the last of these samples: one line with file, sample and byte.
    pub last_skipped: Option<String>,
}

/// A profile that a rank is to record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileRequest {
    /// Name of the profile in the store.
    pub name: String,
    /// Number of steps.
    pub steps: u32,
    /// The rank's node.
    pub node: NodeId,
}

/// Agent → rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RankCommand {
    /// Join a new generation as this rank; the previous generation is over.
    Join {
        /// The generation.
        generation: Generation,
        /// The rank in it.
        rank: Rank,
        /// Total number of ranks.
        world_size: u32,
        /// Where state comes from if no rank holds state.
        restore: Restore,
        /// Whether to stay paused until training is resumed.
        paused: bool,
    },
    /// Connect to the other ranks.
    Begin {
        /// The generation.
        generation: Generation,
        /// `host:port` of each rank.
        peers: Vec<String>,
        /// With which the ranks recognise each other.
        secret: MeshSecret,
    },
    /// Vote to pause, or to resume.
    Pause {
        /// The generation.
        generation: Generation,
        /// Whether to pause.
        paused: bool,
    },
    /// Vote to save.
    Checkpoint {
        /// The generation.
        generation: Generation,
    },
    /// The agent has lost its coordinator, or has one again.
    CoordinatorLost {
        /// The generation.
        generation: Generation,
        /// Whether it has none.
        lost: bool,
    },
    /// Stop waiting for the other ranks, unless all have agreed to stop: the node must leave, and its agent has no
    /// coordinator. The rank then saves alone.
    BreakOff {
        /// The generation.
        generation: Generation,
    },
    /// Record the next steps.
    Profile {
        /// The generation.
        generation: Generation,
        /// What to record.
        request: ProfileRequest,
    },
    /// Vote to save and stop.
    Drain {
        /// The generation.
        generation: Generation,
        /// Who requested it and why, as text.
        reason: String,
    },
}

/// Rank → agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankMessage {
    /// The generation that the report is about.
    pub generation: Generation,
    /// The report.
    pub report: RankReport,
}
