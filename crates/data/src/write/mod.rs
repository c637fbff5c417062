//! Writes beton files that Baton and ffcv can read.
//!
//! ```text
//! folder or list ─▶ Source ─▶ threads: read, decode, reduce, encode ─▶ Writer ─▶ file
//!                             (with one ImageEncoder each)             (in order)
//! ```
//!
//! Start with [`write_images`], or with [`Writer`] for fields of any kind.
//!
//! | file | content |
//! |---|---|
//! | `field` | fields and values: descriptors, rows, validation |
//! | `file` | [`Writer`]: pages, allocation table, header |
//! | `draft` | a file that gets its name only when it is complete |
//! | `source` | class folders and lists |
//! | `encoding` | an image file → the stored image |
//! | `jpeg` | libjpeg-turbo |
//! | `pipeline` | threads that encode images, with results in order |
//! | `images` | [`write_images`]: files, shards, bad images |
//! | `split` | [`KeySplit`]: which of several files a sample is written to |
//! | `table` | [`write_table`]: columns of CSV and TSV files |
//! | `text` | [`TextWriter`]: token ids with labels |
//! | `progress` | record of the finished shards |

mod draft;
mod encoding;
mod error;
mod field;
mod file;
mod images;
mod jpeg;
mod pipeline;
mod progress;
mod source;
mod split;
mod table;
mod text;

pub use self::{
    encoding::{Encoding, JpegSelection},
    error::{BadImage, Error},
    field::{Array, Field, FieldKind, Value},
    file::{DEFAULT_PAGE_BYTES, FFCV_MIN_PAGE_BYTES, FinishedFile, Writer},
    images::{
        ImageCounts, OnBadImage, Options, OutputFile, Summary, WriteEvent, shard_path, write_images,
    },
    source::{EXTENSIONS, Item, Source},
    split::KeySplit,
    table::{TableField, TableOptions, WrittenTable, write_table},
    text::{MAX_TEXT_TOKENS, TextWriter},
};
