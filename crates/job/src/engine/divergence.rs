//! Training that diverges: it is rolled back, or the job ends.
//!
//! All ranks detect the same divergence at the same step and then wait, so the first report is enough. The rollback is
//! persisted with the number of the generation that will continue. The rollback is pending until that generation is
//! opened, and no rank of the current generation may continue, even if this coordinator dies and another one finds
//! the ranks still running.

use serde::{Deserialize, Serialize};

use crate::{
    exit::{Class, Failure, Outcome},
    ids::Generation,
    message::Rollback,
};
use baton_recipe::{
    JobSpec,
    guard::{Diagnosis, Divergence},
    spec::{Guard, GuardRemedy},
};

/// A divergence of training, and what was done about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Incident {
    /// The generation that detected it.
    pub generation: Generation,
    /// The diagnosis.
    pub diagnosis: Diagnosis,
    /// How training continues; absent if the job ended.
    pub rollback: Option<Rollback>,
}

impl Incident {
    /// What this has invalidated if it ended the job and was a collapse.
    #[must_use]
    pub fn end_by_collapse(&self, guard: &Guard) -> Option<Rollback> {
        let is_end = self.rollback.is_none();
        let generation = self.generation.next();
        let before = self.diagnosis.invalid_from(guard);
        (is_end && has_collapsed(&self.diagnosis)).then_some(Rollback {
            generation,
            before,
            skip: None,
        })
    }

    /// What was done, as text.
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

/// Whether it is an evaluation that shows the divergence: no batch is to blame.
fn has_collapsed(diagnosis: &Diagnosis) -> bool {
    matches!(diagnosis.divergence, Divergence::AccuracyCollapsed { .. })
}

/// All incidents of the job, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Divergences {
    pub(super) incidents: Vec<Incident>,
}

impl Divergences {
    pub(super) fn rollbacks(&self) -> impl Iterator<Item = &Rollback> {
        self.incidents.iter().filter_map(|incident| incident.rollback.as_ref())
    }

    /// What a collapse has invalidated that ended the job: its checkpoint was committed before the evaluation.
    pub(super) fn end_by_collapse(&self, guard: &Guard) -> impl Iterator<Item = Rollback> {
        self.incidents.iter().filter_map(|incident| incident.end_by_collapse(guard))
    }

    /// Whether a rollback is pending, to be carried out by the generation after `generation`.
    pub(super) fn is_rollback_due(&self, generation: Generation) -> bool {
        self.rollbacks().last().is_some_and(|rollback| rollback.generation > generation)
    }

    /// The rollback with which generation `next` continues after `diagnosis`; absent if all attempts are used up.
    /// `began_at` is the step at which the generation before it began.
    pub(super) fn remedy(
        &self,
        diagnosis: &Diagnosis,
        guard: &Guard,
        next: Generation,
    ) -> Option<Rollback> {
        let attempts = self.rollbacks().count();
        if !guard.enabled || attempts >= guard.max_rollbacks as usize {
            return None;
        }
        let skips = guard.remedy == GuardRemedy::SkipBatch && !has_collapsed(diagnosis);
        let skip = skips.then_some(diagnosis.batch);
        Some(Rollback { generation: next, before: diagnosis.invalid_from(guard), skip })
    }

    /// The outcome of a job for which no remedy is left.
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
