//! `baton data synth`

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use baton_data::synth::{INPUT_FIELD, Part, Signals, TARGET_FIELD};
use baton_job::exit::Failure;
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::write_failure;
use crate::{
    failure::{bad_input, failed},
    human,
    json::{self, SynthesizedData, WrittenFile},
    output,
};

/// Make up data whose answer is known
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Signals(Args),
}

/// Write signals to find a frequency in: a regression, for model.arch = "resnet34_1d"
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data synth signals --out data
      data/signals-train.beton with 8192 samples and data/signals-val.beton with 2048

  baton data synth signals --out data --channels 3 --window 500 --noise 1 --force
      three noisy channels of 500 positions, in the place of earlier files

A signal is a damped oscillation that drifts, in normal noise:
  a exp(-d s) sin(2 pi f s + p) + o + b (s - 1/2) + noise n      s = position / window
with f = 2 + 10 target cycles per window. Field `signal` is an array of f32 of shape
(channels, window), field `target` a number uniform in 0 to 1; all else is drawn uniformly and says
nothing of it. No linear model does better than to say 1/2 always (mean absolute error 0.25);
fitting the formula to the default signals gets 0.005. The same options write the same bytes on
every machine.")]
pub(crate) struct Args {
    /// Folder to write to; made if it is not there
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Samples for training
    #[arg(long, value_name = "N", default_value_t = 8_192,
        value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    /// Samples for validation, none of them among those for training
    #[arg(long, value_name = "N", default_value_t = 2_048,
        value_parser = clap::value_parser!(u64).range(1..))]
    val_samples: u64,
    /// Positions of a signal
    #[arg(long, value_name = "N", default_value_t = Signals::default().window)]
    window: u32,
    /// Signals of a sample: of one frequency, each with its own amplitude, phase, offset and drift
    #[arg(long, value_name = "N", default_value_t = Signals::default().channels)]
    channels: u32,
    /// Standard deviation of the noise, beside amplitudes of 0.5 to 2
    #[arg(long, value_name = "X", default_value_t = Signals::default().noise)]
    noise: f64,
    /// Draws the signals
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Replace files that are there
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
    let parts = [
        (Part::Train, args.samples, args.out.join("signals-train.beton")),
        (Part::Val, args.val_samples, args.out.join("signals-val.beton")),
    ];
    if !args.force {
        parts.iter().try_for_each(|(_, _, path)| refuse_existing(path))?;
    }
    fs::create_dir_all(&args.out)
        .map_err(|error| failed(format!("cannot create {}: {error}", args.out.display())))?;

    let begun = Instant::now();
    let bar = bar(args.samples.saturating_add(args.val_samples), args.json);
    let write = |(part, samples, path): (Part, u64, PathBuf)| {
        let written = signals.write(part, samples, &path, || bar.inc(1));
        written.map_err(write_failure).map(|written| WrittenFile {
            path: path.display().to_string(),
            samples: written.samples,
            bytes: written.bytes,
            kept: false,
        })
    };
    let [train, val] = parts;
    let files = [write(train)?, write(val)?];
    bar.finish_and_clear();
    let synthesized = SynthesizedData {
        files,
        input_field: INPUT_FIELD,
        shape: [channels, window],
        label_field: TARGET_FIELD,
        seconds: begun.elapsed().as_secs_f64(),
    };
    if args.json {
        output::line(json::line(&synthesized));
    } else {
        conclude(&synthesized);
    }
    Ok(())
}

fn refuse_existing(path: &Path) -> Result<(), Failure> {
    if path.exists() {
        let path = path.display();
        return Err(bad_input(format!("{path} is there already: --force replaces it")));
    }
    Ok(())
}

/// Draws on standard error, and only on a terminal.
fn bar(samples: u64, is_quiet: bool) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} samples  {per_sec}  {eta} left");
    let bar = ProgressBar::new(samples);
    if is_quiet {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// For people.
fn conclude(synthesized: &SynthesizedData) {
    let SynthesizedData { files, shape, .. } = synthesized;
    for file in files {
        let samples = human::count(file.samples, "sample");
        let bytes = human::bytes(file.bytes);
        output::line(format_args!("{}: {samples} of shape {shape:?}, {bytes}", file.path));
    }
    output::line(format_args!(
        "for a recipe: data.input_field = \"{INPUT_FIELD}\", data.label_field = \"{TARGET_FIELD}\", \
         model.num_classes = 1, loss.kind = \"mse\""
    ));
}
