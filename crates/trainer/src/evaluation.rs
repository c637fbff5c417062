//! Metrics on the validation set, exact over all ranks.
//!
//! Validation batches are numbered; of W ranks, rank r evaluates the batches r, r + W, … The results are gathered and
//! added in the order of their numbers, so that the sums have the same bits for every number of ranks.

use std::{
    iter::Peekable,
    time::{Duration, Instant},
};

use baton_collectives::{Collective, MAX_GATHERED_BYTES};
use baton_data::Batch;
use baton_job::{
    exit::Class,
    message::{Activity, GeneratedText, MAX_SHOWN_TEXTS},
    shortened,
};
use baton_recipe::{
    JobSpec,
    fit::Fit,
    progress::{Accuracy, Extent},
    task::{self, Metric, Reduction},
};
use baton_text::score;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    Controls, Error, GenerationContext, Learner, Sums, Trainer,
    agree::gather,
    controls::Votes,
    inputs::BatchFeed,
    learner::{BatchEvaluation, EvaluatedWeights},
    saving::Saver,
    step::DATA_POLL_INTERVAL,
};

/// Longest time between two votes during an evaluation. On a CPU, a single layer may take longer. A rank that has
/// a request votes after the layer that it computes.
const VOTE_INTERVAL: Duration = Duration::from_millis(500);

/// Result of an evaluation.
pub(crate) struct Evaluated {
    pub(crate) raw: Accuracy,
    /// With the averaged weights, if the recipe has an EMA.
    pub(crate) ema: Option<Accuracy>,
    /// Some of the texts that a language model wrote with the better of both, shortened.
    pub(crate) texts: Vec<GeneratedText>,
}

/// Most characters of a text that are shown.
const MAX_SHOWN_CHARS: usize = 1_000;

/// A rank's message to the others during an evaluation.
#[derive(Serialize, Deserialize)]
struct Ballot {
    votes: Votes,
    /// This rank has evaluated all of its batches.
    done: bool,
    /// What this rank has done.
    amount: EvaluationAmount,
}

/// How much of an evaluation is done, or is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EvaluationAmount {
    pub(crate) samples: u64,
    /// Texts that a language model writes.
    pub(crate) texts: u64,
}

impl EvaluationAmount {
    fn plus(self, other: Self) -> Self {
        Self { samples: self.samples + other.samples, texts: self.texts + other.texts }
    }
}

/// Number of a batch, and its evaluation with each kind of weights.
type NumberedEvaluations = (u64, Vec<BatchEvaluation>);

/// A text that the model wrote, and the position of its weights among the evaluated kinds.
type TextOfWeights = (usize, GeneratedText);

/// The votes of all ranks during an evaluation. All ranks vote equally often, each whenever it can.
struct Voting<'a> {
    collective: &'a mut dyn Collective,
    controls: &'a Controls,
    last: Instant,
    /// All of the evaluation, and when it began.
    total: EvaluationAmount,
    began: Instant,
}

/// Why the ranks stop evaluating.
#[derive(Clone, Copy)]
enum Interruption {
    /// Every rank has evaluated all of its batches.
    Done,
    /// These votes need an action.
    Votes,
}

impl Voting<'_> {
    fn is_due(&self) -> bool {
        self.last.elapsed() >= VOTE_INTERVAL || self.controls.has_request()
    }

    /// Votes; returns the votes of all ranks if they interrupt the evaluation, which is the same on all ranks.
    fn vote(
        &mut self,
        saver: &mut Saver,
        amount: EvaluationAmount,
        done: bool,
        has_failed: bool,
    ) -> Result<Option<(Votes, Interruption)>, Error> {
        let votes = self.controls.vote(saver.is_busy());
        let votes = Votes { stop: votes.stop || has_failed, ..votes };
        let ballot = Ballot { votes, done, amount };
        let ballots = gather(self.collective, &ballot)?;
        self.last = Instant::now();
        let all =
            ballots.iter().fold(EvaluationAmount::default(), |all, ballot| all.plus(ballot.amount));
        self.controls.activity().evaluating(Some((all, self.total, self.began)));
        let all_done = ballots.iter().all(|ballot| ballot.done);
        let votes = ballots.into_iter().fold(Votes::default(), |all, one| all.or(one.votes));
        let must_act = votes.need_action(saver.is_active()).then_some(Interruption::Votes);
        let interruption = if all_done { Some(Interruption::Done) } else { must_act };
        Ok(interruption.map(|interruption| (votes, interruption)))
    }
}

/// This rank's part of an evaluation.
struct Share<N: Iterator<Item = u64>> {
    feed: BatchFeed,
    /// Numbers of the batches that are not evaluated yet.
    numbers: Peekable<N>,
    /// The next batch, once it is loaded.
    next: Option<Batch>,
    kinds: &'static [EvaluatedWeights],
    /// Number of validation batches; those after them are for texts.
    batches: u64,
    evaluated: Vec<NumberedEvaluations>,
    texts: Vec<TextOfWeights>,
    /// How much is in `evaluated` and `texts`.
    done: EvaluationAmount,
    /// What all ranks do together, and when they began.
    total: EvaluationAmount,
    began: Instant,
}

impl<L: Learner> Trainer<L> {
    /// Evaluates the model on the validation set; returns the result and the last votes of all ranks.
    ///
    /// The ranks vote while they evaluate, also in the middle of a batch. For a vote that needs an action, a batch is
    /// abandoned and evaluated again later. A checkpoint is written meanwhile; a stop or a pause cuts the evaluation
    /// short. It has no result then, and is made again as a whole. If a sample or the recipe is the reason why this rank
    /// cannot evaluate, that becomes its `failure`, and it votes for a stop: all ranks save.
    pub(crate) fn evaluate_set(
        &mut self,
        context: &mut GenerationContext<'_>,
        extent: Extent,
        failure: &mut Option<Error>,
    ) -> Result<(Option<Evaluated>, Votes), Error> {
        let spec = self.job.spec.clone();
        let kinds = match spec.ema {
            Some(_) => &[EvaluatedWeights::Raw, EvaluatedWeights::Averaged][..],
            None => &[EvaluatedWeights::Raw],
        };
        let (rank, world) = (context.collective.rank().0, context.collective.world_size());
        let samples = self.job.inputs.val_samples(extent);
        let [batches, text_batches] = spec.evaluation.batches(samples);
        let numbers = (u64::from(rank)..batches + text_batches).step_by(world as usize);
        let feed = self.job.inputs.val_feed(extent, numbers.clone());
        let mut share = Share {
            feed,
            numbers: numbers.peekable(),
            next: None,
            kinds,
            batches,
            evaluated: Vec::new(),
            texts: Vec::new(),
            done: EvaluationAmount::default(),
            total: EvaluationAmount { samples, texts: spec.evaluation.texts(samples) },
            began: Instant::now(),
        };
        let (is_complete, votes) = loop {
            let (votes, why) = self.evaluate_until_interrupted(context, &mut share, failure)?;
            match why {
                Interruption::Done => break (true, votes),
                Interruption::Votes if votes.stop || votes.pause => break (false, votes),
                Interruption::Votes => self.drive_checkpoint(votes, context)?,
            }
        };
        context.controls.activity().evaluating(None);
        self.loaders.end(share.feed.stats());
        share.feed.detach();
        if !is_complete {
            return Ok((None, votes));
        }
        let mut all = gather_in_parts(context.collective, share.evaluated, evaluations_bytes)?;
        all.sort_by_key(|(number, _)| *number);
        let mut texts = gather_in_parts(context.collective, share.texts, text_bytes)?;
        texts.sort_by_key(|(kind, text)| (*kind, text.sample));
        let mut texts_of = vec![Vec::new(); kinds.len()];
        texts.into_iter().for_each(|(kind, text)| texts_of[kind].push(text));
        let of_kind = |kind: usize| {
            let evaluations: Vec<&BatchEvaluation> =
                all.iter().filter_map(|(_, evaluations)| evaluations.get(kind)).collect();
            combine_evaluations(&evaluations, &texts_of[kind], &spec)
        };
        let (raw, ema) = (of_kind(0), (kinds.len() > 1).then(|| of_kind(1)));
        let is_averaged_better = ema.as_ref().is_some_and(|ema| ema.is_better_than(&raw));
        let texts = shown(&texts_of[usize::from(is_averaged_better)]);
        Ok((Some(Evaluated { raw, ema, texts }), votes))
    }

    /// Evaluates this rank's next batches until all ranks are done or must act, or this rank has a failure.
    fn evaluate_until_interrupted<N: Iterator<Item = u64>>(
        &mut self,
        context: &mut GenerationContext<'_>,
        share: &mut Share<N>,
        failure: &mut Option<Error>,
    ) -> Result<(Votes, Interruption), Error> {
        let Self { learner, saver, .. } = self;
        let (controls, activity) = (context.controls, context.controls.activity());
        let collective = &mut *context.collective;
        let (last, total, began) = (Instant::now(), share.total, share.began);
        let mut voting = Voting { collective, controls, last, total, began };
        loop {
            let number = share.numbers.peek().copied();
            if (number.is_none() || failure.is_some() || voting.is_due())
                && let Some(interruption) =
                    voting.vote(saver, share.done, number.is_none(), failure.is_some())?
            {
                return Ok(interruption);
            }
            let Some(number) = number else { continue };
            if share.next.is_none() {
                activity.enter(Activity::Loading);
                if !share.feed.wait_until_ready(DATA_POLL_INTERVAL) {
                    continue;
                }
                match share.feed.next() {
                    Err(error) if is_bad_input(&error) => {
                        *failure = Some(error);
                        continue;
                    }
                    next => share.next = next?,
                }
            }
            let batch = share.next.take();
            let batch = batch.ok_or(Error::Bug("the loader of the validation set ended"))?;
            activity.set(Activity::Evaluating);
            let (mut interruption, done) = (None, share.done);
            let mut is_interrupted = || {
                // A batch of texts may take minutes, and must not look like a rank that hangs.
                activity.set(Activity::Evaluating);
                if interruption.is_none() && voting.is_due() {
                    interruption = voting.vote(saver, done, false, false).transpose();
                }
                interruption.is_some()
            };
            match share.evaluate(learner, number, &batch, &mut is_interrupted) {
                Ok(true) => {
                    share.numbers.next();
                    share.feed.recycle(batch);
                }
                Ok(false) => share.next = Some(batch),
                // The other ranks may have been interrupted in the middle of this batch.
                Err(error) if is_bad_input(&error) => *failure = Some(error),
                Err(error) => return Err(error),
            }
            if let Some(interruption) = interruption {
                return interruption;
            }
        }
    }
}

/// Whether another attempt, on any rank, would fail in the same way.
fn is_bad_input(error: &Error) -> bool {
    error.failure().class == Class::BadInput
}

impl<N: Iterator<Item = u64>> Share<N> {
    /// Evaluates a batch, or writes its texts; returns false if that was interrupted.
    fn evaluate<L: Learner>(
        &mut self,
        learner: &mut L,
        number: u64,
        batch: &Batch,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<bool, Error> {
        if number < self.batches {
            let mut evaluate = |weights: &_| learner.evaluate(batch, *weights, is_interrupted);
            let evaluated: Option<Vec<_>> =
                self.kinds.iter().map(&mut evaluate).collect::<Result<_, _>>()?;
            let Some(evaluated) = evaluated else { return Ok(false) };
            self.done.samples += batch.len() as u64;
            self.evaluated.push((number, evaluated));
        } else {
            let mut write = |weights: &_| learner.write_texts(batch, *weights, is_interrupted);
            let written: Option<Vec<_>> =
                self.kinds.iter().map(&mut write).collect::<Result<_, _>>()?;
            let Some(written) = written else { return Ok(false) };
            self.done.texts += batch.len() as u64;
            let of_kind = |(kind, texts): (usize, Vec<GeneratedText>)| {
                texts.into_iter().map(move |text| (kind, text))
            };
            self.texts.extend(written.into_iter().enumerate().flat_map(of_kind));
        }
        Ok(true)
    }
}

/// Most bytes of evaluations as JSON: a number takes at most 24; sums and punctuation take less than 512.
fn evaluations_bytes((_, evaluations): &NumberedEvaluations) -> usize {
    evaluations.iter().map(|evaluation| 512 + 24 * 2 * evaluation.predictions.len()).sum()
}

/// Most bytes of a text as JSON: a character may be written as `\u001f`.
fn text_bytes((_, text): &TextOfWeights) -> usize {
    512 + 6 * (text.prompt.len() + text.reference.len() + text.text.len())
}

/// The texts that are shown to people.
fn shown(texts: &[GeneratedText]) -> Vec<GeneratedText> {
    let short = |text: &str| shortened(text, MAX_SHOWN_CHARS);
    let shown = texts.iter().take(MAX_SHOWN_TEXTS).map(|text| GeneratedText {
        sample: text.sample,
        prompt: short(&text.prompt),
        reference: short(&text.reference),
        text: short(&text.text),
    });
    shown.collect()
}

/// Gathers lists of any length, in messages that are small enough for the collective. `bytes` returns at least the size
/// of an item as JSON.
fn gather_in_parts<T: Serialize + DeserializeOwned>(
    collective: &mut dyn Collective,
    mine: Vec<T>,
    bytes: fn(&T) -> usize,
) -> Result<Vec<T>, Error> {
    let most = mine.iter().map(bytes).max().unwrap_or(1);
    let most = gather(collective, &most)?.into_iter().max().unwrap_or(1).max(1);
    let part = (MAX_GATHERED_BYTES / most).max(1);
    let rounds = gather(collective, &mine.len().div_ceil(part))?.into_iter().max().unwrap_or(0);
    let mut mine = mine.into_iter();
    let mut all = Vec::new();
    for _ in 0..rounds {
        let next: Vec<T> = mine.by_ref().take(part).collect();
        all.extend(gather(collective, &next)?.into_iter().flatten());
    }
    Ok(all)
}

/// The task's metrics over all `evaluations` and the texts that a language model wrote. A value that is not finite, as
/// after a few updates in fp16, becomes the worst finite number: JSON has no infinity, and such an evaluation must not be
/// the best one.
#[must_use]
pub fn combine_evaluations(
    evaluations: &[&BatchEvaluation],
    texts: &[GeneratedText],
    spec: &JobSpec,
) -> Accuracy {
    let mut sums = Sums::default();
    evaluations.iter().for_each(|evaluation| sums.add(&evaluation.sums));
    let share = |part: f64| part / (sums.count.max(1) as f64);
    let metrics = task::best_first(spec);
    let fit = metrics.iter().any(|metric| metric.reduction == Reduction::AllSamples).then(|| {
        let predictions: Vec<f32> =
            evaluations.iter().flat_map(|e| &e.predictions).copied().collect();
        let targets: Vec<f32> = evaluations.iter().flat_map(|e| &e.targets).copied().collect();
        Fit::of(&predictions, &targets, spec.model.num_classes as usize)
    });
    let correlation = |value: f64| if value.is_finite() { value } else { 0.0 };
    let means = task::means(spec);
    let mean = |name: &str| {
        let index = means.iter().position(|metric| metric.name == name);
        index.and_then(|index| sums.others.get(index)).map_or(0.0, |sum| share(*sum))
    };
    let value = |metric: &Metric| {
        let value = match (&*metric.name, &fit) {
            ("loss", _) => share(sums.loss),
            _ if metric.reduction == Reduction::ExponentialOfLoss => share(sums.loss).exp(),
            (task::BLEU, _) if metric.reduction == Reduction::Texts => {
                score::bleu(texts.iter().map(|text| (text.text.as_str(), text.reference.as_str())))
            }
            (task::VALID_SYNTAX, _) if metric.reduction == Reduction::Texts => {
                let valid = texts.iter().filter(|text| score::is_valid_python(&text.text)).count();
                valid as f64 / texts.len().max(1) as f64
            }
            ("mae", Some(fit)) => fit.mae,
            ("pearson", Some(fit)) => correlation(fit.pearson),
            ("spearman", Some(fit)) => correlation(fit.spearman),
            (name, _) => mean(name),
        };
        if value.is_finite() { value } else { metric.direction.worst() }
    };
    let metrics = metrics.iter().map(|metric| (metric.name.to_string(), value(metric)));
    Accuracy { samples: sums.count, metrics: metrics.collect() }
}

#[cfg(test)]
mod tests {
    use baton_recipe::spec::LossKind;

    use super::*;
    use crate::kit;

    #[test]
    fn an_evaluation_that_is_not_finite_is_worse_than_any_other() {
        let mut spec = kit::recipe(&[], &[]);
        spec.loss.kind = LossKind::Program;
        spec.loss.metrics = ["score".to_owned(), "mae".to_owned()].into();
        let metrics = |others: [f64; 2]| {
            let sums = Sums { loss: f64::INFINITY, others: others.into(), count: 2 };
            let evaluation = BatchEvaluation { sums, ..BatchEvaluation::default() };
            combine_evaluations(&[&evaluation], &[], &spec)
        };
        let expected = [("score", -1.0), ("mae", 0.5), ("loss", f64::MAX)];
        assert_eq!(metrics([-2.0, 1.0]), Accuracy::new(2, expected));
        let expected = [("score", f64::MIN), ("mae", f64::MAX), ("loss", f64::MAX)];
        assert_eq!(metrics([f64::NAN, f64::NAN]), Accuracy::new(2, expected));
    }
}
