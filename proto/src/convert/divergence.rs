//! Converts diagnoses and rollbacks of diverged training.

use baton_job::{Generation, message::Rollback};
use baton_recipe::{
    Epoch, Step,
    guard::{BatchMark, Diagnosis, Divergence},
};

use crate::v1::{self, diagnosis::Divergence as WireDivergence};

impl From<BatchMark> for v1::BatchMark {
    fn from(BatchMark { epoch, cursor }: BatchMark) -> Self {
        Self { epoch: epoch.0, cursor }
    }
}

impl From<v1::BatchMark> for BatchMark {
    fn from(v1::BatchMark { epoch, cursor }: v1::BatchMark) -> Self {
        Self { epoch: Epoch(epoch), cursor }
    }
}

impl From<Rollback> for v1::Rollback {
    fn from(Rollback { generation, before, suspect_from, skip }: Rollback) -> Self {
        let (skip, suspect_from) = (skip.map(Into::into), suspect_from.map(|step| step.0));
        Self { generation: generation.0, before: before.0, skip, suspect_from }
    }
}

impl From<v1::Rollback> for Rollback {
    fn from(v1::Rollback { generation, before, skip, suspect_from }: v1::Rollback) -> Self {
        let (skip, suspect_from) = (skip.map(Into::into), suspect_from.map(Step));
        Self { generation: Generation(generation), before: Step(before), suspect_from, skip }
    }
}

impl From<&Rollback> for v1::InvalidatedCheckpoints {
    fn from(Rollback { generation, before, suspect_from, .. }: &Rollback) -> Self {
        let suspect_from_step = suspect_from.map(|step| step.0);
        Self { before_generation: generation.0, from_step: before.0, suspect_from_step }
    }
}

impl From<v1::InvalidatedCheckpoints> for Rollback {
    fn from(invalidated: v1::InvalidatedCheckpoints) -> Self {
        let v1::InvalidatedCheckpoints { before_generation, from_step, suspect_from_step } =
            invalidated;
        Self {
            generation: Generation(before_generation),
            before: Step(from_step),
            suspect_from: suspect_from_step.map(Step),
            skip: None,
        }
    }
}

impl From<Diagnosis> for v1::Diagnosis {
    fn from(diagnosis: Diagnosis) -> Self {
        Self {
            divergence: Some(diagnosis.divergence.into()),
            step: diagnosis.step.0,
            batch: Some(diagnosis.batch.into()),
            lr: diagnosis.lr,
            loss: diagnosis.loss,
            gradient_norm: diagnosis.gradient_norm,
            samples: diagnosis.samples,
        }
    }
}

impl From<Divergence> for WireDivergence {
    fn from(divergence: Divergence) -> Self {
        match divergence {
            Divergence::LossNotFinite => Self::LossNotFinite(v1::Empty {}),
            Divergence::GradientNotFinite => Self::GradientNotFinite(v1::Empty {}),
            Divergence::LossRose { mean, bound } => Self::LossRose(v1::LossRose { mean, bound }),
            Divergence::AccuracyCollapsed { score, best } => {
                Self::AccuracyCollapsed(v1::AccuracyCollapsed { score, best })
            }
        }
    }
}
