//! `baton-worker bench`: seconds per training step on made-up images, without loader and peers.

use std::time::Instant;

use baton_data::Batch;
use baton_job::{
    JobSpec, Step,
    exit::{Class, Failure},
    ids::LocalRank,
};
use baton_trainer::{
    Error, Learner,
    torch::{self, TorchLearner},
};

/// Measure seconds per training step on made-up images.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Network.
    #[arg(long, default_value = "resnet50")]
    arch: String,
    /// Side of the images in pixels.
    #[arg(long, value_name = "PIXELS", default_value_t = 64)]
    resolution: u32,
    /// Images per step.
    #[arg(long, value_name = "N", default_value_t = 16)]
    batch: u32,
    /// Steps measured, after two that are not.
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: u32,
    /// libtorch threads.
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: u32,
    /// Keep activations in NCHW order.
    #[arg(long)]
    channels_first: bool,
    /// cpu, cuda or auto.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let spec = made_up_recipe(args)?;
    let device = torch::device::open(&spec, LocalRank(0)).map_err(failure)?;
    torch::device::set_threads(args.threads);
    let mut learner = TorchLearner::new(&spec, device).map_err(failure)?;
    let batch = made_up_batch(args.batch, args.resolution);
    let mut leaf = learner.new_leaf().map_err(failure)?;
    let mut seconds = Vec::new();
    for step in 0..args.steps + 2 {
        let start = Instant::now();
        // The sums are read back, so a GPU has finished its forward and backward pass here.
        learner.gradient(&batch, 1.0 / args.batch as f32, &mut leaf).map_err(failure)?;
        learner.update(&leaf, Step(u64::from(step)), 0.1, 1).map_err(failure)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.drain(..2);
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    print(args, median, seconds[0]);
    Ok(())
}

fn made_up_recipe(args: &Args) -> Result<JobSpec, Failure> {
    let text = format!(
        r#"
        name = "bench"
        model = {{ arch = "{}", num_classes = 1000, channels_last = {} }}
        data = {{ train = "none", val = "none" }}
        train = {{ epochs = 1, global_batch = {}, resolution = {}, virtual_ranks = 1 }}
        optimizer = {{ kind = "sgd", momentum = 0.9, weight_decay = 1e-4 }}
        schedule = {{ kind = "constant", lr = 0.1 }}
        cluster = {{ device = "{}" }}
        "#,
        args.arch, !args.channels_first, args.batch, args.resolution, args.device
    );
    JobSpec::from_toml(&text, &[])
        .map_err(|error| Failure { class: Class::BadInput, message: error.to_string() })
}

/// Images and labels that differ from each other and are the same every time.
pub(crate) fn made_up_batch(samples: u32, resolution: u32) -> Batch {
    let pixels = samples * resolution * resolution * 3;
    let pixels: Vec<u8> =
        (0..pixels).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let labels = (0..i64::from(samples)).map(|i| i * 7 % 10).collect();
    Batch::of_images(&pixels, resolution, labels, (0..u64::from(samples)).collect())
}

#[allow(clippy::print_stdout, reason = "the result is this command's output")]
fn print(args: &Args, median: f64, best: f64) {
    let rate = f64::from(args.batch) / median;
    if args.json {
        println!(
            r#"{{"arch":"{}","resolution":{},"batch":{},"median_seconds":{median:.6},"best_seconds":{best:.6},"images_per_second":{rate:.3}}}"#,
            args.arch, args.resolution, args.batch
        );
    } else {
        println!(
            "{} at {} px, batch {}: {median:.4} s per step (median; best {best:.4}), {rate:.1} images/s",
            args.arch, args.resolution, args.batch
        );
    }
}

fn failure(error: baton_trainer::learner::Error) -> Failure {
    Error::from(error).failure()
}
