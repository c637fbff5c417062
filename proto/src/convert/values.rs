//! Numbers, checkpoints and ends: what several messages carry.

use baton_job::{
    engine::Evaluation,
    exit::{Class, Failure, Outcome},
    message::{Activity, Commit, Gpu, Host, LoaderNews, Pulse, SaveTimes, StepNews},
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
        let known = task::find(&name);
        let direction = known.map_or(Direction::Unspecified, |metric| match metric.direction {
            task::Direction::Higher => Direction::Higher,
            task::Direction::Lower => Direction::Lower,
        });
        let is_share = known.is_some_and(|metric| metric.is_share);
        Self { name, value, direction: direction.into(), is_share }
    }
}

/// The fields of before metrics had names are zero where the task has no such metric.
impl From<Accuracy> for v1::Accuracy {
    fn from(accuracy: Accuracy) -> Self {
        let value = |name| accuracy.get(name).unwrap_or_default();
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
    /// All metrics, also if a coordinator told them that had no names for them.
    #[must_use]
    pub fn named(&self) -> Vec<v1::Metric> {
        if !self.metrics.is_empty() {
            return self.metrics.clone();
        }
        let fit = self.fit.map(|v1::Fit { mae, pearson, spearman }| Fit { mae, pearson, spearman });
        let right = (self.top1, self.top5);
        Self::from(Accuracy::before_names(self.samples, self.loss, right, fit)).metrics
    }

    /// What evaluations are compared by.
    #[must_use]
    pub fn score(&self) -> Option<v1::Metric> {
        self.named().into_iter().next()
    }
}

impl v1::Step {
    /// All metrics but the loss, also if a coordinator told them that had no names for them.
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
        Self { step: step.0, accuracy: Some(accuracy.into()), ema: None, extent }
    }
}

impl From<Evaluation> for v1::EvaluatedStep {
    fn from(Evaluation { step, accuracy, ema, extent }: Evaluation) -> Self {
        Self {
            step: step.0,
            accuracy: Some(accuracy.into()),
            ema: ema.map(Into::into),
            extent: v1::Extent::from(extent).into(),
        }
    }
}

impl From<Commit> for v1::Checkpoint {
    fn from(Commit { name, generation, step, accuracy, bytes, took }: Commit) -> Self {
        let accuracy = accuracy.map(Into::into);
        let took = took
            .map(|SaveTimes { stall_seconds, seconds }| v1::SaveTimes { stall_seconds, seconds });
        Self { name, generation: generation.0, step: step.0, accuracy, bytes, took }
    }
}

impl From<StepNews> for v1::Step {
    fn from(news: StepNews) -> Self {
        let StepNews { step, epoch, total_steps, steps_per_epoch, loss, metrics, lr, .. } = news;
        Self {
            step: step.0,
            epoch: epoch.0,
            total_steps,
            steps_per_epoch,
            loss,
            top1: metrics.get("top1").copied().unwrap_or_default(),
            lr,
            samples_per_second: news.samples_per_second,
            loader_wait: news.loader_wait,
            gradient_norm: news.gradient_norm,
            loss_scale: news.loss_scale,
            resolution: news.resolution,
            global_batch: news.global_batch,
            step_of_epoch: news.step_of_epoch,
            metrics: metrics.into_iter().map(Into::into).collect(),
        }
    }
}

same_variants!(
    Activity,
    v1::Activity,
    [Restoring, Loading, Computing, Exchanging, Evaluating, Saving, Paused]
);

impl From<Pulse> for v1::Pulse {
    fn from(Pulse { activity, seconds, step, own_step_seconds }: Pulse) -> Self {
        let activity = v1::Activity::from(activity).into();
        Self { activity, seconds, step: step.0, own_step_seconds }
    }
}

impl From<LoaderNews> for v1::Loader {
    fn from(LoaderNews { wait, ready, room, skipped, last_skipped }: LoaderNews) -> Self {
        Self { wait, ready, room, skipped, last_skipped }
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
    /// How the job ended, unless only newer programs know such an end.
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

/// Structs that have the same fields on both sides.
macro_rules! same_fields {
    ($name:ident { $($field:ident),+ $(,)? }) => {
        impl From<$name> for v1::$name {
            fn from($name { $($field),+ }: $name) -> Self {
                Self { $($field),+ }
            }
        }
    };
}

same_fields!(Host {
    name,
    cpu,
    cpus,
    memory_used,
    memory_total,
    disk_free,
    disk_total,
    received_per_second,
    sent_per_second,
});

same_fields!(Gpu { index, name, uuid, utilisation, memory_used, memory_total, celsius, watts });
