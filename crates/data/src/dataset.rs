//! Inputs with a class or values each: what training sees of one file or many.

mod labels;
mod open_shards;

use std::{fmt, path::PathBuf, sync::Arc};

use baton_recipe::{JobSpec, spec::OnBadSample};

pub use self::labels::Labels;
use self::{labels::LabelColumn, open_shards::OpenShards};
use crate::{
    Beton, EpochOrder, Error, FileFault, Layout, SampleFault,
    beton::{ArrayColumn, FieldType, ImageColumn, ImagePlace},
    shards::{self, Lease, ShardSet, Statistics},
};

/// Where a data set lies, and how it is to be seen.
#[derive(Clone, Debug)]
pub struct Source {
    /// A file, a folder, a pattern, or one of these in an object store: see [`ShardSet::open`].
    pub location: String,
    /// Name of the field that the model sees: images, arrays or tensors.
    pub input_field: String,
    /// Name of the field that the model learns to tell.
    pub label_field: String,
    /// What that is.
    pub labels: Labels,
    /// What becomes of samples that cannot be used.
    pub on_bad_sample: OnBadSample,
    /// Folder for copies of remote shards.
    pub cache_dir: PathBuf,
    /// Most bytes that the folder may hold.
    pub cache_bytes: u64,
}

/// Bytes that a cache may hold if nothing is said about it.
const CACHE_BYTES: u64 = 100 << 30;

impl Source {
    /// The fields `image` and `label`, the latter of any whole numbers; no bad samples tolerated, copies of remote shards in the
    /// system's folder for temporary files.
    #[must_use]
    pub fn new(location: impl Into<String>) -> Self {
        Self {
            location: location.into(),
            input_field: "image".to_owned(),
            label_field: "label".to_owned(),
            labels: Labels::Ints,
            on_bad_sample: OnBadSample::Fail,
            cache_dir: std::env::temp_dir().join("baton-cache"),
            cache_bytes: CACHE_BYTES,
        }
    }

    /// A data set of a recipe: `location` is the one for training, for validation, or another of that
    /// kind. Copies of remote shards go to `cache_dir` if the recipe names no folder.
    #[must_use]
    pub fn of_recipe(spec: &JobSpec, location: &str, cache_dir: PathBuf) -> Self {
        let (data, outputs) = (&spec.data, spec.model.num_classes);
        let is_regression = spec.loss.kind.is_regression();
        let named = (!data.cache_dir.is_empty()).then(|| PathBuf::from(&data.cache_dir));
        Self {
            location: location.to_owned(),
            input_field: data.input_field.clone(),
            label_field: data.label_field.clone(),
            labels: if is_regression { Labels::Values(outputs) } else { Labels::Classes(outputs) },
            on_bad_sample: data.on_bad_sample,
            cache_dir: named.unwrap_or(cache_dir),
            cache_bytes: (data.cache_gib * f64::from(1 << 30)) as u64,
        }
    }
}

/// What every sample of a data set is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputType {
    /// An RGB image of any size.
    Image,
    /// An array of this shape, seen as f32.
    Array(Vec<u64>),
}

/// One or more beton files seen as labelled inputs: their samples, one file after the other.
///
/// Opening a local file checks every row and label, so that a damaged one is refused before training
/// instead of hours into it. Remote shards are checked when they arrive.
pub struct Dataset {
    source: Source,
    set: ShardSet,
    /// The shards that have samples, as the set numbers them.
    numbers: Vec<usize>,
    /// The first sample of each of those, and behind them the number of all samples.
    starts: Vec<u64>,
    input_type: InputType,
    shards: Shards,
}

enum Shards {
    /// All are open.
    Local(Vec<Arc<Shard>>),
    /// Some are open.
    Remote(OpenShards),
}

impl Dataset {
    /// Opens a data set. Of remote shards it reads the headers and fetches the first.
    ///
    /// # Errors
    /// As [`ShardSet::open`], [`Beton::open`] and [`Beton::image_column`]; there is no such input or
    /// label field, a label is not what [`Source::labels`] says, or the shards differ in what their
    /// inputs are.
    pub fn open(source: Source) -> Result<Self, Error> {
        let options = shards::Options::new(&source.cache_dir, source.cache_bytes);
        Self::open_with(source, &options)
    }

    /// As [`open`](Self::open), with more to say about remote shards.
    ///
    /// # Errors
    /// As there.
    pub fn open_with(source: Source, options: &shards::Options) -> Result<Self, Error> {
        let set = ShardSet::open(&source.location, options)?;
        let shard = |number: usize| Shard::open(set.local(number)?, &source, None);
        let (samples, first, shards) = if set.is_remote() {
            let samples = set.samples()?;
            let number = samples.iter().position(|samples| *samples > 0).unwrap_or_default();
            let shards = OpenShards::new(source.cache_bytes, set.largest_copy());
            (samples, Arc::new(shard(number)?), Shards::Remote(shards))
        } else {
            let shards = (0..set.len()).map(|number| shard(number).map(Arc::new));
            let shards: Vec<_> = shards.collect::<Result<_, Error>>()?;
            let samples = shards.iter().map(|shard| shard.beton.len()).collect();
            let Some(first) = shards.first().cloned() else {
                // The set refuses to be empty.
                return Err(shards::Error::OutOfRange { shard: 0, shards: 0 }.into());
            };
            (samples, first, Shards::Local(shards))
        };
        if let Shards::Local(shards) = &shards {
            shards
                .iter()
                .try_for_each(|shard| shard.check_input_type(&first.input_type(), &source))?;
        }
        let numbers: Vec<usize> =
            (0..samples.len()).filter(|number| samples[*number] > 0).collect();
        let mut starts = vec![0];
        let mut end = 0_u64;
        for number in &numbers {
            end = end.saturating_add(samples[*number]);
            starts.push(end);
        }
        let input_type = first.input_type();
        Ok(Self { source, set, numbers, starts, input_type, shards })
    }

    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or_default()
    }

    /// Whether there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What every sample is.
    #[must_use]
    pub fn input_type(&self) -> &InputType {
        &self.input_type
    }

    /// Which samples lie together: the pages of a single file, or many files.
    ///
    /// # Errors
    /// The allocation table cannot be read.
    pub fn layout(&self) -> Result<Layout, Error> {
        match &self.shards {
            Shards::Local(shards) if shards.len() == 1 => Layout::of_pages(&shards[0].beton),
            Shards::Local(_) | Shards::Remote(_) => {
                let samples = self.starts.windows(2).map(|pair| pair[1] - pair[0]);
                Ok(Layout::of_files(&samples.collect::<Vec<_>>()))
            }
        }
    }

    /// What the labels are.
    #[must_use]
    pub fn labels(&self) -> Labels {
        self.source.labels
    }

    /// What becomes of samples that cannot be used.
    #[must_use]
    pub fn on_bad_sample(&self) -> OnBadSample {
        self.source.on_bad_sample
    }

    /// What was fetched from the object store so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.set.statistics()
    }

    /// The class of a sample; 0 where labels are values.
    ///
    /// # Errors
    /// There is no such sample, or its shard cannot be had.
    pub fn label(&self, sample: u64) -> Result<i64, Error> {
        let (shard, local) = self.find(sample)?;
        shard.label(local)
    }

    /// The values that are a sample's label; none where labels are classes.
    ///
    /// # Errors
    /// There is no such sample, its shard cannot be had, or a value is not finite as f32 or cannot be
    /// read.
    pub fn targets(&self, sample: u64) -> Result<Vec<f32>, Error> {
        let (shard, local) = self.find(sample)?;
        let mut targets = Vec::new();
        shard.read_targets(local, &mut Vec::new(), &mut targets)?;
        Ok(targets)
    }

    /// Tells in which order samples will be needed: those of `order` from a position on, then those of
    /// `next`. Remote shards are fetched ahead accordingly.
    pub fn will_need(&self, order: &EpochOrder, position: u64, next: Option<&EpochOrder>) {
        if !self.set.is_remote() {
            return;
        }
        let mut needed = self.shards_of(order, position);
        needed.extend(next.map_or(Vec::new(), |next| self.shards_of(next, 0)));
        self.set.will_need(needed);
    }

    /// The shards of the samples from a position on, in the order in which they are first needed.
    fn shards_of(&self, order: &EpochOrder, position: u64) -> Vec<usize> {
        if let Some(blocks) = order.blocks_from(position) {
            return blocks.into_iter().map(|block| self.numbers[block as usize]).collect();
        }
        let (mut seen, mut shards) = (vec![false; self.numbers.len()], Vec::new());
        for position in position..self.len() {
            let index = self.index_of(order.at(position));
            if !std::mem::replace(&mut seen[index], true) {
                shards.push(self.numbers[index]);
                if shards.len() == self.numbers.len() {
                    break;
                }
            }
        }
        shards
    }

    /// Makes the system forget what it holds of the files in memory.
    pub(crate) fn forget(&self) {
        if let Shards::Local(shards) = &self.shards {
            shards.iter().for_each(|shard| shard.beton.forget());
        }
    }

    /// The shard that holds a sample, and the sample's position in it. Blocks until a remote shard is
    /// there.
    pub(crate) fn find(&self, sample: u64) -> Result<(Arc<Shard>, u64), Error> {
        let samples = self.len();
        if sample >= samples {
            let fault = SampleFault::OutOfRange { samples };
            let path = self.source.location.clone().into();
            return Err(Error::Sample { path, sample, offset: 0, fault });
        }
        let index = self.index_of(sample);
        let (number, local) = (self.numbers[index], sample - self.starts[index]);
        let shard = match &self.shards {
            Shards::Local(shards) => shards[number].clone(),
            Shards::Remote(open) => open.get(number, || {
                Shard::open(self.set.local(number)?, &self.source, Some(&self.input_type))
            })?,
        };
        Ok((shard, local))
    }

    fn index_of(&self, sample: u64) -> usize {
        self.starts.partition_point(|start| *start <= sample) - 1
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset")
            .field("source", &self.source)
            .field("shards", &self.set.len())
            .field("samples", &self.len())
            .finish_non_exhaustive()
    }
}

/// One file of a data set.
pub(crate) struct Shard {
    pub(crate) beton: Beton,
    pub(crate) inputs: InputColumn,
    labels: LabelColumn,
    /// Keeps a copy of a remote shard where it is.
    _lease: Lease,
}

/// The field that the model sees.
pub(crate) enum InputColumn {
    Images(ImageColumn),
    Arrays(ArrayColumn),
}

/// Where a sample's input lies.
pub(crate) enum InputPlace<'a> {
    Image(ImagePlace),
    Array(&'a ArrayColumn),
}

impl Shard {
    fn open(lease: Lease, source: &Source, expected: Option<&InputType>) -> Result<Self, Error> {
        let beton = Beton::open(&*lease)?;
        let labels = LabelColumn::find(&beton, source)?;
        let name = &source.input_field;
        let kind = beton.fields().iter().find(|field| field.name == *name).map(|field| field.kind);
        let inputs = match kind {
            Some(FieldType::NdArray | FieldType::TorchTensor) => {
                InputColumn::Arrays(beton.array_column(name)?)
            }
            // The usual case, whose errors are the ones to tell.
            _ => InputColumn::Images(beton.image_column(name)?),
        };
        let shard = Self { beton, inputs, labels, _lease: lease };
        if let Some(expected) = expected {
            shard.check_input_type(expected, source)?;
        }
        if source.on_bad_sample == OnBadSample::Fail {
            shard.check_rows(name)?;
        }
        shard.labels.check(&shard.beton, source)?;
        Ok(shard)
    }

    fn input_type(&self) -> InputType {
        match &self.inputs {
            InputColumn::Images(_) => InputType::Image,
            InputColumn::Arrays(column) => InputType::Array(column.array_type().shape.clone()),
        }
    }

    fn check_input_type(&self, expected: &InputType, source: &Source) -> Result<(), Error> {
        if self.input_type() == *expected {
            return Ok(());
        }
        let fault = FileFault::OtherInput { name: source.input_field.clone() };
        Err(Error::File { path: self.beton.path().to_owned(), fault })
    }

    fn check_rows(&self, input_field: &str) -> Result<(), Error> {
        match &self.inputs {
            InputColumn::Images(images) => self.beton.check_images(images),
            InputColumn::Arrays(_) => {
                let wanted = [FieldType::NdArray, FieldType::TorchTensor];
                let field = self.beton.field(input_field, &wanted)?;
                self.beton.check_values(field)
            }
        }
    }

    /// The class of a sample; 0 where labels are values.
    pub(crate) fn label(&self, sample: u64) -> Result<i64, Error> {
        self.labels.class(&self.beton, sample)
    }

    /// Puts the values that are a sample's label into `targets`; none where labels are classes. `buffer`
    /// is scratch memory.
    pub(crate) fn read_targets(
        &self,
        sample: u64,
        buffer: &mut Vec<u8>,
        targets: &mut Vec<f32>,
    ) -> Result<(), Error> {
        self.labels.read_targets(&self.beton, sample, buffer, targets)
    }

    pub(crate) fn place(&self, sample: u64) -> Result<InputPlace<'_>, Error> {
        match &self.inputs {
            InputColumn::Images(images) => {
                self.beton.image_place(images, sample).map(InputPlace::Image)
            }
            InputColumn::Arrays(arrays) => Ok(InputPlace::Array(arrays)),
        }
    }

    /// Tells the system that a sample will be read soon.
    pub(crate) fn read_ahead(&self, sample: u64) {
        let place = match &self.inputs {
            InputColumn::Images(images) => {
                self.beton.image_place(images, sample).map(|place| (place.start, place.len))
            }
            InputColumn::Arrays(arrays) => self.beton.array_place(arrays, sample),
        };
        if let Ok((start, len)) = place {
            self.beton.read_ahead(start, len);
        }
    }
}
