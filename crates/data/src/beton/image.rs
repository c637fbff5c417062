//! Image fields: a cell in the row, bytes in the pages, and a size in the allocation table only.

use super::{Beton, FieldType};
use crate::{Error, FileFault, SampleFault};

/// How an image is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A JPEG stream.
    Jpeg,
    /// u8, shape (height, width, 3), RGB.
    Raw,
}

/// One stored image.
#[derive(Clone, Copy, Debug)]
pub struct ImageBytes<'a> {
    /// How it is stored.
    pub mode: Mode,
    /// Width in pixels, above 0.
    pub width: u32,
    /// Height in pixels, above 0.
    pub height: u32,
    /// The bytes as stored; `3 * width * height` of them if raw.
    pub bytes: &'a [u8],
}

/// An image field.
#[derive(Clone)]
pub struct ImageColumn {
    offset: u64,
    /// Stored bytes per sample, 0 where the allocation table knows none: 4 bytes of memory per
    /// sample. A value fits into a page, and a page is below 4 GiB.
    sizes: Vec<u32>,
}

impl Beton {
    /// Finds an image field and the size of each of its images, and checks every row. Reads the
    /// metadata and the allocation table once, no pixels.
    ///
    /// # Errors
    /// No field of that name, or it is of another type; an allocation of an unknown sample; the
    /// first sample, if any, for which [`image`](Self::image) fails.
    pub fn image_column(&self, name: &str) -> Result<ImageColumn, Error> {
        let offset = self.field(name, FieldType::RgbImage)?.offset;
        let mut column = ImageColumn { offset, sizes: vec![0; self.samples as usize] };
        for (entry, [sample, pointer, size]) in (0..).zip(self.allocations()) {
            if sample >= self.samples {
                let samples = self.samples;
                return Err(self.file_error(FileFault::TableSample { entry, sample, samples }));
            }
            if self.image_cell(&column, sample)?.pointer == pointer {
                // An empty value of another field may share the pointer: the larger is the image's.
                let known = &mut column.sizes[sample as usize];
                *known = u32::try_from(size).unwrap_or(u32::MAX).max(*known);
            }
        }
        for sample in 0..self.samples {
            self.image(&column, sample)?;
        }
        Ok(column)
    }

    /// One image as stored. That a JPEG stream is one is left to the decoder.
    ///
    /// # Errors
    /// There is no such sample, or its row contradicts the allocation table or the pages.
    pub fn image(&self, column: &ImageColumn, sample: u64) -> Result<ImageBytes<'_>, Error> {
        let cell = self.image_cell(column, sample)?;
        let stored = column.sizes.get(sample as usize).copied().unwrap_or_default();
        self.stored_image(&cell, u64::from(stored))
            .map_err(|fault| self.sample_error(sample, fault))
    }

    fn stored_image(&self, cell: &ImageCell, stored: u64) -> Result<ImageBytes<'_>, SampleFault> {
        let &ImageCell { mode, width, height, pointer } = cell;
        let mode = match mode {
            0 => Mode::Jpeg,
            1 => Mode::Raw,
            other => return Err(SampleFault::Mode(other)),
        };
        if width == 0 || height == 0 {
            return Err(SampleFault::NoPixels { width, height });
        }
        if stored == 0 {
            return Err(SampleFault::Unresolved { pointer });
        }
        if mode == Mode::Raw && stored != 3 * u64::from(width) * u64::from(height) {
            return Err(SampleFault::RawSize { stored, width, height });
        }
        Ok(ImageBytes { mode, width, height, bytes: self.paged(pointer, stored)? })
    }

    fn image_cell(&self, column: &ImageColumn, sample: u64) -> Result<ImageCell, Error> {
        let [mode, w0, w1, h0, h1, pointer @ ..] = self.cell::<13>(sample, column.offset)?;
        Ok(ImageCell {
            mode,
            width: u16::from_le_bytes([w0, w1]).into(),
            height: u16::from_le_bytes([h0, h1]).into(),
            pointer: u64::from_le_bytes(pointer),
        })
    }
}

/// What the row says; not yet checked.
struct ImageCell {
    mode: u8,
    width: u32,
    height: u32,
    pointer: u64,
}
