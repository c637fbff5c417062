//! Whose fault it may be that an update went wrong.

use baton_collectives::Collective;
use baton_recipe::guard::MOST_SAMPLES;

use crate::{Error, agree::gather, learner::Reading};

/// An update's micro-batches, as this rank sees them.
#[derive(Debug)]
pub(crate) struct Suspects<T> {
    batches: Vec<(Vec<u64>, T)>,
}

impl<T: Reading> Suspects<T> {
    /// Of an update that has not begun.
    pub(crate) fn none() -> Self {
        Self { batches: Vec::new() }
    }

    /// Takes in a micro-batch and its loss.
    pub(crate) fn note(&mut self, samples: &[u64], loss: T) {
        self.batches.push((samples.to_vec(), loss));
    }

    /// Samples of all ranks' micro-batches whose loss is no finite number, else those of their first
    /// ones.
    pub(crate) fn of_all(&self, collective: &mut dyn Collective) -> Result<Vec<u64>, Error> {
        let mut guilty: Vec<u64> = Vec::new();
        for (samples, loss) in &self.batches {
            if guilty.len() < MOST_SAMPLES && !loss.value()?.is_finite() {
                guilty.extend(samples);
            }
        }
        let first = self.batches.iter().map(|(samples, _)| samples).find(|it| !it.is_empty());
        let most = |samples: &[u64]| samples.iter().copied().take(MOST_SAMPLES).collect::<Vec<_>>();
        let mine = (most(&guilty), most(first.map_or(&[], Vec::as_slice)));
        let (guilty, first): (Vec<_>, Vec<_>) = gather(collective, &mine)?.into_iter().unzip();
        let guilty = guilty.concat();
        let named = if guilty.is_empty() { first.concat() } else { guilty };
        Ok(most(&named))
    }
}
