//! Converts values that several messages contain: metrics, checkpoints, outcomes.

use baton_job::{
    engine::EvaluationResult,
    exit::{Class, Failure, Outcome},
    message::{
        Activity, Commit, EvaluationProgress, GeneratedText, GpuStats, HostStats, LoaderReport,
        RankHeartbeat, SaveTimes, StepReport,
    },
};
use baton_recipe::{
    Step,
    progress::{Accuracy, Extent, Fit},
    task,
};

use super::same_variants;
use crate::v1;

same_variants!(
    Class,
    v1::failure::Class,
    [BadInput, Diverged, TakenOver, Device, OutOfMemory, Crash]
);
same_variants!(Extent, v1::Extent, [Subset, Full]);

impl From<(String, f64)> for v1::Metric {
    fn from((name, value): (String, f64)) -> Self {
        use v1::metric::Direction;
        let task::Metric { direction, is_fraction, .. } = task::find(&name);
        let direction = match direction {
            task::MetricDirection::Higher => Direction::Higher,
            task::MetricDirection::Lower => Direction::Lower,
        };
        Self { name, value: task::shown(value), direction: direction.into(), is_fraction }
    }
}

/// `loss`, `top1` and `top5` are from versions in which metrics had no names; they are zero if the task has no such
/// metric.
impl From<Accuracy> for v1::Accuracy {
    fn from(accuracy: Accuracy) -> Self {
        let value = |name| task::shown(accuracy.get(name).unwrap_or_default());
        let fit = accuracy.fit();
        let fit = fit.map(|Fit { mae, pearson, spearman }| v1::Fit { mae, pearson, spearman });
        Self {
            loss: value("loss"),
            top1: value("top1"),
            top5: value("top5"),
            samples: accuracy.samples,
            fit,
            metrics: accuracy.metrics.into_iter().map(Into::into).collect(),
        }
    }
}

impl v1::Accuracy {
    /// All metrics, also those from an older coordinator that sends them without names.
    #[must_use]
    pub fn named(&self) -> Vec<v1::Metric> {
        if !self.metrics.is_empty() {
            return self.metrics.clone();
        }
        let fit = self.fit.map(|v1::Fit { mae, pearson, spearman }| Fit { mae, pearson, spearman });
        let top_accuracies = (self.top1, self.top5);
        Self::from(Accuracy::from_legacy_fields(self.samples, self.loss, top_accuracies, fit))
            .metrics
    }

    /// The metric by which evaluations are compared.
    #[must_use]
    pub fn score(&self) -> Option<v1::Metric> {
        self.named().into_iter().next()
    }
}

impl v1::Step {
    /// All metrics except the loss, also those from an older coordinator that sends them without names.
    #[must_use]
    pub fn named(&self) -> Vec<v1::Metric> {
        if self.metrics.is_empty() && self.top1 != 0.0 {
            return vec![("top1".to_owned(), self.top1).into()];
        }
        self.metrics.clone()
    }
}

impl From<(Step, Accuracy)> for v1::EvaluatedStep {
    fn from((step, accuracy): (Step, Accuracy)) -> Self {
        let extent = v1::Extent::Unspecified.into();
        let accuracy = Some(accuracy.into());
        Self { step: step.0, accuracy, ema: None, extent, texts: Vec::new() }
    }
}

impl From<EvaluationResult> for v1::EvaluatedStep {
    fn from(EvaluationResult { step, accuracy, ema, extent, texts }: EvaluationResult) -> Self {
        Self {
            step: step.0,
            accuracy: Some(accuracy.into()),
            ema: ema.map(Into::into),
            extent: v1::Extent::from(extent).into(),
            texts: texts.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<GeneratedText> for v1::GeneratedText {
    fn from(GeneratedText { sample, prompt, reference, text }: GeneratedText) -> Self {
        Self { sample, prompt, reference, text }
    }
}

impl From<Commit> for v1::Checkpoint {
    fn from(Commit { name, generation, step, accuracy, bytes, took, .. }: Commit) -> Self {
        let accuracy = accuracy.map(Into::into);
        let took = took
            .map(|SaveTimes { stall_seconds, seconds }| v1::SaveTimes { stall_seconds, seconds });
        Self { name, generation: generation.0, step: step.0, accuracy, bytes, took }
    }
}

impl From<StepReport> for v1::Step {
    fn from(report: StepReport) -> Self {
        let StepReport { step, epoch, total_steps, steps_per_epoch, loss, metrics, lr, .. } =
            report;
        Self {
            step: step.0,
            epoch: epoch.0,
            total_steps,
            steps_per_epoch,
            loss,
            top1: metrics.get("top1").copied().unwrap_or_default(),
            lr,
            samples_per_second: report.samples_per_second,
            loader_wait: report.loader_wait,
            gradient_norm: report.gradient_norm,
            loss_scale: report.loss_scale,
            resolution: report.resolution,
            global_batch: report.global_batch,
            step_of_epoch: report.step_of_epoch,
            metrics: metrics.into_iter().map(Into::into).collect(),
        }
    }
}

same_variants!(
    Activity,
    v1::Activity,
    [Restoring, Loading, Computing, Exchanging, Evaluating, Saving, Paused]
);

impl From<EvaluationProgress> for v1::EvaluationProgress {
    fn from(progress: EvaluationProgress) -> Self {
        Self {
            samples: progress.samples,
            total: progress.total,
            texts: progress.texts,
            total_texts: progress.total_texts,
            seconds: progress.seconds,
            samples_per_second: progress.samples_per_second(),
            seconds_left: progress.seconds_left(),
        }
    }
}

impl From<RankHeartbeat> for v1::RankHeartbeat {
    fn from(heartbeat: RankHeartbeat) -> Self {
        let RankHeartbeat { activity, seconds, step, own_step_seconds, .. } = heartbeat;
        let activity = v1::Activity::from(activity).into();
        Self { activity, seconds, step: step.0, own_step_seconds }
    }
}

impl From<LoaderReport> for v1::Loader {
    fn from(LoaderReport { wait, ready, capacity, skipped, last_skipped }: LoaderReport) -> Self {
        Self { wait, ready, capacity, skipped, last_skipped }
    }
}

impl From<Failure> for v1::Failure {
    fn from(Failure { class, message }: Failure) -> Self {
        Self { class: v1::failure::Class::from(class).into(), message }
    }
}

impl From<Outcome> for v1::Outcome {
    fn from(outcome: Outcome) -> Self {
        use v1::outcome::Kind;
        let (kind, reason, failure) = match outcome {
            Outcome::Completed => (Kind::Completed, String::new(), None),
            Outcome::Drained { reason } => (Kind::Drained, reason, None),
            Outcome::LimitReached { reason } => (Kind::LimitReached, reason, None),
            Outcome::Stopped => (Kind::Stopped, String::new(), None),
            Outcome::Failed { failure } => (Kind::Failed, String::new(), Some(failure.into())),
        };
        Self { kind: kind.into(), reason, failure }
    }
}

impl v1::Outcome {
    /// How the job ended; `None` if this is an outcome of a newer version.
    #[must_use]
    pub fn known(&self) -> Option<Outcome> {
        use v1::outcome::Kind;
        let reason = self.reason.clone();
        Some(match self.kind() {
            Kind::Unspecified => return None,
            Kind::Completed => Outcome::Completed,
            Kind::Drained => Outcome::Drained { reason },
            Kind::LimitReached => Outcome::LimitReached { reason },
            Kind::Stopped => Outcome::Stopped,
            Kind::Failed => Outcome::Failed { failure: self.failure.as_ref()?.known()? },
        })
    }
}

impl v1::Failure {
    fn known(&self) -> Option<Failure> {
        use v1::failure::Class as Wire;
        let class = match self.class() {
            Wire::Unspecified => return None,
            Wire::BadInput => Class::BadInput,
            Wire::Diverged => Class::Diverged,
            Wire::TakenOver => Class::TakenOver,
            Wire::Device => Class::Device,
            Wire::OutOfMemory => Class::OutOfMemory,
            Wire::Crash => Class::Crash,
        };
        Some(Failure { class, message: self.message.clone() })
    }
}

/// Converts a struct to the message with the same fields.
macro_rules! same_fields {
    ($job:ident, $wire:ident { $($field:ident),+ $(,)? }) => {
        impl From<$job> for v1::$wire {
            fn from($job { $($field),+ }: $job) -> Self {
                Self { $($field),+ }
            }
        }
    };
}

same_fields!(
    HostStats,
    Host {
        name,
        cpu,
        cpus,
        memory_used,
        memory_total,
        disk_free,
        disk_total,
        received_per_second,
        sent_per_second,
    }
);

same_fields!(
    GpuStats,
    Gpu { index, name, uuid, utilisation, memory_used, memory_total, celsius, watts }
);
