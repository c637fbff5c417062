//! The state of the job, for readers.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    Budget, DrainStatus, Engine, EvaluationResult, Incident, Meter, MeterShare, Pause, Recovery,
    lifecycle::Phase, membership::Member,
};
use crate::{
    exit::Outcome,
    first_names,
    ids::{Generation, LocalRank, NodeId, Rank},
    message::{
        Activity, Commit, EvaluationProgress, LoaderReport, MachineStats, RankHeartbeat, Rollback,
        StepReport,
    },
    time::Time,
};
use baton_recipe::{Step, progress::Accuracy};

/// Complete status of a job at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Phase of the job.
    pub phase: PhaseName,
    /// Reason for the phase, as text that a person can act on.
    pub reason: String,
    /// When the phase began.
    pub since: Time,
    /// The newest generation.
    pub generation: Generation,
    /// Source of the state with which training last began, as text.
    pub began_with: Option<String>,
    /// The ranks of that generation.
    pub ranks: Vec<RankStatus>,
    /// All nodes, with or without ranks.
    pub nodes: Vec<NodeStatus>,
    /// Number of epochs to train.
    pub epochs: u32,
    /// Metrics of the latest update.
    pub latest: Option<StepReport>,
    /// The latest evaluation.
    pub evaluation: Option<EvaluationResult>,
    /// The evaluation in progress, if there is one.
    pub evaluating: Option<EvaluationProgress>,
    /// Estimated seconds that the evaluations after the current step take, with what is left of the current one.
    pub evaluation_seconds: f64,
    /// The best evaluation and its step.
    pub best: Option<(Step, Accuracy)>,
    /// The last committed checkpoint that no rollback has invalidated.
    pub commit: Option<Commit>,
    /// The newest local checkpoint that this coordinator knows of.
    pub local: Option<LocalCheckpoint>,
    /// Why the newest save after it failed, if one did: training continues, and the next save may succeed.
    pub save_problem: Option<String>,
    /// Number of samples that could not be used and were replaced or skipped, by all rank processes that have reported
    /// since the coordinator started, including those that have ended.
    pub skipped_samples: u64,
    /// The newest 1,000 recoveries of the whole job, oldest first: failures and planned changes of nodes, and how long
    /// each part took.
    pub recoveries: Arc<VecDeque<Recovery>>,
    /// Number of all recoveries of the whole job.
    pub recoveries_total: u64,
    /// All divergences of the whole job, in order, with their rollbacks.
    pub incidents: Vec<Incident>,
    /// All that invalidates checkpoints of the job, or of the run that it continues with another recipe.
    pub invalidated: Vec<Rollback>,
    /// Time and money spent so far, and their limits.
    pub spending: Spending,
    /// Number of messages rejected because they came from an older generation or connection.
    pub stale_messages: u64,
    /// Progress of the drain, if one is in progress.
    pub drain: Option<DrainStatus>,
    /// The current pause, if a user requested one.
    pub pause: Option<Pause>,
    /// How the job ended, if it is over.
    pub outcome: Option<Outcome>,
}

/// A checkpoint on machines' own disks, newer than those in the store most of the time.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalCheckpoint {
    /// Updates made.
    pub step: Step,
    /// Seconds from the copy of the state until the slowest of the nodes had written it.
    pub seconds: f64,
    /// The nodes that have it, each the whole state.
    pub nodes: BTreeSet<NodeId>,
}

/// Most nodes of a local checkpoint that a text names.
pub const SHOWN_NODES: usize = 4;

impl LocalCheckpoint {
    /// The nodes as text, the first few by name.
    #[must_use]
    pub fn names(&self) -> String {
        first_names(self.nodes.iter().map(ToString::to_string), SHOWN_NODES)
    }
}

/// Time for which machines are paid, and its price.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spending {
    /// Time during which nodes were attached.
    pub meter: Meter,
    /// What that time costs, and the recipe's limits on it.
    pub budget: Budget,
    /// Attached time lost by failures and planned changes of nodes.
    pub interrupted: MeterShare,
    /// Attached time during which training was paused by a user.
    pub paused: MeterShare,
}

/// Phase of a job, as shown to readers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseName {
    /// Too few slots are available.
    #[default]
    Gathering,
    /// Waiting before a restart after repeated failures.
    Backoff,
    /// Ranks are starting.
    Forming,
    /// Ranks connect to each other and restore their state.
    Meeting,
    /// Training.
    Training,
    /// Paused because a user requested it.
    Paused,
    /// Ranks lost their connection; waiting to learn which ranks were lost.
    Detecting,
    /// The coordinator restarted and waits for its agents.
    Reattaching,
    /// Saving and stopping.
    Draining,
    /// Over.
    Ended,
}

/// Status of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct RankStatus {
    /// The rank.
    pub rank: Rank,
    /// The node that runs it.
    pub node: NodeId,
    /// Its number on that node.
    pub local_rank: LocalRank,
    /// Its state.
    pub state: RankState,
    /// Latest report of its loader; absent before the first one in this generation, and after its process ended.
    pub loader: Option<LoaderReport>,
    /// Latest heartbeat; absent before the first one in this generation, and after its process ended.
    pub heartbeat: Option<RankHeartbeat>,
    /// When that heartbeat arrived.
    pub heartbeat_at: Option<Time>,
    /// Its own time per update, divided by the median over all ranks.
    pub slowdown: Option<f64>,
}

/// State of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankState {
    /// Its process is starting.
    Starting,
    /// It listens.
    Ready,
    /// It connects to the other ranks and restores its state.
    Meeting,
    /// Training.
    Training,
    /// It waits for a new generation.
    Waiting,
    /// Its process ended before it was done.
    Gone,
    /// Finished.
    Done,
    /// No report about it has arrived since the coordinator restarted.
    Unknown,
}

impl RankState {
    /// Its name in messages and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Meeting => "meeting",
            Self::Training => "training",
            Self::Waiting => "waiting",
            Self::Gone => "gone",
            Self::Done => "done",
            Self::Unknown => "unknown",
        }
    }
}

/// Status of one node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeStatus {
    /// Its name.
    pub node: NodeId,
    /// Number of ranks that it can run.
    pub slots: u32,
    /// Whether its agent is connected.
    pub attached: bool,
    /// Statistics of its machine, once its agent has reported them.
    pub stats: Option<Arc<MachineStats>>,
    /// When its agent's last heartbeat arrived, if there was one.
    pub heartbeat_at: Option<Time>,
    /// Round-trip time of the agent's last acknowledged heartbeat.
    pub round_trip: Option<Duration>,
}

impl Engine {
    /// The current status.
    #[must_use]
    pub fn status(&self) -> Status {
        let (lifecycle, results) = (&self.lifecycle, &self.results);
        let pause = self.pauses.current.clone();
        let evaluating = self.evaluating();
        let restore = self.restore();
        Status {
            phase: self.phase_name(),
            reason: self.status_reason(),
            since: match (&pause, self.phase_name()) {
                (Some(pause), PhaseName::Paused) => pause.since.max(lifecycle.since),
                (_, PhaseName::Draining) => self
                    .drain
                    .as_ref()
                    .map_or(lifecycle.since, |drain| drain.since.max(lifecycle.since)),
                _ => lifecycle.since,
            },
            generation: lifecycle.generation,
            began_with: lifecycle.began_with.clone(),
            ranks: self.rank_statuses(),
            nodes: self.node_statuses(),
            epochs: self.spec.train.epochs,
            latest: results.latest.clone(),
            evaluation: results.evaluation.clone(),
            evaluating,
            evaluation_seconds: self.evaluation_seconds(evaluating),
            best: results.best.clone(),
            commit: results.valid_commit(&restore).cloned(),
            local: results.local.clone(),
            save_problem: results.save_problem.clone(),
            skipped_samples: results.skips.total(),
            recoveries: self.recoveries.newest(),
            recoveries_total: self.recoveries.total(),
            incidents: self.divergences.incidents.clone(),
            invalidated: restore.all_invalidated().cloned().collect(),
            spending: Spending {
                meter: self.accounting.meter,
                budget: self.accounting.budget,
                interrupted: self.recoveries.interrupted(),
                paused: self.pauses.time(),
            },
            stale_messages: self.stale_messages,
            drain: self.drain.clone(),
            pause,
            outcome: lifecycle.outcome().cloned(),
        }
    }

    /// Reason for the phase, as text that a person can act on.
    #[must_use]
    pub fn status_reason(&self) -> String {
        let reason = &self.lifecycle.reason;
        match (&self.pauses.current, self.phase_name()) {
            (Some(pause), PhaseName::Paused) => {
                format!("{}; `baton resume` continues training", pause.reason)
            }
            (Some(pause), _) => format!("{reason} (paused: {})", pause.reason),
            (None, PhaseName::Training) if self.saves_last() => {
                "every step is done, and the last checkpoint is being saved".to_owned()
            }
            (None, _) => self.missing_ranks().unwrap_or_else(|| reason.clone()),
        }
    }

    /// Whether the ranks have made all updates and save the final state, which may take long if the store fails.
    fn saves_last(&self) -> bool {
        let is_last = |step: &StepReport| step.step.0 >= step.total_steps;
        let heartbeats = self.lifecycle.training_world().map(|world| &world.rank_heartbeats);
        let latest = heartbeats.and_then(|heartbeats| heartbeats.latest(Rank(0)));
        let activity = latest.map(|latest| latest.heartbeat.activity);
        self.results.latest.as_ref().is_some_and(is_last) && activity == Some(Activity::Saving)
    }

    /// Progress of the evaluation that the ranks are making.
    fn evaluating(&self) -> Option<EvaluationProgress> {
        let world = self.lifecycle.training_world()?;
        world.rank_heartbeats.latest(Rank(0))?.heartbeat.evaluation
    }

    /// Estimated seconds of all evaluations to come, each as long as the last one; `current` is in progress.
    fn evaluation_seconds(&self, current: Option<EvaluationProgress>) -> f64 {
        let Some(latest) = &self.results.latest else { return 0.0 };
        let (every, epochs) = (self.spec.evaluation.every_epochs, self.spec.train.epochs);
        let upcoming = (latest.epoch.0.saturating_add(1)..=epochs)
            .filter(|epoch| *epoch == epochs || epoch.is_multiple_of(every));
        let of_current = current.and_then(|current| current.seconds_left()).unwrap_or(0.0);
        of_current + upcoming.count() as f64 * self.results.evaluation_seconds.unwrap_or(0.0)
    }

    fn phase_name(&self) -> PhaseName {
        match &self.lifecycle.phase {
            Phase::Gathering => PhaseName::Gathering,
            Phase::Backoff { .. } => PhaseName::Backoff,
            Phase::Forming { .. } => PhaseName::Forming,
            Phase::Meeting { .. } => PhaseName::Meeting,
            Phase::Training { .. } if self.drain.is_some() => PhaseName::Draining,
            Phase::Training { .. } if self.pauses.current.is_some() => PhaseName::Paused,
            Phase::Training { .. } => PhaseName::Training,
            Phase::Detecting { .. } => PhaseName::Detecting,
            Phase::Reattaching { .. } => PhaseName::Reattaching,
            Phase::Ended { .. } => PhaseName::Ended,
        }
    }

    fn rank_statuses(&self) -> Vec<RankStatus> {
        let Some(world) = self.lifecycle.world() else { return Vec::new() };
        let meeting = matches!(self.lifecycle.phase, Phase::Meeting { .. });
        let state = |member: &Member| match member {
            Member::Launched => RankState::Starting,
            Member::Ready { .. } if meeting => RankState::Meeting,
            Member::Ready { .. } => RankState::Ready,
            Member::Started => RankState::Training,
            Member::Lost => RankState::Waiting,
            Member::Gone => RankState::Gone,
            Member::Done { .. } => RankState::Done,
            Member::Unknown => RankState::Unknown,
        };
        let median = world.rank_heartbeats.median();
        world
            .members()
            .zip(world.loaders())
            .map(|((placement, member), loader)| {
                let last = world.rank_heartbeats.latest(placement.rank);
                RankStatus {
                    rank: placement.rank,
                    node: placement.node.clone(),
                    local_rank: placement.local_rank,
                    state: state(member),
                    loader: loader.cloned(),
                    heartbeat: last.map(|last| last.heartbeat),
                    heartbeat_at: last.map(|last| last.at),
                    slowdown: last.and_then(|last| last.slowdown(median)),
                }
            })
            .collect()
    }

    fn node_statuses(&self) -> Vec<NodeStatus> {
        self.nodes
            .iter()
            .map(|(id, node)| NodeStatus {
                node: id.clone(),
                slots: node.slots,
                attached: node.is_attached(),
                stats: node.heartbeat.as_ref().and_then(|last| last.stats.clone()),
                heartbeat_at: node.heartbeat.as_ref().map(|last| last.at),
                round_trip: node.heartbeat.as_ref().and_then(|last| last.round_trip),
            })
            .collect()
    }
}

impl Status {
    /// Estimated seconds until the last update at the current rate, with evaluations; absent while there is no rate.
    ///
    /// Computed from samples, not updates: an epoch has the same number of samples with any batch size.
    #[must_use]
    pub fn eta_seconds(&self) -> Option<f64> {
        let latest = self.latest.as_ref().filter(|latest| latest.samples_per_second > 0.0)?;
        let training = matches!(self.phase, PhaseName::Training | PhaseName::Draining);
        let passes = f64::from(self.epochs.saturating_sub(latest.epoch.0));
        let per_pass = latest.steps_per_epoch as f64;
        let batches = (passes * per_pass - latest.step_of_epoch as f64).max(0.0);
        let updates = batches * latest.global_batch as f64 / latest.samples_per_second;
        training.then_some(updates + self.evaluation_seconds)
    }

    /// Estimated cost of an epoch in dollars at the current rate, if a price is set.
    #[must_use]
    pub fn dollars_per_epoch(&self) -> Option<f64> {
        self.eta_seconds()?;
        let latest = self.latest.as_ref()?;
        let pass = latest.seconds_per_step()? * latest.steps_per_epoch as f64;
        self.spending.budget.dollars_for(Duration::try_from_secs_f64(pass).ok()?)
    }

    /// Estimated cost of the whole job in dollars, if a price is set: what is spent, and the rest at the current rate and
    /// price.
    #[must_use]
    pub fn projected_dollars(&self, now: Time) -> Option<f64> {
        let left = Duration::try_from_secs_f64(self.eta_seconds()?).ok()?;
        let spent = self.spending.meter.read(now);
        self.spending.budget.dollars_at(spent.checked_add(left)?)
    }
}
