//! Metrics of a step: those that are known before it is made, and those in its sums afterwards.

use baton_collectives::Collective;
use baton_data::InputType;
use baton_job::message::StepReport;
use baton_recipe::{
    JobSpec,
    guard::{BatchMark, Diagnosis, LossWatch},
    progress::Progress,
    schedule::learning_rate,
    task,
};

use crate::{
    Error, Leaf, Learner, TrainingJob, Update,
    controls::Votes,
    learner::VOTE,
    step::{NextStep, PendingStep},
};

/// Metrics of a step, and the votes of all ranks after it.
pub(crate) type StepMetrics = (StepReport, Votes);

/// Describes the step that follows `progress`.
pub(crate) fn before(job: &TrainingJob, progress: &Progress) -> NextStep {
    let (spec, plan) = (&job.spec, job.inputs.plan());
    let mut after = progress.clone();
    plan.advance(&mut after);
    let lr = learning_rate(spec, plan, progress);
    NextStep {
        update: Update {
            step: progress.step,
            lr,
            micro_batches: spec.train.virtual_ranks * spec.train.grad_accumulation,
        },
        scale: 1.0 / job.inputs.next_weight(progress) as f32,
        batch: BatchMark { epoch: progress.epoch, cursor: progress.cursor },
        report: StepReport {
            step: after.step,
            epoch: after.epoch,
            total_steps: plan.total_steps(),
            steps_per_epoch: plan.steps_of(after.epoch),
            step_of_epoch: plan.step_of_epoch(&after),
            lr,
            resolution: match job.inputs.input_type() {
                InputType::Image => plan.resolution(progress.epoch),
                InputType::Array(_) | InputType::Tokens => 0,
            },
            global_batch: plan.global_batch(progress.epoch),
            ..StepReport::default()
        },
    }
}

/// Reads the metrics and the votes from the sums of a step. Fails if they show a divergence.
pub(crate) fn read<L: Learner>(
    pending: &mut PendingStep<L>,
    collective: &mut dyn Collective,
    watch: &mut LossWatch,
    spec: &JobSpec,
) -> Result<StepMetrics, Error> {
    let tail = pending.total.tail()?;
    let [loss, first_metric, count, .., norm, loss_scale] = tail.map(f64::from);
    let loss = loss / count.max(1.0);
    let finite = |value: f64| value.is_finite().then_some(value);
    let NextStep { update, batch, ref report, .. } = pending.step;
    let mut watched = *watch;
    if let Err(divergence) = watched.observe(loss, norm, spec) {
        return Err(Error::Diverged(Box::new(Diagnosis {
            divergence,
            step: update.step,
            batch,
            lr: update.lr,
            loss: finite(loss),
            gradient_norm: finite(norm),
            samples: pending.suspects.gather_samples(collective)?,
            evaluated: None,
        })));
    }
    *watch = watched;
    let report = StepReport {
        loss,
        metrics: task::means(spec)
            .into_iter()
            .take(1)
            .filter_map(|metric| {
                Some((metric.name.into_owned(), finite(first_metric / count.max(1.0))?))
            })
            .collect(),
        gradient_norm: finite(norm),
        loss_scale: (loss_scale != 0.0).then_some(loss_scale),
        ..report.clone()
    };
    Ok((report, Votes::from_tail(&tail[VOTE])))
}
