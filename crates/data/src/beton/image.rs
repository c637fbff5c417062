//! Image fields: a cell in the row, bytes in the pages, and a size in the allocation table only.

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

/// One image as stored, read into memory.
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

/// Where an image lies in the file, and what it is: checked against the sections of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImagePlace {
    /// How it is stored.
    pub mode: Mode,
    /// Width in pixels, above 0.
    pub width: u32,
    /// Height in pixels, above 0.
    pub height: u32,
    /// Its first byte in the file.
    pub start: u64,
    /// Stored bytes, above 0; `3 * width * height` if raw.
    pub len: u64,
}

/// An image field.
#[derive(Clone)]
pub struct ImageColumn {
    offset: u64,
    /// Stored bytes per sample, 0 where the allocation table knows none.
    sizes: Vec<u32>,
}

impl Beton {
    /// Finds an image field and the size of each of its images. Reads the metadata and the allocation
    /// table once, no pixels; [`check_images`](Self::check_images) looks at every row.
    ///
    /// # Errors
    /// No field of that name, or it is of another type; an allocation of an unknown sample.
    pub fn image_column(&self, name: &str) -> Result<ImageColumn, Error> {
        let offset = self.field(name, &[FieldType::RgbImage])?.offset;
        Ok(ImageColumn { offset, sizes: self.stored_sizes(offset + 5)? })
    }

    /// Makes sure that every image is where its row says, and can be what its row says.
    ///
    /// # Errors
    /// The first sample, if any, for which [`image_place`](Self::image_place) fails.
    pub fn check_images(&self, column: &ImageColumn) -> Result<(), Error> {
        (0..self.samples).try_for_each(|sample| self.image_place(column, sample).map(|_| ()))
    }

    /// Where one image lies.
    ///
    /// # Errors
    /// There is no such sample, or its row contradicts the allocation table or the pages.
    pub fn image_place(&self, column: &ImageColumn, sample: u64) -> Result<ImagePlace, Error> {
        let [mode, w0, w1, h0, h1, pointer @ ..] = self.cell::<13>(sample, column.offset)?;
        let width = u16::from_le_bytes([w0, w1]).into();
        let height = u16::from_le_bytes([h0, h1]).into();
        let start = u64::from_le_bytes(pointer);
        let stored = column.sizes.get(sample as usize).copied().unwrap_or_default();
        self.checked_place(mode, width, height, start, stored.into()).map_err(|fault| {
            self.sample_error(sample, self.cell_start(sample, column.offset), fault)
        })
    }

    fn checked_place(
        &self,
        mode: u8,
        width: u32,
        height: u32,
        start: u64,
        len: u64,
    ) -> Result<ImagePlace, SampleFault> {
        let mode = match mode {
            0 => Mode::Jpeg,
            1 => Mode::Raw,
            other => return Err(SampleFault::Mode(other)),
        };
        if width == 0 || height == 0 {
            return Err(SampleFault::NoPixels { width, height });
        }
        if len == 0 {
            return Err(SampleFault::Unresolved { pointer: start });
        }
        if mode == Mode::Raw && len != 3 * u64::from(width) * u64::from(height) {
            return Err(SampleFault::RawSize { stored: len, width, height });
        }
        self.check_paged(start, len)?;
        Ok(ImagePlace { mode, width, height, start, len })
    }

    /// Reads one image as stored into `buffer`. That a JPEG stream is one is left to the decoder.
    ///
    /// # Errors
    /// As [`image_place`](Self::image_place); or the file cannot be read.
    pub fn image<'a>(
        &self,
        column: &ImageColumn,
        sample: u64,
        buffer: &'a mut Vec<u8>,
    ) -> Result<ImageBytes<'a>, Error> {
        let place = self.image_place(column, sample)?;
        let bytes = self.image_part(sample, &place, 0..place.len, buffer)?;
        Ok(ImageBytes { mode: place.mode, width: place.width, height: place.height, bytes })
    }

    /// Reads a part of an image as stored into `buffer`, which grows as needed and keeps its length
    /// where it is longer.
    pub(crate) fn image_part<'a>(
        &self,
        sample: u64,
        place: &ImagePlace,
        part: std::ops::Range<u64>,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], Error> {
        let len = (part.end - part.start) as usize;
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let out = &mut buffer[..len];
        self.read(sample, place.start + part.start, out)?;
        Ok(out)
    }
}
