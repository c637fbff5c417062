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
use baton_data::InputType;
use baton_job::{
    Generation, JobId, Rank,
    exit::Outcome,
    message::{Activity, Commit, RankNews, Restore, SaveProblem, StateSource, StepNews},
    plan::virtual_block,
};
use baton_recipe::{
    JobSpec, Step,
    guard::{self, BatchMark, Diagnosis},
    progress::{Agenda, Due, Extent},
    schedule::learning_rate,
    spec::Determinism,
};

use crate::{
    Controls, Error, Inputs, Leaf, Learner, Update,
    agree::{self, Basis, Position},
    controls::Votes,
    digest, evaluation,
    inputs::Feed,
    learner::{self, VOTE},
    loader_watch::LoaderWatch,
    saving::Saver,
    suspects::Suspects,
    vitals::{Vitals, Watched},
};

/// What a rank knows of its job.
pub struct Job {
    /// The job's identity.
    pub id: JobId,
    /// Its recipe.
    pub spec: Arc<JobSpec>,
    /// Where checkpoints go.
    pub store: Arc<Store>,
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

/// Between two looks of ranks that stand still at what is wanted of them.
const GLANCE: Duration = Duration::from_millis(100);

/// Makes a learner as it is before the first step.
pub type Build<L> = Box<dyn Fn() -> Result<L, learner::Error> + Send>;

/// A rank's model and position; it outlives generations.
pub struct Trainer<L: Learner> {
    job: Job,
    build: Build<L>,
    learner: L,
    position: Position,
    standing: Standing,
    saver: Saver,
    loaders: LoaderWatch,
    unjudged: Option<Unjudged<L>>,
}

/// A step whose sums have not been read yet.
struct Unjudged<L: Learner> {
    /// The sum of all leaves, measured.
    total: L::Leaf,
    suspects: Suspects<L::Loss>,
    /// Updates made before.
    step: Step,
    batch: BatchMark,
    lr: f64,
    /// What is known of it without its sums.
    news: StepNews,
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
            saver: Saver::default(),
            loaders: LoaderWatch::default(),
            unjudged: None,
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
        self.saver.abandon();
        let vitals = controls.vitals();
        let (generation, restore) = (seat.generation, seat.restore);
        let mut watched = Watched { inner: seat.collective, vitals };
        let seat = &mut Seat { generation, collective: &mut watched, restore };
        self.take_state(seat, tell)?;
        vitals.stepped(self.position.progress.step);
        let (rank, world) = (seat.collective.rank(), seat.collective.world_size());
        let block = virtual_block(self.job.spec.train.virtual_ranks, rank, world);
        let mut feed = self.job.inputs.train_feed(&self.position.progress, block.clone());
        self.loaders.begin();
        let outcome = self.train(seat, controls, tell, &block, &mut feed);
        self.loaders.end(feed.stats());
        if let Err(Error::Diverged(_)) = outcome {
            // The better the newest checkpoint, the less is lost; that training went wrong comes first.
            let _ = self.finish_writing(seat, tell);
        }
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
        let (rank, vitals) = (seat.collective.rank(), controls.vitals());
        // It keeps the leaves: to allocate 100 MB per virtual rank and step would cost milliseconds.
        let mut fold = Fold::new(block.start);
        let mut rate = Rate::start(feed.stats().waited);
        if self.position.progress.saved != self.position.durable {
            // One was lost with the last generation, or failed.
            self.save_when_possible(seat);
        }
        // All ranks learn what they agreed on after the same step, or they would wait for each other.
        let ahead = agree::gather(seat.collective, &self.learner.runs_ahead())?;
        let all_run_ahead = ahead.into_iter().all(|ahead| ahead);
        // The first step is told as soon as it is made: somebody may wait for it.
        let mut ahead = false;
        // Before the first step too: who meets the others anew while the job is paused makes none.
        let mut agreed = Some(self.vote(seat, controls)?);
        loop {
            // Whatever is not just the next step has to know first what the last one came to.
            let is_next = self.agenda().due(&self.position.progress) == Due::Train;
            let is_asked = agreed.is_some_and(|votes| votes.ask(self.saver.is_at_work()));
            if (is_asked || !is_next)
                && let Some((news, votes)) = self.settle(seat, &mut fold)?
            {
                tell_step(news, rank, &mut rate, tell);
                agreed = Some(agreed.unwrap_or_default().or(votes));
            }
            if let Some(mut votes) = agreed {
                if votes.pause && !votes.stop {
                    votes = self.stand_still(seat, controls, tell, votes)?;
                    // Time spent here is no part of the training rate.
                    vitals.resume();
                    rate = Rate::start(feed.stats().waited);
                }
                if votes.stop {
                    vitals.at(Activity::Saving);
                    if rank == Rank(0) {
                        tell(RankNews::Stopping { step: self.position.progress.step });
                    }
                    self.ensure_saved(seat, tell)?;
                    let reason = controls.reason();
                    return self.done(Outcome::Drained { reason }, tell);
                }
                self.mind_saves(votes, seat, tell)?;
            }
            agreed = match self.agenda().due(&self.position.progress) {
                Due::Train => {
                    let samples = self.agenda().next_batch(&self.position.progress);
                    let told =
                        self.train_step(seat, controls, feed, &mut fold, block.len(), ahead)?;
                    ahead = all_run_ahead;
                    let stats = feed.stats();
                    rate.count(samples, stats.waited);
                    if let Some(news) = self.loaders.news(Instant::now(), &stats) {
                        tell(RankNews::Loader(news));
                    }
                    told.map(|(news, votes)| {
                        tell_step(news, rank, &mut rate, tell);
                        votes
                    })
                }
                Due::PassOver => {
                    let agenda = self.job.inputs.agenda();
                    agenda.pass_over_marked(&mut self.position.progress);
                    None
                }
                Due::Evaluate(extent) => {
                    let votes = self.evaluate(seat, controls, extent, tell)?;
                    // Time spent here is no part of the training rate.
                    vitals.resume();
                    rate = Rate::start(feed.stats().waited);
                    Some(votes)
                }
                Due::Save => {
                    vitals.at(Activity::Saving);
                    self.save_when_due(seat, tell)?;
                    None
                }
                Due::Finish => {
                    if let Some(reason) = self.agenda().ends_early(&self.position.progress)
                        && rank == Rank(0)
                    {
                        tell(RankNews::EndsEarly { reason });
                    }
                    vitals.at(Activity::Saving);
                    self.ensure_saved(seat, tell)?;
                    return self.done(Outcome::Completed, tell);
                }
            };
        }
    }

    /// What all ranks together want now.
    fn vote(&mut self, seat: &mut Seat<'_>, controls: &Controls) -> Result<Votes, Error> {
        let all = agree::gather(seat.collective, &controls.vote(self.saver.is_busy()))?;
        Ok(all.into_iter().fold(Votes::default(), Votes::or))
    }

    /// Makes no step for as long as any rank is asked to; what all want then. Saves go on meanwhile.
    fn stand_still(
        &mut self,
        seat: &mut Seat<'_>,
        controls: &Controls,
        tell: &mut dyn FnMut(RankNews),
        mut votes: Votes,
    ) -> Result<Votes, Error> {
        while votes.pause && !votes.stop {
            self.mind_saves(votes, seat, tell)?;
            controls.vitals().at(Activity::Paused);
            controls.stand_still(GLANCE);
            votes = self.vote(seat, controls)?;
        }
        Ok(votes)
    }

    /// Goes on with the checkpoint that is being written, and begins one that somebody wishes.
    fn mind_saves(
        &mut self,
        votes: Votes,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<(), Error> {
        if !votes.writing {
            self.go_on_writing(seat, tell)?;
        }
        if votes.save && self.position.progress.saved != Some(self.position.progress.step) {
            self.save_when_possible(seat);
        }
        Ok(())
    }

    fn agenda(&self) -> &Agenda {
        self.job.inputs.agenda()
    }

    fn take_state(
        &mut self,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<(), Error> {
        // What was computed before training went back counts no more.
        let counts = self.position.rollbacks == seat.restore.rollbacks.len();
        let held = (self.standing == Standing::Whole && counts).then(|| self.position.clone());
        if held.is_none() {
            // From here to the end of this function the memory may hold a part of a state.
            if self.standing != Standing::Untouched {
                self.learner = (self.build)()?;
            }
            self.standing = Standing::Torn;
        }
        let began = Instant::now();
        let basis = Basis {
            spec: &self.job.spec,
            agenda: self.job.inputs.agenda(),
            store: &self.job.store,
            restore: seat.restore,
        };
        let plan = agree::plan(seat.collective, held.as_ref(), &mut self.learner, basis)?;
        let step = plan.agreed.position.progress.step;
        let behind = held.as_ref().is_none_or(|held| held.progress.step != step);
        if behind {
            self.standing = Standing::Torn;
        }
        agree::carry_out(&plan.source, seat.collective, &mut self.learner)?;
        // Also by those who hold the same step: one may have evaluated or saved after it when the others
        // were lost before they knew, and all must go on with the same thing.
        self.position = plan.agreed.position;
        self.standing = Standing::Whole;
        let mut source = plan.agreed.source;
        if let StateSource::Checkpoint(restored) = &mut source {
            restored.seconds = began.elapsed().as_secs_f64();
        }
        tell(RankNews::Started { source, progress: self.position.progress.clone() });
        Ok(())
    }

    /// One update, and what the newest one came to whose sums are known.
    ///
    /// Until its all-reduce has ended nothing of the state is touched, so a rank that loses its peers in
    /// here still holds the state before it. Where the device computes while the host goes `ahead`, the
    /// update is queued then, and judged when the next one's gradients are queued behind it: by that time
    /// its sums are there, and the device has work. Else it is judged first and made afterwards.
    fn train_step(
        &mut self,
        seat: &mut Seat<'_>,
        controls: &Controls,
        feed: &mut Feed,
        fold: &mut Fold<L::Leaf>,
        virtual_ranks_here: usize,
        ahead: bool,
    ) -> Result<Option<(StepNews, Votes)>, Error> {
        let spec = self.job.spec.clone();
        let virtual_ranks = spec.train.virtual_ranks;
        let mut suspects = Suspects::none();
        for virtual_rank in 1..=virtual_ranks_here {
            let mut leaf = self.leaf(feed, fold, &mut suspects, controls.vitals(), ahead)?;
            // Once per rank is enough, and the later the sooner it is known.
            let vote = match virtual_rank == virtual_ranks_here {
                true => controls.vote(self.saver.is_busy()),
                false => Votes::default(),
            };
            leaf.set_vote(vote.to_tail())?;
            fold.push(leaf, |sum, leaf| sum.add(leaf))?;
        }
        let mut sums = fold.finish();
        if spec.precision.determinism == Determinism::Fast {
            add_up(&mut sums, fold)?;
        }
        let before = self.settle(seat, fold)?;
        if seat.collective.world_size() > 1
            && let Some((_, leaf)) = sums.last_mut()
        {
            // Until here the device's faults and its slowness are this rank's own, afterwards somebody else's.
            leaf.tail()?;
        }
        let mut buffers: Vec<Part<'_>> = sums
            .iter_mut()
            .map(|(node, leaf)| Part { node: *node, buffer: leaf.buffer() })
            .collect();
        if let Err(error) = seat.collective.all_reduce(virtual_ranks, &mut buffers) {
            if before.is_some_and(|(_, votes)| votes.save) {
                // All wanted it, and will not again: as if it were lost while it was written.
                self.position.progress.saved = Some(self.position.progress.step);
            }
            return Err(error.into());
        }

        let mut sums = sums.into_iter().map(|(_, leaf)| leaf);
        let Some(mut total) = sums.next() else {
            return Err(Error::Mismatch("a rank without virtual ranks; this is a bug".to_owned()));
        };
        sums.for_each(|leaf| fold.recycle(leaf));
        self.learner.measure(&mut total)?;
        let mut unjudged = self.unjudged_step(total, suspects);
        if ahead {
            unjudged.total.send_for_tail()?;
            self.update(&mut unjudged, controls)?;
            self.unjudged = Some(unjudged);
            return Ok(before);
        }
        let judged = self.judge(&mut unjudged, seat)?;
        self.update(&mut unjudged, controls)?;
        fold.recycle(unjudged.total);
        Ok(Some(judged))
    }

    /// The step that is about to be made, whose sum is `total`.
    fn unjudged_step(&self, total: L::Leaf, suspects: Suspects<L::Loss>) -> Unjudged<L> {
        let agenda = self.job.inputs.agenda();
        let before = &self.position.progress;
        let mut after = before.clone();
        agenda.advance(&mut after);
        let lr = learning_rate(&self.job.spec, agenda, before);
        let news = StepNews {
            step: after.step,
            epoch: after.epoch,
            total_steps: agenda.total_steps(),
            steps_per_epoch: agenda.steps_of(after.epoch),
            step_of_epoch: agenda.step_of_epoch(&after),
            lr,
            resolution: match self.job.inputs.input_type() {
                InputType::Image => agenda.resolution(before.epoch),
                InputType::Array(_) => 0,
            },
            global_batch: agenda.global_batch(before.epoch),
            ..StepNews::default()
        };
        let batch = BatchMark { epoch: before.epoch, cursor: before.cursor };
        Unjudged { total, suspects, step: before.step, batch, lr, news }
    }

    /// Changes the state.
    fn update(&mut self, unjudged: &mut Unjudged<L>, controls: &Controls) -> Result<(), Error> {
        let train = &self.job.spec.train;
        let update = Update {
            step: unjudged.step,
            lr: unjudged.lr,
            micro_batches: train.virtual_ranks * train.grad_accumulation,
        };
        self.standing = Standing::Torn;
        self.learner.update(&mut unjudged.total, &update)?;
        self.job.inputs.agenda().advance(&mut self.position.progress);
        controls.vitals().stepped(self.position.progress.step);
        self.standing = Standing::Whole;
        Ok(())
    }

    /// What the update came to that was made and is not judged yet, if there is one.
    fn settle(
        &mut self,
        seat: &mut Seat<'_>,
        fold: &mut Fold<L::Leaf>,
    ) -> Result<Option<(StepNews, Votes)>, Error> {
        let Some(mut unjudged) = self.unjudged.take() else { return Ok(None) };
        // It should not have been made, if it went wrong.
        self.standing = Standing::Torn;
        let judged = self.judge(&mut unjudged, seat)?;
        self.standing = Standing::Whole;
        fold.recycle(unjudged.total);
        Ok(Some(judged))
    }

    /// Reads the sums of a step: what is told of it, and what all ranks want.
    fn judge(
        &mut self,
        unjudged: &mut Unjudged<L>,
        seat: &mut Seat<'_>,
    ) -> Result<(StepNews, Votes), Error> {
        let tail = unjudged.total.tail()?;
        let [loss, top1, count, .., norm, loss_scale] = tail.map(f64::from);
        let loss = loss / count.max(1.0);
        let finite = |value: f64| value.is_finite().then_some(value);
        let progress = &mut self.position.progress;
        let mut watch = progress.watch;
        if let Err(divergence) = watch.judge(loss, norm, &self.job.spec) {
            let found = Diagnosis {
                divergence,
                step: unjudged.step,
                batch: unjudged.batch,
                lr: unjudged.lr,
                loss: finite(loss),
                gradient_norm: finite(norm),
                samples: unjudged.suspects.of_all(seat.collective)?,
            };
            return Err(Error::Diverged(Box::new(found)));
        }
        progress.watch = watch;
        let news = StepNews {
            loss,
            top1: top1 / count.max(1.0),
            gradient_norm: finite(norm),
            loss_scale: (loss_scale != 0.0).then_some(loss_scale),
            ..unjudged.news.clone()
        };
        Ok((news, Votes::of_tail(&tail[VOTE])))
    }

    /// The contribution of one virtual rank: the sum over its micro-batches.
    fn leaf(
        &mut self,
        feed: &mut Feed,
        fold: &mut Fold<L::Leaf>,
        suspects: &mut Suspects<L::Loss>,
        vitals: &Vitals,
        ahead: bool,
    ) -> Result<L::Leaf, Error> {
        let agenda = self.job.inputs.agenda();
        let scale = 1.0 / agenda.next_batch(&self.position.progress) as f32;
        let mut sum: Option<L::Leaf> = None;
        for _ in 0..self.job.spec.train.grad_accumulation {
            vitals.at(Activity::Loading);
            let batch =
                feed.next()?.ok_or_else(|| Error::Mismatch("the loader ended".to_owned()))?;
            vitals.at(Activity::Computing);
            let mut leaf = match fold.take_buffer() {
                Some(leaf) => leaf,
                None => self.learner.new_leaf()?,
            };
            let loss = self.learner.gradient(&batch, scale, &mut leaf)?;
            suspects.note(&batch.samples, loss);
            feed.recycle(batch);
            // While the device computes this one.
            if ahead && let Some(next) = feed.peek() {
                self.learner.prefetch(next)?;
            }
            sum = Some(match sum {
                None => leaf,
                Some(mut whole) => {
                    whole.add(&leaf)?;
                    fold.recycle(leaf);
                    whole
                }
            });
        }
        sum.ok_or_else(|| Error::Mismatch("an update without micro-batches".to_owned()))
    }

    fn evaluate(
        &mut self,
        seat: &mut Seat<'_>,
        controls: &Controls,
        extent: Extent,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<Votes, Error> {
        let saver = &mut self.saver;
        let vote = || controls.vote(saver.is_busy());
        let evaluation::Evaluated { raw, ema, votes } = evaluation::evaluate(
            &mut self.learner,
            &self.job.inputs,
            extent,
            seat.collective,
            &mut self.loaders,
            vote,
            controls.vitals(),
        )?;
        let spec = &self.job.spec;
        let progress = &mut self.position.progress;
        if let Some(divergence) = guard::collapse(progress, &raw, &spec.guard) {
            let lr = learning_rate(spec, self.job.inputs.agenda(), progress);
            return Err(Error::Diverged(Box::new(Diagnosis {
                divergence,
                step: progress.step,
                batch: BatchMark { epoch: progress.epoch, cursor: progress.cursor },
                lr,
                loss: Some(raw.loss),
                gradient_norm: None,
                samples: Vec::new(),
            })));
        }
        progress.note_evaluation(raw, ema, extent);
        if seat.collective.rank() == Rank(0) {
            let (step, epoch) = (progress.step, progress.epoch);
            tell(RankNews::Evaluated { step, epoch, accuracy: raw, ema, extent });
        }
        Ok(votes)
    }

    /// Begins a checkpoint that the recipe asks for, once the one before it is written. None is left out:
    /// a rollback goes to the newest, which has to be the same however fast the store is.
    fn save_when_due(
        &mut self,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<(), Error> {
        if let Some((behind, seconds)) = self.saver.at_work_on() {
            if seat.collective.rank() == Rank(0) {
                let step = self.position.progress.step;
                tell(RankNews::SaveWaits { step, behind, seconds });
            }
            // A failure is told, and training goes on: the next one may fit again.
            let _ = self.finish_writing(seat, tell)?;
        }
        self.begin_writing(seat);
        Ok(())
    }

    /// Begins a checkpoint that somebody wishes, or sees to it that one follows that which is being written.
    fn save_when_possible(&mut self, seat: &Seat<'_>) {
        if self.saver.is_at_work() {
            self.saver.want_another();
        } else {
            self.begin_writing(seat);
        }
    }

    fn begin_writing(&mut self, seat: &Seat<'_>) {
        let progress = &mut self.position.progress;
        // A failed try counts for the agenda too, else a full disk would make it try for ever.
        progress.saved = Some(progress.step);
        let id = SaveId { generation: seat.generation, step: progress.step };
        let (learner, restore) = (&mut self.learner, seat.restore);
        self.saver.start(learner, progress, id, restore, &self.job, &*seat.collective);
    }

    /// The next phase of the checkpoint that is being written; then the one that waits for it.
    fn go_on_writing(
        &mut self,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<(), Error> {
        if let Some(written) = self.saver.advance(&self.job, seat.collective)? {
            // A failure is told, and training goes on: the next one may fit again.
            let _ = self.note_written(written, seat, tell);
            if self.saver.take_wish() {
                self.begin_writing(seat);
            }
        }
        Ok(())
    }

    /// Waits for the checkpoint that is being written; of no other.
    fn finish_writing(
        &mut self,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<Result<(), SaveProblem>, Error> {
        let written = self.saver.finish(&self.job, seat.collective)?;
        Ok(written.map_or(Ok(()), |written| self.note_written(written, seat, tell)))
    }

    fn note_written(
        &mut self,
        written: Result<Commit, SaveProblem>,
        seat: &Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<(), SaveProblem> {
        if let Ok(commit) = &written {
            self.position.durable = Some(commit.step);
        }
        if seat.collective.rank() == Rank(0) {
            tell(match &written {
                Ok(commit) => RankNews::Saved(commit.clone()),
                Err(problem) => RankNews::SaveFailed(problem.clone()),
            });
        }
        written.map(|_| ())
    }

    /// Makes sure that leaving now loses nothing.
    fn ensure_saved(
        &mut self,
        seat: &mut Seat<'_>,
        tell: &mut dyn FnMut(RankNews),
    ) -> Result<(), Error> {
        let _ = self.finish_writing(seat, tell)?;
        if self.position.durable == Some(self.position.progress.step) {
            return Ok(());
        }
        self.begin_writing(seat);
        if seat.collective.rank() == Rank(0) {
            tell(RankNews::Copied { step: self.position.progress.step });
        }
        self.finish_writing(seat, tell)?.map_err(|problem| Error::LastSave(problem.message))
    }

    fn done(&mut self, outcome: Outcome, tell: &mut dyn FnMut(RankNews)) -> Result<Outcome, Error> {
        let digest = digest::of(&mut self.learner, &self.position.progress)?;
        tell(RankNews::Done { outcome: outcome.clone(), digest });
        Ok(outcome)
    }
}

/// Rank 0 tells now and again what a step came to.
fn tell_step(news: StepNews, rank: Rank, rate: &mut Rate, tell: &mut dyn FnMut(RankNews)) {
    if rank == Rank(0) && rate.news_is_due() {
        tell(RankNews::Stepped(rate.complete(news)));
    }
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
    use std::path::Path;

    use baton_collectives::local;
    use baton_job::message::Rollback;
    use baton_recipe::Epoch;
    use object_store::{
        memory::InMemory,
        throttle::{ThrottleConfig, ThrottledStore},
    };

    use super::*;
    use crate::linear::LinearLearner;

    fn trainer(store: &str) -> Trainer<LinearLearner> {
        trainer_with(store, &[])
    }

    fn trainer_with(store: &str, overrides: &[&str]) -> Trainer<LinearLearner> {
        trainer_on(Store::open(store).unwrap(), overrides)
    }

    fn trainer_on(store: Store, overrides: &[&str]) -> Trainer<LinearLearner> {
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
        let overrides: Vec<String> = overrides.iter().map(|&entry| entry.to_owned()).collect();
        let spec = Arc::new(JobSpec::from_toml(&text, &overrides).unwrap());
        let inputs = Inputs::open(&spec, Path::new("")).unwrap();
        let store = Arc::new(store);
        let job = Job {
            id: JobId("00000000-0000-0000-0000-000000000000".parse().unwrap()),
            spec: spec.clone(),
            store,
            inputs,
        };
        Trainer::new(job, Box::new(move || LinearLearner::new(&spec, &InputType::Image))).unwrap()
    }

    type Told = (Result<Outcome, Error>, Vec<RankNews>);

    /// One generation of all ranks.
    fn run_all(
        trainers: &mut [Trainer<LinearLearner>],
        generation: Generation,
        restore: &Restore,
    ) -> Vec<Told> {
        let world_size = u32::try_from(trainers.len()).unwrap();
        let group = local::group(world_size, Duration::from_secs(60));
        let run = |trainer: &mut Trainer<LinearLearner>, mut collective| {
            let collective: &mut local::LocalCollective = &mut collective;
            let mut seat = Seat { generation, collective, restore };
            let mut news = Vec::new();
            let ended = trainer.run(&mut seat, &Controls::default(), &mut |told| news.push(told));
            (ended, news)
        };
        std::thread::scope(|scope| {
            let members = trainers.iter_mut().zip(group);
            let threads: Vec<_> = members
                .map(|(trainer, collective)| scope.spawn(move || run(trainer, collective)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// One generation of one rank.
    fn run_alone(
        trainer: &mut Trainer<LinearLearner>,
        generation: Generation,
        restore: &Restore,
    ) -> Told {
        run_all(std::slice::from_mut(trainer), generation, restore).remove(0)
    }

    fn committed(news: &[RankNews]) -> Vec<&Commit> {
        news.iter()
            .filter_map(|news| match news {
                RankNews::Saved(commit) => Some(commit),
                _ => None,
            })
            .collect()
    }

    /// Whose writes take so long that many updates are made meanwhile.
    fn slow_store() -> Store {
        let slow = ThrottleConfig {
            wait_put_per_call: Duration::from_millis(300),
            ..ThrottleConfig::default()
        };
        let objects = ThrottledStore::new(InMemory::new(), slow);
        Store::over("slow memory", Arc::new(objects)).unwrap()
    }

    #[test]
    fn training_goes_on_while_a_checkpoint_is_written_and_none_is_left_out() {
        let overrides = ["train.epochs=3", "checkpoint.keep_last=99"];
        let mut trainer = trainer_on(slow_store(), &overrides);
        let (ended, news) = run_alone(&mut trainer, Generation(1), &Restore::default());
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");

        let waits = news.iter().filter_map(|news| match news {
            RankNews::SaveWaits { step, behind, .. } => Some((*step, *behind)),
            _ => None,
        });
        // The whole second epoch was trained meanwhile.
        assert_eq!(waits.collect::<Vec<_>>(), [(Step(8), Step(4)), (Step(12), Step(8))]);
        let saved = committed(&news);
        let steps: Vec<Step> = saved.iter().map(|commit| commit.step).collect();
        assert_eq!(steps, [Step(4), Step(8), Step(12)]);
        for commit in saved {
            let took = commit.took.unwrap();
            assert!(took.stall_seconds < 0.1 && took.seconds > 0.3, "{took:?}");
        }
    }

    #[test]
    fn save_that_fails_is_told_and_a_later_one_succeeds() {
        let folder = tempfile::tempdir().unwrap();
        // Where the first one's folder would be.
        std::fs::write(folder.path().join("step-0000000004-gen-000001"), "in the way").unwrap();
        let location = folder.path().to_str().unwrap();
        let mut trainer = trainer_with(location, &["train.epochs=3"]);
        let (ended, news) = run_alone(&mut trainer, Generation(1), &Restore::default());
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let told = |kind: fn(&RankNews) -> bool| news.iter().position(kind);
        let failed = told(|news| matches!(news, RankNews::SaveFailed(_))).unwrap();
        let saved = told(|news| matches!(news, RankNews::Saved(_))).unwrap();
        assert!(failed < saved, "{news:?}");
        let RankNews::SaveFailed(SaveProblem { message, fence: None }) = &news[failed] else {
            panic!()
        };
        assert!(message.contains("step-0000000004-gen-000001"), "{message}");
    }

    #[test]
    fn checkpoint_of_another_recipe_is_refused_with_the_difference_or_taken_if_so_told() {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        run_alone(&mut trainer(location), Generation(1), &Restore::default()).0.unwrap();

        let changed = ["train.epochs=2"];
        let (refused, _) =
            run_alone(&mut trainer_with(location, &changed), Generation(2), &Restore::default());
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("train.epochs: 1 → 2"), "{refused}");
        assert!(refused.contains("--allow-recipe-change"), "{refused}");

        let allowed = Restore { allow_recipe_change: true, ..Restore::default() };
        let (ended, news) =
            run_alone(&mut trainer_with(location, &changed), Generation(3), &allowed);
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let Some(RankNews::Started { source: StateSource::Checkpoint(restored), progress }) =
            news.iter().find(|news| matches!(news, RankNews::Started { .. }))
        else {
            panic!("{news:?}")
        };
        assert_eq!(progress.step, Step(4));
        assert_eq!(restored.changes, ["train.epochs: 1 → 2"]);
        assert_eq!((restored.world_size, restored.lr), (1, 0.1));

        let larger = ["train.epochs=2", "model.num_classes=11"];
        let (refused, _) = run_alone(&mut trainer_with(location, &larger), Generation(4), &allowed);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("must keep its shape"), "{refused}");
    }

    /// Two epochs whose rate rises so far in the second that the loss overflows.
    const EXPLODING: [&str; 3] = [
        "train.epochs=3",
        "schedule={kind='piecewise_linear', points=[[0.0, 0.1], [1.0, 0.1], [1.01, 1e38], [3.0, 1e38]]}",
        "guard.lr_factor=1e-38",
    ];

    #[test]
    fn a_divergence_is_told_with_its_batch_and_changes_no_state() {
        let folder = tempfile::tempdir().unwrap();
        let mut trainer = trainer_with(folder.path().to_str().unwrap(), &EXPLODING);
        let (ended, _) = run_alone(&mut trainer, Generation(1), &Restore::default());
        let Err(Error::Diverged(found)) = ended else { panic!("{ended:?}") };
        assert!(found.step > Step(4) && found.batch.epoch == Epoch(1), "{found:?}");
        assert!(found.lr > 1e30 && !found.samples.is_empty(), "{found:?}");
        assert_eq!(trainer.step(), Some(found.step));
        for region in trainer.learner().regions() {
            assert!(region.buffer.to_host().unwrap().iter().all(|value| value.is_finite()));
        }
    }

    #[test]
    fn a_rollback_goes_on_from_the_last_good_checkpoint_with_a_lower_rate() {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let mut trainer = trainer_with(location, &EXPLODING);
        let (ended, _) = run_alone(&mut trainer, Generation(1), &Restore::default());
        let Err(Error::Diverged(found)) = ended else { panic!("{ended:?}") };

        let rollback = Rollback { generation: Generation(2), before: found.step, skip: None };
        let restore = Restore { rollbacks: vec![rollback], ..Restore::default() };
        let (ended, news) = run_alone(&mut trainer, Generation(2), &restore);
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let started = news.iter().find_map(|news| match news {
            RankNews::Started { progress, source } => Some((progress, source)),
            _ => None,
        });
        let (progress, source) = started.unwrap();
        // Of the end of the first epoch, though the rank held a later state.
        assert_eq!((progress.step, progress.lr_cuts), (Step(4), 1));
        assert!(matches!(source, StateSource::Checkpoint(_)), "{source:?}");
    }

    #[test]
    fn a_batch_named_by_a_rollback_and_the_one_before_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let mut trainer = trainer_with(location, &["train.epochs=2"]);
        let batch = BatchMark { epoch: Epoch(1), cursor: 90 };
        let rollback = Rollback { generation: Generation(1), before: Step(5), skip: Some(batch) };
        let restore = Restore { rollbacks: vec![rollback], ..Restore::default() };
        let (ended, _) = run_alone(&mut trainer, Generation(1), &restore);
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        assert_eq!(trainer.step(), Some(Step(6)));
        assert_eq!(trainer.position.progress.epoch, Epoch(2));
    }

    #[test]
    fn a_target_completes_the_job_and_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let target = ["train.epochs=50", "limits.target_top1=0.5", "evaluation.subset=0.5"];
        let mut trainer = trainer_with(location, &target);
        let (ended, news) = run_alone(&mut trainer, Generation(1), &Restore::default());
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let evaluations = news.iter().filter_map(|news| match news {
            RankNews::Evaluated { extent, accuracy, .. } => Some((*extent, accuracy.samples)),
            _ => None,
        });
        let evaluations: Vec<_> = evaluations.collect();
        assert_eq!(evaluations.first(), Some(&(Extent::Subset, 180)));
        assert_eq!(evaluations.last(), Some(&(Extent::Full, 360)));
        let reasons: Vec<_> = news
            .iter()
            .filter_map(|news| match news {
                RankNews::EndsEarly { reason } => Some(reason.as_str()),
                _ => None,
            })
            .collect();
        assert!(reasons.len() == 1 && reasons[0].contains("target_top1 = 0.5"), "{reasons:?}");
        assert!(trainer.position.progress.epoch < Epoch(50));
    }

    #[test]
    fn accumulated_micro_batches_give_nearly_the_same_model() {
        let trained = |overrides: &[&str]| {
            let folder = tempfile::tempdir().unwrap();
            let mut trainer = trainer_with(folder.path().to_str().unwrap(), overrides);
            let (ended, _) = run_alone(&mut trainer, Generation(1), &Restore::default());
            assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
            trainer.learner().regions()[0].buffer.to_host().unwrap()
        };
        let whole = trained(&[]);
        let parts = trained(&["train.grad_accumulation=3"]);
        assert_ne!(whole, parts);
        for (a, b) in whole.iter().zip(parts) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
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
        survivors[1].position.progress.evaluated_fully = Some(Epoch(1));

        for (ended, _) in run_all(&mut survivors, Generation(2), &Restore::default()) {
            assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        }
    }

    #[test]
    fn a_checkpoint_lost_with_its_generation_is_made_up_for_in_the_next() {
        let overrides = ["train.epochs=2", "checkpoint.every_epochs=0"];
        let mut survivor = trainer_on(Store::memory().unwrap(), &overrides);
        survivor.standing = Standing::Whole;
        survivor.position.progress.step = Step(4);
        survivor.position.progress.epoch = Epoch(1);
        survivor.position.progress.evaluated = Some(Epoch(1));
        survivor.position.progress.evaluated_fully = Some(Epoch(1));
        survivor.position.progress.saved = Some(Step(3));

        let (ended, news) = run_alone(&mut survivor, Generation(2), &Restore::default());

        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let steps: Vec<Step> = committed(&news).iter().map(|commit| commit.step).collect();
        assert_eq!(steps, [Step(4), Step(8)]);
    }

    #[test]
    fn a_checkpoint_of_two_ranks_is_restored_by_any_number_and_damage_to_a_share_is_known_to_all() {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let new = || trainer_with(location, &["train.epochs=2"]);
        let mut first = [new(), new()];
        run_all(&mut first, Generation(1), &Restore::default());
        let state = |trainer: &mut Trainer<LinearLearner>| {
            let regions = trainer.learner().regions();
            regions.iter().map(|region| region.buffer.to_host().unwrap()).collect::<Vec<_>>()
        };
        let undisturbed = state(&mut first[0]);

        for world_size in [2, 1] {
            let mut restored: Vec<_> = (0..world_size).map(|_| new()).collect();
            for (ended, news) in run_all(&mut restored, Generation(2), &Restore::default()) {
                assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
                let RankNews::Started { progress, .. } = &news[0] else { panic!("{news:?}") };
                assert_eq!(progress.step, Step(8));
            }
            assert!(restored.iter_mut().all(|trainer| state(trainer) == undisturbed));
        }

        let newest = folder.path().join("step-0000000008-gen-000001");
        let share = newest.join("shard-00001-of-00002.safetensors");
        let mut bytes = std::fs::read(&share).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&share, bytes).unwrap();
        let mut restored = [new(), new()];
        for (ended, news) in run_all(&mut restored, Generation(3), &Restore::default()) {
            assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
            let RankNews::Started { source: StateSource::Checkpoint(restored), progress } =
                &news[0]
            else {
                panic!("{news:?}")
            };
            assert_eq!(progress.step, Step(4));
            assert!(restored.skipped[0].contains("shard-00001-of-00002"), "{restored:?}");
        }
        assert!(restored.iter_mut().all(|trainer| state(trainer) == undisturbed));
    }
}
