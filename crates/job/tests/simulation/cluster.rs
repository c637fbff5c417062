//! The whole simulated cluster: one clock, one queue, one random number generator.

use std::{collections::VecDeque, ops::RangeInclusive};

use baton_job::{
    Generation, engine,
    exit::Failure,
    message::{AgentReport, Directive, RankCommand, RankMessage, Restore},
    session,
    time::Time,
};
use fastrand::Rng;

use crate::{
    agent::{Agent, AgentId},
    common::{queue::Queue, store::Store},
    coordinator::Coordinator,
    fact::{Fact, StateMachine},
    network::{Connection, ConnectionId},
    plan::Plan,
    process::{Pid, Process, Wake},
    training::{Group, GroupId},
};

/// Whether a history is logged, which takes longer than the history itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logging {
    Off,
    Tail,
}

/// Number of log lines kept.
const MAX_LOG_LINES: usize = 150;

/// An event of the simulation.
pub(crate) enum SimEvent {
    Connected(ConnectionId),
    AgentHeartbeat(ConnectionId),
    Up(ConnectionId, AgentReport),
    Down(ConnectionId, Directive),
    AgentNotices(ConnectionId),
    CoordinatorNotices(ConnectionId),
    Commanded(Pid, RankCommand),
    RankMessage(Pid, RankMessage),
    Exited(Pid, Failure),
    Woken {
        pid: Pid,
        listen_number: u64,
        wake: Wake,
    },
    ProcessEnds(Pid),
    Warms(Pid),
    Heartbeat(Pid),
    StepEnds(GroupId),
    ShardsWritten(GroupId),
    ManifestLands(GroupId),
    CoordinatorRestarts,
    /// The store answers the coordinator of this life.
    StoreAnswers {
        life: u64,
        generation: Generation,
        /// Number of records in the journal's copy then.
        copied: usize,
    },
    /// The coordinator of this life gets the checkpoint that it looked for.
    StoreIsRead {
        life: u64,
        restore: Box<Restore>,
    },
    AgentRestarts(AgentId),
    Fault,
    Calm,
    Resumed,
}

/// State of the whole simulation.
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
    /// Facts of the present event.
    pub(crate) facts: Vec<Fact>,
    /// Time when faults stopped, if they have.
    pub(crate) calm_since: Option<Time>,
    queue: Queue<SimEvent>,
    logging: Logging,
    tail: VecDeque<String>,
}

impl Cluster {
    pub(crate) fn new(seed: u64, logging: Logging) -> Self {
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
            logging,
            tail: VecDeque::new(),
            plan,
        };
        for id in 0..cluster.agents.len() {
            cluster.restart_agent_after(id, 0..=300);
        }
        cluster.schedule(Time(0).after(cluster.plan.chaos), SimEvent::Calm);
        cluster.schedule_fault();
        cluster.coordinate(engine::Event::Tick);
        cluster
    }

    /// A random time after now; `wait_ms` is the range of the wait in milliseconds.
    pub(crate) fn soon(&mut self, wait_ms: RangeInclusive<u64>) -> Time {
        Time(self.now.0 + self.rng.u64(wait_ms))
    }

    pub(crate) fn schedule(&mut self, at: Time, event: SimEvent) {
        self.queue.schedule(at, event);
    }

    pub(crate) fn is_calm(&self) -> bool {
        self.calm_since.is_some()
    }

    /// Whether the job is over and all agents and ranks have exited.
    pub(crate) fn is_over(&self) -> bool {
        self.is_calm()
            && self.coordinator.job_is_over()
            && self.agents.iter().all(|agent| agent.session.is_none())
            && self.processes.iter().all(|process| !process.alive)
    }

    /// Handles the next event; false if there is none.
    pub(crate) fn advance(&mut self) -> bool {
        let queued = self.queue.next_at();
        match (self.next_wake(), queued) {
            (Some((at, state_machine)), queued) if queued.is_none_or(|queued| at < queued) => {
                self.now = self.now.max(at);
                self.facts.push(Fact::Woke(state_machine));
                match state_machine {
                    StateMachine::Engine => self.coordinate(engine::Event::Tick),
                    StateMachine::Session(id) => self.drive(id, session::Event::Tick),
                }
                true
            }
            (_, Some(_)) => {
                if let Some((at, event)) = self.queue.pop() {
                    self.now = at;
                    self.handle_event(event);
                }
                true
            }
            _ => false,
        }
    }

    /// The state machine with the earliest deadline.
    fn next_wake(&self) -> Option<(Time, StateMachine)> {
        let engine = self.coordinator.deadline().map(|at| (at, StateMachine::Engine));
        let sessions =
            self.agents.iter().enumerate().filter_map(|(id, agent)| {
                agent.deadline().map(|at| (at, StateMachine::Session(id)))
            });
        engine.into_iter().chain(sessions).min_by_key(|(at, _)| *at)
    }

    fn handle_event(&mut self, event: SimEvent) {
        match event {
            SimEvent::Connected(id) => self.connected(id),
            SimEvent::AgentHeartbeat(id) => self.agent_heartbeat(id),
            SimEvent::Up(id, report) => self.up(id, report),
            SimEvent::Down(id, directive) => self.down(id, directive),
            SimEvent::AgentNotices(id) => self.agent_notices(id),
            SimEvent::CoordinatorNotices(id) => self.coordinator_notices(id),
            SimEvent::Commanded(pid, command) => self.commanded(pid, command),
            SimEvent::RankMessage(pid, message) => self.rank_message(pid, message),
            SimEvent::Exited(pid, failure) => self.exited(pid, failure),
            SimEvent::Woken { pid, listen_number, wake } => self.woken(pid, listen_number, wake),
            SimEvent::ProcessEnds(pid) => self.process_ends(pid),
            SimEvent::Warms(pid) => self.warms(pid),
            SimEvent::Heartbeat(pid) => self.rank_heartbeat(pid),
            SimEvent::StepEnds(group) => self.step_ends(group),
            SimEvent::ShardsWritten(group) => self.shards_written(group),
            SimEvent::ManifestLands(group) => self.manifest_lands(group),
            SimEvent::CoordinatorRestarts => self.coordinator_restarts(),
            SimEvent::StoreAnswers { life, generation, copied } => {
                self.store_answers(life, generation, copied);
            }
            SimEvent::StoreIsRead { life, restore } => self.store_is_read(life, &restore),
            SimEvent::AgentRestarts(id) => self.agent_restarts(id),
            SimEvent::Fault => self.fault(),
            SimEvent::Calm => self.calm_down(),
            SimEvent::Resumed => self.coordinate(engine::Event::Resume),
        }
    }

    /// Adds a line to the log, if logging is on.
    pub(crate) fn log(&mut self, line: impl FnOnce() -> String) {
        if self.logging == Logging::Tail {
            if self.tail.len() == MAX_LOG_LINES {
                self.tail.pop_front();
            }
            self.tail.push_back(format!("{} {}", self.now, line()));
        }
    }

    /// The last lines of the log.
    pub(crate) fn tail(&self) -> String {
        self.tail.iter().map(|line| format!("{line}\n")).collect()
    }
}
