//! Errors of writing a data set: the position, the problem, and the remedy.

use std::{io, path::PathBuf};

use crate::file::is_disk_full;

/// Why a data set cannot be written. [`BadImage`] describes the problem of a single image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An I/O error.
    #[error("cannot {operation} {}: {source}{}", path.display(), remedy(source))]
    Io {
        /// The operation that failed, e.g. `write`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process writes the same file.
    #[error(
        "another process is writing {}: wait for it, or write to another file", path.display()
    )]
    Busy {
        /// The file to be written.
        path: PathBuf,
    },
    /// The target is not a file name.
    #[error("{} does not name a file: give one, e.g. train.beton", path.display())]
    Target {
        /// The path as given.
        path: PathBuf,
    },
    /// The target would be in a folder that does not exist.
    #[error("{} would be in a folder that does not exist: create it first, or give another path", path.display())]
    Folder {
        /// The path as given.
        path: PathBuf,
    },
    /// The target exists and is no regular file.
    #[error("{} exists and is not a regular file: give another path", path.display())]
    SpecialFile {
        /// The path as given.
        path: PathBuf,
    },
    /// The target exists and is another kind of file.
    #[error("{} exists and is not a .beton file: remove it, or give another path", path.display())]
    OtherFile {
        /// The path as given.
        path: PathBuf,
    },
    /// The fields cannot be stored.
    #[error("field \"{name}\": {reason}")]
    Field {
        /// Name of the field.
        name: String,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// There are no fields, or more than the format allows.
    #[error("{0} fields, but a file has 1 to 65535")]
    FieldCount(usize),
    /// The page size is invalid.
    #[error("a page of {0} bytes: take a power of two of at least 64 and below 4 GiB")]
    PageBytes(u64),
    /// The values of one sample do not fit the fields.
    #[error("sample {sample}, field \"{field}\": {reason}")]
    Value {
        /// Position in the file.
        sample: u64,
        /// The field.
        field: String,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// The number of values differs from the number of fields.
    #[error("sample {sample} has {values} values for {fields} fields")]
    ValueCount {
        /// Position in the file.
        sample: u64,
        /// Number of values given.
        values: usize,
        /// Number of fields of the file.
        fields: usize,
    },
    /// The values of a sample do not fit into one page.
    #[error(
        "sample {sample} needs {needed} bytes, but a page has {page_bytes}: write larger pages, \
         or smaller values"
    )]
    SampleSize {
        /// Position in the file.
        sample: u64,
        /// Total size of its values, where an empty value counts as one byte.
        needed: u64,
        /// Size of a page, bytes.
        page_bytes: u32,
    },
    /// More samples than planned.
    #[error("the file was planned for {planned} samples, and this is one more")]
    TooMany {
        /// The number given at the start.
        planned: u64,
    },
    /// The source has no images, or cannot be used.
    #[error("{}: {reason}", path.display())]
    Source {
        /// The folder, list, archive, table or recording.
        path: PathBuf,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// A row of a table cannot be used.
    #[error("{}, row {row}: {reason}", path.display())]
    Row {
        /// The table.
        path: PathBuf,
        /// Number of the row, counted from 1.
        row: u64,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// A line of a list cannot be used.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// The list.
        path: PathBuf,
        /// Number of the line, counted from 1.
        line: usize,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// An invalid option.
    #[error("{0}")]
    Option(String),
    /// Some images cannot be stored, and bad images are not to be skipped.
    #[error(
        "{count} {} of {} cannot be stored, the first is {}: {reason}. Fix or remove {}, or skip \
         bad images",
        if *count == 1 { "image" } else { "images" }, source_path.display(), first.display(),
        if *count == 1 { "it" } else { "them" }
    )]
    BadImages {
        /// Number of bad images found; there may be more.
        count: u64,
        /// The folder or list.
        source_path: PathBuf,
        /// The first bad image.
        first: PathBuf,
        /// Why the first one cannot be stored.
        reason: BadImage,
    },
    /// The write to be resumed was started with other options or sources.
    #[error(
        "{} belongs to a different write: {what}. Repeat that command, or write everything again \
         without resuming",
        path.display()
    )]
    DifferentWrite {
        /// The record of the earlier write.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// libjpeg-turbo could not be initialized.
    #[error("cannot start libjpeg-turbo: {0}")]
    Jpeg(String),
    /// A bug: all threads ended early. Their messages are on stderr.
    #[error("all threads have ended early: this is a bug, please report the messages above")]
    Ended,
}

fn remedy(error: &io::Error) -> &'static str {
    if is_disk_full(error) { "; make space, or write to another disk" } else { "" }
}

/// Why one image cannot be stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadImage {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Read(String),
    /// The image format is unknown.
    #[error("is not an image of a known format")]
    Unknown,
    /// The image cannot be decoded.
    #[error("does not decode: {0}")]
    Decode(String),
    /// The pixels cannot be converted to u8 RGB in an obvious way.
    #[error("has {0} pixels: convert it to 8 bits")]
    Pixels(String),
    /// Grey values of 16 bits that 8 bits cannot hold.
    #[error(
        "has grey values of 16 bits above 255: convert it to 8 bits, for example with value * 255 / largest value"
    )]
    Grey16,
    /// A side is above the format's limit, which is a u16.
    #[error(
        "has {width}x{height} pixels, but a side can have at most 65535: set a maximal resolution"
    )]
    TooLarge {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// A JPEG above the limit of Baton's loader.
    #[error(
        "has {width}x{height} pixels, but a JPEG can have at most {max_pixels}: set --max-resolution"
    )]
    TooManyPixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Maximum number of pixels.
        max_pixels: u64,
    },
    /// The image does not fit into a page.
    #[error(
        "needs {needed} bytes, but a page has {page_bytes}: write larger pages, store it as JPEG, \
         or set a maximal resolution"
    )]
    Page {
        /// Size of the image to be stored, bytes.
        needed: u64,
        /// Size of a page, bytes.
        page_bytes: u32,
    },
    /// libjpeg-turbo cannot encode the image.
    #[error("does not encode as JPEG: {0}")]
    Encode(String),
}
