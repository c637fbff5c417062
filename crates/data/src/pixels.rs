//! Images in memory and rectangles in them.

use crate::{SampleFault, augment::Crop};

/// Pixels in memory: u8, shape (height, width, 3), RGB.
#[derive(Clone, Copy, Debug)]
pub struct Pixels<'a> {
    /// The rows, beginning with the red value of the first pixel; at least `height` rows.
    pub bytes: &'a [u8],
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Bytes from one row to the next, at least `3 * width`.
    pub row_bytes: usize,
}

impl<'a> Pixels<'a> {
    /// Pixels without gaps between the rows.
    pub(crate) fn new(bytes: &'a [u8], width: u32, height: u32) -> Self {
        Self { bytes, width, height, row_bytes: 3 * width as usize }
    }

    /// The pixels inside `crop`.
    ///
    /// # Errors
    /// The crop is empty or not inside the image; the image has too few bytes.
    pub fn crop(self, crop: Crop) -> Result<Self, SampleFault> {
        crop.check_inside(self.width, self.height)?;
        let Crop { left, top, width, height } = crop;
        let start = top as usize * self.row_bytes + 3 * left as usize;
        let len = (height as usize - 1) * self.row_bytes + 3 * width as usize;
        match self.bytes.get(start..).and_then(|bytes| bytes.get(..len)) {
            Some(bytes) => Ok(Self { bytes, width, height, row_bytes: self.row_bytes }),
            None => Err(SampleFault::Resize(format!(
                "{} bytes cannot hold {}x{} pixels",
                self.bytes.len(),
                self.width,
                self.height
            ))),
        }
    }

    pub(crate) fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes..][..3 * self.width as usize]
    }
}
