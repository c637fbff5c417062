//! A model of a machine: its agent, the processes in its slots, and how it is taken away.

use std::time::Duration;

use baton_job::{
    NodeId, engine,
    exit::Failure,
    ids::{Attachment, LocalRank},
    message::{AgentReport, Directive, RankHeartbeat, RankMessage, RankReport},
    session::{Action, Event, Policy, Session, failure_of},
    time::Time,
};

use crate::{
    common::SIGUSR2,
    coordinator::EventKind,
    fleet::{Fleet, FleetEvent},
    process::{Pid, Process},
    settings::{HOUR, millis},
};

/// Index of a machine in the fleet; a replacement has the same index.
pub(crate) type MachineId = usize;

/// One machine, or an empty position until the replacement boots.
pub(crate) struct Machine {
    pub(crate) node: NodeId,
    /// Counts the agents started at this index.
    pub(crate) life: u64,
    pub(crate) is_there: bool,
    /// Whether an interruption notice was given.
    pub(crate) has_notice: bool,
    pub(crate) session: Option<Session>,
    /// Zero of the agent's clock.
    started_at: Time,
    connection: Option<Connection>,
    /// Time of the scheduled tick.
    wakes_at: Option<Time>,
    /// The process in each slot.
    pub(crate) slots: Vec<Option<Process>>,
}

/// A stream to the coordinator. It keeps order, so it records when the last message in each direction arrives.
struct Connection {
    attachment: Attachment,
    up_until: Time,
    down_until: Time,
}

impl Machine {
    pub(crate) fn empty() -> Self {
        Self {
            node: NodeId(String::new()),
            life: 0,
            is_there: false,
            has_notice: false,
            session: None,
            started_at: Time(0),
            connection: None,
            wakes_at: None,
            slots: Vec::new(),
        }
    }

    pub(crate) fn process(&self, pid: Pid) -> Option<&Process> {
        let process = self.slots.get(pid.local_rank.0 as usize)?.as_ref();
        process.filter(|process| (self.life, process.incarnation) == (pid.life, pid.incarnation))
    }

    pub(crate) fn process_mut(&mut self, pid: Pid) -> Option<&mut Process> {
        let process = self.slots.get_mut(pid.local_rank.0 as usize)?.as_mut();
        process.filter(|process| (self.life, process.incarnation) == (pid.life, pid.incarnation))
    }

    fn clock(&self, now: Time) -> Time {
        Time(now.0 - self.started_at.0)
    }
}

impl Fleet {
    // ---- start and end of a machine ----

    pub(crate) fn machine_boots(&mut self, id: MachineId) {
        self.booted += 1;
        let machine = &mut self.machines[id];
        // Host names must not be in order of time. Multiplying by an odd number keeps them unique.
        let name = self.booted.wrapping_mul(0x9e37_79b1);
        machine.node = NodeId(format!("ip-{name:08x}"));
        machine.is_there = true;
        machine.has_notice = false;
        self.agent_starts(id);
        self.count_machines();
    }

    /// Starts the agent, unless its machine will be taken away.
    pub(crate) fn agent_starts(&mut self, id: MachineId) {
        let slots = self.settings.ranks() as u32;
        let policy = Policy::new(&self.settings.spec());
        let now = self.now;
        let machine = &mut self.machines[id];
        if !machine.is_there || machine.has_notice || machine.session.is_some() {
            return;
        }
        machine.life += 1;
        machine.started_at = now;
        machine.wakes_at = None;
        machine.session = Some(Session::new(machine.node.clone(), slots, policy));
        machine.slots = (0..slots).map(|_| None).collect();
        self.drive(id, Event::Tick);
    }

    /// Takes some machines away.
    pub(crate) fn interruption(&mut self) {
        self.schedule_interruption();
        let first = self.rng.usize(0..self.machines.len());
        for id in (first..).take(self.settings.together() as usize) {
            let id = id % self.machines.len();
            if !self.machines[id].is_there || self.machines[id].has_notice {
                continue;
            }
            let node = self.machines[id].node.clone();
            if self.rng.f64() < self.settings.unnoticed() {
                self.ledger.without_notice += 1;
                self.machine_ends(id, &node);
                continue;
            }
            self.ledger.with_notice += 1;
            self.machines[id].has_notice = true;
            let end = self.now.after(Duration::from_secs_f64(self.settings.notice()));
            let end_for_agent = self.machines[id].clock(end);
            self.queue.schedule(end, FleetEvent::MachineEnds(id, node));
            let reason = "spot instance interruption: terminate".to_owned();
            self.drive(id, Event::InterruptionNotice { reason, end: Some(end_for_agent) });
        }
    }

    pub(crate) fn schedule_interruption(&mut self) {
        let rate = self.settings.interruptions() * self.settings.machines() as f64
            / self.settings.together().max(1.0);
        if let Some(at) = self.by_chance(rate) {
            self.queue.schedule(at, FleetEvent::Interruption);
        }
    }

    /// Random time of the next event that happens `rate` times an hour.
    pub(crate) fn by_chance(&mut self, rate: f64) -> Option<Time> {
        (rate > 0.0).then(|| self.after_about(HOUR / rate))
    }

    /// A time after now, exponentially distributed.
    pub(crate) fn after_about(&mut self, mean_ms: f64) -> Time {
        let wait = -(1.0 - self.rng.f64()).ln() * mean_ms;
        Time(self.now.0 + wait as u64)
    }

    /// The machine is switched off without a message. A replacement boots later.
    pub(crate) fn machine_ends(&mut self, id: MachineId, node: &NodeId) {
        if !self.machines[id].is_there || self.machines[id].node != *node {
            return;
        }
        self.machine_vanishes(id);
        let machine = &mut self.machines[id];
        machine.session = None;
        machine.is_there = false;
        // The server's keep-alive: a ping after five seconds without traffic, and five seconds to answer it.
        self.drop_connection(id, 5_000..=10_000);
        let replacement = self.after_about(self.settings.replacement() * 1_000.0);
        self.queue.schedule(replacement, FleetEvent::MachineBoots(id));
        self.count_machines();
    }

    fn drop_connection(&mut self, id: MachineId, notice_ms: std::ops::RangeInclusive<u64>) {
        if let Some(connection) = self.machines[id].connection.take() {
            let at = self.soon(notice_ms);
            self.queue.schedule(at, FleetEvent::CoordinatorNotices(connection.attachment));
        }
    }

    // ---- the agent ----

    /// Passes an event to an agent's session and performs its actions.
    pub(crate) fn drive(&mut self, id: MachineId, event: Event) {
        let machine = &mut self.machines[id];
        let now = machine.clock(self.now);
        let Some(session) = &mut machine.session else { return };
        for action in session.handle(now, event) {
            match action {
                Action::Connect => self.connect(id),
                Action::Send(report) => self.send_up(id, report),
                Action::Spawn { local_rank, incarnation } => {
                    self.spawn(id, local_rank, incarnation);
                }
                Action::KeepSpare => {}
                Action::SendToRank { local_rank, command } => {
                    self.send_command(id, local_rank, command)
                }
                Action::Terminate(local_rank) => {
                    if let Some(pid) = self.occupant(id, local_rank) {
                        let at = self.soon(1..=500);
                        self.queue.schedule(at, FleetEvent::ProcessEnds(pid, ended_by(SIGUSR2)));
                    }
                }
                Action::Kill(local_rank) => {
                    if let Some(pid) = self.occupant(id, local_rank) {
                        self.end_process(pid, ended_by(9));
                    }
                }
                Action::Exit(_) => {
                    self.machines[id].session = None;
                    self.drop_connection(id, 0..=20);
                    // A supervisor restarts the agent, unless the machine has ended by then.
                    let at = self.soon(10_000..=13_000);
                    return self.queue.schedule(at, FleetEvent::AgentStarts(id));
                }
            }
        }
        self.wake_agent(id);
    }

    fn wake_agent(&mut self, id: MachineId) {
        let now = self.now;
        let machine = &mut self.machines[id];
        let Some(local) = machine.session.as_ref().and_then(Session::deadline) else { return };
        let at = Time(machine.started_at.0 + local.0).max(now);
        if machine.wakes_at.is_none_or(|before| at < before) {
            machine.wakes_at = Some(at);
            self.queue.schedule(at, FleetEvent::AgentWakes(id, machine.life, at));
        }
    }

    pub(crate) fn agent_wakes(&mut self, id: MachineId, life: u64, at: Time) {
        let machine = &mut self.machines[id];
        if (machine.life, machine.wakes_at) == (life, Some(at)) {
            machine.wakes_at = None;
            // If there is nothing to do, the session just returns a later deadline.
            self.drive(id, Event::Tick);
        }
    }

    // ---- messages ----

    fn connect(&mut self, id: MachineId) {
        self.attachments += 1;
        let attachment = Attachment(self.attachments);
        let at = self.soon(1..=20);
        self.coordinator.outboxes.insert(attachment, id);
        self.machines[id].connection =
            Some(Connection { attachment, up_until: at, down_until: at });
        self.queue.schedule(at, FleetEvent::Connected(id, attachment));
    }

    pub(crate) fn connected(&mut self, id: MachineId, attachment: Attachment) {
        if self.is_connected(id, attachment) {
            self.drive(id, Event::Connected);
        }
    }

    fn is_connected(&self, id: MachineId, attachment: Attachment) -> bool {
        self.machines[id]
            .connection
            .as_ref()
            .is_some_and(|connection| connection.attachment == attachment)
    }

    /// The coordinator is gone.
    pub(crate) fn disconnected(&mut self, id: MachineId) {
        if self.machines[id].connection.take().is_some() {
            self.drive(id, Event::Disconnected);
        }
    }

    pub(crate) fn coordinator_notices(&mut self, attachment: Attachment) {
        self.coordinator.outboxes.remove(&attachment);
        // Only connections to this coordinator that have sent a hello.
        if let Some(node) = self.coordinator.attached.remove(&attachment) {
            self.coordinate(EventKind::Control, engine::Event::Detached { node, attachment });
        }
    }

    fn send_up(&mut self, id: MachineId, report: AgentReport) {
        let usual = self.soon(1..=10);
        let Some(connection) = &mut self.machines[id].connection else { return };
        connection.up_until = usual.max(connection.up_until);
        let (at, attachment) = (connection.up_until, connection.attachment);
        self.queue.schedule(at, FleetEvent::Up(attachment, Box::new(report)));
    }

    pub(crate) fn up(&mut self, attachment: Attachment, report: AgentReport) {
        // Sent to a coordinator that has ended.
        if !self.coordinator.outboxes.contains_key(&attachment) {
            return;
        }
        match report {
            AgentReport::Hello(hello) => {
                self.coordinator.attached.insert(attachment, hello.node.clone());
                let event = engine::Event::Attached { attachment, hello };
                self.coordinate(EventKind::Control, event);
            }
            report => {
                let Some(node) = self.coordinator.attached.get(&attachment).cloned() else {
                    return;
                };
                let kind = match &report {
                    AgentReport::Heartbeat(_)
                    | AgentReport::Rank { report: RankReport::Heartbeat(_), .. } => {
                        EventKind::Heartbeat
                    }
                    _ => EventKind::Control,
                };
                let event = engine::Event::Reported { node, attachment, report };
                self.coordinate(kind, event);
            }
        }
    }

    pub(crate) fn send_down(&mut self, attachment: Attachment, directive: Directive) {
        let Some(id) = self.coordinator.outboxes.get(&attachment).copied() else { return };
        let usual = self.soon(1..=10);
        let Some(connection) = &mut self.machines[id].connection else { return };
        if connection.attachment == attachment {
            connection.down_until = usual.max(connection.down_until);
            let at = connection.down_until;
            self.queue.schedule(at, FleetEvent::Down(attachment, id, Box::new(directive)));
        }
    }

    pub(crate) fn down(&mut self, attachment: Attachment, id: MachineId, directive: Directive) {
        if self.is_connected(id, attachment) {
            self.drive(id, Event::Directive(directive));
        }
    }

    // ---- ranks ----

    /// The running process in a slot.
    pub(crate) fn occupant(&self, id: MachineId, local_rank: LocalRank) -> Option<Pid> {
        let machine = &self.machines[id];
        let process = machine.slots.get(local_rank.0 as usize)?.as_ref()?;
        let Process { incarnation, .. } = *process;
        Some(Pid { machine: id, life: machine.life, local_rank, incarnation })
    }

    pub(crate) fn send_report(&mut self, pid: Pid, report: RankReport) {
        let Some(process) = self.process(pid) else { return };
        let Some(assignment) = process.assignment else { return };
        let message = RankMessage { generation: assignment.generation, report };
        let Pid { machine, local_rank, incarnation, .. } = pid;
        self.drive(machine, Event::RankReported { local_rank, incarnation, message });
    }

    /// A random rank process crashes.
    pub(crate) fn crash(&mut self) {
        self.schedule_crash();
        let id = self.rng.usize(0..self.machines.len());
        let local_rank = LocalRank(self.rng.u32(0..self.settings.ranks() as u32));
        if let Some(pid) = self.occupant(id, local_rank) {
            self.ledger.crashes += 1;
            self.end_process(pid, ended_by(11));
        }
    }

    pub(crate) fn schedule_crash(&mut self) {
        let ranks = self.settings.machines() as f64 * self.settings.ranks();
        if let Some(at) = self.by_chance(self.settings.crashes() * ranks) {
            self.queue.schedule(at, FleetEvent::Crash);
        }
    }

    // ---- heartbeats ----

    /// For one second in every hour, all agents and ranks send heartbeats.
    pub(crate) fn sample_heartbeats(&mut self) {
        self.queue
            .schedule(self.now.after(Duration::from_secs(3_600)), FleetEvent::HeartbeatSample);
        self.ledger.sampled_seconds += 1;
        for id in 0..self.machines.len() {
            let at = self.soon(0..=999);
            self.queue.schedule(at, FleetEvent::MachineHeartbeats(id));
        }
    }

    pub(crate) fn machine_heartbeats(&mut self, id: MachineId) {
        self.drive(id, Event::MachineStats(None));
        for local_rank in (0..self.settings.ranks() as u32).map(LocalRank) {
            if let Some(pid) = self.occupant(id, local_rank) {
                let own_step_seconds = self.settings.step() * (0.9 + 0.2 * self.rng.f64());
                let heartbeat = RankHeartbeat { own_step_seconds, ..RankHeartbeat::default() };
                self.send_report(pid, RankReport::Heartbeat(heartbeat));
            }
        }
    }
}

fn ended_by(signal: i32) -> Failure {
    failure_of(None, Some(signal), false)
}

/// Range of a random wait of up to `seconds`, in milliseconds.
pub(crate) fn up_to(seconds: f64) -> std::ops::RangeInclusive<u64> {
    0..=millis(seconds)
}
