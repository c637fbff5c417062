//! Metrics on the validation set, exact over all ranks.
//!
//! Validation batches are numbered; of W ranks, rank r evaluates the batches r, r + W, … The results are gathered and
//! added in the order of their numbers, so that the sums have the same bits for every number of ranks.

use std::{
    iter::Peekable,
    time::{Duration, Instant},
};

use baton_collectives::{Collective, MAX_GATHERED_BYTES};
use baton_job::message::Activity;
use baton_recipe::{
    JobSpec,
    fit::Fit,
    progress::{Accuracy, Extent},
    task::{self, Reduction},
};
use serde::{Deserialize, Serialize};

use crate::{
    Error, GenerationContext, Learner, Sums, Trainer,
    agree::gather,
    controls::Votes,
    inputs::BatchFeed,
    learner::{BatchEvaluation, EvaluatedWeights},
    step::DATA_POLL_INTERVAL,
};

/// Longest time between two votes during an evaluation, unless a single batch takes longer. A rank that has a request
/// votes after its current batch.
const VOTE_INTERVAL: Duration = Duration::from_millis(500);

/// Result of an evaluation.
pub(crate) struct Evaluated {
    pub(crate) raw: Accuracy,
    /// With the averaged weights, if the recipe has an EMA.
    pub(crate) ema: Option<Accuracy>,
}

/// A rank's message to the others during an evaluation.
#[derive(Serialize, Deserialize)]
struct Ballot {
    votes: Votes,
    /// This rank has evaluated all of its batches.
    done: bool,
}

/// Number of a batch, and its evaluation with each kind of weights.
type NumberedEvaluations = (u64, Vec<BatchEvaluation>);

impl<L: Learner> Trainer<L> {
    /// Evaluates the model on the validation set; returns the result and the last votes of all ranks.
    ///
    /// The ranks vote while they evaluate. A checkpoint is written meanwhile; a stop or a pause cuts the evaluation
    /// short. It has no result then, and is made again as a whole.
    pub(crate) fn evaluate_set(
        &mut self,
        context: &mut GenerationContext<'_>,
        extent: Extent,
    ) -> Result<(Option<Evaluated>, Votes), Error> {
        let spec = self.job.spec.clone();
        let kinds = match spec.ema {
            Some(_) => &[EvaluatedWeights::Raw, EvaluatedWeights::Averaged][..],
            None => &[EvaluatedWeights::Raw],
        };
        let (rank, world) = (context.collective.rank().0, context.collective.world_size());
        let numbers =
            (u64::from(rank)..self.job.inputs.val_batches(extent)).step_by(world as usize);
        let mut feed = self.job.inputs.val_feed(extent, numbers.clone());
        let mut numbers = numbers.peekable();
        let mut mine: Vec<NumberedEvaluations> = Vec::new();
        let (is_complete, votes) = loop {
            let done =
                self.evaluate_until_vote(context, &mut feed, &mut numbers, kinds, &mut mine)?;
            let ballot = Ballot { votes: context.controls.vote(self.saver.is_busy()), done };
            let ballots = gather(context.collective, &ballot)?;
            let all_done = ballots.iter().all(|ballot| ballot.done);
            let votes = ballots.into_iter().fold(Votes::default(), |all, one| all.or(one.votes));
            if all_done || votes.stop || votes.pause {
                break (all_done, votes);
            }
            self.drive_checkpoint(votes, context)?;
        };
        self.loaders.end(feed.stats());
        feed.detach();
        if !is_complete {
            return Ok((None, votes));
        }
        let mut all = gather_in_parts(context.collective, mine)?;
        all.sort_by_key(|(number, _)| *number);
        let of_kind = |kind: usize| {
            let evaluations: Vec<&BatchEvaluation> =
                all.iter().filter_map(|(_, evaluations)| evaluations.get(kind)).collect();
            combine_evaluations(&evaluations, &spec)
        };
        let ema = (kinds.len() > 1).then(|| of_kind(1));
        Ok((Some(Evaluated { raw: of_kind(0), ema }), votes))
    }

    /// Evaluates this rank's next batches until it should vote; returns whether none is left.
    fn evaluate_until_vote(
        &mut self,
        context: &GenerationContext<'_>,
        feed: &mut BatchFeed,
        numbers: &mut Peekable<impl Iterator<Item = u64>>,
        kinds: &[EvaluatedWeights],
        mine: &mut Vec<NumberedEvaluations>,
    ) -> Result<bool, Error> {
        let (began, activity) = (Instant::now(), context.controls.activity());
        while began.elapsed() < VOTE_INTERVAL && !context.controls.has_request() {
            let Some(number) = numbers.peek().copied() else { return Ok(true) };
            activity.enter(Activity::Loading);
            if !feed.wait_until_ready(DATA_POLL_INTERVAL) {
                continue;
            }
            numbers.next();
            let batch = feed.next()?.ok_or(Error::Bug("the loader of the validation set ended"))?;
            activity.set(Activity::Evaluating);
            let evaluations = kinds.iter().map(|weights| self.learner.evaluate(&batch, *weights));
            mine.push((number, evaluations.collect::<Result<_, _>>()?));
            feed.recycle(batch);
        }
        Ok(false)
    }
}

/// Gathers lists of any length, in messages that are small enough for the collective.
fn gather_in_parts(
    collective: &mut dyn Collective,
    mine: Vec<NumberedEvaluations>,
) -> Result<Vec<NumberedEvaluations>, Error> {
    // As JSON a number takes at most 24 bytes; sums and punctuation take less than 512.
    let bytes = |(_, evaluations): &NumberedEvaluations| -> usize {
        evaluations.iter().map(|evaluation| 512 + 24 * 2 * evaluation.predictions.len()).sum()
    };
    let most = mine.iter().map(bytes).max().unwrap_or(1);
    let most = gather(collective, &most)?.into_iter().max().unwrap_or(1).max(1);
    let part = (MAX_GATHERED_BYTES / most).max(1);
    let rounds = gather(collective, &mine.len().div_ceil(part))?.into_iter().max().unwrap_or(0);
    let mut mine = mine.into_iter();
    let mut all = Vec::new();
    for _ in 0..rounds {
        let next: Vec<NumberedEvaluations> = mine.by_ref().take(part).collect();
        all.extend(gather(collective, &next)?.into_iter().flatten());
    }
    Ok(all)
}

/// The task's metrics over all `evaluations`. A value that is not finite, as after a few updates in fp16, becomes the
/// largest finite number: JSON has no infinity.
#[must_use]
pub fn combine_evaluations(evaluations: &[&BatchEvaluation], spec: &JobSpec) -> Accuracy {
    let mut sums = Sums::default();
    evaluations.iter().for_each(|evaluation| sums.add(&evaluation.sums));
    let share = |part: f64| part / (sums.count.max(1) as f64);
    let metrics = task::metrics(spec);
    let means = metrics.iter().filter(|m| m.reduction == Reduction::Mean && m.name != "loss");
    let means: Vec<_> = means.zip(&sums.others).collect();
    let mean = |name| {
        means.iter().find(|(metric, _)| metric.name == name).map_or(0.0, |(_, sum)| share(**sum))
    };
    let fit = metrics.iter().any(|m| m.reduction == Reduction::AllSamples).then(|| {
        let predictions: Vec<f32> =
            evaluations.iter().flat_map(|e| &e.predictions).copied().collect();
        let targets: Vec<f32> = evaluations.iter().flat_map(|e| &e.targets).copied().collect();
        let Fit { mae, pearson, spearman } =
            Fit::of(&predictions, &targets, spec.model.num_classes as usize);
        let correlation = |value: f64| if value.is_finite() { value } else { 0.0 };
        Fit { mae: finite(mae), pearson: correlation(pearson), spearman: correlation(spearman) }
    });
    let right = (mean("top1"), mean("top5"));
    let mut accuracy =
        Accuracy::from_legacy_fields(sums.count, finite(share(sums.loss)), right, fit);
    let order = task::best_first(spec);
    accuracy.metrics.sort_by_key(|(name, _)| order.iter().position(|metric| metric.name == name));
    accuracy
}

fn finite(value: f64) -> f64 {
    if value.is_finite() { value } else { f64::MAX }
}
