//! Whose fault it may be that an update went wrong.

use baton_collectives::Collective;
use baton_job::guard::MOST_SAMPLES;

use crate::{Error, Sums, agree::gather};

/// Samples of an update, as this rank sees it.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// Of micro-batches whose loss is no finite number.
    guilty: Vec<u64>,
    /// The first ones.
    first: Vec<u64>,
}

impl Suspects {
    /// Takes in a micro-batch.
    pub(crate) fn note(&mut self, samples: &[u64], sums: &Sums) {
        if self.first.is_empty() {
            self.first.extend(samples.iter().take(MOST_SAMPLES));
        }
        if !sums.loss.is_finite() {
            self.guilty.extend(samples);
        }
    }

    /// Those of all ranks: the guilty ones, else the first.
    pub(crate) fn of_all(&self, collective: &mut dyn Collective) -> Result<Vec<u64>, Error> {
        let mine = |samples: &[u64]| samples.iter().copied().take(MOST_SAMPLES).collect::<Vec<_>>();
        let all = gather(collective, &(mine(&self.guilty), mine(&self.first)))?;
        let (guilty, first): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let guilty = guilty.concat();
        let named = if guilty.is_empty() { first.concat() } else { guilty };
        Ok(named.into_iter().take(MOST_SAMPLES).collect())
    }
}
