//! Writes one beton file, sample by sample.

use std::{fs::File, io::Read, path::Path};

use super::{
    Error,
    draft::Draft,
    field::{Field, Prepared, Value, prepare},
};
use crate::beton::{DESCRIPTOR_BYTES, HEADER_BYTES, VERSION, row_layout};

/// Offset of the pointer to the allocation table in the header.
const TABLE_POINTER_AT: u64 = 16;
/// Default size of a page, bytes: ffcv's default.
pub const DEFAULT_PAGE_BYTES: u32 = 8 << 20;
/// The smallest page that ffcv's writer makes, bytes; its reader accepts any size.
pub const FFCV_MIN_PAGE_BYTES: u32 = 2 << 20;

/// Writes a beton file of any fields, in the order of the samples.
///
/// Until [`finish`](Self::finish) the file has a hidden name in the folder of its target, and an `alloc_table_ptr` of
/// 0. An unfinished file is removed on drop; a file left by a killed process is replaced by the next writer of the
/// same target.
///
/// Peak memory: two pages, and 24 bytes per value in the pages.
///
/// An empty value uses one byte of its page, which is never read. Readers, also ffcv's, look up sizes by position, so
/// two values must not have the same position.
#[derive(Debug)]
pub struct Writer {
    draft: Draft,
    fields: Vec<Field>,
    offsets: Vec<u64>,
    row_bytes: u64,
    planned: u64,
    samples: u64,
    /// Rows that are not in the file yet.
    rows: Vec<u8>,
    /// Bytes of the rows in the file.
    written_rows: u64,
    table: Vec<u8>,
    page_bytes: u32,
    /// Position in the file of the page in memory.
    page_start: u64,
    /// The filled part of the page in memory.
    page: Vec<u8>,
}

/// Size of a finished file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedFile {
    /// Number of samples.
    pub samples: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl Writer {
    /// Starts a file for at most `planned` samples, for which space is reserved because the rows are stored before
    /// the pages.
    ///
    /// # Errors
    /// Fields or page size are invalid, another process writes the same file, the target exists and is another kind of
    /// file, or the folder is not writable.
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

        let target = target.as_ref();
        let mut draft = Draft::create(target)?;
        if is_another_file(target) {
            return Err(Error::OtherFile { path: target.to_owned() });
        }
        // The pointer to the table is written last: readers treat 0 as an unfinished file.
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
            written_rows: 0,
            table: Vec::new(),
            page_bytes,
            page_start,
            page: Vec::new(),
        })
    }

    /// Adds a sample with one value per field. After an error the file is unchanged, unless the error is an I/O
    /// error.
    ///
    /// # Errors
    /// A value does not match its field, or the values do not fit into a page; more samples than planned; the disk is
    /// full.
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
        self.ensure_page_space(sample, &prepared)?;

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
        if self.rows.len() as u64 >= u64::from(self.page_bytes) {
            self.write_rows()?;
        }
        Ok(())
    }

    fn rows_start(&self) -> u64 {
        (HEADER_BYTES + self.fields.len() * DESCRIPTOR_BYTES) as u64
    }

    fn write_rows(&mut self) -> Result<(), Error> {
        self.draft.seek(self.rows_start() + self.written_rows)?;
        self.draft.write(&self.rows)?;
        self.written_rows += self.rows.len() as u64;
        self.rows.clear();
        Ok(())
    }

    /// Starts a new page if a sample does not fit into this one: all of its values must be in one page.
    fn ensure_page_space(&mut self, sample: u64, values: &[Prepared<'_>]) -> Result<(), Error> {
        let page_bytes = self.page_bytes;
        let paged = values.iter().filter_map(|value| value.paged());
        let needed: u64 = paged.map(|bytes| bytes.len().max(1) as u64).sum();
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

    /// Writes the remaining data, waits until everything is on the disk, and renames the file to its target,
    /// replacing an older one.
    ///
    /// # Errors
    /// The disk is full, or another I/O error.
    pub fn finish(self) -> Result<FinishedFile, Error> {
        let (draft, finished) = self.complete()?;
        draft.publish()?;
        Ok(finished)
    }

    /// Like [`finish`](Self::finish), but the file does not have its name yet: of several files, all get theirs once all are
    /// complete.
    pub(super) fn complete(mut self) -> Result<(Draft, FinishedFile), Error> {
        if !self.page.is_empty() {
            self.write_page()?;
        }
        self.write_rows()?;
        // Without values in pages there are neither pages nor padding.
        let table_start = match self.table.is_empty() {
            true => self.rows_start() + self.written_rows,
            false => self.page_start,
        };
        self.draft.seek(table_start)?;
        self.draft.write(&self.table)?;

        self.draft.seek(0)?;
        self.draft.write(&header(self.fields.len(), self.page_bytes, self.samples, 0))?;
        // The next write makes the file look complete, so everything else must be durable before.
        self.draft.sync()?;
        self.draft.seek(TABLE_POINTER_AT)?;
        self.draft.write(&table_start.to_le_bytes())?;
        self.draft.sync()?;
        let bytes = table_start + self.table.len() as u64;
        Ok((self.draft, FinishedFile { samples: self.samples, bytes }))
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

/// Whether a file exists that is neither named nor begins as a beton file, such as a tokenizer or a journal.
fn is_another_file(target: &Path) -> bool {
    if target.extension().is_some_and(|extension| extension == "beton") {
        return false;
    }
    let mut start = [0; 2];
    match File::open(target).and_then(|mut file| file.read(&mut start)) {
        Ok(0) | Err(_) => false,
        Ok(_) => u16::from_le_bytes(start) != VERSION,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write::{FieldKind, Value};

    /// Files that belong together are replaced when the last of them is complete.
    #[test]
    fn a_complete_file_replaces_the_older_one_only_when_it_is_published() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("set.beton");
        let write = |value: i64| {
            let fields = vec![Field::new("a", FieldKind::Int)];
            let mut writer = Writer::create(&target, fields, 1, 1 << 12).unwrap();
            writer.push(&[Value::Int(value)]).unwrap();
            writer
        };
        write(1).finish().unwrap();
        let before = std::fs::read(&target).unwrap();
        let (draft, _) = write(2).complete().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), before);
        draft.publish().unwrap();
        let after = std::fs::read(&target).unwrap();
        assert_ne!(after, before);
        drop(write(3).complete().unwrap());
        assert_eq!(std::fs::read(&target).unwrap(), after);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
