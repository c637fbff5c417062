//! What is known of a step before it is made, and what its sums say afterwards.

use baton_collectives::Collective;
use baton_data::InputType;
use baton_job::message::StepNews;
use baton_recipe::{
    JobSpec,
    guard::{BatchMark, Diagnosis, LossWatch},
    progress::Progress,
    schedule::learning_rate,
};

use crate::{
    Error, Job, Leaf, Learner, Update,
    controls::Votes,
    learner::VOTE,
    step::{NextStep, PendingStep},
};

/// What a step came to, and what all ranks want after it.
pub(crate) type StepMetrics = (StepNews, Votes);

/// The step that follows `progress`.
pub(crate) fn before(job: &Job, progress: &Progress) -> NextStep {
    let (spec, agenda) = (&job.spec, job.inputs.agenda());
    let mut after = progress.clone();
    agenda.advance(&mut after);
    let lr = learning_rate(spec, agenda, progress);
    NextStep {
        update: Update {
            step: progress.step,
            lr,
            micro_batches: spec.train.virtual_ranks * spec.train.grad_accumulation,
        },
        scale: 1.0 / agenda.next_batch(progress) as f32,
        batch: BatchMark { epoch: progress.epoch, cursor: progress.cursor },
        news: StepNews {
            step: after.step,
            epoch: after.epoch,
            total_steps: agenda.total_steps(),
            steps_per_epoch: agenda.steps_of(after.epoch),
            step_of_epoch: agenda.step_of_epoch(&after),
            lr,
            resolution: match job.inputs.input_type() {
                InputType::Image => agenda.resolution(progress.epoch),
                InputType::Array(_) => 0,
            },
            global_batch: agenda.global_batch(progress.epoch),
            ..StepNews::default()
        },
    }
}

/// Reads the sums of a step: what to report of it, and what all ranks want.
pub(crate) fn read<L: Learner>(
    pending: &mut PendingStep<L>,
    collective: &mut dyn Collective,
    watch: &mut LossWatch,
    spec: &JobSpec,
) -> Result<StepMetrics, Error> {
    let tail = pending.total.tail()?;
    let [loss, top1, count, .., norm, loss_scale] = tail.map(f64::from);
    let loss = loss / count.max(1.0);
    let finite = |value: f64| value.is_finite().then_some(value);
    let NextStep { update, batch, ref news, .. } = pending.step;
    let mut watched = *watch;
    if let Err(divergence) = watched.judge(loss, norm, spec) {
        return Err(Error::Diverged(Box::new(Diagnosis {
            divergence,
            step: update.step,
            batch,
            lr: update.lr,
            loss: finite(loss),
            gradient_norm: finite(norm),
            samples: pending.suspects.of_all(collective)?,
        })));
    }
    *watch = watched;
    let news = StepNews {
        loss,
        metrics: [("top1".to_owned(), top1 / count.max(1.0))].into(),
        gradient_norm: finite(norm),
        loss_scale: (loss_scale != 0.0).then_some(loss_scale),
        ..news.clone()
    };
    Ok((news, Votes::of_tail(&tail[VOTE])))
}
