//! Inputs with a class each: what training sees of one file or many.

use std::{fmt, path::Path, sync::Arc};

use baton_job::spec::{Data, OnBadSample};

use crate::{
    Beton, Error, Layout, SampleFault,
    beton::{ArrayColumn, FieldType, ImageColumn, ImagePlace, IntColumn},
};

/// Where a data set lies, and how it is to be seen.
#[derive(Clone, Debug)]
pub struct Source {
    /// A file.
    pub location: String,
    /// Name of the field that the model sees: images, arrays or tensors.
    pub input_field: String,
    /// Name of the Int field with the classes.
    pub label_field: String,
    /// What becomes of samples that cannot be used.
    pub on_bad_sample: OnBadSample,
}

impl Source {
    /// A data set of a recipe.
    #[must_use]
    pub fn of_recipe(data: &Data, location: &str) -> Self {
        Self {
            location: location.to_owned(),
            input_field: data.input_field.clone(),
            label_field: data.label_field.clone(),
            on_bad_sample: data.on_bad_sample,
        }
    }

    /// The fields `image` and `label`, no bad samples tolerated.
    #[must_use]
    pub fn new(location: impl Into<String>) -> Self {
        Self {
            location: location.into(),
            input_field: "image".to_owned(),
            label_field: "label".to_owned(),
            on_bad_sample: OnBadSample::Fail,
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

/// One or more beton files seen as labelled inputs. Opening a local file checks every row, so that a
/// damaged one is refused before training instead of hours into it.
pub struct Dataset {
    source: Source,
    shards: Vec<Arc<Shard>>,
    /// The first sample of each shard, and behind them the number of all.
    starts: Vec<u64>,
    input_type: InputType,
}

impl Dataset {
    /// Opens a data set.
    ///
    /// # Errors
    /// As [`Beton::open`] and [`Beton::image_column`]; there is no such input or label field, or the
    /// shards differ in what their inputs are.
    pub fn open(source: Source) -> Result<Self, Error> {
        let shard = Shard::open(source.location.as_ref(), &source)?;
        let input_type = shard.input_type();
        let starts = vec![0, shard.beton.len()];
        Ok(Self { source, shards: vec![Arc::new(shard)], starts, input_type })
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

    /// Which samples lie together: pages of one file, or many files.
    ///
    /// # Errors
    /// The allocation table cannot be read.
    pub fn layout(&self) -> Result<Layout, Error> {
        match self.shards.as_slice() {
            [only] => Layout::of_pages(&only.beton),
            shards => {
                Ok(Layout::of_files(&shards.iter().map(|s| s.beton.len()).collect::<Vec<_>>()))
            }
        }
    }

    /// What becomes of samples that cannot be used.
    #[must_use]
    pub fn on_bad_sample(&self) -> OnBadSample {
        self.source.on_bad_sample
    }

    /// The class of a sample.
    ///
    /// # Errors
    /// There is no such sample, or its shard cannot be had.
    pub fn label(&self, sample: u64) -> Result<i64, Error> {
        let (shard, local) = self.find(sample)?;
        shard.beton.int(&shard.labels, local)
    }

    /// Makes sure that a model with `num_classes` outputs can learn every label.
    ///
    /// # Errors
    /// The first sample whose label is not in `0..num_classes`.
    pub fn check_labels(&self, num_classes: u32) -> Result<(), Error> {
        self.shards.iter().try_for_each(|shard| shard.check_labels(num_classes))
    }

    /// Makes the system forget what it holds of the files in memory.
    pub(crate) fn forget(&self) {
        self.shards.iter().for_each(|shard| shard.beton.forget());
    }

    /// The shard that holds a sample, and the sample's position in it.
    pub(crate) fn find(&self, sample: u64) -> Result<(Arc<Shard>, u64), Error> {
        let samples = self.len();
        if sample >= samples {
            let fault = SampleFault::OutOfRange { samples };
            let path = self.source.location.clone().into();
            return Err(Error::Sample { path, sample, offset: 0, fault });
        }
        let index = self.starts.partition_point(|start| *start <= sample) - 1;
        Ok((self.shards[index].clone(), sample - self.starts[index]))
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset")
            .field("source", &self.source)
            .field("shards", &self.shards.len())
            .field("samples", &self.len())
            .finish_non_exhaustive()
    }
}

/// One file of a data set.
pub(crate) struct Shard {
    pub(crate) beton: Beton,
    pub(crate) inputs: InputColumn,
    labels: IntColumn,
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
    fn open(path: &Path, source: &Source) -> Result<Self, Error> {
        let beton = Beton::open(path)?;
        let labels = beton.int_column(&source.label_field)?;
        let name = &source.input_field;
        let kind = beton.fields().iter().find(|field| field.name == *name).map(|field| field.kind);
        let inputs = match kind {
            Some(FieldType::NdArray | FieldType::TorchTensor) => {
                InputColumn::Arrays(beton.array_column(name)?)
            }
            // The usual case, whose errors are the ones to tell.
            _ => InputColumn::Images(beton.image_column(name)?),
        };
        if source.on_bad_sample == OnBadSample::Fail {
            match &inputs {
                InputColumn::Images(images) => beton.check_images(images)?,
                InputColumn::Arrays(_) => {
                    let field = beton.fields().iter().find(|field| field.name == *name);
                    let faults = field.map_or(Ok(Vec::new()), |field| beton.value_faults(field))?;
                    faults.into_iter().next().map_or(Ok(()), Err)?;
                }
            }
        }
        Ok(Self { beton, inputs, labels })
    }

    fn input_type(&self) -> InputType {
        match &self.inputs {
            InputColumn::Images(_) => InputType::Image,
            InputColumn::Arrays(column) => InputType::Array(column.array_type().shape.clone()),
        }
    }

    fn check_labels(&self, num_classes: u32) -> Result<(), Error> {
        for sample in 0..self.beton.len() {
            let label = self.label(sample)?;
            if !(0..i64::from(num_classes)).contains(&label) {
                let fault = SampleFault::Label { label, num_classes };
                return Err(self.beton.sample_error(sample, 0, fault));
            }
        }
        Ok(())
    }

    pub(crate) fn label(&self, sample: u64) -> Result<i64, Error> {
        self.beton.int(&self.labels, sample)
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
