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
//! whose death is about to be told: `Settling` waits for that word, so that one failure makes one
//! new generation, and for nodes that are away, whose ranks may hold the furthest state. After a
//! restart the coordinator is `Reattaching`: training went on without it,
//! and if every rank of the last generation is still there, it goes on.
//!
//! Training that goes wrong also leads to a new generation, by way of `Settling`, but is no failure
//! (`divergence`). A budget that is used up drains the job (`budget`).
//!
//! [`Action::Persist`] comes before every action that another process can see; [`Engine::replay`]
//! rebuilds the machine from what was persisted.

mod budget;
mod diagnosis;
mod divergence;
mod drain;
mod elastic;
mod evaluation;
mod membership;
mod nodes;
mod notice;
mod pause;
mod pulses;
mod record;
mod recovery;
mod rest;
mod skips;
mod status;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use self::{
    budget::Budget,
    drain::DrainStage,
    membership::{Kind, Member, World},
    nodes::{Node, Nodes},
    recovery::Recoveries,
    skips::Skips,
};
pub use self::{
    budget::{Meter, Share},
    diagnosis::WrittenDiagnosis,
    divergence::Incident,
    drain::DrainStatus,
    evaluation::Evaluation,
    notice::{Notice, NoticeKind},
    pause::Pause,
    record::{Origin, Record},
    recovery::{Parts, Recovery},
    status::{NodeStatus, PhaseName, RankState, RankStatus, Spending, Status},
};
use crate::{
    exit::{Class, Failure, Outcome},
    ids::{Attachment, Generation, LocalRank, NodeId, Rank},
    message::{
        Beat, Commit, Directive, Hello, Launch, LoaderNews, Pulse, RankNews, RankPhase, Report,
        SaveProblem, StateSource, StepNews,
    },
    plan::{Offer, place_ranks},
    time::Time,
};
use baton_recipe::{
    JobSpec, Step,
    progress::{Accuracy, Progress},
};

/// What the machine is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A node's agent connected and said who it is.
    Attached {
        /// This connection.
        attachment: Attachment,
        /// Its first message.
        hello: Hello,
    },
    /// A connection ended.
    Detached {
        /// Whose.
        node: NodeId,
        /// Which; an older one than the node's present one changes nothing.
        attachment: Attachment,
    },
    /// An agent reported.
    Reported {
        /// Whose.
        node: NodeId,
        /// Over which connection.
        attachment: Attachment,
        /// What.
        report: Report,
    },
    /// A user wants the job saved and stopped.
    Drain {
        /// Why, in words.
        reason: String,
    },
    /// A user wants a checkpoint now.
    Checkpoint,
    /// A user wants training to stand still.
    Pause {
        /// Why, in words.
        reason: String,
    },
    /// A user wants training to go on.
    Resume,
    /// A user wants the job stopped at once.
    Stop,
    /// The fence cannot be raised, as another coordinator holds the checkpoint store.
    TakenOver {
        /// One line: what, where, what to do.
        message: String,
    },
    /// The time of [`Engine::deadline`] has come.
    Tick,
}

/// What the shell must do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make this durable before going on.
    Persist(Record),
    /// Raise the checkpoint store's fence: older generations can commit no more. If another coordinator holds
    /// the store, leave out the rest of this list and answer with [`Event::TakenOver`].
    Fence(Generation),
    /// Send to an agent.
    Send {
        /// To whom.
        node: NodeId,
        /// Over which connection.
        attachment: Attachment,
        /// What.
        directive: Directive,
    },
    /// Close a connection.
    Refuse {
        /// Whose.
        node: NodeId,
        /// Which.
        attachment: Attachment,
        /// Why, in words.
        reason: String,
    },
    /// Note a number for whoever draws curves.
    Measured(Measured),
    /// Write a diagnosis beside the journal, for people; if that cannot be done, go on.
    Write(Box<WrittenDiagnosis>),
    /// Tell everybody who watches.
    Announce(Notice),
}

/// What curves are drawn of.
#[derive(Clone, Debug, PartialEq)]
pub enum Measured {
    /// Training began, or went on, after so many updates: what was told of later ones counts no more.
    BeganAt(Step),
    /// Numbers of an update.
    Step(StepNews),
    /// An evaluation.
    Evaluation(Evaluation),
}

/// The waits, all from the recipe's `cluster` section but one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Policy {
    min_ranks: u32,
    max_ranks: u32,
    node_grace: Duration,
    rendezvous: Duration,
    drain: Duration,
    restart_limit: u32,
    /// How long to wait for word of a death after ranks lost touch. Agents see a death within
    /// milliseconds, so this only has to cover a message's way.
    settle: Duration,
}

impl Policy {
    fn new(spec: &JobSpec) -> Self {
        let cluster = &spec.cluster;
        Self {
            min_ranks: cluster.min_ranks,
            max_ranks: spec.max_ranks(),
            node_grace: Duration::from_secs_f64(cluster.node_grace_seconds),
            rendezvous: Duration::from_secs_f64(cluster.rendezvous_seconds),
            drain: Duration::from_secs_f64(cluster.drain_seconds),
            restart_limit: cluster.restart_limit,
            settle: Duration::from_millis(500),
        }
    }

    /// The first failure is answered at once; each further one without a step between waits twice
    /// as long.
    fn backoff(&self, failures: u32) -> Duration {
        match failures {
            0 | 1 => Duration::ZERO,
            n => Duration::from_secs(1 << (n - 2).min(5)),
        }
    }
}

/// Each phase carries only what that phase knows; `lost_at` is when the first word of a loss came.
#[derive(Clone, Debug)]
enum Phase {
    Gathering,
    Backoff { until: Time },
    Forming { world: World, until: Time },
    Meeting { world: World, until: Time },
    Training { world: World },
    Settling { world: World, until: Time, lost_at: Time, failure: Failure },
    Reattaching { world: World, until: Time, lost_at: Option<Time> },
    Ended { outcome: Outcome },
}

/// The coordinator's machine.
#[derive(Clone, Debug)]
pub struct Engine {
    spec: Arc<JobSpec>,
    policy: Policy,
    budget: Option<Budget>,
    origin: Origin,
    generation: Generation,
    nodes: Nodes,
    phase: Phase,
    since: Time,
    reason: String,
    drain: Option<DrainStatus>,
    pause: Option<Pause>,
    /// How often it began or ended.
    pause_changes: u64,
    /// Attached time that training stood still in earlier pauses.
    paused_before: Duration,
    /// Where the state came from that the present generation began with, in words.
    began_with: Option<String>,
    /// The step that the present generation began with, once a rank has told.
    began_at: Option<Step>,
    /// The furthest step any rank has told of since the last rollback; only beyond it there is
    /// progress.
    high_water: Step,
    /// The step that training has reached, which is less while steps are made again.
    reached: Step,
    /// Generations that ended one after the other without progress.
    failures: u32,
    /// Ranks that kept the others waiting: their processes are not kept in the next generation.
    hanging: Vec<(NodeId, LocalRank)>,
    latest: Option<StepNews>,
    evaluation: Option<Evaluation>,
    /// The generation that the newest evaluation was told in.
    evaluated_in: Generation,
    best: Option<(Step, Accuracy)>,
    commit: Option<Commit>,
    /// Why the newest save failed, if it did.
    save_problem: Option<String>,
    /// Training that went wrong, in order.
    incidents: Vec<Incident>,
    meter: Meter,
    /// What the journal knows of the meter.
    metered: Duration,
    /// How many of the shares of the budget that are told of were told.
    budget_alerts: usize,
    skips: Skips,
    recoveries: Recoveries,
    stale_messages: u64,
    /// When time alone may change something, and something about a node.
    wakes_at: Option<Time>,
    nodes_wake_at: Option<Time>,
    actions: Vec<Action>,
}

impl Event {
    /// Whether it is one of the many that tell how somebody does, and can change no deadline.
    fn is_sign_of_life(&self) -> bool {
        use RankNews::{Loader, Pulse};
        let Self::Reported { report, .. } = self else { return false };
        matches!(report, Report::Beat(_) | Report::Rank { news: Pulse(_) | Loader(_), .. })
    }
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
            budget: Budget::new(&spec.limits),
            spec: Arc::new(spec.clone()),
            // One below the first that will be opened.
            generation: Generation(origin.first_generation.0.saturating_sub(1)),
            origin,
            nodes: Nodes::default(),
            phase: Phase::Gathering,
            since: now,
            reason: "waiting for agents".to_owned(),
            drain: None,
            pause: None,
            pause_changes: 0,
            paused_before: Duration::ZERO,
            began_with: None,
            began_at: None,
            high_water: Step(0),
            reached: Step(0),
            failures: 0,
            hanging: Vec::new(),
            latest: None,
            evaluation: None,
            evaluated_in: Generation(0),
            best: None,
            commit: None,
            save_problem: None,
            incidents: Vec::new(),
            meter: Meter::default(),
            metered: Duration::ZERO,
            budget_alerts: 0,
            skips: Skips::default(),
            recoveries: Recoveries::default(),
            stale_messages: 0,
            wakes_at: None,
            nodes_wake_at: None,
            actions: Vec::new(),
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
        match &self.phase {
            Phase::Ended { outcome } => Some(outcome),
            _ => None,
        }
    }

    /// Whether a checkpoint can be asked for now, else why not.
    ///
    /// # Errors
    /// The reason, in words.
    pub fn can_checkpoint(&self) -> Result<(), String> {
        match &self.phase {
            Phase::Training { .. } => Ok(()),
            _ => Err(format!("nothing trains: {}", self.reason)),
        }
    }

    /// The newest generation.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// When the machine wants a [`Event::Tick`], if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        self.wakes_at
    }

    /// [`deadline`](Self::deadline), looked for in all that there is: simulations want both to be the same.
    #[doc(hidden)]
    #[must_use]
    pub fn deadline_by_recount(&self) -> Option<Time> {
        self.next_wake(self.nodes.recount_wake_at())
    }

    fn set_wake(&mut self) {
        self.nodes_wake_at = self.nodes.wake_at();
        self.wakes_at = self.next_wake(self.nodes_wake_at);
    }

    fn next_wake(&self, nodes_wake_at: Option<Time>) -> Option<Time> {
        let phase = match &self.phase {
            Phase::Backoff { until } | Phase::Reattaching { until, .. } => Some(*until),
            // A node that is away is waited for until its own deadline.
            Phase::Forming { world, until }
            | Phase::Meeting { world, until }
            | Phase::Settling { world, until, .. } => self.away(world).is_none().then_some(*until),
            Phase::Gathering | Phase::Training { .. } => None,
            Phase::Ended { .. } => return None,
        };
        let drain = self.drain.as_ref().map(|drain| drain.until);
        phase.into_iter().chain(nodes_wake_at).chain(drain).chain(self.budget_ends_at()).min()
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
        if !is_sign_of_life || self.wakes_at.is_some_and(|at| at <= now) {
            self.expire(now);
            self.run_meter(now);
            self.set_wake();
        }
        std::mem::take(&mut self.actions)
    }

    // ---- nodes come and go ----

    fn attached(&mut self, now: Time, attachment: Attachment, hello: Hello) {
        let Hello { node, slots, holding } = hello;
        let before = self.nodes.insert(node.clone(), Node::new(attachment, slots));
        if let (Some(old), Some(state)) = (&before, self.nodes.get_mut(&node)) {
            // A new agent on the same machine makes that no better.
            (state.blamed, state.rests_until) = (old.blamed, old.rests_until);
        }
        match before {
            Some(old) if old.is_attached() => {
                let reason =
                    format!("another agent attached as node {node}; give each its own --node-id");
                self.actions.push(Action::Refuse {
                    node: node.clone(),
                    attachment: old.attachment,
                    reason,
                });
            }
            _ => self
                .announce(NoticeKind::NodeJoined, format!("node {node} joined with {slots} slots")),
        }
        if let Phase::Ended { outcome } = &self.phase {
            let outcome = outcome.clone();
            self.send(&node, Directive::Dismiss { outcome });
            return;
        }
        let held = holding.filter(|held| held.generation == self.generation);
        let Some(world) = self.world_mut().filter(|world| world.includes(&node)) else {
            // Not part of what runs. Whatever it still runs belongs to the past.
            self.send_launch(&node, &[]);
            self.adapt(now);
            return self.open_if_idle(now);
        };
        match held {
            Some(held) => {
                let (mut news, missing) = world.reconcile(&node, held.ranks);
                news.extend(
                    missing.into_iter().map(|rank| (rank, RankNews::Exited(vanished(rank, &node)))),
                );
                if let Some(commit) = held.commit {
                    self.saved(now, commit);
                }
                for (rank, news) in news {
                    // The first loss told may have ended the generation.
                    if self.generation == held.generation {
                        self.heard(now, rank, news);
                    }
                }
                self.remind(&node);
                self.grant_time(now);
                self.train_when_all_started(now);
                self.finish_reattaching(now);
                self.adapt(now);
            }
            // It never got the launch, or it restarted before anybody counted on its ranks.
            None if matches!(self.phase, Phase::Forming { .. }) => {
                if let Some(world) = self.world_mut() {
                    world.reset(&node);
                }
                self.send_launch(&node, &[]);
                self.grant_time(now);
            }
            None => {
                let cause = format!("the agent of node {node} restarted without its ranks");
                self.lost_node(now, &node, crash(cause));
            }
        }
    }

    /// The ranks of a node that came back may only now be told to start or to meet.
    fn grant_time(&mut self, now: Time) {
        if let Phase::Forming { until, .. } | Phase::Meeting { until, .. } = &mut self.phase {
            *until = now.after(self.policy.rendezvous);
        }
    }

    fn detached(&mut self, now: Time, node: &NodeId, attachment: Attachment) {
        if self.nodes.get(node).is_none_or(|state| state.attachment != attachment) {
            return;
        }
        let grace = self.policy.node_grace;
        self.nodes.lose(node, now.after(grace));
        let counted_on = self.world().is_some_and(|world| world.includes(node));
        if !counted_on || self.outcome().is_some() {
            self.nodes.remove(node);
        }
        let text = if counted_on {
            format!("node {node} lost touch; its ranks are given up in {} s", grace.as_secs_f64())
        } else {
            format!("node {node} left")
        };
        self.announce(NoticeKind::NodeLost, text);
    }

    /// What time alone brings about.
    fn expire(&mut self, now: Time) {
        self.mind_the_budget(now);
        let nodes_wake = self.nodes_wake_at.is_some_and(|at| at <= now);
        if nodes_wake {
            self.wake_the_rested(now);
            self.give_up_warming(now);
        }
        let drain = self.drain.clone().filter(|drain| drain.until <= now);
        if let Some(DrainStatus { reason, .. }) = drain.filter(|_| self.outcome().is_none()) {
            self.drain = None;
            let reason =
                format!("{reason}; ranks did not stop in time, the last checkpoint counts");
            self.end(now, Outcome::Drained { reason });
        }
        let gone = if nodes_wake { self.nodes.given_up(now) } else { Vec::new() };
        for node in gone {
            self.nodes.remove(&node);
            // Reattaching has its own deadline and looks at all nodes at once.
            let waits = matches!(self.phase, Phase::Reattaching { .. });
            if !waits && self.world().is_some_and(|world| world.includes(&node)) {
                let grace = self.policy.node_grace.as_secs_f64();
                self.lost_node(now, &node, crash(format!("node {node} was away for {grace} s")));
            }
        }
        match &self.phase {
            Phase::Backoff { until } if *until <= now => self.open(now),
            Phase::Forming { world, until } | Phase::Meeting { world, until }
                if *until <= now && self.away(world).is_none() =>
            {
                let late = world.late();
                let names: Vec<String> = late.iter().map(|place| place.rank.to_string()).collect();
                let seconds = self.policy.rendezvous.as_secs_f64();
                let cause =
                    format!("rank {} did not meet the others in {seconds} s", names.join(", "));
                // Who answers and holds state gets another chance: perhaps it waited for the others.
                let hanging = late.into_iter().filter(|place| !world.holds_state_at(place.rank));
                self.hanging =
                    hanging.map(|place| (place.node.clone(), place.local_rank)).collect();
                self.fail(now, now, crash(cause));
            }
            Phase::Settling { .. } => self.settle(now),
            Phase::Reattaching { until, .. } if *until <= now => self.give_up_reattaching(now),
            _ => {}
        }
    }

    // ---- ranks report ----

    fn reported(&mut self, now: Time, node: &NodeId, attachment: Attachment, report: Report) {
        if self.nodes.get(node).is_none_or(|n| n.attachment != attachment) {
            self.stale_messages += 1;
            return;
        }
        match report {
            Report::Hello(_) => self.stale_messages += 1,
            Report::DrainRequested { reason, seconds_left } => {
                self.node_must_go(now, node, &reason, seconds_left);
            }
            Report::Warm { local_rank } => self.heard_warm(now, node, local_rank),
            Report::WarmFailed { local_rank, failure } => {
                self.warm_failed(now, node, local_rank, &failure);
            }
            Report::Beat(beat) => self.heard_beat(now, node, beat),
            Report::Advised { reason } => {
                let text = format!("node {node}: {reason}; a checkpoint is taken");
                self.announce(NoticeKind::Advised, text);
            }
            Report::GpuWarning { message } => {
                self.announce(NoticeKind::GpuWarning, format!("node {node}: {message}"));
            }
            Report::Rank { generation, rank, news } => {
                let of_this_node = self.world().is_some_and(|world| world.runs(node, rank));
                if generation == self.generation && of_this_node {
                    self.heard(now, rank, news);
                } else {
                    self.stale_messages += 1;
                }
            }
        }
    }

    /// Keeps how a machine does, and answers, so that its agent knows how far away this is.
    fn heard_beat(&mut self, now: Time, node: &NodeId, beat: Beat) {
        let number = beat.number;
        self.nodes.hear(node, now, beat);
        self.send(node, Directive::Heard { number });
        self.persist_meter_now_and_then(now);
    }

    fn heard(&mut self, now: Time, rank: Rank, news: RankNews) {
        match news {
            RankNews::Ready { address, step } => {
                self.saw_step(step);
                self.reached = self.reached.max(step.unwrap_or_default());
                if let Phase::Forming { world, .. } = &mut self.phase {
                    world.set_ready(now, rank, address, step);
                    self.begin_when_all_ready(now);
                }
            }
            RankNews::Met => self.heard_met(now, rank),
            RankNews::Started { source, progress } => {
                self.saw_step(Some(progress.step));
                self.began_at = Some(progress.step);
                if rank == Rank(0) {
                    // Another rank's word may come after the first step.
                    self.reached = progress.step;
                    self.inherit_evaluation(&progress);
                    self.best = progress.best;
                    self.describe_start(&source, &progress);
                }
                if let Some(world) = self.world_mut() {
                    world.set(rank, Member::Started);
                }
                self.train_when_all_started(now);
            }
            RankNews::Stepped(news) => {
                self.saw_step(Some(news.step));
                self.reached = news.step;
                self.first_step(now);
                self.actions.push(Action::Measured(Measured::Step(news.clone())));
                self.latest = Some(news);
                self.persist_meter_now_and_then(now);
            }
            RankNews::Evaluated { step, epoch, accuracy, ema, extent } => {
                self.heard_evaluation(epoch, Evaluation { step, accuracy, ema, extent });
            }
            RankNews::Diverged(diagnosis) => self.diverged(now, diagnosis),
            RankNews::EndsEarly { reason } => {
                self.announce(NoticeKind::EndsEarly, format!("training is complete: {reason}"));
            }
            RankNews::Loader(news) => self.heard_of_loader(rank, news),
            RankNews::Pulse(pulse) => self.heard_pulse(now, rank, pulse),
            RankNews::Saved(commit) => self.saved(now, commit),
            RankNews::SaveWaits { step, behind, seconds } => {
                self.announce(NoticeKind::SaveWaits, notice::describe_wait(step, behind, seconds));
            }
            RankNews::Stopping { step } => self.heard_of_drain(now, step, DrainStage::Agreed),
            RankNews::Copied { step } => self.heard_of_drain(now, step, DrainStage::Copied),
            RankNews::SaveFailed(SaveProblem { message, fence }) => {
                self.save_problem = Some(message.clone());
                self.announce(NoticeKind::SaveFailed, message.clone());
                // Our own newer generation is no news, and not this rank's to tell.
                if fence.is_some_and(|fence| fence > self.generation) {
                    self.taken_over(now, message);
                }
            }
            RankNews::Lost { detail } => {
                let cause = format!("rank {rank} lost touch with the others: {detail}");
                self.lost(now, &[rank], Member::Lost, crash(cause));
            }
            RankNews::Done { outcome, digest } => {
                if let Some(world) = self.world_mut() {
                    world.set(rank, Member::Done { outcome, digest });
                }
                self.end_when_all_done(now);
            }
            RankNews::Exited(failure) => {
                let was_done = self.world().is_some_and(|world| world.is_done(rank));
                if !was_done {
                    if let Some(place) = self.world().and_then(|world| world.place_of(rank)) {
                        self.skips.forget(&place.clone());
                    }
                    let message = format!("rank {rank}: {}", failure.message);
                    self.announce(NoticeKind::RankFailed, message.clone());
                    self.lost(now, &[rank], Member::Gone, Failure { message, ..failure });
                }
            }
        }
    }

    fn saw_step(&mut self, step: Option<Step>) {
        if step.is_some_and(|step| step > self.high_water) {
            self.high_water = step.unwrap_or_default();
            self.failures = 0;
            self.forgive();
        }
    }

    /// Keeps the newest word on a rank's loader, and says when it begins to lose samples.
    fn heard_of_loader(&mut self, rank: Rank, news: LoaderNews) {
        let Some(world) = self.world_mut().filter(|world| !world.is_gone(rank)) else { return };
        world.set_loader(rank, Some(news.clone()));
        let Some(place) = world.place_of(rank).cloned() else { return };
        if self.skips.count(&place, news.skipped) {
            self.announce(NoticeKind::SamplesSkipped, notice::describe_skips(rank, &news));
        }
    }

    /// Keeps what a rank does, and says if it holds the others up.
    fn heard_pulse(&mut self, now: Time, rank: Rank, pulse: Pulse) {
        let Some(world) = self.world_mut().filter(|world| !world.is_gone(rank)) else { return };
        let Some(slowness) = world.pulses.hear(now, rank, pulse) else { return };
        if let Some(place) = world.place_of(rank).cloned() {
            let text = notice::describe_straggler(&place, pulse, slowness);
            self.announce_at(NoticeKind::Straggler, Some(pulse.step), text);
        }
    }

    /// Takes note of a checkpoint, unless a newer one is known already.
    fn saved(&mut self, now: Time, commit: Commit) {
        let age = |commit: &Commit| (commit.generation, commit.step);
        if self.commit.as_ref().is_some_and(|known| age(known) >= age(&commit)) {
            return;
        }
        self.actions.push(Action::Persist(Record::Saved(commit.clone())));
        self.persist_meter(now);
        let text = notice::describe_commit(&commit);
        self.announce_at(NoticeKind::Saved, Some(commit.step), text);
        self.heard_of_drain(now, commit.step, DrainStage::Durable);
        self.save_problem = None;
        self.commit = Some(commit);
    }

    // ---- ranks are lost ----

    fn lost_node(&mut self, now: Time, node: &NodeId, failure: Failure) {
        let Some(world) = self.world() else { return };
        let ranks: Vec<Rank> = world.ranks_of(node).into_iter().map(|(rank, _)| rank).collect();
        self.lost(now, &ranks, Member::Gone, failure);
    }

    /// Ranks lost touch, or their processes are gone.
    fn lost(&mut self, now: Time, ranks: &[Rank], how: Member, failure: Failure) {
        if !failure.class.is_retriable() {
            return self.end(now, Outcome::Failed { failure });
        }
        // Before the meeting there is nobody to lose touch with.
        if how == Member::Lost && matches!(self.phase, Phase::Forming { .. }) {
            return;
        }
        let Some(world) = self.world_mut() else { return };
        let death_was_known = world.has(Kind::Gone);
        let unfinished: Vec<Rank> =
            ranks.iter().copied().filter(|rank| !world.is_done(*rank)).collect();
        if unfinished.is_empty() {
            return;
        }
        for rank in unfinished {
            world.set(rank, how.clone());
        }
        if how == Member::Gone {
            self.blame(ranks);
        }
        let (until, lost_at, failure) = match &mut self.phase {
            Phase::Reattaching { lost_at, .. } => {
                lost_at.get_or_insert(now);
                return self.finish_reattaching(now);
            }
            Phase::Settling { until, lost_at, failure: first, .. } => {
                let tells_why = how == Member::Gone && !death_was_known;
                (*until, *lost_at, if tells_why { failure } else { first.clone() })
            }
            _ => (now.after(self.policy.settle), now, failure),
        };
        let Some(world) = self.take_world() else { return };
        let reason = match self.away(&world) {
            Some(node) => format!("{failure}; waiting for node {node}, which is away"),
            None => format!("{failure}; waiting to hear who died"),
        };
        self.set_phase(now, Phase::Settling { world, until, lost_at, failure }, reason);
        self.settle(now);
    }

    /// Goes on once it is known who is missing, or enough time has passed.
    fn settle(&mut self, now: Time) {
        let Phase::Settling { world, until, lost_at, failure } = &self.phase else { return };
        // If all lost touch, nobody is missing and nobody's death will be told.
        let known = world.has(Kind::Gone) || world.all_are(&[Kind::Lost]);
        if self.away(world).is_none() && (known || *until <= now) {
            self.fail(now, *lost_at, failure.clone());
        }
    }

    /// A node of `world` that is away and not yet given up.
    fn away(&self, world: &World) -> Option<&NodeId> {
        self.nodes.away().find(|node| world.includes(node))
    }

    // ---- generations ----

    fn open_if_idle(&mut self, now: Time) {
        if matches!(self.phase, Phase::Gathering) {
            self.open(now);
        }
    }

    /// How many ranks the attached nodes that are wanted offer.
    fn slots_of(&self, wanted: impl Fn(&Node) -> bool) -> u32 {
        let here = self.nodes.values().filter(|node| node.can_take_part() && wanted(node));
        here.map(|node| node.slots).fold(0, u32::saturating_add)
    }

    /// What the attached nodes that are wanted offer.
    fn offers(&self, wanted: impl Fn(&Node) -> bool) -> Vec<Offer> {
        let here = self.nodes.iter().filter(|(_, node)| node.can_take_part() && wanted(node));
        here.map(|(id, node)| Offer { node: id.clone(), slots: node.slots }).collect()
    }

    /// Opens the next generation with whoever is attached, or waits for more.
    fn open(&mut self, now: Time) {
        // Before all hold the state, a node that must go may be the only one that does.
        let all_hold_it = matches!(self.phase, Phase::Training { .. });
        let counts = |node: &Node| node.leaving.is_none() || !all_hold_it;
        let (slots, least) = (self.slots_of(counts), self.policy.min_ranks);
        // Counted before anything is placed: while thousands of nodes gather, this is asked for each.
        let placements = (slots >= least).then(|| self.offers(counts)).and_then(|offers| {
            let placements = place_ranks(&offers, least, self.policy.max_ranks)?;
            Some((offers, placements))
        });
        let Some((offers, placements)) = placements else {
            let reason = format!("waiting for agents: {slots} of at least {least} ranks are here");
            return self.set_phase(now, Phase::Gathering, reason);
        };
        self.generation = self.generation.next();
        self.began_at = None;
        let generation = self.generation;
        let world = World::new(placements);
        self.actions.push(Action::Persist(Record::Opened {
            generation,
            placements: world.placements().to_vec(),
        }));
        self.persist_meter(now);
        self.actions.push(Action::Fence(generation));
        let size = world.size();
        if let Some(recovery) = self.recoveries.waiting() {
            recovery.launched_at = Some(now);
            recovery.generation = generation;
        }
        self.announce(
            NoticeKind::GenerationOpened,
            format!("generation {generation} opened with {size} ranks"),
        );
        let until = now.after(self.policy.rendezvous);
        let reason = format!("waiting for {size} ranks to start");
        self.set_phase(now, Phase::Forming { world, until }, reason);
        for node in self.nodes.values_mut() {
            node.warming = None;
        }
        let everyone: Vec<NodeId> = offers.into_iter().map(|offer| offer.node).collect();
        let hanging = std::mem::take(&mut self.hanging);
        for node in everyone {
            let here = hanging.iter().filter(|(other, _)| *other == node);
            let replace: Vec<LocalRank> = here.map(|(_, local)| *local).collect();
            self.send_launch(&node, &replace);
        }
    }

    fn send_launch(&mut self, node: &NodeId, replace: &[LocalRank]) {
        let (world_size, ranks) = match self.world() {
            Some(world) => (world.size(), world.ranks_of(node)),
            None => return,
        };
        let launch = Launch {
            generation: self.generation,
            world_size,
            ranks,
            replace: replace.to_vec(),
            restore: self.restore(),
            hold: self.hold(),
        };
        self.send(node, Directive::Launch(launch));
    }

    fn begin_when_all_ready(&mut self, now: Time) {
        let Phase::Forming { world, .. } = &mut self.phase else { return };
        let Some(peers) = world.begin() else { return };
        let holds_state = world.holds_state();
        if !holds_state && self.wake_all() {
            // Those who are left out may hold it.
            return self.open(now);
        }
        if let Some(DrainStatus { reason, .. }) = self.drain.clone()
            && !holds_state
        {
            return self.end(now, Outcome::Drained { reason });
        }
        let Some(world) = self.take_world() else { return };
        if let Some(recovery) = self.recoveries.under_way(self.generation) {
            recovery.torn_down_at = world.holders_ready_at().or(recovery.launched_at);
            recovery.ready_at = Some(now);
        }
        let nodes: Vec<NodeId> = world.nodes().cloned().collect();
        let until = now.after(self.policy.rendezvous);
        let reason = format!("{} ranks meet and take their state", world.size());
        self.set_phase(now, Phase::Meeting { world, until }, reason);
        for node in nodes {
            let begin = Directive::Begin { generation: self.generation, peers: peers.clone() };
            self.send(&node, begin);
        }
    }

    /// A node that came back may have missed the word to begin, to stand still, to go on, or to drain.
    fn remind(&mut self, node: &NodeId) {
        self.remind_to_hold(node);
        let generation = self.generation;
        match (&self.phase, &self.drain) {
            (Phase::Meeting { world, .. }, _) => {
                let peers = world.peers();
                self.send(node, Directive::Begin { generation, peers });
            }
            (Phase::Training { .. }, Some(drain)) => {
                let reason = drain.reason.clone();
                self.send(node, Directive::Drain { generation, reason });
            }
            _ => {}
        }
    }

    fn heard_met(&mut self, now: Time, rank: Rank) {
        let Phase::Meeting { world, .. } = &mut self.phase else { return };
        if world.set_met(rank)
            && let Some(recovery) = self.recoveries.under_way(self.generation)
        {
            recovery.met_at.get_or_insert(now);
        }
    }

    fn train_when_all_started(&mut self, now: Time) {
        let Phase::Meeting { world, .. } = &self.phase else { return };
        if !world.all_have_started() {
            return;
        }
        let Some(world) = self.take_world() else { return };
        let reason = format!("{} ranks train", world.size());
        self.set_phase(now, Phase::Training { world }, reason);
        if let Some(recovery) = self.recoveries.under_way(self.generation) {
            recovery.started_at = Some(now);
        }
        self.send_drain_if_wanted(now);
        self.end_when_all_done(now);
        self.adapt(now);
    }

    fn end_when_all_done(&mut self, now: Time) {
        let Some(outcome) = self.world().and_then(World::outcome) else { return };
        self.end(now, outcome);
    }

    /// The present generation is over, as was first heard at `lost_at`: a new one, a pause before it, or the end.
    fn fail(&mut self, now: Time, lost_at: Time, failure: Failure) {
        if self.is_rollback_due() {
            // What ended it was no failure.
            return self.open(now);
        }
        self.failures += 1;
        if self.failures > self.policy.restart_limit {
            let message = format!(
                "{} generations ended without a new step, the last because {}",
                self.failures, failure.message
            );
            return self.end(now, Outcome::Failed { failure: Failure { message, ..failure } });
        }
        let recovery = Recovery::new(self.generation, &failure.message, lost_at, self.reached);
        self.begin_recovery(now, recovery);
        self.rest_those_to_blame(now);
        let until = now.after(self.spread(self.policy.backoff(self.failures)));
        if until <= now || self.drain.is_some() {
            return self.open(now);
        }
        let reason = format!(
            "pausing before restart {} of {}: {failure}",
            self.failures, self.policy.restart_limit
        );
        self.set_phase(now, Phase::Backoff { until }, reason);
    }

    // ---- after a restart of the coordinator ----

    fn finish_reattaching(&mut self, now: Time) {
        let Phase::Reattaching { world, .. } = &self.phase else { return };
        if !world.has(Kind::Unheard) {
            self.give_up_reattaching(now);
        }
    }

    fn give_up_reattaching(&mut self, now: Time) {
        let Phase::Reattaching { lost_at, .. } = self.phase else { return };
        let Some(world) = self.take_world() else { return };
        if world.all_have_started() && !self.is_rollback_due() {
            let reason = format!(
                "{} ranks train; they went on while the coordinator was away",
                world.size()
            );
            self.set_phase(now, Phase::Training { world }, reason);
            self.send_drain_if_wanted(now);
            self.end_when_all_done(now);
            return self.adapt(now);
        }
        let cause = "the coordinator restarted and not all ranks are still there".to_owned();
        let failure = crash(cause.clone());
        let lost_at = lost_at.unwrap_or(now);
        self.set_phase(now, Phase::Settling { world, until: now, lost_at, failure }, cause);
        self.settle(now);
    }

    // ---- users ----

    fn checkpoint(&mut self) {
        if matches!(self.phase, Phase::Training { .. }) {
            self.send_to_world(&Directive::Checkpoint { generation: self.generation });
        }
    }

    fn end(&mut self, now: Time, outcome: Outcome) {
        if self.outcome().is_some() {
            return;
        }
        let outcome = self.limited(now, outcome);
        self.end_pause(now);
        self.drain = None;
        self.keep_recovery_so_far(now);
        self.persist_meter(now);
        self.actions.push(Action::Persist(Record::Ended(outcome.clone())));
        self.announce(NoticeKind::Ended, format!("job {outcome}"));
        let nodes: Vec<NodeId> = self.nodes.keys().cloned().collect();
        let reason = outcome.to_string();
        self.set_phase(now, Phase::Ended { outcome: outcome.clone() }, reason);
        for node in nodes {
            self.send(&node, Directive::Dismiss { outcome: outcome.clone() });
        }
    }

    /// Nothing that it does can be saved any more.
    fn taken_over(&mut self, now: Time, message: String) {
        self.end(now, Outcome::Failed { failure: Failure { class: Class::TakenOver, message } });
    }

    // ---- small things ----

    fn send(&mut self, node: &NodeId, directive: Directive) {
        if let Some(state) = self.nodes.get(node).filter(|state| state.is_attached()) {
            let attachment = state.attachment;
            self.actions.push(Action::Send { node: node.clone(), attachment, directive });
        }
    }

    fn send_to_world(&mut self, directive: &Directive) {
        let nodes: Vec<NodeId> =
            self.world().map(|world| world.nodes().cloned().collect()).unwrap_or_default();
        for node in nodes {
            self.send(&node, directive.clone());
        }
    }

    fn announce(&mut self, kind: NoticeKind, message: String) {
        self.announce_at(kind, None, message);
    }

    fn announce_at(&mut self, kind: NoticeKind, step: Option<Step>, message: String) {
        let generation = self.generation;
        self.actions.push(Action::Announce(Notice { kind, generation, step, message }));
    }

    fn set_phase(&mut self, now: Time, phase: Phase, reason: String) {
        self.phase = phase;
        self.since = now;
        self.reason = reason;
    }

    fn world(&self) -> Option<&World> {
        match &self.phase {
            Phase::Forming { world, .. }
            | Phase::Meeting { world, .. }
            | Phase::Training { world }
            | Phase::Settling { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            Phase::Gathering | Phase::Backoff { .. } | Phase::Ended { .. } => None,
        }
    }

    fn world_mut(&mut self) -> Option<&mut World> {
        match &mut self.phase {
            Phase::Forming { world, .. }
            | Phase::Meeting { world, .. }
            | Phase::Training { world }
            | Phase::Settling { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            Phase::Gathering | Phase::Backoff { .. } | Phase::Ended { .. } => None,
        }
    }

    /// Moves the world out of the present phase, for the phase that follows at once.
    fn take_world(&mut self) -> Option<World> {
        match std::mem::replace(&mut self.phase, Phase::Gathering) {
            Phase::Forming { world, .. }
            | Phase::Meeting { world, .. }
            | Phase::Training { world }
            | Phase::Settling { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            other => {
                self.phase = other;
                None
            }
        }
    }

    fn first_step(&mut self, now: Time) {
        let Some(recovery) = self.end_recovery(now) else { return };
        let text = notice::describe_recovery(&recovery);
        self.actions.push(Action::Persist(Record::Recovery(recovery)));
        self.announce(NoticeKind::Recovered, text);
    }

    fn describe_start(&mut self, source: &StateSource, progress: &Progress) {
        if let Some(recovery) = self.recoveries.under_way(self.generation) {
            recovery.lost_steps = recovery.step_before.0.saturating_sub(progress.step.0);
        }
        self.actions.push(Action::Measured(Measured::BeganAt(progress.step)));
        let text = notice::describe_start(source, progress);
        self.began_with = Some(text.clone());
        self.announce_at(NoticeKind::TrainingStarted, Some(progress.step), text);
    }
}

fn crash(message: String) -> Failure {
    Failure { class: Class::Crash, message }
}

fn vanished(rank: Rank, node: &NodeId) -> Failure {
    crash(format!("rank {rank} ended while node {node} was out of touch"))
}

/// The news that a phase told on reconnect stands for.
fn news_of(phase: RankPhase) -> Option<RankNews> {
    match phase {
        RankPhase::Ready { address, step } => Some(RankNews::Ready { address, step }),
        RankPhase::Waiting => {
            Some(RankNews::Lost { detail: "it lost touch while its agent was away".to_owned() })
        }
        RankPhase::Diverged(diagnosis) => Some(RankNews::Diverged(diagnosis)),
        RankPhase::Done { outcome, digest } => Some(RankNews::Done { outcome, digest }),
        RankPhase::Joining | RankPhase::Meeting | RankPhase::Training => None,
    }
}
