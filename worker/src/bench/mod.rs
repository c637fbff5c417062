//! `baton-worker bench`: seconds per training step on made-up inputs or a data set, without a coordinator.
//!
//! With several ranks this process starts itself once per rank; they meet and exchange gradients as
//! ranks of a job do.

mod batches;
mod ranks;

use std::{path::PathBuf, time::Instant};

use baton_collectives::{Collective, tcp::TcpCollective};
use baton_data::{Batch, InputType};
use baton_job::{
    Rank,
    exit::{Failure, bad_input, crash},
    ids::LocalRank,
    plan::virtual_block,
};
use baton_plan::{
    network::{Input, Network},
    roofline::{self, Roofline},
};
use baton_recipe::{JobSpec, Step, median, spec::Compute};
use baton_trainer::{
    Controls, Leaf, Learner, StateCopy, Update,
    step::{NextStep, ReadSums, StateValidity, StepContext, Stepper},
    torch::{
        self, TorchLearner,
        peaks::{self, Peaks},
    },
};
use serde::{Deserialize, Serialize};

/// Measure seconds per training step.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Network.
    #[arg(long, default_value = "resnet50")]
    arch: String,
    /// Side of the images in pixels.
    #[arg(long, value_name = "PIXELS", default_value_t = 64)]
    resolution: u32,
    /// Images per step and rank.
    #[arg(long, value_name = "N", default_value_t = 16)]
    batch: u32,
    /// Steps measured.
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: u32,
    /// Steps before them: they get memory, and libraries try out their algorithms.
    #[arg(long, value_name = "N", default_value_t = 2)]
    warm_up: u32,
    /// Processes that add up their gradients; a power of two.
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: u32,
    /// libtorch threads per rank.
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: u32,
    /// Keep activations in NCHW order.
    #[arg(long)]
    channels_first: bool,
    /// cpu, cuda or auto.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Change one value of the made-up recipe, e.g. --set precision.compute=bf16. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Read images from this beton file, as a job does, instead of one made-up batch.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Threads that decode them.
    #[arg(long, value_name = "N", default_value_t = 8)]
    decode_threads: u32,
    /// Measure besides what the device can do at best, and which share of that a step reaches.
    #[arg(long)]
    roofline: bool,
    /// Measure besides for how long a checkpoint lets training stand still.
    #[arg(long)]
    snapshot: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Be this rank of several; started by the bench itself.
    #[arg(long, hide = true)]
    rank: Option<u32>,
}

/// What one rank measured.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Measured {
    /// Whether a GPU did it.
    on_gpu: bool,
    /// Median over the steps.
    step_seconds: f64,
    /// Of all steps together, also of what passes between them.
    mean_step_seconds: f64,
    best_step_seconds: f64,
    /// Of that for adding up gradients, waiting for the others included. On a GPU, where the host goes ahead, what of
    /// that the host does.
    all_reduce_seconds: f64,
    /// Of that for norm, clipping, update and average; on a GPU as above.
    optimizer_seconds: f64,
    /// Pages that the kernel had to provide in a step: median.
    page_faults: f64,
    /// Most memory this process had, in MiB.
    peak_mib: f64,
    /// With `--roofline`.
    #[serde(skip_serializing_if = "Option::is_none")]
    peaks: Option<Peaks>,
    /// With `--snapshot`.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_seconds: Option<f64>,
}

/// What `--json` prints: what was measured and of what, for `baton plan --calibration` and scripts.
#[derive(Debug, Serialize)]
struct Told<'a> {
    arch: &'a str,
    /// Side of the images in pixels.
    resolution: u32,
    /// Images per step and rank.
    batch: u32,
    ranks: u32,
    compute: Compute,
    #[serde(flatten)]
    measured: Measured,
    /// Of the measured time, how much forward and backward pass would take if each of their operations reached the
    /// rates of `peaks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    roofline_share: Option<f64>,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let spec = made_up_recipe(args)?;
    if let Some(rank) = args.rank {
        return ranks::be_one(args, &spec, rank);
    }
    let all = match args.ranks {
        1 => {
            let mut alone = TcpCollective::alone(ranks::PATIENCE).map_err(crash)?;
            vec![measure(args, &spec, &mut alone)?]
        }
        _ => ranks::start_all(args)?,
    };
    print(args, &spec, &all);
    Ok(())
}

/// Takes the time of training steps.
fn measure(
    args: &Args,
    spec: &JobSpec,
    collective: &mut dyn Collective,
) -> Result<Measured, Failure> {
    let device = torch::device::open(spec, LocalRank(collective.rank().0))?;
    let mut learner = TorchLearner::new(spec, &InputType::Image, device)?;
    let mut feed = batches::feed(args, spec)?;
    let block = virtual_block(spec.train.virtual_ranks, collective.rank(), args.ranks);
    let (mut stepper, controls) = (Stepper::new(block), Controls::default());
    let (mut steps, mut reduces, mut updates) = (Vec::new(), Vec::new(), Vec::new());
    let mut faults = Vec::new();
    let mut began = Instant::now();
    let mut validity = StateValidity::Untouched;
    // Where the device computes while the host goes ahead, a step is known to be over one step later.
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
            learner: &mut learner,
            validity: &mut validity,
            collective: &mut *collective,
            feed: &mut feed,
            controls: &controls,
            is_writing: &mut || false,
        };
        let times = stepper.step(&mut context, next, read)?;
        steps.push(start.elapsed().as_secs_f64());
        reduces.push(times.all_reduce.as_secs_f64());
        updates.push(times.update.as_secs_f64());
        faults.push(page_faults() - faults_before);
    }
    stepper.finish_pending(&mut validity, collective, read)?;
    let mean_step_seconds = began.elapsed().as_secs_f64() / f64::from(args.steps.max(1));
    let warm_up = args.warm_up as usize;
    // Without those that warm up.
    let measured = |values: Vec<f64>| values.into_iter().skip(warm_up);
    let median_of = |values| median(measured(values)).unwrap_or_default();
    let best_step_seconds = measured(steps.clone()).min_by(f64::total_cmp).unwrap_or_default();
    Ok(Measured {
        on_gpu: device != torch::Device::Cpu,
        step_seconds: median_of(steps),
        mean_step_seconds,
        best_step_seconds,
        all_reduce_seconds: median_of(reduces),
        optimizer_seconds: median_of(updates),
        page_faults: median_of(faults),
        peak_mib: peak_mib(),
        snapshot_seconds: args.snapshot.then(|| snapshot(&mut learner, args.ranks)).transpose()?,
        // Not before: it takes memory that a step may need.
        peaks: match args.roofline {
            true => Some(peaks::measure(device, spec.precision.compute)?),
            false => None,
        },
    })
}

/// For how long training stands still for a checkpoint: median, after a first one that gets the memory.
fn snapshot(learner: &mut TorchLearner, ranks: u32) -> Result<f64, Failure> {
    let mut copy = StateCopy::default();
    let mut times = Vec::new();
    for _ in 0..6 {
        let start = Instant::now();
        copy.take(learner, Rank(0), ranks).map_err(crash)?;
        times.push(start.elapsed().as_secs_f64());
        // As the thread that writes it does; the next one needs its memory.
        copy.snapshot().map_err(crash)?;
    }
    times.remove(0);
    Ok(median(times).unwrap_or_default())
}

/// How much of a step forward and backward pass would take at best.
fn roofline_share(spec: &JobSpec, args: &Args, measured: &Measured) -> Option<f64> {
    let Peaks { copy_bytes_per_second, flop_per_second } = measured.peaks?;
    let input = Input::Image { resolution: u64::from(args.resolution) };
    let network = Network::new(&spec.model, input)?;
    let compute = spec.precision.compute;
    let roofline = Roofline::of_peaks(flop_per_second, copy_bytes_per_second, compute);
    let rows = roofline.training(spec, &network, u64::from(args.batch));
    Some(roofline::total(&rows).total() / measured.step_seconds)
}

/// Of this process so far: `minflt` of `proc_pid_stat(5)`, the eighth value behind the command's name.
fn page_faults() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let behind_name = stat.rsplit(") ").next().unwrap_or_default();
    behind_name.split(' ').nth(7).and_then(|count| count.parse().ok()).unwrap_or_default()
}

/// `VmHWM` of `proc_pid_status(5)`.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or_default() / 1024.0
}

fn made_up_recipe(args: &Args) -> Result<JobSpec, Failure> {
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

/// Images and labels that differ from each other and are the same every time.
pub(crate) fn made_up_batch(samples: u32, resolution: u32) -> Batch {
    let pixels = samples * resolution * resolution * 3;
    let pixels: Vec<u8> =
        (0..pixels).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let labels = (0..i64::from(samples)).map(|i| i * 7 % 10).collect();
    Batch::of_images(&pixels, resolution, labels, (0..u64::from(samples)).collect())
}

/// Ranks wait for each other in every step: the slowest one's numbers are the job's.
#[allow(clippy::print_stdout, reason = "the result is this command's output")]
fn print(args: &Args, spec: &JobSpec, all: &[Measured]) {
    let most = |value: fn(&Measured) -> f64| all.iter().map(value).fold(0.0, f64::max);
    let worst = Measured {
        on_gpu: all.iter().any(|measured| measured.on_gpu),
        step_seconds: most(|m| m.step_seconds),
        mean_step_seconds: most(|m| m.mean_step_seconds),
        best_step_seconds: most(|m| m.best_step_seconds),
        all_reduce_seconds: most(|m| m.all_reduce_seconds),
        optimizer_seconds: most(|m| m.optimizer_seconds),
        page_faults: most(|m| m.page_faults),
        peak_mib: most(|m| m.peak_mib),
        snapshot_seconds: all.iter().filter_map(|m| m.snapshot_seconds).reduce(f64::max),
        // Of the first rank's device; they are alike.
        peaks: all.iter().find_map(|measured| measured.peaks),
    };
    let roofline_share = roofline_share(spec, args, &worst);
    if args.json {
        let told = Told {
            arch: &args.arch,
            resolution: args.resolution,
            batch: args.batch,
            ranks: args.ranks,
            compute: spec.precision.compute,
            measured: worst,
            roofline_share,
        };
        println!("{}", serde_json::to_string(&told).unwrap_or_default());
        return;
    }
    let images = f64::from(args.batch * args.ranks);
    println!(
        "{} at {} px, {} ranks x batch {}: {:.4} s per step (median; best {:.4}), {:.1} images/s; \
         adding up {:.4} s, optimizer {:.4} s, {:.0} page faults, {:.0} MiB per rank",
        args.arch,
        args.resolution,
        args.ranks,
        args.batch,
        worst.step_seconds,
        worst.best_step_seconds,
        images / worst.step_seconds,
        worst.all_reduce_seconds,
        worst.optimizer_seconds,
        worst.page_faults,
        worst.peak_mib
    );
    if let Some(seconds) = worst.snapshot_seconds {
        println!("a checkpoint lets training stand still for {:.2} ms", seconds * 1e3);
    }
    if let (Some(peaks), Some(share)) = (worst.peaks, roofline_share) {
        println!(
            "at best this device copies {:.1} GB/s and computes {:.2} TFLOP/s: forward and backward pass would \
             take {:.1} % of the step",
            peaks.copy_bytes_per_second / 1e9,
            peaks.flop_per_second / 1e12,
            share * 100.0
        );
    }
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
    fn a_step_gets_its_memory_from_the_step_before_and_not_from_the_kernel() {
        let line = ["bench", "--device=cpu", "--arch=resnet18", "--batch=8", "--steps=3"];
        let Command { args } = Command::parse_from(line);
        let spec = made_up_recipe(&args).unwrap();
        let mut alone = TcpCollective::alone(ranks::PATIENCE).unwrap();
        let measured = measure(&args, &spec, &mut alone).unwrap();
        assert!(measured.page_faults < 500.0, "{measured:?}");
    }
}
