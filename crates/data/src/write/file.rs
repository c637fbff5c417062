//! One beton file, sample by sample.

use std::path::Path;

use super::{
    Error,
    draft::Draft,
    field::{Field, Prepared, Value, prepare},
};
use crate::beton::{DESCRIPTOR_BYTES, HEADER_BYTES, VERSION, row_layout};

/// Where the header has the place of the allocation table.
const TABLE_POINTER_AT: u64 = 16;
/// Bytes of a page unless told otherwise: ffcv's default.
pub const DEFAULT_PAGE_BYTES: u32 = 8 << 20;
/// The smallest page that ffcv's own writer makes; its reader takes any.
pub const FFCV_LEAST_PAGE_BYTES: u32 = 2 << 20;

/// Writes a beton file of any fields, in the order of the samples.
///
/// The file lies under a hidden name beside its target, with an `alloc_table_ptr` of 0, until
/// [`finish`](Self::finish); an unfinished one is removed on drop, and one left behind by a killed
/// process by the next writer of the same target.
///
/// Peak memory: one page, 24 bytes and a row per sample, and 24 bytes per value in the pages.
///
/// An empty value takes a byte of its page that nobody reads. Readers, ffcv's among them, look up
/// sizes by place, so no two values may share one.
#[derive(Debug)]
pub struct Writer {
    draft: Draft,
    fields: Vec<Field>,
    offsets: Vec<u64>,
    row_bytes: u64,
    planned: u64,
    samples: u64,
    rows: Vec<u8>,
    table: Vec<u8>,
    page_bytes: u32,
    /// Where the page in memory starts in the file.
    page_start: u64,
    /// The page in memory, as far as it is filled.
    page: Vec<u8>,
}

/// A finished file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Samples in it.
    pub samples: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Writer {
    /// Begins a file for at most `planned` samples: their rows come before the pages, so room for
    /// them must be kept. Fewer may come.
    ///
    /// # Errors
    /// Fields or page size are impossible, another process writes the same file, or the folder
    /// cannot be written to.
    pub fn create(
        target: impl AsRef<Path>,
        fields: Vec<Field>,
        planned: u64,
        page_bytes: u32,
    ) -> Result<Self, Error> {
        if !page_bytes.is_power_of_two() || page_bytes < 64 {
            return Err(Error::PageBytes(page_bytes.into()));
        }
        if fields.is_empty() || fields.len() > usize::from(u16::MAX) {
            return Err(Error::FieldCount(fields.len()));
        }
        let mut descriptors = Vec::with_capacity(fields.len() * DESCRIPTOR_BYTES);
        for (position, field) in fields.iter().enumerate() {
            descriptors.extend(field.descriptor()?);
            if fields[..position].iter().any(|earlier| earlier.name == field.name) {
                let reason = "another field has the same name".to_owned();
                return Err(Error::Field { name: field.name.clone(), reason });
            }
        }
        let kinds: Vec<_> = fields.iter().map(|field| field.kind.field_type()).collect();
        let (offsets, row_bytes) = row_layout(&kinds);

        let mut draft = Draft::create(target.as_ref())?;
        // The table's place comes last: readers take 0 for an unfinished file.
        draft.write(&header(fields.len(), page_bytes, planned, 0))?;
        draft.write(&descriptors)?;
        let rows_end = planned
            .checked_mul(row_bytes)
            .and_then(|rows| rows.checked_add((HEADER_BYTES + descriptors.len()) as u64))
            .and_then(|end| end.checked_next_multiple_of(page_bytes.into()));
        let page_start = rows_end.ok_or(Error::TooMany { planned })?;
        Ok(Self {
            draft,
            fields,
            offsets,
            row_bytes,
            planned,
            samples: 0,
            rows: Vec::new(),
            table: Vec::new(),
            page_bytes,
            page_start,
            page: Vec::new(),
        })
    }

    /// Adds a sample: a value per field. After an error the file is as it was before, unless the
    /// system refused to write.
    ///
    /// # Errors
    /// Values that do not fit their fields, or together not into a page; more samples than planned;
    /// the disk is full.
    pub fn push(&mut self, values: &[Value<'_>]) -> Result<(), Error> {
        let sample = self.samples;
        if sample == self.planned {
            return Err(Error::TooMany { planned: self.planned });
        }
        if values.len() != self.fields.len() {
            let (values, fields) = (values.len(), self.fields.len());
            return Err(Error::ValueCount { sample, values, fields });
        }
        let mut prepared = Vec::with_capacity(values.len());
        for (field, value) in self.fields.iter().zip(values) {
            let value = prepare(field, value).map_err(|reason| {
                let field = field.name.clone();
                Error::Value { sample, field, reason }
            })?;
            prepared.push(value);
        }
        self.make_room(sample, &prepared)?;

        let row_start = self.rows.len();
        self.rows.resize(row_start + self.row_bytes as usize, 0);
        let row = &mut self.rows[row_start..];
        for (value, offset) in prepared.iter().zip(&self.offsets) {
            let pointer = self.page_start + self.page.len() as u64;
            value.put_cell(&mut row[*offset as usize..], pointer);
            if let Some(bytes) = value.paged() {
                for word in [sample, pointer, bytes.len() as u64] {
                    self.table.extend(word.to_le_bytes());
                }
                self.page.extend_from_slice(bytes);
                if bytes.is_empty() {
                    self.page.push(0);
                }
            }
        }
        self.samples += 1;
        Ok(())
    }

    /// Begins another page where a sample does not fit into this one: all of its values must lie in
    /// one page.
    fn make_room(&mut self, sample: u64, values: &[Prepared<'_>]) -> Result<(), Error> {
        let page_bytes = self.page_bytes;
        let places = values.iter().filter_map(|value| value.paged());
        let needed: u64 = places.map(|bytes| bytes.len().max(1) as u64).sum();
        if needed > u64::from(page_bytes) {
            return Err(Error::SampleSize { sample, needed, page_bytes });
        }
        if self.page.len() as u64 + needed > u64::from(page_bytes) {
            self.write_page()?;
        }
        Ok(())
    }

    fn write_page(&mut self) -> Result<(), Error> {
        self.draft.seek(self.page_start)?;
        self.draft.write(&self.page)?;
        self.page_start += u64::from(self.page_bytes);
        self.page.clear();
        Ok(())
    }

    /// Writes what is left, waits until all is on the disk, and gives the file its name, in the
    /// place of an older one.
    ///
    /// # Errors
    /// The disk is full, or the system refuses otherwise.
    pub fn finish(mut self) -> Result<Written, Error> {
        if !self.page.is_empty() {
            self.write_page()?;
        }
        let rows_start = (HEADER_BYTES + self.fields.len() * DESCRIPTOR_BYTES) as u64;
        // Without values in pages there are none, nor padding.
        let table_start = match self.table.is_empty() {
            true => rows_start + self.rows.len() as u64,
            false => self.page_start,
        };
        self.draft.seek(rows_start)?;
        self.draft.write(&self.rows)?;
        self.draft.seek(table_start)?;
        self.draft.write(&self.table)?;

        self.draft.seek(0)?;
        self.draft.write(&header(self.fields.len(), self.page_bytes, self.samples, 0))?;
        // From here on it looks whole, so everything else must be there.
        self.draft.sync()?;
        self.draft.seek(TABLE_POINTER_AT)?;
        self.draft.write(&table_start.to_le_bytes())?;
        self.draft.finish()?;
        Ok(Written { samples: self.samples, bytes: table_start + self.table.len() as u64 })
    }
}

fn header(fields: usize, page_bytes: u32, samples: u64, table_start: u64) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend(VERSION.to_le_bytes());
    // At most 65535, see `Writer::create`.
    header.extend((fields as u16).to_le_bytes());
    header.extend(page_bytes.to_le_bytes());
    header.extend(samples.to_le_bytes());
    header.extend(table_start.to_le_bytes());
    header
}
