//! The micro-batches that may have caused a divergence.

use baton_collectives::Collective;
use baton_recipe::guard::MAX_NAMED_SAMPLES;

use crate::{Error, agree::gather, learner::DeferredScalar};

/// The micro-batches of one update on this rank, with their losses.
#[derive(Debug)]
pub(crate) struct Suspects<T> {
    batches: Vec<(Vec<u64>, T)>,
}

impl<T: DeferredScalar> Suspects<T> {
    /// For an update that has not begun.
    pub(crate) fn none() -> Self {
        Self { batches: Vec::new() }
    }

    /// Adds a micro-batch and its loss.
    pub(crate) fn note(&mut self, samples: &[u64], loss: T) {
        self.batches.push((samples.to_vec(), loss));
    }

    /// Samples of those micro-batches of all ranks whose loss is not finite. If there are none: samples of the first
    /// micro-batch of each rank.
    pub(crate) fn gather_samples(
        &self,
        collective: &mut dyn Collective,
    ) -> Result<Vec<u64>, Error> {
        let mut bad: Vec<u64> = Vec::new();
        for (samples, loss) in &self.batches {
            if bad.len() < MAX_NAMED_SAMPLES && !loss.value()?.is_finite() {
                bad.extend(samples);
            }
        }
        let first = self.batches.iter().map(|(samples, _)| samples).find(|it| !it.is_empty());
        let limited =
            |samples: &[u64]| samples.iter().copied().take(MAX_NAMED_SAMPLES).collect::<Vec<_>>();
        let mine = (limited(&bad), limited(first.map_or(&[], Vec::as_slice)));
        let (bad, first): (Vec<_>, Vec<_>) = gather(collective, &mine)?.into_iter().unzip();
        let bad = bad.concat();
        let suspects = if bad.is_empty() { first.concat() } else { bad };
        Ok(limited(&suspects))
    }
}
