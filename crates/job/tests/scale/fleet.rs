//! The whole fleet: one clock, one queue, one generator of chance.

use std::{collections::BTreeMap, ops::RangeInclusive, time::Duration};

use baton_job::{
    Generation, NodeId, engine,
    exit::Failure,
    ids::Attachment,
    message::{Directive, Report},
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

/// What happens at a time.
pub(crate) enum Happening {
    MachineBoots(MachineId),
    Interruption,
    MachineEnds(MachineId, NodeId),
    Crash,
    AgentStarts(MachineId),
    AgentWakes(MachineId, u64, Time),
    Connected(MachineId, Attachment),
    Up(Attachment, Box<Report>),
    Down(Attachment, MachineId, Box<Directive>),
    CoordinatorNotices(Attachment),
    CoordinatorWakes(Time),
    CoordinatorRestarts,
    Warms(Pid),
    Listens(Pid, Generation),
    LosesTouch(Pid, Generation),
    Dies(Pid, Failure),
    Meet(Generation),
    Start(Generation),
    StepEnds(Generation),
    Commit(Generation, u64),
    SignsOfLife,
    Beats(MachineId),
    DayEnds,
}

/// Everything there is.
pub(crate) struct Fleet {
    pub(crate) now: Time,
    pub(crate) rng: Rng,
    pub(crate) settings: Settings,
    pub(crate) queue: Queue<Happening>,
    pub(crate) coordinator: Coordinator,
    pub(crate) machines: Vec<Machine>,
    pub(crate) groups: BTreeMap<Generation, Group>,
    pub(crate) store: Store,
    pub(crate) ledger: Ledger,
    /// Machines of the whole run.
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
            machines: (0..settings.machines()).map(|_| Machine::gap()).collect(),
            groups: BTreeMap::new(),
            store: Store::default(),
            ledger: Ledger::default(),
            booted: 0,
            attachments: 0,
            settings,
        };
        for id in 0..fleet.machines.len() {
            // Somebody starts them all at once.
            let at = fleet.soon(0..=60_000);
            fleet.queue.schedule(at, Happening::MachineBoots(id));
        }
        fleet.schedule_interruption();
        fleet.schedule_crash();
        fleet.queue.schedule(Time(3_600_000), Happening::SignsOfLife);
        fleet.schedule_end_of_day();
        fleet.coordinate(EventKind::Control, engine::Event::Tick);
        fleet
    }

    /// Runs to the end of the time that is looked at.
    pub(crate) fn run(&mut self) {
        let end = Time(0).after(self.settings.duration());
        while self.queue.next_at().is_some_and(|at| at <= end)
            && let Some((at, happening)) = self.queue.pop()
        {
            self.now = at;
            self.happen(happening);
        }
        self.now = end;
        self.ledger.ends(end);
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::MachineBoots(id) => self.machine_boots(id),
            Happening::Interruption => self.interruption(),
            Happening::MachineEnds(id, node) => self.machine_ends(id, &node),
            Happening::Crash => self.crash(),
            Happening::AgentStarts(id) => self.agent_starts(id),
            Happening::AgentWakes(id, life, at) => self.agent_wakes(id, life, at),
            Happening::Connected(id, attachment) => self.connected(id, attachment),
            Happening::Up(attachment, report) => self.up(attachment, *report),
            Happening::Down(attachment, id, directive) => self.down(attachment, id, *directive),
            Happening::CoordinatorNotices(attachment) => self.coordinator_notices(attachment),
            Happening::CoordinatorWakes(at) => self.coordinator_wakes(at),
            Happening::CoordinatorRestarts => self.coordinator_restarts(),
            Happening::Warms(pid) => self.warms(pid),
            Happening::Listens(pid, generation) => self.listens(pid, generation),
            Happening::LosesTouch(pid, generation) => self.loses_touch(pid, generation),
            Happening::Dies(pid, failure) => self.die(pid, failure),
            Happening::Meet(generation) => self.meet(generation),
            Happening::Start(generation) => self.start(generation),
            Happening::StepEnds(generation) => self.step_ends(generation),
            Happening::Commit(generation, step) => self.commit(generation, step),
            Happening::SignsOfLife => self.sample_signs_of_life(),
            Happening::Beats(id) => self.beats(id),
            Happening::DayEnds => {
                self.schedule_end_of_day();
                self.ledger.day_ends(self.now, self.coordinator.generations);
            }
        }
    }

    fn schedule_end_of_day(&mut self) {
        self.queue.schedule(self.now.after(Duration::from_secs(86_400)), Happening::DayEnds);
    }

    /// A time after now, by chance.
    pub(crate) fn soon(&mut self, wait_ms: RangeInclusive<u64>) -> Time {
        Time(self.now.0 + self.rng.u64(wait_ms))
    }

    pub(crate) fn count_machines(&mut self) {
        let here = self.machines.iter().filter(|machine| machine.is_there).count();
        self.ledger.has_machines(self.now, here as u64);
    }
}
