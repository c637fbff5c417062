//! `baton data bench`

use std::{num::NonZeroUsize, sync::Arc};

use baton_data::{
    Dataset, InputType, Labels, Options, Preprocessing, Source,
    bench::{self, BenchOptions, BenchReport},
};
use baton_job::exit::Failure;
use baton_recipe::spec::{Augment, OnBadSample, Order, Resize};
use clap::ValueEnum;

use super::failure;
use crate::{
    commands::{bar::bar, threads},
    failure::bad_input,
    human, json,
};

/// Measure how fast this machine loads a data set
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data bench train.beton                       warm: from the page cache
  baton data bench train.beton --cold --threads 8    from disk, 8 threads
  baton data bench train.beton --resize area         with the same pixels as ffcv
  baton data bench signals-train.beton --input-field signal --label-field target --outputs 1

The first pass fills the page cache, and is slower than later ones unless the file was read before.
In addition, single samples are timed on one thread: `read` from the page cache, `decode`,
`resize` with crop and flip.")]
pub(crate) struct Args {
    /// A .beton file, a pattern such as 'train-*.beton', or either of them at s3://
    location: String,
    /// Side of the samples in pixels
    #[arg(long, value_name = "PIXELS", default_value_t = 160)]
    resolution: u32,
    /// Samples per batch
    #[arg(long, value_name = "N", default_value_t = 256)]
    batch: u64,
    /// Decoding threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<NonZeroUsize>,
    /// Batches decoded ahead
    #[arg(long, value_name = "N", default_value_t = 3)]
    prefetch: usize,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value_t = 3)]
    epochs: u32,
    /// Maximum number of batches per pass; 0 is all
    #[arg(long, value_name = "N", default_value_t = 0)]
    batches: u64,
    /// Order of samples
    #[arg(long, value_enum, default_value_t = OrderName::Random)]
    order: OrderName,
    /// Samples shuffled with each other in quasi-random order
    #[arg(long, value_name = "SAMPLES", default_value_t = 16_384)]
    shuffle_window: u64,
    /// Method that resizes a crop to the sample's size
    #[arg(long, value_enum, default_value_t = ResizeName::Fast)]
    resize: ResizeName,
    /// Random crops and flips as in training, or the centre crop as in evaluation
    #[arg(long, value_enum, default_value_t = ViewName::Train)]
    view: ViewName,
    /// Drop the file from the page cache before every pass
    #[arg(long)]
    cold: bool,
    /// Name of the input field
    #[arg(long, value_name = "NAME", default_value = "image")]
    input_field: String,
    /// Name of the label field
    #[arg(long, value_name = "NAME", default_value = "label")]
    label_field: String,
    /// The label field holds N values of a regression instead of a class
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    outputs: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderName {
    Random,
    QuasiRandom,
    Sequential,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ResizeName {
    Fast,
    Area,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ViewName {
    Train,
    Evaluate,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let plan = plan(args)?;
    let source = Source {
        input_field: args.input_field.clone(),
        label_field: args.label_field.clone(),
        labels: args.outputs.map_or(Labels::Ints, Labels::Values),
        on_bad_sample: OnBadSample::Skip,
        ..Source::new(&args.location)
    };
    let dataset = Arc::new(Dataset::open(source).map_err(failure)?);
    if dataset.is_empty() {
        return Err(bad_input(format!(
            "{} has no samples: there is nothing to measure",
            args.location
        )));
    }
    let template = "{bar:40} {pos}/{len} samples  {per_sec}";
    let bar = bar(template, dataset.len() * u64::from(args.epochs));
    let report = bench::run(&dataset, &plan, |samples| bar.inc(samples));
    bar.finish_and_clear();
    let report = report.map_err(failure)?;
    json::print(args.json, &report, |report| {
        text(report, dataset.input_type(), plan.options.threads)
    });
    Ok(())
}

fn plan(args: &Args) -> Result<BenchOptions, Failure> {
    if !(1..=4096).contains(&args.resolution) {
        return Err(bad_input(format!(
            "--resolution {}: must be 1 to 4096 pixels",
            args.resolution
        )));
    }
    if args.batch == 0 || args.epochs == 0 {
        return Err(bad_input("--batch and --epochs must be at least 1".to_owned()));
    }
    let resize = match args.resize {
        ResizeName::Fast => Resize::Fast,
        ResizeName::Area => Resize::Area,
    };
    let resolution = args.resolution;
    let preprocessing = match args.view {
        ViewName::Train => Preprocessing::Train {
            seed: 0,
            resolution,
            resize,
            augment: Augment::default(),
            mean: [0; 3],
        },
        ViewName::Evaluate => {
            Preprocessing::Evaluate { resolution, resize, crop_ratio: 224.0 / 256.0 }
        }
    };
    let cores = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    Ok(BenchOptions {
        preprocessing,
        order: match args.order {
            OrderName::Random => Order::Random,
            OrderName::QuasiRandom => Order::QuasiRandom,
            OrderName::Sequential => Order::Sequential,
        },
        window: args.shuffle_window,
        batch: args.batch,
        epochs: args.epochs,
        batches: args.batches,
        options: Options::new(args.threads.map_or_else(cores, NonZeroUsize::get), args.prefetch),
        cold: args.cold,
    })
}

/// The report as text.
fn text(report: &BenchReport, input_type: &InputType, threads: usize) -> String {
    let rates: Vec<String> =
        report.images_per_second.iter().map(|rate| format!("{rate:.0}")).collect();
    let mut lines = vec![
        format!(
            "{:.0} samples/s with {} (passes: {})",
            report.median_images_per_second,
            human::count(threads as u64, "thread"),
            rates.join(", ")
        ),
        format!("{:.1} µs of processor time per sample", report.cpu_seconds_per_image * 1e6),
        format!("{:.1} ms from the start of a pass to its first batch", report.first_batch_ms),
        format!(
            "{:.0} MB of memory at most, {:.0} MB of it anonymous; {:.0} MB read from disk",
            report.peak_rss_mb, report.peak_anonymous_rss_mb, report.read_from_disk_mb
        ),
    ];
    if *input_type == InputType::Image {
        lines.push(format!("{:.0} MB/s of finished pixels", report.output_mb_per_second));
        let stages: Vec<String> =
            report.stages.iter().map(|(stage, time)| format!("{stage} {time:.0} µs")).collect();
        lines.push(format!("one thread, per sample: {}", stages.join(", ")));
        lines.push(format!(
            "the fast and the area resize differ by {:.2} levels on average",
            report.resizes_differ_by
        ));
    }
    if let Some(floor) = report.huffman_floor_images_per_second {
        lines.push(format!("Huffman decoding alone, one thread: {floor:.0} JPEGs/s"));
    }
    if report.skipped > 0 {
        let skipped = human::count(report.skipped, "bad sample");
        lines.push(format!("{skipped} skipped: `baton data verify` lists them"));
    }
    lines.join("\n")
}
