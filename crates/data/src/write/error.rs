//! Why a data set cannot be written: where, what is wrong, and what to do about it.

use std::{io, path::PathBuf};

/// Anything that stops a writer. What is wrong with a single image is [`BadImage`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried, e.g. `write`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Two writers of one file.
    #[error(
        "another process is writing {}: wait for it, or write to another file", path.display()
    )]
    Busy {
        /// The file to be written.
        path: PathBuf,
    },
    /// The target names no file.
    #[error("{} does not name a file: give one, e.g. train.beton", path.display())]
    Target {
        /// The path as given.
        path: PathBuf,
    },
    /// The fields cannot be stored.
    #[error("field \"{name}\": {reason}")]
    Field {
        /// Its name.
        name: String,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// No field at all, or more than the format can count.
    #[error("{0} fields, but a file has 1 to 65535")]
    FieldCount(usize),
    /// Pages of an impossible size.
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
    /// Another number of values than of fields.
    #[error("sample {sample} has {values} values for {fields} fields")]
    ValueCount {
        /// Position in the file.
        sample: u64,
        /// Values given.
        values: usize,
        /// Fields of the file.
        fields: usize,
    },
    /// The values of a sample share one page.
    #[error(
        "sample {sample} needs {needed} bytes, but a page has {page_bytes}: write larger pages, \
         or smaller values"
    )]
    SampleSize {
        /// Position in the file.
        sample: u64,
        /// Bytes of its values together, and one for each empty one.
        needed: u64,
        /// Bytes of a page.
        page_bytes: u32,
    },
    /// More samples than the file was laid out for.
    #[error("the file was laid out for {planned} samples, and this is one more")]
    TooMany {
        /// The number given at the start.
        planned: u64,
    },
    /// A source without images.
    #[error("{}: {reason}", path.display())]
    Source {
        /// The folder or list.
        path: PathBuf,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// A line of a list cannot be used.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// The list.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// An option out of its range.
    #[error("{0}")]
    Option(String),
    /// Images that cannot be stored, and nobody said to skip them.
    #[error(
        "{count} {} of {} cannot be stored, the first is {}: {reason}. Mend or remove {}, or skip \
         bad images",
        if *count == 1 { "image" } else { "images" }, source_path.display(), first.display(),
        if *count == 1 { "it" } else { "them" }
    )]
    BadImages {
        /// Bad images seen; there may be more.
        count: u64,
        /// The folder or list.
        source_path: PathBuf,
        /// The first of them.
        first: PathBuf,
        /// What is wrong with that one.
        reason: BadImage,
    },
    /// What is to be resumed was begun differently.
    #[error(
        "{} is of another write: {what}. Repeat that command, or write all anew without resuming",
        path.display()
    )]
    OtherWrite {
        /// The sidecar.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// A thread did not start.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// libjpeg-turbo did not start.
    #[error("cannot start libjpeg-turbo: {0}")]
    Jpeg(String),
    /// A bug: every thread ended early. Their messages are on stderr.
    #[error("all threads have ended early: this is a bug, please report the messages above")]
    Ended,
}

/// Why one image cannot be stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadImage {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Read(String),
    /// No image format that is known.
    #[error("is no image of a known format")]
    Unknown,
    /// Its decoder refuses.
    #[error("does not decode: {0}")]
    Decode(String),
    /// Pixels without an obvious meaning in u8 RGB.
    #[error("has {0} pixels: convert it to 8 bits")]
    Pixels(String),
    /// Sides above the format's u16.
    #[error("is {width}x{height} pixels, but a side has 65535 at most: set a maximal resolution")]
    TooLarge {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// It does not fit into a page.
    #[error(
        "needs {needed} bytes, but a page has {page_bytes}: write larger pages, store it as JPEG, \
         or set a maximal resolution"
    )]
    Page {
        /// Bytes to be stored.
        needed: u64,
        /// Bytes of a page.
        page_bytes: u32,
    },
    /// libjpeg-turbo does not encode it.
    #[error("does not encode as JPEG: {0}")]
    Encode(String),
}
