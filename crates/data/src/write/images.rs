//! Writes labelled image files to one beton file, or to the shards of one data set.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use super::{
    BadImage, Error, Field, FieldKind, FinishedFile, Source, Value, Writer,
    draft::{Draft, publish_all},
    encoding::{Encoding, ImageEncoder, Origin},
    pipeline::in_order,
    progress::{DoneShard, WriteProgress},
};
use crate::{beton::Mode, with_suffix};

/// Number of bad images after which writing stops with an error, without looking for more.
const MAX_BAD_IMAGES: u64 = 100;

/// Options of [`write_images`].
#[derive(Clone, Debug)]
pub struct Options {
    /// How images are stored.
    pub encoding: Encoding,
    /// Name of the image field.
    pub image_field: String,
    /// Name of the label field.
    pub label_field: String,
    /// Size of a page in bytes, a power of two; no stored image may be larger.
    pub page_bytes: u32,
    /// Number of threads that decode and encode.
    pub threads: NonZeroUsize,
    /// Number of shards. With `None` the target is one file; with N it becomes N files with contiguous parts, for
    /// example `train-00000-of-00005.beton` for `train.beton`.
    pub shards: Option<u32>,
    /// Further files with a share of the images of each class, which are then not in the first; not with shards. The images'
    /// paths decide which.
    pub others: Vec<(PathBuf, f64)>,
    /// Whether to keep finished shards of the same write after an interruption.
    pub resume: bool,
    /// What to do about images that cannot be stored.
    pub on_bad_image: OnBadImage,
}

/// What to do about images that cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadImage {
    /// Check the remaining images of the file, then fail.
    Fail,
    /// Skip them.
    Skip,
}

/// What happens during [`write_images`].
#[derive(Clone, Copy, Debug)]
pub enum WriteEvent<'a> {
    /// A shard of an earlier run is kept.
    Kept {
        /// The file.
        path: &'a Path,
        /// Number of samples in it.
        samples: u64,
        /// Number of source images that belong to it, including skipped ones.
        images: u64,
    },
    /// An image was stored.
    Stored {
        /// Size of the image file, in bytes.
        source_bytes: u64,
        /// Size of the image in the beton file, in bytes.
        stored_bytes: u64,
    },
    /// An image cannot be stored.
    Bad {
        /// The image file.
        path: &'a Path,
        /// Why it cannot be stored.
        reason: &'a BadImage,
    },
    /// A file is finished and on the disk.
    Wrote {
        /// The file.
        path: &'a Path,
        /// Size of the file.
        written: FinishedFile,
    },
}

/// Numbers and sizes of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ImageCounts {
    /// Number of stored images.
    pub samples: u64,
    /// Number of skipped bad images.
    pub skipped: u64,
    /// Number of images stored as JPEG.
    pub jpeg: u64,
    /// Number of JPEGs stored with the unchanged bytes of their files.
    pub untouched: u64,
    /// Total size of the image files of the samples, in bytes.
    pub source_bytes: u64,
    /// Total size of the stored images, in bytes.
    pub stored_bytes: u64,
}

/// A finished file of the data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Number of samples.
    pub samples: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether an earlier run wrote it.
    pub kept: bool,
}

/// Result of [`write_images`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Sums over all files, including kept ones.
    pub tally: ImageCounts,
    /// The files: shards in the order of the samples, or the first file and the others.
    pub files: Vec<OutputFile>,
    /// The list of class names, one per line by label, if the source has names.
    pub classes: Option<PathBuf>,
    /// A list beside the file that is not of this source, as it has no names.
    pub other_classes: Option<PathBuf>,
}

/// Writes a data set of images with a label each, in the order of the source.
///
/// The bytes of the files depend on source and options, not on the number of threads. A file gets its name when it is
/// complete and durable, and replaces an older one: shards one by one, a file and its `others` together. If the source
/// has class names, they are written to `TARGET.classes.txt`. With shards, `TARGET-write.json` records the parameters
/// of the write and the finished shards.
///
/// Peak memory: per thread one decoded image, its reduced version and four stored images; one page per file; 48 bytes per
/// sample of one file; and 24 bytes per image of the source.
///
/// # Errors
/// Bad images, unless they are skipped; invalid options; a resumed write with other options or source; I/O errors.
pub fn write_images(
    source: &Source,
    target: &Path,
    options: &Options,
    on_event: &mut dyn FnMut(WriteEvent<'_>),
) -> Result<Summary, Error> {
    options.encoding.check()?;
    let images = source.items.len();
    let (mut progress, paths) = match options.shards {
        None => {
            let others = options.others.iter().map(|(path, _)| path.clone());
            (None, std::iter::once(target.to_owned()).chain(others).collect::<Vec<_>>())
        }
        Some(_) if !options.others.is_empty() => {
            let reason = "shards cannot be divided among files: write one file each";
            return Err(Error::Option(reason.to_owned()));
        }
        Some(shards) => {
            if shards == 0 || shards as usize > images {
                return Err(Error::Option(format!(
                    "{shards} shards of {images} images: take 1 to {images} shards"
                )));
            }
            let paths = (0..shards).map(|shard| shard_path(target, shard, shards)).collect();
            (Some(WriteProgress::open(source, target, options)?), paths)
        }
    };
    if options.resume && progress.is_none() {
        let reason = "only shards can be resumed: give their number too";
        return Err(Error::Option(reason.to_owned()));
    }

    let list_path = with_suffix(target, ".classes.txt");
    let other_classes = source.classes.is_none() && list_path.exists();
    let other_classes = other_classes.then(|| list_path.clone());
    let list = source.classes.as_ref().map(|classes| (classes, list_path));
    let lists: Vec<PathBuf> = list.iter().map(|(_, path)| path.clone()).collect();
    super::check_targets(target, &options.others, &lists, &source.path)?;
    let parts = match options.shards {
        None => {
            let shares: Vec<f64> = options.others.iter().map(|(_, share)| *share).collect();
            source.divided(&shares)
        }
        Some(_) => {
            let border = |shard: usize| images * shard / paths.len();
            (0..paths.len()).map(|shard| (border(shard)..border(shard + 1)).collect()).collect()
        }
    };
    if let Some(empty) = parts.iter().position(Vec::is_empty) {
        let reason = format!(
            "no image is for {}: each class has too few for {} files",
            paths[empty].display(),
            paths.len()
        );
        return Err(Error::Source { path: source.path.clone(), reason });
    }

    // Before any other file is replaced.
    let list = list.map(|(classes, path)| Draft::create(&path).map(|draft| (classes, path, draft)));
    let list = list.transpose()?;

    let create = |path: &Path, positions: &[usize]| {
        let fields = vec![
            Field::new(&options.image_field, FieldKind::RgbImage),
            Field::new(&options.label_field, FieldKind::Int),
        ];
        Writer::create(path, fields, positions.len() as u64, options.page_bytes)
    };
    // Those that belong together, before the first image is encoded.
    let mut together = Vec::new();
    if options.shards.is_none() {
        for (path, positions) in paths.iter().zip(&parts) {
            together.push(create(path, positions)?);
        }
    }
    let mut together = together.into_iter();

    let mut summary =
        Summary { tally: ImageCounts::default(), files: Vec::new(), classes: None, other_classes };
    let mut complete = Vec::new();
    for (number, (path, positions)) in paths.iter().zip(&parts).enumerate() {
        // If bad images are errors, a shard from which some were skipped is written again, to report them.
        let skips = options.on_bad_image == OnBadImage::Skip;
        let kept = progress
            .as_ref()
            .and_then(|progress| progress.done(number, path))
            .filter(|done| skips || done.tally.skipped == 0);
        let (done, is_kept) = match kept {
            Some(done) => {
                let images = positions.len() as u64;
                on_event(WriteEvent::Kept { path, samples: done.tally.samples, images });
                (done, true)
            }
            None => {
                let writer = together.next().map_or_else(|| create(path, positions), Ok)?;
                let result = write_file(source, positions, writer, options, on_event);
                // First: the images of a changed archive seem bad.
                source.check_unchanged()?;
                let (tally, draft, written) = result?;
                let done = DoneShard { bytes: written.bytes, tally };
                match &mut progress {
                    Some(progress) => {
                        draft.publish()?;
                        on_event(WriteEvent::Wrote { path, written });
                        progress.add(number, done)?;
                    }
                    None => complete.push((draft, Some((path, written)))),
                }
                (done, false)
            }
        };
        summary.tally.add(done.tally);
        summary.files.push(OutputFile {
            path: path.clone(),
            samples: done.tally.samples,
            bytes: done.bytes,
            kept: is_kept,
        });
    }
    if let Some((classes, path, mut draft)) = list {
        draft.write_lines(classes)?;
        draft.sync()?;
        complete.push((draft, None));
        summary.classes = Some(path);
    }
    let (drafts, written): (Vec<_>, Vec<_>) = complete.into_iter().unzip();
    publish_all(drafts)?;
    for (path, written) in written.into_iter().flatten() {
        on_event(WriteEvent::Wrote { path, written });
    }
    Ok(summary)
}

/// Writes one file of the images at these positions of the source, up to its name.
fn write_file(
    source: &Source,
    positions: &[usize],
    mut writer: Writer,
    options: &Options,
    on_event: &mut dyn FnMut(WriteEvent<'_>),
) -> Result<(ImageCounts, Draft, FinishedFile), Error> {
    let mut tally = ImageCounts::default();
    let mut bad = BadImages { count: 0, first: None };
    let start = || (ImageEncoder::new(options.encoding), Vec::new());
    let encode = |(encoder, bytes): &mut (ImageEncoder, Vec<u8>), number: usize| {
        let position = positions[number];
        let outcome = match source.items[position].read(bytes) {
            Ok(()) => encoder.prepare(bytes, position as u64)?,
            Err(error) => Err(BadImage::Read(error.to_string())),
        };
        Ok((outcome, bytes.len() as u64))
    };
    in_order(
        positions.len(),
        options.threads,
        start,
        encode,
        |number, (outcome, source_bytes)| {
            let item = &source.items[positions[number]];
            let fits = outcome.and_then(|picture| {
                let (needed, page_bytes) = (picture.bytes.len() as u64, options.page_bytes);
                let fits = needed <= u64::from(page_bytes);
                fits.then_some(picture).ok_or(BadImage::Page { needed, page_bytes })
            });
            let picture = match fits {
                Ok(picture) => picture,
                Err(reason) => {
                    on_event(WriteEvent::Bad { path: &item.path, reason: &reason });
                    bad.add(&item.path, reason);
                    return match options.on_bad_image {
                        OnBadImage::Fail if bad.count == MAX_BAD_IMAGES => Err(bad.error(source)),
                        OnBadImage::Fail | OnBadImage::Skip => Ok(()),
                    };
                }
            };
            let stored_bytes = picture.bytes.len() as u64;
            tally.samples += 1;
            tally.jpeg += u64::from(picture.mode == Mode::Jpeg);
            tally.untouched += u64::from(picture.origin == Origin::Source);
            tally.source_bytes += source_bytes;
            tally.stored_bytes += stored_bytes;
            if bad.count == 0 || options.on_bad_image == OnBadImage::Skip {
                let (mode, width, height) = (picture.mode, picture.width, picture.height);
                let image = Value::Image { mode, width, height, bytes: &picture.bytes };
                writer.push(&[image, Value::Int(item.label)])?;
            }
            on_event(WriteEvent::Stored { source_bytes, stored_bytes });
            Ok(())
        },
    )?;
    // A file without samples is useless, and ffcv cannot read it.
    if bad.count > 0 && (options.on_bad_image == OnBadImage::Fail || tally.samples == 0) {
        return Err(bad.error(source));
    }
    tally.skipped = bad.count;
    let (draft, written) = writer.complete()?;
    Ok((tally, draft, written))
}

/// Bad images of the file being written.
struct BadImages {
    count: u64,
    first: Option<(PathBuf, BadImage)>,
}

impl BadImages {
    fn add(&mut self, path: &Path, reason: BadImage) {
        self.count += 1;
        self.first.get_or_insert_with(|| (path.to_owned(), reason));
    }

    fn error(&mut self, source: &Source) -> Error {
        let (first, reason) = self.first.take().unwrap_or((PathBuf::new(), BadImage::Unknown));
        Error::BadImages { count: self.count, source_path: source.path.clone(), first, reason }
    }
}

impl ImageCounts {
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
