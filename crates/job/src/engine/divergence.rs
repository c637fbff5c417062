//! Training that goes wrong: back to before it, or the end.
//!
//! All ranks come to the same verdict at the same step and then wait, so the first word is enough.
//! The rollback is persisted with the number of the generation that is to go on. Until that one is
//! opened the rollback is due, and nothing of the present generation may go on; not even if this
//! coordinator dies and another finds the ranks in their places.

use serde::{Deserialize, Serialize};

use crate::{
    exit::{Class, Failure, Outcome},
    ids::Generation,
    message::Rollback,
};
use baton_recipe::{
    JobSpec, Step,
    guard::{Diagnosis, Divergence},
    spec::{Guard, Remedy},
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

/// All of them over the job's whole life, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Divergences {
    pub(super) incidents: Vec<Incident>,
}

impl Divergences {
    pub(super) fn rollbacks(&self) -> impl Iterator<Item = &Rollback> {
        self.incidents.iter().filter_map(|incident| incident.rollback.as_ref())
    }

    /// Whether a rollback waits for the generation after this one.
    pub(super) fn is_rollback_due(&self, generation: Generation) -> bool {
        self.rollbacks().last().is_some_and(|rollback| rollback.generation > generation)
    }

    /// How `next` goes on after `diagnosis`, unless the attempts are used up. `began_at` is the step that the
    /// generation before it began with.
    pub(super) fn remedy(
        &self,
        diagnosis: &Diagnosis,
        guard: &Guard,
        began_at: Option<Step>,
        next: Generation,
    ) -> Option<Rollback> {
        let attempts = self.rollbacks().count();
        if !guard.enabled || attempts >= guard.max_rollbacks as usize {
            return None;
        }
        // Where not one step could be made, what the generation began with is no good already.
        let made_no_step = began_at == Some(diagnosis.step);
        let before = if made_no_step { diagnosis.step } else { diagnosis.step.next() };
        let of_a_batch = !matches!(diagnosis.divergence, Divergence::AccuracyCollapsed { .. });
        let skips = guard.remedy == Remedy::SkipBatch && of_a_batch;
        let skip = skips.then_some(diagnosis.batch);
        Some(Rollback { generation: next, before, skip })
    }

    /// The end of a job for which there is no remedy.
    pub(super) fn end_of_job(&self, diagnosis: &Diagnosis, spec: &JobSpec) -> Outcome {
        let guard = &spec.guard;
        let why = if guard.enabled {
            let times = self.rollbacks().count();
            format!("after {times} rollbacks (guard.max_rollbacks = {})", guard.max_rollbacks)
        } else {
            "and guard.enabled = false".to_owned()
        };
        let advice = diagnosis.advice(spec).join("; ");
        let message = format!("training diverged, {why}: {diagnosis}; try: {advice}");
        Outcome::Failed { failure: Failure { class: Class::Diverged, message } }
    }
}
