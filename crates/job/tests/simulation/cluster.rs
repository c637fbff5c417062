//! The whole simulated cluster: one clock, one queue, one generator of chance.

use std::{collections::VecDeque, ops::RangeInclusive};

use baton_job::{
    engine,
    exit::Failure,
    message::{Directive, RankCommand, RankSays, Report},
    session,
    time::Time,
};
use fastrand::Rng;

use crate::{
    agent::{Agent, AgentId},
    common::{queue::Queue, store::Store},
    coordinator::Coordinator,
    fact::{Fact, Machine},
    network::{Connection, ConnectionId},
    plan::Plan,
    process::{Pid, Process, Wake},
    training::{Group, GroupId},
};

/// Whether a history is told in words, which costs more than the history itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Telling {
    Silent,
    Tail,
}

/// Lines kept of a history that is told.
const TAIL: usize = 150;

/// What happens at a time.
pub(crate) enum Happening {
    Connected(ConnectionId),
    Up(ConnectionId, Report),
    Down(ConnectionId, Directive),
    AgentNotices(ConnectionId),
    CoordinatorNotices(ConnectionId),
    Commanded(Pid, RankCommand),
    Said(Pid, RankSays),
    Exited(Pid, Failure),
    Woken { pid: Pid, listening: u64, wake: Wake },
    Dies(Pid),
    Warms(Pid),
    Pulses(Pid),
    StepEnds(GroupId),
    ShardsWritten(GroupId),
    ManifestLands(GroupId),
    CoordinatorRestarts,
    AgentRestarts(AgentId),
    Fault,
    Calm,
}

/// Everything there is.
pub(crate) struct Cluster {
    pub(crate) now: Time,
    pub(crate) rng: Rng,
    pub(crate) plan: Plan,
    pub(crate) coordinator: Coordinator,
    pub(crate) agents: Vec<Agent>,
    pub(crate) connections: Vec<Connection>,
    pub(crate) processes: Vec<Process>,
    pub(crate) groups: Vec<Group>,
    pub(crate) store: Store,
    /// What happened in the present event.
    pub(crate) facts: Vec<Fact>,
    /// When faults stopped, if they have.
    pub(crate) calm_since: Option<Time>,
    queue: Queue<Happening>,
    telling: Telling,
    tail: VecDeque<String>,
}

impl Cluster {
    pub(crate) fn new(seed: u64, telling: Telling) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut store = Store::default();
        let plan = Plan::new(&mut rng, &mut store);
        let mut cluster = Self {
            now: Time(0),
            rng,
            coordinator: Coordinator::new(&plan),
            agents: (0..).zip(&plan.slots).map(|(id, slots)| Agent::new(id, *slots)).collect(),
            connections: Vec::new(),
            processes: Vec::new(),
            groups: Vec::new(),
            store,
            facts: Vec::new(),
            calm_since: None,
            queue: Queue::new(),
            telling,
            tail: VecDeque::new(),
            plan,
        };
        for id in 0..cluster.agents.len() {
            cluster.restart_agent_after(id, 0..=300);
        }
        cluster.schedule(Time(0).after(cluster.plan.chaos), Happening::Calm);
        cluster.schedule_fault();
        cluster.coordinate(engine::Event::Tick);
        cluster
    }

    /// A time after now, by chance.
    pub(crate) fn soon(&mut self, wait_ms: RangeInclusive<u64>) -> Time {
        Time(self.now.0 + self.rng.u64(wait_ms))
    }

    pub(crate) fn schedule(&mut self, at: Time, happening: Happening) {
        self.queue.schedule(at, happening);
    }

    pub(crate) fn is_calm(&self) -> bool {
        self.calm_since.is_some()
    }

    /// Whether the job is over and everybody has left.
    pub(crate) fn is_over(&self) -> bool {
        self.is_calm()
            && self.coordinator.job_is_over()
            && self.agents.iter().all(|agent| agent.session.is_none())
            && self.processes.iter().all(|process| !process.alive)
    }

    /// The next event; false if nothing will ever happen again.
    pub(crate) fn advance(&mut self) -> bool {
        let queued = self.queue.next_at();
        match (self.next_wake(), queued) {
            (Some((at, machine)), queued) if queued.is_none_or(|queued| at < queued) => {
                self.now = self.now.max(at);
                self.facts.push(Fact::Woke(machine));
                match machine {
                    Machine::Engine => self.coordinate(engine::Event::Tick),
                    Machine::Session(id) => self.drive(id, session::Event::Tick),
                }
                true
            }
            (_, Some(_)) => {
                if let Some((at, happening)) = self.queue.pop() {
                    self.now = at;
                    self.happen(happening);
                }
                true
            }
            _ => false,
        }
    }

    /// The machine that wants to be woken first.
    fn next_wake(&self) -> Option<(Time, Machine)> {
        let engine = self.coordinator.deadline().map(|at| (at, Machine::Engine));
        let sessions = self
            .agents
            .iter()
            .enumerate()
            .filter_map(|(id, agent)| agent.deadline().map(|at| (at, Machine::Session(id))));
        engine.into_iter().chain(sessions).min_by_key(|(at, _)| *at)
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Connected(id) => self.connected(id),
            Happening::Up(id, report) => self.up(id, report),
            Happening::Down(id, directive) => self.down(id, directive),
            Happening::AgentNotices(id) => self.agent_notices(id),
            Happening::CoordinatorNotices(id) => self.coordinator_notices(id),
            Happening::Commanded(pid, command) => self.commanded(pid, command),
            Happening::Said(pid, says) => self.said(pid, says),
            Happening::Exited(pid, failure) => self.exited(pid, failure),
            Happening::Woken { pid, listening, wake } => self.woken(pid, listening, wake),
            Happening::Dies(pid) => self.dies(pid),
            Happening::Warms(pid) => self.warms(pid),
            Happening::Pulses(pid) => self.pulses(pid),
            Happening::StepEnds(group) => self.step_ends(group),
            Happening::ShardsWritten(group) => self.shards_written(group),
            Happening::ManifestLands(group) => self.manifest_lands(group),
            Happening::CoordinatorRestarts => self.coordinator_restarts(),
            Happening::AgentRestarts(id) => self.agent_restarts(id),
            Happening::Fault => self.fault(),
            Happening::Calm => self.calm_down(),
        }
    }

    /// A line of the history, made only if somebody reads it.
    pub(crate) fn log(&mut self, line: impl FnOnce() -> String) {
        if self.telling == Telling::Tail {
            if self.tail.len() == TAIL {
                self.tail.pop_front();
            }
            self.tail.push_back(format!("{} {}", self.now, line()));
        }
    }

    /// The last lines of the history.
    pub(crate) fn tail(&self) -> String {
        self.tail.iter().map(|line| format!("{line}\n")).collect()
    }
}
