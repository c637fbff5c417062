//! A model of an agent: its session, the processes in its slots, and its crashes.

use baton_job::{
    NodeId,
    exit::Failure,
    ids::LocalRank,
    message::{Directive, Launch, RankMessage},
    session::{Action, Event, Session, failure_of},
    time::Time,
};

use crate::{
    cluster::{Cluster, SimEvent},
    common::SIGUSR2,
    fact::Fact,
    network::ConnectionId,
    process::{Pid, ProcessPhase, killed},
};

/// Index of an agent in the cluster.
pub(crate) type AgentId = usize;

/// An agent, which may be down.
pub(crate) struct Agent {
    pub(crate) node: NodeId,
    pub(crate) session: Option<Session>,
    /// Number of starts.
    pub(crate) life: u64,
    /// Zero of the agent's clock.
    started_at: Time,
    pub(crate) connection: Option<ConnectionId>,
    pub(crate) cut_off_until: Time,
    /// The last process in each slot.
    pub(crate) slots: Vec<Option<Pid>>,
    /// The newest launch received since the last start.
    pub(crate) launch: Option<Launch>,
    pub(crate) is_leaving: bool,
}

impl Agent {
    pub(crate) fn new(id: AgentId, slots: u32) -> Self {
        Self {
            node: NodeId(format!("node{id}")),
            session: None,
            life: 0,
            started_at: Time(0),
            connection: None,
            cut_off_until: Time(0),
            slots: vec![None; slots as usize],
            launch: None,
            is_leaving: false,
        }
    }

    /// The session's deadline, on the simulation's clock.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let local = self.session.as_ref()?.deadline()?;
        Some(Time(self.started_at.0 + local.0))
    }

    pub(crate) fn clock(&self, now: Time) -> Time {
        Time(now.0 - self.started_at.0)
    }
}

impl Cluster {
    /// Passes an event to an agent's session and performs its actions.
    pub(crate) fn drive(&mut self, id: AgentId, event: Event) {
        self.log(|| format!("agent {id}: {event:?}"));
        let agent = &mut self.agents[id];
        let now = agent.clock(self.now);
        let Some(session) = &mut agent.session else { return };
        let actions = session.handle(now, event);
        self.facts.push(Fact::SessionMoved(id));
        for action in actions {
            self.log(|| format!("    {action:?}"));
            match action {
                Action::Connect => self.connect(id),
                Action::Send(report) => self.send_up(id, report),
                Action::Spawn { local_rank, incarnation } => {
                    let occupied = self.occupant(id, local_rank).is_some();
                    self.facts.push(Fact::Spawned { slot: (id, local_rank), occupied });
                    let pid = self.spawn(id, local_rank, incarnation);
                    self.agents[id].slots[local_rank.0 as usize] = Some(pid);
                }
                // A spare only makes a start faster.
                Action::KeepSpare => {}
                Action::SendToRank { local_rank, command } => {
                    if let Some(pid) = self.occupant(id, local_rank) {
                        self.send_command(pid, command);
                    }
                }
                Action::Terminate(local_rank) => self.terminate(id, local_rank),
                Action::Kill(local_rank) => {
                    if let Some(pid) = self.occupant(id, local_rank) {
                        self.record_end(pid);
                        self.end_process(pid, killed());
                    }
                }
                Action::Exit(outcome) => {
                    self.facts.push(Fact::AgentLeft(id, outcome));
                    self.agent_is_gone(id);
                    return self.restart_agent_after(id, 1_000..=3_000);
                }
            }
        }
    }

    /// The running process in a slot.
    pub(crate) fn occupant(&self, id: AgentId, local_rank: LocalRank) -> Option<Pid> {
        self.agents[id].slots[local_rank.0 as usize].filter(|pid| self.processes[*pid].alive)
    }

    fn terminate(&mut self, id: AgentId, local_rank: LocalRank) {
        let Some(pid) = self.occupant(id, local_rank) else { return };
        self.record_end(pid);
        // Some processes ignore the request.
        if !self.processes[pid].hangs && self.rng.u8(0..8) > 0 {
            let at = self.soon(1..=500);
            self.schedule(at, SimEvent::ProcessEnds(pid));
        }
    }

    fn record_end(&mut self, pid: Pid) {
        let process = &mut self.processes[pid];
        if std::mem::replace(&mut process.ending, true) {
            return;
        }
        let agent = &self.agents[process.agent];
        let launch = agent.launch.as_ref().filter(|_| !agent.is_leaving);
        let is_assigned =
            |launch: &Launch| launch.ranks.iter().any(|(_, local)| *local == process.local_rank);
        let fit =
            process.is_healthy() && process.step.is_some() && process.phase != ProcessPhase::Done;
        let useful = fit && launch.is_some_and(is_assigned);
        let replaced = launch.is_some_and(|launch| launch.replace.contains(&process.local_rank));
        self.facts.push(Fact::Ended { pid, useful, replaced });
    }

    pub(crate) fn receive_directive(&mut self, id: AgentId, directive: Directive) {
        let agent = &mut self.agents[id];
        match &directive {
            Directive::Launch(launch)
                if agent
                    .launch
                    .as_ref()
                    .is_none_or(|known| known.generation < launch.generation) =>
            {
                agent.launch = Some(launch.clone());
            }
            Directive::Dismiss { .. } | Directive::Release { .. } => agent.is_leaving = true,
            _ => {}
        }
        self.drive(id, Event::Directive(directive));
    }

    pub(crate) fn rank_message(&mut self, pid: Pid, message: RankMessage) {
        if let Some((id, local_rank)) = self.parent(pid) {
            let incarnation = self.processes[pid].incarnation;
            self.drive(id, Event::RankReported { local_rank, incarnation, message });
        }
    }

    pub(crate) fn warms(&mut self, pid: Pid) {
        if let Some((id, local_rank)) =
            self.parent(pid).filter(|_| self.processes[pid].is_healthy())
        {
            let incarnation = self.processes[pid].incarnation;
            self.drive(id, Event::RankWarm { local_rank, incarnation });
        }
    }

    pub(crate) fn exited(&mut self, pid: Pid, failure: Failure) {
        if let Some((id, local_rank)) = self.parent(pid) {
            let incarnation = self.processes[pid].incarnation;
            self.drive(id, Event::RankExited { local_rank, incarnation, failure });
        }
    }

    /// The agent that started a process, if it still runs.
    fn parent(&self, pid: Pid) -> Option<(AgentId, LocalRank)> {
        let process = &self.processes[pid];
        let agent = &self.agents[process.agent];
        (agent.life == process.life && agent.session.is_some())
            .then_some((process.agent, process.local_rank))
    }

    /// The agent crashes; the kernel kills its ranks soon after.
    pub(crate) fn agent_crashes(&mut self, id: AgentId) {
        self.log(|| format!("agent {id} crashes"));
        self.facts.push(Fact::AgentCrashed);
        for local_rank in 0..self.agents[id].slots.len() {
            if let Some(pid) = self.occupant(id, LocalRank(local_rank as u32)) {
                let at = self.soon(0..=50);
                self.schedule(at, SimEvent::ProcessEnds(pid));
            }
        }
        self.agent_is_gone(id);
    }

    fn agent_is_gone(&mut self, id: AgentId) {
        self.agents[id].session = None;
        if let Some(connection) = self.agents[id].connection.take() {
            self.break_connection(connection);
        }
    }

    pub(crate) fn restart_agent_after(
        &mut self,
        id: AgentId,
        wait_ms: std::ops::RangeInclusive<u64>,
    ) {
        let at = self.soon(wait_ms);
        self.schedule(at, SimEvent::AgentRestarts(id));
    }

    /// A service manager starts the agent, unless the job is known to be over.
    pub(crate) fn agent_restarts(&mut self, id: AgentId) {
        if self.agents[id].session.is_some() || self.coordinator.job_is_over() {
            return;
        }
        let now = self.now;
        let (policy, job) = (self.plan.policy.clone(), self.plan.origin.job);
        let agent = &mut self.agents[id];
        let slots = agent.slots.len() as u32;
        let mut session = Session::new(agent.node.clone(), slots, policy);
        session.set_job(job);
        agent.session = Some(session);
        agent.life += 1;
        agent.started_at = now;
        agent.slots.fill(None);
        agent.launch = None;
        agent.is_leaving = false;
        self.drive(id, Event::Tick);
    }

    pub(crate) fn shutdown_signal(&mut self, id: AgentId) {
        self.agents[id].is_leaving = true;
        self.drive(
            id,
            Event::ShutdownSignal { reason: "spot notice".to_owned(), is_orphan: false },
        );
    }

    /// A process that was asked to exit does so.
    pub(crate) fn process_ends(&mut self, pid: Pid) {
        self.end_process(pid, failure_of(None, Some(SIGUSR2), false));
    }
}
