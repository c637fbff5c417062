//! Accuracy on the validation set, exact over all ranks.
//!
//! Validation batches are numbered; rank r takes r, r + W, … What was found is gathered and added in
//! the order of the numbers, so that the result has the same bits for every number of ranks.

use baton_collectives::{Collective, MAX_GATHERED_BYTES};
use baton_job::message::Activity;
use baton_recipe::{
    JobSpec,
    fit::Fit,
    progress::{Accuracy, Extent},
    task::{self, Reduction},
};

use crate::{
    Error, Learner, Sums,
    agree::gather,
    controls::Votes,
    inputs::Inputs,
    learner::{Judged, Weights},
    loader_watch::LoaderWatch,
    vitals::Vitals,
};

/// What an evaluation found, and what all ranks want next.
pub(crate) struct Evaluated {
    pub(crate) raw: Accuracy,
    /// With the averaged weights, if the recipe has them.
    pub(crate) ema: Option<Accuracy>,
    pub(crate) votes: Votes,
}

/// A batch's number, and what was found in it with each kind of weights.
type Numbered = (u64, Vec<Judged>);

/// Evaluates `learner`.
pub(crate) fn evaluate<L: Learner>(
    learner: &mut L,
    inputs: &Inputs,
    extent: Extent,
    collective: &mut dyn Collective,
    loaders: &mut LoaderWatch,
    vote: impl FnOnce() -> Votes,
    vitals: &Vitals,
) -> Result<Evaluated, Error> {
    let spec = inputs.spec();
    let kinds = match spec.ema {
        Some(_) => &[Weights::Raw, Weights::Averaged][..],
        None => &[Weights::Raw],
    };
    let (rank, world) = (u64::from(collective.rank().0), u64::from(collective.world_size()));
    let numbers = (rank..inputs.val_batches(extent)).step_by(world as usize);
    let mut feed = inputs.val_feed(extent, numbers.clone());
    let mut mine: Vec<Numbered> = Vec::new();
    for number in numbers {
        vitals.at(Activity::Loading);
        let Some(batch) = feed.next()? else { break };
        vitals.at(Activity::Evaluating);
        let judged = kinds.iter().map(|weights| learner.evaluate(&batch, *weights));
        mine.push((number, judged.collect::<Result<_, _>>()?));
        feed.recycle(batch);
    }
    loaders.end(feed.stats());

    let votes = gather(collective, &vote())?;
    let votes = votes.into_iter().fold(Votes::default(), Votes::or);
    let mut all = gather_in_parts(collective, mine)?;
    all.sort_by_key(|(number, _)| *number);
    let of_kind = |kind: usize| {
        let judged: Vec<&Judged> = all.iter().filter_map(|(_, judged)| judged.get(kind)).collect();
        summed_up(&judged, spec)
    };
    let ema = (kinds.len() > 1).then(|| of_kind(1));
    Ok(Evaluated { raw: of_kind(0), ema, votes })
}

/// Gathers lists of any length: so many entries at a time as surely fit into one message.
fn gather_in_parts(
    collective: &mut dyn Collective,
    mine: Vec<Numbered>,
) -> Result<Vec<Numbered>, Error> {
    // As JSON a number takes no more than 24 bytes; sums and punctuation take less than 512.
    let bytes = |(_, judged): &Numbered| -> usize {
        judged.iter().map(|judged| 512 + 24 * 2 * judged.predictions.len()).sum()
    };
    let most = mine.iter().map(bytes).max().unwrap_or(1);
    let most = gather(collective, &most)?.into_iter().max().unwrap_or(1).max(1);
    let part = (MAX_GATHERED_BYTES / most).max(1);
    let rounds = gather(collective, &mine.len().div_ceil(part))?.into_iter().max().unwrap_or(0);
    let mut mine = mine.into_iter();
    let mut all = Vec::new();
    for _ in 0..rounds {
        let next: Vec<Numbered> = mine.by_ref().take(part).collect();
        all.extend(gather(collective, &next)?.into_iter().flatten());
    }
    Ok(all)
}

/// The task's metrics of what was found in all batches. What is no finite number, as after a few updates
/// in fp16, becomes the largest there is: JSON has no infinity.
#[must_use]
pub fn summed_up(judged: &[&Judged], spec: &JobSpec) -> Accuracy {
    let mut sums = Sums::default();
    judged.iter().for_each(|judged| sums.add(&judged.sums));
    let share = |part: f64| part / (sums.count.max(1) as f64);
    let metrics = task::metrics(spec);
    let means = metrics.iter().filter(|m| m.reduction == Reduction::Mean && m.name != "loss");
    let means: Vec<_> = means.zip(&sums.others).collect();
    let mean = |name| {
        means.iter().find(|(metric, _)| metric.name == name).map_or(0.0, |(_, sum)| share(**sum))
    };
    let fit = metrics.iter().any(|m| m.reduction == Reduction::AllSamples).then(|| {
        let predictions: Vec<f32> = judged.iter().flat_map(|j| &j.predictions).copied().collect();
        let targets: Vec<f32> = judged.iter().flat_map(|j| &j.targets).copied().collect();
        let Fit { mae, pearson, spearman } =
            Fit::of(&predictions, &targets, spec.model.num_classes as usize);
        let correlation = |value: f64| if value.is_finite() { value } else { 0.0 };
        Fit { mae: finite(mae), pearson: correlation(pearson), spearman: correlation(spearman) }
    });
    let right = (mean("top1"), mean("top5"));
    let mut found = Accuracy::before_names(sums.count, finite(share(sums.loss)), right, fit);
    let order = task::best_first(spec);
    found.metrics.sort_by_key(|(name, _)| order.iter().position(|metric| metric.name == name));
    found
}

fn finite(value: f64) -> f64 {
    if value.is_finite() { value } else { f64::MAX }
}
