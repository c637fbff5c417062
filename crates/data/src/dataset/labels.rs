//! What a model is to tell of a sample: its class, or values.

use baton_recipe::spec::OnBadSample;

use super::Source;
use crate::{
    Beton, Error, FileFault, SampleFault,
    beton::{ArrayColumn, FieldType, FloatColumn, IntColumn},
};

/// What the labels of a data set are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Labels {
    /// Whole numbers of an Int field, whatever they mean.
    Ints,
    /// Classes: whole numbers of an Int field, below this one and not negative.
    Classes(u32),
    /// The targets of a regression, so many per sample, finite as f32: of an Int or Float field if it is
    /// one, or of an array or tensor field with so many elements in any shape.
    Values(u32),
}

impl Labels {
    /// Targets per sample; 0 where labels are whole numbers.
    #[must_use]
    pub fn targets(self) -> usize {
        match self {
            Self::Ints | Self::Classes(_) => 0,
            Self::Values(outputs) => outputs as usize,
        }
    }
}

/// The label field of a file.
pub(super) enum LabelColumn {
    /// Classes.
    Classes(IntColumn),
    /// Targets, one per sample.
    Int(IntColumn),
    /// Targets, one per sample.
    Float(FloatColumn),
    /// Targets.
    Array(ArrayColumn),
}

/// Types of fields that hold targets.
const TARGETS: [FieldType; 4] =
    [FieldType::Float, FieldType::Int, FieldType::NdArray, FieldType::TorchTensor];

impl LabelColumn {
    /// Finds it.
    pub(super) fn find(beton: &Beton, source: &Source) -> Result<Self, Error> {
        let name = &source.label_field;
        match source.labels {
            Labels::Ints => Ok(Self::Classes(beton.int_column(name)?)),
            Labels::Classes(_) => classes(beton, name),
            Labels::Values(outputs) => targets(beton, name, outputs),
        }
    }

    /// Checks every label, where bad samples are to be told at once.
    pub(super) fn check(&self, beton: &Beton, source: &Source) -> Result<(), Error> {
        match source.labels {
            Labels::Ints => Ok(()),
            Labels::Classes(num_classes) => self.check_classes(beton, num_classes),
            Labels::Values(_) if source.on_bad_sample == OnBadSample::Skip => Ok(()),
            Labels::Values(_) => self.check_targets(beton, &source.label_field),
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

    /// Targets in the pages are not read, as that would read the whole file: their turn comes.
    fn check_targets(&self, beton: &Beton, name: &str) -> Result<(), Error> {
        match self {
            Self::Classes(_) | Self::Int(_) => Ok(()),
            Self::Float(column) => {
                (0..beton.len()).try_for_each(|sample| beton.float_as_f32(column, sample).map(drop))
            }
            Self::Array(_) => beton.check_values(beton.field(name, &TARGETS)?),
        }
    }

    /// The class of a sample; 0 where labels are values.
    pub(super) fn class(&self, beton: &Beton, sample: u64) -> Result<i64, Error> {
        match self {
            Self::Classes(column) => beton.int(column, sample),
            Self::Int(_) | Self::Float(_) | Self::Array(_) => Ok(0),
        }
    }

    /// Puts the targets of a sample into `targets`, none where labels are classes. `buffer` is scratch
    /// memory.
    pub(super) fn read_targets(
        &self,
        beton: &Beton,
        sample: u64,
        buffer: &mut Vec<u8>,
        targets: &mut Vec<f32>,
    ) -> Result<(), Error> {
        targets.clear();
        match self {
            Self::Classes(_) => {}
            Self::Int(column) => targets.push(beton.int(column, sample)? as f32),
            Self::Float(column) => targets.push(beton.float_as_f32(column, sample)?),
            Self::Array(column) => beton.array_as_f32(column, sample, buffer, targets)?,
        }
        Ok(())
    }
}

fn classes(beton: &Beton, name: &str) -> Result<LabelColumn, Error> {
    // Whoever has values where classes are needed may have meant a regression.
    let field = beton.fields().iter().find(|field| field.name == name);
    match field.map(|field| field.kind) {
        Some(found) if found != FieldType::Int && TARGETS.contains(&found) => {
            Err(beton.file_error(FileFault::NoClasses { name: name.to_owned(), found }))
        }
        _ => Ok(LabelColumn::Classes(beton.int_column(name)?)),
    }
}

fn targets(beton: &Beton, name: &str, outputs: u32) -> Result<LabelColumn, Error> {
    let (column, found) = match beton.field(name, &TARGETS)?.kind {
        FieldType::Int => (LabelColumn::Int(beton.int_column(name)?), 1),
        FieldType::Float => (LabelColumn::Float(beton.float_column(name)?), 1),
        _ => {
            let column = beton.array_column(name)?;
            let elements = column.array_type().elements();
            (LabelColumn::Array(column), elements)
        }
    };
    if found == u64::from(outputs) {
        return Ok(column);
    }
    Err(beton.file_error(FileFault::Outputs { name: name.to_owned(), found, outputs }))
}
