//! Why data cannot be used: which file, which sample, what is wrong, and what to do about it.

use std::{io, path::PathBuf};

use crate::{beton::FieldType, shards};

/// Anything that stops the loader.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried, e.g. `open`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
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
        /// Where its value lies in the file, or its row if that is what is wrong.
        offset: u64,
        /// What is wrong with it.
        fault: SampleFault,
    },
    /// A file or shard cannot be had.
    #[error(transparent)]
    Shards(#[from] shards::Error),
    /// A decoding thread did not start.
    #[error("cannot start a decoding thread: {0}")]
    Thread(#[source] io::Error),
    /// libjpeg-turbo did not start.
    #[error("cannot start libjpeg-turbo: {0}")]
    Decoder(String),
    /// A bug: a decoding thread panicked. Its message is on stderr.
    #[error("a decoding thread panicked: this is a bug, please report the message above")]
    Panicked,
}

impl Error {
    /// Whether the same try may succeed later: a store or this machine refused, not the data.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Shards(error) => error.may_pass(),
            Self::Thread(_) | Self::Decoder(_) | Self::Panicked => true,
            Self::Io { .. } | Self::File { .. } | Self::Sample { .. } => false,
        }
    }

    /// Whether it is the fault of one sample's data, so that others may be sound.
    pub(crate) fn is_of_data(&self) -> bool {
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

/// What can be wrong with a file as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// No bytes at all.
    #[error("the file is empty: copy or write it again")]
    Empty,
    /// It ends inside a section.
    #[error(
        "the file ends at byte {file_bytes}, but its {section} needs bytes {start}..{end}: \
         it was cut off or damaged, copy or write it again"
    )]
    CutOff {
        /// The section, in words.
        section: &'static str,
        /// Its first byte.
        start: u64,
        /// The byte after its last.
        end: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// Not format version 2, or not a beton file.
    #[error("format version {0}, but only 2 is known: is it a .beton file written by ffcv 1.x?")]
    Version(u16),
    /// The writer stopped before its last step.
    #[error("alloc_table_ptr is 0: its writer never finished, write it again")]
    Unfinished,
    /// Pages have an impossible size.
    #[error("page_size is {0}, which is no power of two: the header is damaged")]
    PageSize(u32),
    /// Rows would be empty.
    #[error("the file has no fields: write it again with an image and a label field")]
    NoFields,
    /// A field whose rows cannot be laid out.
    #[error(
        "field \"{name}\" has type {type_id}, whose layout is unknown (255 is a user's own class): \
         write the file without it"
    )]
    UnknownType {
        /// Its name.
        name: String,
        /// Its number in the file.
        type_id: u8,
    },
    /// The allocation table lies elsewhere.
    #[error(
        "alloc_table_ptr is {start}, outside bytes {least}..={file_bytes}: \
         the file was cut off or its header is damaged, copy or write it again"
    )]
    TablePlace {
        /// Where the header says it starts.
        start: u64,
        /// End of the metadata rows.
        least: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// The allocation table is no whole number of entries.
    #[error(
        "the allocation table at byte {start} has {table_bytes} bytes, no multiple of 24: \
         something was cut off or appended, copy or write it again"
    )]
    TableLength {
        /// Its first byte.
        start: u64,
        /// Its length.
        table_bytes: u64,
    },
    /// An allocation belongs to no sample.
    #[error(
        "entry {entry} of the allocation table names sample {sample}, but there are {samples}: \
         the file is damaged, copy or write it again"
    )]
    TableSample {
        /// Position in the table.
        entry: u64,
        /// The sample it names.
        sample: u64,
        /// Number of samples.
        samples: u64,
    },
    /// No field of that name.
    #[error(
        "no field \"{name}\"; it has {}: set data.input_field and data.label_field",
        list(have)
    )]
    MissingField {
        /// The name looked for.
        name: String,
        /// The names there are.
        have: Vec<String>,
    },
    /// A field of that name, but of another type.
    #[error(
        "field \"{name}\" is a {}, but a {} is needed: set data.input_field and data.label_field",
        found.name(),
        wanted.iter().map(|wanted| wanted.name()).collect::<Vec<_>>().join(" or ")
    )]
    WrongType {
        /// Its name.
        name: String,
        /// Its type.
        found: FieldType,
        /// The types that would do.
        wanted: Vec<FieldType>,
    },
    /// Values where classes are needed.
    #[error(
        "field \"{name}\" is a {}, but classes are an IntField: name another one in \
         data.label_field, or learn its values with loss.kind = \"mse\"",
        found.name()
    )]
    NoClasses {
        /// Its name.
        name: String,
        /// Its type.
        found: FieldType,
    },
    /// Targets of another number than the model has outputs.
    #[error(
        "field \"{name}\" has {found} {} per sample, but model.num_classes = {outputs}: set \
         model.num_classes = {found}, or name another field in data.label_field",
        if *found == 1 { "value" } else { "values" }
    )]
    Outputs {
        /// Its name.
        name: String,
        /// Values of a sample.
        found: u64,
        /// Outputs of the model.
        outputs: u32,
    },
    /// A shard unlike the others.
    #[error(
        "field \"{name}\" holds something else than in the first shard: \
         write all shards with the same fields"
    )]
    OtherInput {
        /// Its name.
        name: String,
    },
    /// An array field whose values cannot be read.
    #[error(
        "field \"{name}\" cannot be read: {what}; write the file without it or with another dtype"
    )]
    ArrayType {
        /// Its name.
        name: String,
        /// What is wrong, in words.
        what: String,
    },
}

/// What can be wrong with one sample.
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
         raise model.num_classes or mend the data set"
    )]
    Label {
        /// The label found.
        label: i64,
        /// Outputs of the model.
        num_classes: u32,
    },
    /// NaN or infinite, or beyond what f32 can hold.
    #[error(
        "field \"{field}\" holds {value} as f32, but only finite numbers can be learned from: mend \
         the data set, or set data.on_bad_sample = \"skip\""
    )]
    NotFinite {
        /// Name of the field.
        field: String,
        /// The number.
        value: String,
    },
    /// Neither JPEG nor raw.
    #[error("image mode {0}, but only 0 (jpg) and 1 (raw) are known: the row is damaged")]
    Mode(u8),
    /// No pixels.
    #[error("the image is {width}x{height} pixels: the row is damaged")]
    NoPixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// The allocation table does not know the image.
    #[error(
        "no allocation at byte {pointer}: the file was cut off or damaged, copy or write it again"
    )]
    Unresolved {
        /// Where its row says that the image starts.
        pointer: u64,
    },
    /// The image lies outside the data pages.
    #[error(
        "its value at bytes {start}..{end} lies outside the data pages {least}..{most}: \
         the file is damaged, copy or write it again"
    )]
    OutsidePages {
        /// First byte of the image.
        start: u64,
        /// The byte after its last.
        end: u64,
        /// First byte of the pages.
        least: u64,
        /// The byte after their last.
        most: u64,
    },
    /// The row and the allocation table disagree about a value.
    #[error(
        "{stored} bytes are stored where {size} are needed: \
         the file is damaged, copy or write it again"
    )]
    ValueSize {
        /// Length in the allocation table.
        stored: u64,
        /// Length by the row or the field's type.
        size: u64,
    },
    /// It was longer when it was opened.
    #[error(
        "the file now ends before byte {end}: it was cut off while in use; \
         put the whole file back and start again"
    )]
    Shrunk {
        /// The byte after the last one wanted.
        end: u64,
    },
    /// A raw image of the wrong length.
    #[error(
        "{stored} bytes are stored for a raw image of {width}x{height} pixels, not 3 per pixel: \
         the file is damaged, or its writer got an image above 65535 pixels"
    )]
    RawSize {
        /// Length in the allocation table.
        stored: u64,
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// Not a JPEG stream.
    #[error("the image should be a JPEG, but does not start with FF D8: the file is damaged")]
    NotJpeg,
    /// The JPEG's own size contradicts the row.
    #[error(
        "the JPEG is {jpeg_width}x{jpeg_height} pixels, but its row says {width}x{height}: \
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
    /// The JPEG is far too short for its size.
    #[error("{stored} bytes cannot hold a JPEG of {width}x{height} pixels: the file is damaged")]
    TooFewBytes {
        /// Length in the allocation table.
        stored: u64,
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// The JPEG is far too large.
    #[error(
        "{width}x{height} pixels, above the {most} that are decoded: \
         the file is damaged, or write it with smaller images"
    )]
    TooManyPixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Most pixels allowed.
        most: u64,
    },
    /// Four ink channels.
    #[error("the JPEG is CMYK: convert it to RGB when writing the data set")]
    Cmyk,
    /// libjpeg-turbo refuses, or warns of, damaged data.
    #[error("the JPEG does not decode: {0}")]
    Jpeg(String),
    /// A text that is none.
    #[error("the JSON text does not parse: {0}")]
    Json(String),
    /// The resizer refuses.
    #[error("the image does not resize: {0}")]
    Resize(String),
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}
