//! Writes beton files that Baton and ffcv can read.
//!
//! ```text
//! folder, list or archives ─▶ Source ─▶ threads: read, decode, reduce, encode ─▶ Writer ─▶ file
//!                                       (with one ImageEncoder each)             (in order)
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
//! | `archive` | tar archives |
//! | `encoding` | an image file → the stored image |
//! | `jpeg` | libjpeg-turbo |
//! | `pipeline` | threads that encode images, with results in order |
//! | `images` | [`write_images`]: files, shards, bad images |
//! | `split` | [`KeySplit`]: which of several files a sample is written to |
//! | `table` | [`write_table`]: the rows of a table as samples |
//! | `named_columns` | cells of CSV, TSV and Parquet files |
//! | `parquet` | Parquet files |
//! | `column` | [`TableField`]: columns of a table → values of a field |
//! | `text` | [`TextWriter`]: token ids with labels |
//! | `mel` | log-mel spectrograms |
//! | `recording` | long signals in `.npy`, `.wav` and `.flac` files |
//! | `window` | [`write_windows`]: windows of recordings |
//! | `progress` | record of the finished shards |

mod archive;
mod column;
mod draft;
mod encoding;
mod error;
mod field;
mod file;
mod images;
mod jpeg;
mod mel;
mod named_columns;
mod parquet;
mod pipeline;
mod progress;
mod recording;
mod source;
mod split;
mod table;
mod text;
mod window;

use std::path::{Path, PathBuf};

pub use self::{
    column::TableField,
    encoding::{Encoding, JpegSelection},
    error::{BadImage, Error},
    field::{Array, Field, FieldKind, Value},
    file::{DEFAULT_PAGE_BYTES, FFCV_MIN_PAGE_BYTES, FinishedFile, Writer},
    images::{
        ImageCounts, OnBadImage, Options, OutputFile, Summary, WriteEvent, shard_path, write_images,
    },
    source::{ArchivedFile, EXTENSIONS, Item, Source},
    split::KeySplit,
    table::{TableOptions, WrittenTable, write_table},
    text::{MAX_TEXT_TOKENS, TextWriter},
    window::{
        LabelTable, LabelTimes, RECORDING_FIELD, START_FIELD, WINDOW_FIELD, WINDOW_LABEL_FIELD,
        WindowOptions, WrittenWindows, write_windows,
    },
};

/// What is wrong with a source that was read twice, and was not the same.
const CHANGED_WHILE_READ: &str = "has changed while it was read: is it still being written?";

/// Checks the files that samples are divided among, and the shares of all but the first.
fn check_targets(
    to: &Path,
    others: &[(PathBuf, f64)],
    lists: &[PathBuf],
    source: &Path,
) -> Result<(), Error> {
    let shares: f64 = others.iter().map(|(_, share)| share).sum();
    let is_share = |share: &f64| *share > 0.0 && *share < 1.0;
    if !others.iter().all(|(_, share)| is_share(share)) || shares >= 1.0 {
        return Err(Error::Option(
            "the shares of the other files must be above 0, and below 1 together".to_owned(),
        ));
    }
    let paths = std::iter::once(to).chain(others.iter().map(|(path, _)| path.as_path()));
    let paths: Vec<&Path> = paths.chain(lists.iter().map(PathBuf::as_path)).collect();
    let places: Vec<PathBuf> = paths.iter().map(|path| place_of(path)).collect();
    if places.contains(&place_of(source)) {
        return Err(Error::Option(format!(
            "{} is read, and would be replaced: give different files",
            source.display()
        )));
    }
    let again = (1..places.len()).find(|number| places[..*number].contains(&places[*number]));
    match again {
        Some(again) => Err(Error::Option(format!(
            "{} would be written twice: give different files",
            paths[again].display()
        ))),
        None => Ok(()),
    }
}

/// The path of a file, with its folder as the file system knows it.
fn place_of(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    match (folder.canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}
