//! Batches for the bench: one synthetic batch repeated, or batches of a data set.

use std::sync::Arc;

use baton_data::{Dataset, Loader, Options, Preprocessing, Request, SampleOrder, Source};
use baton_job::exit::Failure;
use baton_recipe::JobSpec;
use baton_trainer::{BatchFeed, Error};

use super::{Args, synthetic_batch};

/// An endless feed of batches.
pub(super) fn feed(args: &Args, spec: &JobSpec) -> Result<BatchFeed, Failure> {
    let Some(path) = &args.data else {
        return Ok(BatchFeed::repeating(synthetic_batch(args.batch, args.resolution)));
    };
    let set = Dataset::open(Source::new(path.to_string_lossy())).map_err(Error::from)?;
    let samples = set.len();
    let data = &spec.data;
    let sample_blocks = set.sample_blocks().map_err(Error::from)?;
    let orders = SampleOrder::new(data.order, spec.seed, data.shuffle_window, sample_blocks);
    let preprocessing = Preprocessing::of_training(spec, args.resolution);
    let batch = u64::from(args.batch);
    // A batch may contain several passes over a small data set.
    let request = move |number: u64| {
        let position = |at: u64| orders.epoch((at / samples) as u32).at(at % samples);
        Request {
            epoch: number as u32,
            samples: (number * batch..(number + 1) * batch).map(position).collect(),
            preprocessing: preprocessing.clone(),
        }
    };
    let options = Options::new(args.decode_threads as usize, data.prefetch_batches as usize);
    Ok(BatchFeed::of(Loader::start(Arc::new(set), &options, (0..).map(request))))
}
