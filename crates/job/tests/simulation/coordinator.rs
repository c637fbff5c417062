//! A model of the coordinator: the engine, its journal, and its crashes.

use baton_job::{
    Generation,
    engine::{Action, Engine, Event, Incident, RanksOfLostJob, Record, Status},
    exit::crash,
    ids::Attachment,
    message::{Restore, Rollback},
    time::Time,
};
use baton_recipe::{Epoch, Step, progress::Progress};

use crate::{
    cluster::{Cluster, SimEvent},
    fact::Fact,
    plan::Plan,
    process::Process,
};

/// The coordinator, which may be down.
pub(crate) struct Coordinator {
    pub(crate) engine: Option<Engine>,
    /// Number of starts.
    pub(crate) life: u64,
    pub(crate) journal: Vec<Record>,
    /// Number of records that are certainly in the journal's copy.
    copied: usize,
    /// Whether the next start is on another machine, from the copy.
    moves: bool,
    attachments: u64,
    /// Number of actions after which the coordinator crashes, in one of the next events.
    pub(crate) crashes_after: Option<usize>,
    /// Until when the store refuses to be written.
    pub(crate) store_refuses_until: Time,
    /// Whether the store has yet to answer.
    pub(crate) waits_for_store: bool,
    /// The engine's status after the last event, and before it.
    pub(crate) status: Status,
    pub(crate) status_before: Status,
}

impl Coordinator {
    pub(crate) fn new(plan: &Plan) -> Self {
        let engine = Engine::new(&plan.spec, plan.origin.clone(), Time(0));
        let status = engine.status();
        Self {
            engine: Some(engine),
            life: 1,
            journal: Vec::new(),
            copied: 0,
            moves: false,
            attachments: 0,
            crashes_after: None,
            store_refuses_until: Time(0),
            waits_for_store: false,
            status_before: status.clone(),
            status,
        }
    }

    /// The engine's deadline. Engine and journal use the simulation's clock.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.engine.as_ref()?.deadline()
    }

    /// The restore rule with the journal's rollbacks that apply to generations up to `generation`.
    pub(crate) fn restore(&self, plan: &Plan, generation: Generation) -> Restore {
        let rollbacks = self.journal.iter().filter_map(|record| match record {
            Record::Diverged(Incident { rollback: Some(rollback), .. }) => Some(rollback.clone()),
            _ => None,
        });
        let applies = |rollback: &Rollback| rollback.generation <= generation;
        let rollbacks = rollbacks.filter(applies).collect();
        // One that should have ended the job, before its coordinator crashed.
        let incidents = self.journal.iter().filter_map(|record| match record {
            Record::Diverged(incident) => Some(incident),
            _ => None,
        });
        let invalidated = Incident::ends(incidents, &plan.spec).filter(applies).collect();
        Restore { rollbacks, invalidated, ..plan.origin.restore.clone() }
    }

    /// Whether the coordinator runs and the job is over.
    pub(crate) fn job_is_over(&self) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.outcome().is_some())
    }

    pub(crate) fn next_attachment(&mut self) -> Attachment {
        self.attachments += 1;
        Attachment(self.attachments)
    }
}

impl Cluster {
    /// The step of a process, if no rollback has invalidated its state.
    pub(crate) fn good_step(&self, process: &Process) -> Option<u64> {
        let restore = self.coordinator.restore(&self.plan, Generation(u64::MAX));
        let is_good = |step: &u64| restore.invalidated_by(process.state_of, Step(*step)).is_none();
        process.step.filter(is_good)
    }

    /// Passes an event to the engine and performs its actions, or only the first ones if the coordinator crashes then.
    pub(crate) fn coordinate(&mut self, event: Event) {
        self.log(|| format!("coordinator: {event:?}"));
        let now = self.now;
        let Some(engine) = &mut self.coordinator.engine else { return };
        let actions = engine.handle(now, event);
        let status = engine.status();
        self.coordinator.status_before = std::mem::replace(&mut self.coordinator.status, status);
        self.facts.push(Fact::EngineMoved);
        let crashes_after = self.coordinator.crashes_after.take_if(|after| *after < actions.len());
        for (done, action) in actions.into_iter().enumerate() {
            if crashes_after == Some(done) {
                return self.coordinator_crashes();
            }
            self.perform(action);
        }
    }

    fn perform(&mut self, action: Action) {
        self.log(|| format!("    {action:?}"));
        match action {
            Action::Persist(record) => {
                self.coordinator.journal.push(record.clone());
                self.facts.push(Fact::Persisted(record));
            }
            Action::Fence(generation) => self.fence(generation),
            Action::FindCheckpoint(restore) => {
                let at = self.soon(1..=5_000);
                let life = self.coordinator.life;
                self.schedule(at, SimEvent::StoreIsRead { life, restore });
            }
            Action::Send { node, attachment, directive } => {
                self.facts.push(Fact::DirectiveSent(node, directive.clone()));
                self.send_down(attachment, directive);
            }
            Action::Refuse { attachment, .. } => self.refuse(attachment),
            Action::Publish(_)
            | Action::WriteDiagnosis(_)
            | Action::AddPoint(_)
            | Action::ProfileEnded(_) => {}
        }
    }

    /// The store may raise the fence some time before it answers.
    fn fence(&mut self, generation: Generation) {
        let is_second = std::mem::replace(&mut self.coordinator.waits_for_store, true);
        assert!(!is_second, "two fences are raised at once");
        let life = self.coordinator.life;
        let at = match self.rng.u8(0..20) {
            0 => self.soon(0..=60_000),
            1..5 => self.soon(0..=5_000),
            _ => self.soon(0..=20),
        };
        if self.rng.bool() {
            self.store.raise_fence(generation);
        }
        let copied = self.coordinator.journal.len();
        self.schedule(at, SimEvent::StoreAnswers { life, generation, copied });
    }

    /// A store that refuses to be written may have raised the fence before it failed. The request of a coordinator that has
    /// crashed may still be carried out.
    pub(crate) fn store_answers(&mut self, life: u64, generation: Generation, copied: usize) {
        let refuses = self.coordinator.store_refuses_until > self.now;
        let is_received = self.coordinator.life == life && self.coordinator.engine.is_some();
        if !refuses && is_received || self.rng.bool() {
            self.store.raise_fence(generation);
        }
        if !is_received {
            return;
        }
        self.coordinator.waits_for_store = false;
        if refuses {
            self.facts.push(Fact::FenceRefused);
            let failure = crash("the disk is full");
            return self.coordinate(Event::FenceFailed { failure });
        }
        self.coordinator.copied = copied;
        self.facts.push(Fact::FenceRaised(generation));
        self.coordinate(Event::Fenced);
    }

    /// Answers with the checkpoint from which the next generation would resume, if there is one.
    pub(crate) fn store_is_read(&mut self, life: u64, restore: &Restore) {
        if self.coordinator.life != life {
            return;
        }
        let found = self.store.newest(restore).map(|(commit, _)| {
            let is_complete = commit.step.0 >= self.plan.total_steps;
            let epoch = Epoch(if is_complete { self.plan.spec.train.epochs } else { 0 });
            self.facts.push(Fact::CheckpointFound { is_complete });
            let evaluated_fully = is_complete.then_some(epoch);
            let step = commit.step;
            let progress = Progress { step, epoch, evaluated_fully, ..Progress::default() };
            Box::new((commit.clone(), progress))
        });
        self.coordinate(Event::CheckpointFound(found));
    }

    pub(crate) fn coordinator_crashes(&mut self) {
        if self.coordinator.engine.take().is_none() {
            return;
        }
        self.log(|| "the coordinator crashes".to_owned());
        self.facts.push(Fact::CoordinatorCrashed);
        self.coordinator.life += 1;
        self.coordinator.waits_for_store = false;
        self.reset_all_connections();
        let slow = self.rng.u8(0..4) == 0;
        let at = if slow { self.soon(1_000..=15_000) } else { self.soon(50..=1_000) };
        self.schedule(at, SimEvent::CoordinatorRestarts);
    }

    /// The coordinator's machine is lost. Another one continues, from a copy of the journal that may lack the newest
    /// records.
    pub(crate) fn coordinator_is_lost(&mut self) {
        self.coordinator.moves |=
            self.coordinator.engine.is_some() && !self.coordinator.job_is_over();
        self.coordinator_crashes();
    }

    pub(crate) fn coordinator_restarts(&mut self) {
        if self.coordinator.engine.is_some() {
            return;
        }
        let moves = std::mem::take(&mut self.coordinator.moves) && self.continue_with_copy();
        let spec = &self.plan.spec;
        let engine = Engine::replay(spec, &self.coordinator.journal, self.now)
            .unwrap_or_else(|| Engine::new(spec, self.plan.origin.clone(), self.now));
        self.coordinator.status = engine.status();
        self.coordinator.engine = Some(engine);
        self.facts.push(Fact::CoordinatorReplayed);
        if moves {
            self.coordinate(Event::CoordinatorMoved { text: String::new() });
        }
        for id in 0..self.agents.len() {
            self.restart_agent_after(id, 0..=3_000);
        }
        self.coordinate(Event::Tick);
    }

    /// Continues with the copy of the journal, if there is one.
    fn continue_with_copy(&mut self) -> bool {
        let Coordinator { journal, copied, .. } = &mut self.coordinator;
        if *copied == 0 {
            // Nobody takes over before the first generation; the same coordinator starts again.
            return false;
        }
        let length = self.rng.usize((*copied).min(journal.len())..=journal.len());
        let forgotten = journal.split_off(length);
        self.facts.extend(forgotten.into_iter().rev().map(Fact::Forgotten));
        let fence = self.store.fence;
        let added = Record::after_loss(journal, fence, RanksOfLostJob::MayRun).unwrap_or_default();
        self.facts.extend(added.iter().cloned().map(Fact::Persisted));
        journal.extend(added);
        *copied = journal.len();
        true
    }
}
