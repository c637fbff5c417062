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
    JobSpec, Step,
    guard::{BatchMark, Diagnosis, Divergence},
    spec::GuardRemedy,
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
    /// What the next start makes of the checkpoints after a divergence that ended the job; `incidents` are all of the job, in
    /// order.
    pub fn ends<'a>(
        incidents: impl Iterator<Item = &'a Self>,
        spec: &JobSpec,
    ) -> impl Iterator<Item = Rollback> {
        let mut last = None;
        incidents.filter_map(move |incident| {
            let end = incident.end(spec, last);
            last = incident.rollback.as_ref().or(last);
            end
        })
    }

    /// The same, if this one has ended the job; `last` is the rollback before it.
    fn end(&self, spec: &JobSpec, last: Option<&Rollback>) -> Option<Rollback> {
        let (diagnosis, next) = (&self.diagnosis, self.generation.next());
        // If a batch is to blame, the state before it may be good.
        let before = match has_collapsed(diagnosis) {
            true => diagnosis.step,
            false => diagnosis.step.next(),
        };
        self.rollback.is_none().then(|| rollback(diagnosis, spec, before, (next, None), last))
    }

    /// What was done, as text.
    #[must_use]
    pub fn remedy(&self) -> String {
        match &self.rollback {
            Some(Rollback { before, suspect_from, skip, .. }) => {
                let before = suspect_from.unwrap_or(*before);
                let how = match skip {
                    None => "with a lower learning rate",
                    Some(_) => "without that batch and the one before it",
                };
                format!("back to before step {before} {how}")
            }
            None => "the job ended".to_owned(),
        }
    }
}

/// Back to before this step, at which training diverged, in generation `next`; `last` is the rollback before this one.
fn rollback(
    diagnosis: &Diagnosis,
    spec: &JobSpec,
    before: Step,
    (next, skip): (Generation, Option<BatchMark>),
    last: Option<&Rollback>,
) -> Rollback {
    let from = diagnosis.suspect_from(spec);
    let again = last.and_then(|last| suspect_from_again(diagnosis, spec, last));
    let suspect_from =
        Some(again.map_or(from, |again| from.min(again))).filter(|from| *from < before);
    Rollback { generation: next, before, suspect_from, skip }
}

/// Where training diverges again and has come at most `guard.window` steps further than the last time, the state that the last
/// rollback used may be damaged too: all states of one more window are suspect. Batches that were skipped damaged none.
fn suspect_from_again(diagnosis: &Diagnosis, spec: &JobSpec, last: &Rollback) -> Option<Step> {
    let window = u64::from(spec.guard.window);
    let is_again = last.skip.is_none() && diagnosis.step.0 <= last.before.0 + window;
    let from = last.suspect_from.unwrap_or(last.before);
    is_again.then(|| Step(from.0.saturating_sub(window)))
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

    /// What the next start makes of the checkpoints after a divergence that ended the job.
    pub(super) fn ends(&self, spec: &JobSpec) -> impl Iterator<Item = Rollback> {
        Incident::ends(self.incidents.iter(), spec)
    }

    /// Whether a rollback is pending, to be carried out by the generation after `generation`.
    pub(super) fn is_rollback_due(&self, generation: Generation) -> bool {
        self.rollbacks().last().is_some_and(|rollback| rollback.generation > generation)
    }

    /// The rollback with which generation `next` continues after `diagnosis`; absent if all attempts are used up.
    pub(super) fn remedy(
        &self,
        diagnosis: &Diagnosis,
        spec: &JobSpec,
        next: Generation,
    ) -> Option<Rollback> {
        let guard = &spec.guard;
        let attempts = self.rollbacks().count();
        if !guard.enabled || attempts >= guard.max_rollbacks as usize {
            return None;
        }
        let skips = guard.remedy == GuardRemedy::SkipBatch && !has_collapsed(diagnosis);
        let skip = skips.then_some(diagnosis.batch);
        Some(rollback(diagnosis, spec, diagnosis.step, (next, skip), self.rollbacks().last()))
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
