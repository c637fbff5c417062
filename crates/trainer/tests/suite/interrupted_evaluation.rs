//! Requests that arrive during an evaluation.

use std::{
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use baton_checkpoint::{Manifest, Store};
use baton_data::{Batch, InputType};
use baton_job::{
    Generation, JobId,
    exit::Outcome,
    message::{Activity, RankReport, Restore},
};
use baton_recipe::Step;
use baton_trainer::{
    BatchEvaluation, Controls, Error, EvaluatedWeights, GenerationContext, JobInputs, Learner,
    Trainer, TrainingJob, Update,
    learner::{self, Region, TensorLocation},
    linear::{HostLeaf, LinearLearner},
};

use crate::{kit, local};

/// Called with the number of evaluated batches before each one. `Ok(false)` interrupts the batch.
type Hook =
    Arc<dyn Fn(u64, &mut dyn FnMut() -> bool) -> Result<bool, learner::Error> + Send + Sync>;

/// A learner that calls a hook before it evaluates a batch.
struct HookedLearner {
    inner: LinearLearner,
    evaluated: Arc<AtomicU64>,
    hook: Hook,
}

impl Learner for HookedLearner {
    type Leaf = HostLeaf;
    type Loss = f64;

    fn new_leaf(&mut self) -> Result<HostLeaf, learner::Error> {
        self.inner.new_leaf()
    }

    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut HostLeaf,
    ) -> Result<f64, learner::Error> {
        self.inner.gradient(batch, scale, leaf)
    }

    fn measure(&mut self, sum: &mut HostLeaf) -> Result<(), learner::Error> {
        self.inner.measure(sum)
    }

    fn update(&mut self, sum: &mut HostLeaf, update: &Update) -> Result<(), learner::Error> {
        self.inner.update(sum, update)
    }

    fn evaluate(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<BatchEvaluation>, learner::Error> {
        let number = self.evaluated.fetch_add(1, Ordering::SeqCst);
        match (self.hook)(number, is_interrupted)? {
            true => self.inner.evaluate(batch, weights, is_interrupted),
            false => Ok(None),
        }
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        self.inner.regions()
    }

    fn tensors(&self) -> Vec<TensorLocation> {
        self.inner.tensors()
    }
}

/// A hook that does something before some batches and interrupts none.
fn before(hook: impl Fn(u64) + Send + Sync + 'static) -> Hook {
    Arc::new(move |number, _| {
        hook(number);
        Ok(true)
    })
}

/// Validation batches of each of the two ranks.
const BATCHES: u64 = 18;

struct TestRank {
    trainer: Trainer<HookedLearner>,
    evaluated: Arc<AtomicU64>,
}

/// A rank of two, with a store that both share.
fn rank(store: &Arc<Store>, hook: Hook) -> TestRank {
    rank_with("checkpoint={ every_epochs=0 }", store, hook)
}

fn rank_with(checkpoint: &str, store: &Arc<Store>, hook: Hook) -> TestRank {
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let overrides = [
        "model.arch=linear",
        &format!("data={{ train='{digits}', val='{digits}' }}"),
        "train={ epochs=2, global_batch=90, resolution=8, virtual_ranks=2 }",
        "optimizer={ kind='sgd' }",
        "evaluation={ every_epochs=1, batch=10 }",
        checkpoint,
    ];
    let spec = Arc::new(kit::recipe(&overrides, &[]));
    let inputs = JobInputs::open(&spec, Path::new("")).unwrap();
    let id = JobId("00000000-0000-0000-0000-000000000000".parse().unwrap());
    let job = TrainingJob { id, spec: spec.clone(), store: store.clone(), local: None, inputs };
    let evaluated = Arc::<AtomicU64>::default();
    let count = evaluated.clone();
    let build = move || {
        let inner = LinearLearner::new(&spec, &InputType::Image)?;
        Ok(HookedLearner { inner, evaluated: count.clone(), hook: hook.clone() })
    };
    TestRank { trainer: Trainer::new(job, Box::new(build)).unwrap(), evaluated }
}

type RunResult = (Result<Outcome, Error>, Vec<RankReport>);

/// Runs one generation of the ranks; returns the results in their order.
fn generation(number: u64, ranks: &mut [TestRank], controls: &[Arc<Controls>]) -> Vec<RunResult> {
    let run = |rank: &mut TestRank, mut collective: local::LocalCollective, controls: &Controls| {
        let (restore, mut reports) = (Restore::default(), Vec::new());
        let ended = rank.trainer.run(&mut GenerationContext {
            generation: Generation(number),
            collective: &mut collective,
            restore: &restore,
            controls,
            report: &mut |report| reports.push(report),
        });
        (ended, reports)
    };
    thread::scope(|scope| {
        let group = local::group(u32::try_from(ranks.len()).unwrap(), Duration::from_secs(60));
        let members = ranks.iter_mut().zip(group).zip(controls);
        let threads: Vec<_> = members
            .map(|((rank, collective), controls)| {
                scope.spawn(move || run(rank, collective, controls))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn two_controls() -> [Arc<Controls>; 2] {
    [Arc::default(), Arc::default()]
}

/// Evaluations and final digest, as text.
fn results(reports: &[RankReport]) -> Vec<String> {
    let lasting = reports.iter().filter(|report| {
        matches!(report, RankReport::Evaluated { .. })
            || matches!(report, RankReport::Done { outcome: Outcome::Completed, .. })
    });
    lasting.map(|report| format!("{report:?}")).collect()
}

fn undisturbed() -> Vec<String> {
    let store = Arc::new(Store::memory().unwrap());
    let mut ranks = [0, 1].map(|_| rank(&store, before(|_| {})));
    let ended = generation(1, &mut ranks, &two_controls());
    let reports = &ended[0].1;
    assert_eq!(results(reports).len(), 2 + 1, "{reports:?}");
    assert_eq!(ranks[0].evaluated.load(Ordering::SeqCst), 2 * BATCHES);
    results(reports)
}

#[test]
fn a_stop_cuts_an_evaluation_short_after_the_current_batch_and_it_is_made_again_with_the_same_result()
 {
    let store = Arc::new(Store::memory().unwrap());
    let stopped = two_controls();
    let requested = stopped.clone();
    let notice = before(move |evaluated| {
        if evaluated == 2 {
            requested.iter().for_each(|controls| controls.request_stop("a notice".to_owned()));
        }
    });
    let mut ranks = [rank(&store, notice.clone()), rank(&store, notice)];
    let ended = generation(1, &mut ranks, &stopped);
    for ((outcome, reports), rank) in ended.iter().zip(&ranks) {
        assert!(matches!(outcome, Ok(Outcome::Drained { .. })), "{outcome:?}");
        assert_eq!(results(reports), [""; 0], "an evaluation that is cut short has no result");
        assert_eq!(rank.trainer.step(), Some(Step(4)));
        let evaluated = rank.evaluated.load(Ordering::SeqCst);
        assert!(evaluated < BATCHES, "{evaluated} of {BATCHES} batches were evaluated");
    }
    let saved =
        |report: &RankReport| matches!(report, RankReport::Saved(commit) if commit.step == Step(4));
    assert!(ended[0].1.iter().any(saved), "{:?}", ended[0].1);

    let resumed = generation(2, &mut ranks, &two_controls());
    assert!(matches!(resumed[0].0, Ok(Outcome::Completed)), "{:?}", resumed[0].0);
    assert_eq!(results(&resumed[0].1), undisturbed());
}

#[test]
fn a_pause_cuts_an_evaluation_short_and_it_is_made_again_after_the_pause_with_the_same_result() {
    let store = Arc::new(Store::memory().unwrap());
    let paused = two_controls();
    let requested = paused.clone();
    // One of the ranks gets the request much later than the other: both must pause.
    let pause = before(move |evaluated| {
        if evaluated == 2 {
            requested[0].set_paused(true);
        }
    });
    let mut ranks = [rank(&store, pause), rank(&store, before(|_| {}))];
    let watched = paused.clone();
    let resume = thread::spawn(move || {
        let activity =
            || watched.each_ref().map(|controls| controls.activity().heartbeat().activity);
        while activity() != [Activity::Paused; 2] {
            thread::yield_now();
        }
        watched[0].set_paused(false);
    });
    let ended = generation(1, &mut ranks, &paused);
    resume.join().unwrap();
    assert!(matches!(ended[0].0, Ok(Outcome::Completed)), "{:?}", ended[0].0);
    assert_eq!(results(&ended[0].1), undisturbed());
    assert_eq!(ranks[0].evaluated.load(Ordering::SeqCst), 3 + 2 * BATCHES);
}

#[test]
fn a_checkpoint_requested_during_an_evaluation_begins_before_its_end() {
    let store = Arc::new(Store::memory().unwrap());
    let controls = two_controls();
    let requested = controls.clone();
    let save = before(move |evaluated| {
        if evaluated == 2 {
            requested.iter().for_each(|controls| controls.request_save());
        }
    });
    let mut ranks = [rank(&store, save), rank(&store, before(|_| {}))];
    let ended = generation(1, &mut ranks, &controls);
    let reports = &ended[0].1;
    assert_eq!(results(reports), undisturbed());
    let saved = reports.iter().filter_map(|report| match report {
        RankReport::Saved(commit) => Some((commit.step, commit.accuracy.is_some())),
        _ => None,
    });
    // The evaluation follows the commit.
    assert_eq!(saved.collect::<Vec<_>>(), [(Step(4), false), (Step(8), false)]);
    assert_eq!(checkpoints(&store), [(Step(8), true), (Step(4), true)]);
}

/// Steps of the checkpoints, newest first, and whether they are evaluated.
fn checkpoints(store: &Store) -> Vec<(Step, bool)> {
    let entries = store.list().unwrap();
    let checkpoint = |manifest: &Manifest| (manifest.step, manifest.accuracy().is_some());
    entries.iter().filter_map(|entry| entry.state.manifest().map(checkpoint)).collect()
}

const EVERY_EPOCH: &str = "checkpoint={ every_epochs=1, keep_last=9 }";

#[test]
fn a_checkpoint_is_committed_before_the_evaluation_of_its_state_and_contains_the_result_afterwards()
{
    let store = Arc::new(Store::memory().unwrap());
    let (watched, is_committed) = (store.clone(), Arc::new(AtomicBool::new(false)));
    let committed = is_committed.clone();
    // Rank 0 waits inside a batch until the checkpoint is committed; its votes go on meanwhile.
    let wait: Hook = Arc::new(move |_, is_interrupted| {
        while checkpoints(&watched).is_empty() {
            if is_interrupted() {
                return Ok(false);
            }
            thread::yield_now();
        }
        committed.fetch_or(checkpoints(&watched) == [(Step(4), false)], Ordering::SeqCst);
        Ok(true)
    });
    let mut ranks =
        [rank_with(EVERY_EPOCH, &store, wait), rank_with(EVERY_EPOCH, &store, before(|_| {}))];
    let ended = generation(1, &mut ranks, &two_controls());
    assert!(matches!(ended[0].0, Ok(Outcome::Completed)), "{:?}", ended[0].0);
    assert!(is_committed.load(Ordering::SeqCst));
    assert_eq!(results(&ended[0].1), undisturbed());
    assert_eq!(checkpoints(&store), [(Step(8), true), (Step(4), true)]);
}

#[test]
fn ranks_that_die_during_an_evaluation_lose_no_update_and_it_is_made_again_with_the_same_result() {
    let store = Arc::new(Store::memory().unwrap());
    let watched = store.clone();
    let fail: Hook = Arc::new(move |_, is_interrupted| {
        while checkpoints(&watched).is_empty() {
            if is_interrupted() {
                return Ok(false);
            }
            thread::yield_now();
        }
        Err(learner::Error::Device("the machine is gone".to_owned()))
    });
    let mut ranks = [fail.clone(), fail].map(|fail| rank_with(EVERY_EPOCH, &store, fail));
    let ended = generation(1, &mut ranks, &two_controls());
    assert!(ended.iter().all(|(outcome, _)| outcome.is_err()), "{:?}", ended[0].0);
    assert_eq!(results(&ended[0].1), [""; 0]);

    let mut ranks = [0, 1].map(|_| rank_with(EVERY_EPOCH, &store, before(|_| {})));
    let resumed = generation(2, &mut ranks, &two_controls());
    let started = |report: &RankReport| match report {
        RankReport::Started { progress, .. } => Some(progress.step),
        _ => None,
    };
    assert_eq!(resumed[0].1.iter().find_map(started), Some(Step(4)));
    assert_eq!(results(&resumed[0].1), undisturbed());
    assert_eq!(checkpoints(&store), [(Step(8), true), (Step(4), true)]);
}

/// A hook whose second batch fails.
fn failing(error: impl Fn() -> learner::Error + Send + Sync + 'static) -> Hook {
    Arc::new(move |number, _| if number == 1 { Err(error()) } else { Ok(true) })
}

fn bad_recipe() -> learner::Error {
    learner::Error::Recipe("no evaluation with this".to_owned())
}

#[test]
fn a_rank_that_cannot_evaluate_loses_no_update() {
    let store = Arc::new(Store::memory().unwrap());
    let mut ranks = [rank(&store, before(|_| {})), rank(&store, failing(bad_recipe))];
    let ended = generation(1, &mut ranks, &two_controls());
    assert!(matches!(ended[0].0, Ok(Outcome::Drained { .. })), "{:?}", ended[0].0);
    assert!(matches!(&ended[1].0, Err(error) if error.to_string().contains("with this")));
    assert_eq!(checkpoints(&store), [(Step(4), false)]);
}

#[test]
fn the_only_rank_saves_before_it_ends_with_an_error() {
    let device = || learner::Error::Device("the machine is hot".to_owned());
    for error in [bad_recipe, device] {
        let store = Arc::new(Store::memory().unwrap());
        let ended = generation(1, &mut [rank(&store, failing(error))], &[Arc::default()]);
        assert!(ended[0].0.is_err(), "{:?}", ended[0].0);
        assert_eq!(checkpoints(&store), [(Step(4), false)]);
    }
}

#[test]
fn a_stop_interrupts_a_batch() {
    let store = Arc::new(Store::memory().unwrap());
    let stopped = two_controls();
    let requested = stopped[0].clone();
    // Both batches would take forever, and only one rank gets the request.
    let endless: Hook = Arc::new(move |number, is_interrupted| {
        requested.request_stop("a notice".to_owned());
        while number == 0 && !is_interrupted() {
            thread::yield_now();
        }
        Ok(false)
    });
    let mut ranks = [endless.clone(), endless].map(|endless| rank(&store, endless));
    let ended = generation(1, &mut ranks, &stopped);
    for (outcome, reports) in &ended {
        assert!(matches!(outcome, Ok(Outcome::Drained { .. })), "{outcome:?}");
        assert_eq!(results(reports), [""; 0]);
    }
    assert_eq!(checkpoints(&store), [(Step(4), false)]);
}

#[test]
fn an_evaluation_shows_how_many_samples_of_all_ranks_are_done() {
    let store = Arc::new(Store::memory().unwrap());
    let controls = two_controls();
    let (watched, shown) = (controls[0].clone(), Arc::new(Mutex::new(Vec::new())));
    let seen = shown.clone();
    // Requests make the ranks vote after every batch.
    let watch = before(move |_| {
        watched.request_save();
        let progress = watched.activity().heartbeat().evaluation;
        seen.lock().unwrap().extend(progress.map(|progress| (progress.samples, progress.total)));
    });
    let mut ranks = [rank(&store, watch), rank(&store, before(|_| {}))];
    generation(1, &mut ranks, &controls);
    let shown = shown.lock().unwrap();
    assert!(shown.iter().all(|(samples, total)| samples <= total && *total == 360), "{shown:?}");
    let last_of_first = shown.iter().take_while(|(samples, _)| *samples < 360).last().unwrap();
    assert!(last_of_first.0 >= 170, "{shown:?}");
    assert!(controls[0].activity().heartbeat().evaluation.is_none(), "it is over");
}

#[test]
fn the_progress_of_an_evaluation_ends_with_its_generation() {
    let store = Arc::new(Store::memory().unwrap());
    let controls = two_controls();
    let (watched, seen) = (controls[0].clone(), Arc::new(Mutex::new(None)));
    let shown = seen.clone();
    // Rank 1 is lost during its third batch; rank 0 goes on in the next generation, where its first batch looks.
    let watch = before(move |_| {
        watched.request_save();
        let progress = watched.activity().heartbeat().evaluation;
        shown.lock().unwrap().get_or_insert(progress.map_or(0, |progress| progress.samples));
    });
    let asking = controls[1].clone();
    let fail: Hook = Arc::new(move |number, _| {
        asking.request_save();
        match number {
            2 => Err(learner::Error::Device("the machine is gone".to_owned())),
            _ => Ok(true),
        }
    });
    let mut ranks = [rank(&store, watch), rank(&store, fail)];
    let ended = generation(1, &mut ranks, &controls);
    assert!(ended[0].0.as_ref().unwrap_err().is_peer_loss(), "{:?}", ended[0].0);
    assert_ne!(controls[0].activity().heartbeat().evaluation.unwrap().samples, 0);
    *seen.lock().unwrap() = None;
    ranks[1] = rank(&store, before(|_| {}));
    generation(2, &mut ranks, &controls);
    assert_eq!(*seen.lock().unwrap(), Some(0), "not that of the last generation");
}
