//! Errors of reading data: the file, the sample, the problem, and the remedy.

use std::{io, path::PathBuf, time::Duration};

use crate::{
    beton::FieldType,
    file::is_disk_full,
    shards::{Remedy, RequestFault},
};

/// Why data cannot be opened or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An I/O error.
    #[error("cannot {operation} {}: {source}{}", path.display(), disk_remedy(source))]
    Io {
        /// The operation that failed, e.g. `open`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file as a whole cannot be used.
    #[error("{}: {fault}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        fault: FileFault,
    },
    /// One sample cannot be used.
    #[error("{}: sample {sample}, byte {offset}: {fault}", path.display())]
    Sample {
        /// The file.
        path: PathBuf,
        /// Position in the file.
        sample: u64,
        /// Position in the file of its value, or of its row if the row is wrong.
        offset: u64,
        /// What is wrong with it.
        fault: SampleFault,
    },
    /// The source is not a supported path, pattern or URL.
    #[error("data set \"{source_text}\": {problem}")]
    Source {
        /// As written in the recipe.
        source_text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The source is valid, but there is no such file or object.
    #[error("nothing matches \"{source_text}\": {there}")]
    NothingMatches {
        /// As written in the recipe.
        source_text: String,
        /// Description of the existing files.
        there: String,
    },
    /// An operation of the object store failed.
    #[error("cannot {operation} {url}: {fault} ({attempts} in {elapsed:.1?}); {remedy}", attempts = attempts_in_words(*attempts))]
    Store {
        /// The operation that failed, e.g. `fetch`.
        operation: &'static str,
        /// The object or folder.
        url: String,
        /// Failure of the last attempt.
        fault: Box<RequestFault>,
        /// Number of attempts since the last progress.
        attempts: u32,
        /// Time since the last progress.
        elapsed: Duration,
        /// What to do about it.
        remedy: Remedy,
    },
    /// Two downloads of the same object differ, and neither matches the store's ETag.
    #[error(
        "{url} was damaged in two downloads, differently each time: something on the network path to the store \
         changes data; use https, or another network path"
    )]
    Damaged {
        /// The object.
        url: String,
    },
    /// This shard is larger than the cache.
    #[error(
        "{name} has {bytes} bytes, but the shard cache may hold only {cache_bytes}: \
         raise data.cache_gib to twice the largest shard or more, or write smaller shards"
    )]
    CacheTooSmall {
        /// The largest shard.
        name: String,
        /// Size of the shard, bytes.
        bytes: u64,
        /// Size limit of the cache, bytes.
        cache_bytes: u64,
    },
    /// All shards in the cache remained in use until the timeout.
    #[error(
        "no room for {name} ({bytes} bytes) in {} for {waited:.0?}: {}", cache_dir.display(),
        no_room(*is_disk_full, *in_use_bytes, *cache_bytes)
    )]
    NoRoom {
        /// The shard.
        name: String,
        /// Size of the shard, bytes.
        bytes: u64,
        /// Folder of the cache.
        cache_dir: PathBuf,
        /// Size limit of the cache, bytes.
        cache_bytes: u64,
        /// Size of the shards that cannot be evicted, bytes.
        in_use_bytes: u64,
        /// Whether the disk is full before the cache reaches its limit.
        is_disk_full: bool,
        /// Time spent waiting for space.
        waited: Duration,
    },
    /// A bug in the caller.
    #[error("shard {shard} was requested, but there are {shards}: this is a bug, please report it")]
    OutOfRange {
        /// The requested shard.
        shard: usize,
        /// Number of shards.
        shards: usize,
    },
    /// The threads that fetch shards could not be started.
    #[error("cannot start a thread that fetches shards: {0}")]
    FetchThread(#[source] io::Error),
    /// The data set was dropped while a shard was being fetched.
    #[error("fetching {name} was cancelled: its data set is no longer used")]
    Cancelled {
        /// The shard.
        name: String,
    },
    /// A decoding thread could not be started.
    #[error("cannot start a decoding thread: {0}")]
    Thread(#[source] io::Error),
    /// libjpeg-turbo could not be initialized.
    #[error("cannot start libjpeg-turbo: {0}")]
    Decoder(String),
    /// A bug: a decoding thread panicked. Its message is on stderr.
    #[error("a decoding thread panicked: this is a bug, please report the message above")]
    Panicked,
}

impl Error {
    /// Whether the same operation may succeed later: the cause is a store or this machine, not the data.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Store { .. }
            | Self::NoRoom { .. }
            | Self::FetchThread(_)
            | Self::Cancelled { .. }
            | Self::Thread(_)
            | Self::Decoder(_)
            | Self::Panicked => true,
            // Only the cache is written to.
            Self::Io { source, .. } => is_disk_full(source),
            Self::File { .. }
            | Self::Sample { .. }
            | Self::Source { .. }
            | Self::NothingMatches { .. }
            | Self::Damaged { .. }
            | Self::CacheTooSmall { .. }
            | Self::OutOfRange { .. } => false,
        }
    }

    pub(crate) fn io(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { operation, path, source }
    }

    /// Whether only this sample's data is bad, so that other samples may be usable.
    pub(crate) fn is_bad_sample(&self) -> bool {
        match self {
            Self::Sample { fault, .. } => !matches!(
                fault,
                SampleFault::OutOfRange { .. }
                    | SampleFault::Label { .. }
                    | SampleFault::Shrunk { .. }
            ),
            _ => false,
        }
    }
}

/// Faults of a file as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// The file has no bytes.
    #[error("the file is empty: copy or write it again")]
    Empty,
    /// The file ends inside a section.
    #[error(
        "the file ends at byte {file_bytes}, but its {section} needs bytes {start}..{end}: \
         it was truncated or damaged, copy or write it again"
    )]
    CutOff {
        /// Name of the section.
        section: &'static str,
        /// First byte of the section.
        start: u64,
        /// End of the section, exclusive.
        end: u64,
        /// Size of the file, bytes.
        file_bytes: u64,
    },
    /// Not format version 2, or not a beton file.
    #[error(
        "format version {0}, but only 2 is supported: is it a .beton file written by ffcv 1.x?"
    )]
    Version(u16),
    /// The writer stopped before its last step.
    #[error("alloc_table_ptr is 0: the file was never finished, write it again")]
    Unfinished,
    /// The page size is invalid.
    #[error("page_size is {0}, which is not a power of two: the header is damaged")]
    PageSize(u32),
    /// The file has no fields.
    #[error("the file has no fields: write it again with an image and a label field")]
    NoFields,
    /// A field of an unknown type.
    #[error(
        "field \"{name}\" has type {type_id}, whose layout is unknown (255 is a user's own class): \
         write the file without it"
    )]
    UnknownType {
        /// Name of the field.
        name: String,
        /// Number of the type in the file.
        type_id: u8,
    },
    /// The position of the allocation table is invalid.
    #[error(
        "alloc_table_ptr is {start}, outside bytes {min_start}..={file_bytes}: \
         the file was truncated or its header is damaged, copy or write it again"
    )]
    TablePosition {
        /// Start of the table in the header.
        start: u64,
        /// End of the metadata rows.
        min_start: u64,
        /// Size of the file, bytes.
        file_bytes: u64,
    },
    /// The size of the allocation table is invalid.
    #[error(
        "the allocation table at byte {start} has {table_bytes} bytes, which is not a multiple of 24: \
         the file was truncated or something was appended, copy or write it again"
    )]
    TableLength {
        /// First byte of the table.
        start: u64,
        /// Size of the table, bytes.
        table_bytes: u64,
    },
    /// An allocation refers to a sample that does not exist.
    #[error(
        "entry {entry} of the allocation table refers to sample {sample}, but there are {samples}: \
         the file is damaged, copy or write it again"
    )]
    TableSample {
        /// Position in the table.
        entry: u64,
        /// The sample in the entry.
        sample: u64,
        /// Number of samples.
        samples: u64,
    },
    /// There is no field of that name.
    #[error(
        "no field \"{name}\"; it has {}: set data.input_field and data.label_field",
        list(available)
    )]
    MissingField {
        /// The requested name.
        name: String,
        /// Names of the existing fields.
        available: Vec<String>,
    },
    /// The field has the wrong type.
    #[error(
        "field \"{name}\" is a {}, but a {} is needed: set data.input_field and data.label_field",
        found.name(),
        expected.iter().map(|expected| expected.name()).collect::<Vec<_>>().join(" or ")
    )]
    WrongType {
        /// Name of the field.
        name: String,
        /// Type of the field.
        found: FieldType,
        /// The allowed types.
        expected: Vec<FieldType>,
    },
    /// The field has values, but classes are needed.
    #[error(
        "field \"{name}\" is a {}, but classes need an IntField: name another field in \
         data.label_field, or train a regression with loss.kind = \"mse\"",
        found.name()
    )]
    NoClasses {
        /// Name of the field.
        name: String,
        /// Type of the field.
        found: FieldType,
    },
    /// The number of targets differs from the number of the model's outputs.
    #[error(
        "field \"{name}\" has {found} {} per sample, but model.num_classes = {outputs}: set \
         model.num_classes = {found}, or name another field in data.label_field",
        if *found == 1 { "value" } else { "values" }
    )]
    Outputs {
        /// Name of the field.
        name: String,
        /// Number of values of a sample.
        found: u64,
        /// Number of the model's outputs.
        outputs: u32,
    },
    /// The input field differs from that of the first shard.
    #[error(
        "field \"{name}\" has another type or shape than in the first shard: \
         write all shards with the same fields"
    )]
    MismatchedInput {
        /// Name of the field.
        name: String,
    },
    /// An array field whose values cannot be read.
    #[error(
        "field \"{name}\" cannot be read: {what}; write the file without it or with another dtype"
    )]
    ArrayType {
        /// Name of the field.
        name: String,
        /// What is wrong.
        what: String,
    },
}

/// Faults of one sample.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleFault {
    /// There is no such sample.
    #[error("there are only {samples} samples")]
    OutOfRange {
        /// Number of samples.
        samples: u64,
    },
    /// The label does not fit the model.
    #[error(
        "label {label}, but model.num_classes = {num_classes}: \
         raise model.num_classes or fix the data set"
    )]
    Label {
        /// The label found.
        label: i64,
        /// Outputs of the model.
        num_classes: u32,
    },
    /// NaN, infinite, or outside the range of f32.
    #[error(
        "field \"{field}\" has the value {value} as f32, but training needs finite numbers: fix \
         the data set, or set data.on_bad_sample = \"skip\""
    )]
    NotFinite {
        /// Name of the field.
        field: String,
        /// The number.
        value: String,
    },
    /// The fields of a text contradict each other.
    #[error("the text has {what}: the row is damaged, run `baton data tokenize` again")]
    Text {
        /// What is wrong.
        what: String,
    },
    /// A token id is not in the model's vocabulary.
    #[error(
        "token {token} is not in the model's vocabulary of {vocabulary}: run `baton data tokenize` with the \
         tokenizer of this model"
    )]
    Vocabulary {
        /// The token id.
        token: i64,
        /// Number of token ids of the model.
        vocabulary: u64,
    },
    /// Neither JPEG nor raw.
    #[error("image mode {0}, but only 0 (jpg) and 1 (raw) exist: the row is damaged")]
    Mode(u8),
    /// A side of the image is 0.
    #[error("the image is {width}x{height} pixels: the row is damaged")]
    NoPixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// The allocation table has no entry for the value.
    #[error(
        "no allocation at byte {pointer}: the file was truncated or damaged, copy or write it again"
    )]
    MissingAllocation {
        /// Start of the value in its row.
        pointer: u64,
    },
    /// The value is outside the data pages.
    #[error(
        "its value at bytes {start}..{end} is outside the data pages {pages_start}..{pages_end}: \
         the file is damaged, copy or write it again"
    )]
    OutsidePages {
        /// First byte of the value.
        start: u64,
        /// End of the value, exclusive.
        end: u64,
        /// First byte of the pages.
        pages_start: u64,
        /// End of the pages, exclusive.
        pages_end: u64,
    },
    /// The allocation table has another size for the value than the row or the field's type.
    #[error(
        "{stored} bytes are stored where {size} are needed: \
         the file is damaged, copy or write it again"
    )]
    ValueSize {
        /// Size in the allocation table, bytes.
        stored: u64,
        /// Size by the row or the field's type, bytes.
        size: u64,
    },
    /// The file was truncated after it was opened.
    #[error(
        "the file now ends before byte {end}: it was truncated while in use; \
         restore the complete file and start again"
    )]
    Shrunk {
        /// End of the requested bytes, exclusive.
        end: u64,
    },
    /// A raw image of the wrong length.
    #[error(
        "{stored} bytes are stored for a raw image of {width}x{height} pixels, not 3 per pixel: \
         the file is damaged, or its writer got an image above 65535 pixels"
    )]
    RawSize {
        /// Size in the allocation table, bytes.
        stored: u64,
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// Not a JPEG stream.
    #[error("the image should be a JPEG, but does not start with FF D8: the file is damaged")]
    NotJpeg,
    /// The JPEG has another size than in the row.
    #[error(
        "the JPEG has {jpeg_width}x{jpeg_height} pixels, but {width}x{height} in its row: \
         the file is damaged"
    )]
    JpegSize {
        /// Width of the JPEG in pixels.
        jpeg_width: u32,
        /// Height of the JPEG in pixels.
        jpeg_height: u32,
        /// Width in the row.
        width: u32,
        /// Height in the row.
        height: u32,
    },
    /// The JPEG has too few bytes for its size.
    #[error("{stored} bytes cannot hold a JPEG of {width}x{height} pixels: the file is damaged")]
    TooFewBytes {
        /// Size of the stored JPEG, bytes.
        stored: u64,
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// The JPEG is too large.
    #[error(
        "{width}x{height} pixels, above the limit of {max_pixels}: \
         the file is damaged, or write it with smaller images"
    )]
    TooManyPixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Maximum number of pixels.
        max_pixels: u64,
    },
    /// The JPEG has four ink channels.
    #[error("the JPEG is CMYK: convert it to RGB when writing the data set")]
    Cmyk,
    /// libjpeg-turbo reports an error or a warning.
    #[error("the JPEG does not decode: {0}")]
    Jpeg(String),
    /// Invalid JSON.
    #[error("the JSON text does not parse: {0}")]
    Json(String),
    /// The image cannot be resized.
    #[error("the image cannot be resized: {0}")]
    Resize(String),
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

/// Remedy for a disk without space.
const DISK_REMEDY: &str = "lower data.cache_gib or enlarge the disk";

/// The end of the message of an I/O error. Only the cache is written to, so only its disk can be full.
fn disk_remedy(source: &io::Error) -> String {
    if is_disk_full(source) { format!("; {DISK_REMEDY}") } else { String::new() }
}

fn no_room(is_disk_full: bool, in_use_bytes: u64, cache_bytes: u64) -> String {
    if is_disk_full {
        return format!(
            "the disk is full, and the {in_use_bytes} bytes of shards there are in use by this or other \
             processes; {DISK_REMEDY}"
        );
    }
    format!(
        "{in_use_bytes} of its {cache_bytes} bytes are in use by this or other processes; raise \
         data.cache_gib, or set data.order = \"quasi_random\""
    )
}

fn attempts_in_words(attempts: u32) -> String {
    if attempts == 1 { "1 attempt".to_owned() } else { format!("{attempts} attempts") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_transient_and_its_error_has_a_remedy() {
        let failed = |kind: io::ErrorKind| Error::io("write", "/cache/a.beton")(kind.into());
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
            let error = failed(kind);
            assert!(error.is_transient(), "{error}");
            assert!(error.to_string().ends_with("; lower data.cache_gib or enlarge the disk"));
        }
        let error = failed(io::ErrorKind::PermissionDenied);
        assert!(!error.is_transient() && !error.to_string().contains("cache_gib"), "{error}");
    }

    #[test]
    fn without_room_the_remedy_depends_on_what_is_full() {
        let error = |is_disk_full| Error::NoRoom {
            name: "s3://bucket/a.beton".to_owned(),
            bytes: 10,
            cache_dir: "/cache".into(),
            cache_bytes: 50,
            in_use_bytes: 45,
            is_disk_full,
            waited: Duration::from_secs(300),
        };
        assert_eq!(
            error(false).to_string(),
            "no room for s3://bucket/a.beton (10 bytes) in /cache for 300s: 45 of its 50 bytes are in use \
             by this or other processes; raise data.cache_gib, or set data.order = \"quasi_random\""
        );
        assert_eq!(
            error(true).to_string(),
            "no room for s3://bucket/a.beton (10 bytes) in /cache for 300s: the disk is full, and the 45 \
             bytes of shards there are in use by this or other processes; lower data.cache_gib or enlarge \
             the disk"
        );
        assert!(error(true).is_transient());
    }
}
