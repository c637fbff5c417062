//! `baton-worker predict`: the predictions of exported weights for data without labels.
//!
//! The samples are divided into parts, one for each of several processes. A process appends the lines of its part to a file in
//! `OUT.parts`, whole batches at a time; after a kill it goes on behind the last whole batch. When all parts are complete,
//! their lines become one file. The batches do not depend on the number of processes, so with `precision.determinism =
//! "strict"` neither do the predictions.

mod part;
mod plan;

use std::{
    collections::VecDeque,
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use baton_console::{json, output::note};
use baton_data::{Dataset, Labels, Source};
use baton_job::exit::{Failure, bad_input, crash};
use baton_recipe::JobSpec;
use baton_trainer::Error;
use indicatif::ProgressBar;
use serde::Serialize;

use self::plan::{LOCK, PredictionPlan};
use crate::{
    eval::recipe,
    predictions::{PredictionColumns, refuse_other_file},
};

/// Predict classes or values of new data.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
After a kill, the same command goes on where it stopped.

Examples:
  baton predict --recipe r.toml --weights resnet50.safetensors --data new.beton --out predictions.csv
  baton predict --recipe r.toml --weights w.safetensors --data 's3://bucket/new-*.beton' --out p.csv --ranks 8")]
pub(crate) struct Args {
    /// Weights in torchvision's names, as `baton checkpoint export` writes them.
    #[arg(long, value_name = "FILE")]
    weights: PathBuf,
    /// Data set, which needs no labels.
    #[arg(long, value_name = "FILE")]
    data: String,
    /// Recipe the weights were trained with: architecture, classes, normalisation, resolution.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Change one value of the recipe, e.g. --set evaluation.resolution=64. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// CSV file for the predictions: sample, prediction, probability; of a regression sample and predictions.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Write the probabilities of all classes, too.
    #[arg(long)]
    probabilities: bool,
    /// Number of processes at a time, each with its own GPU or its part of the cores.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// libtorch threads of each process; they decide the last bits, as with `baton eval`.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// The part that this process predicts; given by the command itself.
    #[arg(long, hide = true, requires_all = ["slot", "parent"])]
    part: Option<u32>,
    /// Position of this process among those that run.
    #[arg(long, hide = true)]
    slot: Option<u32>,
    /// Process that started this one.
    #[arg(long, hide = true)]
    parent: Option<u32>,
}

/// Longest wait for a lock of a process that is ending.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two tries to get a lock.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Output of `--json`.
#[derive(Serialize)]
struct PredictedFile {
    file: PathBuf,
    /// Lines of the file, without its head.
    predictions: u64,
    /// Samples of the data set.
    samples: u64,
    /// Those that `data.on_bad_sample = "skip"` left out.
    bad_samples: u64,
    /// Samples that an earlier call had done.
    found: u64,
    seconds: f64,
}

/// Predicts and prints.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let spec = recipe(&args.recipe, &args.overrides)?;
    let columns = PredictionColumns::of_recipe(&spec, false, args.probabilities);
    let columns = columns.ok_or_else(|| {
        bad_input(format!(
            "{}: its network gives losses or texts, not predictions: use a recipe of a classification or a regression",
            args.recipe.display()
        ))
    })?;
    if args.probabilities && !columns.is_classification() {
        return Err(bad_input("--probabilities needs a classification"));
    }
    baton_checkpoint::check_weights_file(&args.weights).map_err(bad_input)?;
    let source = Source::of_recipe(&spec, &args.data, Source::new("").cache_dir);
    let set = Dataset::open(Source { labels: Labels::Absent, local_ranks: args.ranks, ..source });
    let set = set.map_err(Error::from)?;
    match args.part {
        Some(part) => part::predict(args, &spec, &columns, set, part),
        None => predict_on_all(args, &spec, &columns, &set),
    }
}

fn predict_on_all(
    args: &Args,
    spec: &JobSpec,
    columns: &PredictionColumns,
    set: &Dataset,
) -> Result<(), Failure> {
    let started = Instant::now();
    refuse_other_file(&args.out)?;
    let folder = parts_folder(&args.out);
    // Not a link to another folder, either.
    if fs::symlink_metadata(&folder).is_ok_and(|found| !found.is_dir()) {
        return Err(bad_input(format!(
            "{} exists and is not a folder: remove it, or give another --out",
            folder.display()
        )));
    }
    fs::create_dir_all(&folder).map_err(|error| unwritable(&folder, &error))?;
    plan::refuse_other_folder(&folder, &args.out)?;
    let _lock = locked(&folder.join(LOCK), &args.out)?;
    let plan = PredictionPlan::new(args, spec, set)?.kept_in(&folder, &args.out)?;
    let done: Vec<u64> = (0..plan.parts)
        .map(|part| part::done(&part_file(&folder, part), &plan, part))
        .collect::<io::Result<_>>()
        .map_err(|error| unwritable(&folder, &error))?;
    let found: u64 = done.iter().sum();
    let bar = ProgressBar::new(plan.samples).with_position(found);
    let unfinished = (0..plan.parts).filter(|part| done[*part as usize] < plan.samples_of(*part));
    let result = predict_parts(args, &plan, unfinished.collect(), &bar);
    bar.finish_and_clear();
    if result.is_err() && (0..plan.parts).all(|part| is_empty(&part_file(&folder, part))) {
        // The failure stands; there is nothing to go on from.
        let _ = plan::remove(&folder);
    }
    result?;
    let predictions = join(&folder, &plan, &columns.header(), &args.out)?;
    let answer = PredictedFile {
        file: args.out.clone(),
        predictions,
        samples: plan.samples,
        bad_samples: plan.samples - predictions,
        found,
        seconds: started.elapsed().as_secs_f64(),
    };
    json::print(args.json, &answer, |answer| {
        let left_out = match answer.bad_samples {
            0 => String::new(),
            1 => "; 1 bad sample is left out".to_owned(),
            bad => format!("; {bad} bad samples are left out"),
        };
        format!(
            "{} predictions in {}, {:.1} s{left_out}",
            answer.predictions,
            answer.file.display(),
            answer.seconds
        )
    });
    Ok(())
}

/// The running processes, by slot. They end with this value.
struct PartProcesses(Vec<Option<Child>>);

impl Drop for PartProcesses {
    fn drop(&mut self) {
        for child in self.0.iter_mut().flatten() {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Predicts the parts, as many at a time as there are ranks. The first process that fails ends the others, which lose nothing but
/// the batch that they compute.
fn predict_parts(
    args: &Args,
    plan: &PredictionPlan,
    mut parts: VecDeque<u32>,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    let mut running = PartProcesses((0..args.ranks).map(|_| None).collect());
    let (ended, ends) = mpsc::channel();
    loop {
        for (slot, place) in running.0.iter_mut().enumerate().filter(|(_, place)| place.is_none()) {
            let Some(part) = parts.pop_front() else { break };
            let child = place.insert(start(args, plan.threads, part, slot)?);
            watch(child, slot, bar, &ended);
        }
        if running.0.iter().all(Option::is_none) {
            return Ok(());
        }
        let Ok((slot, said)) = ends.recv() else { return Ok(()) };
        let Some(mut child) = running.0[slot].take() else { continue };
        let status = child.wait();
        let status =
            status.map_err(|error| crash(format!("a process cannot be waited for: {error}")))?;
        if !status.success() {
            return Err(failure_of(status, &said));
        }
        said.lines().for_each(note);
    }
}

/// Shows what a process has done. When it has closed its output, `ended` gets its slot and what it said.
fn watch(child: &mut Child, slot: usize, bar: &ProgressBar, ended: &mpsc::Sender<(usize, String)>) {
    let (lines, errors) = (child.stdout.take(), child.stderr.take());
    let errors = std::thread::spawn(move || {
        errors.map(io::read_to_string).transpose().ok().flatten().unwrap_or_default()
    });
    let (bar, ended) = (bar.clone(), ended.clone());
    std::thread::spawn(move || {
        let lines = lines.into_iter().flat_map(|lines| BufReader::new(lines).lines());
        for line in lines.map_while(Result::ok) {
            bar.inc(line.parse().unwrap_or_default());
        }
        // Nobody listens any more after a failure.
        let _ = ended.send((slot, errors.join().unwrap_or_default()));
    });
}

/// The failure of a process, in its own words if it has any.
fn failure_of(status: ExitStatus, said: &str) -> Failure {
    let words = said.lines().rev().find_map(|line| line.strip_prefix("error: "));
    let message = words.map(str::to_owned).unwrap_or_else(|| {
        format!("a process ended with {status}; the same command goes on where it stopped")
    });
    match status.code() {
        Some(2) => bad_input(message),
        _ => crash(message),
    }
}

/// Starts the process of a part.
fn start(args: &Args, threads: u32, part: u32, slot: usize) -> Result<Child, Failure> {
    let program = std::env::current_exe().map_err(|error| crash(format!("own path: {error}")))?;
    let mut command = Command::new(program);
    command.arg("predict").args(["--part".to_owned(), part.to_string()]);
    command.args(["--slot".to_owned(), slot.to_string()]);
    command.args(["--parent".to_owned(), std::process::id().to_string()]);
    command.arg("--weights").arg(&args.weights).args(["--data", &args.data]);
    command.arg("--recipe").arg(&args.recipe).arg("--out").arg(&args.out);
    command.args(["--threads".to_owned(), threads.to_string()]);
    command.args(["--ranks".to_owned(), args.ranks.to_string()]);
    command.args(args.probabilities.then_some("--probabilities"));
    command.args(args.overrides.iter().flat_map(|change| ["--set", change]));
    let started =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    started.map_err(|error| crash(format!("a process for part {part} does not start: {error}")))
}

/// Writes the lines of all parts into the file; returns their number. Then the parts are removed.
fn join(folder: &Path, plan: &PredictionPlan, header: &str, out: &Path) -> Result<u64, Failure> {
    let draft = folder.join(plan::ALL);
    let failed = |error: io::Error| unwritable(out, &error);
    let mut file = io::BufWriter::new(File::create(&draft).map_err(failed)?);
    writeln!(file, "{header}").map_err(failed)?;
    let (mut lines, mut next) = (0, 0);
    for part in 0..plan.parts {
        let path = part_file(folder, part);
        let text = BufReader::new(File::open(&path).map_err(failed)?);
        for line in text.lines() {
            let line = line.map_err(failed)?;
            if part::is_batch_end(&line) {
                continue;
            }
            let sample = line.split(',').next().and_then(|sample| sample.parse::<u64>().ok());
            match sample {
                Some(sample) if sample == next || (sample > next && plan.skips_bad_samples()) => {
                    next = sample + 1;
                }
                _ => return Err(damaged(&path, folder)),
            }
            writeln!(file, "{line}").map_err(failed)?;
            lines += 1;
        }
    }
    if next > plan.samples || (next < plan.samples && !plan.skips_bad_samples()) {
        return Err(damaged(folder, folder));
    }
    if lines == 0 && plan.samples > 0 {
        return Err(bad_input(format!(
            "all {} samples of the data set are bad: `baton data verify` says why",
            plan.samples
        )));
    }
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)?;
    fs::rename(&draft, out).map_err(failed)?;
    plan::remove(folder).map_err(|error| unwritable(folder, &error))?;
    Ok(lines)
}

fn damaged(path: &Path, folder: &Path) -> Failure {
    bad_input(format!(
        "{} lacks lines or has others in between, which Baton did not write: remove {} to begin again",
        path.display(),
        folder.display()
    ))
}

fn is_empty(path: &Path) -> bool {
    fs::metadata(path).map_or(true, |file| file.len() == 0)
}

/// Locks a file, so that no other process writes the same predictions. One that was killed may hold it for a moment.
fn locked(path: &Path, out: &Path) -> Result<File, Failure> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|error| unwritable(path, &error))?;
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) if path.exists() => return Ok(file),
            Ok(()) => {
                return Err(bad_input(format!(
                    "{} has just been written by another process: remove it to write it again",
                    out.display()
                )));
            }
            Err(fs::TryLockError::WouldBlock) if started.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(LOCK_POLL_INTERVAL);
            }
            Err(fs::TryLockError::WouldBlock) => {
                return Err(bad_input(format!(
                    "{} is being written by another process: wait for it, or give another --out",
                    out.display()
                )));
            }
            Err(fs::TryLockError::Error(error)) => return Err(unwritable(path, &error)),
        }
    }
}

/// The folder with the unfinished parts of a file.
fn parts_folder(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".parts");
    name.into()
}

fn part_file(folder: &Path, part: u32) -> PathBuf {
    folder.join(format!("part-{part}.csv"))
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    let remedy = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make space, or give another --out"
        }
        _ => "give another --out",
    };
    crash(format!("{}: {error}; {remedy}", path.display()))
}
