//! The data of a job: opened, checked against the recipe, and cut into micro-batches.

use std::{ops::Range, path::Path, sync::Arc};

use baton_data::{
    Batch, CpuShare, Dataset, EpochOrder, InputType, Layout, Loader, Options, Request, SampleOrder,
    Source, Stats, View,
};
use baton_recipe::{
    JobSpec, Sees,
    dry_run::unusable_batches,
    progress::{Agenda, Extent, Progress},
    spec::Order,
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
    cpus: CpuShare,
}

impl Inputs {
    /// Opens both sets and checks every label. Copies of remote shards go to `cache_dir`, if the recipe names no
    /// other folder.
    ///
    /// # Errors
    /// A file that cannot be read, a label out of range, a set that does not fill a batch or does not
    /// fit the model.
    pub fn open(spec: &Arc<JobSpec>, cache_dir: &Path) -> Result<Self, Error> {
        let data = &spec.data;
        let open = |location: &str| -> Result<Arc<Dataset>, Error> {
            let set = Dataset::open(Source::of_recipe(spec, location, cache_dir.to_owned()))?;
            check_input_type(spec, &set, location)?;
            Ok(Arc::new(set))
        };
        let (train, val) = (open(&data.train)?, open(&data.val)?);
        let samples = train.len();
        let agenda = Agenda::new(spec, samples);
        let unusable = unusable_batches(spec, samples);
        if !unusable.is_empty() {
            let problems: Vec<String> = unusable.iter().map(ToString::to_string).collect();
            return Err(Error::Mismatch(format!(
                "{} has {samples} samples: {}",
                data.train,
                problems.join("; ")
            )));
        }
        if train.input_type() != val.input_type() {
            return Err(Error::Mismatch(format!(
                "{} holds {}, but {} {}: train and validate on the same kind of input",
                data.train,
                described(train.input_type()),
                data.val,
                described(val.input_type())
            )));
        }
        let order = SampleOrder::new(data.order, spec.seed, data.shuffle_window, train.layout()?);
        Ok(Self { train, val, order, spec: spec.clone(), agenda, cpus: CpuShare::default() })
    }

    /// Loaders keep to a rank's own cores, if the recipe pins threads.
    #[must_use]
    pub fn on(self, cpus: CpuShare) -> Self {
        let cpus = if self.spec.data.pin_threads { cpus } else { CpuShare::default() };
        Self { cpus, ..self }
    }

    /// The shape of the run over this training set.
    #[must_use]
    pub fn agenda(&self) -> &Agenda {
        &self.agenda
    }

    /// What the model sees of a sample.
    #[must_use]
    pub fn input_type(&self) -> &InputType {
        self.train.input_type()
    }

    /// Training micro-batches of the virtual ranks `block`, from `progress` on without end.
    pub(crate) fn train_feed(&self, progress: &Progress, block: Range<u32>) -> Feed {
        let spec = self.spec.clone();
        let view = move |resolution| View::Train {
            seed: spec.seed,
            resolution,
            resize: spec.data.resize,
            augment: spec.augment.clone(),
        };
        let train = &self.spec.train;
        let each = u64::from(train.grad_accumulation);
        let micro_batches = u64::from(block.start) * each..u64::from(block.end) * each;
        let requests = MicroBatches {
            progress: progress.clone(),
            agenda: self.agenda.clone(),
            set: self.train.clone(),
            order: None,
            orders: self.order.clone(),
            of_update: u64::from(train.virtual_ranks) * each,
            next: micro_batches.start,
            mine: micro_batches,
            view,
        };
        self.start(&self.train, requests)
    }

    /// The recipe.
    pub(crate) fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Samples of the validation set that are looked at.
    fn val_samples(&self, extent: Extent) -> u64 {
        let all = self.val.len();
        match extent {
            Extent::Full => all,
            Extent::Subset => (all as f64 * self.spec.evaluation.subset).ceil() as u64,
        }
    }

    /// Number of validation batches.
    pub(crate) fn val_batches(&self, extent: Extent) -> u64 {
        self.val_samples(extent).div_ceil(u64::from(self.spec.evaluation.batch))
    }

    /// The validation batches with the given numbers, in that order. A subset is spread evenly over the
    /// set, so that it has all classes also where the set is sorted by class.
    pub(crate) fn val_feed(
        &self,
        extent: Extent,
        numbers: impl Iterator<Item = u64> + Send + 'static,
    ) -> Feed {
        let view = View::Evaluate {
            resolution: self.spec.evaluation_resolution(),
            resize: self.spec.data.resize,
            crop_ratio: self.spec.evaluation.crop_ratio,
        };
        let (size, all) = (u64::from(self.spec.evaluation.batch), self.val.len());
        let samples = self.val_samples(extent);
        let sample = move |number: u64| {
            (u128::from(number) * u128::from(all) / u128::from(samples.max(1))) as u64
        };
        let request = move |number: u64| Request {
            epoch: 0,
            samples: (number * size..((number + 1) * size).min(samples)).map(sample).collect(),
            view: view.clone(),
        };
        let order = SampleOrder::new(Order::Sequential, 0, 0, Layout::of_files(&[all])).epoch(0);
        self.val.will_need(&order, 0, None);
        self.start(&self.val, numbers.map(request))
    }

    fn start(
        &self,
        set: &Arc<Dataset>,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Feed {
        let data = &self.spec.data;
        let options = Options {
            threads: data.decode_threads as usize,
            prefetch: data.prefetch_batches as usize,
            cpus: self.cpus.clone(),
        };
        Feed::of(Loader::start(set.clone(), &options, requests))
    }
}

/// Micro-batches in order.
pub struct Feed {
    /// `None`: one batch again and again.
    loader: Option<Loader>,
    /// The next batch, if it is there already.
    ahead: Option<Result<Batch, baton_data::Error>>,
}

impl Feed {
    /// What `loader` reads.
    #[must_use]
    pub fn of(loader: Loader) -> Self {
        Self { loader: Some(loader), ahead: None }
    }

    /// `batch` again and again.
    #[must_use]
    pub fn repeating(batch: Batch) -> Self {
        Self { loader: None, ahead: Some(Ok(batch)) }
    }

    /// The next batch; `None` after the last.
    pub(crate) fn next(&mut self) -> Result<Option<Batch>, Error> {
        let next = self.ahead.take().or_else(|| self.loader.as_mut()?.next());
        Ok(next.transpose()?)
    }

    /// The next batch, if it is there already; it stays the next one.
    pub(crate) fn peek(&mut self) -> Option<&Batch> {
        if let (None, Some(loader)) = (&self.ahead, &mut self.loader) {
            self.ahead = loader.next_if_ready();
        }
        self.ahead.as_ref()?.as_ref().ok()
    }

    /// Gives a used batch's memory back.
    pub(crate) fn recycle(&mut self, batch: Batch) {
        match &mut self.loader {
            Some(loader) => loader.recycle(batch),
            None => self.ahead = Some(Ok(batch)),
        }
    }

    /// What the loader has done so far.
    pub(crate) fn stats(&self) -> Stats {
        self.loader.as_ref().map(Loader::stats).unwrap_or_default()
    }
}

/// The endless sequence of one rank's micro-batches: for every update, those of each virtual rank of its
/// block. What a virtual rank gets depends on the position alone, not on who runs it.
struct MicroBatches<V> {
    progress: Progress,
    agenda: Agenda,
    set: Arc<Dataset>,
    /// Of the last epoch asked for.
    order: Option<EpochOrder>,
    orders: SampleOrder,
    /// Micro-batches of one update, over all ranks.
    of_update: u64,
    /// Those of this rank.
    mine: Range<u64>,
    /// The one whose turn it is.
    next: u64,
    /// How images of this side are made.
    view: V,
}

impl<V: Fn(u32) -> View> Iterator for MicroBatches<V> {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.agenda.pass_over_marked(&mut self.progress);
        let batch = self.agenda.next_batch(&self.progress);
        let share = |number: u64| number * batch / self.of_update;
        let (epoch, cursor) = (self.progress.epoch.0, self.progress.cursor);
        let order = match self.order.take().filter(|order| order.epoch() == epoch) {
            Some(order) => order,
            None => {
                let order = self.orders.epoch(epoch);
                let next = (epoch + 1 < self.agenda.epochs).then(|| self.orders.epoch(epoch + 1));
                self.set.will_need(&order, cursor, next.as_ref());
                order
            }
        };
        let positions = cursor + share(self.next)..cursor + share(self.next + 1);
        let samples = positions.map(|position| order.at(position)).collect();
        let view = (self.view)(self.agenda.resolution(self.progress.epoch));
        self.order = Some(order);
        self.next += 1;
        if self.next == self.mine.end {
            self.next = self.mine.start;
            self.agenda.advance(&mut self.progress);
        }
        Some(Request { epoch, samples, view })
    }
}

/// Makes sure that the model can see such samples.
fn check_input_type(spec: &JobSpec, set: &Dataset, location: &str) -> Result<(), Error> {
    let sees = match (set.input_type(), spec.model.arch.sees()) {
        (_, Sees::Anything) | (InputType::Image, Sees::Images) => return Ok(()),
        (InputType::Array(shape), Sees::Signals) if (1..=2).contains(&shape.len()) => return Ok(()),
        (_, Sees::Signals) => "signals: arrays of shape (length) or (channels, length)",
        _ => "images",
    };
    Err(Error::Mismatch(format!(
        "field \"{}\" of {location} holds {}, but model.arch = \"{}\" sees {sees}: name such a field \
         in data.input_field, or take another model.arch",
        spec.data.input_field,
        described(set.input_type()),
        spec.model.arch.name()
    )))
}

fn described(input_type: &InputType) -> String {
    match input_type {
        InputType::Image => "images".to_owned(),
        InputType::Array(shape) => format!("arrays of shape {shape:?}"),
    }
}

#[cfg(test)]
mod tests {
    use baton_job::plan::virtual_block;
    use baton_recipe::{Epoch, spec::Phase};
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const SAMPLES: u64 = 360;

    fn set() -> Arc<Dataset> {
        let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
        Arc::new(Dataset::open(Source::new(digits)).unwrap())
    }

    fn agenda(global_batch: u32) -> Agenda {
        Agenda {
            epochs: 9,
            samples: SAMPLES,
            drop_last: false,
            phases: vec![Phase { from_epoch: 0, resolution: 8, global_batch, ramp_epochs: 0 }],
            evaluate_every_epochs: 1,
            subset: false,
            save_every_epochs: 1,
            save_every_steps: 0,
            target: None,
            patience: None,
        }
    }

    /// The samples of some updates from a position on, in the order of the virtual ranks, as the ranks
    /// of a world of this size ask for them; and the position after them.
    fn updates(
        set: &Arc<Dataset>,
        order: &SampleOrder,
        start: &Progress,
        world_size: u32,
        agenda: &Agenda,
        (virtual_ranks, accumulation): (u32, u64),
        steps: u64,
    ) -> (Vec<u64>, Progress) {
        let mut parts: Vec<Vec<Request>> = Vec::new();
        for rank in 0..world_size {
            let block = virtual_block(virtual_ranks, baton_job::Rank(rank), world_size);
            let count = steps as usize * block.len() * accumulation as usize;
            let batches = MicroBatches {
                progress: start.clone(),
                agenda: agenda.clone(),
                set: set.clone(),
                order: None,
                orders: order.clone(),
                of_update: u64::from(virtual_ranks) * accumulation,
                next: u64::from(block.start) * accumulation,
                mine: u64::from(block.start) * accumulation..u64::from(block.end) * accumulation,
                view: |resolution| View::Evaluate {
                    resolution,
                    resize: Default::default(),
                    crop_ratio: 1.0,
                },
            };
            parts.push(batches.take(count).collect());
        }
        let mut end = start.clone();
        let mut samples = Vec::new();
        for step in 0..steps as usize {
            for requests in &parts {
                let each = requests.len() / steps as usize;
                let asked = &requests[step * each..(step + 1) * each];
                samples.extend(asked.iter().flat_map(|request| request.samples.clone()));
            }
            agenda.advance(&mut end);
        }
        (samples, end)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever the ranks, the places where the run was interrupted, and the batch size of each
        /// stretch: the sequence is that of the epoch's order, every sample once.
        #[test]
        fn ranks_resumes_and_batch_sizes_never_change_the_sequence(
            kind in prop_oneof![
                Just(Order::Random), Just(Order::QuasiRandom), Just(Order::Sequential),
            ],
            seed: u64,
            window in 0_u64..200,
            epoch in 0_u32..8,
            virtual_ranks in (0_u32..4).prop_map(|power| 1 << power),
            accumulation in 1_u64..4,
            stretches in vec((1_u32..9, 1_u32..120, 1_u64..5), 1..12),
        ) {
            let set = set();
            let layout = set.layout().unwrap();
            let order = SampleOrder::new(kind, seed, window, layout);
            let start = Progress { epoch: Epoch(epoch), ..Progress::default() };
            let (mut seen, mut at) = (Vec::new(), start);
            // The last stretch goes to the end of the epoch.
            for (world_size, batch, steps) in stretches.into_iter().chain([(3, 64, u64::MAX)]) {
                let agenda = agenda(batch);
                let left = (SAMPLES - at.cursor).div_ceil(batch.into());
                let (samples, end) = updates(
                    &set, &order, &at, world_size.min(virtual_ranks), &agenda,
                    (virtual_ranks, accumulation), steps.min(left),
                );
                seen.extend(samples);
                at = end;
                if at.epoch.0 > epoch {
                    break;
                }
            }
            let order = order.epoch(epoch);
            let expected: Vec<u64> = (0..SAMPLES).map(|position| order.at(position)).collect();
            prop_assert_eq!(&seen, &expected);
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..SAMPLES));
        }
    }
}
