//! The data of a job: opened, checked against the recipe, and cut into micro-batches.

use std::{ops::Range, path::Path, sync::Arc, time::Duration};

use baton_data::{
    Batch, CpuShare, Dataset, EpochOrder, InputType, Items, Loader, LoaderStats, Options,
    Preprocessing, Request, SampleBlocks, SampleOrder, Source,
};
use baton_language::model::read_decoder;
use baton_recipe::{
    InputKind, JobSpec,
    data_summary::DataSummary,
    dry_run::unusable_batches,
    progress::{Extent, Progress, TrainingPlan},
    spec::{Order, spread},
};

use crate::Error;

/// Training and validation set of a job.
#[derive(Debug)]
pub struct JobInputs {
    train: Arc<Dataset>,
    val: Arc<Dataset>,
    order: SampleOrder,
    items: Arc<Items>,
    spec: Arc<JobSpec>,
    plan: TrainingPlan,
    cpus: CpuShare,
    summary: DataSummary,
}

impl JobInputs {
    /// Opens both sets, checks every label and summarizes their contents. Copies of remote shards go to `cache_dir`,
    /// unless the recipe names another folder.
    ///
    /// # Errors
    /// A file that cannot be read, a label out of range, a set that is too small for a batch or does not fit the model.
    pub fn open(spec: &Arc<JobSpec>, cache_dir: &Path) -> Result<Self, Error> {
        Self::open_shared(spec, cache_dir, 1)
    }

    /// Like [`open`](Self::open), on a node with this number of ranks, which share the cache.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_shared(
        spec: &Arc<JobSpec>,
        cache_dir: &Path,
        local_ranks: u32,
    ) -> Result<Self, Error> {
        let data = &spec.data;
        let vocabulary = vocabulary(spec)?;
        let open = |location: &str| -> Result<Arc<Dataset>, Error> {
            let source = Source::of_recipe(spec, location, cache_dir.to_owned());
            let set = Dataset::open(Source { vocabulary, local_ranks, ..source })?;
            check_input_type(spec, &set, location)?;
            check_augment(spec, &set, location)?;
            Ok(Arc::new(set))
        };
        let (train, val) = (open(&data.train)?, open(&data.val)?);
        let items = Items::new(spec, &data.train, &train)?;
        Items::check(spec, &data.val, &val)?;
        let samples = items.count(train.len());
        let plan = TrainingPlan::new(spec, samples);
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
        let blocks = match items.are_packed() {
            true => SampleBlocks::of_files(&[samples]),
            false => train.sample_blocks()?,
        };
        let order = SampleOrder::new(data.order, spec.seed, data.shuffle_window, blocks);
        let (items, spec) = (Arc::new(items), spec.clone());
        let summary = DataSummary { train: train.summary()?, val: val.summary()? };
        Ok(Self { train, val, order, items, spec, plan, cpus: CpuShare::default(), summary })
    }

    /// Limits the loaders to the rank's share of CPU cores, if the recipe pins threads.
    #[must_use]
    pub fn on_cpus(self, cpus: CpuShare) -> Self {
        let cpus = if self.spec.data.pin_threads { cpus } else { CpuShare::default() };
        Self { cpus, ..self }
    }

    /// The training plan for this training set.
    #[must_use]
    pub fn plan(&self) -> &TrainingPlan {
        &self.plan
    }

    /// What the loss of the next batch is divided by.
    pub(crate) fn next_weight(&self, progress: &Progress) -> u64 {
        let batch = self.plan.next_batch(progress);
        if !self.items.are_texts() {
            return batch;
        }
        let order = self.order.epoch(progress.epoch.0);
        let positions = progress.cursor..progress.cursor + batch;
        self.items.weight(progress.epoch.0, positions.map(|position| order.at(position)))
    }

    /// What must be equal on all ranks, and at every resume.
    pub(crate) fn summary(&self) -> &DataSummary {
        &self.summary
    }

    /// Type of a sample's input.
    #[must_use]
    pub fn input_type(&self) -> &InputType {
        self.train.input_type()
    }

    /// The training micro-batches of the virtual ranks in `block`, from `progress` on; the sequence does not end.
    pub(crate) fn train_feed(&self, progress: &Progress, block: Range<u32>) -> BatchFeed {
        let spec = self.spec.clone();
        let preprocessing = move |resolution| Preprocessing::of_training(&spec, resolution);
        let train = &self.spec.train;
        let each = u64::from(train.grad_accumulation);
        let micro_batches = u64::from(block.start) * each..u64::from(block.end) * each;
        let requests = MicroBatches {
            progress: progress.clone(),
            plan: self.plan.clone(),
            set: self.train.clone(),
            order: None,
            orders: self.order.clone(),
            items: self.items.clone(),
            per_update: u64::from(train.virtual_ranks) * each,
            next: micro_batches.start,
            mine: micro_batches,
            preprocessing,
        };
        self.start(&self.train, requests)
    }

    /// Number of validation samples that an evaluation of this extent uses.
    pub(crate) fn val_samples(&self, extent: Extent) -> u64 {
        self.spec.evaluation.samples_of(self.val.len(), extent)
    }

    /// The batches with the given numbers, in that order: see [`positions`](baton_recipe::spec::Evaluation::positions). A subset is spread evenly over the set, so that it contains all classes even if the set
    /// is sorted by class.
    pub(crate) fn val_feed(
        &self,
        extent: Extent,
        numbers: impl Iterator<Item = u64> + Send + 'static,
    ) -> BatchFeed {
        let preprocessing = Preprocessing::of_evaluation(&self.spec);
        let (all, samples) = (self.val.len(), self.val_samples(extent));
        let sample = move |position: u64| spread(position, samples, all);
        let evaluation = self.spec.evaluation.clone();
        let request = move |number: u64| Request {
            epoch: 0,
            samples: evaluation.positions(number, samples).into_iter().map(sample).collect(),
            preprocessing: preprocessing.clone(),
        };
        let order =
            SampleOrder::new(Order::Sequential, 0, 0, SampleBlocks::of_files(&[all])).epoch(0);
        self.val.plan_prefetch(&order, 0, None);
        self.start(&self.val, numbers.map(request))
    }

    fn start(
        &self,
        set: &Arc<Dataset>,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> BatchFeed {
        let data = &self.spec.data;
        let options = Options {
            threads: data.decode_threads as usize,
            prefetch: data.prefetch_batches as usize,
            cpus: self.cpus.clone(),
        };
        BatchFeed::of(Loader::start(set.clone(), &options, requests))
    }
}

/// Reads micro-batches in order.
pub struct BatchFeed {
    /// `None`: the same batch is returned again and again.
    loader: Option<Loader>,
    /// The next batch, if it is ready.
    ahead: Option<Result<Batch, baton_data::Error>>,
}

impl BatchFeed {
    /// Returns the batches that `loader` reads.
    #[must_use]
    pub fn of(loader: Loader) -> Self {
        Self { loader: Some(loader), ahead: None }
    }

    /// Returns `batch` again and again.
    #[must_use]
    pub fn repeating(batch: Batch) -> Self {
        Self { loader: None, ahead: Some(Ok(batch)) }
    }

    /// Waits until [`next`](Self::next) returns at once, for `timeout` at most; returns whether it does.
    pub(crate) fn wait_until_ready(&mut self, timeout: Duration) -> bool {
        if self.ahead.is_some() {
            return true;
        }
        match &mut self.loader {
            Some(loader) => loader.wait_until_ready(timeout),
            // Only a test has a feed without a loader and a batch.
            None => false,
        }
    }

    /// Ends the feed without waiting for a disk that may not answer.
    pub(crate) fn detach(self) {
        if let Some(loader) = self.loader {
            loader.detach();
        }
    }

    /// A feed that is never ready, as if its disk did not answer.
    #[cfg(test)]
    pub(crate) fn stalled() -> Self {
        Self { loader: None, ahead: None }
    }

    /// The next batch; `None` after the last.
    pub(crate) fn next(&mut self) -> Result<Option<Batch>, Error> {
        let next = self.ahead.take().or_else(|| self.loader.as_mut()?.next());
        Ok(next.transpose()?)
    }

    /// The next batch, if it is ready; [`next`](Self::next) returns it later.
    pub(crate) fn peek(&mut self) -> Option<&Batch> {
        if let (None, Some(loader)) = (&self.ahead, &mut self.loader) {
            self.ahead = loader.next_if_ready();
        }
        self.ahead.as_ref()?.as_ref().ok()
    }

    /// Returns the memory of a used batch for reuse.
    pub(crate) fn recycle(&mut self, batch: Batch) {
        match &mut self.loader {
            Some(loader) => loader.recycle(batch),
            None => self.ahead = Some(Ok(batch)),
        }
    }

    /// Statistics of the loader.
    pub(crate) fn stats(&self) -> LoaderStats {
        self.loader.as_ref().map(Loader::stats).unwrap_or_default()
    }
}

/// The endless sequence of one rank's micro-batches: for every update, those of each virtual rank in its block. The
/// samples of a virtual rank depend on the position alone, not on the rank that runs it.
struct MicroBatches<V> {
    progress: Progress,
    plan: TrainingPlan,
    set: Arc<Dataset>,
    /// Sample order of the epoch of the last request.
    order: Option<EpochOrder>,
    orders: SampleOrder,
    items: Arc<Items>,
    /// Number of micro-batches in one update, over all ranks.
    per_update: u64,
    /// Numbers of this rank's micro-batches within an update.
    mine: Range<u64>,
    /// Number of the next micro-batch.
    next: u64,
    /// View of the samples at a given resolution.
    preprocessing: V,
}

impl<V: Fn(u32) -> Preprocessing> Iterator for MicroBatches<V> {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.plan.skip_flagged_batches(&mut self.progress);
        let batch = self.plan.next_batch(&self.progress);
        let share = |number: u64| number * batch / self.per_update;
        let (epoch, cursor) = (self.progress.epoch.0, self.progress.cursor);
        let order = match self.order.take().filter(|order| order.epoch() == epoch) {
            Some(order) => order,
            None => {
                let order = self.orders.epoch(epoch);
                let next = (epoch + 1 < self.plan.epochs).then(|| self.orders.epoch(epoch + 1));
                // The order of packed texts is not that of samples; all their shards have been fetched.
                if !self.items.are_packed() {
                    self.set.plan_prefetch(&order, cursor, next.as_ref());
                }
                order
            }
        };
        let positions = cursor + share(self.next)..cursor + share(self.next + 1);
        let samples = positions.flat_map(|at| self.items.samples(epoch, order.at(at))).collect();
        let preprocessing = (self.preprocessing)(self.plan.resolution(self.progress.epoch));
        self.order = Some(order);
        self.next += 1;
        if self.next == self.mine.end {
            self.next = self.mine.start;
            self.plan.advance(&mut self.progress);
        }
        Some(Request { epoch, samples, preprocessing })
    }
}

/// Number of token ids of a recipe's model; `None` if it is not a language model.
///
/// # Errors
/// The model cannot be read.
pub fn vocabulary(spec: &JobSpec) -> Result<Option<u64>, Error> {
    if !spec.model.arch.is_causal_lm() {
        return Ok(None);
    }
    let (_, decoder) = read_decoder(spec.model.path.as_ref())
        .map_err(|error| Error::Mismatch(format!("model.path: {error}")))?;
    Ok(Some(decoder.vocabulary))
}

/// Checks that the model accepts samples of this type.
fn check_input_type(spec: &JobSpec, set: &Dataset, location: &str) -> Result<(), Error> {
    let sees = match (set.input_type(), spec.model.arch.input_kind()) {
        (_, InputKind::Anything)
        | (InputType::Image, InputKind::Images)
        | (InputType::Tokens, InputKind::Tokens) => return Ok(()),
        (InputType::Array(shape), InputKind::Signals) if (1..=2).contains(&shape.len()) => {
            return Ok(());
        }
        (_, InputKind::Signals) => "signals: arrays of shape (length) or (channels, length)",
        _ => "images",
    };
    Err(Error::Mismatch(format!(
        "field \"{}\" of {location} holds {}, but model.arch = \"{}\" needs {sees}: name such a field \
         in data.input_field, or choose another model.arch",
        spec.data.input_field,
        described(set.input_type()),
        spec.model.arch.name()
    )))
}

/// Checks that the recipe augments the kind of input that a set holds; the recipe alone does not know that of a program.
fn check_augment(spec: &JobSpec, set: &Dataset, location: &str) -> Result<(), Error> {
    let (fields, needed) = match set.input_type() {
        InputType::Array(_) => {
            let changes = spec.augment.image_changes().into_iter();
            (changes.map(|(field, _)| field).collect::<Vec<_>>(), "images")
        }
        _ if spec.augment.signal.is_some() => (vec!["augment.signal"], "arrays"),
        _ => return Ok(()),
    };
    if fields.is_empty() {
        return Ok(());
    }
    Err(Error::Mismatch(format!(
        "{} is for {needed}, but field \"{}\" of {location} holds {}: remove it from the recipe",
        fields.join(", "),
        spec.data.input_field,
        described(set.input_type())
    )))
}

fn described(input_type: &InputType) -> String {
    match input_type {
        InputType::Image => "images".to_owned(),
        InputType::Array(shape) => format!("arrays of shape {shape:?}"),
        InputType::Tokens => "texts".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use baton_job::plan::virtual_block;
    use baton_recipe::{Epoch, spec::TrainPhase};
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const SAMPLES: u64 = 360;

    fn set() -> Arc<Dataset> {
        let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
        Arc::new(Dataset::open(Source::new(digits)).unwrap())
    }

    fn plan(global_batch: u32) -> TrainingPlan {
        TrainingPlan {
            epochs: 9,
            samples: SAMPLES,
            drop_last: false,
            phases: vec![TrainPhase { from_epoch: 0, resolution: 8, global_batch, ramp_epochs: 0 }],
            evaluate_every_epochs: 1,
            subset: false,
            save_every_epochs: 1,
            save_every_steps: 0,
            target: None,
            patience: None,
        }
    }

    /// The samples of some updates from a position on, in the order of the virtual ranks, as the ranks of a world of
    /// this size request them; and the position after them.
    fn updates(
        set: &Arc<Dataset>,
        order: &SampleOrder,
        start: &Progress,
        world_size: u32,
        plan: &TrainingPlan,
        (virtual_ranks, accumulation): (u32, u64),
        steps: u64,
    ) -> (Vec<u64>, Progress) {
        let mut parts: Vec<Vec<Request>> = Vec::new();
        for rank in 0..world_size {
            let block = virtual_block(virtual_ranks, baton_job::Rank(rank), world_size);
            let count = steps as usize * block.len() * accumulation as usize;
            let batches = MicroBatches {
                progress: start.clone(),
                plan: plan.clone(),
                set: set.clone(),
                order: None,
                items: Arc::default(),
                orders: order.clone(),
                per_update: u64::from(virtual_ranks) * accumulation,
                next: u64::from(block.start) * accumulation,
                mine: u64::from(block.start) * accumulation..u64::from(block.end) * accumulation,
                preprocessing: |resolution| Preprocessing::Evaluate {
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
                let requested = &requests[step * each..(step + 1) * each];
                samples.extend(requested.iter().flat_map(|request| request.samples.clone()));
            }
            plan.advance(&mut end);
        }
        (samples, end)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// For any number of ranks, any interruptions, and any batch size in each interval between them, the sequence
        /// is the order of the epoch, with every sample once.
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
            intervals in vec((1_u32..9, 1_u32..120, 1_u64..5), 1..12),
        ) {
            let set = set();
            let sample_blocks = set.sample_blocks().unwrap();
            let order = SampleOrder::new(kind, seed, window, sample_blocks);
            let start = Progress { epoch: Epoch(epoch), ..Progress::default() };
            let (mut seen, mut at) = (Vec::new(), start);
            // The last interval goes to the end of the epoch.
            for (world_size, batch, steps) in intervals.into_iter().chain([(3, 64, u64::MAX)]) {
                let plan = plan(batch);
                let left = (SAMPLES - at.cursor).div_ceil(batch.into());
                let (samples, end) = updates(
                    &set, &order, &at, world_size.min(virtual_ranks), &plan,
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
