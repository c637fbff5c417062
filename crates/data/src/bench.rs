//! Measures a loader on this machine: what `baton data bench` does.

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
    Dataset, Decoder, Error, Frame, Loader, Options, Request, SampleOrder, View,
    dataset::InputPlace,
};

/// Samples timed one by one for the time of each stage.
const TIMED_SAMPLES: u64 = 512;
/// What Linux counts processor time in (`USER_HZ`), which is the same on every x86-64 kernel.
const TICKS_PER_SECOND: f64 = 100.0;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How samples are made.
    pub view: View,
    /// Order of the samples.
    pub order: Order,
    /// See [`SampleOrder::new`].
    pub window: u64,
    /// Samples per batch.
    pub batch: u64,
    /// Passes over the data.
    pub epochs: u32,
    /// Most batches of a pass; 0 is all.
    pub batches: u64,
    /// How the loader works.
    pub options: Options,
    /// Make the system forget the files before every pass.
    pub cold: bool,
}

/// What was seen.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Images per second of each pass.
    pub images_per_second: Vec<f64>,
    /// Their median.
    pub median_images_per_second: f64,
    /// Bytes of finished pixels per second, in MB, at the median.
    pub output_mb_per_second: f64,
    /// Processor time of this process over all passes, per image.
    pub cpu_seconds_per_image: f64,
    /// Share of the time that the consumer, which does nothing else, did not wait: 0 if decoding is
    /// the limit.
    pub idle_share: f64,
    /// Median time from the start of a pass to its first batch, in ms.
    pub first_batch_ms: f64,
    /// Most memory that this process had, page cache it mapped included, in MB.
    pub peak_rss_mb: f64,
    /// Most memory of its own that it had, in MB.
    pub peak_anonymous_rss_mb: f64,
    /// Bytes that came from disk during all passes, in MB.
    pub read_from_disk_mb: f64,
    /// Samples that could not be used.
    pub skipped: u64,
    /// One thread, median time of each stage in µs per image.
    pub stages: BTreeMap<&'static str, f64>,
    /// Mean difference between the pixels of the two resizes, in levels of 255.
    pub resizes_differ_by: f64,
    /// Images per second of one thread that only Huffman-decodes what no decoder can leave out;
    /// absent without JPEGs.
    pub huffman_floor_images_per_second: Option<f64>,
}

/// Runs the passes. `progress` hears of every finished batch.
///
/// # Errors
/// Data that cannot be read.
pub fn run(
    dataset: &Arc<Dataset>,
    plan: &Plan,
    mut progress: impl FnMut(u64),
) -> Result<Report, Error> {
    let order = SampleOrder::new(plan.order, 0, plan.window, dataset.layout()?);
    let mut seen = Seen::default();
    let disk_before = disk_bytes();
    let cpu_before = cpu_seconds();
    for epoch in 0..plan.epochs {
        if plan.cold {
            dataset.forget();
        }
        pass(dataset, plan, &order, epoch, &mut seen, &mut progress)?;
    }
    let cpu = cpu_seconds() - cpu_before;
    let disk = disk_bytes().saturating_sub(disk_before);
    let singles = Singles::time(dataset, plan)?;
    let median_rate = median(seen.rates.iter().copied()).unwrap_or_default();
    let pixels = u64::from(plan.view.resolution()).pow(2) * 3;
    Ok(Report {
        median_images_per_second: median_rate,
        images_per_second: seen.rates,
        output_mb_per_second: median_rate * pixels as f64 / 1e6,
        cpu_seconds_per_image: cpu / seen.images.max(1) as f64,
        idle_share: 1.0 - (seen.waited.as_secs_f64() / seen.seconds.max(1e-9)).min(1.0),
        first_batch_ms: median(seen.first_batch_ms.iter().copied()).unwrap_or_default(),
        peak_rss_mb: status_mb("VmHWM:"),
        peak_anonymous_rss_mb: seen.anonymous_mb,
        read_from_disk_mb: disk as f64 / 1e6,
        skipped: seen.skipped,
        huffman_floor_images_per_second: singles.mean_micros("huffman").map(|micros| 1e6 / micros),
        stages: ["read", "decode", "resize"]
            .into_iter()
            .filter_map(|stage| Some((stage, singles.mean_micros(stage)?)))
            .collect(),
        resizes_differ_by: singles.difference / singles.pixels.max(1.0),
    })
}

/// Sums over the passes.
#[derive(Default)]
struct Seen {
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
    plan: &Plan,
    order: &SampleOrder,
    epoch: u32,
    seen: &mut Seen,
    progress: &mut impl FnMut(u64),
) -> Result<(), Error> {
    let begun = Instant::now();
    let order = order.epoch(epoch);
    let (view, size, len) = (plan.view.clone(), plan.batch.max(1), dataset.len());
    let most = if plan.batches == 0 { u64::MAX } else { plan.batches };
    let requests = (0..len.div_ceil(size).min(most)).map(move |number| {
        let positions = number * size..((number + 1) * size).min(len);
        let samples = positions.map(|position| order.at(position)).collect();
        Request { epoch, samples, view: view.clone() }
    });
    let mut loader = Loader::start(dataset.clone(), &plan.options, requests);
    let (mut images, mut first) = (0, None);
    while let Some(batch) = loader.next().transpose()? {
        first.get_or_insert_with(|| begun.elapsed());
        images += batch.len() as u64;
        progress(batch.len() as u64);
        loader.recycle(batch);
        seen.anonymous_mb = seen.anonymous_mb.max(status_mb("RssAnon:"));
    }
    let seconds = begun.elapsed().as_secs_f64();
    let stats = loader.stats();
    seen.rates.push(images as f64 / seconds);
    seen.first_batch_ms.push(first.unwrap_or_default().as_secs_f64() * 1e3);
    seen.images += images;
    seen.seconds += seconds;
    seen.waited += stats.waited;
    seen.skipped += stats.skipped;
    Ok(())
}

/// Single samples, made on this thread.
#[derive(Default)]
struct Singles {
    /// Times of each stage.
    stages: BTreeMap<&'static str, Vec<Duration>>,
    /// Sum of the differences between the two resizes, and how many values were compared.
    difference: f64,
    pixels: f64,
}

impl Singles {
    fn time(dataset: &Dataset, plan: &Plan) -> Result<Self, Error> {
        let mut singles = Self::default();
        let mut decoder = Decoder::new()?;
        let side = plan.view.resolution() as usize;
        let mut outs =
            [Resize::Fast, Resize::Area].map(|resize| (resize, vec![0; side * side * 3]));
        let step = (dataset.len() / TIMED_SAMPLES).max(1);
        for sample in (0..dataset.len()).step_by(step as usize) {
            let (shard, local) = dataset.find(sample)?;
            let Ok(InputPlace::Image(place)) = shard.place(local) else { continue };
            let frame = plan.view.frame(0, sample, place.width, place.height);
            let timed = decoder.time_stages(&shard.beton, local, &place, &frame, &mut outs[0].1);
            // Damaged samples are counted by the passes.
            let Ok(timed) = timed else { continue };
            for (stage, time) in timed {
                singles.stages.entry(stage).or_default().push(time);
            }
            for (resize, out) in &mut outs {
                let frame = Frame { resize: *resize, ..frame };
                decoder.render_stored(&shard.beton, local, &place, &frame, out)?;
            }
            let [(_, fast), (_, area)] = &outs;
            let differences = fast.iter().zip(area).map(|(a, b)| u64::from(a.abs_diff(*b)));
            singles.difference += differences.sum::<u64>() as f64;
            singles.pixels += fast.len() as f64;
        }
        Ok(singles)
    }

    /// Of a stage there is.
    fn mean_micros(&self, stage: &str) -> Option<f64> {
        let times = self.stages.get(stage)?;
        let sum: Duration = times.iter().sum();
        Some(sum.as_secs_f64() * 1e6 / times.len() as f64)
    }
}

/// A figure of /proc/self/status, which is in KiB, in MB; 0 where there is none.
fn status_mb(name: &str) -> f64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default() * 1024.0 / 1e6
}

/// Bytes that this process had fetched from disk.
fn disk_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or_default()
}

/// Processor time of this process.
fn cpu_seconds() -> f64 {
    let text: io::Result<String> = fs::read_to_string("/proc/self/stat");
    // The name, in brackets, may hold spaces; utime and stime are the 14th and 15th field.
    let text = text.unwrap_or_default();
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_figures_are_found() {
        assert!(status_mb("VmHWM:") > 1.0);
        let begun = Instant::now();
        let before = cpu_seconds();
        let mut sum = 0_u64;
        while begun.elapsed() < Duration::from_millis(60) {
            sum = sum.wrapping_add(begun.elapsed().as_nanos() as u64);
        }
        assert!(cpu_seconds() > before, "{sum}");
    }
}
