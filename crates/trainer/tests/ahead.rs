//! A learner whose work is done later than it is queued, as on a GPU: the loop judges an update when the next
//! one is under way. That this changes no bit of what is learned is proved in `chaos.rs`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use baton_checkpoint::Store;
use baton_collectives::local;
use baton_data::{Batch, InputType};
use baton_job::{
    Generation, JobId, JobSpec, Step,
    exit::Outcome,
    guard::Diagnosis,
    message::{Commit, RankNews, Restore},
};
use baton_trainer::{
    Controls, Error, Inputs, Job, Judged, Learner, Seat, Trainer, Update, Weights,
    learner::{self, Region, TensorPlace},
    linear::{HostLeaf, LinearLearner},
};

/// What a learner was asked for, in order.
#[derive(Clone, Debug, PartialEq)]
enum Asked {
    Prefetch(Vec<u64>),
    Gradient(Vec<u64>),
    Update(Step),
}

struct Queueing {
    inner: LinearLearner,
    ahead: bool,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Learner for Queueing {
    type Leaf = HostLeaf;
    type Loss = f64;

    fn runs_ahead(&self) -> bool {
        self.ahead
    }

    fn prefetch(&mut self, batch: &Batch) -> Result<(), learner::Error> {
        self.asked.lock().unwrap().push(Asked::Prefetch(batch.samples.clone()));
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
        self.asked.lock().unwrap().push(Asked::Gradient(batch.samples.clone()));
        self.inner.gradient(batch, scale, leaf)
    }

    fn measure(&mut self, sum: &mut HostLeaf) -> Result<(), learner::Error> {
        self.inner.measure(sum)
    }

    fn update(&mut self, sum: &mut HostLeaf, update: &Update) -> Result<(), learner::Error> {
        self.asked.lock().unwrap().push(Asked::Update(update.step));
        self.inner.update(sum, update)
    }

    fn evaluate(&mut self, batch: &Batch, weights: Weights) -> Result<Judged, learner::Error> {
        self.inner.evaluate(batch, weights)
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        self.inner.regions()
    }

    fn tensors(&self) -> Vec<TensorPlace> {
        self.inner.tensors()
    }
}

/// One generation of one rank, and what its learner was asked for.
struct Ran {
    trainer: Trainer<Queueing>,
    ended: Result<Outcome, Error>,
    news: Vec<RankNews>,
    asked: Vec<Asked>,
}

fn run(ahead: bool, overrides: &[&str]) -> Ran {
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let text = format!(
        r#"
        name = "ahead"
        model = {{ arch = "linear", num_classes = 10 }}
        data = {{ train = "{digits}", val = "{digits}", prefetch_batches = 4 }}
        train = {{ epochs = 3, global_batch = 90, resolution = 8, virtual_ranks = 1 }}
        optimizer = {{ kind = "sgd" }}
        schedule = {{ kind = "constant", lr = 0.1 }}
        "#
    );
    let overrides: Vec<String> = overrides.iter().map(|&entry| entry.to_owned()).collect();
    let spec = Arc::new(JobSpec::from_toml(&text, &overrides).unwrap());
    let inputs = Inputs::open(&spec, Path::new("")).unwrap();
    let store = Arc::new(Store::memory().unwrap());
    let job = Job { id: JobId::default(), spec: spec.clone(), store, inputs };
    let asked = Arc::<Mutex<Vec<Asked>>>::default();
    let told = asked.clone();
    let build = move || {
        let inner = LinearLearner::new(&spec, &InputType::Image)?;
        Ok(Queueing { inner, ahead, asked: told.clone() })
    };
    let mut trainer = Trainer::new(job, Box::new(build)).unwrap();
    let mut alone = local::group(1, Duration::from_secs(60)).remove(0);
    let restore = Restore::default();
    let mut seat = Seat { generation: Generation(1), collective: &mut alone, restore: &restore };
    let mut news = Vec::new();
    let ended = trainer.run(&mut seat, &Controls::default(), &mut |told| news.push(told));
    let asked = asked.lock().unwrap().clone();
    Ran { trainer, ended, news, asked }
}

/// The rate rises so far in the second epoch that the loss overflows.
const EXPLODING: &str = "schedule={kind='piecewise_linear', points=[[0.0, 0.1], [1.0, 0.1], [1.01, 1e38], [3.0, 1e38]]}";

fn diagnosis(ended: Result<Outcome, Error>) -> Diagnosis {
    match ended {
        Err(Error::Diverged(found)) => *found,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_divergence_is_told_alike_though_its_update_was_made_and_its_state_is_not_gone_on_with() {
    let (plain, ahead) = (run(false, &[EXPLODING]), run(true, &[EXPLODING]));
    let found = diagnosis(ahead.ended);
    assert_eq!(found, diagnosis(plain.ended));
    assert_eq!(plain.trainer.step(), Some(found.step));
    assert_eq!(ahead.trainer.step(), None);
    let updates = |asked: &[Asked]| asked.contains(&Asked::Update(found.step));
    assert!(updates(&ahead.asked) && !updates(&plain.asked));
}

#[test]
fn what_is_handed_over_early_is_the_batch_that_comes_next() {
    let batches_handed_over_early = || {
        let Ran { ended, asked, .. } = run(true, &[]);
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let batches: Vec<_> =
            asked.into_iter().filter(|asked| !matches!(asked, Asked::Update(_))).collect();
        let pairs = batches.windows(2).filter_map(|pair| match pair {
            [Asked::Prefetch(samples), next] => Some((Asked::Gradient(samples.clone()), next)),
            _ => None,
        });
        pairs.inspect(|(early, next)| assert_eq!(early, *next)).count()
    };
    // Only those that the loader has ready: on a busy machine that may be none of a short run.
    assert!((0..1_000).any(|_| batches_handed_over_early() > 0));
    let Ran { asked, .. } = run(false, &[]);
    assert!(!asked.iter().any(|asked| matches!(asked, Asked::Prefetch(_))), "{asked:?}");
}

#[test]
fn every_step_is_judged_before_its_state_is_evaluated_saved_or_left() {
    let (plain, ahead) = (run(false, &[]), run(true, &[]));
    // When a checkpoint is known to be written, and how long it took, is chance.
    let told = |news: &[RankNews]| -> Vec<String> {
        let lasting = news.iter().filter_map(|news| match news {
            RankNews::Saved(commit) => {
                Some(format!("{:?}", Commit { took: None, ..commit.clone() }))
            }
            RankNews::Evaluated { .. } | RankNews::Done { .. } => Some(format!("{news:?}")),
            _ => None,
        });
        let mut lasting: Vec<String> = lasting.collect();
        lasting.sort();
        lasting
    };
    assert_eq!(told(&plain.news).len(), 3 + 3 + 1, "{:?}", plain.news);
    assert_eq!(told(&ahead.news), told(&plain.news));
    let first = |news: &[RankNews]| {
        news.iter().find_map(|news| match news {
            RankNews::Stepped(news) => Some((news.step, news.loss.to_bits(), news.lr)),
            _ => None,
        })
    };
    assert_eq!(first(&ahead.news), first(&plain.news));
}
