//! Measures the speed of a loader on this machine, used by `baton data bench`.

use std::{
    collections::BTreeMap,
    fs, io,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_recipe::{
    median,
    spec::{Order, Resize},
};
use serde::Serialize;

use crate::{
    Dataset, Decoder, Error, ImageTransform, Loader, Options, Preprocessing, Request, SampleOrder,
    dataset::InputLocation,
};

/// Number of samples that are timed one by one, to measure each stage.
const TIMED_SAMPLES: u64 = 512;
/// Linux' unit of processor time (`USER_HZ`), which is the same on every x86-64 kernel.
const TICKS_PER_SECOND: f64 = 100.0;

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// How images are turned into samples.
    pub preprocessing: Preprocessing,
    /// Order of the samples.
    pub order: Order,
    /// See [`SampleOrder::new`].
    pub window: u64,
    /// Samples per batch.
    pub batch: u64,
    /// Number of passes over the data.
    pub epochs: u32,
    /// Maximum number of batches in a pass; 0 is all.
    pub batches: u64,
    /// Options of the loader.
    pub options: Options,
    /// Whether to drop the files from the page cache before every pass.
    pub cold: bool,
}

/// Measured values.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// Images per second of each pass.
    pub images_per_second: Vec<f64>,
    /// Median of `images_per_second`.
    pub median_images_per_second: f64,
    /// Output of pixels at the median speed, MB per second.
    pub output_mb_per_second: f64,
    /// Processor time of this process over all passes, per image, seconds.
    pub cpu_seconds_per_image: f64,
    /// Share of the time that the consumer, which only consumes batches, did not wait: 0 if decoding is the
    /// bottleneck.
    pub idle_share: f64,
    /// Median time from the start of a pass to its first batch, in ms.
    pub first_batch_ms: f64,
    /// Peak memory of this process including mapped page cache, in MB.
    pub peak_rss_mb: f64,
    /// Peak memory of this process without mapped files, in MB.
    pub peak_anonymous_rss_mb: f64,
    /// Data read from disk during all passes, in MB.
    pub read_from_disk_mb: f64,
    /// Number of bad samples.
    pub skipped: u64,
    /// Mean time of each stage on one thread, in µs per image.
    pub stages: BTreeMap<&'static str, f64>,
    /// Mean difference between the pixels of the two resizes, in levels of 255.
    pub resizes_differ_by: f64,
    /// Images per second of one thread that only does the Huffman decoding that every decoder needs; absent without
    /// JPEGs.
    pub huffman_floor_images_per_second: Option<f64>,
}

/// Runs the passes. `progress` is called with the number of samples of each finished batch.
///
/// # Errors
/// The data cannot be read.
pub fn run(
    dataset: &Arc<Dataset>,
    options: &BenchOptions,
    mut progress: impl FnMut(u64),
) -> Result<BenchReport, Error> {
    let order = SampleOrder::new(options.order, 0, options.window, dataset.sample_blocks()?);
    let mut totals = PassTotals::default();
    let disk_before = disk_bytes();
    let cpu_before = cpu_seconds();
    for epoch in 0..options.epochs {
        if options.cold {
            dataset.drop_page_cache();
        }
        pass(dataset, options, &order, epoch, &mut totals, &mut progress)?;
    }
    let cpu = cpu_seconds() - cpu_before;
    let disk = disk_bytes().saturating_sub(disk_before);
    let times = StageTimes::time(dataset, options)?;
    let median_rate = median(totals.rates.iter().copied()).unwrap_or_default();
    let pixels = u64::from(options.preprocessing.resolution()).pow(2) * 3;
    Ok(BenchReport {
        median_images_per_second: median_rate,
        images_per_second: totals.rates,
        output_mb_per_second: median_rate * pixels as f64 / 1e6,
        cpu_seconds_per_image: cpu / totals.images.max(1) as f64,
        idle_share: 1.0 - (totals.waited.as_secs_f64() / totals.seconds.max(1e-9)).min(1.0),
        first_batch_ms: median(totals.first_batch_ms.iter().copied()).unwrap_or_default(),
        peak_rss_mb: status_mb("VmHWM:"),
        peak_anonymous_rss_mb: totals.anonymous_mb,
        read_from_disk_mb: disk as f64 / 1e6,
        skipped: totals.skipped,
        huffman_floor_images_per_second: times.mean_micros("huffman").map(|micros| 1e6 / micros),
        stages: ["read", "decode", "resize"]
            .into_iter()
            .filter_map(|stage| Some((stage, times.mean_micros(stage)?)))
            .collect(),
        resizes_differ_by: times.difference / times.pixels.max(1.0),
    })
}

/// Sums over the passes.
#[derive(Default)]
struct PassTotals {
    rates: Vec<f64>,
    first_batch_ms: Vec<f64>,
    images: u64,
    seconds: f64,
    waited: Duration,
    anonymous_mb: f64,
    skipped: u64,
}

fn pass(
    dataset: &Arc<Dataset>,
    options: &BenchOptions,
    order: &SampleOrder,
    epoch: u32,
    totals: &mut PassTotals,
    progress: &mut impl FnMut(u64),
) -> Result<(), Error> {
    let started = Instant::now();
    let order = order.epoch(epoch);
    let (preprocessing, size, len) =
        (options.preprocessing.clone(), options.batch.max(1), dataset.len());
    let max_batches = if options.batches == 0 { u64::MAX } else { options.batches };
    let requests = (0..len.div_ceil(size).min(max_batches)).map(move |number| {
        let positions = number * size..((number + 1) * size).min(len);
        let samples = positions.map(|position| order.at(position)).collect();
        Request { epoch, samples, preprocessing: preprocessing.clone() }
    });
    let mut loader = Loader::start(dataset.clone(), &options.options, requests);
    let (mut images, mut first) = (0, None);
    while let Some(batch) = loader.next().transpose()? {
        first.get_or_insert_with(|| started.elapsed());
        images += batch.len() as u64;
        progress(batch.len() as u64);
        loader.recycle(batch);
        totals.anonymous_mb = totals.anonymous_mb.max(status_mb("RssAnon:"));
    }
    let seconds = started.elapsed().as_secs_f64();
    let stats = loader.stats();
    totals.rates.push(images as f64 / seconds);
    totals.first_batch_ms.push(first.unwrap_or_default().as_secs_f64() * 1e3);
    totals.images += images;
    totals.seconds += seconds;
    totals.waited += stats.waited;
    totals.skipped += stats.skipped;
    Ok(())
}

/// Measurements of single samples, made on this thread.
#[derive(Default)]
struct StageTimes {
    /// Times of each stage.
    stages: BTreeMap<&'static str, Vec<Duration>>,
    /// Sum of the differences between the two resizes.
    difference: f64,
    /// Number of compared values.
    pixels: f64,
}

impl StageTimes {
    fn time(dataset: &Dataset, options: &BenchOptions) -> Result<Self, Error> {
        let mut times = Self::default();
        let mut decoder = Decoder::new()?;
        let side = options.preprocessing.resolution() as usize;
        let mut outs =
            [Resize::Fast, Resize::Area].map(|resize| (resize, vec![0; side * side * 3]));
        let step = (dataset.len() / TIMED_SAMPLES).max(1);
        for sample in (0..dataset.len()).step_by(step as usize) {
            let (shard, local) = dataset.find(sample)?;
            let Ok(InputLocation::Image(location)) = shard.location(local) else { continue };
            let transform =
                options.preprocessing.transform(0, sample, location.width, location.height);
            let timed =
                decoder.time_stages(&shard.beton, local, &location, &transform, &mut outs[0].1);
            // The passes have counted damaged samples already.
            let Ok(timed) = timed else { continue };
            for (stage, time) in timed {
                times.stages.entry(stage).or_default().push(time);
            }
            for (resize, out) in &mut outs {
                let transform = ImageTransform { resize: *resize, ..transform };
                decoder.render_stored(&shard.beton, local, &location, &transform, out)?;
            }
            let [(_, fast), (_, area)] = &outs;
            let differences = fast.iter().zip(area).map(|(a, b)| u64::from(a.abs_diff(*b)));
            times.difference += differences.sum::<u64>() as f64;
            times.pixels += fast.len() as f64;
        }
        Ok(times)
    }

    /// Mean time of a stage, µs; `None` if it was not measured.
    fn mean_micros(&self, stage: &str) -> Option<f64> {
        let times = self.stages.get(stage)?;
        let sum: Duration = times.iter().sum();
        Some(sum.as_secs_f64() * 1e6 / times.len() as f64)
    }
}

/// A value of /proc/self/status, converted from KiB to MB; 0 if it is missing.
fn status_mb(name: &str) -> f64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default() * 1024.0 / 1e6
}

/// Bytes that this process has read from disk.
fn disk_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or_default()
}

/// Processor time of this process, seconds.
fn cpu_seconds() -> f64 {
    let text: io::Result<String> = fs::read_to_string("/proc/self/stat");
    // The name, in brackets, may contain spaces; utime and stime are the 14th and 15th field.
    let text = text.unwrap_or_default();
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_from_proc_are_found() {
        assert!(status_mb("VmHWM:") > 1.0);
        let started = Instant::now();
        let before = cpu_seconds();
        // A busy machine may not let this thread run for a while.
        while cpu_seconds() <= before {
            assert!(started.elapsed() < Duration::from_secs(60), "time does not pass");
        }
    }
}
