//! The data of a job: opened, checked against the recipe, and cut into micro-batches.

use std::{ops::Range, sync::Arc, time::Duration};

use baton_data::{Batch, Dataset, Loader, Request, SampleOrder, View};
use baton_job::{
    JobSpec,
    progress::{Agenda, Progress},
};

use crate::Error;

/// Training and validation set of a job.
#[derive(Debug)]
pub struct Inputs {
    train: Arc<Dataset>,
    val: Arc<Dataset>,
    order: SampleOrder,
    spec: Arc<JobSpec>,
    agenda: Agenda,
}

impl Inputs {
    /// Opens both sets and checks every label.
    ///
    /// # Errors
    /// A file that cannot be read, a label out of range, a set that does not fill a batch.
    pub fn open(spec: &Arc<JobSpec>) -> Result<Self, Error> {
        let data = &spec.data;
        let open = |path: &str| -> Result<Arc<Dataset>, Error> {
            let set = Dataset::open(path, &data.image_field, &data.label_field)?;
            set.check_labels(spec.model.num_classes)?;
            Ok(Arc::new(set))
        };
        let (train, val) = (open(&data.train)?, open(&data.val)?);
        let samples = train.len();
        let agenda = Agenda::new(spec, samples);
        if agenda.epoch_samples == 0 {
            return Err(Error::Mismatch(format!(
                "{} has {samples} samples, less than one batch of train.global_batch = {}: lower it",
                data.train, spec.train.global_batch
            )));
        }
        // BatchNorm needs two samples, and every virtual rank needs its share.
        let last = agenda.epoch_samples % agenda.global_batch;
        let least = 2 * u64::from(spec.train.virtual_ranks);
        if last != 0 && last < least {
            return Err(Error::Mismatch(format!(
                "{} has {samples} samples; the last batch of {last} is too small for {} virtual ranks: \
                 set data.drop_last = true",
                data.train, spec.train.virtual_ranks
            )));
        }
        let order = SampleOrder::new(data.order, samples, spec.seed)?;
        Ok(Self { train, val, order, spec: spec.clone(), agenda })
    }

    /// The shape of the run over this training set.
    #[must_use]
    pub fn agenda(&self) -> &Agenda {
        &self.agenda
    }

    /// Training micro-batches of the virtual ranks `block`, from `progress` on without end.
    pub(crate) fn train_feed(&self, progress: &Progress, block: Range<u32>) -> Feed {
        let view = View::Train {
            seed: self.spec.seed,
            resolution: self.spec.train.resolution,
            augment: self.spec.augment.clone(),
        };
        let requests = MicroBatches {
            progress: progress.clone(),
            agenda: self.agenda.clone(),
            order: self.order.clone(),
            virtual_ranks: u64::from(self.spec.train.virtual_ranks),
            next: u64::from(block.start),
            block,
            view,
        };
        self.start(&self.train, requests)
    }

    /// Number of validation batches.
    pub(crate) fn val_batches(&self) -> u64 {
        self.val.len().div_ceil(u64::from(self.spec.evaluation.batch))
    }

    /// The validation batches with the given numbers, in that order.
    pub(crate) fn val_feed(&self, numbers: impl Iterator<Item = u64> + Send + 'static) -> Feed {
        let view = View::Evaluate {
            resolution: self.spec.evaluation_resolution(),
            crop_ratio: self.spec.evaluation.crop_ratio,
        };
        let (size, len) = (u64::from(self.spec.evaluation.batch), self.val.len());
        let request = move |number: u64| Request {
            epoch: 0,
            samples: (number * size..((number + 1) * size).min(len)).collect(),
            view: view.clone(),
        };
        self.start(&self.val, numbers.map(request))
    }

    fn start(
        &self,
        set: &Arc<Dataset>,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Feed {
        let data = &self.spec.data;
        let (threads, ahead) = (data.decode_threads as usize, data.prefetch_batches as usize);
        Feed { loader: Loader::start(set.clone(), threads, ahead, requests) }
    }
}

/// A running loader.
pub(crate) struct Feed {
    loader: Loader,
}

impl Feed {
    /// The next batch; `None` after the last.
    pub(crate) fn next(&mut self) -> Result<Option<Batch>, Error> {
        Ok(self.loader.next().transpose()?)
    }

    /// Gives a used batch's memory back.
    pub(crate) fn recycle(&mut self, batch: Batch) {
        self.loader.recycle(batch);
    }

    /// Time spent waiting in [`next`](Self::next) so far.
    pub(crate) fn waited(&self) -> Duration {
        self.loader.waited()
    }
}

/// The endless sequence of one rank's micro-batches: for every update, one per virtual rank of its
/// block. What a virtual rank gets depends on the position alone, not on who runs it.
struct MicroBatches {
    progress: Progress,
    agenda: Agenda,
    order: SampleOrder,
    virtual_ranks: u64,
    block: Range<u32>,
    /// The virtual rank whose turn it is.
    next: u64,
    view: View,
}

impl Iterator for MicroBatches {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let batch = self.agenda.next_batch(&self.progress);
        let share = |virtual_rank: u64| virtual_rank * batch / self.virtual_ranks;
        let (epoch, cursor) = (self.progress.epoch.0, self.progress.cursor);
        let positions = cursor + share(self.next)..cursor + share(self.next + 1);
        let samples = positions.map(|position| self.order.at(epoch, position)).collect();
        self.next += 1;
        if self.next == u64::from(self.block.end) {
            self.next = u64::from(self.block.start);
            self.agenda.advance(&mut self.progress);
        }
        Some(Request { epoch, samples, view: self.view.clone() })
    }
}
