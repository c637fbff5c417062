//! The machine's state for readers.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    DrainStatus, Engine, Evaluation, Incident, Meter, Pause, Recovery, Share, lifecycle::Phase,
    membership::Member,
};
use crate::{
    exit::Outcome,
    ids::{Generation, LocalRank, NodeId, Rank},
    message::{Commit, LoaderNews, Pulse, StepNews, Vitals},
    time::Time,
};
use baton_recipe::{Step, progress::Accuracy};

/// One look that tells everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// What the job does.
    pub phase: PhaseName,
    /// Why, in words a person can act on.
    pub reason: String,
    /// Since when.
    pub since: Time,
    /// The newest generation.
    pub generation: Generation,
    /// Where the state came from that training last began with, in words.
    pub began_with: Option<String>,
    /// Its ranks.
    pub ranks: Vec<RankStatus>,
    /// All nodes, training or not.
    pub nodes: Vec<NodeStatus>,
    /// Passes to make.
    pub epochs: u32,
    /// Numbers of the latest update.
    pub latest: Option<StepNews>,
    /// The latest evaluation.
    pub evaluation: Option<Evaluation>,
    /// The best evaluation and its step.
    pub best: Option<(Step, Accuracy)>,
    /// The last committed checkpoint.
    pub commit: Option<Commit>,
    /// Why the save after it failed, if it did: training goes on, and the next one may fit.
    pub save_problem: Option<String>,
    /// Samples that could not be used and were replaced or left out: by all rank processes heard of
    /// since the coordinator started, also those that are gone.
    pub skipped_samples: u64,
    /// The newest 1,000 failures and planned changes of nodes over the job's whole life, oldest first, and how
    /// long each part of the recovery took.
    pub recoveries: Arc<VecDeque<Recovery>>,
    /// The number of all of them over the job's whole life.
    pub recoveries_total: u64,
    /// Training that went wrong over the job's whole life, in order: why the step went back.
    pub incidents: Vec<Incident>,
    /// What the job has cost, and may cost.
    pub spending: Spending,
    /// Messages refused because they came from an older generation or connection.
    pub stale_messages: u64,
    /// How far saving and stopping has come, if somebody wants it.
    pub drain: Option<DrainStatus>,
    /// Why and since when training stands still, if a user asked for that.
    pub pause: Option<Pause>,
    /// How the job ended, if it has.
    pub outcome: Option<Outcome>,
}

/// Time that machines are paid for, and its price.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spending {
    /// For how long nodes have been attached.
    pub meter: Meter,
    /// When the recipe's limits end the job, as attached time.
    pub most: Option<Duration>,
    /// Price of all nodes together.
    pub dollars_per_hour: Option<f64>,
    /// Attached time that brought nothing because of failures and planned changes of nodes.
    pub interrupted: Share,
    /// Attached time that training stood still because a user asked for that.
    pub paused: Share,
}

impl Spending {
    /// What so much attached time costs, if there is a price.
    #[must_use]
    pub fn dollars(&self, time: Duration) -> Option<f64> {
        self.dollars_per_hour.map(|price| price * time.as_secs_f64() / 3_600.0)
    }
}

/// Names of the phases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseName {
    /// Too few ranks have been offered.
    #[default]
    Gathering,
    /// A pause before the next try.
    Backoff,
    /// Ranks start.
    Forming,
    /// Ranks meet and take their state.
    Meeting,
    /// Training.
    Training,
    /// Standing still because a user asked for that.
    Paused,
    /// Ranks lost touch; word of the cause is awaited.
    Settling,
    /// The coordinator restarted and waits for its agents.
    Reattaching,
    /// Saving and stopping.
    Draining,
    /// Over.
    Ended,
}

/// One rank.
#[derive(Clone, Debug, PartialEq)]
pub struct RankStatus {
    /// Its number.
    pub rank: Rank,
    /// Its node.
    pub node: NodeId,
    /// Its number there.
    pub local_rank: LocalRank,
    /// How far it is.
    pub state: RankState,
    /// How its loader does, once it has told in this generation and while its process lives.
    pub loader: Option<LoaderNews>,
    /// What it does, once it has told in this generation and while its process lives.
    pub pulse: Option<Pulse>,
    /// When it told.
    pub heard_at: Option<Time>,
    /// Its own time per update, divided by the median over all ranks.
    pub slowness: Option<f64>,
}

/// How far a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankState {
    /// Its process starts.
    Starting,
    /// It listens.
    Ready,
    /// It meets the others and takes its state.
    Meeting,
    /// Training.
    Training,
    /// It waits for a new generation.
    Waiting,
    /// Its process ended before it was done.
    Gone,
    /// Finished.
    Done,
    /// Nothing was heard of it since the coordinator restarted.
    Unheard,
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
            Self::Unheard => "unheard",
        }
    }
}

/// One node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeStatus {
    /// Its name.
    pub node: NodeId,
    /// Ranks it can run.
    pub slots: u32,
    /// Whether its agent is connected.
    pub attached: bool,
    /// How its machine does, once its agent has told.
    pub vitals: Option<Arc<Vitals>>,
    /// When its agent was last heard of, if it was.
    pub heard_at: Option<Time>,
    /// What the last answer to its agent took, there and back.
    pub round_trip: Option<Duration>,
}

impl Engine {
    /// The state now.
    #[must_use]
    pub fn status(&self) -> Status {
        let (lifecycle, results) = (&self.lifecycle, &self.results);
        let pause = self.pauses.present.clone();
        Status {
            phase: self.phase_name(),
            reason: self.status_reason(),
            since: match (&pause, self.phase_name()) {
                (Some(pause), PhaseName::Paused) => pause.since.max(lifecycle.since),
                _ => lifecycle.since,
            },
            generation: lifecycle.generation,
            began_with: lifecycle.began_with.clone(),
            ranks: self.rank_statuses(),
            nodes: self.node_statuses(),
            epochs: self.spec.train.epochs,
            latest: results.latest.clone(),
            evaluation: results.evaluation.clone(),
            best: results.best.clone(),
            commit: results.commit.clone(),
            save_problem: results.save_problem.clone(),
            skipped_samples: results.skips.total(),
            recoveries: self.recoveries.newest(),
            recoveries_total: self.recoveries.total(),
            incidents: self.divergences.incidents.clone(),
            spending: Spending {
                meter: self.accounting.meter,
                most: self.accounting.budget.as_ref().map(|budget| budget.most),
                dollars_per_hour: self.accounting.dollars_per_hour,
                interrupted: self.recoveries.interrupted(),
                paused: self.pauses.time(),
            },
            stale_messages: self.stale_messages,
            drain: self.drain.clone(),
            pause,
            outcome: lifecycle.outcome().cloned(),
        }
    }

    /// Why it is in its phase, in words a person can act on.
    #[must_use]
    pub fn status_reason(&self) -> String {
        let reason = &self.lifecycle.reason;
        match (&self.pauses.present, self.phase_name()) {
            (Some(pause), PhaseName::Paused) => {
                format!("{}; `baton resume` lets training go on", pause.reason)
            }
            (Some(pause), _) => format!("{reason} (paused: {})", pause.reason),
            (None, _) => reason.clone(),
        }
    }

    fn phase_name(&self) -> PhaseName {
        match &self.lifecycle.phase {
            Phase::Gathering => PhaseName::Gathering,
            Phase::Backoff { .. } => PhaseName::Backoff,
            Phase::Forming { .. } => PhaseName::Forming,
            Phase::Meeting { .. } => PhaseName::Meeting,
            Phase::Training { .. } if self.drain.is_some() => PhaseName::Draining,
            Phase::Training { .. } if self.pauses.present.is_some() => PhaseName::Paused,
            Phase::Training { .. } => PhaseName::Training,
            Phase::Settling { .. } => PhaseName::Settling,
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
            Member::Unheard => RankState::Unheard,
        };
        let median = world.pulses.median();
        world
            .members()
            .zip(world.loaders())
            .map(|((place, member), loader)| {
                let heard = world.pulses.of(place.rank);
                RankStatus {
                    rank: place.rank,
                    node: place.node.clone(),
                    local_rank: place.local_rank,
                    state: state(member),
                    loader: loader.cloned(),
                    pulse: heard.map(|heard| heard.pulse),
                    heard_at: heard.map(|heard| heard.at),
                    slowness: heard.and_then(|heard| heard.slowness(median)),
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
                vitals: node.beat.as_ref().and_then(|beat| beat.vitals.clone()),
                heard_at: node.beat.as_ref().map(|beat| beat.at),
                round_trip: node.beat.as_ref().and_then(|beat| beat.round_trip),
            })
            .collect()
    }
}

impl Status {
    /// Seconds to the last update at the present rate, while there is one.
    ///
    /// It counts samples, not updates: a pass has as many whatever the batch of its phase.
    #[must_use]
    pub fn eta_seconds(&self) -> Option<f64> {
        let latest = self.latest.as_ref().filter(|latest| latest.samples_per_second > 0.0)?;
        let training = matches!(self.phase, PhaseName::Training | PhaseName::Draining);
        let passes = f64::from(self.epochs.saturating_sub(latest.epoch.0));
        let per_pass = latest.steps_per_epoch as f64;
        let batches = (passes * per_pass - latest.step_of_epoch as f64).max(0.0);
        training.then(|| batches * latest.global_batch as f64 / latest.samples_per_second)
    }

    /// What a pass costs in dollars at the present rate, if there is a price.
    #[must_use]
    pub fn dollars_per_epoch(&self) -> Option<f64> {
        self.eta_seconds()?;
        let latest = self.latest.as_ref()?;
        let pass = latest.seconds_per_step()? * latest.steps_per_epoch as f64;
        self.spending.dollars(Duration::try_from_secs_f64(pass).ok()?)
    }

    /// What the whole job will have cost in dollars, if there is a price and it goes on at the present
    /// rate.
    #[must_use]
    pub fn projected_dollars(&self, now: Time) -> Option<f64> {
        let left = Duration::try_from_secs_f64(self.eta_seconds()?).ok()?;
        self.spending.dollars(self.spending.meter.read(now).checked_add(left)?)
    }
}
