//! FFCV's `.beton` files, format version 2, read through a memory map.
//!
//! ```text
//! 0                header                 24 bytes
//! 24               field descriptors      num_fields x 1041 bytes
//!                  metadata rows          num_samples x row_size, a C struct of the fields' cells
//!                  padding to a multiple of page_size, then the data pages
//! alloc_table_ptr  allocation table       (sample, pointer, size) of every value in the pages
//! ```
//!
//! All numbers are little-endian. The format has neither magic bytes nor checksums, so every
//! length and offset is compared with the file before it is used, and nothing is allocated by the
//! word of an unchecked one. Sources: ffcv 1.0.2, `writer.py`, `reader.py`, `types.py`,
//! `fields/*.py`; fixtures written by it (`tests/fixtures`).

mod field;
mod image;

use std::path::{Path, PathBuf};

use self::field::{DESCRIPTOR_BYTES, layout};
pub use self::{
    field::{Field, FieldType},
    image::{ImageBytes, ImageColumn, Mode},
};
use crate::{Error, FileFault, SampleFault, mapping::Mapping};

const VERSION: u16 = 2;
const HEADER_BYTES: usize = 24;
const ALLOCATION_BYTES: usize = 24;

/// An open file: its sections are known to lie inside it.
#[derive(Debug)]
pub struct Beton {
    path: PathBuf,
    map: Mapping,
    fields: Vec<Field>,
    samples: u64,
    row_bytes: u64,
    rows_start: u64,
    /// First byte of the first data page.
    pages_start: u64,
    /// End of the pages, start of the allocation table.
    table_start: u64,
}

/// A field of whole numbers.
#[derive(Clone, Debug)]
pub struct IntColumn {
    offset: u64,
}

impl Beton {
    /// Maps a file and checks its sections. Values are checked by the methods that read them.
    ///
    /// # Errors
    /// The file is missing, empty, cut off, unfinished, of another version, or has a field whose
    /// layout is unknown.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let map = Mapping::open(path)?;
        Self::from_map(path, map).map_err(|fault| Error::File { path: path.to_owned(), fault })
    }

    fn from_map(path: &Path, map: Mapping) -> Result<Self, FileFault> {
        let header = Header::read(&map)?;

        let rows_start =
            span_end(HEADER_BYTES as u64, u64::from(header.fields), DESCRIPTOR_BYTES as u64);
        let descriptors = section(&map, "field descriptors", HEADER_BYTES as u64, rows_start)?;
        let (fields, row_bytes) = layout(descriptors)?;
        if fields.is_empty() {
            return Err(FileFault::NoFields);
        }

        let rows_end = span_end(rows_start, header.samples, row_bytes);
        section(&map, "metadata rows", rows_start, rows_end)?;

        let (table_start, file_bytes) = (header.table_start, map.len() as u64);
        if !(rows_end..=file_bytes).contains(&table_start) {
            return Err(FileFault::TablePlace { start: table_start, least: rows_end, file_bytes });
        }
        let table_bytes = file_bytes - table_start;
        if !table_bytes.is_multiple_of(ALLOCATION_BYTES as u64) {
            return Err(FileFault::TableLength { start: table_start, table_bytes });
        }

        Ok(Self {
            path: path.to_owned(),
            fields,
            samples: header.samples,
            row_bytes,
            rows_start,
            // No overflow: `rows_end` is inside the file and a page is below 4 GiB.
            pages_start: rows_end.next_multiple_of(u64::from(header.page_bytes)),
            table_start,
            map,
        })
    }

    /// Where the file lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.samples
    }

    /// Whether there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples == 0
    }

    /// The fields in file order.
    #[must_use]
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Finds a field of whole numbers.
    ///
    /// # Errors
    /// No field of that name, or it is of another type.
    pub fn int_column(&self, name: &str) -> Result<IntColumn, Error> {
        Ok(IntColumn { offset: self.field(name, FieldType::Int)?.offset })
    }

    /// One whole number.
    ///
    /// # Errors
    /// There is no such sample.
    pub fn int(&self, column: &IntColumn, sample: u64) -> Result<i64, Error> {
        self.cell(sample, column.offset).map(i64::from_le_bytes)
    }

    fn field(&self, name: &str, wanted: FieldType) -> Result<&Field, Error> {
        let Some(field) = self.fields.iter().find(|field| field.name == name) else {
            let have = self.fields.iter().map(|field| field.name.clone()).collect();
            return Err(self.file_error(FileFault::MissingField { name: name.to_owned(), have }));
        };
        if field.kind != wanted {
            let (name, found) = (name.to_owned(), field.kind);
            return Err(self.file_error(FileFault::WrongType { name, found, wanted }));
        }
        Ok(field)
    }

    /// The `N` bytes at `offset` in a sample's row.
    fn cell<const N: usize>(&self, sample: u64, offset: u64) -> Result<[u8; N], Error> {
        if sample >= self.samples {
            let fault = SampleFault::OutOfRange { samples: self.samples };
            return Err(self.sample_error(sample, fault));
        }
        // No overflow: the row lies inside the file.
        let start = self.rows_start + sample * self.row_bytes + offset;
        let bytes = &self.map[start as usize..][..N];
        Ok(std::array::from_fn(|i| bytes[i]))
    }

    /// A value in the data pages.
    fn paged(&self, start: u64, len: u64) -> Result<&[u8], SampleFault> {
        let end = start.saturating_add(len);
        let (least, most) = (self.pages_start, self.table_start);
        if start < least || end > most {
            return Err(SampleFault::OutsidePages { start, end, least, most });
        }
        Ok(&self.map[start as usize..end as usize])
    }

    /// The allocation table: sample, pointer and size of every value in the pages, in no order.
    fn allocations(&self) -> impl Iterator<Item = [u64; 3]> {
        let table = &self.map[self.table_start as usize..];
        let (entries, _) = table.as_chunks::<ALLOCATION_BYTES>();
        entries.iter().map(|entry| {
            let (words, _) = entry.as_chunks::<8>();
            [words[0], words[1], words[2]].map(u64::from_le_bytes)
        })
    }

    fn file_error(&self, fault: FileFault) -> Error {
        Error::File { path: self.path.clone(), fault }
    }

    pub(crate) fn sample_error(&self, sample: u64, fault: SampleFault) -> Error {
        Error::Sample { path: self.path.clone(), sample, fault }
    }
}

/// The part of the header that is needed later.
struct Header {
    fields: u16,
    page_bytes: u32,
    samples: u64,
    table_start: u64,
}

impl Header {
    fn read(file: &[u8]) -> Result<Self, FileFault> {
        if file.is_empty() {
            return Err(FileFault::Empty);
        }
        let header = section(file, "header", 0, HEADER_BYTES as u64)?;
        let (halves, _) = header.as_chunks::<2>();
        let (words, _) = header.as_chunks::<4>();
        let (doubles, _) = header.as_chunks::<8>();
        let version = u16::from_le_bytes(halves[0]);
        let header = Self {
            fields: u16::from_le_bytes(halves[1]),
            page_bytes: u32::from_le_bytes(words[1]),
            samples: u64::from_le_bytes(doubles[1]),
            table_start: u64::from_le_bytes(doubles[2]),
        };
        if version != VERSION {
            return Err(FileFault::Version(version));
        }
        if header.table_start == 0 {
            return Err(FileFault::Unfinished);
        }
        if !header.page_bytes.is_power_of_two() {
            return Err(FileFault::PageSize(header.page_bytes));
        }
        Ok(header)
    }
}

/// `start + count * size`; saturated where that overflows, which is beyond the end of any file.
fn span_end(start: u64, count: u64, size: u64) -> u64 {
    start.saturating_add(count.saturating_mul(size))
}

fn section<'a>(
    file: &'a [u8],
    section: &'static str,
    start: u64,
    end: u64,
) -> Result<&'a [u8], FileFault> {
    let file_bytes = file.len() as u64;
    if end > file_bytes {
        return Err(FileFault::CutOff { section, start, end, file_bytes });
    }
    Ok(&file[start as usize..end as usize])
}
