//! What a bench trains on: one made-up batch again and again, or a data set.

use std::sync::Arc;

use baton_data::{Batch, Dataset, Loader, Options, Request, SampleOrder, Source, View};
use baton_job::exit::Failure;
use baton_recipe::JobSpec;
use baton_trainer::Error;

use super::{Args, crash, made_up_batch};

/// Batches without end.
pub(super) enum Batches {
    /// None while it is handed out.
    MadeUp(Option<Batch>),
    Loaded {
        loader: Loader,
        ahead: Option<Batch>,
    },
}

impl Batches {
    pub(super) fn new(args: &Args, spec: &JobSpec) -> Result<Self, Failure> {
        let Some(path) = &args.data else {
            return Ok(Self::MadeUp(Some(made_up_batch(args.batch, args.resolution))));
        };
        let failure = |error: baton_data::Error| Error::from(error).failure();
        let set = Dataset::open(Source::new(path.to_string_lossy())).map_err(failure)?;
        let samples = set.len();
        let data = &spec.data;
        let layout = set.layout().map_err(failure)?;
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
        let loader = Loader::start(Arc::new(set), &options, (0..).map(request));
        Ok(Self::Loaded { loader, ahead: None })
    }

    /// The next one; waits for it.
    pub(super) fn next(&mut self) -> Result<Batch, Failure> {
        let found = match self {
            Self::MadeUp(batch) => batch.take().map(Ok),
            Self::Loaded { loader, ahead } => ahead.take().map(Ok).or_else(|| loader.next()),
        };
        let found = found.ok_or_else(|| crash("the loader ended"))?;
        found.map_err(|error| Error::from(error).failure())
    }

    /// The next one, if it is there already.
    pub(super) fn peek(&mut self) -> Result<Option<&Batch>, Failure> {
        match self {
            Self::MadeUp(batch) => Ok(batch.as_ref()),
            Self::Loaded { loader, ahead } => {
                if ahead.is_none() {
                    let ready = loader.next_if_ready().transpose();
                    *ahead = ready.map_err(|error| Error::from(error).failure())?;
                }
                Ok(ahead.as_ref())
            }
        }
    }

    /// Takes a used one back.
    pub(super) fn recycle(&mut self, batch: Batch) {
        match self {
            Self::MadeUp(place) => *place = Some(batch),
            Self::Loaded { loader, .. } => loader.recycle(batch),
        }
    }
}
