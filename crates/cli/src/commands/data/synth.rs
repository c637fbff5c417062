//! `baton data synth`

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use baton_data::synth::{INPUT_FIELD, Signals, Split, TARGET_FIELD};
use baton_job::exit::Failure;
use clap::Subcommand;
use indicatif::ProgressDrawTarget;

use super::write_failure;
use crate::{
    commands::bar::{SAMPLES, bar},
    failure::{bad_input, failed},
    human,
    json::{self, SynthesizedData, WrittenFile},
};

/// Make synthetic data with known targets
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Signals(Args),
}

/// Write signals whose frequency is the target: a regression, for model.arch = "resnet34_1d"
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data synth signals --out data
      data/signals-train.beton with 8192 samples and data/signals-val.beton with 2048

  baton data synth signals --out data --channels 3 --window 500 --noise 1 --force
      three noisy channels of 500 positions; replaces earlier files

A signal is a damped oscillation that drifts, in normal noise:
  a exp(-d s) sin(2 pi f s + p) + o + b (s - 1/2) + noise n      s = position / window
with f = 2 + 10 target cycles per window. Field `signal` is an array of f32 of shape
(channels, window), field `target` a number uniform in 0 to 1. All other values are drawn uniformly and are
independent of it. No linear model is better than the constant 1/2 (mean absolute error 0.25);
fitting the formula to the default signals reaches 0.005. The same options write the same bytes on
every machine.")]
pub(crate) struct Args {
    /// Folder to write to; created if it does not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of samples for training
    #[arg(long, value_name = "N", default_value_t = 8_192,
        value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    /// Number of samples for validation, different from those for training
    #[arg(long, value_name = "N", default_value_t = 2_048,
        value_parser = clap::value_parser!(u64).range(1..))]
    val_samples: u64,
    /// Number of positions of a signal
    #[arg(long, value_name = "N", default_value_t = Signals::default().window)]
    window: u32,
    /// Number of signals per sample: all with the same frequency, each with a different amplitude, phase, offset and
    /// drift
    #[arg(long, value_name = "N", default_value_t = Signals::default().channels)]
    channels: u32,
    /// Standard deviation of the noise; amplitudes are 0.5 to 2
    #[arg(long, value_name = "X", default_value_t = Signals::default().noise)]
    noise: f64,
    /// Seed of the random signals
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Replace existing files
    #[arg(long)]
    force: bool,
    /// Print one JSON object at the end, and nothing else
    #[arg(long)]
    json: bool,
}

pub(super) fn run(command: &Command) -> Result<(), Failure> {
    let Command::Signals(args) = command;
    let &Args { window, channels, noise, seed, .. } = args;
    let signals = Signals { window, channels, noise, seed };
    signals.check().map_err(write_failure)?;
    let splits = [
        (Split::Train, args.samples, args.out.join("signals-train.beton")),
        (Split::Val, args.val_samples, args.out.join("signals-val.beton")),
    ];
    if !args.force {
        splits.iter().try_for_each(|(_, _, path)| reject_existing(path))?;
    }
    fs::create_dir_all(&args.out)
        .map_err(|error| failed(format!("cannot create {}: {error}", args.out.display())))?;

    let start = Instant::now();
    let bar = bar(SAMPLES, args.samples.saturating_add(args.val_samples));
    if args.json {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let write = |(split, samples, path): (Split, u64, PathBuf)| {
        let written = signals.write(split, samples, &path, || bar.inc(1));
        written.map_err(write_failure).map(|written| WrittenFile {
            path: path.display().to_string(),
            samples: written.samples,
            bytes: written.bytes,
            kept: false,
        })
    };
    let [train, val] = splits;
    let files = [write(train)?, write(val)?];
    bar.finish_and_clear();
    let synthesized = SynthesizedData {
        files,
        input_field: INPUT_FIELD,
        shape: [channels, window],
        label_field: TARGET_FIELD,
        seconds: start.elapsed().as_secs_f64(),
    };
    json::print(args.json, &synthesized, text);
    Ok(())
}

fn reject_existing(path: &Path) -> Result<(), Failure> {
    if path.exists() {
        let path = path.display();
        return Err(bad_input(format!("{path} already exists: --force replaces it")));
    }
    Ok(())
}

/// The result as text.
fn text(synthesized: &SynthesizedData) -> String {
    let SynthesizedData { files, shape, .. } = synthesized;
    let files = files.iter().map(|file| {
        let samples = human::count(file.samples, "sample");
        let bytes = human::bytes(file.bytes);
        format!("{}: {samples} of shape {shape:?}, {bytes}\n", file.path)
    });
    let files: String = files.collect();
    format!(
        "{files}for a recipe: data.input_field = \"{INPUT_FIELD}\", data.label_field = \"{TARGET_FIELD}\", \
         model.num_classes = 1, loss.kind = \"mse\""
    )
}
