//! `baton-worker bench`: measures seconds per training step on synthetic inputs or a data set, without a coordinator.
//!
//! With several ranks this process starts itself once per rank; they connect to each other and exchange gradients
//! like the ranks of a job.
//!
//! The measured step must be the job's own: it is made by the same [`Stepper`], and nothing else runs between its
//! start and its end. Keys of `--json` are a promise to scripts and to `baton plan --calibration`: adding is allowed,
//! renaming is not.

mod batches;
mod ranks;

use std::{path::PathBuf, time::Instant};

use baton_collectives::{Collective, tcp::TcpCollective};
use baton_console::json;
use baton_data::{Batch, InputType};
use baton_job::{
    Rank,
    exit::{Failure, bad_input, crash},
    ids::LocalRank,
    plan::virtual_block,
};
use baton_plan::{
    network::{InputShape, Network},
    roofline::{self, Roofline},
};
use baton_recipe::{JobSpec, Step, median, spec::Compute};
use baton_trainer::{
    Controls, Leaf, Learner, StateCopy, Update,
    step::{NextStep, ReadSums, StateValidity, StepContext, StepEnd, Stepper},
    torch::{
        self, TorchLearner,
        peaks::{self, Peaks},
    },
};
use serde::{Deserialize, Serialize};

/// Measure seconds per training step.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Architecture of the network.
    #[arg(long, default_value = "resnet50")]
    arch: String,
    /// Width and height of the images in pixels.
    #[arg(long, value_name = "PIXELS", default_value_t = 64)]
    resolution: u32,
    /// Images per step and rank.
    #[arg(long, value_name = "N", default_value_t = 16)]
    batch: u32,
    /// Steps to measure.
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: u32,
    /// Warm-up steps before them: they allocate memory, and libraries choose their algorithms.
    #[arg(long, value_name = "N", default_value_t = 2)]
    warm_up: u32,
    /// Number of ranks (processes) that exchange gradients; a power of two.
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: u32,
    /// Start every rank by this program, which gets its number, the number of ranks and its command as arguments, e.g.
    /// to run it on another host. The rank listens at the address in BATON_BENCH_ADDRESS.
    #[arg(long, value_name = "PROGRAM")]
    launcher: Option<PathBuf>,
    /// libtorch threads per rank.
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: u32,
    /// Keep activations in NCHW order.
    #[arg(long)]
    channels_first: bool,
    /// Device: cpu, cuda or auto.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Change one value of the bench's recipe, e.g. --set precision.compute=bf16. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Read images from this beton file, like a job, instead of one synthetic batch.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Threads that decode images.
    #[arg(long, value_name = "N", default_value_t = 8)]
    decode_threads: u32,
    /// Also measure the device's peak rates, and which share of them a step reaches.
    #[arg(long)]
    roofline: bool,
    /// Also measure for how long a checkpoint pauses training.
    #[arg(long)]
    snapshot: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Run as this rank of several; used by the bench itself.
    #[arg(long, hide = true)]
    rank: Option<u32>,
}

/// What one rank measured.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct BenchResult {
    /// Whether the device is a GPU.
    on_gpu: bool,
    /// Median time of a step, seconds.
    step_seconds: f64,
    /// Mean time of a step including the time between steps, seconds.
    mean_step_seconds: f64,
    /// Shortest time of a step, seconds.
    best_step_seconds: f64,
    /// Median time of the all-reduce in a step, including the wait for other ranks, seconds. On a GPU only the host's
    /// time, because the host runs ahead of the device.
    all_reduce_seconds: f64,
    /// Median time of norm, clipping, update and averaging in a step, seconds; on a GPU only the host's time.
    optimizer_seconds: f64,
    /// Median number of page faults in a step.
    page_faults: f64,
    /// Peak memory of this process, MiB.
    peak_mib: f64,
    /// Peak rates of the device, with `--roofline`.
    #[serde(skip_serializing_if = "Option::is_none")]
    peaks: Option<Peaks>,
    /// Time for which a checkpoint pauses training, seconds, with `--snapshot`.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_seconds: Option<f64>,
}

/// Output of `--json`: results and settings, for `baton plan --calibration` and scripts.
#[derive(Debug, Serialize)]
struct StepBenchReport<'a> {
    arch: &'a str,
    /// Width and height of the images in pixels.
    resolution: u32,
    /// Images per step and rank.
    batch: u32,
    ranks: u32,
    compute: Compute,
    #[serde(flatten)]
    measured: BenchResult,
    /// Share of the measured step time that the forward and backward passes would take if each operation reached the
    /// rates of `peaks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    roofline_share: Option<f64>,
}

/// Measures and prints the results.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let spec = bench_recipe(args)?;
    if let Some(rank) = args.rank {
        return ranks::run_rank(args, &spec, rank);
    }
    let all = match args.ranks {
        1 => {
            let mut alone = TcpCollective::alone(ranks::MEETING_TIMEOUT).map_err(crash)?;
            vec![measure(args, &spec, &mut alone)?]
        }
        _ => ranks::start_all(args)?,
    };
    print(args, &spec, &all);
    Ok(())
}

/// Measures training steps on one rank.
fn measure(
    args: &Args,
    spec: &JobSpec,
    collective: &mut dyn Collective,
) -> Result<BenchResult, Failure> {
    let device = torch::device::open(spec, LocalRank(collective.rank().0))?;
    let mut learner = TorchLearner::new(spec, &InputType::Image, device)?;
    // As in a job: on one rank, while the others wait.
    let measured = match collective.rank() {
        Rank(0) => learner.measure_pointwise()?,
        _ => None,
    };
    let all = collective.all_gather_bytes(&serde_json::to_vec(&measured).map_err(crash)?);
    let first = all.map_err(crash)?.into_iter().next().unwrap_or_default();
    learner.set_pointwise(serde_json::from_slice(&first).map_err(crash)?);
    let mut feed = batches::feed(args, spec)?;
    let block = virtual_block(spec.train.virtual_ranks, collective.rank(), args.ranks);
    let (mut stepper, controls) = (Stepper::new(block), Controls::default());
    let (mut steps, mut reduces, mut updates) = (Vec::new(), Vec::new(), Vec::new());
    let mut faults = Vec::new();
    let mut began = Instant::now();
    let mut validity = StateValidity::Untouched;
    // If the host runs ahead of the device, the end of a step is known one step later.
    let read: &mut ReadSums<'_, TorchLearner> =
        &mut |pending, _| Ok(pending.total.tail().map(drop)?);
    for step in 0..args.steps + args.warm_up {
        if step == args.warm_up {
            stepper.finish_pending(&mut validity, collective, read)?;
            began = Instant::now();
        }
        let faults_before = page_faults();
        let start = Instant::now();
        let next = NextStep {
            update: Update { step: Step(u64::from(step)), lr: 0.1, micro_batches: args.ranks },
            scale: 1.0 / spec.train.global_batch as f32,
            ..NextStep::default()
        };
        let mut context = StepContext {
            spec,
            ahead: learner.runs_ahead(),
            overlap: spec.cluster.overlap && !learner.runs_ahead(),
            learner: &mut learner,
            validity: &mut validity,
            feed: &mut feed,
            controls: &controls,
            is_writing: &mut || false,
        };
        let StepEnd::Made(times) = stepper.step(&mut context, collective, next, read)? else {
            return Err(crash("the step was abandoned; this is a bug"));
        };
        steps.push(start.elapsed().as_secs_f64());
        reduces.push(times.all_reduce.as_secs_f64());
        updates.push(times.update.as_secs_f64());
        faults.push(page_faults() - faults_before);
    }
    stepper.finish_pending(&mut validity, collective, read)?;
    let mean_step_seconds = began.elapsed().as_secs_f64() / f64::from(args.steps.max(1));
    let warm_up = args.warm_up as usize;
    // Without the warm-up steps.
    let measured = |values: Vec<f64>| values.into_iter().skip(warm_up);
    let median_of = |values| median(measured(values)).unwrap_or_default();
    let best_step_seconds = measured(steps.clone()).min_by(f64::total_cmp).unwrap_or_default();
    Ok(BenchResult {
        on_gpu: device != torch::Device::Cpu,
        step_seconds: median_of(steps),
        mean_step_seconds,
        best_step_seconds,
        all_reduce_seconds: median_of(reduces),
        optimizer_seconds: median_of(updates),
        page_faults: median_of(faults),
        peak_mib: peak_mib(),
        snapshot_seconds: args.snapshot.then(|| snapshot(&mut learner, args.ranks)).transpose()?,
        // Measured last, because it allocates memory that a step may need.
        peaks: match args.roofline {
            true => Some(peaks::measure(device, spec.precision.compute)?),
            false => None,
        },
    })
}

/// Time for which a checkpoint pauses training, seconds: median without the first copy, which allocates memory.
fn snapshot(learner: &mut TorchLearner, ranks: u32) -> Result<f64, Failure> {
    let mut copy = StateCopy::default();
    let mut times = Vec::new();
    for _ in 0..6 {
        let start = Instant::now();
        copy.take(learner, Rank(0), ranks).map_err(crash)?;
        times.push(start.elapsed().as_secs_f64());
        // Read it as the writing thread does; the next copy reuses its memory.
        copy.snapshot().map_err(crash)?;
    }
    times.remove(0);
    Ok(median(times).unwrap_or_default())
}

/// Share of a step that the forward and backward passes would take at the device's peak rates.
fn roofline_share(spec: &JobSpec, args: &Args, measured: &BenchResult) -> Option<f64> {
    let Peaks { copy_bytes_per_second, flop_per_second } = measured.peaks?;
    let input = InputShape::Image { resolution: u64::from(args.resolution) };
    let network = Network::new(&spec.model, input)?;
    let compute = spec.precision.compute;
    let roofline = Roofline::of_peaks(flop_per_second, copy_bytes_per_second, compute);
    let rows = roofline.training(spec, &network, u64::from(args.batch));
    Some(roofline::total(&rows).total() / measured.step_seconds)
}

/// Page faults of this process so far: `minflt` in `proc_pid_stat(5)`, the eighth value after the command's name.
fn page_faults() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    after_name.split(' ').nth(7).and_then(|count| count.parse().ok()).unwrap_or_default()
}

/// Peak memory of this process, MiB: `VmHWM` in `proc_pid_status(5)`.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or_default() / 1024.0
}

fn bench_recipe(args: &Args) -> Result<JobSpec, Failure> {
    let text = format!(
        r#"
        name = "bench"
        model = {{ arch = "{}", num_classes = 1000, channels_last = {} }}
        data = {{ train = "none", val = "none" }}
        train = {{ epochs = 1, global_batch = {}, resolution = {}, virtual_ranks = {} }}
        optimizer = {{ kind = "sgd", momentum = 0.9, weight_decay = 1e-4 }}
        schedule = {{ kind = "constant", lr = 0.1 }}
        loss = {{ label_smoothing = 0.1 }}
        cluster = {{ device = "{}", threads_per_rank = {} }}
        "#,
        args.arch,
        !args.channels_first,
        args.batch * args.ranks,
        args.resolution,
        args.ranks,
        args.device,
        args.threads
    );
    JobSpec::from_toml(&text, &args.overrides).map_err(bad_input)
}

/// A batch of synthetic images and labels, the same on every call.
pub(crate) fn synthetic_batch(samples: u32, resolution: u32) -> Batch {
    let pixels = samples * resolution * resolution * 3;
    let pixels: Vec<u8> =
        (0..pixels).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let labels = (0..i64::from(samples)).map(|i| i * 7 % 10).collect();
    Batch::of_images(&pixels, resolution, labels, (0..u64::from(samples)).collect())
}

/// Prints the largest value of each measurement over all ranks, because ranks wait for each other in every step.
fn print(args: &Args, spec: &JobSpec, all: &[BenchResult]) {
    let most = |value: fn(&BenchResult) -> f64| all.iter().map(value).fold(0.0, f64::max);
    let largest = BenchResult {
        on_gpu: all.iter().any(|measured| measured.on_gpu),
        step_seconds: most(|m| m.step_seconds),
        mean_step_seconds: most(|m| m.mean_step_seconds),
        best_step_seconds: most(|m| m.best_step_seconds),
        all_reduce_seconds: most(|m| m.all_reduce_seconds),
        optimizer_seconds: most(|m| m.optimizer_seconds),
        page_faults: most(|m| m.page_faults),
        peak_mib: most(|m| m.peak_mib),
        snapshot_seconds: all.iter().filter_map(|m| m.snapshot_seconds).reduce(f64::max),
        // Peak rates of the first rank's device; all devices are alike.
        peaks: all.iter().find_map(|measured| measured.peaks),
    };
    let roofline_share = roofline_share(spec, args, &largest);
    let report = StepBenchReport {
        arch: &args.arch,
        resolution: args.resolution,
        batch: args.batch,
        ranks: args.ranks,
        compute: spec.precision.compute,
        measured: largest,
        roofline_share,
    };
    json::print(args.json, &report, text);
}

/// The report as text.
fn text(report: &StepBenchReport<'_>) -> String {
    let StepBenchReport { arch, resolution, batch, ranks, measured, roofline_share, .. } = report;
    let images = f64::from(batch * ranks);
    let mut lines = vec![format!(
        "{arch} at {resolution} px, {ranks} ranks x batch {batch}: {:.4} s per step (median; best {:.4}), {:.1} \
         images/s; all-reduce {:.4} s, optimizer {:.4} s, {:.0} page faults, {:.0} MiB per rank",
        measured.step_seconds,
        measured.best_step_seconds,
        images / measured.step_seconds,
        measured.all_reduce_seconds,
        measured.optimizer_seconds,
        measured.page_faults,
        measured.peak_mib
    )];
    lines.extend(
        measured
            .snapshot_seconds
            .map(|seconds| format!("a checkpoint pauses training for {:.2} ms", seconds * 1e3)),
    );
    if let (Some(peaks), Some(share)) = (measured.peaks, roofline_share) {
        lines.push(format!(
            "peak rates of this device: copy {:.1} GB/s, compute {:.2} TFLOP/s; at these rates forward and backward \
             pass would take {:.1} % of the step",
            peaks.copy_bytes_per_second / 1e9,
            peaks.flop_per_second / 1e12,
            share * 100.0
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn step_reuses_the_memory_of_the_previous_step() {
        let line = ["bench", "--device=cpu", "--arch=resnet18", "--batch=8", "--steps=3"];
        let Command { args } = Command::parse_from(line);
        let spec = bench_recipe(&args).unwrap();
        let mut alone = TcpCollective::alone(ranks::MEETING_TIMEOUT).unwrap();
        let measured = measure(&args, &spec, &mut alone).unwrap();
        assert!(measured.page_faults < 500.0, "{measured:?}");
    }
}
