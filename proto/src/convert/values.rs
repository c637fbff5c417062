//! Numbers, checkpoints and ends: what several messages carry.

use baton_job::{
    Generation,
    engine::Evaluation,
    exit::{Class, Failure, Outcome},
    message::{Activity, Commit, LoaderNews, Pulse, SaveTimes, StepNews},
};
use baton_recipe::{
    Epoch, Step,
    guard::LossWatch,
    progress::{Accuracy, Extent, Fit, Progress},
};

use super::{Malformed, known, required, same_variants};
use crate::v1;

same_variants!(
    Class,
    v1::failure::Class,
    "Failure",
    "class",
    [BadInput, Diverged, TakenOver, Device, OutOfMemory, Crash]
);
same_variants!(Extent, v1::Extent, "Evaluated", "extent", [Subset, Full]);

impl From<Accuracy> for v1::Accuracy {
    fn from(Accuracy { loss, top1, top5, samples, fit }: Accuracy) -> Self {
        let fit = fit.map(|Fit { mae, pearson, spearman }| v1::Fit { mae, pearson, spearman });
        Self { loss, top1, top5, samples, fit }
    }
}

impl From<v1::Accuracy> for Accuracy {
    fn from(v1::Accuracy { loss, top1, top5, samples, fit }: v1::Accuracy) -> Self {
        let fit = fit.map(|v1::Fit { mae, pearson, spearman }| Fit { mae, pearson, spearman });
        Self { loss, top1, top5, samples, fit }
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

impl TryFrom<v1::EvaluatedStep> for (Step, Accuracy) {
    type Error = Malformed;

    fn try_from(wire: v1::EvaluatedStep) -> Result<Self, Malformed> {
        let accuracy = required("EvaluatedStep", "accuracy", wire.accuracy)?;
        Ok((Step(wire.step), accuracy.into()))
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

impl TryFrom<v1::Checkpoint> for Commit {
    type Error = Malformed;

    fn try_from(wire: v1::Checkpoint) -> Result<Self, Malformed> {
        let v1::Checkpoint { name, generation, step, accuracy, bytes, took } = wire;
        if name.is_empty() {
            return Err(Malformed::new("Checkpoint", "name", "is missing"));
        }
        let accuracy = accuracy.map(Into::into);
        let took = took
            .map(|v1::SaveTimes { stall_seconds, seconds }| SaveTimes { stall_seconds, seconds });
        let (generation, step) = (Generation(generation), Step(step));
        Ok(Self { name, generation, step, accuracy, bytes, took })
    }
}

impl From<StepNews> for v1::Step {
    fn from(news: StepNews) -> Self {
        let StepNews { step, epoch, total_steps, steps_per_epoch, loss, top1, lr, .. } = news;
        Self {
            step: step.0,
            epoch: epoch.0,
            total_steps,
            steps_per_epoch,
            loss,
            top1,
            lr,
            samples_per_second: news.samples_per_second,
            loader_wait: news.loader_wait,
            gradient_norm: news.gradient_norm,
            loss_scale: news.loss_scale,
            resolution: news.resolution,
            global_batch: news.global_batch,
            step_of_epoch: news.step_of_epoch,
        }
    }
}

impl From<v1::Step> for StepNews {
    fn from(wire: v1::Step) -> Self {
        let v1::Step { step, epoch, total_steps, steps_per_epoch, loss, top1, lr, .. } = wire;
        Self {
            step: Step(step),
            epoch: Epoch(epoch),
            total_steps,
            steps_per_epoch,
            loss,
            top1,
            lr,
            samples_per_second: wire.samples_per_second,
            loader_wait: wire.loader_wait,
            gradient_norm: wire.gradient_norm,
            loss_scale: wire.loss_scale,
            resolution: wire.resolution,
            global_batch: wire.global_batch,
            step_of_epoch: wire.step_of_epoch,
        }
    }
}

same_variants!(
    Activity,
    v1::Activity,
    "Pulse",
    "activity",
    [Restoring, Loading, Computing, Exchanging, Evaluating, Saving, Paused]
);

impl From<Pulse> for v1::Pulse {
    fn from(Pulse { activity, seconds, step, own_step_seconds }: Pulse) -> Self {
        let activity = v1::Activity::from(activity).into();
        Self { activity, seconds, step: step.0, own_step_seconds }
    }
}

impl TryFrom<v1::Pulse> for Pulse {
    type Error = Malformed;

    fn try_from(wire: v1::Pulse) -> Result<Self, Malformed> {
        let v1::Pulse { activity, seconds, step, own_step_seconds } = wire;
        let activity = known::<v1::Activity>("Pulse", "activity", activity)?.try_into()?;
        Ok(Self { activity, seconds, step: Step(step), own_step_seconds })
    }
}

impl From<LoaderNews> for v1::Loader {
    fn from(LoaderNews { wait, ready, room, skipped, last_skipped }: LoaderNews) -> Self {
        Self { wait, ready, room, skipped, last_skipped }
    }
}

impl From<v1::Loader> for LoaderNews {
    fn from(v1::Loader { wait, ready, room, skipped, last_skipped }: v1::Loader) -> Self {
        Self { wait, ready, room, skipped, last_skipped }
    }
}

impl From<Progress> for v1::Progress {
    fn from(progress: Progress) -> Self {
        Self {
            step: progress.step.0,
            epoch: progress.epoch.0,
            cursor: progress.cursor,
            evaluated_epoch: progress.evaluated.map(|epoch| epoch.0),
            evaluated_step: progress.evaluated_at.map(|step| step.0),
            saved_step: progress.saved.map(|step| step.0),
            last_evaluation: progress.last_evaluation.map(Into::into),
            best: progress.best.map(Into::into),
            evaluated_fully_epoch: progress.evaluated_fully.map(|epoch| epoch.0),
            last_ema: progress.last_ema.map(Into::into),
            evaluations_since_best: progress.evaluations_since_best,
            watch: Some(progress.watch.into()),
            lr_cuts: progress.lr_cuts,
            skips: progress.skips.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<v1::Progress> for Progress {
    type Error = Malformed;

    fn try_from(wire: v1::Progress) -> Result<Self, Malformed> {
        Ok(Self {
            step: Step(wire.step),
            epoch: Epoch(wire.epoch),
            cursor: wire.cursor,
            evaluated: wire.evaluated_epoch.map(Epoch),
            evaluated_at: wire.evaluated_step.map(Step),
            saved: wire.saved_step.map(Step),
            last_evaluation: wire.last_evaluation.map(Into::into),
            best: wire.best.map(TryInto::try_into).transpose()?,
            evaluated_fully: wire.evaluated_fully_epoch.map(Epoch),
            last_ema: wire.last_ema.map(Into::into),
            evaluations_since_best: wire.evaluations_since_best,
            watch: required("Progress", "watch", wire.watch)?.into(),
            lr_cuts: wire.lr_cuts,
            skips: wire.skips.into_iter().map(Into::into).collect(),
        })
    }
}

impl From<LossWatch> for v1::LossWatch {
    fn from(LossWatch { updates, mean, first, lowest, overflows }: LossWatch) -> Self {
        Self { updates, mean, first, lowest, overflows }
    }
}

impl From<v1::LossWatch> for LossWatch {
    fn from(v1::LossWatch { updates, mean, first, lowest, overflows }: v1::LossWatch) -> Self {
        Self { updates, mean, first, lowest, overflows }
    }
}

impl From<Failure> for v1::Failure {
    fn from(Failure { class, message }: Failure) -> Self {
        Self { class: v1::failure::Class::from(class).into(), message }
    }
}

impl TryFrom<v1::Failure> for Failure {
    type Error = Malformed;

    fn try_from(v1::Failure { class, message }: v1::Failure) -> Result<Self, Malformed> {
        let class = known::<v1::failure::Class>("Failure", "class", class)?.try_into()?;
        Ok(Self { class, message })
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

impl TryFrom<v1::Outcome> for Outcome {
    type Error = Malformed;

    fn try_from(v1::Outcome { kind, reason, failure }: v1::Outcome) -> Result<Self, Malformed> {
        use v1::outcome::Kind;
        match known("Outcome", "kind", kind)? {
            Kind::Unspecified => Err(Malformed::new("Outcome", "kind", "is missing")),
            Kind::Completed => Ok(Self::Completed),
            Kind::Drained => Ok(Self::Drained { reason }),
            Kind::LimitReached => Ok(Self::LimitReached { reason }),
            Kind::Stopped => Ok(Self::Stopped),
            Kind::Failed => {
                let failure = required("Outcome", "failure", failure)?.try_into()?;
                Ok(Self::Failed { failure })
            }
        }
    }
}
