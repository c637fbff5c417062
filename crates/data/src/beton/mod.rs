//! FFCV's `.beton` files, format version 2.
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
//!
//! A value is found in two steps: a column ([`Beton::image_column`], [`Beton::int_column`], …) knows
//! where its cells and values lie; with it the value of any sample is read.

mod allocations;
mod field;
mod image;
mod value;

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use self::field::layout;
pub(crate) use self::field::{DESCRIPTOR_BYTES, row_layout};
pub use self::{
    field::{ArrayType, Dtype, Field, FieldType},
    image::{ImageBytes, ImageColumn, ImagePlace, Mode},
    value::{ArrayColumn, BytesColumn, FloatColumn, IntColumn},
};
use crate::{Error, FileFault, SampleFault, mapping::Mapping};

pub(crate) const VERSION: u16 = 2;
pub(crate) const HEADER_BYTES: usize = 24;
const ALLOCATION_BYTES: u64 = 24;

/// An open file: its sections are known to lie inside it.
#[derive(Debug)]
pub struct Beton {
    path: PathBuf,
    file: File,
    /// Header, descriptors and rows.
    head: Mapping,
    fields: Vec<Field>,
    samples: u64,
    row_bytes: u64,
    rows_start: u64,
    page_bytes: u32,
    /// First byte of the first data page.
    pages_start: u64,
    /// End of the pages, start of the allocation table.
    table_start: u64,
    file_bytes: u64,
}

impl Beton {
    /// Opens a file and checks its sections. Values are checked by the methods that read them.
    ///
    /// # Errors
    /// The file is missing, empty, cut off, unfinished, of another version, or has a field whose
    /// layout is unknown.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let failed =
            |operation| move |source| Error::Io { operation, path: path.to_owned(), source };
        let file = File::open(path).map_err(failed("open"))?;
        let file_bytes = file.metadata().map_err(failed("look at"))?.len();
        let mut head = [0; HEADER_BYTES];
        let have = file_bytes.min(HEADER_BYTES as u64) as usize;
        file.read_exact_at(&mut head[..have], 0).map_err(failed("read"))?;
        let refused = |fault| Error::File { path: path.to_owned(), fault };
        let header = Header::read(&head[..have]).map_err(refused)?;

        let rows_start =
            span_end(HEADER_BYTES as u64, u64::from(header.fields), DESCRIPTOR_BYTES as u64);
        section("field descriptors", HEADER_BYTES as u64, rows_start, file_bytes)
            .map_err(refused)?;
        let mut descriptors = vec![0; rows_start as usize - HEADER_BYTES];
        file.read_exact_at(&mut descriptors, HEADER_BYTES as u64).map_err(failed("read"))?;
        let (mut fields, row_bytes) = layout(&descriptors).map_err(refused)?;

        let rows_end = span_end(rows_start, header.samples, row_bytes);
        section("metadata rows", rows_start, rows_end, file_bytes).map_err(refused)?;
        let table_start = header.table_start;
        check_table(table_start, rows_end, file_bytes).map_err(refused)?;
        if header.samples > 0 {
            let most = table_start - rows_end;
            fields.iter_mut().for_each(|field| field.refuse_arrays_above(most));
        }

        Ok(Self {
            path: path.to_owned(),
            head: Mapping::new(&file, 0..rows_end).map_err(failed("map"))?,
            file,
            fields,
            samples: header.samples,
            row_bytes,
            rows_start,
            page_bytes: header.page_bytes,
            // No overflow: `rows_end` is inside the file and a page is below 4 GiB.
            pages_start: rows_end.next_multiple_of(u64::from(header.page_bytes)),
            table_start,
            file_bytes,
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

    /// Size of a data page in bytes, a power of two.
    #[must_use]
    pub fn page_bytes(&self) -> u32 {
        self.page_bytes
    }

    /// Length of the file in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Tells the system that bytes will be read soon, so that it fetches them in the background.
    /// A hint: what goes wrong shows when they are read.
    pub(crate) fn read_ahead(&self, start: u64, len: u64) {
        let len = std::num::NonZeroU64::new(len);
        let _ = rustix::fs::fadvise(&self.file, start, len, rustix::fs::Advice::WillNeed);
    }

    /// Makes the system forget what it holds of the file in memory, as if it had not been read for long.
    pub(crate) fn forget(&self) {
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
    }

    /// Reads the bytes of a sample's value from `start` on.
    pub(crate) fn read(&self, sample: u64, start: u64, out: &mut [u8]) -> Result<(), Error> {
        self.file.read_exact_at(out, start).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                let end = start.saturating_add(out.len() as u64);
                self.sample_error(sample, start, SampleFault::Shrunk { end })
            }
            _ => Error::Io { operation: "read", path: self.path.clone(), source },
        })
    }

    pub(crate) fn field(&self, name: &str, wanted: &[FieldType]) -> Result<&Field, Error> {
        let Some(field) = self.fields.iter().find(|field| field.name == name) else {
            let have = self.fields.iter().map(|field| field.name.clone()).collect();
            return Err(self.file_error(FileFault::MissingField { name: name.to_owned(), have }));
        };
        if !wanted.contains(&field.kind) {
            let (name, found, wanted) = (name.to_owned(), field.kind, wanted.to_vec());
            return Err(self.file_error(FileFault::WrongType { name, found, wanted }));
        }
        Ok(field)
    }

    /// Where the cell at `offset` in a sample's row lies in the file.
    fn cell_start(&self, sample: u64, offset: u64) -> u64 {
        // No overflow for a sample there is: its row lies inside the file.
        self.rows_start + sample * self.row_bytes + offset
    }

    /// The `N` bytes at `offset` in a sample's row.
    fn cell<const N: usize>(&self, sample: u64, offset: u64) -> Result<[u8; N], Error> {
        if sample >= self.samples {
            let fault = SampleFault::OutOfRange { samples: self.samples };
            return Err(self.sample_error(sample, 0, fault));
        }
        let bytes = &self.head[self.cell_start(sample, offset) as usize..][..N];
        Ok(std::array::from_fn(|i| bytes[i]))
    }

    /// Makes sure that a value lies in the data pages.
    fn check_paged(&self, start: u64, len: u64) -> Result<(), SampleFault> {
        let end = start.saturating_add(len);
        let (least, most) = (self.pages_start, self.table_start);
        if start < least || end > most {
            return Err(SampleFault::OutsidePages { start, end, least, most });
        }
        Ok(())
    }

    pub(crate) fn file_error(&self, fault: FileFault) -> Error {
        Error::File { path: self.path.clone(), fault }
    }

    pub(crate) fn sample_error(&self, sample: u64, offset: u64, fault: SampleFault) -> Error {
        Error::Sample { path: self.path.clone(), sample, offset, fault }
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
    fn read(bytes: &[u8]) -> Result<Self, FileFault> {
        if bytes.is_empty() {
            return Err(FileFault::Empty);
        }
        section("header", 0, HEADER_BYTES as u64, bytes.len() as u64)?;
        let (halves, _) = bytes.as_chunks::<2>();
        let (words, _) = bytes.as_chunks::<4>();
        let (doubles, _) = bytes.as_chunks::<8>();
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
        if header.fields == 0 {
            return Err(FileFault::NoFields);
        }
        Ok(header)
    }
}

/// The number of samples that the first 24 bytes of a file tell.
///
/// # Errors
/// They are no header of a finished file.
pub(crate) fn samples_in_header(bytes: &[u8]) -> Result<u64, FileFault> {
    Header::read(bytes).map(|header| header.samples)
}

fn check_table(start: u64, least: u64, file_bytes: u64) -> Result<(), FileFault> {
    if !(least..=file_bytes).contains(&start) {
        return Err(FileFault::TablePlace { start, least, file_bytes });
    }
    let table_bytes = file_bytes - start;
    if !table_bytes.is_multiple_of(ALLOCATION_BYTES) {
        return Err(FileFault::TableLength { start, table_bytes });
    }
    Ok(())
}

/// `start + count * size`; saturated where that overflows, which is beyond the end of any file.
fn span_end(start: u64, count: u64, size: u64) -> u64 {
    start.saturating_add(count.saturating_mul(size))
}

fn section(section: &'static str, start: u64, end: u64, file_bytes: u64) -> Result<(), FileFault> {
    if end > file_bytes {
        return Err(FileFault::CutOff { section, start, end, file_bytes });
    }
    Ok(())
}
