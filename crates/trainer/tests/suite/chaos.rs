//! The main proof: after many random faults a run has exactly the weights, the optimizer's state, the evaluations and
//! the samples of an undisturbed run, to the bit; and with each option of a recipe 1, 2, 3, 4 and 8 ranks agree.
//!
//! Ranks are threads, one generation after the other. Random choices replace the decisions of coordinator and agents;
//! `crates/job/tests/simulation` tests those decisions. `tests/tests/chaos.rs` does the same with real processes.
//!
//! ```text
//! BATON_CHAOS_SEED=17     cargo test -p baton-trainer --test suite chaos    only that history
//! BATON_CHAOS_SEEDS=5000  cargo test -p baton-trainer --test suite chaos    more histories, with the small learner
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use baton_checkpoint::Store;
use baton_collectives::{AbortHandle, Collective};
use baton_data::{Batch, InputType};
use baton_job::{
    Generation, JobId,
    engine::EvaluationResult,
    exit::Outcome,
    message::{RankReport, Restore},
};
use baton_recipe::{JobSpec, Step, progress::Accuracy, spec::Pointwise};
use baton_trainer::{
    BatchEvaluation, Controls, Error, EvaluatedWeights, GenerationContext, JobInputs, Learner,
    Trainer, TrainingJob, Update,
    learner::{self, Region, SpanCompleted, TensorLocation},
    linear::LinearLearner,
    torch::{Device, TorchLearner},
};

use crate::{digits, kit, local};

const SEEDS: u64 = 160;
const RESNET_SEEDS: u64 = 1;
const PROGRAM_SEEDS: u64 = 3;
const FAULTS: usize = 20;
const VIRTUAL_RANKS: u32 = 4;

const RECIPE: [&str; 8] = [
    "seed=3",
    "model.arch=linear",
    "train={ epochs=30, global_batch=60, resolution=8, virtual_ranks=4 }",
    "optimizer={ kind='sgd', momentum=0.9 }",
    "schedule={ kind='warmup_cosine', peak_lr=0.5, warmup_epochs=0.5 }",
    "checkpoint={ every_epochs=2, every_steps=4, keep_last=2 }",
    "evaluation={ every_epochs=2, crop_ratio=1.0 }",
    "augment={ flip=0.5, crop_scale=[0.7, 1.0] }",
];

/// What rank 0 measures where the run begins. Elsewhere the opposite is measured, and must be without effect.
const OF_RUN: Pointwise = Pointwise::Convolution;

// ---- observations of a run ----

/// Results that an undisturbed and a disturbed run must have in common.
#[derive(Clone, Debug, Default, PartialEq)]
struct RunRecord {
    /// Samples of each update on all ranks, in every generation that tried it.
    samples: BTreeMap<u64, BTreeSet<u64>>,
    evaluations: BTreeMap<u64, Accuracy>,
    /// Digest of weights, momentum, position and best evaluation.
    digest: String,
}

impl RunRecord {
    fn evaluated(&mut self, Step(step): Step, accuracy: Accuracy) {
        let before = self.evaluations.insert(step, accuracy.clone());
        assert!(before.is_none_or(|before| before == accuracy), "evaluations of {step} differ");
    }
}

/// Shared by all ranks of a run.
#[derive(Default)]
struct Watch {
    record: Mutex<RunRecord>,
    /// Counts the calls of all ranks in the current generation; a fault strikes at one of them.
    moments: AtomicUsize,
    /// The moment of the current generation at which the fault strikes.
    strikes_at: AtomicUsize,
    fault: Mutex<Vec<AbortHandle>>,
}

impl Watch {
    fn moment(&self) {
        if self.moments.fetch_add(1, SeqCst) + 1 == self.strikes_at.load(SeqCst) {
            self.fault.lock().unwrap().iter().for_each(AbortHandle::abort);
        }
    }
}

/// A learner that records its inputs.
struct RecordingLearner<L> {
    inner: L,
    watch: Arc<Watch>,
    /// What it measures for 1×1 convolutions.
    measured: Pointwise,
    /// Whether it was set how they are computed.
    is_set: bool,
    /// The current update.
    step: Arc<AtomicU64>,
    /// Behaves as on a GPU, where an update is queued before the sums of the previous one are read.
    ahead: bool,
}

impl<L> RecordingLearner<L> {
    fn record(&self, batch: &Batch) {
        assert!(self.is_set);
        self.watch.moment();
        let mut record = self.watch.record.lock().unwrap();
        record.samples.entry(self.step.load(SeqCst)).or_default().extend(&batch.samples);
    }
}

impl<L: Learner> Learner for RecordingLearner<L> {
    type Leaf = L::Leaf;
    type Loss = L::Loss;

    fn runs_ahead(&self) -> bool {
        self.ahead
    }

    fn new_leaf(&mut self) -> Result<L::Leaf, learner::Error> {
        self.inner.new_leaf()
    }

    fn initialise(&mut self) -> Result<(), learner::Error> {
        self.watch.moment();
        self.inner.initialise()
    }

    fn load_initial(&mut self) -> Result<(), learner::Error> {
        self.inner.load_initial()
    }

    fn measure_pointwise(&mut self) -> Result<Option<Pointwise>, learner::Error> {
        Ok(Some(self.measured))
    }

    fn set_pointwise(&mut self, measured: Option<Pointwise>) {
        assert_eq!(measured, Some(OF_RUN));
        self.is_set = true;
        self.inner.set_pointwise(measured);
    }

    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut L::Leaf,
    ) -> Result<L::Loss, learner::Error> {
        self.record(batch);
        self.inner.gradient(batch, scale, leaf)
    }

    fn spans(&self) -> &[Range<usize>] {
        self.inner.spans()
    }

    fn gradient_in_spans(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut L::Leaf,
        completed: &mut SpanCompleted<'_, L::Leaf>,
    ) -> Result<L::Loss, learner::Error> {
        self.record(batch);
        let watch = &self.watch;
        self.inner.gradient_in_spans(batch, scale, leaf, &mut |leaf| {
            completed(leaf)?;
            // The all-reduce of a span has begun.
            watch.moment();
            Ok(())
        })
    }

    fn measure(&mut self, sum: &mut L::Leaf) -> Result<(), learner::Error> {
        self.inner.measure(sum)
    }

    fn update(&mut self, sum: &mut L::Leaf, update: &Update) -> Result<(), learner::Error> {
        self.inner.update(sum, update)?;
        self.step.store(update.step.0 + 1, SeqCst);
        self.watch.moment();
        Ok(())
    }

    fn evaluate(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<BatchEvaluation>, learner::Error> {
        self.watch.moment();
        self.inner.evaluate(batch, weights, is_interrupted)
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        // Called when state is copied, restored or sent to others.
        self.watch.moment();
        self.inner.regions()
    }

    fn tensors(&self) -> Vec<TensorLocation> {
        self.inner.tensors()
    }
}

// ---- faults ----

/// An event that ends a generation or changes the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// These ranks (one bit each) die, stopped or killed.
    Kill(u32),
    /// All ranks die at once, or their machine does.
    KillAll,
    /// The ranks lose their connections but stay alive.
    Network,
    /// An interruption notice: the ranks save and stop.
    Notice,
    /// Nodes leave or join: the next generation has this many ranks.
    Resize(u32),
    /// A user requests a checkpoint, and then the ranks lose their connections.
    SaveRequest,
}

impl Fault {
    fn any(rng: &mut fastrand::Rng, ranks: usize) -> Self {
        match rng.u8(0..10) {
            0..=2 => Self::Kill(rng.u32(1..1 << ranks)),
            3..=4 => Self::KillAll,
            5 => Self::Network,
            6 => Self::Notice,
            7..=8 => Self::Resize(rng.u32(1..=VIRTUAL_RANKS)),
            _ => Self::SaveRequest,
        }
    }
}

/// A rank's process, and its current update.
struct Process<L: Learner> {
    trainer: Trainer<RecordingLearner<L>>,
    step: Arc<AtomicU64>,
}

/// The training job.
struct Work<L> {
    spec: Arc<JobSpec>,
    learner: fn(&JobSpec, &InputType) -> Result<L, learner::Error>,
    /// The latest moment at which a fault strikes: the job must not be done before.
    max_moments: usize,
}

/// One history of a job.
struct History<'a, L: Learner> {
    work: &'a Work<L>,
    store: Arc<Store>,
    watch: Arc<Watch>,
    ranks: Vec<Option<Process<L>>>,
    generation: u64,
    /// Which ranks run ahead.
    ahead: fn(usize) -> bool,
}

impl<'a, L: Learner + Send + 'static> History<'a, L> {
    fn new(work: &'a Work<L>, ranks: u32) -> Self {
        Self {
            work,
            store: Arc::new(Store::memory().unwrap()),
            watch: Arc::default(),
            ranks: (0..ranks).map(|_| None).collect(),
            generation: 0,
            ahead: |_| false,
        }
    }

    fn process(&self, rank: usize) -> Process<L> {
        let (spec, store, learner) =
            (self.work.spec.clone(), self.store.clone(), self.work.learner);
        let inputs = JobInputs::open(&spec, Path::new("")).unwrap();
        let input_type = inputs.input_type().clone();
        let job =
            TrainingJob { id: JobId::default(), spec: spec.clone(), store, local: None, inputs };
        let (watch, step) = (self.watch.clone(), Arc::<AtomicU64>::default());
        let current = step.clone();
        let ahead = (self.ahead)(rank);
        // Without a whole checkpoint, it begins anew if all ranks are lost.
        let checkpoints = self.store.list().unwrap();
        let has_begun = checkpoints.iter().any(|entry| entry.state.manifest().is_some());
        let measured = if rank == 0 && !has_begun { OF_RUN } else { Pointwise::Product };
        let build = move || {
            Ok(RecordingLearner {
                inner: learner(&spec, &input_type)?,
                watch: watch.clone(),
                measured,
                is_set: false,
                step: current.clone(),
                ahead,
            })
        };
        Process { trainer: Trainer::new(job, Box::new(build)).unwrap(), step }
    }

    /// Runs one generation in which the fault strikes at a moment; returns whether the job is done.
    fn generation(&mut self, fault: Option<Fault>, at: usize) -> bool {
        if let Some(Fault::Resize(ranks)) = fault {
            self.ranks.resize_with(ranks as usize, || None);
        }
        self.generation += 1;
        let generation = Generation(self.generation);
        self.store.raise_fence(generation).unwrap();
        for rank in 0..self.ranks.len() {
            if self.ranks[rank].is_none() {
                self.ranks[rank] = Some(self.process(rank));
            }
        }
        let world_size = u32::try_from(self.ranks.len()).unwrap();
        let group = local::group(world_size, Duration::from_secs(60));
        self.watch.moments.store(0, SeqCst);
        let breaks = !matches!(fault, None | Some(Fault::Notice));
        self.watch.strikes_at.store(if breaks { at } else { 0 }, SeqCst);
        *self.watch.fault.lock().unwrap() = match fault {
            // Only the connections of dead ranks break; the other ranks detect it.
            Some(Fault::Kill(mask)) => {
                let dies = |rank: &usize| mask >> rank & 1 == 1;
                (0..group.len()).filter(dies).map(|rank| group[rank].abort_handle()).collect()
            }
            _ => group.iter().map(Collective::abort_handle).collect(),
        };
        let request = (at % self.ranks.len(), fault);
        let watch = &self.watch;
        let outcomes: Vec<Result<Outcome, Error>> = thread::scope(|scope| {
            let mut threads = Vec::new();
            let members = self.ranks.iter_mut().flatten().zip(group).enumerate();
            for (rank, (Process { trainer, step }, mut collective)) in members {
                let controls = Controls::default();
                match request {
                    (requester, Some(Fault::Notice)) if requester == rank => {
                        controls.request_stop("notice".to_owned());
                    }
                    (requester, Some(Fault::SaveRequest)) if requester == rank => {
                        controls.request_save();
                    }
                    _ => {}
                }
                threads.push(scope.spawn(move || {
                    let restore = Restore::default();
                    let collective: &mut local::LocalCollective = &mut collective;
                    trainer.run(&mut GenerationContext {
                        generation,
                        collective,
                        restore: &restore,
                        controls: &controls,
                        report: &mut |report| note(watch, step, report),
                    })
                }));
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let is_done = outcomes.iter().all(|ended| matches!(ended, Ok(Outcome::Completed)));
        for (rank, (process, ended)) in self.ranks.iter_mut().zip(&outcomes).enumerate() {
            let dies = match fault {
                Some(Fault::Kill(mask)) => mask >> rank & 1 == 1,
                Some(Fault::KillAll) => true,
                _ => false,
            };
            // A rank that is done has left; the others continue with their state.
            let has_left = ended.is_ok();
            assert!(has_left || matches!(ended, Err(Error::Collective(_))), "{ended:?}");
            if dies || has_left {
                *process = None;
            }
        }
        is_done
    }

    fn finish(&mut self) -> RunRecord {
        while !self.generation(None, 0) {}
        self.watch.record.lock().unwrap().clone()
    }
}

fn note(watch: &Watch, step: &AtomicU64, report: RankReport) {
    let mut record = watch.record.lock().unwrap();
    match report {
        RankReport::Started { progress, .. } => {
            step.store(progress.step.0, SeqCst);
            // As the coordinator does: the rank that should have reported it may have died before.
            if let Some((_, last)) = EvaluationResult::last_of(&progress) {
                record.evaluated(last.step, last.accuracy);
            }
        }
        RankReport::Evaluated { step, accuracy, .. } => record.evaluated(step, accuracy),
        RankReport::Done { outcome: Outcome::Completed, digest } => record.digest = digest,
        _ => {}
    }
}

// ---- histories ----

/// The faults of a history, printed if it fails.
struct FaultLog(Vec<(Option<Fault>, usize)>);

impl fmt::Display for FaultLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(fault, at)| writeln!(f, "{fault:?} at moment {at}"))
    }
}

fn history<L>(seed: u64, work: &Work<L>, undisturbed: &RunRecord) -> Result<(), String>
where
    L: Learner + Send + 'static,
{
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut run = History::new(work, rng.u32(1..=VIRTUAL_RANKS));
    // The loop runs ahead only if all ranks do.
    run.ahead = [|_| false, |_| true, |rank| rank % 2 == 0][seed as usize % 3];
    let mut log = FaultLog(Vec::new());
    while log.0.len() < FAULTS {
        let (fault, at) = (Fault::any(&mut rng, run.ranks.len()), rng.usize(1..work.max_moments));
        log.0.push((Some(fault), at));
        if run.generation(Some(fault), at) {
            return Err(format!("seed {seed}: the job was done before all faults\n{log}"));
        }
    }
    let record = run.finish();
    if record == *undisturbed {
        return Ok(());
    }
    let what = match () {
        () if record.digest != undisturbed.digest => "state",
        () if record.evaluations != undisturbed.evaluations => "evaluations",
        () => "samples",
    };
    Err(format!("{what} differ; to repeat this history: BATON_CHAOS_SEED={seed}\n{log}"))
}

fn spec(overrides: &[&str]) -> Arc<JobSpec> {
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let data = format!(
        "data={{ train='{digits}', val='{digits}', pin_threads=false, prefetch_batches=2 }}"
    );
    Arc::new(kit::recipe(&[&[data.as_str()], &RECIPE[..]].concat(), overrides))
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// The one seed that the environment names, or `0..count`.
fn seeds(count: u64) -> Range<u64> {
    match from_environment("BATON_CHAOS_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..count,
    }
}

#[test]
fn any_series_of_faults_ends_with_the_bits_evaluations_and_samples_of_an_undisturbed_run() {
    let work = Work { spec: spec(&[]), learner: LinearLearner::new, max_moments: 80 };
    let undisturbed = History::new(&work, 2).finish();
    assert_eq!(undisturbed.samples.len(), 180, "{:?}", undisturbed.samples.keys());
    assert!(undisturbed.samples.values().all(|samples| samples.len() == 60));
    assert_eq!(undisturbed.evaluations.len(), 15);
    let seeds = seeds(from_environment("BATON_CHAOS_SEEDS").unwrap_or(SEEDS));
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let next = Mutex::new(seeds.clone());
    thread::scope(|scope| {
        let run = || {
            while let Some(seed) = { next.lock().unwrap().next() } {
                if let Err(problem) = history(seed, &work, &undisturbed) {
                    panic!("{problem}");
                }
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    println!("{} histories, each with {FAULTS} faults", seeds.end - seeds.start);
}

/// Options of a small program that defines its loss.
fn program() -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../program/tests/fixtures/with_loss.pt2");
    vec![
        "model.arch=program".to_owned(),
        format!("model.program={path}"),
        "model.num_classes=1".to_owned(),
        "model.channels_last=false".to_owned(),
        "model.zero_init_gamma=false".to_owned(),
        "loss={ kind='program', metrics=['accuracy', 'digit_error'] }".to_owned(),
        "data.extra_fields=['label']".to_owned(),
        "schedule={ kind='constant', lr=0.02 }".to_owned(),
    ]
}

#[test]
fn a_program_ends_with_the_same_bits_after_any_series_of_faults() {
    let program = program();
    let common: Vec<&str> = program.iter().map(String::as_str).collect();
    let options = [
        "train={ epochs=30, global_batch=60, resolution=8, virtual_ranks=4, recompute=['norm', 'drop'] }",
        "ema={ decay=0.9, every_steps=2 }",
    ];
    let spec = spec(&[&common[..], &options].concat());
    let learner =
        |spec: &JobSpec, inputs: &InputType| TorchLearner::blank(spec, inputs, Device::Cpu);
    let work = Work { spec, learner, max_moments: 80 };
    let undisturbed = History::new(&work, 2).finish();
    assert_eq!(undisturbed.evaluations.len(), 15);
    for seed in seeds(PROGRAM_SEEDS) {
        if let Err(problem) = history(seed, &work, &undisturbed) {
            panic!("{problem}");
        }
    }
}

#[test]
fn a_resnet_ends_with_the_same_bits_after_any_series_of_faults() {
    let spec = spec(&[
        "model.arch=resnet18",
        "train.epochs=1",
        "train.global_batch=24",
        "train.resolution=32",
        "evaluation={ every_epochs=1, subset=0.1, crop_ratio=1.0 }",
        "ema={ decay=0.9, every_steps=2 }",
    ]);
    let learner =
        |spec: &JobSpec, inputs: &InputType| TorchLearner::blank(spec, inputs, Device::Cpu);
    let work = Work { spec: spec.clone(), learner, max_moments: 9 };
    let undisturbed = History::new(&work, 2).finish();
    assert_eq!(undisturbed.samples.len(), 15);
    // If no rank set the initial weights, all runs would agree on zeros, except this one.
    let initialised =
        |spec: &JobSpec, inputs: &InputType| TorchLearner::new(spec, inputs, Device::Cpu);
    let with_weights = Work { spec, learner: initialised, max_moments: 9 };
    assert_eq!(History::new(&with_weights, 1).finish(), undisturbed);
    for seed in seeds(RESNET_SEEDS) {
        if let Err(problem) = history(seed, &work, &undisturbed) {
            panic!("{problem}");
        }
    }
}

// ---- every option ----

const WORLD_SIZES: [u32; 4] = [2, 3, 4, 8];
/// Eight virtual ranks, so that up to eight ranks take part; the last update of an epoch has fewer samples.
const SHORT: [&str; 4] = [
    "train={ epochs=2, global_batch=48, resolution=8, virtual_ranks=8 }",
    "data.drop_last=false",
    "checkpoint={ every_epochs=1, every_steps=3 }",
    "evaluation={ every_epochs=1, crop_ratio=1.0 }",
];
/// Options of data, order, schedule and augmentation do not depend on the model.
const WITH_ANY_MODEL: [&[&str]; 9] = [
    &["schedule={ kind='constant', lr=0.3 }", "data.order=sequential"],
    &[
        "schedule={ kind='warmup_cosine', peak_lr=0.5, warmup_epochs=0.5 }",
        "data.order=quasi_random",
    ],
    &["schedule={ kind='warmup_linear', peak_lr=0.5, warmup_steps=3 }", "data.drop_last=true"],
    &[
        "schedule={ kind='one_cycle', peak_lr=0.5 }",
        "train.grad_accumulation=2",
        "data.drop_last=true",
    ],
    &["schedule={ kind='piecewise_linear', points=[[0.0, 0.1], [1.0, 0.5], [2.0, 0.0]] }"],
    &["schedule={ kind='step', lr=0.5, milestones=[1.0], warmup_epochs=0.3 }", "data.resize=area"],
    &["optimizer={ kind='sgd', momentum=0.9, nesterov=true, weight_decay=1e-2 }"],
    &["augment={ flip=0.5, crop_scale=[0.3, 1.0], crop_ratio=[0.5, 2.0] }"],
    &["train.resolution=32", "train.phases=[{ from_epoch=1, resolution=32, global_batch=24 }]"],
];
const WITH_A_PROGRAM: [&[&str]; 5] = [
    &[
        "optimizer={ kind='sgd', momentum=0.9, decay_norm_and_bias=true }",
        "train.clip_grad_norm=0.1",
    ],
    &["optimizer={ kind='adamw', weight_decay=0.05 }", "ema={ decay=0.9, every_steps=2 }"],
    &["optimizer={ kind='lars', momentum=0.9, weight_decay=1e-2 }"],
    &["optimizer={ kind='muon', weight_decay=1e-2 }", "ema={ decay=0.9 }"],
    &["train.recompute=['norm', 'drop']", "train.grad_accumulation=3", "data.drop_last=true"],
];
const WITH_A_NETWORK: [&[&str]; 5] = [
    &["model.blur_pool=true", "loss.label_smoothing=0.1", "precision.compute=bf16"],
    &[
        "precision.fused=true",
        "train.recompute=['layer1']",
        "train.layer_decay=0.7",
        "ema={ decay=0.9 }",
    ],
    &["augment={ mixup_alpha=0.4, cutmix_probability=0.5 }", "train.clip_grad_norm=0.5"],
    &[
        "evaluation.flip=true",
        "optimizer={ kind='lars', momentum=0.9 }",
        "precision.fused=true",
        "model.pointwise=product",
    ],
    &["precision={ compute='bf16', fused=true }", "optimizer={ kind='adamw' }"],
];

/// Every number of ranks, each after the death of a rank, ends like one undisturbed rank.
fn assert_same_on_all_world_sizes<L>(options: &[&str], work: &Work<L>)
where
    L: Learner + Send + 'static,
{
    let one = History::new(work, 1).finish();
    assert!(!one.digest.is_empty() && !one.evaluations.is_empty(), "{options:?}: {one:?}");
    for ranks in WORLD_SIZES {
        let mut run = History::new(work, ranks);
        let is_done = run.generation(Some(Fault::Kill(2)), work.max_moments);
        assert!(!is_done, "{options:?}: the job was done before the fault");
        assert!(run.finish() == one, "{options:?}: {ranks} ranks differ from one");
    }
}

#[test]
fn the_options_of_any_model_change_no_bit_on_any_number_of_ranks() {
    for options in WITH_ANY_MODEL {
        let spec = spec(&[&SHORT[..], options].concat());
        let work = Work { spec, learner: LinearLearner::new, max_moments: 70 };
        assert_same_on_all_world_sizes(options, &work);
    }
}

#[test]
fn skipped_samples_change_no_bit_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let damaged = folder.path().join("damaged.beton");
    digits::write_digits(&damaged, 0..312, |sample, bytes| {
        if sample % 20 == 7 {
            digits::spoil(bytes);
        }
    });
    let train = format!("data.train={}", damaged.display());
    let options = [train.as_str(), "data.on_bad_sample=skip"];
    let spec = spec(&[&SHORT[..], &options].concat());
    let work = Work { spec, learner: LinearLearner::new, max_moments: 70 };
    assert_same_on_all_world_sizes(&options, &work);
}

#[test]
fn the_options_of_a_program_change_no_bit_on_any_number_of_ranks() {
    for options in WITH_A_PROGRAM {
        let common = program();
        let common: Vec<&str> = common.iter().map(String::as_str).collect();
        let spec = spec(&[&common[..], &SHORT, options].concat());
        let learner =
            |spec: &JobSpec, inputs: &InputType| TorchLearner::new(spec, inputs, Device::Cpu);
        assert_same_on_all_world_sizes(options, &Work { spec, learner, max_moments: 70 });
    }
}

#[test]
#[ignore = "minutes: `make chaos`"]
fn the_options_of_a_network_change_no_bit_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let few = folder.path().join("few.beton");
    digits::write_digits(&few, 0..48, |_, _| {});
    let train = format!("data.train={}", few.display());
    for options in WITH_A_NETWORK {
        let small = [
            train.as_str(),
            "model.arch=resnet18",
            "train={ epochs=1, global_batch=16, resolution=32, virtual_ranks=8 }",
            "evaluation={ every_epochs=1, subset=0.1, crop_ratio=1.0 }",
        ];
        let spec = spec(&[&small[..], options].concat());
        let learner =
            |spec: &JobSpec, inputs: &InputType| TorchLearner::new(spec, inputs, Device::Cpu);
        assert_same_on_all_world_sizes(options, &Work { spec, learner, max_moments: 12 });
    }
}
