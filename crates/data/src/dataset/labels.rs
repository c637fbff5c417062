//! Labels of samples: a class, or target values.

use baton_recipe::{
    JobSpec,
    spec::{LossKind, OnBadSample},
};

use super::Source;
use crate::{
    Beton, Error, FileFault, SampleFault,
    beton::{ArrayColumn, FieldType, FloatColumn, IntColumn},
};

/// Type of the labels of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Labels {
    /// Any integers of an Int field.
    Ints,
    /// Classes: integers of an Int field, from 0 to below this number.
    Classes(u32),
    /// Targets of a regression, this many per sample, finite as f32. A single target may be in an Int or Float field;
    /// otherwise an array or tensor field with that number of elements is needed.
    Values(u32),
    /// A label for each token of a text.
    Tokens,
    /// None are read, for data without labels; the class of every sample is 0.
    Absent,
}

impl Labels {
    /// The labels that the loss of a recipe takes.
    #[must_use]
    pub fn of_recipe(spec: &JobSpec) -> Self {
        let outputs = spec.model.num_classes;
        match spec.loss.kind {
            LossKind::CrossEntropy | LossKind::BinaryCrossEntropy => Self::Classes(outputs),
            LossKind::NextToken => Self::Tokens,
            LossKind::Mse | LossKind::Huber | LossKind::Quantile | LossKind::Program => {
                Self::Values(outputs)
            }
        }
    }

    /// Number of targets per sample; 0 if the labels are integers.
    #[must_use]
    pub fn targets(self) -> usize {
        match self {
            Self::Ints | Self::Classes(_) | Self::Tokens | Self::Absent => 0,
            Self::Values(outputs) => outputs as usize,
        }
    }
}

/// The label field of a file.
pub(crate) enum LabelColumn {
    /// Classes, or any integers.
    Classes(IntColumn),
    /// Targets.
    Values(ValueColumn),
    /// They are not read here: there are none, or they are read with the tokens.
    Elsewhere,
}

/// A field whose values become f32.
pub(crate) enum ValueColumn {
    /// One integer per sample.
    Int(IntColumn),
    /// One floating-point number per sample.
    Float(FloatColumn),
    /// An array per sample.
    Array(ArrayColumn),
}

/// Types of fields whose values can become f32.
const VALUES: [FieldType; 4] =
    [FieldType::Float, FieldType::Int, FieldType::NdArray, FieldType::TorchTensor];

impl LabelColumn {
    /// Finds the label field.
    pub(super) fn find(beton: &Beton, source: &Source) -> Result<Self, Error> {
        let name = &source.label_field;
        match source.labels {
            Labels::Ints => Ok(Self::Classes(beton.int_column(name)?)),
            Labels::Classes(_) => classes(beton, name),
            Labels::Values(outputs) => targets(beton, name, outputs),
            Labels::Tokens | Labels::Absent => Ok(Self::Elsewhere),
        }
    }

    /// Checks every label, unless bad samples are skipped during training.
    pub(super) fn check(&self, beton: &Beton, source: &Source) -> Result<(), Error> {
        match source.labels {
            Labels::Ints | Labels::Tokens | Labels::Absent => Ok(()),
            Labels::Classes(num_classes) => self.check_classes(beton, num_classes),
            Labels::Values(_) if source.on_bad_sample == OnBadSample::Skip => Ok(()),
            Labels::Values(_) => match self {
                Self::Classes(_) | Self::Elsewhere => Ok(()),
                Self::Values(column) => column.check(beton, &source.label_field),
            },
        }
    }

    fn check_classes(&self, beton: &Beton, num_classes: u32) -> Result<(), Error> {
        for sample in 0..beton.len() {
            let label = self.class(beton, sample)?;
            if !(0..i64::from(num_classes)).contains(&label) {
                let fault = SampleFault::Label { label, num_classes };
                return Err(beton.sample_error(sample, 0, fault));
            }
        }
        Ok(())
    }

    /// The class of a sample; 0 for a regression.
    pub(crate) fn class(&self, beton: &Beton, sample: u64) -> Result<i64, Error> {
        match self {
            Self::Classes(column) => beton.int(column, sample),
            Self::Values(_) | Self::Elsewhere => Ok(0),
        }
    }

    /// Reads the targets of a sample into `targets`; none for a classification. `buffer` is scratch memory.
    pub(crate) fn read_targets(
        &self,
        beton: &Beton,
        sample: u64,
        buffer: &mut Vec<u8>,
        targets: &mut Vec<f32>,
    ) -> Result<(), Error> {
        match self {
            Self::Classes(_) | Self::Elsewhere => {
                targets.clear();
                Ok(())
            }
            Self::Values(column) => column.read(beton, sample, buffer, targets),
        }
    }
}

impl ValueColumn {
    /// Finds the field.
    pub(super) fn find(beton: &Beton, name: &str) -> Result<Self, Error> {
        Ok(match beton.field(name, &VALUES)?.kind {
            FieldType::Int => Self::Int(beton.int_column(name)?),
            FieldType::Float => Self::Float(beton.float_column(name)?),
            _ => Self::Array(beton.array_column(name)?),
        })
    }

    /// Values per sample.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Int(_) | Self::Float(_) => 1,
            Self::Array(column) => column.array_type().elements(),
        }
    }

    /// Checks the values of all samples. Those in the pages are not read here, because that would read the whole file;
    /// they are checked when they are used.
    pub(super) fn check(&self, beton: &Beton, name: &str) -> Result<(), Error> {
        match self {
            Self::Int(_) => Ok(()),
            Self::Float(column) => {
                (0..beton.len()).try_for_each(|sample| beton.float_as_f32(column, sample).map(drop))
            }
            Self::Array(_) => beton.check_values(beton.field(name, &VALUES)?),
        }
    }

    /// Reads the values of a sample. `buffer` is scratch memory.
    pub(crate) fn read(
        &self,
        beton: &Beton,
        sample: u64,
        buffer: &mut Vec<u8>,
        values: &mut Vec<f32>,
    ) -> Result<(), Error> {
        values.clear();
        match self {
            Self::Int(column) => values.push(beton.int(column, sample)? as f32),
            Self::Float(column) => values.push(beton.float_as_f32(column, sample)?),
            Self::Array(column) => beton.array_as_f32(column, sample, buffer, values)?,
        }
        Ok(())
    }
}

fn classes(beton: &Beton, name: &str) -> Result<LabelColumn, Error> {
    // If the field has values instead of classes, the user may have meant a regression.
    let field = beton.fields().iter().find(|field| field.name == name);
    match field.map(|field| field.kind) {
        Some(found) if found != FieldType::Int && VALUES.contains(&found) => {
            Err(beton.file_error(FileFault::NoClasses { name: name.to_owned(), found }))
        }
        _ => Ok(LabelColumn::Classes(beton.int_column(name)?)),
    }
}

fn targets(beton: &Beton, name: &str, outputs: u32) -> Result<LabelColumn, Error> {
    let column = ValueColumn::find(beton, name)?;
    match column.len() {
        found if found == u64::from(outputs) => Ok(LabelColumn::Values(column)),
        found => {
            Err(beton.file_error(FileFault::Outputs { name: name.to_owned(), found, outputs }))
        }
    }
}
