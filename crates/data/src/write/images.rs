//! From labelled image files to one beton file, or to shards of one data set.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use super::{
    BadImage, Error, Field, Item, Kind, Source, Value, Writer, Written,
    draft::replace,
    picture::{Encoding, Origin},
    progress::{DoneShard, Progress},
    workshop::prepare_all,
};
use crate::{beton::Mode, with_suffix};

/// Bad images after which it is no use to look for more before giving up.
const MOST_BAD: u64 = 100;

/// What [`write_images`] is to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// How images are stored.
    pub encoding: Encoding,
    /// Name of the image field.
    pub image_field: String,
    /// Name of the label field.
    pub label_field: String,
    /// Bytes of a page, a power of two; no stored image may be larger.
    pub page_bytes: u32,
    /// Threads that decode and encode.
    pub threads: NonZeroUsize,
    /// Number of files. With `None` the target is one file; with N it becomes N files with
    /// contiguous parts, `train-00000-of-00005.beton` for `train.beton`.
    pub shards: Option<u32>,
    /// Whether to keep shards that the same write, interrupted, has finished.
    pub resume: bool,
    /// What to do about images that cannot be stored.
    pub on_bad_image: OnBadImage,
}

/// What to do about images that cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadImage {
    /// Look at the rest of the file to be, for others, then fail.
    Fail,
    /// Leave them out.
    Skip,
}

/// What happens during [`write_images`].
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A shard of an earlier run is kept.
    Kept {
        /// The file.
        path: &'a Path,
        /// Samples in it.
        samples: u64,
        /// Images of the source that it stands for: samples and skipped ones.
        images: u64,
    },
    /// An image was stored.
    Stored {
        /// Length of its file.
        source_bytes: u64,
        /// Its length in the beton file.
        stored_bytes: u64,
    },
    /// An image cannot be stored.
    Bad {
        /// Its file.
        path: &'a Path,
        /// Why.
        reason: &'a BadImage,
    },
    /// A file is on the disk under its name.
    Wrote {
        /// The file.
        path: &'a Path,
        /// What is in it.
        written: Written,
    },
}

/// Counts of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Tally {
    /// Images stored.
    pub samples: u64,
    /// Bad images that were left out.
    pub skipped: u64,
    /// Those of the samples that are JPEGs.
    pub jpeg: u64,
    /// Those of the JPEGs that are their files' own bytes.
    pub untouched: u64,
    /// Length of the samples' files.
    pub source_bytes: u64,
    /// Length of the samples' images as stored.
    pub stored_bytes: u64,
}

/// A file that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneFile {
    /// Where.
    pub path: PathBuf,
    /// Samples in it.
    pub samples: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Whether an earlier run wrote it.
    pub kept: bool,
}

/// What [`write_images`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Counts over all files, kept ones included.
    pub tally: Tally,
    /// The files, in the order of the samples.
    pub files: Vec<OneFile>,
    /// The list of class names, one per line by label, if the source has names.
    pub classes: Option<PathBuf>,
}

/// Writes a data set of images with a label each, in the order of the source.
///
/// The bytes of the files depend on source and options, not on the number of threads. A file
/// appears under its name when it is whole and on the disk, and replaces an older one. With class
/// names, they are written to `TARGET.classes.txt`. With shards, `TARGET-write.json` tells
/// what is being written and which shards are done.
///
/// Peak memory: per thread one file, decoded and reduced, and four images as stored; one page; and
/// 48 bytes per sample of one file.
///
/// # Errors
/// Bad images, unless they are to be skipped; options out of range; a resumed write that is not the
/// same; or the system refuses.
pub fn write_images(
    source: &Source,
    target: &Path,
    options: &Options,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<Summary, Error> {
    options.encoding.check()?;
    let images = source.items.len();
    let (mut progress, paths) = match options.shards {
        None => (None, vec![target.to_owned()]),
        Some(shards) => {
            if shards == 0 || shards as usize > images {
                return Err(Error::Option(format!(
                    "{shards} shards of {images} images: take 1 to {images} shards"
                )));
            }
            let paths = (0..shards).map(|shard| shard_path(target, shard, shards)).collect();
            (Some(Progress::open(source, target, options)?), paths)
        }
    };
    if options.resume && progress.is_none() {
        let reason = "only shards can be resumed: give their number too";
        return Err(Error::Option(reason.to_owned()));
    }

    let mut summary = Summary { tally: Tally::default(), files: Vec::new(), classes: None };
    for (shard, path) in paths.iter().enumerate() {
        let range = images * shard / paths.len()..images * (shard + 1) / paths.len();
        // Where bad images shall be an error, a shard without them is done again, to name them.
        let skips = options.on_bad_image == OnBadImage::Skip;
        let kept = progress
            .as_ref()
            .and_then(|progress| progress.done(shard, path))
            .filter(|done| skips || done.tally.skipped == 0);
        let (done, is_kept) = match kept {
            Some(done) => {
                let images = range.len() as u64;
                on_event(Event::Kept { path, samples: done.tally.samples, images });
                (done, true)
            }
            None => {
                let items = &source.items[range.clone()];
                let done = write_file(source, items, range.start as u64, path, options, on_event)?;
                if let Some(progress) = &mut progress {
                    progress.add(shard, done)?;
                }
                (done, false)
            }
        };
        summary.tally.add(done.tally);
        summary.files.push(OneFile {
            path: path.clone(),
            samples: done.tally.samples,
            bytes: done.bytes,
            kept: is_kept,
        });
    }
    if let Some(classes) = &source.classes {
        let path = with_suffix(target, ".classes.txt");
        replace(&path, &classes.iter().map(|name| format!("{name}\n")).collect::<String>())?;
        summary.classes = Some(path);
    }
    Ok(summary)
}

/// Writes one file of consecutive items; `first` is the position of the first in the source.
fn write_file(
    source: &Source,
    items: &[Item],
    first: u64,
    path: &Path,
    options: &Options,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<DoneShard, Error> {
    let fields = vec![
        Field::new(&options.image_field, Kind::RgbImage),
        Field::new(&options.label_field, Kind::Int),
    ];
    let mut writer = Writer::create(path, fields, items.len() as u64, options.page_bytes)?;
    let mut tally = Tally::default();
    let mut bad = Bad { count: 0, first: None };
    prepare_all(items, first, options.encoding, options.threads, |item, prepared| {
        let fits = prepared.outcome.and_then(|picture| {
            let (needed, page_bytes) = (picture.bytes.len() as u64, options.page_bytes);
            let fits = needed <= u64::from(page_bytes);
            fits.then_some(picture).ok_or(BadImage::Page { needed, page_bytes })
        });
        let picture = match fits {
            Ok(picture) => picture,
            Err(reason) => {
                on_event(Event::Bad { path: &item.path, reason: &reason });
                bad.add(&item.path, reason);
                return match options.on_bad_image {
                    OnBadImage::Fail if bad.count == MOST_BAD => Err(bad.error(source)),
                    OnBadImage::Fail | OnBadImage::Skip => Ok(()),
                };
            }
        };
        let stored_bytes = picture.bytes.len() as u64;
        tally.samples += 1;
        tally.jpeg += u64::from(picture.mode == Mode::Jpeg);
        tally.untouched += u64::from(picture.origin == Origin::Source);
        tally.source_bytes += prepared.source_bytes;
        tally.stored_bytes += stored_bytes;
        if bad.count == 0 || options.on_bad_image == OnBadImage::Skip {
            let (mode, width, height) = (picture.mode, picture.width, picture.height);
            let image = Value::Image { mode, width, height, bytes: &picture.bytes };
            writer.push(&[image, Value::Int(item.label)])?;
        }
        on_event(Event::Stored { source_bytes: prepared.source_bytes, stored_bytes });
        Ok(())
    })?;
    // A file without samples is of no use, and ffcv does not read it.
    if bad.count > 0 && (options.on_bad_image == OnBadImage::Fail || tally.samples == 0) {
        return Err(bad.error(source));
    }
    tally.skipped = bad.count;
    let written = writer.finish()?;
    on_event(Event::Wrote { path, written });
    Ok(DoneShard { bytes: written.bytes, tally })
}

/// Bad images of one file to be.
struct Bad {
    count: u64,
    first: Option<(PathBuf, BadImage)>,
}

impl Bad {
    fn add(&mut self, path: &Path, reason: BadImage) {
        self.count += 1;
        self.first.get_or_insert_with(|| (path.to_owned(), reason));
    }

    fn error(&mut self, source: &Source) -> Error {
        let (first, reason) = self.first.take().unwrap_or((PathBuf::new(), BadImage::Unknown));
        Error::BadImages { count: self.count, source_path: source.path.clone(), first, reason }
    }
}

impl Tally {
    fn add(&mut self, other: Self) {
        let Self { samples, skipped, jpeg, untouched, source_bytes, stored_bytes } = other;
        self.samples += samples;
        self.skipped += skipped;
        self.jpeg += jpeg;
        self.untouched += untouched;
        self.source_bytes += source_bytes;
        self.stored_bytes += stored_bytes;
    }
}

/// `train-00001-of-00005.beton` for `train.beton`.
#[must_use]
pub fn shard_path(target: &Path, shard: u32, shards: u32) -> PathBuf {
    let mut name = target.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{shard:05}-of-{shards:05}"));
    if let Some(extension) = target.extension() {
        name.push(".");
        name.push(extension);
    }
    target.with_file_name(name)
}
