//! What the loader hands to training: one micro-batch.

/// A decoded micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Pixels, u8, shape (samples, resolution, resolution, 3), RGB.
    pub images: Vec<u8>,
    /// Class of each sample, in `0..num_classes`.
    pub labels: Vec<i64>,
    /// Position of each sample in the data set.
    pub samples: Vec<u64>,
    /// Side of the images in pixels.
    pub resolution: u32,
}

impl Batch {
    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }
}
