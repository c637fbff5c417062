//! The coordinator's decisions: who trains together, when a new generation is needed, when the job
//! is over.
//!
//! ```text
//!            enough ranks                all ready             all started
//! Gathering ─────────────▶ Forming ───────────────▶ Meeting ───────────────▶ Training
//!    ▲                        ▲                        │ lost                  │ lost     │ all done
//!    │ too few ranks          │ due                    ▼                       ▼          ▼
//!    └──────────────────── Backoff ◀──────────────── Settling ◀────────────────┘        Ended
//! ```
//!
//! A rank that dies ends its generation at once. A rank that only lost touch may have lost it to one
//! whose death is about to be reported: `Settling` waits for that, so that one failure makes one
//! new generation, and for nodes that are away, whose ranks may hold the furthest state. After a
//! restart the coordinator is `Reattaching`: training went on without it,
//! and if every rank of the last generation is still there, it goes on.
//!
//! Training that goes wrong also leads to a new generation, by way of `Settling`, but is no failure.
//! Until that generation is opened the rollback is due, and nothing of the present one may go on; not even
//! if this coordinator dies and another finds the ranks in their places. A budget that is used up drains the job.
//!
//! [`Action::Persist`] comes before every action that another process can see; [`Engine::replay`]
//! rebuilds the machine from what was persisted.
//!
//! # Where to look
//!
//! An event goes from [`Engine::handle`] to one of four files, which decide what follows over all of the machine:
//!
//! | file | events |
//! |---|---|
//! | `attachments` | agents attach, detach and beat; nodes must go, or join |
//! | `reports` | ranks make progress, are lost, diverge |
//! | `requests` | users, machines and budgets ask for a drain, a pause or a checkpoint |
//! | `transitions` | what these lead to: from one phase to the next |
//!
//! The state lies in groups. Each has a file, whose functions see that group and their arguments alone:
//!
//! | group | file | what it is |
//! |---|---|---|
//! | `Nodes` | `nodes`, `quarantine`, `elastic` | who is attached, left out, leaving or joining |
//! | `Lifecycle` | `lifecycle`, `membership`, `pulses` | the generation, its phase and its ranks |
//! | `Results` | `results`, `evaluation`, `skips` | steps, evaluations and checkpoints reported |
//! | `Accounting` | `budget` | attached time, and its limit |
//! | `DrainStatus`, `Pauses` | `drain`, `pause` | requests that are under way |
//! | `Divergences` | `divergence`, `diagnosis` | training that went wrong |
//! | `Recoveries` | `recovery` | failures and changes of nodes, and what they cost |
//!
//! `record` replays the journal, `status` is the view for readers, `notice` has the words of announcements.

mod attachments;
mod budget;
mod diagnosis;
mod divergence;
mod drain;
mod elastic;
mod evaluation;
mod event;
mod lifecycle;
mod membership;
mod nodes;
mod notice;
mod pause;
mod policy;
mod pulses;
mod quarantine;
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

use std::sync::Arc;

use self::{
    budget::Accounting,
    divergence::Divergences,
    lifecycle::{Lifecycle, Phase},
    nodes::Nodes,
    pause::Pauses,
    policy::Policy,
    recovery::Recoveries,
    results::Results,
};
pub use self::{
    budget::{Meter, Share},
    diagnosis::WrittenDiagnosis,
    divergence::Incident,
    drain::DrainStatus,
    evaluation::Evaluation,
    event::{Action, Event, Measured},
    notice::{Notice, NoticeKind},
    pause::Pause,
    record::{Origin, Record},
    recovery::{Parts, Recovery},
    status::{NodeStatus, PhaseName, RankState, RankStatus, Spending, Status},
};
use crate::{
    exit::Outcome,
    ids::{Generation, NodeId},
    message::Directive,
    time::Time,
};
use baton_recipe::{JobSpec, Step};

/// The coordinator's machine.
#[derive(Clone, Debug)]
pub struct Engine {
    spec: Arc<JobSpec>,
    origin: Origin,
    policy: Policy,
    nodes: Nodes,
    lifecycle: Lifecycle,
    results: Results,
    accounting: Accounting,
    drain: Option<DrainStatus>,
    pauses: Pauses,
    divergences: Divergences,
    recoveries: Recoveries,
    stale_messages: u64,
    wake: Wake,
    /// What the present event calls for so far.
    actions: Vec<Action>,
}

/// When time alone may change something.
#[derive(Clone, Copy, Debug, Default)]
struct Wake {
    /// About a node.
    nodes_at: Option<Time>,
    /// About anything.
    at: Option<Time>,
}

impl Engine {
    /// A new job. The first action of the first [`handle`](Self::handle) persists its origin.
    #[must_use]
    pub fn new(spec: &JobSpec, origin: Origin, now: Time) -> Self {
        let mut engine = Self::blank(spec, origin.clone(), now);
        engine.actions.push(Action::Persist(Record::Created(origin)));
        engine
    }

    fn blank(spec: &JobSpec, origin: Origin, now: Time) -> Self {
        Self {
            policy: Policy::new(spec),
            nodes: Nodes::default(),
            lifecycle: Lifecycle::new(origin.first_generation, now),
            results: Results::default(),
            accounting: Accounting::new(&spec.limits),
            drain: None,
            pauses: Pauses::default(),
            divergences: Divergences::default(),
            recoveries: Recoveries::default(),
            stale_messages: 0,
            wake: Wake::default(),
            actions: Vec::new(),
            spec: Arc::new(spec.clone()),
            origin,
        }
    }

    /// What the job began with.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// How the job ended, if it has.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        self.lifecycle.outcome()
    }

    /// The newest generation.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.lifecycle.generation
    }

    /// One event in, the actions it calls for out.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Action> {
        let is_sign_of_life = event.is_sign_of_life();
        match event {
            Event::Attached { attachment, hello } => self.attached(now, attachment, hello),
            Event::Detached { node, attachment } => self.detached(now, &node, attachment),
            Event::Reported { node, attachment, report } => {
                self.reported(now, &node, attachment, report);
            }
            Event::Drain { reason } => self.drain(now, reason, None),
            Event::Checkpoint => self.checkpoint(),
            Event::Pause { reason } => self.pause(now, reason),
            Event::Resume => self.resume(now),
            Event::Stop => self.end(now, Outcome::Stopped),
            Event::TakenOver { message } => self.taken_over(now, message),
            Event::Tick => {}
        }
        // With ten thousand ranks there are as many signs of life a second, and as many nodes to look at for each.
        if !is_sign_of_life || self.wake.at.is_some_and(|at| at <= now) {
            self.expire(now);
            self.accounting.run_meter(now, self.nodes.any_attached() && self.outcome().is_none());
            self.set_wake();
        }
        std::mem::take(&mut self.actions)
    }

    /// What time alone brings about.
    fn expire(&mut self, now: Time) {
        self.check_budget(now);
        let nodes_wake = self.wake.nodes_at.is_some_and(|at| at <= now);
        if nodes_wake {
            self.expire_waiting_nodes(now);
        }
        self.expire_drain(now);
        if nodes_wake {
            self.expire_away_nodes(now);
        }
        match &self.lifecycle.phase {
            Phase::Backoff { until } if *until <= now => self.open(now),
            Phase::Forming { world, until } | Phase::Meeting { world, until }
                if *until <= now && self.nodes.away_from(world).is_none() =>
            {
                self.fail_late(now);
            }
            Phase::Settling { .. } => self.fail_when_losses_are_known(now),
            Phase::Reattaching { until, .. } if *until <= now => self.give_up_reattaching(now),
            _ => {}
        }
    }

    // ---- the next deadline ----

    /// When the machine wants a [`Event::Tick`], if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        self.wake.at
    }

    /// [`deadline`](Self::deadline), looked for in all that there is: simulations want both to be the same.
    #[doc(hidden)]
    #[must_use]
    pub fn deadline_by_recount(&self) -> Option<Time> {
        self.next_wake(self.nodes.recount_wake_at())
    }

    fn set_wake(&mut self) {
        let nodes_at = self.nodes.wake_at();
        self.wake = Wake { nodes_at, at: self.next_wake(nodes_at) };
    }

    fn next_wake(&self, nodes_at: Option<Time>) -> Option<Time> {
        let phase = match &self.lifecycle.phase {
            Phase::Backoff { until } | Phase::Reattaching { until, .. } => Some(*until),
            // A node that is away is waited for until its own deadline.
            Phase::Forming { world, until }
            | Phase::Meeting { world, until }
            | Phase::Settling { world, until, .. } => {
                self.nodes.away_from(world).is_none().then_some(*until)
            }
            Phase::Gathering | Phase::Training { .. } => None,
            Phase::Ended { .. } => return None,
        };
        // A job that drains needs no more of its budget.
        let ends_at = match &self.drain {
            Some(drain) => Some(drain.until),
            None => self.accounting.wakes_at(),
        };
        phase.into_iter().chain(nodes_at).chain(ends_at).min()
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

    fn announce(&mut self, kind: NoticeKind, message: String) {
        self.announce_at(kind, None, message);
    }

    fn announce_at(&mut self, kind: NoticeKind, step: Option<Step>, message: String) {
        let generation = self.lifecycle.generation;
        self.actions.push(Action::Announce(Notice { kind, generation, step, message }));
    }
}
