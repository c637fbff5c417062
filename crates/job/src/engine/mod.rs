//! The coordinator's decisions: which ranks train together, when a new generation is needed, and when the job is over.
//!
//! ```text
//!            enough ranks                all ready             all started
//! Gathering ─────────────▶ Forming ───────────────▶ Meeting ───────────────▶ Training
//!    ▲                        ▲                        │ lost                  │ lost     │ all done
//!    │ too few ranks          │ due                    ▼                       ▼          ▼
//!    └──────────────────── Backoff ◀──────────────── Detecting ◀────────────────┘        Ended
//! ```
//!
//! A rank that dies ends its generation at once. A rank that only lost its connection may have lost it to a rank whose
//! death is about to be reported. `Detecting` waits for that report, so that one failure causes only one new
//! generation. It also waits for nodes that are disconnected, because their ranks may hold the newest state. After a
//! restart the coordinator is `Reattaching`: training continued without it, and if every rank of the last generation
//! is still running, that generation continues.
//!
//! Training that diverges also leads to a new generation, by way of `Detecting`, but is not counted as a failure.
//! The rollback is pending until that generation is opened, and no rank of the current generation may continue, even
//! if this coordinator dies and another one finds the ranks still running.
//!
//! If the checkpoint store refuses a generation, the job is in `Backoff` too, and ranks that run keep their state.
//!
//! A budget that is used up drains the job. So does a failure that another try would repeat, if ranks hold state: they
//! save it in a last generation of their own, and then the job fails.
//!
//! [`Action::Persist`] comes before every action that another process can observe; [`Engine::replay`] rebuilds the
//! state machine from what was persisted.
//!
//! # Where to look
//!
//! [`Engine::handle`] passes an event to one of six files, which decide what follows for the whole state machine:
//!
//! | file | events |
//! |---|---|
//! | `attachments` | agents attach, detach and send heartbeats; nodes leave or join |
//! | `reports` | ranks make progress, are lost, diverge |
//! | `requests` | users, machines and budgets ask for a drain, a pause or a checkpoint |
//! | `opening` | the checkpoint store accepts or refuses a generation |
//! | `ending` | the job ends, after its ranks have saved what only they hold |
//! | `transitions` | the changes from one phase to the next that follow |
//!
//! The state is divided into groups. Each group has its own files, whose functions use only that group and their
//! arguments:
//!
//! | group | files | contents |
//! |---|---|---|
//! | `Nodes` | `nodes`, `quarantine`, `elastic` | nodes that are attached, quarantined, leaving or joining |
//! | `Lifecycle` | `lifecycle`, `membership`, `rank_heartbeats` | the generation, its phase and its ranks |
//! | `Results` | `results`, `evaluation`, `skips` | steps, evaluations and checkpoints reported |
//! | `Accounting` | `budget` | attached time, its cost, and the limits on both |
//! | `DrainStatus`, `Pauses`, `Profile` | `drain`, `pause`, `profile` | requests in progress |
//! | `Divergences` | `divergence`, `diagnosis` | training that diverged |
//! | `RecoveryHistory` | `recovery` | failures and changes of nodes, and how long each took |
//!
//! `record` replays the journal, `status` is the view for readers, `job_event` contains the texts of job events.

mod attachments;
mod budget;
mod connecting;
mod diagnosis;
mod divergence;
mod drain;
mod elastic;
mod ending;
mod evaluation;
mod event;
mod event_limit;
mod job_event;
mod lifecycle;
mod membership;
mod nodes;
mod opening;
mod pause;
mod plausible;
mod policy;
mod profile;
mod quarantine;
mod rank_heartbeats;
mod record;
mod recovery;
mod reports;
mod requests;
mod results;
mod skips;
mod status;
#[cfg(test)]
mod tests;
mod transitions;

use std::{sync::Arc, time::Duration};

use self::{
    budget::Accounting,
    divergence::Divergences,
    event_limit::EventLimit,
    lifecycle::{Lifecycle, Phase},
    nodes::Nodes,
    pause::Pauses,
    policy::Policy,
    profile::Profile,
    recovery::RecoveryHistory,
    results::Results,
};
pub use self::{
    budget::{Budget, Meter, MeterShare},
    diagnosis::WrittenDiagnosis,
    divergence::Incident,
    drain::DrainStatus,
    evaluation::EvaluationResult,
    event::{Action, AgentRetry, Event, MetricPoint},
    job_event::{JobEvent, JobEventKind},
    pause::Pause,
    profile::MAX_PROFILED_STEPS,
    record::{JobOrigin, RanksOfLostJob, Record},
    recovery::{Recovery, RecoveryParts},
    status::{
        LocalCheckpoint, NodeStatus, PhaseName, RankState, RankStatus, SHOWN_NODES, Spending,
        Status,
    },
};
use crate::{
    exit::{Failure, Outcome},
    ids::{Generation, NodeId},
    message::Directive,
    time::Time,
};
use baton_recipe::{JobSpec, Step};

/// The coordinator's state machine.
#[derive(Clone, Debug)]
pub struct Engine {
    spec: Arc<JobSpec>,
    origin: JobOrigin,
    policy: Policy,
    /// Whether this coordinator continues the job of a lost one.
    has_moved: bool,
    nodes: Nodes,
    lifecycle: Lifecycle,
    results: Results,
    accounting: Accounting,
    drain: Option<DrainStatus>,
    /// Why the job fails once its ranks have saved what they hold; then `drain` is set too.
    fails_with: Option<Failure>,
    pauses: Pauses,
    profile: Option<Profile>,
    divergences: Divergences,
    recoveries: RecoveryHistory,
    stale_messages: u64,
    /// Limits the events that agents cause.
    notes: EventLimit,
    wake: Wake,
    /// Actions collected so far for the current event.
    actions: Vec<Action>,
}

/// Times at which something may change without an event.
#[derive(Clone, Copy, Debug, Default)]
struct Wake {
    /// For the nodes.
    nodes_at: Option<Time>,
    /// For the whole state machine.
    at: Option<Time>,
}

/// Least time for the agents of a lost coordinator to find this one.
const REDIRECTION_TIMEOUT: Duration = Duration::from_secs(5);

impl Engine {
    /// A new job. The first action of the first [`handle`](Self::handle) persists its origin.
    #[must_use]
    pub fn new(spec: &JobSpec, origin: JobOrigin, now: Time) -> Self {
        let mut engine = Self::blank(spec, origin.clone(), now);
        engine.actions.push(Action::Persist(Record::Created(origin)));
        engine
    }

    /// A job that continues `before` with another recipe. The time so far counts, and what was paid for it.
    #[must_use]
    pub fn continuing(before: &Self, spec: &JobSpec, origin: JobOrigin, now: Time) -> Self {
        let mut engine = Self::new(spec, origin, now);
        let carried = engine.accounting.carry_over(&before.accounting, now);
        engine.actions.extend(carried);
        engine
    }

    /// Whether a job that was complete by the recipe `last` may go on: its recipe now says otherwise when to end early.
    #[must_use]
    pub fn may_go_on(&self, last: &JobSpec) -> bool {
        self.outcome() == Some(&Outcome::Completed)
            && last.limits.early_end() != self.spec.limits.early_end()
    }

    fn blank(spec: &JobSpec, origin: JobOrigin, now: Time) -> Self {
        Self {
            policy: Policy::new(spec),
            has_moved: false,
            nodes: Nodes::default(),
            lifecycle: Lifecycle::new(origin.first_generation, now),
            results: Results::default(),
            accounting: Accounting::new(&spec.limits),
            drain: None,
            fails_with: None,
            pauses: Pauses::default(),
            profile: None,
            divergences: Divergences::default(),
            recoveries: RecoveryHistory::default(),
            stale_messages: 0,
            notes: EventLimit::new(now),
            wake: Wake::default(),
            actions: Vec::new(),
            spec: Arc::new(spec.clone()),
            origin,
        }
    }

    /// The values with which the job began.
    #[must_use]
    pub fn origin(&self) -> &JobOrigin {
        &self.origin
    }

    /// How the job ended, if it is over.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        self.lifecycle.outcome()
    }

    /// Whether another node can continue the job if this coordinator is lost: there are several, or this coordinator has just
    /// replaced a lost one, whose nodes are on their way.
    #[must_use]
    pub fn can_be_replaced(&self) -> bool {
        self.spec.cluster.standby && (self.has_moved || self.nodes.several_are_attached())
    }

    /// The newest generation.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.lifecycle.generation
    }

    /// Handles one event and returns the actions to perform, in order.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Action> {
        let is_heartbeat = event.is_heartbeat();
        match event {
            Event::Attached { attachment, hello } => self.attached(now, attachment, hello),
            Event::Detached { node, attachment } => self.detached(now, &node, attachment),
            Event::Reported { node, attachment, report } => {
                self.reported(now, &node, attachment, report);
            }
            Event::Drain { reason } => self.drain_as_requested(now, reason),
            Event::Checkpoint => self.checkpoint(),
            Event::Pause { reason } => self.pause(now, reason),
            Event::Resume => self.resume(now),
            Event::Profile { name, steps } => self.profile(name, steps),
            Event::Stop => self.end(now, Outcome::Stopped),
            Event::Fenced => self.fenced(now),
            Event::FenceFailed { failure } => self.fence_failed(now, failure),
            Event::TakenOver { message } => self.taken_over(now, message),
            Event::JournalCopyFailed { problem } => {
                self.publish(JobEventKind::StoreUnavailable, problem);
            }
            Event::CoordinatorMoved { text } => {
                self.has_moved = true;
                self.lifecycle.wait_for_agents_until(now.after(REDIRECTION_TIMEOUT));
                self.publish(JobEventKind::CoordinatorMoved, text);
            }
            Event::CheckpointFound(found) => self.checkpoint_found(now, found),
            Event::Tick => {}
        }
        self.end_profile_if_interrupted();
        // Ten thousand ranks send ten thousand heartbeats a second; checking every node for each would take too long.
        if !is_heartbeat || self.wake.at.is_some_and(|at| at <= now) {
            self.expire(now);
            self.accounting
                .set_meter_running(now, self.nodes.any_attached() && self.outcome().is_none());
            self.set_wake();
        }
        std::mem::take(&mut self.actions)
    }

    /// Handles every timeout that has passed.
    fn expire(&mut self, now: Time) {
        if self.outcome().is_some() {
            return;
        }
        self.report_slow_store(now);
        self.check_budget(now);
        let nodes_wake = self.wake.nodes_at.is_some_and(|at| at <= now);
        if nodes_wake {
            self.expire_waiting_nodes(now);
        }
        self.expire_drain(now);
        if self.lifecycle.opening.is_none() {
            self.break_off_if_due(now);
        }
        if nodes_wake {
            self.expire_disconnected_nodes(now);
        }
        // The timeouts of the phase do not matter while the next generation opens.
        if self.lifecycle.is_losing_while_opening() {
            self.fail_once_losses_are_known(now);
        }
        if self.lifecycle.opening.is_some() {
            return self.open_if_fenced(now);
        }
        match &self.lifecycle.phase {
            Phase::Backoff { until } if *until <= now => self.open(now),
            Phase::Forming { world, until } | Phase::Meeting { world, until }
                if *until <= now && self.nodes.disconnected_in(world).is_none() =>
            {
                self.fail_late(now);
            }
            Phase::Detecting { .. } => self.fail_once_losses_are_known(now),
            Phase::Reattaching { until, .. } if *until <= now => self.give_up_reattaching(now),
            Phase::Gathering => self.look_for_the_last_checkpoint(now),
            _ => {}
        }
        if self.lifecycle.end_store_pause(now) {
            self.adapt_to_nodes(now);
        }
    }

    // ---- the next deadline ----

    /// When the state machine needs an [`Event::Tick`], if no other event comes before.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        self.wake.at
    }

    /// [`deadline`](Self::deadline), computed from the whole state instead of cached values. Simulations check that
    /// both are equal.
    #[doc(hidden)]
    #[must_use]
    pub fn deadline_by_recount(&self) -> Option<Time> {
        self.next_wake(self.nodes.recount_next_wake_at())
    }

    fn set_wake(&mut self) {
        let nodes_at = self.nodes.next_wake_at();
        self.wake = Wake { nodes_at, at: self.next_wake(nodes_at) };
    }

    fn next_wake(&self, nodes_at: Option<Time>) -> Option<Time> {
        let opening = self.lifecycle.opening.as_ref();
        let phase = match &self.lifecycle.phase {
            Phase::Ended { .. } => return None,
            _ if opening.is_some() && !self.lifecycle.is_losing_while_opening() => None,
            Phase::Backoff { until } | Phase::Reattaching { until, .. } => Some(*until),
            // A disconnected node has its own deadline, and the engine waits until then.
            Phase::Forming { world, until }
            | Phase::Meeting { world, until }
            | Phase::Detecting { world, until, .. } => {
                self.nodes.disconnected_in(world).is_none().then_some(*until)
            }
            Phase::Gathering => self.looks_at(),
            Phase::Training { .. } => None,
        };
        // While the job drains, its budget no longer matters.
        let ends_at = match &self.drain {
            Some(drain) => Some(drain.until),
            None => self.accounting.wakes_at(),
        };
        let retry_at = self.lifecycle.store_outage.and_then(|outage| outage.retry_at);
        let connects = match opening {
            Some(opening) => opening.slow_at,
            None => self.breaks_off_at(),
        };
        let all = phase.into_iter().chain(nodes_at).chain(ends_at).chain(retry_at);
        all.chain(connects).min()
    }

    // ---- actions ----

    fn send(&mut self, node: &NodeId, directive: Directive) {
        if let Some(state) = self.nodes.get(node).filter(|state| state.is_attached()) {
            let attachment = state.attachment;
            self.actions.push(Action::Send { node: node.clone(), attachment, directive });
        }
    }

    fn send_to_world(&mut self, directive: &Directive) {
        let world = self.lifecycle.world();
        let nodes: Vec<NodeId> =
            world.map(|world| world.nodes().cloned().collect()).unwrap_or_default();
        for node in nodes {
            self.send(&node, directive.clone());
        }
    }

    /// Publishes an event that an agent may cause as often as it likes, unless there were too many. The last one for the
    /// moment says so.
    fn note(&mut self, now: Time, kind: JobEventKind, mut message: String) {
        if !self.notes.allows(now) {
            return;
        }
        if self.notes.is_used_up() {
            message += "; there were many such events, and most of the next ones are left out";
        }
        self.publish(kind, message);
    }

    fn publish(&mut self, kind: JobEventKind, message: String) {
        self.publish_at(kind, None, message);
    }

    fn publish_at(&mut self, kind: JobEventKind, step: Option<Step>, message: String) {
        let generation = self.lifecycle.generation;
        self.actions.push(Action::Publish(JobEvent { kind, generation, step, message }));
    }
}
