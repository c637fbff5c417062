//! The whole fleet: one clock, one queue, one random number generator.

use std::{collections::BTreeMap, ops::RangeInclusive, time::Duration};

use baton_job::{
    Generation, NodeId, engine,
    exit::Failure,
    ids::Attachment,
    message::{AgentReport, Directive},
    time::Time,
};
use fastrand::Rng;

use crate::{
    common::{queue::Queue, store::Store},
    coordinator::{Coordinator, EventKind},
    group::Group,
    ledger::Ledger,
    machine::{Machine, MachineId},
    process::Pid,
    settings::Settings,
};

/// An event of the simulation.
pub(crate) enum FleetEvent {
    MachineBoots(MachineId),
    Interruption,
    MachineEnds(MachineId, NodeId),
    Crash,
    AgentStarts(MachineId),
    AgentWakes(MachineId, u64, Time),
    Connected(MachineId, Attachment),
    Up(Attachment, Box<AgentReport>),
    Down(Attachment, MachineId, Box<Directive>),
    CoordinatorNotices(Attachment),
    CoordinatorWakes(Time),
    CoordinatorRestarts,
    Warms(Pid),
    Listens(Pid, Generation),
    LossDetected(Pid, Generation),
    ProcessEnds(Pid, Failure),
    Meet(Generation),
    Start(Generation),
    StepEnds(Generation),
    Commit(Generation, u64),
    HeartbeatSample,
    MachineHeartbeats(MachineId),
    DayEnds,
}

/// State of the whole simulation.
pub(crate) struct Fleet {
    pub(crate) now: Time,
    pub(crate) rng: Rng,
    pub(crate) settings: Settings,
    pub(crate) queue: Queue<FleetEvent>,
    pub(crate) coordinator: Coordinator,
    pub(crate) machines: Vec<Machine>,
    pub(crate) groups: BTreeMap<Generation, Group>,
    pub(crate) store: Store,
    pub(crate) ledger: Ledger,
    /// Number of machines booted in the whole run.
    pub(crate) booted: u32,
    pub(crate) attachments: u64,
}

impl Fleet {
    pub(crate) fn new(settings: Settings) -> Self {
        let mut fleet = Self {
            now: Time(0),
            rng: Rng::with_seed(settings.seed() as u64),
            queue: Queue::new(),
            coordinator: Coordinator::new(&settings),
            machines: (0..settings.machines()).map(|_| Machine::empty()).collect(),
            groups: BTreeMap::new(),
            store: Store::default(),
            ledger: Ledger::default(),
            booted: 0,
            attachments: 0,
            settings,
        };
        for id in 0..fleet.machines.len() {
            // All machines are started within one minute.
            let at = fleet.soon(0..=60_000);
            fleet.queue.schedule(at, FleetEvent::MachineBoots(id));
        }
        fleet.schedule_interruption();
        fleet.schedule_crash();
        fleet.queue.schedule(Time(3_600_000), FleetEvent::HeartbeatSample);
        fleet.schedule_end_of_day();
        fleet.coordinate(EventKind::Control, engine::Event::Tick);
        fleet
    }

    /// Runs to the end of the simulated time.
    pub(crate) fn run(&mut self) {
        let end = Time(0).after(self.settings.duration());
        while self.queue.next_at().is_some_and(|at| at <= end)
            && let Some((at, event)) = self.queue.pop()
        {
            self.now = at;
            self.handle(event);
        }
        self.now = end;
        self.ledger.ends(end);
    }

    fn handle(&mut self, event: FleetEvent) {
        match event {
            FleetEvent::MachineBoots(id) => self.machine_boots(id),
            FleetEvent::Interruption => self.interruption(),
            FleetEvent::MachineEnds(id, node) => self.machine_ends(id, &node),
            FleetEvent::Crash => self.crash(),
            FleetEvent::AgentStarts(id) => self.agent_starts(id),
            FleetEvent::AgentWakes(id, life, at) => self.agent_wakes(id, life, at),
            FleetEvent::Connected(id, attachment) => self.connected(id, attachment),
            FleetEvent::Up(attachment, report) => self.up(attachment, *report),
            FleetEvent::Down(attachment, id, directive) => self.down(attachment, id, *directive),
            FleetEvent::CoordinatorNotices(attachment) => self.coordinator_notices(attachment),
            FleetEvent::CoordinatorWakes(at) => self.coordinator_wakes(at),
            FleetEvent::CoordinatorRestarts => self.coordinator_restarts(),
            FleetEvent::Warms(pid) => self.warms(pid),
            FleetEvent::Listens(pid, generation) => self.listens(pid, generation),
            FleetEvent::LossDetected(pid, generation) => self.loss_detected(pid, generation),
            FleetEvent::ProcessEnds(pid, failure) => self.end_process(pid, failure),
            FleetEvent::Meet(generation) => self.meet(generation),
            FleetEvent::Start(generation) => self.start(generation),
            FleetEvent::StepEnds(generation) => self.step_ends(generation),
            FleetEvent::Commit(generation, step) => self.commit(generation, step),
            FleetEvent::HeartbeatSample => self.sample_heartbeats(),
            FleetEvent::MachineHeartbeats(id) => self.machine_heartbeats(id),
            FleetEvent::DayEnds => {
                self.schedule_end_of_day();
                self.ledger.day_ends(self.now, self.coordinator.generations);
            }
        }
    }

    fn schedule_end_of_day(&mut self) {
        self.queue.schedule(self.now.after(Duration::from_secs(86_400)), FleetEvent::DayEnds);
    }

    /// A random time after now; `wait_ms` is the range of the wait in milliseconds.
    pub(crate) fn soon(&mut self, wait_ms: RangeInclusive<u64>) -> Time {
        Time(self.now.0 + self.rng.u64(wait_ms))
    }

    pub(crate) fn count_machines(&mut self) {
        let here = self.machines.iter().filter(|machine| machine.is_there).count();
        self.ledger.has_machines(self.now, here as u64);
    }
}
