//! Accuracy on the validation set, exact over all ranks.
//!
//! Validation batches are numbered; rank r takes r, r + W, … Sums are gathered and added in the order
//! of the numbers, so that the result has the same bits for every number of ranks.

use baton_collectives::Collective;
use baton_job::progress::Accuracy;

use crate::{
    Error, Learner, Sums, agree::gather, controls::Votes, inputs::Inputs, loader_watch::LoaderWatch,
};

/// Evaluates `learner`; with the result comes what all ranks want next.
pub(crate) fn evaluate<L: Learner>(
    learner: &mut L,
    inputs: &Inputs,
    collective: &mut dyn Collective,
    loaders: &mut LoaderWatch,
    vote: impl Fn() -> Votes,
) -> Result<(Accuracy, Votes), Error> {
    let (rank, world) = (u64::from(collective.rank().0), u64::from(collective.world_size()));
    let numbers = (rank..inputs.val_batches()).step_by(world as usize);
    let mut feed = inputs.val_feed(numbers.clone());
    let mut mine: Vec<(u64, Sums)> = Vec::new();
    for number in numbers {
        let Some(batch) = feed.next()? else { break };
        mine.push((number, learner.evaluate(&batch)?));
        feed.recycle(batch);
    }
    loaders.end(feed.stats());
    let gathered: Vec<(Vec<(u64, Sums)>, Votes)> = gather(collective, &(mine, vote()))?;
    let votes = gathered.iter().fold(Votes::default(), |all, (_, votes)| all.or(*votes));
    let mut all: Vec<(u64, Sums)> = gathered.into_iter().flat_map(|(sums, _)| sums).collect();
    all.sort_by_key(|(number, _)| *number);
    let total = all.iter().fold(Sums::default(), |total, (_, sums)| total.plus(sums));
    Ok((accuracy(&total), votes))
}

/// Means of sums.
#[must_use]
pub fn accuracy(sums: &Sums) -> Accuracy {
    let share = |part: f64| part / (sums.count.max(1) as f64);
    Accuracy {
        loss: share(sums.loss),
        top1: share(sums.top1 as f64),
        top5: share(sums.top5 as f64),
        samples: sums.count,
    }
}
