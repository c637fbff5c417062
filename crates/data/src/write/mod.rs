//! Writes beton files that Baton and the real ffcv read.
//!
//! ```text
//! folder or list ─▶ Source ─▶ threads: read, decode, reduce, encode ─▶ Writer ─▶ file
//!                             (Studio each, a bounded number ahead)    (in order)
//! ```
//!
//! Start with [`write_images`], or with [`Writer`] for fields of any kind.
//!
//! | file | what it knows |
//! |---|---|
//! | `field` | fields and values: descriptors, rows, what is refused |
//! | `file` | [`Writer`]: pages, allocation table, header |
//! | `draft` | a file that has its name only when it is whole |
//! | `source` | class folders and lists |
//! | `picture` | an image file → what is stored of it |
//! | `jpeg` | libjpeg-turbo |
//! | `workshop` | threads, in order |
//! | `images` | [`write_images`]: files, shards, bad images |
//! | `progress` | which shards are done |

mod draft;
mod error;
mod field;
mod file;
mod images;
mod jpeg;
mod picture;
mod progress;
mod source;
mod workshop;

pub use self::{
    error::{BadImage, Error},
    field::{Array, Field, Kind, Value},
    file::{DEFAULT_PAGE_BYTES, FFCV_LEAST_PAGE_BYTES, Writer, Written},
    images::{Event, OnBadImage, OneFile, Options, Summary, Tally, shard_path, write_images},
    picture::{Choice, Encoding},
    source::{EXTENSIONS, Item, Source},
};
