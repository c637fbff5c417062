//! `baton data write`

use std::{path::PathBuf, time::Instant};

use baton_data::write::{
    DEFAULT_PAGE_BYTES, FFCV_MIN_PAGE_BYTES, OnBadImage, Options, Source, Summary, WriteEvent,
    write_images,
};
use baton_job::exit::Failure;

use super::{encoding::EncodingArgs, note_other_classes, split::SplitFiles, write_failure};
use crate::{
    commands::bar::CommandProgress,
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
      a folder per class; a label is the index of its class in the sorted names, which are listed
      in train.beton.classes.txt

  baton data write --from list.tsv --to train.beton --max-resolution 500 --jpeg-fraction 0.5
      a list of `path<TAB>label` or `path,label` lines; half of the images JPEG, half raw, the
      longer side 500 pixels at most: ffcv-imagenet's data set for ResNet-50

  baton data write --from photos --to train.beton --val val.beton --val-share 0.1
      a tenth of each class goes to another file, whatever else the class has

  baton data write --from shards --to train.beton
      the archives of a folder (or one archive), each sample NAME.jpg and NAME.cls with its label

  baton data write --from photos --to train.beton --keep-jpeg
      JPEG files are stored unchanged, byte by byte

  baton data write --from imagenet/train --to train.beton --shards 16 --resume
      train-00000-of-00016.beton and so on; run it again to continue after an interruption

An image is converted to 8-bit RGB as Pillow's convert(\"RGB\") does, also from CMYK; the EXIF
orientation is not applied. The same command writes the same bytes with any number of threads.")]
pub(crate) struct Args {
    /// A folder with a folder of images per class, a list of images with labels, or WebDataset archives (.tar)
    #[arg(long, value_name = "SOURCE")]
    from: PathBuf,
    #[command(flatten)]
    files: SplitFiles,
    #[command(flatten)]
    encoding: EncodingArgs,
    /// Write N files instead of one
    #[arg(long, value_name = "N", conflicts_with_all = ["val", "test"],
        value_parser = clap::value_parser!(u32).range(1..=99_999))]
    shards: Option<u32>,
    /// Keep the shards that an earlier run of the same command has finished
    #[arg(long, requires = "shards")]
    resume: bool,
    /// What to do about images that cannot be stored
    #[arg(long, value_enum, default_value = "fail")]
    on_bad_image: BadImagePolicy,
    /// Name of the image field
    #[arg(long, value_name = "NAME", default_value = "image")]
    image_field: String,
    /// Name of the label field
    #[arg(long, value_name = "NAME", default_value = "label")]
    label_field: String,
    /// Bytes per page, a power of two; no stored image can be larger
    #[arg(long, value_name = "BYTES", default_value_t = DEFAULT_PAGE_BYTES)]
    page_size: u32,
    /// Print one JSON object at the end, and nothing else
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum BadImagePolicy {
    /// Report all bad images of the file, then fail
    Fail,
    /// Report bad images and leave them out
    Skip,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let options = options(args)?;
    let source = Source::open(&args.from).map_err(write_failure)?;
    let start = Instant::now();
    let mut reporter = WriteReporter::new(source.items.len() as u64, args);
    let written = write_images(&source, &args.files.to, &options, &mut |event: WriteEvent<'_>| {
        reporter.show(event)
    });
    reporter.progress.finish();
    let summary = written.map_err(write_failure)?;
    summary.other_classes.iter().for_each(|path| note_other_classes(path));
    let seconds = start.elapsed().as_secs_f64();
    match args.json {
        true => output::line(json::line(&WrittenData::new(&summary, seconds))),
        false => print_summary(args, &summary, seconds),
    }
    Ok(())
}

fn options(args: &Args) -> Result<Options, Failure> {
    if !args.page_size.is_power_of_two() || args.page_size < FFCV_MIN_PAGE_BYTES {
        return Err(bad_input(format!(
            "--page-size {}: must be a power of two and at least {FFCV_MIN_PAGE_BYTES}",
            args.page_size
        )));
    }
    Ok(Options {
        encoding: args.encoding.encoding(),
        image_field: args.image_field.clone(),
        label_field: args.label_field.clone(),
        page_bytes: args.page_size,
        threads: args.encoding.threads(),
        shards: args.shards,
        others: args.files.others(),
        resume: args.resume,
        on_bad_image: match args.on_bad_image {
            BadImagePolicy::Fail => OnBadImage::Fail,
            BadImagePolicy::Skip => OnBadImage::Skip,
        },
    })
}

/// Shows the progress of a write on standard error; the result goes to standard output.
struct WriteReporter {
    progress: CommandProgress,
    /// Whether to show only bad images, which are not listed anywhere else.
    is_quiet: bool,
    /// Whether there is one file, whose size the final summary shows.
    is_one_file: bool,
    images: u64,
    /// Images stored by this run, and their size in bytes.
    stored: u64,
    source_bytes: u64,
    /// Images processed, including kept ones.
    done: u64,
    start: Instant,
}

impl WriteReporter {
    fn new(images: u64, args: &Args) -> Self {
        Self {
            progress: CommandProgress::new("{bar:30} {pos}/{len} images  {msg}", images, args.json),
            is_quiet: args.json,
            is_one_file: args.shards.is_none() && args.files.others().is_empty(),
            images,
            stored: 0,
            source_bytes: 0,
            done: 0,
            start: Instant::now(),
        }
    }

    fn show(&mut self, event: WriteEvent<'_>) {
        match event {
            WriteEvent::Stored { source_bytes, .. } => {
                self.stored += 1;
                self.source_bytes += source_bytes;
                self.advance(1);
            }
            WriteEvent::Bad { path, reason } => {
                self.progress.note(format_args!("bad image: {} {reason}", path.display()));
                self.advance(1);
            }
            WriteEvent::Kept { path, samples, images } => {
                if !self.is_quiet {
                    let samples = human::count(samples, "sample");
                    self.progress
                        .note(format_args!("kept {}: {samples} of an earlier run", path.display()));
                }
                self.advance(images);
            }
            WriteEvent::Wrote { path, written } if !self.is_quiet && !self.is_one_file => {
                let samples = human::count(written.samples, "sample");
                let bytes = human::bytes(written.bytes);
                self.progress.note(format_args!("wrote {}: {samples}, {bytes}", path.display()));
            }
            WriteEvent::Wrote { .. } => {}
        }
    }

    fn advance(&mut self, images: u64) {
        self.done += images;
        if self.progress.is_line_due(self.done) {
            output::note(format_args!("{}/{} images  {}", self.done, self.images, self.pace()));
        } else if !self.progress.bar.is_hidden() {
            self.progress.bar.set_message(self.pace());
        }
    }

    fn pace(&self) -> String {
        let seconds = self.start.elapsed().as_secs_f64().max(1e-3);
        let per_second = self.stored as f64 / seconds;
        let left = self.images.saturating_sub(self.done) as f64 / per_second;
        format!(
            "{per_second:.0} images/s  {}/s  {} left",
            human::bytes((self.source_bytes as f64 / seconds) as u64),
            human::duration(left)
        )
    }
}

fn print_summary(args: &Args, summary: &Summary, seconds: f64) {
    let tally = summary.tally;
    let bytes = summary.files.iter().map(|file| file.bytes).sum();
    let location = match (&summary.files[..], args.shards) {
        (files, Some(_)) => {
            format!("{} in {} shards", args.files.to.display(), files.len())
        }
        (files, None) => {
            let paths: Vec<String> =
                files.iter().map(|file| file.path.display().to_string()).collect();
            paths.join(", ")
        }
    };
    let samples = human::count(tally.samples, "sample");
    let (jpeg, raw) = (tally.jpeg, tally.samples - tally.jpeg);
    output::line(format_args!(
        "{location}: {samples} ({jpeg} JPEG, {} of them unchanged; {raw} raw), {} in {}",
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
