//! What a bench trains on: one made-up batch again and again, or a data set.

use std::sync::Arc;

use baton_data::{Dataset, Loader, Options, Request, SampleOrder, Source, View};
use baton_job::exit::Failure;
use baton_recipe::JobSpec;
use baton_trainer::{Error, Feed};

use super::{Args, made_up_batch};

/// Batches without end.
pub(super) fn feed(args: &Args, spec: &JobSpec) -> Result<Feed, Failure> {
    let Some(path) = &args.data else {
        return Ok(Feed::repeating(made_up_batch(args.batch, args.resolution)));
    };
    let set = Dataset::open(Source::new(path.to_string_lossy())).map_err(Error::from)?;
    let samples = set.len();
    let data = &spec.data;
    let layout = set.layout().map_err(Error::from)?;
    let orders = SampleOrder::new(data.order, spec.seed, data.shuffle_window, layout);
    let view = View::Train {
        seed: spec.seed,
        resolution: args.resolution,
        resize: data.resize,
        augment: spec.augment.clone(),
    };
    let batch = u64::from(args.batch);
    // Small sets are gone through several times in a batch.
    let request = move |number: u64| {
        let position = |at: u64| orders.epoch((at / samples) as u32).at(at % samples);
        Request {
            epoch: number as u32,
            samples: (number * batch..(number + 1) * batch).map(position).collect(),
            view: view.clone(),
        }
    };
    let options = Options::new(args.decode_threads as usize, data.prefetch_batches as usize);
    Ok(Feed::of(Loader::start(Arc::new(set), &options, (0..).map(request))))
}
