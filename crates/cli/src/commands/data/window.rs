//! `baton data window`

use std::{path::PathBuf, time::Instant};

use baton_data::write::{LabelTable, LabelTimes, WindowOptions, write_windows};
use baton_job::exit::Failure;

use super::{split::SplitFiles, write_failure};
use crate::{
    commands::bar::CommandProgress,
    failure::bad_input,
    human,
    json::{self, WrittenWindowFiles},
    output,
};

/// Cut long recordings into windows with a label each, and write them as a .beton file
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data window --from recordings --length 100 --labels glucose.csv --time seconds --rate 100 --within 300 \\
      --by patient --to train.beton --val val.beton --val-share 0.1
      windows of a second of signals at 100 Hz; each has the label that is nearest in time, at most five minutes away; no
      patient is in both files

  baton data window --from sounds --length 16000 --stride 8000 --labels rooms.csv --label size --to train.beton
      .wav files with one label each; windows overlap by half

Recordings are files in one folder: .npy of shape (time) or (channels, time), .wav or .flac. A recording's name is that of its
file, without the ending. The labels are a CSV or Parquet file with columns for the recording's name, the label and, if it changes,
its time in seconds since the recording's beginning.

Fields of the file: `signal`, f32 of shape (channels, length); `label`, Float; `recording` and `start`, Int: which recording
(TO.recordings.txt lists them) and where in it. A window with a value that is not finite (a gap) is left out, as is one
without a label that is near enough. Windows are written in a random order. Memory holds one recording, 64 MiB of windows
(more beyond 16 GiB of windows) and 24 bytes per window.")]
pub(crate) struct Args {
    /// Folder of the recordings
    #[arg(long, value_name = "FOLDER")]
    from: PathBuf,
    /// Positions in time of a window
    #[arg(long, value_name = "N")]
    length: usize,
    /// Positions from the start of a window to the start of the next [default: the length]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    /// CSV or Parquet file with the labels
    #[arg(long, value_name = "FILE")]
    labels: PathBuf,
    /// Column with the recording's name
    #[arg(long, value_name = "COLUMN", default_value = "recording")]
    recording: String,
    /// Column with the number to predict
    #[arg(long, value_name = "COLUMN", default_value = "label")]
    label: String,
    /// Column with the label's time, seconds since the recording's beginning [default: one label per recording]
    #[arg(long, value_name = "COLUMN", requires_all = ["rate", "within"])]
    time: Option<String>,
    /// Positions of the recordings per second; those of .wav and .flac files are compared with it
    #[arg(long, value_name = "HZ")]
    rate: Option<f64>,
    /// Leave out windows whose middle is farther from a label than this
    #[arg(long, value_name = "SECONDS", requires = "time")]
    within: Option<f64>,
    #[command(flatten)]
    files: SplitFiles,
    /// Keep all recordings with the same value in this column of the labels in the same file
    #[arg(long, value_name = "COLUMN")]
    by: Option<String>,
    /// Seed of the order of the windows
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "in_order")]
    seed: u64,
    /// Write the windows in the order of the recordings
    #[arg(long)]
    in_order: bool,
    /// Print one JSON object at the end, and nothing else
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    if args.length == 0 || args.stride == Some(0) {
        return Err(bad_input("--length and --stride must be at least 1"));
    }
    let times = args.time.zip(args.within);
    let options = WindowOptions {
        from: args.from,
        length: args.length,
        stride: args.stride.unwrap_or(args.length),
        rate: args.rate,
        labels: LabelTable {
            path: args.labels,
            recording: args.recording,
            label: args.label,
            time: times.map(|(column, within)| LabelTimes { column, within }),
            by: args.by,
        },
        others: args.files.others(),
        to: args.files.to,
        shuffle: (!args.in_order).then_some(args.seed),
    };
    let start = Instant::now();
    let mut progress =
        CommandProgress::new("{bar:40} {pos}/{len} recordings  {eta} left", 0, args.json);
    let written = write_windows(&options, |done, all| {
        progress.bar.set_length(all);
        if progress.is_line_due(done) {
            output::note(format_args!("{done}/{all} recordings"));
        }
    });
    progress.finish();
    let written = written.map_err(write_failure)?;
    let data = WrittenWindowFiles::new(written, start.elapsed().as_secs_f64());
    json::print(args.json, &data, text);
    Ok(())
}

fn text(data: &WrittenWindowFiles) -> String {
    let file = |file: &json::WrittenFile| {
        let (windows, bytes) = (human::count(file.samples, "window"), human::bytes(file.bytes));
        format!("{}: {windows}, {bytes}", file.path)
    };
    let mut lines: Vec<String> = data.files.iter().map(file).collect();
    lines.push(format!("recordings: {}", data.recordings));
    let left_out = [
        (data.with_gaps, "window", "with values that are not finite"),
        (data.without_label, "window", "without a label that is near enough"),
        (data.unused_recordings, "recording", "without any label, or shorter than a window"),
    ];
    for (count, thing, why) in left_out.into_iter().filter(|(count, _, _)| *count > 0) {
        lines.push(format!("left out: {} {why}", human::count(count, thing)));
    }
    lines.push(human::duration(data.seconds));
    lines.join("\n")
}
