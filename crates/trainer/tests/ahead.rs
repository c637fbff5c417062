//! A learner whose work is done later than it is queued, as on a GPU: the loop judges an update when the next
//! one is under way. That this changes no bit of what is learned is proved in `chaos.rs`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "../../recipe/tests/kit/mod.rs"]
mod kit;
#[path = "../../collectives/tests/kit/local.rs"]
mod local;

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
    message::{Commit, RankNews, Restore},
};
use baton_recipe::{Step, guard::Diagnosis};
use baton_trainer::{
    Controls, Error, GenerationContext, Inputs, Job, Judged, Learner, Trainer, Update, Weights,
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
    /// Asked for a checkpoint in the midst of the third step.
    controls: Arc<Controls>,
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
        let mut asked = self.asked.lock().unwrap();
        if asked.contains(&Asked::Update(Step(1))) && !asked.contains(&Asked::Update(Step(2))) {
            self.controls.request_save();
        }
        asked.push(Asked::Gradient(batch.samples.clone()));
        drop(asked);
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

/// A rank that is alone, and loses touch in the all-reduce of one step.
struct Alone {
    inner: local::LocalCollective,
    all_reduces: u64,
    lost_in: u64,
}

impl Alone {
    fn until(lost_in: u64) -> Self {
        let inner = local::group(1, Duration::from_secs(60)).remove(0);
        Self { inner, all_reduces: 0, lost_in }
    }
}

impl Collective for Alone {
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

/// One generation of one rank, and what its learner was asked for.
struct Ran {
    trainer: Trainer<Queueing>,
    ended: Result<Outcome, Error>,
    news: Vec<RankNews>,
    asked: Vec<Asked>,
}

fn run(ahead: bool, overrides: &[&str]) -> Ran {
    let (mut trainer, asked, _) = trainer(ahead, overrides);
    let (ended, news) = generation(&mut trainer, 1, u64::MAX, &Controls::default());
    let asked = asked.lock().unwrap().clone();
    Ran { trainer, ended, news, asked }
}

fn generation(
    trainer: &mut Trainer<Queueing>,
    number: u64,
    lost_in: u64,
    controls: &Controls,
) -> (Result<Outcome, Error>, Vec<RankNews>) {
    let mut alone = Alone::until(lost_in);
    let restore = Restore::default();
    let mut news = Vec::new();
    let ended = trainer.run(&mut GenerationContext {
        generation: Generation(number),
        collective: &mut alone,
        restore: &restore,
        controls,
        report: &mut |told| news.push(told),
    });
    (ended, news)
}

type Made = (Trainer<Queueing>, Arc<Mutex<Vec<Asked>>>, Arc<Controls>);

/// A rank's process; whoever runs it with the controls that come with it has a checkpoint asked for.
fn trainer(ahead: bool, overrides: &[&str]) -> Made {
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let of_all = [
        "model.arch=linear",
        &format!("data={{ train='{digits}', val='{digits}', prefetch_batches=4 }}"),
        "train={ epochs=3, global_batch=90, resolution=8, virtual_ranks=1 }",
        "optimizer={ kind='sgd' }",
    ];
    let spec = Arc::new(kit::recipe(&of_all, overrides));
    let inputs = Inputs::open(&spec, Path::new("")).unwrap();
    let store = Arc::new(Store::memory().unwrap());
    let job = Job { id: JobId::default(), spec: spec.clone(), store, inputs };
    let asked = Arc::<Mutex<Vec<Asked>>>::default();
    let controls = Arc::<Controls>::default();
    let (told, asks) = (asked.clone(), controls.clone());
    let build = move || {
        let inner = LinearLearner::new(&spec, &InputType::Image)?;
        Ok(Queueing { inner, ahead, asked: told.clone(), controls: asks.clone() })
    };
    (Trainer::new(job, Box::new(build)).unwrap(), asked, controls)
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

#[test]
fn a_checkpoint_that_all_agreed_on_is_made_up_for_if_its_step_is_the_last_before_a_loss() {
    for ahead in [false, true] {
        let (mut trainer, _, controls) = trainer(ahead, &["checkpoint.every_epochs=0"]);
        let (ended, _) = generation(&mut trainer, 1, 3, &controls);
        assert!(matches!(ended, Err(Error::Collective(_))), "{ended:?}");
        assert_eq!(trainer.step(), Some(Step(3)));
        // Nobody asks again.
        let (ended, news) = generation(&mut trainer, 2, u64::MAX, &Controls::default());
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let saved = news.iter().filter_map(|news| match news {
            RankNews::Saved(commit) => Some(commit.step),
            _ => None,
        });
        assert_eq!(saved.collect::<Vec<_>>(), [Step(3), Step(12)], "ahead: {ahead}");
    }
}
