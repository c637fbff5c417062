//! Image fields: a cell in the row, bytes in the pages, and the size in the allocation table only.

use super::{Beton, FieldType};
use crate::{Error, SampleFault};

/// How an image is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A JPEG stream.
    Jpeg,
    /// u8, shape (height, width, 3), RGB.
    Raw,
}

/// One stored image, read into memory.
#[derive(Clone, Copy, Debug)]
pub struct ImageBytes<'a> {
    /// Storage format.
    pub mode: Mode,
    /// Width in pixels, above 0.
    pub width: u32,
    /// Height in pixels, above 0.
    pub height: u32,
    /// The stored bytes; `3 * width * height` of them if raw.
    pub bytes: &'a [u8],
}

/// Position and format of an image in the file, checked against the sections of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLocation {
    /// Storage format.
    pub mode: Mode,
    /// Width in pixels, above 0.
    pub width: u32,
    /// Height in pixels, above 0.
    pub height: u32,
    /// Position of the first byte in the file.
    pub start: u64,
    /// Number of stored bytes, above 0; `3 * width * height` if raw.
    pub len: u64,
}

/// An image field.
#[derive(Clone)]
pub struct ImageColumn {
    offset: u64,
    /// Stored size of each sample's image, bytes; 0 if the allocation table has no entry.
    sizes: Vec<u32>,
}

impl Beton {
    /// Finds an image field and the size of each of its images. Reads the metadata and the allocation table once, no
    /// pixels; [`check_images`](Self::check_images) checks every row.
    ///
    /// # Errors
    /// There is no field of that name, or it has another type; an allocation for a sample that does not exist.
    pub fn image_column(&self, name: &str) -> Result<ImageColumn, Error> {
        let offset = self.field(name, &[FieldType::RgbImage])?.offset;
        Ok(ImageColumn { offset, sizes: self.stored_sizes(offset + 5)? })
    }

    /// Checks that the row of every image is valid.
    ///
    /// # Errors
    /// The error of the first sample for which [`image_location`](Self::image_location) fails.
    pub fn check_images(&self, column: &ImageColumn) -> Result<(), Error> {
        (0..self.samples).try_for_each(|sample| self.image_location(column, sample).map(|_| ()))
    }

    /// Position and format of one image.
    ///
    /// # Errors
    /// There is no such sample, or its row does not match the allocation table or the pages.
    pub fn image_location(
        &self,
        column: &ImageColumn,
        sample: u64,
    ) -> Result<ImageLocation, Error> {
        let [mode, w0, w1, h0, h1, pointer @ ..] = self.cell::<13>(sample, column.offset)?;
        let width = u16::from_le_bytes([w0, w1]).into();
        let height = u16::from_le_bytes([h0, h1]).into();
        let start = u64::from_le_bytes(pointer);
        let stored = column.sizes.get(sample as usize).copied().unwrap_or_default();
        self.checked_location(mode, width, height, start, stored.into()).map_err(|fault| {
            self.sample_error(sample, self.cell_start(sample, column.offset), fault)
        })
    }

    fn checked_location(
        &self,
        mode: u8,
        width: u32,
        height: u32,
        start: u64,
        len: u64,
    ) -> Result<ImageLocation, SampleFault> {
        let mode = match mode {
            0 => Mode::Jpeg,
            1 => Mode::Raw,
            other => return Err(SampleFault::Mode(other)),
        };
        if width == 0 || height == 0 {
            return Err(SampleFault::NoPixels { width, height });
        }
        if len == 0 {
            return Err(SampleFault::MissingAllocation { pointer: start });
        }
        if mode == Mode::Raw && len != 3 * u64::from(width) * u64::from(height) {
            return Err(SampleFault::RawSize { stored: len, width, height });
        }
        self.check_paged(start, len)?;
        Ok(ImageLocation { mode, width, height, start, len })
    }

    /// Reads one stored image into `buffer`. The decoder checks whether a JPEG stream is valid.
    ///
    /// # Errors
    /// As [`image_location`](Self::image_location); or the file cannot be read.
    pub fn image<'a>(
        &self,
        column: &ImageColumn,
        sample: u64,
        buffer: &'a mut Vec<u8>,
    ) -> Result<ImageBytes<'a>, Error> {
        let location = self.image_location(column, sample)?;
        let bytes = self.image_part(sample, &location, 0..location.len, buffer)?;
        Ok(ImageBytes {
            mode: location.mode,
            width: location.width,
            height: location.height,
            bytes,
        })
    }

    /// Reads a part of a stored image into `buffer`, which grows as needed and never shrinks.
    pub(crate) fn image_part<'a>(
        &self,
        sample: u64,
        location: &ImageLocation,
        part: std::ops::Range<u64>,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], Error> {
        let len = (part.end - part.start) as usize;
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let out = &mut buffer[..len];
        self.read(sample, location.start + part.start, out)?;
        Ok(out)
    }
}
