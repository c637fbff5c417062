//! The step loop: one generation of training, generic over what learns.
//!
//! Everything that all ranks must do alike — evaluate, save, stop — follows either from the replicated
//! [`Progress`] through [`Agenda::due`] or from votes that travel in the gradient's all-reduce. No rank
//! ever decides alone.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_checkpoint::{SaveId, Store};
use baton_collectives::{Collective, Part, TreeNode, tree::Fold};
use baton_job::{
    Generation, JobId, JobSpec, Rank, Step,
    exit::Outcome,
    message::{RankNews, Restore, StepNews},
    plan::virtual_block,
    progress::{Agenda, Due},
    spec::Determinism,
};

use crate::{
    Controls, Error, Inputs, Leaf, Learner, Sums,
    agree::{self, Position},
    controls::Votes,
    digest, evaluation,
    inputs::Feed,
    learner::{self, TAIL},
    loader_watch::LoaderWatch,
    saving,
    schedule::learning_rate,
};

/// What a rank knows of its job.
pub struct Job {
    /// The job's identity.
    pub id: JobId,
    /// Its recipe.
    pub spec: Arc<JobSpec>,
    /// Where checkpoints go.
    pub store: Store,
    /// Its data.
    pub inputs: Inputs,
}

/// A rank's place in a generation.
pub struct Seat<'a> {
    /// The generation.
    pub generation: Generation,
    /// The way to the other ranks.
    pub collective: &'a mut dyn Collective,
    /// Where state comes from if no rank holds any.
    pub restore: &'a Restore,
}

/// Makes a learner as it is before the first step.
pub type Build<L> = Box<dyn Fn() -> Result<L, learner::Error> + Send>;

/// A rank's model and position; it outlives generations.
pub struct Trainer<L: Learner> {
    job: Job,
    build: Build<L>,
    learner: L,
    position: Position,
    standing: Standing,
    loaders: LoaderWatch,
}

/// What the learner's memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Weights from the seed.
    Untouched,
    /// A part of somebody's state; of no use.
    Torn,
    /// The state after [`Trainer::position`].
    Whole,
}

impl<L: Learner> Trainer<L> {
    /// A rank that holds nothing yet.
    ///
    /// # Errors
    /// The learner cannot be built.
    pub fn new(job: Job, build: Build<L>) -> Result<Self, Error> {
        let learner = build()?;
        Ok(Self {
            job,
            build,
            learner,
            position: Position::default(),
            standing: Standing::Untouched,
            loaders: LoaderWatch::default(),
        })
    }

    /// The last finished step, if this rank holds the state after it.
    #[must_use]
    pub fn step(&self) -> Option<Step> {
        (self.standing == Standing::Whole).then_some(self.position.progress.step)
    }

    /// The model.
    pub fn learner(&mut self) -> &mut L {
        &mut self.learner
    }

    /// Takes part in one generation until the job is done or drained.
    ///
    /// # Errors
    /// [`Error::Collective`] when the other ranks are lost: the state is kept for the next generation.
    /// Anything else ends this rank.
    pub fn run(
        &mut self,
        seat: &mut Seat<'_>,
        controls: &Controls,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<Outcome, Error> {
        self.take_state(seat, tell)?;
        let (rank, world) = (seat.collective.rank(), seat.collective.world_size());
        let block = virtual_block(self.job.spec.train.virtual_ranks, rank, world);
        let mut feed = self.job.inputs.train_feed(&self.position.progress, block.clone());
        self.loaders.begin();
        let outcome = self.train(seat, controls, tell, &block, &mut feed);
        self.loaders.end(feed.stats());
        outcome
    }

    fn train(
        &mut self,
        seat: &mut Seat<'_>,
        controls: &Controls,
        tell: &mut dyn FnMut(RankNews),
        block: &Range<u32>,
        feed: &mut Feed,
    ) -> Result<Outcome, Error> {
        let rank = seat.collective.rank();
        // It keeps the leaves: to allocate 100 MB per virtual rank and step would cost milliseconds.
        let mut fold = Fold::new(block.start);
        let mut rate = Rate::start(feed.stats().waited);
        loop {
            let votes = match self.agenda().due(&self.position.progress) {
                Due::Train => {
                    let (news, votes) =
                        self.train_step(seat, controls, feed, &mut fold, block.len())?;
                    let stats = feed.stats();
                    rate.count(self.agenda().global_batch, stats.waited);
                    if let Some(news) = self.loaders.news(Instant::now(), &stats) {
                        tell(RankNews::Loader(news));
                    }
                    if rank == Rank(0) && rate.news_is_due() {
                        tell(RankNews::Stepped(rate.complete(news)));
                    }
                    votes
                }
                Due::Evaluate => {
                    let votes = self.evaluate(seat, controls, tell)?;
                    // Time spent here is no part of the training rate.
                    rate = Rate::start(feed.stats().waited);
                    votes
                }
                Due::Save => {
                    // A failure has been told; the next save may fit again.
                    let _ = self.save(seat, tell)?;
                    Votes::default()
                }
                Due::Finish => {
                    self.ensure_saved(seat, tell)?;
                    return self.done(Outcome::Completed, tell);
                }
            };
            if votes.stop {
                self.ensure_saved(seat, tell)?;
                let reason = controls.reason();
                return self.done(Outcome::Drained { reason }, tell);
            }
            if votes.save && self.position.progress.saved != Some(self.position.progress.step) {
                let _ = self.save(seat, tell)?;
            }
        }
    }

    fn agenda(&self) -> &Agenda {
        self.job.inputs.agenda()
    }

    fn take_state(
        &mut self,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<(), Error> {
        let held = (self.standing == Standing::Whole).then(|| self.position.clone());
        if held.is_none() {
            // From here to the end of this function the memory may hold a part of a state.
            if self.standing == Standing::Torn {
                self.learner = (self.build)()?;
            }
            self.standing = Standing::Torn;
        }
        let plan = agree::plan(
            seat.collective,
            held.as_ref(),
            &mut self.learner,
            &self.job.spec,
            &self.job.store,
            seat.restore,
        )?;
        let step = plan.agreed.position.progress.step;
        let behind = held.as_ref().is_none_or(|held| held.progress.step != step);
        if behind {
            self.standing = Standing::Torn;
        }
        agree::carry_out(plan.giver, seat.collective, &mut self.learner)?;
        // Also by those who hold the same step: one may have evaluated or saved after it when the others
        // were lost before they knew, and all must go on with the same thing.
        self.position = plan.agreed.position;
        self.standing = Standing::Whole;
        tell(RankNews::Started {
            source: plan.agreed.source,
            progress: self.position.progress.clone(),
        });
        Ok(())
    }

    /// One update. Until its all-reduce has ended nothing of the state is touched, so a rank that
    /// loses its peers in here still holds the state before it.
    fn train_step(
        &mut self,
        seat: &mut Seat<'_>,
        controls: &Controls,
        feed: &mut Feed,
        fold: &mut Fold<L::Leaf>,
        micro_batches: usize,
    ) -> Result<(StepNews, Votes), Error> {
        let spec = &self.job.spec;
        let virtual_ranks = spec.train.virtual_ranks;
        let agenda = self.job.inputs.agenda();
        let scale = 1.0 / agenda.next_batch(&self.position.progress) as f32;
        let mut vote = controls.vote();
        for _ in 0..micro_batches {
            let batch =
                feed.next()?.ok_or_else(|| Error::Mismatch("the loader ended".to_owned()))?;
            let mut leaf = match fold.take_buffer() {
                Some(leaf) => leaf,
                None => self.learner.new_leaf()?,
            };
            let sums = self.learner.gradient(&batch, scale, &mut leaf)?;
            feed.recycle(batch);
            leaf.set_tail(tail(&sums, vote))?;
            // Once per rank is enough.
            vote = Votes::default();
            fold.push(leaf, |sum, leaf| sum.add(leaf))?;
        }
        let mut sums = fold.finish();
        if spec.precision.determinism == Determinism::Fast {
            add_up(&mut sums, fold)?;
        }
        let mut parts: Vec<Part<'_>> = sums
            .iter_mut()
            .map(|(node, leaf)| Part { node: *node, buffer: leaf.buffer() })
            .collect();
        seat.collective.all_reduce(virtual_ranks, &mut parts)?;

        let lr = self.learning_rate();
        let Some((_, total)) = sums.first() else {
            return Err(Error::Mismatch("a rank without virtual ranks; this is a bug".to_owned()));
        };
        let [loss, top1, count, save, stop] = total.tail()?;
        self.standing = Standing::Torn;
        self.learner.update(total, self.position.progress.step, lr, virtual_ranks)?;
        agenda.advance(&mut self.position.progress);
        self.standing = Standing::Whole;
        for (_, leaf) in sums {
            fold.recycle(leaf);
        }
        let news = StepNews {
            step: self.position.progress.step,
            epoch: self.position.progress.epoch,
            total_steps: agenda.total_steps(),
            steps_per_epoch: agenda.steps_per_epoch(),
            loss: f64::from(loss) / f64::from(count.max(1.0)),
            top1: f64::from(top1) / f64::from(count.max(1.0)),
            lr,
            ..StepNews::default()
        };
        Ok((news, Votes { save: save > 0.0, stop: stop > 0.0 }))
    }

    fn learning_rate(&self) -> f64 {
        let agenda = self.agenda();
        let position = agenda.position_epochs(&self.position.progress);
        let schedule = &self.job.spec.schedule;
        learning_rate(schedule, position, f64::from(agenda.epochs), agenda.steps_per_epoch())
    }

    fn evaluate(
        &mut self,
        seat: &mut Seat<'_>,
        controls: &Controls,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<Votes, Error> {
        let vote = || controls.vote();
        let (accuracy, votes) = evaluation::evaluate(
            &mut self.learner,
            &self.job.inputs,
            seat.collective,
            &mut self.loaders,
            vote,
        )?;
        let progress = &mut self.position.progress;
        progress.evaluated = Some(progress.epoch);
        progress.last_evaluation = Some(accuracy);
        if progress.best.is_none_or(|(_, best)| accuracy.top1 > best.top1) {
            progress.best = Some((progress.step, accuracy));
        }
        if seat.collective.rank() == Rank(0) {
            tell(RankNews::Evaluated { step: progress.step, epoch: progress.epoch, accuracy });
        }
        Ok(votes)
    }

    /// Saves; a failure is told, and training goes on.
    fn save(
        &mut self,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<Result<(), String>, Error> {
        let step = self.position.progress.step;
        // A failed try counts for the agenda too, else a full disk would make it try for ever.
        self.position.progress.saved = Some(step);
        let id = SaveId { generation: seat.generation, step };
        let saved = saving::save(
            &mut self.learner,
            &self.position.progress,
            &id,
            seat.restore,
            &self.job,
            seat.collective,
        )?;
        if saved.is_ok() {
            self.position.durable = Some(step);
        }
        if seat.collective.rank() == Rank(0) {
            tell(match &saved {
                Ok(commit) => RankNews::Saved(commit.clone()),
                Err(message) => RankNews::SaveFailed { message: message.clone() },
            });
        }
        Ok(saved.map(|_| ()))
    }

    /// Makes sure that leaving now loses nothing.
    fn ensure_saved(
        &mut self,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<(), Error> {
        if self.position.durable == Some(self.position.progress.step) {
            return Ok(());
        }
        self.save(seat, tell)?.map_err(Error::LastSave)
    }

    fn done(&mut self, outcome: Outcome, tell: &mut dyn FnMut(RankNews)) -> Result<Outcome, Error> {
        let digest = digest::of(&mut self.learner, &self.position.progress)?;
        tell(RankNews::Done { outcome: outcome.clone(), digest });
        Ok(outcome)
    }
}

/// What travels behind the gradient: sums for metrics, and the vote.
fn tail(sums: &Sums, vote: Votes) -> [f32; TAIL] {
    let flag = |set: bool| f32::from(u8::from(set));
    [sums.loss as f32, sums.top1 as f32, sums.count as f32, flag(vote.save), flag(vote.stop)]
}

/// Leaves one sum of all, for a collective with an order of its own.
fn add_up<B: Leaf>(sums: &mut Vec<(TreeNode, B)>, fold: &mut Fold<B>) -> Result<(), Error> {
    let rest = sums.split_off(1.min(sums.len()));
    for (node, leaf) in rest {
        if let Some((whole, sum)) = sums.first_mut() {
            sum.add(&leaf)?;
            whole.leaves += node.leaves;
        }
        fold.recycle(leaf);
    }
    Ok(())
}

/// Samples per second over the last seconds, and the share of them spent waiting for the loader.
struct Rate {
    /// When each of the last updates ended, its samples and the loader wait so far.
    marks: VecDeque<(Instant, u64, Duration)>,
    told: Option<Instant>,
}

impl Rate {
    const WINDOW: Duration = Duration::from_secs(10);
    const NEWS_EVERY: Duration = Duration::from_millis(100);

    fn start(waited: Duration) -> Self {
        Self { marks: VecDeque::from([(Instant::now(), 0, waited)]), told: None }
    }

    fn count(&mut self, samples: u64, waited: Duration) {
        let now = Instant::now();
        self.marks.push_back((now, samples, waited));
        while self.marks.len() > 2
            && self.marks.get(1).is_some_and(|(at, ..)| now - *at > Self::WINDOW)
        {
            self.marks.pop_front();
        }
    }

    /// Rank 0 tells its numbers after the first update and then now and again.
    fn news_is_due(&mut self) -> bool {
        let due = self.told.is_none_or(|told| told.elapsed() >= Self::NEWS_EVERY);
        if due {
            self.told = Some(Instant::now());
        }
        due
    }

    fn complete(&self, news: StepNews) -> StepNews {
        let (Some((first, _, waited_then)), Some((last, _, waited_now))) =
            (self.marks.front(), self.marks.back())
        else {
            return news;
        };
        let seconds = (*last - *first).as_secs_f64().max(1e-9);
        let samples: u64 = self.marks.iter().skip(1).map(|(_, samples, _)| samples).sum();
        StepNews {
            samples_per_second: samples as f64 / seconds,
            loader_wait: (waited_now.saturating_sub(*waited_then).as_secs_f64() / seconds).min(1.0),
            ..news
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_collectives::local;
    use baton_data::InputType;
    use baton_job::ids::Epoch;

    use super::*;
    use crate::{Place, linear::LinearLearner};

    fn trainer(store: &str) -> Trainer<LinearLearner> {
        let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
        let text = format!(
            r#"
            name = "loop"
            model = {{ arch = "linear", num_classes = 10 }}
            data = {{ train = "{digits}", val = "{digits}" }}
            train = {{ epochs = 1, global_batch = 90, resolution = 8, virtual_ranks = 2 }}
            optimizer = {{ kind = "sgd" }}
            schedule = {{ kind = "constant", lr = 0.1 }}
            "#
        );
        let spec = Arc::new(JobSpec::from_toml(&text, &[]).unwrap());
        let inputs = Inputs::open(&spec, &Place::default()).unwrap();
        let store = Store::open(store).unwrap();
        let job = Job {
            id: JobId("00000000-0000-0000-0000-000000000000".parse().unwrap()),
            spec: spec.clone(),
            store,
            inputs,
        };
        Trainer::new(job, Box::new(move || LinearLearner::new(&spec, &InputType::Image))).unwrap()
    }

    #[test]
    fn survivors_of_one_step_go_on_together_though_one_had_evaluated_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let mut survivors = [trainer(location), trainer(location)];
        for survivor in &mut survivors {
            survivor.standing = Standing::Whole;
            survivor.position.progress.step = Step(4);
            survivor.position.progress.epoch = Epoch(1);
        }
        survivors[1].position.progress.evaluated = Some(Epoch(1));
        let group = local::group(2, Duration::from_secs(60));

        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let run = |(mut survivor, mut collective): (Trainer<LinearLearner>, _)| {
                scope.spawn(move || {
                    let generation = Generation(2);
                    let restore = Restore::default();
                    let collective: &mut local::LocalCollective = &mut collective;
                    let mut seat = Seat { generation, collective, restore: &restore };
                    survivor
                        .run(&mut seat, &Controls::default(), &mut |_| {})
                        .map_err(|e| e.to_string())
                })
            };
            let threads: Vec<_> = survivors.into_iter().zip(group).map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });

        assert_eq!(outcomes, [Ok(Outcome::Completed), Ok(Outcome::Completed)]);
    }
}
