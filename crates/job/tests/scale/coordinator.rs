//! A model of the coordinator: the engine, its journal, and the time both take.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use baton_job::{
    Generation, JobId, NodeId,
    engine::{Action, Engine, Event, JobEvent, JobEventKind, JobOrigin, Record, Recovery},
    ids::Attachment,
    message::{Directive, Restore},
    time::Time,
};
use baton_recipe::progress::Progress;

use crate::{
    fleet::{Fleet, FleetEvent},
    machine::MachineId,
    settings::Settings,
};

/// The coordinator. Its machine is never taken away.
pub(crate) struct Coordinator {
    pub(crate) engine: Engine,
    /// Machine of each attachment, to which directives are sent.
    pub(crate) outboxes: HashMap<Attachment, MachineId>,
    /// Node of each attachment, once it has sent its hello.
    pub(crate) attached: HashMap<Attachment, NodeId>,
    /// Time of the scheduled tick.
    wakes_at: Option<Time>,
    /// Records as JSON, as the real coordinator writes them.
    journal: Vec<Vec<u8>>,
    pub(crate) cost: CoordinatorCost,
    /// Recoveries that are complete, or that ended with their generation.
    pub(crate) recoveries: Vec<Recovery>,
    pub(crate) generations: u64,
    /// Message of each end of the job.
    pub(crate) ends: Vec<String>,
}

/// Work of the coordinator.
#[derive(Default)]
pub(crate) struct CoordinatorCost {
    /// Events that may change a deadline or a phase.
    pub(crate) control: Load,
    /// Heartbeats.
    pub(crate) heartbeats: Load,
    /// Time to serialize records and job events as JSON.
    pub(crate) writing: Duration,
    pub(crate) record_bytes: usize,
    pub(crate) job_events: u64,
    pub(crate) event_bytes: usize,
    pub(crate) directives: u64,
    /// Bytes of all lists of addresses that were sent.
    pub(crate) address_bytes: u64,
}

/// Number of events, and the engine's time for them.
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
        let origin = JobOrigin {
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
            cost: CoordinatorCost::default(),
            recoveries: Vec::new(),
            generations: 0,
            ends: Vec::new(),
        }
    }

    pub(crate) fn records(&self) -> usize {
        self.journal.len()
    }

    /// Replays the journal into a new engine; returns it and the time taken.
    pub(crate) fn replayed(&self, settings: &Settings, now: Time) -> (Engine, Duration) {
        let began = Instant::now();
        let read = |bytes: &Vec<u8>| match serde_json::from_slice(bytes) {
            Ok(record) => record,
            Err(error) => panic!("a record cannot be read: {error}"),
        };
        let records: Vec<Record> = self.journal.iter().map(read).collect();
        match Engine::replay(&settings.spec(), &records, now) {
            Some(engine) => (engine, began.elapsed()),
            None => panic!("the journal has no job"),
        }
    }

    fn write(&mut self, record: &Record) {
        let began = Instant::now();
        let bytes = serde_json::to_vec(record).unwrap_or_default();
        self.cost.writing += began.elapsed();
        self.cost.record_bytes += bytes.len();
        self.journal.push(bytes);
    }

    fn publish(&mut self, job_event: &JobEvent) {
        let began = Instant::now();
        let bytes = serde_json::to_vec(job_event).unwrap_or_default();
        self.cost.writing += began.elapsed();
        self.cost.job_events += 1;
        self.cost.event_bytes += bytes.len();
        if job_event.kind == JobEventKind::Ended {
            self.ends.push(job_event.message.clone());
        }
    }
}

/// Whether an event is a heartbeat, which cannot change a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    Control,
    Heartbeat,
}

impl Fleet {
    /// Passes an event to the engine and performs its actions.
    pub(crate) fn coordinate(&mut self, kind: EventKind, event: Event) {
        let engine = &mut self.coordinator.engine;
        let began = Instant::now();
        let actions = engine.handle(self.now, event);
        let took = began.elapsed();
        match kind {
            EventKind::Control => self.coordinator.cost.control.add(took),
            EventKind::Heartbeat => {
                // Otherwise the simulation could not leave out most heartbeats.
                let found = engine.deadline_by_recount();
                assert_eq!(engine.deadline(), found, "a heartbeat changed a deadline");
                self.coordinator.cost.heartbeats.add(took);
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
            self.queue.schedule(at.max(self.now), FleetEvent::CoordinatorWakes(at));
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
                        assert!(
                            outcome.is_resumable(),
                            "the job ended and cannot be resumed: {outcome}"
                        );
                        let at = self.now.after(Duration::from_secs(30));
                        self.queue.schedule(at, FleetEvent::CoordinatorRestarts);
                    }
                    _ => {}
                }
            }
            Action::Fence(generation) => {
                self.store.raise_fence(generation);
                self.coordinate(EventKind::Control, Event::Fenced);
            }
            Action::Send { attachment, directive, .. } => {
                let cost = &mut self.coordinator.cost;
                cost.directives += 1;
                let directive = match directive {
                    Directive::Begin { generation, peers, secret } => {
                        cost.address_bytes += peers.iter().map(|one| one.len() as u64).sum::<u64>();
                        // A real agent sends the list to each of its ranks. Here no rank connects, so the list is
                        // dropped to save memory.
                        Directive::Begin { generation, peers: [].into(), secret }
                    }
                    other => other,
                };
                self.send_down(attachment, directive);
            }
            Action::Refuse { node, reason, .. } => panic!("{node} was refused: {reason}"),
            Action::Publish(job_event) => self.coordinator.publish(&job_event),
            Action::AddPoint(_) => {}
            Action::ProfileEnded(result) => panic!("nobody asks for a profile: {result:?}"),
            Action::FindCheckpoint(restore) => {
                let found = self.store.newest(&restore).map(|(commit, _)| {
                    // No training is completed here.
                    let progress = Progress { step: commit.step, ..Progress::default() };
                    Box::new((commit.clone(), progress))
                });
                self.coordinate(EventKind::Control, Event::CheckpointFound(found));
            }
            Action::WriteDiagnosis(written) => panic!("nothing diverges here: {written:?}"),
        }
    }

    /// A supervisor restarts the coordinator with the same journal.
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
