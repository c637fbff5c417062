//! The loader's output for training: one micro-batch.

use bytes::BytesMut;

/// A decoded micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The model's inputs.
    pub inputs: Inputs,
    /// Values of each of the extra fields, f32, shape (samples, values).
    pub extras: Vec<Vec<f32>>,
    /// Class of each sample; empty for a regression. For texts: label of each token.
    pub labels: Vec<i64>,
    /// Target values of a regression, shape (samples, outputs); empty for a classification.
    pub targets: Vec<f32>,
    /// Position of each sample in the data set.
    pub samples: Vec<u64>,
    /// Epoch of the batch.
    pub epoch: u32,
}

/// The model's inputs of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Inputs {
    /// Images.
    Images {
        /// Pixels, u8, shape (samples, resolution, resolution, 3), RGB.
        pixels: BytesMut,
        /// Side of the images in pixels.
        resolution: u32,
    },
    /// Arrays.
    Arrays {
        /// Elements, f32, shape (samples, …).
        values: Vec<f32>,
        /// Shape of one sample.
        shape: Vec<u64>,
    },
    /// Texts.
    Tokens {
        /// Token ids of all texts, one after the other.
        tokens: Vec<i64>,
        /// Number of tokens of each text.
        lengths: Vec<i64>,
    },
}

impl Default for Inputs {
    fn default() -> Self {
        Self::Images { pixels: BytesMut::new(), resolution: 0 }
    }
}

impl Batch {
    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Removes one sample.
    pub(crate) fn remove(&mut self, position: usize) {
        let samples = self.len();
        match &mut self.inputs {
            Inputs::Images { pixels, .. } => {
                let each = pixels.len() / samples;
                pixels.copy_within((position + 1) * each.., position * each);
                pixels.truncate((samples - 1) * each);
            }
            Inputs::Arrays { values, .. } => remove_share(values, position, samples),
            // Bad texts are never skipped.
            Inputs::Tokens { .. } => {}
        }
        self.extras.iter_mut().for_each(|values| remove_share(values, position, samples));
        remove_share(&mut self.labels, position, samples);
        remove_share(&mut self.targets, position, samples);
        self.samples.remove(position);
    }

    /// A batch of images with classes, in the first epoch: u8, shape (samples, resolution, resolution, 3), RGB;
    /// one label for each sample.
    #[must_use]
    pub fn of_images(pixels: &[u8], resolution: u32, labels: Vec<i64>, samples: Vec<u64>) -> Self {
        let inputs = Inputs::Images { pixels: BytesMut::from(pixels), resolution };
        Self { inputs, labels, samples, ..Self::default() }
    }

    /// Pixels and resolution of a batch of images; `None` for other batches.
    #[must_use]
    pub fn images(&self) -> Option<(&[u8], u32)> {
        match &self.inputs {
            Inputs::Images { pixels, resolution } => Some((pixels, *resolution)),
            Inputs::Arrays { .. } | Inputs::Tokens { .. } => None,
        }
    }
}

/// Removes the values of the sample at `position`; each of the `samples` has equally many values.
fn remove_share<T>(values: &mut Vec<T>, position: usize, samples: usize) {
    let each = values.len() / samples;
    values.drain(position * each..(position + 1) * each);
}
