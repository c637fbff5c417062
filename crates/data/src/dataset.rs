//! Images with a class each: what training sees of a file.

use std::{fmt, path::Path};

use crate::{
    Beton, Error, SampleFault,
    beton::{ImageBytes, ImageColumn, IntColumn},
};

/// A beton file seen as labelled images. Opening it checks every row, so that a damaged file is
/// refused before training instead of hours into it.
pub struct Dataset {
    beton: Beton,
    images: ImageColumn,
    labels: IntColumn,
}

impl Dataset {
    /// Opens a file by the names of its RGB image field and its Int label field.
    ///
    /// # Errors
    /// As [`Beton::open`] and [`Beton::image_column`]; or there is no such label field.
    pub fn open(
        path: impl AsRef<Path>,
        image_field: &str,
        label_field: &str,
    ) -> Result<Self, Error> {
        let beton = Beton::open(path)?;
        let labels = beton.int_column(label_field)?;
        let images = beton.image_column(image_field)?;
        Ok(Self { beton, images, labels })
    }

    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.beton.len()
    }

    /// Whether there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.beton.is_empty()
    }

    /// The class of a sample.
    ///
    /// # Errors
    /// There is no such sample.
    pub fn label(&self, sample: u64) -> Result<i64, Error> {
        self.beton.int(&self.labels, sample)
    }

    /// The image of a sample, as stored.
    ///
    /// # Errors
    /// There is no such sample.
    pub fn image(&self, sample: u64) -> Result<ImageBytes<'_>, Error> {
        self.beton.image(&self.images, sample)
    }

    /// Makes sure that a model with `num_classes` outputs can learn every label.
    ///
    /// # Errors
    /// The first sample whose label is not in `0..num_classes`.
    pub fn check_labels(&self, num_classes: u32) -> Result<(), Error> {
        for sample in 0..self.len() {
            let label = self.label(sample)?;
            if !(0..i64::from(num_classes)).contains(&label) {
                return Err(self.sample_error(sample, SampleFault::Label { label, num_classes }));
            }
        }
        Ok(())
    }

    pub(crate) fn sample_error(&self, sample: u64, fault: SampleFault) -> Error {
        self.beton.sample_error(sample, fault)
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset")
            .field("path", &self.beton.path())
            .field("samples", &self.len())
            .finish_non_exhaustive()
    }
}
