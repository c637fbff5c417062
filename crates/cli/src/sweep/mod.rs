//! `baton sweep`: trains a recipe with many settings, each an ordinary `baton up` in a run folder of its own.
//!
//! [`space`] makes the settings of the flags, [`trial`] their recipes; [`record`] reads from a run folder what a trial has reached,
//! [`halving`] decides what each one does next, [`mod@after`] what follows when one ends, [`table`] shows the results. Nothing but
//! the list of trials in [`folder`] is kept beside the run folders, so a sweep that is killed continues where it was.

mod after;
mod folder;
mod halving;
mod page;
mod record;
mod slots;
mod space;
mod table;
mod trial;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use baton_access::bounded::{MAX_RECIPE_BYTES, read_text};
use baton_console::output;
use baton_data::CpuShare;
use baton_job::{
    exit::{self, Failure},
    plan::MAX_LOCAL_RANKS,
    session::DUPLICATE_SIGNAL_WINDOW,
};
use baton_recipe::JobSpec;
use rustix::process::Signal;
use tokio::{process::Command, sync::mpsc};

use self::{
    after::{AfterTrial, after},
    halving::{Decision, Halving, Reached, TrialEnd},
    record::{AppendedLines, EvaluatedTrial, SavedEnd, TrialRecord},
    slots::MachineShare,
    space::TrialSettings,
    table::{SweepResults, configurations, folder_name},
    trial::Trial,
};
use crate::{
    commands::recipe,
    connect::{Coordinator, CoordinatorFlags, RUNS},
    failure::{bad_input, failed},
    human, json, render,
    supervise::{Child, Exit},
    up::{EXIT_TIMEOUT, INTERRUPTED, feed, run_lock::RunLock},
};

/// Train a recipe with many settings, and compare the results
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton sweep digits_cpu --set schedule.peak_lr=1e-3,3e-4 --set seed=0..4    ten trials: two rates, five seeds
  baton sweep digits_cpu --set schedule.peak_lr='loguniform(1e-4,1e-2)' --random 20
  baton sweep digits_cpu --set schedule.peak_lr=1e-2,3e-3,1e-3,3e-4 --halving 1,3    keep the better half twice
  baton sweep digits_cpu --trials trials.jsonl       a JSON object for each trial: {\"seed\": 1, \"train.epochs\": 3}
  baton sweep digits_cpu --set seed=0..7 --at-once 8                         one trial for each GPU

Each trial is an ordinary run, in a folder 000, 001, … below --dir: `baton top --run-dir DIR/003` shows it, its
checkpoints are in it. The same command continues a sweep that was stopped or killed; with more values it adds trials.
DIR/results.csv and DIR/results.html have the results so far. Trials that differ in `seed` only are one configuration:
the table shows mean and standard deviation of their last evaluations, by the metric of evaluation.best or the task's first.

Ctrl-C saves every trial that trains and stops; a second one stops immediately.
Exit codes: 0 all trials have a result, 75 saved and stopped, 1 some trials failed and may be tried again, 2 bad input, \
130 stopped immediately.")]
pub(crate) struct Args {
    /// Recipe file, or the name of a recipe in recipes/
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Values of a key: one for all trials, several with commas between them, whole numbers as 0..4 (with both ends), or
    /// with --random uniform(LOW,HIGH) or loguniform(LOW,HIGH); may be repeated
    #[arg(long = "set", value_name = "KEY=VALUES")]
    axes: Vec<String>,
    /// Try so many combinations, chosen at random, in place of all
    #[arg(long, value_name = "N", conflicts_with = "trials")]
    random: Option<usize>,
    /// Seed of that choice
    #[arg(long, value_name = "N", default_value_t = 0, requires = "random")]
    random_seed: u64,
    /// File with a JSON object of settings on each line, one for each trial
    #[arg(long, value_name = "FILE")]
    trials: Option<PathBuf>,
    /// Compare all trials after these numbers of evaluations; only the better ones go on
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    halving: Vec<usize>,
    /// Share of the configurations that go on after each comparison
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, requires = "halving")]
    keep: f64,
    /// Trials that train at the same time; they share the GPUs and cores of this machine
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LOCAL_RANKS)))]
    at_once: u32,
    /// Number of ranks of each trial [default: one for each of its GPUs, or one without a GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LOCAL_RANKS)))]
    ranks: Option<u32>,
    /// Folder for the run folders of the trials [default: runs/NAME-sweep, with the recipe's name]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print the results as JSON
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print the results as comma-separated values
    #[arg(long)]
    csv: bool,
}

/// Time between two looks at the evaluations of trials that are to be compared.
const COMPARE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait for the status of a trial.
const STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two lines about the trials that train.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(30);

/// Trains all trials and returns the exit code.
pub(crate) async fn run(mut args: Args) -> Result<u8, Failure> {
    let (queue, mut inputs) = mpsc::unbounded_channel();
    feed::signals(&queue, Input::Signal)?;
    args.recipe = recipe::find(&args.recipe);
    let halving = args.halving()?;
    let wanted = args.trials()?;
    let first = recipe::read(&args.recipe, &wanted[0])?;
    let dir =
        args.dir.clone().unwrap_or_else(|| Path::new(RUNS).join(format!("{}-sweep", first.name)));
    check_halving(&halving, &first)?;
    let slots = slots::slots(&first, args.at_once, args.ranks).await?;
    let drain = Duration::from_secs_f64(first.cluster.drain_seconds);
    let lock = tokio::select! {
        lock = RunLock::take(&dir, "--dir", drain + EXIT_TIMEOUT, || {
            output::note("waiting for another sweep in this folder, or for the trials of an earlier one, to end");
        }) => lock?,
        _ = inputs.recv() => return Ok(exit::DRAINED),
    };
    let trials = trial::trials(&args.recipe, &dir, wanted)?;
    let mut sweep = Sweep {
        args,
        dir,
        name: first.name,
        halving,
        records: trials.iter().map(|trial| TrialRecord::read(&trial.run_dir)).collect(),
        configurations: configurations(trials.iter().map(|trial| trial.configuration.as_str())),
        trials,
        running: slots.iter().map(|_| None).collect(),
        slots,
        failures: BTreeMap::new(),
        stop: None,
        unsaved: BTreeSet::new(),
        asked_at: None,
        queue,
        start: Instant::now(),
    };
    (0..sweep.trials.len()).for_each(|trial| sweep.check_evaluations(trial));
    let ended = sweep.run(&mut inputs).await;
    drop(lock);
    ended
}

/// Refuses a comparison that would never take place.
fn check_halving(halving: &Halving, spec: &JobSpec) -> Result<(), Failure> {
    let evaluations = spec.train.epochs.div_ceil(spec.evaluation.every_epochs.max(1));
    match halving.after.last() {
        Some(last) if *last >= evaluations as usize => Err(bad_input(format!(
            "--halving {last}: a trial makes {evaluations} evaluations, and after its last one there is nothing to stop: give \
             smaller numbers, or set evaluation.every_epochs"
        ))),
        _ => Ok(()),
    }
}

impl Args {
    fn halving(&self) -> Result<Halving, Failure> {
        if self.halving.first() == Some(&0) || !self.halving.is_sorted_by(|one, next| one < next) {
            return Err(bad_input(
                "--halving takes increasing numbers of evaluations, such as 1,3",
            ));
        }
        if !(self.keep > 0.0 && self.keep < 1.0) {
            return Err(bad_input(format!("--keep {}: must be above 0 and below 1", self.keep)));
        }
        Ok(Halving { after: self.halving.clone(), keep: self.keep })
    }

    /// The trials that the flags ask for, at least one.
    fn trials(&self) -> Result<Vec<TrialSettings>, Failure> {
        let axes: Result<Vec<_>, String> = self.axes.iter().map(|text| space::axis(text)).collect();
        let axes = axes.map_err(bad_input)?;
        match (&self.trials, self.random) {
            (Some(file), _) => {
                let text = read_text(file, MAX_RECIPE_BYTES);
                let text = text.map_err(|error| recipe::about(file, error))?;
                space::listed(&text, &axes).map_err(|problem| recipe::about(file, problem))
            }
            (None, Some(0)) => Err(bad_input("--random 0: give the number of trials, at least 1")),
            (None, Some(count)) => space::random(&axes, count, self.random_seed).map_err(bad_input),
            (None, None) => space::grid(&axes).map_err(bad_input),
        }
    }
}

/// An input of the loop.
#[derive(Debug)]
enum Input {
    /// The trial in this slot ended.
    Ended(usize, Exit),
    /// A signal that asks the sweep to end.
    Signal(&'static str),
}

/// A trial that trains.
struct Running {
    trial: usize,
    child: Child,
    /// Number of evaluations after which it is to stop.
    until: Option<usize>,
    metrics: AppendedLines,
    log: AppendedLines,
    /// Whether it was asked to save and stop.
    is_stopping: bool,
    since: Instant,
}

/// Why no further trial is started.
enum Stop {
    /// A signal, or a trial whose machine is taken away.
    Asked(String),
    /// A trial that cannot be trained, as none can then.
    Failed(Failure),
    /// A second signal.
    AtOnce,
}

struct Sweep {
    args: Args,
    dir: PathBuf,
    name: String,
    halving: Halving,
    trials: Vec<Trial>,
    /// What each trial has reached: read at the start, and again when it has changed.
    records: Vec<TrialRecord>,
    /// The number of the configuration of each trial.
    configurations: Vec<usize>,
    slots: Vec<MachineShare>,
    /// For each slot.
    running: Vec<Option<Running>>,
    /// Why trials failed since this start, by number.
    failures: BTreeMap<usize, String>,
    stop: Option<Stop>,
    /// Trials that were asked to stop, and whose newest state is lost.
    unsaved: BTreeSet<usize>,
    /// When a signal first asked to stop.
    asked_at: Option<Instant>,
    queue: mpsc::UnboundedSender<Input>,
    start: Instant,
}

impl Sweep {
    async fn run(mut self, inputs: &mut mpsc::UnboundedReceiver<Input>) -> Result<u8, Failure> {
        let trials = human::count(self.trials.len() as u64, "trial");
        output::note(format!("{trials} of {} in {}", self.name, self.dir.display()));
        let mut look = tokio::time::interval(COMPARE_INTERVAL);
        let mut progress = tokio::time::interval(PROGRESS_INTERVAL);
        progress.reset();
        self.start_trials();
        while self.running.iter().any(Option::is_some) {
            tokio::select! {
                Some(input) = inputs.recv() => match input {
                    Input::Ended(slot, exit) => {
                        self.ended(slot, exit);
                        self.start_trials();
                    }
                    Input::Signal(name) => self.handle_signal(name),
                },
                _ = look.tick() => {
                    self.show_restarts();
                    self.stop_compared();
                }
                _ = progress.tick() => self.show_progress(),
            }
        }
        let results = self.write_results(&self.decide());
        if let Some(Stop::Failed(failure)) = self.stop {
            return Err(failure);
        }
        let results = results?;
        if self.args.json {
            output::line(json::line(&results.json()));
        } else if self.args.csv {
            output::line(results.csv()?.trim_end());
        } else {
            output::line(results.text());
        }
        output::note(format!(
            "{} since this start; the tables are also in {1}/results.csv and {1}/results.html",
            human::duration(self.start.elapsed().as_secs_f64()),
            self.dir.display()
        ));
        match self.stop {
            Some(Stop::AtOnce | Stop::Failed(_)) => Ok(INTERRUPTED),
            Some(Stop::Asked(reason)) => {
                let saved = match self.unsaved.len() {
                    0 => "saved and stopped".to_owned(),
                    unsaved => {
                        let trials = human::count(unsaved as u64, "trial");
                        format!("stopped, and the newest state of {trials} was not saved")
                    }
                };
                output::note(format!("{saved} ({reason}); the same command continues"));
                Ok(exit::DRAINED)
            }
            None => match results.failed(&self.failures) {
                0 => Ok(exit::OK),
                count => {
                    let count = human::count(count as u64, "trial");
                    Err(failed(format!(
                        "{count} failed; the same command tries again, once the reasons above are removed"
                    )))
                }
            },
        }
    }

    /// What each trial does next.
    fn decide(&self) -> Vec<Decision> {
        let reached = self.records.iter().zip(&self.configurations).enumerate();
        let reached = reached.map(|(number, (record, configuration))| Reached {
            configuration: *configuration,
            scores: record.evaluations.iter().map(EvaluatedTrial::score).collect(),
            end: match record.end {
                _ if self.failures.contains_key(&number) => Some(TrialEnd::Failed),
                SavedEnd::Open => None,
                SavedEnd::Completed | SavedEnd::LimitReached(_) => Some(TrialEnd::Finished),
                SavedEnd::Diverged(_) => Some(TrialEnd::Failed),
            },
        });
        self.halving.decide(&reached.collect::<Vec<_>>())
    }

    /// Lets a trial fail whose evaluations were lost.
    fn check_evaluations(&mut self, number: usize) {
        if self.records[number].lacks_evaluations() {
            let folder = self.trials[number].run_dir.display();
            let why = format!(
                "it has completed, and its evaluations are missing: {folder}/metrics.jsonl was removed or damaged; \
                 remove {folder} to train it again"
            );
            self.failed(number, why);
        }
    }

    /// Reads again what a trial has reached.
    fn read(&mut self, trial: usize) {
        self.records[trial] = TrialRecord::read(&self.trials[trial].run_dir);
    }

    fn settings(&self) -> Vec<TrialSettings> {
        self.trials.iter().map(|trial| trial.settings.clone()).collect()
    }

    /// Starts trials in the free slots, and writes the results so far. A failure lets those that train save and stop.
    fn start_trials(&mut self) {
        if let Err(failure) = self.try_to_start_trials() {
            self.request_stop(Stop::Failed(failure));
        }
    }

    fn try_to_start_trials(&mut self) -> Result<(), Failure> {
        let decisions = self.decide();
        self.write_results(&decisions)?;
        if self.stop.is_some() {
            return Ok(());
        }
        let mut waiting =
            decisions.iter().enumerate().filter_map(|(trial, decision)| match decision {
                Decision::Train { until } => Some((trial, *until)),
                _ => None,
            });
        for slot in 0..self.slots.len() {
            if self.running[slot].is_some() {
                continue;
            }
            let trains = |trial| {
                self.running.iter().flatten().any(|running: &Running| running.trial == trial)
            };
            let Some((trial, until)) = waiting.find(|(trial, _)| !trains(*trial)) else { break };
            self.running[slot] = Some(self.start_trial(slot, trial, until)?);
            self.unsaved.remove(&trial);
        }
        Ok(())
    }

    fn start_trial(
        &self,
        slot: usize,
        number: usize,
        until: Option<usize>,
    ) -> Result<Running, Failure> {
        let trial = &self.trials[number];
        let program = std::env::current_exe().map_err(|error| {
            failed(format!("the program of this process is not known: {error}"))
        })?;
        let mut command = Command::new(program);
        command.arg("up").arg(&self.args.recipe).arg("--run-dir").arg(&trial.run_dir);
        command.args([
            "--listen",
            "127.0.0.1:0",
            "--exit-with-parent",
            &std::process::id().to_string(),
        ]);
        for setting in &trial.overrides {
            command.args(["--set", setting]);
        }
        if let Some(ranks) = self.args.ranks {
            command.args(["--ranks", &ranks.to_string()]);
        }
        if let Some(gpus) = &self.slots[slot].gpus {
            command.env("CUDA_VISIBLE_DEVICES", gpus);
        }
        let log = trial.run_dir.join("logs/up.log");
        let mut child = Child::new("trial", log.clone());
        let log = AppendedLines::of_log(&log);
        let queue = self.queue.clone();
        // The child inherits the cores of this thread.
        let all = CpuShare::of_rank(0, 1);
        self.slots[slot].cores.pin_thread();
        let started = child.start(command, move |exit| {
            let _ = queue.send(Input::Ended(slot, exit));
        });
        all.pin_thread();
        started?;
        output::note(format!(
            "{}: trains; `baton top --run-dir {}` shows it",
            self.label(number),
            trial.run_dir.display()
        ));
        let metrics = AppendedLines::of_metrics(&trial.run_dir);
        let since = Instant::now();
        Ok(Running { trial: number, child, until, metrics, log, is_stopping: false, since })
    }

    /// `003 (schedule.peak_lr=1e-3 seed=0)`
    fn label(&self, trial: usize) -> String {
        format!("{} ({})", folder_name(trial), self.trials[trial].settings.join(" "))
    }

    fn ended(&mut self, slot: usize, exit: Exit) {
        let Some(mut running) = self.running[slot].take() else { return };
        running.child.ended();
        let number = running.trial;
        self.read(number);
        let record = &self.records[number];
        let error = running.child.last_error().or_else(|| record.failure.clone());
        let why = error
            .unwrap_or_else(|| format!("`baton up` {exit}; see {}", running.child.log().display()));
        let label = self.label(number);
        let (reached, seconds) = (shown(record), running.since.elapsed().as_secs_f64());
        match after(exit, &record.end, running.is_stopping) {
            AfterTrial::Result => {
                output::note(format!("{label}: {reached} after {}", human::duration(seconds)));
                self.check_evaluations(number);
            }
            AfterTrial::Diverged => output::note(format!("{label}: diverged: {why}")),
            AfterTrial::Saved => match running.child.last_line_with(exit::NOT_SAVED) {
                None => output::note(format!("{label}: saved, {reached}")),
                Some(line) => self.not_saved(number, &line),
            },
            AfterTrial::NotSaved => self.not_saved(number, &why),
            AfterTrial::StopsAll => {
                match running.child.last_line_with(exit::NOT_SAVED) {
                    None => output::note(format!("{label}: saved and stopped, not by this sweep")),
                    Some(line) => self.not_saved(number, &line),
                }
                let name = folder_name(number);
                self.request_stop(Stop::Asked(format!("trial {name} was stopped by others")));
            }
            AfterTrial::BadInput => {
                let failure = bad_input(format!("trial {label}: {why}"));
                self.request_stop(Stop::Failed(failure));
            }
            AfterTrial::StoppedByUser => self.failed(number, "stopped by `baton stop`".to_owned()),
            AfterTrial::WithoutReport => {
                self.failed(number, "it has ended, but its report could not be written".to_owned());
            }
            AfterTrial::Failed => self.failed(number, why),
        }
    }

    fn not_saved(&mut self, trial: usize, why: &str) {
        output::note(format!("{}: NOT saved: {why}", self.label(trial)));
        self.unsaved.insert(trial);
    }

    /// A trial that is tried again at the next start.
    fn failed(&mut self, trial: usize, why: String) {
        output::note(format!("{}: failed: {why}", self.label(trial)));
        self.failures.insert(trial, why);
    }

    fn handle_signal(&mut self, name: &'static str) {
        match self.asked_at {
            None => {
                self.asked_at = Some(Instant::now());
                output::note("saving and stopping; press Ctrl-C again to stop immediately");
                self.request_stop(Stop::Asked(name.to_owned()));
            }
            Some(asked_at) if asked_at.elapsed() < DUPLICATE_SIGNAL_WINDOW => {}
            Some(_) => {
                self.stop = Some(Stop::AtOnce);
                let running = self.running.iter().flatten();
                // As a second Ctrl-C of `baton up`: it ends its own children at once.
                running.for_each(|running| running.child.signal(Signal::TERM));
            }
        }
    }

    /// Starts no further trial, and lets those that train save and stop.
    fn request_stop(&mut self, stop: Stop) {
        if self.stop.is_none() {
            self.stop = Some(stop);
        }
        for running in self.running.iter_mut().flatten().filter(|running| !running.is_stopping) {
            running.is_stopping = true;
            running.child.signal(Signal::TERM);
        }
    }

    /// Lets trials that have made enough evaluations save and stop, unless it is known already that they go on.
    fn stop_compared(&mut self) {
        let compared = self.running.iter_mut().flatten().filter(|running| running.until.is_some());
        let evaluated = compared
            .filter_map(|running| running.metrics.has_evaluation().then_some(running.trial));
        let evaluated: Vec<usize> = evaluated.collect();
        if evaluated.is_empty() {
            return;
        }
        evaluated.into_iter().for_each(|trial| self.read(trial));
        let decisions = self.decide();
        for running in self.running.iter_mut().flatten().filter(|running| !running.is_stopping) {
            match decisions[running.trial] {
                Decision::Train { until } => running.until = until,
                _ => {
                    running.is_stopping = true;
                    running.child.signal(Signal::TERM);
                }
            }
        }
    }

    /// Notes what the trials say of processes that end and are started again: such a trial does not train, and says so nowhere
    /// else.
    fn show_restarts(&mut self) {
        let running = self.running.iter_mut().flatten();
        let restarts = running.flat_map(|running| {
            let trial = folder_name(running.trial);
            running.log.restarts().into_iter().map(move |line| format!("{trial}: {line}"))
        });
        restarts.for_each(output::note);
    }

    fn show_progress(&self) {
        for running in self.running.iter().flatten() {
            let trial = &self.trials[running.trial];
            let record = TrialRecord::read(&trial.run_dir);
            if let Some((step, epoch)) = record.position {
                let epochs = trial.spec.train.epochs;
                let evaluated = match record.evaluations.is_empty() {
                    true => String::new(),
                    false => format!(", {}", shown(&record)),
                };
                let line = format!(
                    "{}: step {}, epoch {} of {epochs}{evaluated}",
                    folder_name(running.trial),
                    human::grouped(step),
                    (epoch + 1).min(epochs)
                );
                let run_dir = trial.run_dir.clone();
                // The answer may take its time.
                tokio::spawn(async move {
                    let problem = save_problem(run_dir).await;
                    let problem = problem.map(|problem| format!("; saving {problem}"));
                    output::note(line + &problem.unwrap_or_default());
                });
            }
        }
    }

    /// Writes `results.csv` and `results.html`.
    fn write_results(&self, decisions: &[Decision]) -> Result<SweepResults, Failure> {
        let trials = (&self.settings()[..], &self.configurations[..]);
        let results =
            SweepResults::new(&self.name, trials, &self.records, decisions, &self.failures);
        folder::write(&self.dir.join("results.csv"), &results.csv()?)?;
        folder::write(&self.dir.join("results.html"), &page::html(&results))?;
        Ok(results)
    }
}

/// What its coordinator says about the newest save of a trial, if that failed.
async fn save_problem(run_dir: PathBuf) -> Option<String> {
    let flags = CoordinatorFlags { run_dir: Some(run_dir), ..CoordinatorFlags::default() };
    let mut coordinator = Coordinator::find(&flags).ok()?;
    let status = tokio::time::timeout(STATUS_TIMEOUT, coordinator.status()).await.ok()?.ok()?;
    render::save_problem(&status)
}

/// The last evaluation of a trial.
fn shown(record: &TrialRecord) -> String {
    let metric = record.evaluations.last().and_then(|found| found.metrics.first());
    metric.map_or("not evaluated yet".to_owned(), render::metric)
}
