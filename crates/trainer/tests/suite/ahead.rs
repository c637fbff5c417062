//! A learner that queues its work, as on a GPU: the loop reads the result of an update while the next one is running.
//! `chaos.rs` tests that this changes no bit of the trained state.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use baton_checkpoint::Store;
use baton_collectives::{AbortHandle, BufferMut, Collective, Part};
use baton_data::{Batch, InputType};
use baton_job::{
    Generation, JobId, Rank,
    exit::Outcome,
    message::{Commit, RankReport, Restore},
};
use baton_recipe::{Step, guard::Diagnosis};
use baton_trainer::{
    BatchEvaluation, Controls, Error, EvaluatedWeights, GenerationContext, JobInputs, Learner,
    Trainer, TrainingJob, Update,
    learner::{self, Region, TensorLocation},
    linear::{HostLeaf, LinearLearner},
};

use crate::{kit, local};

/// A call of the learner.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    Prefetch(Vec<u64>),
    Gradient(Vec<u64>),
    Update(Step),
}

struct QueueingLearner {
    inner: LinearLearner,
    ahead: bool,
    calls: Arc<Mutex<Vec<Call>>>,
    /// A checkpoint is requested here in the middle of the third step.
    controls: Arc<Controls>,
}

impl Learner for QueueingLearner {
    type Leaf = HostLeaf;
    type Loss = f64;

    fn runs_ahead(&self) -> bool {
        self.ahead
    }

    fn prefetch(&mut self, batch: &Batch) -> Result<(), learner::Error> {
        self.calls.lock().unwrap().push(Call::Prefetch(batch.samples.clone()));
        Ok(())
    }

    fn new_leaf(&mut self) -> Result<HostLeaf, learner::Error> {
        self.inner.new_leaf()
    }

    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut HostLeaf,
    ) -> Result<f64, learner::Error> {
        let mut calls = self.calls.lock().unwrap();
        if calls.contains(&Call::Update(Step(1))) && !calls.contains(&Call::Update(Step(2))) {
            self.controls.request_save();
        }
        calls.push(Call::Gradient(batch.samples.clone()));
        drop(calls);
        self.inner.gradient(batch, scale, leaf)
    }

    fn measure(&mut self, sum: &mut HostLeaf) -> Result<(), learner::Error> {
        self.inner.measure(sum)
    }

    fn update(&mut self, sum: &mut HostLeaf, update: &Update) -> Result<(), learner::Error> {
        self.calls.lock().unwrap().push(Call::Update(update.step));
        self.inner.update(sum, update)
    }

    fn evaluate(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<BatchEvaluation>, learner::Error> {
        self.inner.evaluate(batch, weights, is_interrupted)
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        self.inner.regions()
    }

    fn tensors(&self) -> Vec<TensorLocation> {
        self.inner.tensors()
    }
}

/// The collective of a single rank that loses its connection in the all-reduce of one step.
struct LosingCollective {
    inner: local::LocalCollective,
    all_reduces: u64,
    lost_in: u64,
}

impl LosingCollective {
    fn until(lost_in: u64) -> Self {
        let inner = local::group(1, Duration::from_secs(60)).remove(0);
        Self { inner, all_reduces: 0, lost_in }
    }
}

impl Collective for LosingCollective {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn all_reduce(
        &mut self,
        virtual_ranks: u32,
        parts: &mut [Part<'_>],
    ) -> Result<(), baton_collectives::Error> {
        if self.all_reduces == self.lost_in {
            return Err(baton_collectives::Error::Aborted { operation: "all_reduce" });
        }
        self.all_reduces += 1;
        self.inner.all_reduce(virtual_ranks, parts)
    }

    fn broadcast(
        &mut self,
        root: Rank,
        buffer: BufferMut<'_>,
    ) -> Result<(), baton_collectives::Error> {
        self.inner.broadcast(root, buffer)
    }

    fn all_gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, baton_collectives::Error> {
        self.inner.all_gather_bytes(mine)
    }

    fn abort_handle(&self) -> AbortHandle {
        self.inner.abort_handle()
    }
}

/// One generation of one rank, and the calls of its learner.
struct RunResult {
    trainer: Trainer<QueueingLearner>,
    ended: Result<Outcome, Error>,
    reports: Vec<RankReport>,
    calls: Vec<Call>,
}

fn run(ahead: bool, overrides: &[&str]) -> RunResult {
    let (mut trainer, calls, _) = trainer(ahead, overrides);
    let (ended, reports) = generation(&mut trainer, 1, u64::MAX, &Controls::default());
    let calls = calls.lock().unwrap().clone();
    RunResult { trainer, ended, reports, calls }
}

fn generation(
    trainer: &mut Trainer<QueueingLearner>,
    number: u64,
    lost_in: u64,
    controls: &Controls,
) -> (Result<Outcome, Error>, Vec<RankReport>) {
    let mut alone = LosingCollective::until(lost_in);
    let restore = Restore::default();
    let mut reports = Vec::new();
    let ended = trainer.run(&mut GenerationContext {
        generation: Generation(number),
        collective: &mut alone,
        restore: &restore,
        controls,
        report: &mut |report| reports.push(report),
    });
    (ended, reports)
}

type TestTrainer = (Trainer<QueueingLearner>, Arc<Mutex<Vec<Call>>>, Arc<Controls>);

/// A rank, the calls of its learner, and the controls in which the learner requests a checkpoint.
fn trainer(ahead: bool, overrides: &[&str]) -> TestTrainer {
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let of_all = [
        "model.arch=linear",
        &format!("data={{ train='{digits}', val='{digits}', prefetch_batches=4 }}"),
        "train={ epochs=3, global_batch=90, resolution=8, virtual_ranks=1 }",
        "optimizer={ kind='sgd' }",
    ];
    let spec = Arc::new(kit::recipe(&of_all, overrides));
    let inputs = JobInputs::open(&spec, Path::new("")).unwrap();
    let store = Arc::new(Store::memory().unwrap());
    let job = TrainingJob { id: JobId::default(), spec: spec.clone(), store, local: None, inputs };
    let calls = Arc::<Mutex<Vec<Call>>>::default();
    let controls = Arc::<Controls>::default();
    let (recorded, requested) = (calls.clone(), controls.clone());
    let build = move || {
        let inner = LinearLearner::new(&spec, &InputType::Image)?;
        Ok(QueueingLearner { inner, ahead, calls: recorded.clone(), controls: requested.clone() })
    };
    (Trainer::new(job, Box::new(build)).unwrap(), calls, controls)
}

/// The learning rate rises so far in the second epoch that the loss overflows.
const EXPLODING: &str = "schedule={kind='piecewise_linear', points=[[0.0, 0.1], [1.0, 0.1], [1.01, 1e38], [3.0, 1e38]]}";

fn diagnosis(ended: Result<Outcome, Error>) -> Diagnosis {
    match ended {
        Err(Error::Diverged(found)) => *found,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_divergence_is_reported_the_same_though_its_update_was_made_and_its_state_is_discarded() {
    let (plain, ahead) = (run(false, &[EXPLODING]), run(true, &[EXPLODING]));
    let found = diagnosis(ahead.ended);
    assert_eq!(found, diagnosis(plain.ended));
    assert_eq!(plain.trainer.step(), Some(found.step));
    assert_eq!(ahead.trainer.step(), None);
    let updated = |calls: &[Call]| calls.contains(&Call::Update(found.step));
    assert!(updated(&ahead.calls) && !updated(&plain.calls));
}

#[test]
fn a_prefetched_batch_is_the_next_one() {
    let prefetched_batches = || {
        let RunResult { ended, calls, .. } = run(true, &[]);
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let batches: Vec<_> =
            calls.into_iter().filter(|call| !matches!(call, Call::Update(_))).collect();
        let pairs = batches.windows(2).filter_map(|pair| match pair {
            [Call::Prefetch(samples), next] => Some((Call::Gradient(samples.clone()), next)),
            _ => None,
        });
        pairs.inspect(|(early, next)| assert_eq!(early, *next)).count()
    };
    // Only batches that the loader has ready are prefetched: on a busy machine a short run may have none.
    assert!((0..1_000).any(|_| prefetched_batches() > 0));
    let RunResult { calls, .. } = run(false, &[]);
    assert!(!calls.iter().any(|call| matches!(call, Call::Prefetch(_))), "{calls:?}");
}

#[test]
fn the_sums_of_every_step_are_read_before_its_state_is_evaluated_or_saved_or_the_run_ends() {
    let (plain, ahead) = (run(false, &[]), run(true, &[]));
    // When a commit is detected, and how long the save took, varies from run to run.
    let results = |reports: &[RankReport]| -> Vec<String> {
        let lasting = reports.iter().filter_map(|report| match report {
            RankReport::Saved(commit) => {
                Some(format!("{:?}", Commit { took: None, ..commit.clone() }))
            }
            RankReport::Evaluated { .. } | RankReport::Done { .. } => Some(format!("{report:?}")),
            _ => None,
        });
        let mut lasting: Vec<String> = lasting.collect();
        lasting.sort();
        lasting
    };
    assert_eq!(results(&plain.reports).len(), 3 + 3 + 1, "{:?}", plain.reports);
    assert_eq!(results(&ahead.reports), results(&plain.reports));
    let first = |reports: &[RankReport]| {
        reports.iter().find_map(|report| match report {
            RankReport::Stepped(step) => Some((step.step, step.loss.to_bits(), step.lr)),
            _ => None,
        })
    };
    assert_eq!(first(&ahead.reports), first(&plain.reports));
}

#[test]
fn a_checkpoint_that_all_agreed_on_is_written_later_if_its_step_is_the_last_before_a_loss() {
    for ahead in [false, true] {
        let (mut trainer, _, controls) = trainer(ahead, &["checkpoint.every_epochs=0"]);
        let (ended, _) = generation(&mut trainer, 1, 3, &controls);
        assert!(matches!(ended, Err(Error::Collective(_))), "{ended:?}");
        assert_eq!(trainer.step(), Some(Step(3)));
        // No new request.
        let (ended, reports) = generation(&mut trainer, 2, u64::MAX, &Controls::default());
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let saved = reports.iter().filter_map(|report| match report {
            RankReport::Saved(commit) => Some(commit.step),
            _ => None,
        });
        assert_eq!(saved.collect::<Vec<_>>(), [Step(3), Step(12)], "ahead: {ahead}");
    }
}
