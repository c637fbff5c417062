//! A machine: its agent's shell, the processes in its places, and how it is taken away.

use std::time::Duration;

use baton_job::{
    NodeId, engine,
    exit::Failure,
    ids::{Attachment, LocalRank},
    message::{Directive, Pulse, RankNews, RankSays, Report},
    session::{Action, Event, Policy, Session, failure_of},
    time::Time,
};

use crate::{
    common::SIGUSR2,
    coordinator::EventKind,
    fleet::{Fleet, Happening},
    process::{Pid, Process},
    settings::{HOUR, millis},
};

/// A machine's place in the fleet; another one takes it after its end.
pub(crate) type MachineId = usize;

/// One machine, or the gap that it left.
pub(crate) struct Machine {
    pub(crate) node: NodeId,
    /// Grows with every machine and every agent in this place.
    pub(crate) life: u64,
    pub(crate) is_there: bool,
    /// Somebody said that it will end.
    pub(crate) is_noticed: bool,
    pub(crate) session: Option<Session>,
    /// The agent's own clock begins here.
    started_at: Time,
    link: Option<Link>,
    /// When a tick is scheduled already.
    wakes_at: Option<Time>,
    /// The process of each place.
    pub(crate) places: Vec<Option<Process>>,
}

/// A stream to the coordinator. It keeps order: when the last message each way arrives.
struct Link {
    attachment: Attachment,
    up_until: Time,
    down_until: Time,
}

impl Machine {
    pub(crate) fn gap() -> Self {
        Self {
            node: NodeId(String::new()),
            life: 0,
            is_there: false,
            is_noticed: false,
            session: None,
            started_at: Time(0),
            link: None,
            wakes_at: None,
            places: Vec::new(),
        }
    }

    pub(crate) fn process(&self, pid: Pid) -> Option<&Process> {
        let process = self.places.get(pid.local_rank.0 as usize)?.as_ref();
        process.filter(|process| (self.life, process.incarnation) == (pid.life, pid.incarnation))
    }

    pub(crate) fn process_mut(&mut self, pid: Pid) -> Option<&mut Process> {
        let process = self.places.get_mut(pid.local_rank.0 as usize)?.as_mut();
        process.filter(|process| (self.life, process.incarnation) == (pid.life, pid.incarnation))
    }

    fn clock(&self, now: Time) -> Time {
        Time(now.0 - self.started_at.0)
    }
}

impl Fleet {
    // ---- it comes and goes ----

    pub(crate) fn machine_boots(&mut self, id: MachineId) {
        self.booted += 1;
        let machine = &mut self.machines[id];
        // Host names are in no order of time. To multiply by an odd number makes no two of them equal.
        let name = self.booted.wrapping_mul(0x9e37_79b1);
        machine.node = NodeId(format!("ip-{name:08x}"));
        machine.is_there = true;
        machine.is_noticed = false;
        self.agent_starts(id);
        self.count_machines();
    }

    /// The agent's process starts, unless its machine is to end.
    pub(crate) fn agent_starts(&mut self, id: MachineId) {
        let slots = self.settings.ranks() as u32;
        let policy = Policy::new(&self.settings.spec());
        let now = self.now;
        let machine = &mut self.machines[id];
        if !machine.is_there || machine.is_noticed || machine.session.is_some() {
            return;
        }
        machine.life += 1;
        machine.started_at = now;
        machine.wakes_at = None;
        machine.session = Some(Session::new(machine.node.clone(), slots, policy));
        machine.places = (0..slots).map(|_| None).collect();
        self.drive(id, Event::Tick);
    }

    /// Some machines are taken away.
    pub(crate) fn interruption(&mut self) {
        self.schedule_interruption();
        let first = self.rng.usize(0..self.machines.len());
        for id in (first..).take(self.settings.together() as usize) {
            let id = id % self.machines.len();
            if !self.machines[id].is_there || self.machines[id].is_noticed {
                continue;
            }
            let node = self.machines[id].node.clone();
            if self.rng.f64() < self.settings.unnoticed() {
                self.ledger.unnoticed += 1;
                self.machine_ends(id, &node);
                continue;
            }
            self.ledger.noticed += 1;
            self.machines[id].is_noticed = true;
            let end = self.now.after(Duration::from_secs_f64(self.settings.notice()));
            let end_for_agent = self.machines[id].clock(end);
            self.queue.schedule(end, Happening::MachineEnds(id, node));
            let reason = "spot instance interruption: terminate".to_owned();
            self.drive(id, Event::Noticed { reason, end: Some(end_for_agent) });
        }
    }

    pub(crate) fn schedule_interruption(&mut self) {
        let rate = self.settings.interruptions() * self.settings.machines() as f64
            / self.settings.together().max(1.0);
        if let Some(at) = self.by_chance(rate) {
            self.queue.schedule(at, Happening::Interruption);
        }
    }

    /// A time after now, if it happens `rate` times an hour.
    pub(crate) fn by_chance(&mut self, rate: f64) -> Option<Time> {
        (rate > 0.0).then(|| self.after_about(HOUR / rate))
    }

    /// A time after now, by an exponential distribution.
    pub(crate) fn after_about(&mut self, mean_ms: f64) -> Time {
        let wait = -(1.0 - self.rng.f64()).ln() * mean_ms;
        Time(self.now.0 + wait as u64)
    }

    /// Power is off: nobody is told. Another machine takes its place after a while.
    pub(crate) fn machine_ends(&mut self, id: MachineId, node: &NodeId) {
        if !self.machines[id].is_there || self.machines[id].node != *node {
            return;
        }
        self.vanish_with_its_ranks(id);
        let machine = &mut self.machines[id];
        machine.session = None;
        machine.is_there = false;
        // The server's keep-alive: a ping after five quiet seconds, and five to answer it.
        self.drop_link(id, 5_000..=10_000);
        let replacement = self.after_about(self.settings.replacement() * 1_000.0);
        self.queue.schedule(replacement, Happening::MachineBoots(id));
        self.count_machines();
    }

    fn drop_link(&mut self, id: MachineId, notice_ms: std::ops::RangeInclusive<u64>) {
        if let Some(link) = self.machines[id].link.take() {
            let at = self.soon(notice_ms);
            self.queue.schedule(at, Happening::CoordinatorNotices(link.attachment));
        }
    }

    // ---- its agent ----

    /// Feeds an agent's machine and performs its actions.
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
                Action::Tell { local_rank, command } => self.tell(id, local_rank, command),
                Action::Terminate(local_rank) => {
                    if let Some(pid) = self.occupant(id, local_rank) {
                        let at = self.soon(1..=500);
                        self.queue.schedule(at, Happening::Dies(pid, ended_by(SIGUSR2)));
                    }
                }
                Action::Kill(local_rank) => {
                    if let Some(pid) = self.occupant(id, local_rank) {
                        self.die(pid, ended_by(9));
                    }
                }
                Action::Exit(_) => {
                    self.machines[id].session = None;
                    self.drop_link(id, 0..=20);
                    // A supervisor starts it again; while the job goes on without this node its machine ends.
                    let at = self.soon(10_000..=13_000);
                    return self.queue.schedule(at, Happening::AgentStarts(id));
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
            self.queue.schedule(at, Happening::AgentWakes(id, machine.life, at));
        }
    }

    pub(crate) fn agent_wakes(&mut self, id: MachineId, life: u64, at: Time) {
        let machine = &mut self.machines[id];
        if (machine.life, machine.wakes_at) == (life, Some(at)) {
            machine.wakes_at = None;
            // If it has nothing to do any more, it says so by another deadline.
            self.drive(id, Event::Tick);
        }
    }

    // ---- what it says and hears ----

    fn connect(&mut self, id: MachineId) {
        self.attachments += 1;
        let attachment = Attachment(self.attachments);
        let at = self.soon(1..=20);
        self.coordinator.outboxes.insert(attachment, id);
        self.machines[id].link = Some(Link { attachment, up_until: at, down_until: at });
        self.queue.schedule(at, Happening::Connected(id, attachment));
    }

    pub(crate) fn connected(&mut self, id: MachineId, attachment: Attachment) {
        if self.is_linked(id, attachment) {
            self.drive(id, Event::Connected);
        }
    }

    fn is_linked(&self, id: MachineId, attachment: Attachment) -> bool {
        self.machines[id].link.as_ref().is_some_and(|link| link.attachment == attachment)
    }

    /// The coordinator is gone.
    pub(crate) fn disconnected(&mut self, id: MachineId) {
        if self.machines[id].link.take().is_some() {
            self.drive(id, Event::Disconnected);
        }
    }

    pub(crate) fn coordinator_notices(&mut self, attachment: Attachment) {
        self.coordinator.outboxes.remove(&attachment);
        // Of this coordinator, and not gone before it said who it was.
        if let Some(node) = self.coordinator.attached.remove(&attachment) {
            self.coordinate(EventKind::Control, engine::Event::Detached { node, attachment });
        }
    }

    fn send_up(&mut self, id: MachineId, report: Report) {
        let usual = self.soon(1..=10);
        let Some(link) = &mut self.machines[id].link else { return };
        link.up_until = usual.max(link.up_until);
        let (at, attachment) = (link.up_until, link.attachment);
        self.queue.schedule(at, Happening::Up(attachment, Box::new(report)));
    }

    pub(crate) fn up(&mut self, attachment: Attachment, report: Report) {
        // To a coordinator that is gone.
        if !self.coordinator.outboxes.contains_key(&attachment) {
            return;
        }
        match report {
            Report::Hello(hello) => {
                self.coordinator.attached.insert(attachment, hello.node.clone());
                let event = engine::Event::Attached { attachment, hello };
                self.coordinate(EventKind::Control, event);
            }
            report => {
                let Some(node) = self.coordinator.attached.get(&attachment).cloned() else {
                    return;
                };
                let kind = match &report {
                    Report::Beat(_) | Report::Rank { news: RankNews::Pulse(_), .. } => {
                        EventKind::SignOfLife
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
        let Some(link) = &mut self.machines[id].link else { return };
        if link.attachment == attachment {
            link.down_until = usual.max(link.down_until);
            let at = link.down_until;
            self.queue.schedule(at, Happening::Down(attachment, id, Box::new(directive)));
        }
    }

    pub(crate) fn down(&mut self, attachment: Attachment, id: MachineId, directive: Directive) {
        if self.is_linked(id, attachment) {
            self.drive(id, Event::Directed(directive));
        }
    }

    // ---- its ranks ----

    /// The live process of a place.
    pub(crate) fn occupant(&self, id: MachineId, local_rank: LocalRank) -> Option<Pid> {
        let machine = &self.machines[id];
        let process = machine.places.get(local_rank.0 as usize)?.as_ref()?;
        let Process { incarnation, .. } = *process;
        Some(Pid { machine: id, life: machine.life, local_rank, incarnation })
    }

    pub(crate) fn say(&mut self, pid: Pid, news: RankNews) {
        let Some(process) = self.process(pid) else { return };
        let Some(seat) = process.seat else { return };
        let says = RankSays { generation: seat.generation, news };
        let Pid { machine, local_rank, incarnation, .. } = pid;
        self.drive(machine, Event::RankSaid { local_rank, incarnation, says });
    }

    /// A rank's process crashes somewhere.
    pub(crate) fn crash(&mut self) {
        self.schedule_crash();
        let id = self.rng.usize(0..self.machines.len());
        let local_rank = LocalRank(self.rng.u32(0..self.settings.ranks() as u32));
        if let Some(pid) = self.occupant(id, local_rank) {
            self.ledger.crashes += 1;
            self.die(pid, ended_by(11));
        }
    }

    pub(crate) fn schedule_crash(&mut self) {
        let ranks = self.settings.machines() as f64 * self.settings.ranks();
        if let Some(at) = self.by_chance(self.settings.crashes() * ranks) {
            self.queue.schedule(at, Happening::Crash);
        }
    }

    // ---- signs of life ----

    /// One second in every hour all agents beat and all ranks send a pulse.
    pub(crate) fn sample_signs_of_life(&mut self) {
        self.queue.schedule(self.now.after(Duration::from_secs(3_600)), Happening::SignsOfLife);
        self.ledger.sampled_seconds += 1;
        for id in 0..self.machines.len() {
            let at = self.soon(0..=999);
            self.queue.schedule(at, Happening::Beats(id));
        }
    }

    pub(crate) fn beats(&mut self, id: MachineId) {
        self.drive(id, Event::Vitals(None));
        for local_rank in (0..self.settings.ranks() as u32).map(LocalRank) {
            if let Some(pid) = self.occupant(id, local_rank) {
                let own_step_seconds = self.settings.step() * (0.9 + 0.2 * self.rng.f64());
                let pulse = Pulse { own_step_seconds, ..Pulse::default() };
                self.say(pid, RankNews::Pulse(pulse));
            }
        }
    }
}

fn ended_by(signal: i32) -> Failure {
    failure_of(None, Some(signal), false)
}

/// A wait by chance, up to so many seconds.
pub(crate) fn up_to(seconds: f64) -> std::ops::RangeInclusive<u64> {
    0..=millis(seconds)
}
