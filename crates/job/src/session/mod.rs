//! An agent's decisions: which rank processes to spawn, reuse and stop, what to pass on, when to
//! leave.
//!
//! Ranks go on training while the coordinator is away: news are kept as each rank's latest phase and
//! told in the [`Hello`] of the next connection. A request to stop needs no coordinator either: the
//! ranks agree on the step among themselves.

mod hang;
mod slot;
#[cfg(test)]
mod tests;

use std::{collections::VecDeque, time::Duration};

pub use self::hang::PULSE;
use self::{
    hang::Heard,
    slot::{Process, Seat, Slot},
};
use crate::{
    exit::{Class, Failure, Outcome},
    gpu::xid::{self, Suspicion, Xid},
    ids::{Generation, Incarnation, LocalRank, NodeId, Rank},
    message::{
        Beat, Commit, Directive, Hello, Hold, Holding, Launch, RankCommand, RankNews, RankPhase,
        RankSays, Report, Vitals,
    },
    time::Time,
};
use baton_recipe::JobSpec;

/// What the machine is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A connection to the coordinator stands.
    Connected,
    /// The connection ended, or none could be made.
    Disconnected,
    /// The coordinator sent something.
    Directed(Directive),
    /// A rank process sent something.
    RankSaid {
        /// Whose place.
        local_rank: LocalRank,
        /// Which process in it.
        incarnation: Incarnation,
        /// What.
        says: RankSays,
    },
    /// A rank process has loaded all it needs and waits for a place in a generation.
    RankWarm {
        /// Whose place.
        local_rank: LocalRank,
        /// Which process in it.
        incarnation: Incarnation,
    },
    /// A rank process ended.
    RankExited {
        /// Whose place.
        local_rank: LocalRank,
        /// Which process in it.
        incarnation: Incarnation,
        /// How, unless it said that it was done.
        failure: Failure,
    },
    /// A signal: this node must go. The second one means at once.
    MustGo {
        /// Why, in words.
        reason: String,
    },
    /// Whoever owns the machine takes it away.
    Noticed {
        /// Why, in words.
        reason: String,
        /// When, if that is known.
        end: Option<Time>,
    },
    /// Whoever owns the machine may soon take it away: what is not saved is in danger.
    Advised {
        /// Why, in words.
        reason: String,
    },
    /// The driver tells of an error of a GPU.
    GpuFailed {
        /// Who has it, or a part of it.
        local_ranks: Vec<LocalRank>,
        /// Its name, for people.
        gpu: String,
        /// Which error.
        xid: Xid,
    },
    /// Something about a GPU that its user should know.
    GpuWarning {
        /// One line: which, what, what to do.
        message: String,
    },
    /// How the machine does; once a second, to be told.
    Vitals(Option<Vitals>),
    /// The time of [`Session::deadline`] has come.
    Tick,
}

/// What the shell must do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Open a connection to the coordinator.
    Connect,
    /// Send over the present connection.
    Send(Report),
    /// Start a rank process.
    Spawn {
        /// Its place.
        local_rank: LocalRank,
        /// Its number in that place.
        incarnation: Incarnation,
    },
    /// Have a process ready that the next [`Spawn`](Self::Spawn) takes, if there is none.
    KeepSpare,
    /// Send to a rank process.
    Tell {
        /// Its place.
        local_rank: LocalRank,
        /// What.
        command: RankCommand,
    },
    /// Ask a rank process to end.
    Terminate(LocalRank),
    /// End a rank process (SIGKILL to its group).
    Kill(LocalRank),
    /// Leave; no rank process is left.
    Exit(Outcome),
}

/// Waits of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Between that and SIGKILL.
    pub kill_after: Duration,
    /// Between the request to go and asking ranks to end.
    pub drain: Duration,
    /// First pause between two tries to connect; it doubles up to 16 times.
    pub reconnect: Duration,
    /// How long a rank that trains may be silent, or at one thing. Zero: for ever.
    pub hang: Duration,
    /// Whether to keep a process more than there are places.
    pub warm_spare: bool,
    /// Without a coordinator: how long after all ranks are done the agent still tries to tell.
    pub farewell: Duration,
}

impl Policy {
    /// The waits of a job.
    #[must_use]
    pub fn new(spec: &JobSpec) -> Self {
        Self {
            drain: Duration::from_secs_f64(spec.cluster.drain_seconds),
            hang: Duration::from_secs_f64(spec.cluster.hang_seconds),
            warm_spare: spec.cluster.warm_spare,
            ..Self::default()
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            kill_after: Duration::from_secs(5),
            drain: Duration::from_secs(100),
            reconnect: Duration::from_millis(100),
            hang: Duration::ZERO,
            warm_spare: false,
            farewell: Duration::from_secs(10),
        }
    }
}

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

/// Evaluations that are told again to a coordinator that comes back.
const EVALUATIONS_KEPT: usize = 256;

/// Warnings about GPUs that are kept for a coordinator that comes back; the oldest ones, as others follow from them.
const WARNINGS_KEPT: usize = 64;

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
    minded_at: Time,
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
            minded_at: Time(0),
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
            Some(silent.min(self.minded_at.after(self.policy.hang / 4)))
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

    // ---- the coordinator ----

    fn connected(&mut self, now: Time) {
        if self.leaving.is_some() {
            // Nobody should count on it any more.
            return;
        }
        self.link = Link::Up;
        self.retries = 0;
        self.farewell_until = None;
        let hello = Hello {
            node: self.node.clone(),
            slots: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
            holding: self.holding(),
        };
        self.actions.push(Action::Send(Report::Hello(hello)));
        // What the coordinator heard before it knows to be old.
        let evaluations = self.evaluations.iter().cloned().map(Action::Send);
        self.actions.extend(evaluations);
        for message in std::mem::take(&mut self.warnings) {
            self.warn(message);
        }
        self.report_going(now);
    }

    fn disconnected(&mut self, now: Time) {
        let pause = self.policy.reconnect * (1 << self.retries.min(4));
        self.retries = self.retries.saturating_add(1);
        let was_up = self.link == Link::Up;
        self.link = Link::Down { retry_at: now.after(pause) };
        if let Some(going) = self.going.as_ref().filter(|_| was_up) {
            // Nobody else tells the ranks now.
            let reason = going.reason.clone();
            self.drain_ranks(reason);
        }
    }

    fn holding(&self) -> Option<Holding> {
        let generation = self.generation;
        let ranks: Vec<_> =
            self.slots.iter().filter_map(|slot| slot.standing(generation)).collect();
        let known = generation != Generation(0);
        known.then(|| Holding { generation, ranks, commit: self.commit.clone() })
    }

    fn directed(&mut self, now: Time, directive: Directive) {
        if self.leaving.is_some() {
            return;
        }
        match directive {
            Directive::Launch(launch) if launch.generation > self.generation => {
                self.launch(now, launch)
            }
            // Told again, because an agent without ranks reconnected: all is done already, but for what has changed
            // since.
            Directive::Launch(launch) if launch.generation == self.generation => {
                self.hold(launch.hold);
            }
            Directive::Begin { generation, peers } if generation == self.generation => {
                self.begin(&peers);
            }
            Directive::Checkpoint { generation } if generation == self.generation => {
                // One vote is enough. Were all to vote, one would do so after the step at which the
                // others have saved, and there would be two checkpoints for one wish.
                let is_first = |slot: &Slot| slot.seat.as_ref().is_some_and(|s| s.rank == Rank(0));
                self.tell_where(is_first, &RankCommand::Checkpoint { generation });
            }
            Directive::Drain { generation, reason } if generation == self.generation => {
                self.tell_all(&RankCommand::Drain { generation, reason });
            }
            Directive::Hold(hold) if hold.number > self.hold.number => self.hold(hold),
            Directive::Heard { number } => {
                if number == self.beats {
                    self.round_trip = Some(now.since(self.beat_sent_at));
                }
            }
            Directive::Warm { local_ranks } => self.warm_up(&local_ranks),
            Directive::Release { reason } => self.leave(now, Outcome::Drained { reason }),
            Directive::Dismiss { outcome } => self.leave(now, outcome),
            _ => self.stale_messages += 1,
        }
    }

    fn launch(&mut self, now: Time, launch: Launch) {
        if launch.generation > self.generation {
            self.generation = launch.generation;
            self.evaluations.clear();
        }
        if launch.hold.number > self.hold.number {
            self.hold = launch.hold;
        }
        let paused = self.hold.paused;
        self.farewell_until = None;
        for (local_rank, seat) in self.seats(&launch) {
            let hangs = launch.replace.contains(&local_rank);
            let kill_at = now.after(self.policy.kill_after);
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.seat = seat;
            slot.heard = None;
            slot.warm = None;
            match (&slot.process, &slot.seat) {
                (Process::Alive { phase }, Some(seat)) if !hangs && phase.is_reusable() => {
                    let command = seat.join(paused);
                    slot.process = Process::Alive { phase: RankPhase::Joining };
                    self.actions.push(Action::Tell { local_rank, command });
                }
                (Process::Alive { .. }, _) if hangs => {
                    slot.process = Process::Stopping { kill_at: None };
                    self.actions.push(Action::Kill(local_rank));
                }
                (Process::Alive { .. }, _) => {
                    slot.process = Process::Stopping { kill_at: Some(kill_at) };
                    self.actions.push(Action::Terminate(local_rank));
                }
                (Process::Stopping { .. } | Process::Empty { .. }, _) => {
                    self.spawn_if_empty(local_rank)
                }
            }
        }
    }

    /// Each local rank with its place in the new generation, if it has one.
    fn seats(&self, launch: &Launch) -> Vec<(LocalRank, Option<Seat>)> {
        let locals = (0u32..).zip(&self.slots).map(|(local, _)| LocalRank(local));
        let seat_of = |local: LocalRank| {
            let (rank, _) = launch.ranks.iter().find(|(_, other)| *other == local)?;
            Some(Seat {
                generation: launch.generation,
                rank: *rank,
                world_size: launch.world_size,
                restore: launch.restore.clone(),
            })
        };
        locals.map(|local| (local, seat_of(local))).collect()
    }

    fn spawn_if_empty(&mut self, local_rank: LocalRank) {
        let paused = self.hold.paused;
        let Some(slot) = self.slot_mut(local_rank) else { return };
        let (Process::Empty { .. }, Some(seat)) = (&slot.process, &slot.seat) else { return };
        let command = seat.join(paused);
        self.spawn(local_rank);
        self.actions.push(Action::Tell { local_rank, command });
    }

    fn warm_up(&mut self, local_ranks: &[LocalRank]) {
        for &local_rank in local_ranks {
            let Some(slot) = self.slot_mut(local_rank).filter(|slot| slot.seat.is_none()) else {
                continue;
            };
            let is_ready = slot.warm == Some(true);
            slot.warm = Some(is_ready && slot.is_alive());
            match &slot.process {
                Process::Empty { .. } => self.spawn(local_rank),
                Process::Alive { .. } if is_ready => self.report(Report::Warm { local_rank }),
                Process::Alive { .. } => {
                    slot.process = Process::Stopping { kill_at: None };
                    self.actions.push(Action::Kill(local_rank));
                }
                // Another one follows.
                Process::Stopping { .. } => {}
            }
        }
    }

    fn warm(&mut self, local_rank: LocalRank, incarnation: Incarnation) {
        let Some(slot) = self.slot_mut(local_rank) else { return };
        if slot.incarnation == incarnation && slot.is_alive() && slot.warm.is_some() {
            slot.warm = Some(true);
            self.report(Report::Warm { local_rank });
        }
    }

    fn spawn(&mut self, local_rank: LocalRank) {
        let Some(slot) = self.slot_mut(local_rank) else { return };
        slot.incarnation = slot.incarnation.next();
        slot.process = Process::Alive { phase: RankPhase::Joining };
        slot.suspicion = Suspicion::default();
        let incarnation = slot.incarnation;
        self.actions.push(Action::Spawn { local_rank, incarnation });
    }

    /// Stands still or goes on, unless something newer is known.
    fn hold(&mut self, hold: Hold) {
        if hold.number > self.hold.number {
            self.hold = hold;
            let (generation, paused) = (self.generation, hold.paused);
            self.tell_all(&RankCommand::Hold { generation, paused });
        }
    }

    fn begin(&mut self, peers: &[String]) {
        let generation = self.generation;
        for local_rank in self.locals() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            // Told twice after a reconnect; a rank that has met the others must not meet again.
            if let Process::Alive { phase: phase @ RankPhase::Ready { .. } } = &mut slot.process {
                *phase = RankPhase::Meeting;
                let command = RankCommand::Begin { generation, peers: peers.to_vec() };
                self.actions.push(Action::Tell { local_rank, command });
            }
        }
    }

    fn tell_all(&mut self, command: &RankCommand) {
        self.tell_where(|_| true, command);
    }

    fn tell_where(&mut self, wanted: impl Fn(&Slot) -> bool, command: &RankCommand) {
        for local_rank in self.locals() {
            if self.slot_mut(local_rank).is_some_and(|slot| slot.is_seated() && wanted(slot)) {
                self.actions.push(Action::Tell { local_rank, command: command.clone() });
            }
        }
    }

    // ---- the ranks ----

    fn rank_said(
        &mut self,
        now: Time,
        local_rank: LocalRank,
        incarnation: Incarnation,
        says: RankSays,
    ) {
        let Some(slot) = self.slot_mut(local_rank).filter(|slot| slot.incarnation == incarnation)
        else {
            self.stale_messages += 1;
            return;
        };
        let seat = slot.seat.clone().filter(|seat| seat.generation == says.generation);
        let (Some(seat), Process::Alive { phase }) = (seat, &mut slot.process) else {
            self.stale_messages += 1;
            return;
        };
        if let Some(next) = phase_after(&says.news) {
            *phase = next;
        }
        let pulse = match &says.news {
            RankNews::Pulse(pulse) => *pulse,
            _ => slot.heard.map(|heard| heard.pulse).unwrap_or_default(),
        };
        slot.heard = Some(Heard { at: now, pulse });
        if let RankNews::Saved(commit) = &says.news {
            self.commit = Some(commit.clone());
        }
        let has_started = matches!(says.news, RankNews::Started { .. });
        let is_evaluation = matches!(says.news, RankNews::Evaluated { .. });
        let report = Report::Rank { generation: seat.generation, rank: seat.rank, news: says.news };
        if is_evaluation {
            self.evaluations.push_back(report.clone());
            if self.evaluations.len() > EVALUATIONS_KEPT {
                self.evaluations.pop_front();
            }
        }
        self.report(report);
        if has_started {
            self.keep_spare();
        }
    }

    /// Not before all ranks train: until then they need the machine more.
    fn keep_spare(&mut self) {
        let trains =
            |slot: &Slot| matches!(slot.process, Process::Alive { phase: RankPhase::Training });
        let all_train = self.slots.iter().filter(|slot| slot.seat.is_some()).all(trains);
        let stays = self.leaving.is_none() && self.going.is_none();
        if self.policy.warm_spare && stays && all_train {
            self.actions.push(Action::KeepSpare);
        }
    }

    fn rank_exited(
        &mut self,
        now: Time,
        local_rank: LocalRank,
        incarnation: Incarnation,
        failure: Failure,
    ) {
        let Some(slot) = self.slot_mut(local_rank).filter(|slot| slot.incarnation == incarnation)
        else {
            self.stale_messages += 1;
            return;
        };
        let failure = slot.suspicion.explain(now, failure);
        let before = std::mem::replace(&mut slot.process, Process::Empty { done: None });
        match before {
            Process::Alive { phase: phase @ RankPhase::Done { .. } } => {
                slot.process = Process::Empty { done: Some(phase) };
            }
            Process::Alive { .. } => {
                // The seat stays empty until the coordinator says otherwise.
                if let Some(seat) = slot.seat.take() {
                    let news = RankNews::Exited(failure);
                    self.report(Report::Rank {
                        generation: seat.generation,
                        rank: seat.rank,
                        news,
                    });
                } else if slot.warm.take().is_some() {
                    self.report(Report::WarmFailed { local_rank, failure });
                }
            }
            Process::Stopping { .. } | Process::Empty { .. } => {
                let is_to_be_warm = slot.warm.is_some() && slot.seat.is_none();
                match self.leaving {
                    Some(_) => {}
                    None if is_to_be_warm => self.spawn(local_rank),
                    None => self.spawn_if_empty(local_rank),
                }
            }
        }
    }

    /// Kills who hangs. Its death is told at once: a process that waits for a broken disk dies when the disk
    /// likes.
    fn mind_ranks(&mut self, now: Time) {
        let patience = self.policy.hang;
        // Who slept itself knows nothing of the others.
        let slept = now.since(self.minded_at) > patience / 2;
        self.minded_at = now;
        if patience.is_zero() || self.leaving.is_some() {
            return;
        }
        for local_rank in self.locals() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            let Some(heard) = slot.watched().copied() else { continue };
            if slept {
                slot.heard = Some(Heard { at: now, ..heard });
                continue;
            }
            let Some(failure) = heard.verdict(now, patience) else { continue };
            let failure = slot.suspicion.explain(now, failure);
            slot.process = Process::Stopping { kill_at: None };
            let seat = slot.seat.take();
            self.actions.push(Action::Kill(local_rank));
            if let Some(Seat { generation, rank, .. }) = seat {
                let news = RankNews::Exited(failure);
                self.report(Report::Rank { generation, rank, news });
            }
        }
    }

    /// An error of a GPU is told, and remembered as what a rank on it may die of.
    fn gpu_failed(&mut self, now: Time, local_ranks: &[LocalRank], gpu: &str, xid: Xid) {
        for &local_rank in local_ranks {
            if let Some(slot) = self.slot_mut(local_rank) {
                slot.suspicion.note(now, xid, gpu);
            }
        }
        if self.told.is_news(now, xid, gpu) {
            self.warn(xid.describe(gpu));
        }
    }

    /// Tells of a GPU, at the latest in the next connection.
    fn warn(&mut self, message: String) {
        if self.link == Link::Up {
            self.report(Report::GpuWarning { message });
        } else if self.warnings.len() < WARNINGS_KEPT {
            self.warnings.push(message);
        }
    }

    /// Says that this agent lives, and how its machine does.
    fn beat(&mut self, now: Time, vitals: Option<Vitals>) {
        self.beats += 1;
        self.beat_sent_at = now;
        let (number, round_trip) = (self.beats, self.round_trip);
        self.report(Report::Beat(Beat { number, round_trip, vitals }));
    }

    fn report(&mut self, report: Report) {
        if self.link == Link::Up {
            self.actions.push(Action::Send(report));
        }
    }

    // ---- the end ----

    fn must_go(&mut self, now: Time, reason: String) {
        if self.going.as_ref().is_some_and(|going| going.by_signal) {
            return self.leave_at_once(reason);
        }
        self.go(now, reason, None);
        if let Some(going) = &mut self.going {
            going.by_signal = true;
        }
    }

    /// The coordinator decides whether the others go on without this node. Without one the ranks are told to
    /// save and stop.
    fn go(&mut self, now: Time, reason: String, end: Option<Time>) {
        let by_signal = self.going.as_ref().is_some_and(|going| going.by_signal);
        let patience = now.after(self.policy.drain);
        let mut until = self.going.as_ref().map_or(patience, |going| going.until);
        if let Some(end) = end {
            // Killing needs its time too.
            until = until.min(Time(0).after(end.since(Time(0).after(self.policy.kill_after))));
        }
        let is_news = self.going.as_ref().is_none_or(|going| until < going.until);
        if !is_news {
            return;
        }
        self.going = Some(Going { reason: reason.clone(), end, until, by_signal });
        if self.link == Link::Up {
            return self.report_going(now);
        }
        self.drain_ranks(reason.clone());
        if !self.slots.iter().any(Slot::is_seated) {
            self.leave(now, Outcome::Drained { reason });
        }
    }

    fn report_going(&mut self, now: Time) {
        let Some(Going { reason, end, .. }) = self.going.clone() else { return };
        let seconds_left = end.map(|end| end.since(now).as_secs_f64());
        self.report(Report::DrainRequested { reason, seconds_left });
    }

    fn drain_ranks(&mut self, reason: String) {
        let generation = self.generation;
        self.tell_all(&RankCommand::Drain { generation, reason });
    }

    /// One vote is enough for a checkpoint.
    fn advised(&mut self, reason: String) {
        let generation = self.generation;
        let seated = self.locals().zip(&self.slots).find(|(_, slot)| slot.is_seated());
        if let Some((local_rank, _)) = seated {
            let command = RankCommand::Checkpoint { generation };
            self.actions.push(Action::Tell { local_rank, command });
        }
        self.report(Report::Advised { reason });
    }

    fn leave_at_once(&mut self, reason: String) {
        self.leaving.get_or_insert(Outcome::Drained { reason });
        self.farewell_until = None;
        for local_rank in self.locals() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.seat = None;
            if slot.is_alive() || slot.kill_at().is_some() {
                slot.process = Process::Stopping { kill_at: None };
                self.actions.push(Action::Kill(local_rank));
            }
        }
    }

    fn leave(&mut self, now: Time, outcome: Outcome) {
        self.leaving = Some(outcome);
        self.farewell_until = None;
        let kill_at = now.after(self.policy.kill_after);
        for local_rank in self.locals() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.seat = None;
            if let Process::Alive { phase } = &slot.process {
                let leaves_by_itself = matches!(phase, RankPhase::Done { .. });
                slot.process = Process::Stopping { kill_at: Some(kill_at) };
                if !leaves_by_itself {
                    self.actions.push(Action::Terminate(local_rank));
                }
            }
        }
    }

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
        self.mind_ranks(now);
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

    fn leave_when_empty(&mut self, now: Time) {
        let empty = self.slots.iter().all(|slot| matches!(slot.process, Process::Empty { .. }));
        if let Some(outcome) = self.leaving.clone().filter(|_| empty) {
            self.exited = true;
            self.actions.push(Action::Exit(outcome));
        } else if self.link != Link::Up
            && self.farewell_until.is_none()
            && self.all_done().is_some()
        {
            self.farewell_until = Some(now.after(self.policy.farewell));
        }
    }

    /// The common outcome, if every seated rank is done and there is at least one.
    fn all_done(&self) -> Option<Outcome> {
        let mut outcome = None;
        for slot in self.slots.iter().filter(|slot| slot.seat.is_some()) {
            match slot.phase() {
                Some(RankPhase::Done { outcome: done, .. }) => outcome = Some(done.clone()),
                _ => return None,
            }
        }
        outcome
    }

    fn locals(&self) -> impl Iterator<Item = LocalRank> + use<> {
        (0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX)).map(LocalRank)
    }

    fn slot_mut(&mut self, local_rank: LocalRank) -> Option<&mut Slot> {
        self.slots.get_mut(local_rank.0 as usize)
    }
}

/// The phase that a rank's news puts it in; news about other things change nothing.
fn phase_after(news: &RankNews) -> Option<RankPhase> {
    match news {
        RankNews::Ready { address, step } => {
            Some(RankPhase::Ready { address: address.clone(), step: *step })
        }
        RankNews::Started { .. } => Some(RankPhase::Training),
        RankNews::Lost { .. } => Some(RankPhase::Waiting),
        RankNews::Diverged(diagnosis) => Some(RankPhase::Diverged(diagnosis.clone())),
        RankNews::Done { outcome, digest } => {
            Some(RankPhase::Done { outcome: outcome.clone(), digest: digest.clone() })
        }
        RankNews::Met
        | RankNews::Stepped(_)
        | RankNews::Evaluated { .. }
        | RankNews::EndsEarly { .. }
        | RankNews::Loader(_)
        | RankNews::Pulse(_)
        | RankNews::Saved(_)
        | RankNews::SaveWaits { .. }
        | RankNews::Stopping { .. }
        | RankNews::Copied { .. }
        | RankNews::SaveFailed { .. }
        | RankNews::Exited(_) => None,
    }
}

/// How a rank process that left no last words ended, from its exit code or signal, and whether the kernel
/// has killed processes for memory since it was started.
#[must_use]
pub fn failure_of(code: Option<i32>, signal: Option<i32>, memory_ran_out: bool) -> Failure {
    let class = match code {
        Some(code) if code == i32::from(crate::exit::BAD_INPUT) => Class::BadInput,
        _ if signal == Some(9) && memory_ran_out => Class::OutOfMemory,
        _ => Class::Crash,
    };
    let message = match (code, signal) {
        (_, Some(9)) if memory_ran_out => {
            "the kernel killed its process because memory ran out: lower train.global_batch, \
             data.prefetch_batches or the number of ranks, or take a machine with more memory"
                .to_owned()
        }
        (_, Some(9)) => {
            "its process was killed (signal 9); if nobody did that, look into dmesg".to_owned()
        }
        (_, Some(signal)) => format!("its process was ended by signal {signal}; see its log"),
        (Some(code), None) => format!("its process ended with exit code {code}; see its log"),
        (None, None) => "its process ended; see its log".to_owned(),
    };
    Failure { class, message }
}
