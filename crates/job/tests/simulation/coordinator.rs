//! The coordinator's shell: a machine, its journal, and its deaths.

use baton_job::{
    Generation,
    engine::{Action, Engine, Event, Incident, Record, Status},
    ids::Attachment,
    message::Restore,
    time::Time,
};
use baton_recipe::Step;

use crate::{
    cluster::{Cluster, Happening},
    fact::Fact,
    plan::Plan,
    process::Process,
};

/// A coordinator that may be down.
pub(crate) struct Coordinator {
    pub(crate) engine: Option<Engine>,
    /// Grows with every start.
    pub(crate) life: u64,
    pub(crate) journal: Vec<Record>,
    attachments: u64,
    /// It dies between two actions of one of the next events: after so many of them.
    pub(crate) dies_after: Option<usize>,
    /// The machine's status after the last event, and before it.
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
            attachments: 0,
            dies_after: None,
            status_before: status.clone(),
            status,
        }
    }

    /// When its machine wants to be woken. It lives by the clock of the history, as does what its journal tells.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.engine.as_ref()?.deadline()
    }

    /// What the journal tells of rollbacks, as generations up to `generation` have to heed it.
    pub(crate) fn restore(&self, plan: &Plan, generation: Generation) -> Restore {
        let rollbacks = self.journal.iter().filter_map(|record| match record {
            Record::Diverged(Incident { rollback: Some(rollback), .. }) => Some(rollback.clone()),
            _ => None,
        });
        let rollbacks = rollbacks.filter(|rollback| rollback.generation <= generation).collect();
        Restore { rollbacks, ..plan.origin.restore.clone() }
    }

    /// Whether the job is over, for a coordinator that runs.
    pub(crate) fn job_is_over(&self) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.outcome().is_some())
    }

    pub(crate) fn next_attachment(&mut self) -> Attachment {
        self.attachments += 1;
        Attachment(self.attachments)
    }
}

impl Cluster {
    /// The step of a process, if no rollback has made its state worthless.
    pub(crate) fn good_step(&self, process: &Process) -> Option<u64> {
        let restore = self.coordinator.restore(&self.plan, Generation(u64::MAX));
        let is_good = |step: &u64| restore.condemned_by(process.state_of, Step(*step)).is_none();
        process.step.filter(is_good)
    }

    /// Feeds the machine and performs its actions, or the first few if the coordinator dies in them.
    pub(crate) fn coordinate(&mut self, event: Event) {
        self.log(|| format!("coordinator: {event:?}"));
        let now = self.now;
        let Some(engine) = &mut self.coordinator.engine else { return };
        let actions = engine.handle(now, event);
        let status = engine.status();
        self.coordinator.status_before = std::mem::replace(&mut self.coordinator.status, status);
        self.facts.push(Fact::EngineMoved);
        let dies_after = self.coordinator.dies_after.take_if(|after| *after < actions.len());
        for (done, action) in actions.into_iter().enumerate() {
            if dies_after == Some(done) {
                return self.coordinator_dies();
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
            Action::Fence(generation) => {
                self.store.raise_fence(generation);
                self.facts.push(Fact::FenceRaised(generation));
            }
            Action::Send { attachment, directive, .. } => {
                self.facts.push(Fact::Told(directive.clone()));
                self.send_down(attachment, directive);
            }
            Action::Refuse { attachment, .. } => self.refuse(attachment),
            Action::Announce(_) | Action::Write(_) | Action::Measured(_) => {}
        }
    }

    pub(crate) fn coordinator_dies(&mut self) {
        if self.coordinator.engine.take().is_none() {
            return;
        }
        self.log(|| "the coordinator dies".to_owned());
        self.facts.push(Fact::CoordinatorDied);
        self.coordinator.life += 1;
        self.reset_all_connections();
        let slow = self.rng.u8(0..4) == 0;
        let at = if slow { self.soon(1_000..=15_000) } else { self.soon(50..=1_000) };
        self.schedule(at, Happening::CoordinatorRestarts);
    }

    pub(crate) fn coordinator_restarts(&mut self) {
        if self.coordinator.engine.is_some() {
            return;
        }
        let spec = &self.plan.spec;
        let engine = Engine::replay(spec, &self.coordinator.journal, self.now)
            .unwrap_or_else(|| Engine::new(spec, self.plan.origin.clone(), self.now));
        self.coordinator.status = engine.status();
        self.coordinator.engine = Some(engine);
        self.facts.push(Fact::CoordinatorReplayed);
        for id in 0..self.agents.len() {
            self.restart_agent_after(id, 0..=3_000);
        }
        self.coordinate(Event::Tick);
    }
}
