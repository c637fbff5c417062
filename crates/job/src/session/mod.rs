//! An agent's decisions: which rank processes to spawn, reuse and stop, what to pass on, when to
//! leave.
//!
//! Ranks go on training while the coordinator is away: news are kept as each rank's latest phase and
//! told in the [`Hello`](crate::message::Hello) of the next connection. A request to stop needs no coordinator
//! either: the ranks agree on the step among themselves.
//!
//! An event goes from [`Session::handle`] to `coordinator` (its connection and orders), `ranks` (their processes) or
//! `leaving` (the end of this agent's part). `slot` is one local rank's place.

mod coordinator;
mod event;
mod hang;
mod leaving;
mod policy;
mod ranks;
mod slot;
#[cfg(test)]
mod tests;

use std::{collections::VecDeque, time::Duration};

use self::slot::{Process, Slot};
pub use self::{
    event::{Action, Event},
    hang::PULSE,
    policy::Policy,
    ranks::failure_of,
};
use crate::{
    exit::Outcome,
    gpu::xid,
    ids::{Generation, LocalRank, NodeId},
    message::{Commit, Hold, Report},
    time::Time,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Up,
    Trying,
    Down { retry_at: Time },
}

/// The node must go.
#[derive(Clone, Debug)]
struct Going {
    reason: String,
    /// When the machine ends, if that is known.
    end: Option<Time>,
    /// When patience ends.
    until: Time,
    /// Whether a signal said so.
    by_signal: bool,
}

/// The agent's machine.
#[derive(Clone, Debug)]
pub struct Session {
    policy: Policy,
    node: NodeId,
    slots: Vec<Slot>,
    link: Link,
    retries: u32,
    generation: Generation,
    /// Whether training stands still until told otherwise.
    hold: Hold,
    /// The number of the last beat, when it was sent, and how long the last answer took.
    beats: u64,
    beat_sent_at: Time,
    round_trip: Option<Duration>,
    commit: Option<Commit>,
    /// What was told in this generation, in case that nobody heard it.
    evaluations: VecDeque<Report>,
    /// About GPUs; nobody has been told so far.
    warnings: Vec<String>,
    /// Errors of GPUs told of lately.
    told: xid::Told,
    /// Set once the node must go.
    going: Option<Going>,
    /// Set once the end is decided.
    leaving: Option<Outcome>,
    /// Set once all ranks are done and nobody has been told.
    farewell_until: Option<Time>,
    exited: bool,
    /// When ranks were last looked after.
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
            slots: (0..slots).map(|_| Slot::default()).collect(),
            link: Link::Down { retry_at: Time(0) },
            retries: 0,
            generation: Generation(0),
            hold: Hold::default(),
            beats: 0,
            beat_sent_at: Time(0),
            round_trip: None,
            commit: None,
            evaluations: VecDeque::new(),
            warnings: Vec::new(),
            told: xid::Told::default(),
            going: None,
            leaving: None,
            farewell_until: None,
            exited: false,
            hang_checked_at: Time(0),
            stale_messages: 0,
            actions: Vec::new(),
        }
    }

    /// Takes over the waits of the job it has been told of.
    pub fn adopt(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Messages refused because they came from an older generation or process.
    #[must_use]
    pub fn stale_messages(&self) -> u64 {
        self.stale_messages
    }

    /// What the agent does, in words.
    #[must_use]
    pub fn reason(&self) -> String {
        let alive = self.slots.iter().filter(|slot| slot.is_alive()).count();
        let link = match self.link {
            Link::Up => "attached",
            Link::Trying | Link::Down { .. } => "looking for the coordinator",
        };
        match (&self.leaving, &self.going) {
            (Some(outcome), _) => format!("leaving ({outcome}); {alive} ranks still run"),
            (None, Some(Going { reason, .. })) => {
                format!("stopping ({reason}); {alive} ranks still run")
            }
            (None, None) => format!("{link}; {alive} ranks run in generation {}", self.generation),
        }
    }

    /// When the machine wants a [`Event::Tick`], if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        if self.exited {
            return None;
        }
        let retry = match self.link {
            Link::Down { retry_at } if self.leaving.is_none() => Some(retry_at),
            _ => None,
        };
        let kills = self.slots.iter().filter_map(Slot::kill_at);
        let patience =
            self.going.as_ref().filter(|_| self.leaving.is_none()).map(|going| going.until);
        let minding = (!self.policy.hang.is_zero() && self.leaving.is_none()).then(|| {
            let silent = self.slots.iter().filter_map(Slot::watched);
            let silent = silent.map(|heard| heard.silent_at(self.policy.hang)).min()?;
            // More often, to tell a rank's silence from this agent's own sleep.
            Some(silent.min(self.hang_checked_at.after(self.policy.hang / 4)))
        });
        let waits = retry.into_iter().chain(kills).chain(patience).chain(self.farewell_until);
        waits.chain(minding.flatten()).min()
    }

    /// One event in, the actions it calls for out.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Action> {
        if self.exited {
            return Vec::new();
        }
        match event {
            Event::Connected => self.connected(now),
            Event::Disconnected => self.disconnected(now),
            Event::Directed(directive) => self.directed(now, directive),
            Event::RankSaid { local_rank, incarnation, says } => {
                self.rank_said(now, local_rank, incarnation, says);
            }
            Event::RankWarm { local_rank, incarnation } => self.warm(local_rank, incarnation),
            Event::RankExited { local_rank, incarnation, failure } => {
                self.rank_exited(now, local_rank, incarnation, failure);
            }
            Event::MustGo { reason } => self.must_go(now, reason),
            Event::Noticed { reason, end } => self.go(now, reason, end),
            Event::Advised { reason } => self.advised(reason),
            Event::GpuFailed { local_ranks, gpu, xid } => {
                self.gpu_failed(now, &local_ranks, &gpu, xid);
            }
            Event::GpuWarning { message } => self.warn(message),
            Event::Vitals(vitals) => self.beat(now, vitals),
            Event::Tick => {}
        }
        self.expire(now);
        self.leave_when_empty(now);
        std::mem::take(&mut self.actions)
    }

    /// What time alone brings about.
    fn expire(&mut self, now: Time) {
        if let Link::Down { retry_at } = self.link
            && retry_at <= now
            && self.leaving.is_none()
        {
            self.link = Link::Trying;
            self.actions.push(Action::Connect);
        }
        for local_rank in self.locals() {
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
        if let Some(Going { reason, until, .. }) = &self.going
            && *until <= now
        {
            let reason =
                format!("{reason}; ranks did not stop in time, the last checkpoint counts");
            return self.leave(now, Outcome::Drained { reason });
        }
        if self.farewell_until.is_some_and(|until| until <= now)
            && let Some(outcome) = self.all_done()
        {
            self.leave(now, outcome);
        }
    }

    fn locals(&self) -> impl Iterator<Item = LocalRank> + use<> {
        (0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX)).map(LocalRank)
    }

    fn slot_mut(&mut self, local_rank: LocalRank) -> Option<&mut Slot> {
        self.slots.get_mut(local_rank.0 as usize)
    }
}
