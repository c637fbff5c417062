//! The coordinator's shell: the machine, its journal, and what both cost.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use baton_job::{
    Generation, JobId, NodeId,
    engine::{Action, Engine, Event, Notice, NoticeKind, Origin, Record, Recovery},
    ids::Attachment,
    message::{Directive, Restore},
    time::Time,
};

use crate::{
    fleet::{Fleet, Happening},
    machine::MachineId,
    settings::Settings,
};

/// The coordinator, which stands on a machine that nobody takes away.
pub(crate) struct Coordinator {
    pub(crate) engine: Engine,
    /// Where directives go.
    pub(crate) outboxes: HashMap<Attachment, MachineId>,
    /// Who said hello.
    pub(crate) attached: HashMap<Attachment, NodeId>,
    /// When a tick is scheduled already.
    wakes_at: Option<Time>,
    /// As the real shell writes it: records, one JSON text each.
    journal: Vec<Vec<u8>>,
    pub(crate) cost: Cost,
    /// All that came to their end, or to that of their generation.
    pub(crate) recoveries: Vec<Recovery>,
    pub(crate) generations: u64,
    /// Ends of the job.
    pub(crate) ends: Vec<String>,
}

/// What the coordinator had to do.
#[derive(Default)]
pub(crate) struct Cost {
    /// Of events that change something.
    pub(crate) control: Load,
    /// Of those that tell that somebody lives.
    pub(crate) signs: Load,
    /// To put records and notices into JSON.
    pub(crate) writing: Duration,
    pub(crate) record_bytes: usize,
    pub(crate) notices: u64,
    pub(crate) notice_bytes: usize,
    pub(crate) directives: u64,
    /// In all the lists of addresses that were told.
    pub(crate) address_bytes: u64,
}

/// Events, and the time that the machine took for them.
#[derive(Default)]
pub(crate) struct Load {
    pub(crate) events: u64,
    pub(crate) time: Duration,
    pub(crate) longest: Duration,
}

impl Load {
    fn add(&mut self, took: Duration) {
        self.events += 1;
        self.time += took;
        self.longest = self.longest.max(took);
    }
}

impl Coordinator {
    pub(crate) fn new(settings: &Settings) -> Self {
        let origin = Origin {
            job: JobId(uuid::Uuid::nil()),
            recipe: None,
            first_generation: Generation(1),
            restore: Restore::default(),
        };
        Self {
            engine: Engine::new(&settings.spec(), origin, Time(0)),
            outboxes: HashMap::new(),
            attached: HashMap::new(),
            wakes_at: None,
            journal: Vec::new(),
            cost: Cost::default(),
            recoveries: Vec::new(),
            generations: 0,
            ends: Vec::new(),
        }
    }

    pub(crate) fn records(&self) -> usize {
        self.journal.len()
    }

    /// A new coordinator from the journal, and how long that took.
    pub(crate) fn replayed(&self, settings: &Settings, now: Time) -> (Engine, Duration) {
        let began = Instant::now();
        let read = |bytes: &Vec<u8>| match serde_json::from_slice(bytes) {
            Ok(record) => record,
            Err(error) => panic!("a record cannot be read: {error}"),
        };
        let records: Vec<Record> = self.journal.iter().map(read).collect();
        match Engine::replay(&settings.spec(), &records, now) {
            Some(engine) => (engine, began.elapsed()),
            None => panic!("the journal holds no job"),
        }
    }

    fn write(&mut self, record: &Record) {
        let began = Instant::now();
        let bytes = serde_json::to_vec(record).unwrap_or_default();
        self.cost.writing += began.elapsed();
        self.cost.record_bytes += bytes.len();
        self.journal.push(bytes);
    }

    fn announce(&mut self, notice: &Notice) {
        let began = Instant::now();
        let bytes = serde_json::to_vec(notice).unwrap_or_default();
        self.cost.writing += began.elapsed();
        self.cost.notices += 1;
        self.cost.notice_bytes += bytes.len();
        if notice.kind == NoticeKind::Ended {
            self.ends.push(notice.message.clone());
        }
    }
}

/// Whether it can change no deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    Control,
    SignOfLife,
}

impl Fleet {
    /// Feeds the machine and performs its actions.
    pub(crate) fn coordinate(&mut self, kind: EventKind, event: Event) {
        let engine = &mut self.coordinator.engine;
        let began = Instant::now();
        let actions = engine.handle(self.now, event);
        let took = began.elapsed();
        match kind {
            EventKind::Control => self.coordinator.cost.control.add(took),
            EventKind::SignOfLife => {
                // Else to leave most of them out would not be allowed.
                let found = engine.deadline_by_recount();
                assert_eq!(engine.deadline(), found, "a sign of life changed a deadline");
                self.coordinator.cost.signs.add(took);
            }
        }
        for action in actions {
            self.perform(action);
        }
        self.wake_coordinator();
    }

    fn wake_coordinator(&mut self) {
        let coordinator = &mut self.coordinator;
        if let Some(at) = coordinator.engine.deadline()
            && coordinator.wakes_at.is_none_or(|before| at < before)
        {
            coordinator.wakes_at = Some(at);
            self.queue.schedule(at.max(self.now), Happening::CoordinatorWakes(at));
        }
    }

    pub(crate) fn coordinator_wakes(&mut self, at: Time) {
        if self.coordinator.wakes_at != Some(at) {
            return;
        }
        self.coordinator.wakes_at = None;
        match self.coordinator.engine.deadline() {
            Some(deadline) if deadline <= self.now => {
                self.coordinate(EventKind::Control, Event::Tick)
            }
            _ => self.wake_coordinator(),
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Persist(record) => {
                self.coordinator.write(&record);
                match record {
                    Record::Opened { .. } => self.coordinator.generations += 1,
                    Record::Recovery(recovery) => self.coordinator.recoveries.push(recovery),
                    Record::Ended(outcome) => {
                        assert!(outcome.is_resumable(), "the job ended for good: {outcome}");
                        let at = self.now.after(Duration::from_secs(30));
                        self.queue.schedule(at, Happening::CoordinatorRestarts);
                    }
                    _ => {}
                }
            }
            Action::Fence(generation) => self.store.raise_fence(generation),
            Action::Send { attachment, directive, .. } => {
                let cost = &mut self.coordinator.cost;
                cost.directives += 1;
                let directive = match directive {
                    Directive::Begin { generation, peers } => {
                        cost.address_bytes += peers.iter().map(|one| one.len() as u64).sum::<u64>();
                        // The agents of one machine each hand the list to each of their ranks. Here all agents are
                        // one process, and nobody dials.
                        Directive::Begin { generation, peers: [].into() }
                    }
                    other => other,
                };
                self.send_down(attachment, directive);
            }
            Action::Refuse { node, reason, .. } => panic!("{node} was refused: {reason}"),
            Action::Announce(notice) => self.coordinator.announce(&notice),
            Action::Measured(_) => {}
            Action::Write(written) => panic!("nothing diverges here: {written:?}"),
        }
    }

    /// A supervisor starts it again, on the same journal.
    pub(crate) fn coordinator_restarts(&mut self) {
        let (engine, _) = self.coordinator.replayed(&self.settings, self.now);
        self.coordinator.engine = engine;
        self.coordinator.outboxes.clear();
        self.coordinator.attached.clear();
        for id in 0..self.machines.len() {
            self.disconnected(id);
        }
        self.coordinate(EventKind::Control, Event::Tick);
    }
}
