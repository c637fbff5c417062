//! A data set: labelled inputs from one file or many.

mod labels;
mod open_shards;
mod summary;
mod tokens;

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use baton_recipe::{JobSpec, spec::OnBadSample};

pub use self::{
    labels::Labels,
    tokens::{
        LABELS_FIELD, LARGEST_FIELD, NO_LABEL, PREDICTED_FIELD, TOKENS_FIELD, TextColumn, TextSize,
    },
};
use self::{
    labels::{LabelColumn, ValueColumn},
    open_shards::OpenShards,
};
use crate::{
    Beton, EpochOrder, Error, FileFault, SampleBlocks, SampleFault,
    beton::{ArrayColumn, FieldType, ImageColumn, ImageLocation},
    shards::{self, Lease, ShardSet},
};

/// Location of a data set and how to read it.
#[derive(Clone, Debug)]
pub struct Source {
    /// A file, a folder, a pattern, or one of these in an object store: see [`ShardSet::open`].
    pub location: String,
    /// Name of the field with the model's inputs: images, arrays or tensors.
    pub input_field: String,
    /// Names of further fields that the model takes as inputs; their values become f32.
    pub extra_fields: Vec<String>,
    /// Name of the field with the labels.
    pub label_field: String,
    /// Type of the labels.
    pub labels: Labels,
    /// Number of token ids of the model that reads texts; not checked if absent.
    pub vocabulary: Option<u64>,
    /// What to do with bad samples.
    pub on_bad_sample: OnBadSample,
    /// Folder for copies of remote shards.
    pub cache_dir: PathBuf,
    /// Maximum size of the folder, bytes.
    pub cache_bytes: u64,
    /// How long a sample waits for space in the folder.
    pub room_timeout: Duration,
    /// Number of ranks on this node, which share the folder.
    pub local_ranks: u32,
}

/// Default size limit of the cache, bytes.
const DEFAULT_CACHE_BYTES: u64 = 100 << 30;

impl Source {
    /// The fields `image` and `label`, with any integers as labels; bad samples are errors; copies of remote shards
    /// are stored in the system's folder for temporary files.
    #[must_use]
    pub fn new(location: impl Into<String>) -> Self {
        Self {
            location: location.into(),
            input_field: "image".to_owned(),
            extra_fields: Vec::new(),
            label_field: "label".to_owned(),
            labels: Labels::Ints,
            vocabulary: None,
            on_bad_sample: OnBadSample::Fail,
            cache_dir: std::env::temp_dir().join("baton-cache"),
            cache_bytes: DEFAULT_CACHE_BYTES,
            room_timeout: shards::MAX_ROOM_TIMEOUT,
            local_ranks: 1,
        }
    }

    /// A data set with the settings of a recipe: `location` is the training set, the validation set, or another
    /// one with the same fields. Copies of remote shards are stored in `cache_dir` if the recipe names no folder.
    #[must_use]
    pub fn of_recipe(spec: &JobSpec, location: &str, cache_dir: PathBuf) -> Self {
        let data = &spec.data;
        let recipe_dir = (!data.cache_dir.is_empty()).then(|| PathBuf::from(&data.cache_dir));
        let field = |name: &String, of_texts: &str| match spec.model.arch.is_causal_lm() {
            true => of_texts.to_owned(),
            false => name.clone(),
        };
        Self {
            location: location.to_owned(),
            input_field: field(&data.input_field, TOKENS_FIELD),
            extra_fields: data.extra_fields.clone(),
            label_field: field(&data.label_field, LABELS_FIELD),
            labels: Labels::of_recipe(spec),
            vocabulary: None,
            on_bad_sample: data.on_bad_sample,
            cache_dir: recipe_dir.unwrap_or(cache_dir),
            cache_bytes: (data.cache_gib * f64::from(1 << 30)) as u64,
            room_timeout: room_timeout(spec.cluster.hang_seconds),
            local_ranks: 1,
        }
    }
}

/// Long enough for another rank to finish with a shard, and so short that a rank says why it waits before it is killed, after
/// four times `hang_seconds` in its loader.
fn room_timeout(hang_seconds: f64) -> Duration {
    match hang_seconds > 0.0 {
        true => Duration::from_secs_f64(3.0 * hang_seconds).min(shards::MAX_ROOM_TIMEOUT),
        false => shards::MAX_ROOM_TIMEOUT,
    }
}

/// Type of a data set's inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputType {
    /// An RGB image of any size.
    Image,
    /// An array of this shape, converted to f32.
    Array(Vec<u64>),
    /// A text of any length.
    Tokens,
}

/// The samples of one or more beton files, one file after the other.
///
/// Opening a local file checks every row and label, so that a damaged file is refused before training, not hours
/// later. Remote shards are checked once they have been fetched.
pub struct Dataset {
    source: Source,
    set: ShardSet,
    /// Numbers in `set` of the shards that have samples.
    numbers: Vec<usize>,
    /// The first sample of each of those shards, followed by the number of all samples.
    starts: Vec<u64>,
    input_type: InputType,
    /// Values per sample of each extra field.
    extra_lens: Vec<u64>,
    shards: Shards,
}

enum Shards {
    /// All shards are open.
    Local(Vec<Arc<Shard>>),
    /// The shards used most recently are open.
    Remote(OpenShards),
}

impl Dataset {
    /// Opens a data set. If the shards are remote, it reads their headers and fetches the first one.
    ///
    /// # Errors
    /// As [`ShardSet::open`], [`Beton::open`] and [`Beton::image_column`]; an input or label field is missing, a
    /// label does not match [`Source::labels`], or the shards have inputs of different types.
    pub fn open(source: Source) -> Result<Self, Error> {
        let options = shards::Options {
            room_timeout: source.room_timeout,
            ..shards::Options::new(&source.cache_dir, source.cache_bytes)
        };
        Self::open_with(source, &options)
    }

    /// Like [`open`](Self::open), with options for remote shards.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(source: Source, options: &shards::Options) -> Result<Self, Error> {
        let set = ShardSet::open(&source.location, options)?;
        let shard = |number: usize| Shard::open(set.local(number)?, &source, None);
        let (samples, first, shards) = if set.is_remote() {
            let samples = set.samples()?;
            let number = samples.iter().position(|samples| *samples > 0).unwrap_or_default();
            let shards =
                OpenShards::new(source.cache_bytes, source.local_ranks, set.largest_copy());
            (samples, Arc::new(shard(number)?), Shards::Remote(shards))
        } else {
            let shards = (0..set.len()).map(|number| shard(number).map(Arc::new));
            let shards: Vec<_> = shards.collect::<Result<_, Error>>()?;
            let samples = shards.iter().map(|shard| shard.beton.len()).collect();
            let Some(first) = shards.first().cloned() else {
                // Cannot happen: a shard set is never empty.
                return Err(Error::OutOfRange { shard: 0, shards: 0 });
            };
            (samples, first, Shards::Local(shards))
        };
        if let Shards::Local(shards) = &shards {
            shards.iter().try_for_each(|shard| {
                shard.check_inputs(&first.input_type(), &first.extra_lens(), &source)
            })?;
        }
        let numbers: Vec<usize> =
            (0..samples.len()).filter(|number| samples[*number] > 0).collect();
        let mut starts = vec![0];
        let mut end = 0_u64;
        for number in &numbers {
            end = end.saturating_add(samples[*number]);
            starts.push(end);
        }
        let (input_type, extra_lens) = (first.input_type(), first.extra_lens());
        Ok(Self { source, set, numbers, starts, input_type, extra_lens, shards })
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

    /// Type of the inputs.
    #[must_use]
    pub fn input_type(&self) -> &InputType {
        &self.input_type
    }

    /// Values per sample of each of [`Source::extra_fields`].
    #[must_use]
    pub fn extra_lens(&self) -> &[u64] {
        &self.extra_lens
    }

    /// Blocks of samples that are stored together: the pages of a single file, or one block per file.
    ///
    /// # Errors
    /// The allocation table cannot be read.
    pub fn sample_blocks(&self) -> Result<SampleBlocks, Error> {
        match &self.shards {
            Shards::Local(shards) if shards.len() == 1 => SampleBlocks::of_pages(&shards[0].beton),
            Shards::Local(_) | Shards::Remote(_) => {
                let samples = self.starts.windows(2).map(|pair| pair[1] - pair[0]);
                Ok(SampleBlocks::of_files(&samples.collect::<Vec<_>>()))
            }
        }
    }

    /// Type of the labels.
    #[must_use]
    pub fn labels(&self) -> Labels {
        self.source.labels
    }

    /// What to do with bad samples.
    #[must_use]
    pub fn on_bad_sample(&self) -> OnBadSample {
        self.source.on_bad_sample
    }

    /// The class of a sample; 0 for a regression.
    ///
    /// # Errors
    /// There is no such sample, or its shard cannot be fetched.
    pub fn label(&self, sample: u64) -> Result<i64, Error> {
        let (shard, local) = self.find(sample)?;
        shard.labels.class(&shard.beton, local)
    }

    /// The target values of a sample; empty for a classification.
    ///
    /// # Errors
    /// There is no such sample, its shard cannot be fetched, or a value is not finite as f32 or cannot be read.
    pub fn targets(&self, sample: u64) -> Result<Vec<f32>, Error> {
        let (shard, local) = self.find(sample)?;
        let mut targets = Vec::new();
        shard.labels.read_targets(&shard.beton, local, &mut Vec::new(), &mut targets)?;
        Ok(targets)
    }

    /// Sizes of all texts; empty if the samples are not texts. Remote shards are fetched for it.
    ///
    /// # Errors
    /// A shard cannot be fetched.
    pub fn text_sizes(&self) -> Result<Vec<TextSize>, Error> {
        if self.input_type != InputType::Tokens {
            return Ok(Vec::new());
        }
        let size = |sample| {
            let (shard, local) = self.find(sample)?;
            match &shard.inputs {
                InputColumn::Tokens(column) => column.size(&shard.beton, local).map(Some),
                _ => Ok(None),
            }
        };
        (0..self.len()).filter_map(|sample| size(sample).transpose()).collect()
    }

    /// Sets the order in which samples will be needed: those of `order` from `position` on, then those of `next`.
    /// Remote shards are prefetched in this order.
    pub fn plan_prefetch(&self, order: &EpochOrder, position: u64, next: Option<&EpochOrder>) {
        if !self.set.is_remote() {
            return;
        }
        let mut needed = self.shards_of(order, position);
        needed.extend(next.map_or(Vec::new(), |next| self.shards_of(next, 0)));
        self.set.plan_prefetch(needed);
    }

    /// The shards of the samples from `position` on, in the order of their first use.
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

    /// Asks the system to drop local files from the page cache. Best effort.
    pub(crate) fn drop_page_cache(&self) {
        if let Shards::Local(shards) = &self.shards {
            shards.iter().for_each(|shard| shard.beton.drop_page_cache());
        }
    }

    /// The shard of a sample, and the sample's position in it. Blocks until a remote shard has been fetched.
    pub(crate) fn find(&self, sample: u64) -> Result<(Arc<Shard>, u64), Error> {
        let samples = self.len();
        if sample >= samples {
            let fault = SampleFault::OutOfRange { samples };
            let path = self.source.location.clone().into();
            return Err(Error::Sample { path, sample, offset: 0, fault });
        }
        let (number, local) = self.place_of(sample);
        let shard = match &self.shards {
            Shards::Local(shards) => shards[number].clone(),
            Shards::Remote(open) => open.get(number, |close_oldest| {
                let expected = Some((&self.input_type, self.extra_lens.as_slice()));
                let lease = self.set.local_releasing(number, close_oldest)?;
                Shard::open(lease, &self.source, expected)
            })?,
        };
        Ok((shard, local))
    }

    /// As [`find`](Self::find), without waiting: `None` if the shard is not open.
    pub(crate) fn find_open(&self, sample: u64) -> Option<(Arc<Shard>, u64)> {
        if sample >= self.len() {
            return None;
        }
        let (number, local) = self.place_of(sample);
        let shard = match &self.shards {
            Shards::Local(shards) => shards[number].clone(),
            Shards::Remote(open) => open.find(number)?,
        };
        Some((shard, local))
    }

    /// The number of a sample's shard, and its position in it.
    fn place_of(&self, sample: u64) -> (usize, u64) {
        let index = self.index_of(sample);
        (self.numbers[index], sample - self.starts[index])
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
    /// The extra fields.
    pub(crate) extras: Vec<ValueColumn>,
    pub(crate) labels: LabelColumn,
    /// Prevents the eviction of a remote shard's copy.
    _lease: Lease,
}

/// The field with the model's inputs.
pub(crate) enum InputColumn {
    Images(ImageColumn),
    Arrays(ArrayColumn),
    Tokens(TextColumn),
}

/// Position of a sample's input.
pub(crate) enum InputLocation<'a> {
    Image(ImageLocation),
    Array(&'a ArrayColumn),
    Tokens(&'a TextColumn),
}

impl Shard {
    fn open(
        lease: Lease,
        source: &Source,
        expected: Option<(&InputType, &[u64])>,
    ) -> Result<Self, Error> {
        let beton = Beton::open(&*lease)?;
        let labels = LabelColumn::find(&beton, source)?;
        let name = &source.input_field;
        let kind = beton.fields().iter().find(|field| field.name == *name).map(|field| field.kind);
        let inputs = match kind {
            Some(FieldType::NdArray | FieldType::TorchTensor) => {
                InputColumn::Arrays(beton.array_column(name)?)
            }
            _ if source.labels == Labels::Tokens => InputColumn::Tokens(TextColumn::find(&beton)?),
            // Images are the default: for other fields, report the error of an image field.
            _ => InputColumn::Images(beton.image_column(name)?),
        };
        let extras = source.extra_fields.iter().map(|name| ValueColumn::find(&beton, name));
        let extras = extras.collect::<Result<_, _>>()?;
        let shard = Self { beton, inputs, extras, labels, _lease: lease };
        if let Some((input_type, extra_lens)) = expected {
            shard.check_inputs(input_type, extra_lens, source)?;
        }
        if source.on_bad_sample == OnBadSample::Fail {
            shard.check_rows(source)?;
            let mut extras = shard.extras.iter().zip(&source.extra_fields);
            extras.try_for_each(|(column, name)| column.check(&shard.beton, name))?;
        }
        shard.labels.check(&shard.beton, source)?;
        Ok(shard)
    }

    fn input_type(&self) -> InputType {
        match &self.inputs {
            InputColumn::Images(_) => InputType::Image,
            InputColumn::Arrays(column) => InputType::Array(column.array_type().shape.clone()),
            InputColumn::Tokens(_) => InputType::Tokens,
        }
    }

    fn extra_lens(&self) -> Vec<u64> {
        self.extras.iter().map(ValueColumn::len).collect()
    }

    fn check_inputs(
        &self,
        input_type: &InputType,
        extra_lens: &[u64],
        source: &Source,
    ) -> Result<(), Error> {
        let mismatched = |name: &String| {
            let fault = FileFault::MismatchedInput { name: name.clone() };
            Err(Error::File { path: self.beton.path().to_owned(), fault })
        };
        if self.input_type() != *input_type {
            return mismatched(&source.input_field);
        }
        let lens = self.extra_lens();
        let differs = lens.iter().zip(extra_lens).position(|(len, expected)| len != expected);
        differs.map_or(Ok(()), |index| mismatched(&source.extra_fields[index]))
    }

    fn check_rows(&self, source: &Source) -> Result<(), Error> {
        match &self.inputs {
            InputColumn::Tokens(column) => column.check(&self.beton, source),
            InputColumn::Images(images) => self.beton.check_images(images),
            InputColumn::Arrays(_) => {
                let expected = [FieldType::NdArray, FieldType::TorchTensor];
                let field = self.beton.field(&source.input_field, &expected)?;
                self.beton.check_values(field)
            }
        }
    }

    pub(crate) fn location(&self, sample: u64) -> Result<InputLocation<'_>, Error> {
        match &self.inputs {
            InputColumn::Images(images) => {
                self.beton.image_location(images, sample).map(InputLocation::Image)
            }
            InputColumn::Arrays(arrays) => Ok(InputLocation::Array(arrays)),
            InputColumn::Tokens(tokens) => Ok(InputLocation::Tokens(tokens)),
        }
    }

    /// Asks the system to fetch a sample in the background.
    pub(crate) fn read_ahead(&self, sample: u64) {
        let location = match &self.inputs {
            InputColumn::Images(images) => self
                .beton
                .image_location(images, sample)
                .map(|location| (location.start, location.len)),
            InputColumn::Arrays(arrays) => self.beton.array_location(arrays, sample),
            // A text is small, and near the others of its page.
            InputColumn::Tokens(_) => return,
        };
        if let Ok((start, len)) = location {
            self.beton.read_ahead(start, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_says_that_the_cache_is_full_before_it_is_killed_for_loading_too_long() {
        for hang_seconds in [3.0, 60.0, 99.0, 100.0, 86_400.0] {
            let timeout = room_timeout(hang_seconds).as_secs_f64();
            assert!(timeout < 4.0 * hang_seconds && timeout <= 300.0, "{timeout}");
        }
        assert_eq!(room_timeout(0.0), shards::MAX_ROOM_TIMEOUT, "nobody is killed");
    }
}
