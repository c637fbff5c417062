//! An agent's decisions: which rank processes to start, reuse and stop, what to report, and when to exit.
//!
//! Ranks continue to train while the coordinator is away. The session keeps each rank's latest phase, and the steps and
//! evaluations of that time, and reports them in the [`Hello`](crate::message::Hello) of the next connection. Stopping
//! needs no coordinator either: the ranks agree on the step among themselves.
//!
//! [`Session::handle`] passes each event to `coordinator` (the connection and its directives), `ranks` (their
//! processes) or `leaving` (the end of this agent). `slot` is one local rank's slot.

mod coordinator;
mod event;
mod hang;
mod kept_steps;
mod leaving;
mod policy;
mod ranks;
mod slot;
#[cfg(test)]
mod tests;

use std::{collections::VecDeque, time::Duration};

pub use self::{
    event::{Action, Event},
    hang::RANK_HEARTBEAT_INTERVAL,
    leaving::DUPLICATE_SIGNAL_WINDOW,
    policy::Policy,
    ranks::failure_of,
};
use self::{
    kept_steps::KeptSteps,
    slot::{Process, Slot},
};
use crate::{
    exit::Outcome,
    gpu::xid,
    ids::{Generation, JobId, LocalRank, NodeId},
    message::{Commit, PauseState, RankCommand, RankReport},
    time::Time,
};

/// State of the connection to the coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionState {
    Up,
    Connecting,
    Down { retry_at: Time },
}

/// The coming departure of this node.
#[derive(Clone, Debug)]
struct Departure {
    reason: String,
    /// Time when the machine is taken away, if known.
    end: Option<Time>,
    /// Time by which the ranks must have stopped; after it they are asked to exit.
    deadline: Time,
    /// When the node learned of it.
    since: Time,
    /// Whether its ranks were sent that they should save alone.
    has_broken_off: bool,
    /// Whether the only reason is that the job has ended.
    job_is_over: bool,
    /// When the first shutdown signal was received, if one was.
    signalled: Option<Time>,
}

impl Departure {
    /// When ranks that have not stopped should save alone, if they have no coordinator: the others may be cut off, and half
    /// of the time is left. `None` once they were sent that.
    fn break_off_at(&self) -> Option<Time> {
        let half = self.deadline.since(self.since) / 2;
        (!self.has_broken_off).then(|| self.since.after(half))
    }
}

/// State machine of an agent.
#[derive(Clone, Debug)]
pub struct Session {
    policy: Policy,
    node: NodeId,
    /// The job, once the coordinator has sent it.
    job: Option<JobId>,
    slots: Vec<Slot>,
    connection: ConnectionState,
    /// Whether a directive has come over this connection.
    answered: bool,
    /// Whether the ranks know that there is no coordinator.
    ranks_know_of_loss: bool,
    retries: u32,
    generation: Generation,
    /// Whether training is paused until it is resumed.
    pause: PauseState,
    /// Number of the last heartbeat.
    heartbeats_sent: u64,
    /// Time when it was sent.
    heartbeat_sent_at: Time,
    /// Time from the last answered heartbeat to its answer.
    round_trip: Option<Duration>,
    commit: Option<Commit>,
    /// Evaluations of this generation, for the next hello: the coordinator may have missed them.
    evaluations: VecDeque<RankReport>,
    /// Updates of this generation, for the same reason.
    steps: KeptSteps,
    /// Warnings about GPUs that were not sent yet.
    warnings: Vec<String>,
    /// GPU errors that were reported recently.
    recent_xids: xid::RecentXids,
    /// Set once the node must leave.
    departure: Option<Departure>,
    /// Set once the agent is leaving.
    leaving: Option<Outcome>,
    /// Time of exit without a coordinator; set once all ranks are done and that could not be reported.
    final_report_deadline: Option<Time>,
    exited: bool,
    /// When ranks were last checked for hangs.
    hang_checked_at: Time,
    stale_messages: u64,
    actions: Vec<Action>,
}

impl Session {
    /// An agent that can run `slots` ranks. The first [`handle`](Self::handle) connects.
    #[must_use]
    pub fn new(node: NodeId, slots: u32, policy: Policy) -> Self {
        Self {
            policy,
            node,
            job: None,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            connection: ConnectionState::Down { retry_at: Time(0) },
            answered: false,
            ranks_know_of_loss: false,
            retries: 0,
            generation: Generation(0),
            pause: PauseState::default(),
            heartbeats_sent: 0,
            heartbeat_sent_at: Time(0),
            round_trip: None,
            commit: None,
            evaluations: VecDeque::new(),
            steps: KeptSteps::default(),
            warnings: Vec::new(),
            recent_xids: xid::RecentXids::default(),
            departure: None,
            leaving: None,
            final_report_deadline: None,
            exited: false,
            hang_checked_at: Time(0),
            stale_messages: 0,
            actions: Vec::new(),
        }
    }

    /// Sets the job that the coordinator has sent.
    pub fn set_job(&mut self, job: JobId) {
        self.job = Some(job);
    }

    /// Sets the timeouts of the job, once the job is known.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Number of messages ignored because they came from an older generation or process.
    #[must_use]
    pub fn stale_messages(&self) -> u64 {
        self.stale_messages
    }

    /// Present activity of the agent, for people.
    #[must_use]
    pub fn reason(&self) -> String {
        let alive = self.slots.iter().filter(|slot| slot.is_alive()).count();
        let connection = match self.connection {
            ConnectionState::Up if self.answered => "attached",
            ConnectionState::Up | ConnectionState::Connecting | ConnectionState::Down { .. } => {
                "looking for the coordinator"
            }
        };
        match (&self.leaving, &self.departure) {
            (Some(outcome), _) => format!("leaving ({outcome}); {alive} ranks still run"),
            (None, Some(Departure { reason, .. })) => {
                format!("stopping ({reason}); {alive} ranks still run")
            }
            (None, None) => {
                format!("{connection}; {alive} ranks run in generation {}", self.generation)
            }
        }
    }

    /// Time when the session needs an [`Event::Tick`], if no other event comes before.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        if self.exited {
            return None;
        }
        let retry = match self.connection {
            ConnectionState::Down { retry_at } if self.leaving.is_none() => Some(retry_at),
            _ => None,
        };
        let kills = self.slots.iter().filter_map(Slot::kill_at);
        let departure = self.departure.as_ref().filter(|_| self.leaving.is_none());
        let break_off = departure.filter(|_| self.ranks_know_of_loss);
        let break_off = break_off.and_then(Departure::break_off_at);
        let departure = departure.map(|departure| departure.deadline);
        let hang_check =
            (!self.policy.hang_timeout.is_zero() && self.leaving.is_none()).then(|| {
                let reports = self.slots.iter().filter_map(Slot::watched_report);
                let stale = reports.map(|last| last.stale_at(self.policy.hang_timeout)).min()?;
                // Checked more often, to notice when this agent itself was suspended.
                Some(stale.min(self.hang_checked_at.after(self.policy.hang_timeout / 4)))
            });
        let waits =
            retry.into_iter().chain(kills).chain(departure).chain(self.final_report_deadline);
        let waits = waits.chain(break_off);
        waits.chain(hang_check.flatten()).min()
    }

    /// Handles one event and returns the resulting actions.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Action> {
        if self.exited {
            return Vec::new();
        }
        match event {
            Event::Connected => self.connected(now),
            Event::Disconnected => self.disconnected(now),
            Event::Redirected => self.redirected(now),
            Event::Directive(directive) => self.handle_directive(now, directive),
            Event::RankReported { local_rank, incarnation, message } => {
                self.rank_reported(now, local_rank, incarnation, message);
            }
            Event::RankWarm { local_rank, incarnation } => self.rank_warm(local_rank, incarnation),
            Event::RankExited { local_rank, incarnation, failure } => {
                self.rank_exited(now, local_rank, incarnation, failure);
            }
            Event::ShutdownSignal { reason, is_orphan } => {
                if is_orphan {
                    self.policy.final_report_timeout = Duration::ZERO;
                }
                self.shutdown_signal(now, reason);
            }
            Event::InterruptionNotice { reason, end } => self.depart(now, reason, end),
            Event::JobOver { reason } => self.job_over(now, reason),
            Event::CheckpointAdvised { reason } => self.checkpoint_advised(reason),
            Event::GpuFailed { local_ranks, gpu, xid } => {
                self.gpu_failed(now, &local_ranks, &gpu, xid);
            }
            Event::GpuWarning { message } => self.warn(message),
            Event::MachineStats(stats) => self.send_heartbeat(now, stats),
            Event::Tick => {}
        }
        self.handle_timeouts(now);
        self.leave_without_state(now);
        self.exit_when_empty(now);
        std::mem::take(&mut self.actions)
    }

    /// Handles everything that depends on time alone.
    fn handle_timeouts(&mut self, now: Time) {
        if let ConnectionState::Down { retry_at } = self.connection
            && retry_at <= now
            && self.leaving.is_none()
        {
            self.connection = ConnectionState::Connecting;
            self.actions.push(Action::Connect);
        }
        for local_rank in self.local_ranks() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            if slot.kill_at().is_some_and(|at| at <= now) {
                slot.process = Process::Stopping { kill_at: None };
                self.actions.push(Action::Kill(local_rank));
            }
        }
        self.kill_hanging_ranks(now);
        if self.leaving.is_some() {
            return;
        }
        if self.ranks_know_of_loss
            && let Some(departure) = &mut self.departure
            && departure.break_off_at().is_some_and(|at| at <= now)
        {
            departure.has_broken_off = true;
            let generation = self.generation;
            self.send_to_all(&RankCommand::BreakOff { generation });
        }
        if let Some(Departure { reason, deadline, .. }) = &self.departure
            && *deadline <= now
        {
            let late = format!(
                "{reason}; ranks did not stop in time, so the job continues from the last checkpoint"
            );
            // All that is left may be to report that they have stopped.
            let outcome = self.common_outcome();
            let outcome = outcome.unwrap_or(Outcome::Drained { reason: late });
            return self.leave(now, outcome);
        }
        if self.final_report_deadline.is_some_and(|until| until <= now)
            && let Some(outcome) = self.common_outcome()
        {
            self.leave(now, outcome);
        }
    }

    fn local_ranks(&self) -> impl Iterator<Item = LocalRank> + use<> {
        (0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX)).map(LocalRank)
    }

    fn slot_mut(&mut self, local_rank: LocalRank) -> Option<&mut Slot> {
        self.slots.get_mut(local_rank.0 as usize)
    }
}
