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
//! All numbers are little-endian. The format has neither magic bytes nor checksums, so every length and offset is
//! validated against the file before it is used, also before memory is allocated for it. Sources: ffcv 1.0.2,
//! `writer.py`, `reader.py`, `types.py`, `fields/*.py`; fixtures written by ffcv (`tests/fixtures`).
//!
//! Values are read in two steps: find a column ([`Beton::image_column`], [`Beton::int_column`], …), which has the
//! positions of its cells and values; then read the value of any sample with it.

mod allocations;
mod field;
mod image;
mod value;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use self::field::layout;
pub(crate) use self::field::{DESCRIPTOR_BYTES, row_layout};
pub use self::{
    field::{ArrayType, Dtype, Field, FieldType},
    image::{ImageBytes, ImageColumn, ImageLocation, Mode},
    value::{ArrayColumn, BytesColumn, FloatColumn, IntColumn},
};
use crate::{Error, FileFault, SampleFault, mapping::Mapping};

pub(crate) const VERSION: u16 = 2;
pub(crate) const HEADER_BYTES: usize = 24;
const ALLOCATION_BYTES: u64 = 24;

/// An open file whose sections have been checked to be inside it.
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
    /// End of the pages and start of the allocation table.
    table_start: u64,
    file_bytes: u64,
}

impl Beton {
    /// Opens a file and checks its sections. Values are checked by the methods that read them.
    ///
    /// # Errors
    /// The file is missing, empty, truncated, unfinished, of another version, or has a field with an unknown layout.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let failed = |operation| Error::io(operation, path);
        // Opening a pipe would wait for a writer.
        let metadata = fs::metadata(path).map_err(failed("open"))?;
        if !metadata.is_file() {
            return Err(failed("open")(io::Error::other("it is not a regular file")));
        }
        let file = File::open(path).map_err(failed("open"))?;
        let file_bytes = file.metadata().map_err(failed("read metadata of"))?.len();
        let mut head = [0; HEADER_BYTES];
        let head_bytes = file_bytes.min(HEADER_BYTES as u64) as usize;
        file.read_exact_at(&mut head[..head_bytes], 0).map_err(failed("read"))?;
        let refused = |fault| Error::File { path: path.to_owned(), fault };
        let header = Header::read(&head[..head_bytes]).map_err(refused)?;

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
            let max_bytes = table_start - rows_end;
            fields.iter_mut().for_each(|field| field.refuse_arrays_above(max_bytes));
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
            // This cannot overflow: `rows_end` is inside the file and a page is below 4 GiB.
            pages_start: rows_end.next_multiple_of(u64::from(header.page_bytes)),
            table_start,
            file_bytes,
        })
    }

    /// Path of the file.
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

    /// Asks the system to fetch bytes in the background, because they will be read soon. Best effort: errors are
    /// ignored, as they show when the bytes are read.
    pub(crate) fn read_ahead(&self, start: u64, len: u64) {
        let len = std::num::NonZeroU64::new(len);
        let _ = rustix::fs::fadvise(&self.file, start, len, rustix::fs::Advice::WillNeed);
    }

    /// Asks the system to drop the file from the page cache. Best effort.
    pub(crate) fn drop_page_cache(&self) {
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
    }

    /// Header, descriptors and rows.
    pub(crate) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Reads the bytes that begin at `start` in the file, whatever they mean.
    pub(crate) fn read_bytes(&self, start: u64, out: &mut [u8]) -> Result<(), Error> {
        self.file.read_exact_at(out, start).map_err(Error::io("read", &self.path))
    }

    /// Reads the bytes of a sample's value that begin at `start` in the file.
    pub(crate) fn read(&self, sample: u64, start: u64, out: &mut [u8]) -> Result<(), Error> {
        self.file.read_exact_at(out, start).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                let end = start.saturating_add(out.len() as u64);
                self.sample_error(sample, start, SampleFault::Shrunk { end })
            }
            _ => Error::Io { operation: "read", path: self.path.clone(), source },
        })
    }

    /// The field `name`, which must have one of the `expected` types.
    pub(crate) fn field(&self, name: &str, expected: &[FieldType]) -> Result<&Field, Error> {
        let Some(field) = self.fields.iter().find(|field| field.name == name) else {
            let available = self.fields.iter().map(|field| field.name.clone()).collect();
            let fault = FileFault::MissingField { name: name.to_owned(), available };
            return Err(self.file_error(fault));
        };
        if !expected.contains(&field.kind) {
            let (name, found, expected) = (name.to_owned(), field.kind, expected.to_vec());
            return Err(self.file_error(FileFault::WrongType { name, found, expected }));
        }
        Ok(field)
    }

    /// Position in the file of the cell at `offset` in a sample's row.
    fn cell_start(&self, sample: u64, offset: u64) -> u64 {
        // This cannot overflow for an existing sample: its row is inside the file.
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

    /// Checks that a value is inside the data pages.
    fn check_paged(&self, start: u64, len: u64) -> Result<(), SampleFault> {
        let end = start.saturating_add(len);
        let (pages_start, pages_end) = (self.pages_start, self.table_start);
        if start < pages_start || end > pages_end {
            return Err(SampleFault::OutsidePages { start, end, pages_start, pages_end });
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

/// The header fields that are needed later.
pub(crate) struct Header {
    fields: u16,
    page_bytes: u32,
    pub(crate) samples: u64,
    table_start: u64,
}

impl Header {
    /// Parses the first 24 bytes of a file.
    ///
    /// # Errors
    /// They are not the header of a finished file.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, FileFault> {
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

fn check_table(start: u64, min_start: u64, file_bytes: u64) -> Result<(), FileFault> {
    if !(min_start..=file_bytes).contains(&start) {
        return Err(FileFault::TablePosition { start, min_start, file_bytes });
    }
    let table_bytes = file_bytes - start;
    if !table_bytes.is_multiple_of(ALLOCATION_BYTES) {
        return Err(FileFault::TableLength { start, table_bytes });
    }
    Ok(())
}

/// `start + count * size`; saturates on overflow, which is beyond the end of any file.
fn span_end(start: u64, count: u64, size: u64) -> u64 {
    start.saturating_add(count.saturating_mul(size))
}

fn section(section: &'static str, start: u64, end: u64, file_bytes: u64) -> Result<(), FileFault> {
    if end > file_bytes {
        return Err(FileFault::CutOff { section, start, end, file_bytes });
    }
    Ok(())
}
