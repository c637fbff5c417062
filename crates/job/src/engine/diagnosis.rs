//! The diagnosis files, written for the person who has to correct a recipe.
//!
//! Scripts may read the JSON: keys are added, never renamed or removed.

use serde::Serialize;

use super::Incident;
use crate::{
    JobId,
    ids::Generation,
    message::{Rollback, StepReport},
};
use baton_recipe::{
    JobSpec,
    guard::{BatchMark, Diagnosis},
};

/// A diagnosis and its context, written as a Markdown and a JSON file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WrittenDiagnosis {
    /// Number of the diagnosis in the job, from 1.
    pub number: usize,
    /// The job.
    pub job: JobId,
    /// The recipe's name.
    pub recipe: String,
    /// The generation in which training diverged.
    pub generation: Generation,
    /// What happened, as text.
    pub summary: String,
    /// What happened, as data.
    pub diagnosis: Diagnosis,
    /// What was done, as text.
    pub remedy: String,
    /// How training continues, if it does.
    pub rollback: Option<Rollback>,
    /// What the user should try, most likely first.
    pub advice: Vec<String>,
    /// Metrics of the last update that was reported to the coordinator.
    pub latest: Option<StepReport>,
}

impl WrittenDiagnosis {
    /// The diagnosis of the `number`th incident of `job`.
    pub(super) fn new(
        number: usize,
        job: JobId,
        spec: &JobSpec,
        incident: &Incident,
        latest: Option<StepReport>,
    ) -> Self {
        let diagnosis = incident.diagnosis.clone();
        Self {
            number,
            job,
            recipe: spec.name.clone(),
            generation: incident.generation,
            summary: diagnosis.to_string(),
            remedy: incident.remedy(),
            rollback: incident.rollback.clone(),
            advice: diagnosis.advice(spec),
            diagnosis,
            latest,
        }
    }

    /// Name of its files, without extension.
    #[must_use]
    pub fn name(&self) -> String {
        format!("diagnosis-{}", self.number)
    }

    /// For programs: one JSON object; numbers that are not finite are `null`.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Only plain structs, strings and numbers: serialization cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// For people, in Markdown.
    #[must_use]
    pub fn to_markdown(&self) -> String {
        let Self { number, job, recipe, generation, remedy, diagnosis, .. } = self;
        let BatchMark { epoch, cursor } = diagnosis.batch;
        let mut text = format!(
            "# Diagnosis {number} of {recipe}\n\n\
             Training diverged: {}.\n\n\
             What was done: {remedy}.\n\n\
             | | |\n|---|---|\n\
             | job | {job} |\n\
             | generation | {generation} |\n\
             | steps made before | {} |\n\
             | batch | epoch {epoch}, from sample {cursor} of its order |\n\
             | learning rate | {:.4e} |\n\
             | loss of the batch | {} |\n\
             | gradient norm | {} |\n",
            diagnosis.divergence,
            diagnosis.step,
            diagnosis.lr,
            number_or_none(diagnosis.loss),
            number_or_none(diagnosis.gradient_norm),
        );
        if !diagnosis.samples.is_empty() {
            let samples: Vec<String> = diagnosis.samples.iter().map(u64::to_string).collect();
            text += &format!("| samples | {} |\n", samples.join(", "));
        }
        if let Some(latest) = &self.latest {
            let StepReport { step, loss, lr, .. } = latest;
            let norm = number_or_none(latest.gradient_norm);
            text += &format!(
                "| last step reported | step {step}, loss {loss:.4}, learning rate {lr:.4e}, gradient \
                 norm {norm} |\n"
            );
        }
        text.push_str("\nTry these, most likely first:\n\n");
        for (number, advice) in (1..).zip(&self.advice) {
            text += &format!("{number}. {advice}\n");
        }
        text
    }
}

fn number_or_none(number: Option<f64>) -> String {
    match number.filter(|number| number.is_finite()) {
        Some(number) => format!("{number:.4e}"),
        None => "no finite number".to_owned(),
    }
}
