//! `baton data write`

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use baton_data::write::{
    Choice, DEFAULT_PAGE_BYTES, Encoding, Event, FFCV_LEAST_PAGE_BYTES, OnBadImage, Options,
    Source, Summary, write_images,
};
use baton_job::exit::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::write_failure;
use crate::{
    failure::bad_input,
    human,
    json::{self, WrittenData},
    output,
};

/// Write images with a label each as a .beton file, which Baton and FFCV read
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data write --from imagenet/train --to train.beton
      a folder per class; labels are their places among the sorted names, listed in
      train.beton.classes.txt

  baton data write --from list.tsv --to train.beton --max-resolution 500 --jpeg-fraction 0.5
      a list of `path<TAB>label` or `path,label` lines; half of the images JPEG, half raw, the
      longer side 500 pixels at most: ffcv-imagenet's data set for ResNet-50

  baton data write --from photos --to train.beton --keep-jpeg
      JPEG files are stored untouched, byte by byte

  baton data write --from imagenet/train --to train.beton --shards 16 --resume
      train-00000-of-00016.beton and so on; run it again to go on after an interruption

An image is turned into 8-bit RGB as Pillow's convert(\"RGB\") does, CMYK included; EXIF
orientation is not applied. The same command writes the same bytes with any number of threads.")]
pub(crate) struct Args {
    /// A folder with a folder of images per class, or a list of images with labels
    #[arg(long, value_name = "FOLDER_OR_LIST")]
    from: PathBuf,
    /// The file to write; one that is there is replaced at the end
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Shrink images whose longer side is above PIXELS to it [default: keep their size]
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u32).range(1..=65_535))]
    max_resolution: Option<u32>,
    /// Share of images stored as JPEG, the others raw: 0 is none, 1 all
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = share)]
    jpeg_fraction: f64,
    /// Store as JPEG just the images of more than BYTES raw bytes (3 per pixel)
    #[arg(long, value_name = "BYTES", conflicts_with = "jpeg_fraction")]
    smart_threshold: Option<u64>,
    /// Quality of JPEGs, with 4:2:0 chroma
    #[arg(long, value_name = "1..100", default_value_t = 90,
        value_parser = clap::value_parser!(u8).range(1..=100))]
    jpeg_quality: u8,
    /// Store source JPEGs as they are where they need not shrink, instead of encoding them again
    #[arg(long)]
    keep_jpeg: bool,
    /// Draws which images become JPEGs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write N files instead of one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99_999))]
    shards: Option<u32>,
    /// Keep the shards that this same command has finished before
    #[arg(long, requires = "shards")]
    resume: bool,
    /// What to do about images that cannot be stored
    #[arg(long, value_enum, default_value = "fail")]
    on_bad_image: BadImages,
    /// Name of the image field
    #[arg(long, value_name = "NAME", default_value = "image")]
    image_field: String,
    /// Name of the label field
    #[arg(long, value_name = "NAME", default_value = "label")]
    label_field: String,
    /// Bytes of a page, a power of two; no stored image can be larger
    #[arg(long, value_name = "BYTES", default_value_t = DEFAULT_PAGE_BYTES)]
    page_size: u32,
    /// Threads that decode and encode [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Print one JSON object at the end, and nothing else
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum BadImages {
    /// Name all of the file, then fail
    Fail,
    /// Name them and leave them out
    Skip,
}

fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("not in 0 to 1".to_owned()) }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let options = options(args)?;
    let source = Source::open(&args.from).map_err(write_failure)?;
    let begun = Instant::now();
    let mut report = Report::new(source.items.len() as u64, args);
    let written =
        write_images(&source, &args.to, &options, &mut |event: Event<'_>| report.tell(event));
    report.bar.finish_and_clear();
    let summary = written.map_err(write_failure)?;
    let seconds = begun.elapsed().as_secs_f64();
    match args.json {
        true => output::line(json::line(&WrittenData::new(&summary, seconds))),
        false => conclude(&args.to, &summary, seconds),
    }
    Ok(())
}

fn options(args: &Args) -> Result<Options, Failure> {
    if !args.page_size.is_power_of_two() || args.page_size < FFCV_LEAST_PAGE_BYTES {
        return Err(bad_input(format!(
            "--page-size {}: take a power of two of at least {FFCV_LEAST_PAGE_BYTES}",
            args.page_size
        )));
    }
    let choice = match args.smart_threshold {
        Some(bytes) => Choice::LargerThan { bytes },
        None => Choice::Fraction { share: args.jpeg_fraction, seed: args.seed },
    };
    let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    Ok(Options {
        encoding: Encoding {
            choice,
            jpeg_quality: args.jpeg_quality,
            max_resolution: args.max_resolution,
            keep_jpeg: args.keep_jpeg,
        },
        image_field: args.image_field.clone(),
        label_field: args.label_field.clone(),
        page_bytes: args.page_size,
        threads: args.threads.unwrap_or_else(cores),
        shards: args.shards,
        resume: args.resume,
        on_bad_image: match args.on_bad_image {
            BadImages::Fail => OnBadImage::Fail,
            BadImages::Skip => OnBadImage::Skip,
        },
    })
}

/// Seconds between lines of progress where there is no screen to draw a bar on.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Tells of a write while it goes on, on standard error: answers go to standard output.
struct Report {
    bar: ProgressBar,
    /// Bad images are named nevertheless: nothing else does.
    is_quiet: bool,
    /// Then the conclusion tells all.
    is_one_file: bool,
    images: u64,
    /// Images of this run, and their bytes.
    stored: u64,
    source_bytes: u64,
    /// Images that are dealt with, kept ones included.
    done: u64,
    begun: Instant,
    last_line: Instant,
}

impl Report {
    fn new(images: u64, args: &Args) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} images  {msg}");
        let bar = ProgressBar::new(images)
            .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        if args.json {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let begun = Instant::now();
        Self {
            bar,
            is_quiet: args.json,
            is_one_file: args.shards.is_none(),
            images,
            stored: 0,
            source_bytes: 0,
            done: 0,
            begun,
            last_line: begun,
        }
    }

    fn tell(&mut self, event: Event<'_>) {
        match event {
            Event::Stored { source_bytes, .. } => {
                self.stored += 1;
                self.source_bytes += source_bytes;
                self.advance(1);
            }
            Event::Bad { path, reason } => {
                self.note(&format!("bad image: {} {reason}", path.display()));
                self.advance(1);
            }
            Event::Kept { path, samples, images } => {
                if !self.is_quiet {
                    let samples = human::count(samples, "sample");
                    self.note(&format!("kept {}: {samples} of an earlier run", path.display()));
                }
                self.advance(images);
            }
            Event::Wrote { path, written } if !self.is_quiet && !self.is_one_file => {
                let samples = human::count(written.samples, "sample");
                let bytes = human::bytes(written.bytes);
                self.note(&format!("wrote {}: {samples}, {bytes}", path.display()));
            }
            Event::Wrote { .. } => {}
        }
    }

    fn advance(&mut self, images: u64) {
        self.done += images;
        self.bar.set_position(self.done);
        if self.bar.is_hidden() {
            if !self.is_quiet && self.last_line.elapsed() >= LINE_EVERY {
                self.last_line = Instant::now();
                output::note(format_args!("{}/{} images  {}", self.done, self.images, self.pace()));
            }
        } else {
            self.bar.set_message(self.pace());
        }
    }

    fn pace(&self) -> String {
        let seconds = self.begun.elapsed().as_secs_f64().max(1e-3);
        let per_second = self.stored as f64 / seconds;
        let left = self.images.saturating_sub(self.done) as f64 / per_second;
        format!(
            "{per_second:.0} images/s  {}/s  {} left",
            human::bytes((self.source_bytes as f64 / seconds) as u64),
            human::duration(left)
        )
    }

    /// A line that stays, above the bar where there is one.
    fn note(&self, text: &str) {
        self.bar.suspend(|| output::note(text));
    }
}

fn conclude(target: &Path, summary: &Summary, seconds: f64) {
    let tally = summary.tally;
    let bytes = summary.files.iter().map(|file| file.bytes).sum();
    let place = match &summary.files[..] {
        [file] => file.path.display().to_string(),
        files => format!("{} in {} shards", target.display(), files.len()),
    };
    let samples = human::count(tally.samples, "sample");
    let (jpeg, raw) = (tally.jpeg, tally.samples - tally.jpeg);
    output::line(format_args!(
        "{place}: {samples} ({jpeg} JPEG, {} of them untouched; {raw} raw), {} in {}",
        tally.untouched,
        human::bytes(bytes),
        human::duration(seconds)
    ));
    if tally.skipped > 0 {
        output::line(format_args!("skipped {}", human::count(tally.skipped, "bad image")));
    }
    if let Some(classes) = &summary.classes {
        output::line(format_args!("classes: {}", classes.display()));
    }
}
