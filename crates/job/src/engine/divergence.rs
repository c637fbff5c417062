//! Training that goes wrong: back to before it, or the end.
//!
//! All ranks come to the same verdict at the same step and then wait, so the first word is enough.
//! The rollback is persisted with the number of the generation that is to go on. Until that one is
//! opened the rollback is due, and nothing of the present generation may go on; not even if this
//! coordinator dies and another finds the ranks in their places.

use serde::{Deserialize, Serialize};

use super::{
    Action, Engine, Notice, NoticeKind, Phase, Record, crash, notice::describe_divergence,
};
use crate::{
    exit::{Class, Failure, Outcome},
    ids::Generation,
    message::{Restore, Rollback},
    time::Time,
};
use baton_recipe::{
    Step,
    guard::{Diagnosis, Divergence},
    spec::Remedy,
};

/// Training that went wrong, and what was done about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Incident {
    /// The generation that found it.
    pub generation: Generation,
    /// What it found.
    pub diagnosis: Diagnosis,
    /// How training goes on; none if that was the end of the job.
    pub rollback: Option<Rollback>,
}

impl Incident {
    /// What was done, in words.
    #[must_use]
    pub fn remedy(&self) -> String {
        match &self.rollback {
            Some(Rollback { before, skip: None, .. }) => {
                format!("back to before step {before} with a lower learning rate")
            }
            Some(Rollback { before, skip: Some(_), .. }) => {
                format!("back to before step {before} without that batch and the one before it")
            }
            None => "the job ended".to_owned(),
        }
    }
}

impl Engine {
    /// Where the state of a generation comes from: the job's rule, and what has been rolled back.
    #[must_use]
    pub fn restore(&self) -> Restore {
        let rollbacks = self.rollbacks().cloned().collect();
        Restore { rollbacks, ..self.origin.restore.clone() }
    }

    fn rollbacks(&self) -> impl Iterator<Item = &Rollback> {
        self.incidents.iter().filter_map(|incident| incident.rollback.as_ref())
    }

    /// Whether a rollback waits for the next generation.
    pub(super) fn is_rollback_due(&self) -> bool {
        self.rollbacks().last().is_some_and(|rollback| rollback.generation > self.generation)
    }

    /// A rank of the present generation says that training went wrong.
    pub(super) fn diverged(&mut self, now: Time, diagnosis: Diagnosis) {
        // Nothing trains before the meeting, and every rank tells the same.
        if matches!(self.phase, Phase::Forming { .. }) || self.is_rollback_due() {
            return;
        }
        let rollback = self.rollback_of(&diagnosis);
        let incident = Incident { generation: self.generation, diagnosis, rollback };
        self.actions.push(Action::Persist(Record::Diverged(incident.clone())));
        self.remember(&incident);
        let written = self.written(&incident);
        let name = written.name();
        self.actions.push(Action::Write(Box::new(written)));
        let step = Some(incident.diagnosis.step);
        let most = self.spec.guard.max_rollbacks;
        let message = describe_divergence(&incident, self.rollbacks().count(), most, &name);
        let (kind, generation) = (NoticeKind::Diverged, self.generation);
        self.actions.push(Action::Announce(Notice { kind, generation, step, message }));
        match incident.rollback {
            Some(_) => self.go_back(now, &incident.diagnosis),
            None => self.end(now, self.beyond_remedy(&incident.diagnosis)),
        }
    }

    /// How to go on, unless the attempts are used up.
    fn rollback_of(&self, diagnosis: &Diagnosis) -> Option<Rollback> {
        let guard = &self.spec.guard;
        let attempts = self.rollbacks().count();
        if !guard.enabled || attempts >= guard.max_rollbacks as usize {
            return None;
        }
        // Where not one step could be made, what the generation began with is no good already.
        let made_no_step = self.began_at == Some(diagnosis.step);
        let before = if made_no_step { diagnosis.step } else { diagnosis.step.next() };
        let of_a_batch = !matches!(diagnosis.divergence, Divergence::AccuracyCollapsed { .. });
        let skips = guard.remedy == Remedy::SkipBatch && of_a_batch;
        let skip = skips.then_some(diagnosis.batch);
        Some(Rollback { generation: self.generation.next(), before, skip })
    }

    /// Takes an incident into the machine's memory, when it happens or when it is replayed.
    pub(super) fn remember(&mut self, incident: &Incident) {
        self.incidents.push(incident.clone());
        let Some(Rollback { before, .. }) = incident.rollback else { return };
        // Steps that are made again are progress again.
        self.high_water = Step(0);
        self.reached = Step(0);
        self.evaluation.take_if(|found| found.step >= before);
        self.best.take_if(|(step, _)| *step >= before);
    }

    /// No rank of this generation may go on. A node that is away is waited for, as for any new
    /// generation.
    fn go_back(&mut self, now: Time, diagnosis: &Diagnosis) {
        let failure = crash(format!("rolling back: {}", diagnosis.divergence));
        let reattaching = match &self.phase {
            Phase::Reattaching { until, lost_at, .. } => Some((*until, *lost_at)),
            _ => None,
        };
        let Some(mut world) = self.take_world() else { return };
        world.all_lose_touch();
        if let Some((until, lost_at)) = reattaching {
            self.phase = Phase::Reattaching { world, until, lost_at };
            return self.finish_reattaching(now);
        }
        let reason = match self.away(&world) {
            Some(node) => format!("{failure}; waiting for node {node}, which is away"),
            None => failure.message.clone(),
        };
        self.set_phase(now, Phase::Settling { world, until: now, lost_at: now, failure }, reason);
        self.settle(now);
    }

    fn beyond_remedy(&self, diagnosis: &Diagnosis) -> Outcome {
        let guard = &self.spec.guard;
        let why = if guard.enabled {
            let times = self.rollbacks().count();
            format!("after {times} rollbacks (guard.max_rollbacks = {})", guard.max_rollbacks)
        } else {
            "and guard.enabled = false".to_owned()
        };
        let advice = diagnosis.advice(&self.spec).join("; ");
        let message = format!("training diverged, {why}: {diagnosis}; try: {advice}");
        Outcome::Failed { failure: Failure { class: Class::Diverged, message } }
    }
}
