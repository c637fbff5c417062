//! The step loop: one generation of training, generic over the model.
//!
//! Everything that all ranks must do alike (evaluate, save, stop) follows either from the replicated
//! [`Progress`](baton_recipe::progress::Progress) through [`TrainingPlan::due`], or from votes that are part of the
//! gradient's all-reduce. No rank decides alone.
//!
//! [`Trainer::run`] takes over the state, and [`Trainer::train`] is the loop. `step.rs` makes a step,
//! `checkpointing.rs` writes checkpoints.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_checkpoint::{SaveId, Store, profile::STEP_SPAN};
use baton_collectives::Collective;
use baton_job::{
    Generation, JobId, Rank,
    exit::Outcome,
    message::{Activity, RankReport, Restore, StateSource, StepReport},
    plan::virtual_block,
};
use baton_recipe::{
    JobSpec, Step,
    guard::{self, BatchMark, Diagnosis},
    progress::{Due, Extent, TrainingPlan},
    schedule::learning_rate,
    spec::is_recorded,
};
use tracing::trace_span;

use crate::{
    Controls, Error, JobInputs, Learner,
    activity::MonitoredCollective,
    agree::{self, RestoreContext, RunPosition},
    checkpointing::LAST_SAVE_PAUSES,
    controls::Votes,
    digest, evaluation,
    inputs::BatchFeed,
    learner,
    loader_watch::LoaderWatch,
    local_saves::{LOCAL_TIMEOUT, LocalFolder, LocalSaver},
    profile::{self, Profiling},
    saving::Saver,
    step::{StateValidity, StepContext, StepEnd, Stepper},
    step_metrics::{self, StepMetrics},
    throughput::Throughput,
};

/// The parts of a job that a rank needs.
pub struct TrainingJob {
    /// The job's identity.
    pub id: JobId,
    /// Its recipe.
    pub spec: Arc<JobSpec>,
    /// Where checkpoints go.
    pub store: Arc<Store>,
    /// Where local checkpoints go; absent if the recipe has no `checkpoint.local_dir`.
    pub local: Option<LocalFolder>,
    /// Its data.
    pub inputs: JobInputs,
}

/// A rank's membership in a generation.
pub struct GenerationContext<'a> {
    /// The generation.
    pub generation: Generation,
    /// Connection to the other ranks.
    pub collective: &'a mut dyn Collective,
    /// Where state comes from if no rank holds any.
    pub restore: &'a Restore,
    /// Requests from other threads.
    pub controls: &'a Controls,
    /// Receives reports for the coordinator.
    pub report: &'a mut dyn FnMut(RankReport),
}

/// Time between two votes of paused ranks on whether to resume.
const PAUSE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Result of one turn of the loop that should make a step.
enum StepResult {
    /// The update was made; the metrics are those of the newest update whose sums are known.
    Made(Option<StepMetrics>),
    /// No rank made the update.
    Abandoned(Votes),
}

/// Builds a learner in its state before the first step.
pub type BuildLearner<L> = Box<dyn Fn() -> Result<L, learner::Error> + Send>;

/// A rank's model and position; it is kept from one generation to the next.
pub struct Trainer<L: Learner> {
    pub(crate) job: TrainingJob,
    build: BuildLearner<L>,
    pub(crate) learner: L,
    pub(crate) position: RunPosition,
    /// Whether the learner contains the state of `position`.
    validity: StateValidity,
    pub(crate) saver: Saver,
    pub(crate) local: LocalSaver,
    /// Pauses before the last save is tried again, the last of them again and again.
    pub(crate) last_save_pauses: [Duration; 4],
    pub(crate) loaders: LoaderWatch,
    profiling: Profiling,
    /// The generation as which the last state is saved, if that is not the ranks' own.
    pub(crate) saves_as: Option<Generation>,
}

impl<L: Learner> Trainer<L> {
    /// A rank without a state.
    ///
    /// # Errors
    /// The learner cannot be built.
    pub fn new(job: TrainingJob, build: BuildLearner<L>) -> Result<Self, Error> {
        let learner = build()?;
        Ok(Self {
            job,
            build,
            learner,
            position: RunPosition::default(),
            validity: StateValidity::Untouched,
            saver: Saver::default(),
            local: LocalSaver::default(),
            last_save_pauses: LAST_SAVE_PAUSES,
            loaders: LoaderWatch::default(),
            profiling: Profiling::default(),
            saves_as: None,
        })
    }

    /// The last finished step, if this rank has the state after it.
    #[must_use]
    pub fn step(&self) -> Option<Step> {
        (self.validity == StateValidity::Complete).then_some(self.position.progress.step)
    }

    /// The model.
    pub fn learner(&mut self) -> &mut L {
        &mut self.learner
    }

    /// Runs one generation until the job is completed or drained.
    ///
    /// # Errors
    /// [`Error::Collective`] when the other ranks are lost: the state is kept for the next generation.
    /// Anything else ends this rank.
    pub fn run(&mut self, context: &mut GenerationContext<'_>) -> Result<Outcome, Error> {
        self.saver.abandon();
        self.saves_as = None;
        let activity = context.controls.activity();
        // The last generation may have ended during an evaluation.
        activity.evaluating(None);
        let mut monitored = MonitoredCollective { inner: &mut *context.collective, activity };
        let context = &mut GenerationContext {
            collective: &mut monitored,
            report: &mut *context.report,
            ..*context
        };
        self.take_state(context)?;
        activity.stepped(self.position.progress.step);
        let (rank, world) = (context.collective.rank(), context.collective.world_size());
        let block = virtual_block(self.job.spec.train.virtual_ranks, rank, world);
        let mut feed = self.train_feed(&block);
        let outcome = self.train(context, &mut Stepper::new(block), &mut feed);
        self.loaders.end(feed.stats());
        feed.detach();
        self.profiling.abandon(&mut self.learner);
        // A newer checkpoint means less lost work. The error to report is this one, not that of a failed save.
        match &outcome {
            Err(Error::Diverged(_)) => {
                activity.set(Activity::Saving);
                drop(self.finish_writing(context));
                let by = (context.generation, context.restore);
                drop(self.saver.remove_before_rollback(by, &self.job, context.collective));
            }
            // No other rank holds the state.
            Err(error) if world == 1 && !matches!(error, Error::Collective(_)) => {
                self.try_to_save(context);
            }
            _ => {}
        }
        outcome
    }

    fn train(
        &mut self,
        context: &mut GenerationContext<'_>,
        stepper: &mut Stepper<L>,
        feed: &mut BatchFeed,
    ) -> Result<Outcome, Error> {
        let (rank, activity) = (context.collective.rank(), context.controls.activity());
        let log_every = self.job.spec.train.log_every;
        let mut throughput = Throughput::start(feed.stats().waited);
        if self.position.progress.saved != self.position.durable_step() {
            // A save was lost with the last generation, or failed.
            self.save_when_possible(context);
        }
        // All ranks must read the votes after the same step, and add up the same spans; otherwise they would wait for
        // each other. A rank that was started later may have another recipe.
        let mine = (self.learner.runs_ahead(), self.job.spec.cluster.overlap);
        let ranks: Vec<(bool, bool)> = agree::gather(context.collective, &mine)?;
        let all_run_ahead = ranks.iter().all(|(ahead, _)| *ahead);
        let overlap = ranks.iter().all(|(ahead, overlap)| *overlap && !ahead);
        // The first step is read and reported at once: a user may be waiting for it.
        let mut ahead = false;
        // Vote before the first step too: ranks that join a new generation while the job is paused make no step.
        let mut agreed = Some(self.vote(context)?);
        loop {
            // Everything except a plain next step first needs the metrics of the last one.
            let is_next =
                self.plan().due(&self.position.progress) == Due::Train && !self.saves_locally();
            let must_act = agreed.is_some_and(|votes| votes.need_action(self.saver.is_active()));
            if (must_act || !is_next)
                && let Some((report, votes)) = self.finish_pending_step(context, stepper)?
            {
                report_step(report, log_every, context, &mut throughput);
                agreed = Some(agreed.unwrap_or_default().or(votes));
            }
            if self.saves_locally() {
                self.save_locally(context);
            }
            if let Some(mut votes) = agreed {
                if votes.pause && !votes.stop {
                    votes = self.stay_paused(context, votes)?;
                    // Time spent here is not training time.
                    activity.restart_step_timer();
                    throughput = Throughput::start(feed.stats().waited);
                }
                if votes.stop {
                    context.controls.agree_to_stop();
                    activity.set(Activity::Saving);
                    if rank == Rank(0) {
                        (context.report)(RankReport::Stopping {
                            step: self.position.progress.step,
                        });
                    }
                    self.ensure_saved(context)?;
                    if let Some(error) = stepper.failure().take() {
                        return Err(error);
                    }
                    let reason = context.controls.reason();
                    return self.done(Outcome::Drained { reason }, context);
                }
                self.drive_checkpoint(votes, context)?;
            }
            self.local.collect(Duration::ZERO, context.report);
            self.profiling.collect(context.report);
            agreed = match self.plan().due(&self.position.progress) {
                Due::Train => {
                    let samples = self.plan().next_batch(&self.position.progress);
                    match self.make_step(context, stepper, feed, (ahead, overlap))? {
                        StepResult::Made(metrics) => {
                            ahead = all_run_ahead;
                            let stats = feed.stats();
                            throughput.count(samples, stats.waited);
                            if let Some(report) = self.loaders.report(Instant::now(), &stats) {
                                (context.report)(RankReport::Loader(report));
                            }
                            metrics.map(|(report, votes)| {
                                report_step(report, log_every, context, &mut throughput);
                                votes
                            })
                        }
                        StepResult::Abandoned(votes) => {
                            // Some of the step's batches are used up; they are needed again.
                            let used = std::mem::replace(feed, self.train_feed(stepper.block()));
                            self.loaders.end(used.stats());
                            used.detach();
                            throughput = Throughput::start(feed.stats().waited);
                            Some(votes)
                        }
                    }
                }
                Due::SkipBatch => {
                    let plan = self.job.inputs.plan();
                    // One at a time: an epoch may end between two of them.
                    plan.skip_batch(&mut self.position.progress);
                    self.position_has_moved(context);
                    None
                }
                Due::Evaluate(extent) => {
                    let votes = self.evaluate(context, extent, stepper.failure())?;
                    // Time spent here is not training time.
                    activity.restart_step_timer();
                    throughput = Throughput::start(feed.stats().waited);
                    Some(votes)
                }
                Due::Save => {
                    activity.set(Activity::Saving);
                    self.save_when_due(context)?;
                    // Waiting for a slow store is not this rank's own work.
                    activity.restart_step_timer();
                    None
                }
                Due::Finish => {
                    if let Some(reason) = self.plan().ends_early(&self.position.progress)
                        && rank == Rank(0)
                    {
                        (context.report)(RankReport::EndsEarly { reason });
                    }
                    context.controls.agree_to_stop();
                    activity.set(Activity::Saving);
                    self.ensure_saved(context)?;
                    return self.done(Outcome::Completed, context);
                }
            };
        }
    }

    /// The current votes of all ranks together.
    fn vote(&mut self, context: &mut GenerationContext<'_>) -> Result<Votes, Error> {
        let mine = context.controls.vote(self.saver.is_busy());
        let all = agree::gather(context.collective, &mine)?;
        Ok(all.into_iter().fold(Votes::default(), Votes::or))
    }

    /// Makes no step while any rank votes for a pause; returns the votes that ended it. Saves continue meanwhile.
    fn stay_paused(
        &mut self,
        context: &mut GenerationContext<'_>,
        mut votes: Votes,
    ) -> Result<Votes, Error> {
        while votes.pause && !votes.stop {
            self.drive_checkpoint(votes, context)?;
            self.local.collect(Duration::ZERO, context.report);
            self.profiling.collect(context.report);
            context.controls.activity().set(Activity::Paused);
            context.controls.wait_while_paused(PAUSE_POLL_INTERVAL);
            votes = self.vote(context)?;
        }
        Ok(votes)
    }

    /// Whether the recipe asks for a local checkpoint of the current state.
    fn saves_locally(&self) -> bool {
        let (every, step) =
            (self.job.spec.checkpoint.local_every_steps, self.position.progress.step);
        every > 0 && step.0 > 0 && step.0.is_multiple_of(every)
    }

    /// Starts a local checkpoint of the current state, if the recipe asks for such ones.
    pub(crate) fn save_locally(&mut self, context: &mut GenerationContext<'_>) {
        let progress = &self.position.progress;
        let id = SaveId { generation: context.generation, step: progress.step };
        self.local.save(&mut self.learner, (progress, id), &self.job, context.report);
    }

    /// The micro-batches of this rank from the current position on.
    fn train_feed(&mut self, block: &Range<u32>) -> BatchFeed {
        self.loaders.begin();
        self.job.inputs.train_feed(&self.position.progress, block.clone())
    }

    fn plan(&self) -> &TrainingPlan {
        self.job.inputs.plan()
    }

    fn take_state(&mut self, context: &mut GenerationContext<'_>) -> Result<(), Error> {
        // A state that was computed before the last rollback is not valid.
        let is_current = self.position.rollbacks == context.restore.rollbacks.len();
        let is_complete = self.validity == StateValidity::Complete;
        let held = (is_complete && is_current).then(|| self.position.clone());
        if held.is_none() {
            // From here to the end of this function the memory may contain an incomplete state.
            if self.validity != StateValidity::Untouched {
                self.learner = (self.build)()?;
            }
            self.validity = StateValidity::Partial;
        }
        let began = Instant::now();
        if self.job.spec.checkpoint.has_local() {
            self.local.begin(&self.job, context.collective, context.report)?;
        }
        let (job, local) = (&self.job, &self.local);
        let restore = RestoreContext { job, restore: context.restore, local };
        let learner = (&mut self.learner, &self.build);
        let plan = agree::plan(context.collective, held.as_ref(), learner, restore)?;
        let step = plan.agreed.position.progress.step;
        let behind = held.as_ref().is_none_or(|held| held.progress.step != step);
        if behind {
            self.validity = StateValidity::Partial;
        }
        agree::carry_out(&plan.provider, context.collective, &mut self.learner)?;
        // Ranks at the same step take the agreed position too: a rank may have evaluated or saved after that step
        // before it detected the loss of the others, and all ranks must continue from the same position.
        self.position = plan.agreed.position;
        self.learner.set_pointwise(self.position.progress.pointwise);
        self.validity = StateValidity::Complete;
        let mut source = plan.agreed.source;
        if let StateSource::Checkpoint(restored) = &mut source {
            restored.seconds = began.elapsed().as_secs_f64();
        }
        if matches!(source, StateSource::Survivor { .. }) {
            // The rank that added it to the checkpoint may be lost.
            self.add_evaluation(context);
        }
        let progress = self.position.progress.clone();
        (context.report)(RankReport::Started { source, progress });
        Ok(())
    }

    /// Makes one update.
    fn make_step(
        &mut self,
        context: &mut GenerationContext<'_>,
        stepper: &mut Stepper<L>,
        feed: &mut BatchFeed,
        (ahead, overlap): (bool, bool),
    ) -> Result<StepResult, Error> {
        self.profiling.before_step(&mut self.learner, context.controls);
        let step = self.position.progress.step.0 + 1;
        let span = trace_span!(target: profile::TARGET, STEP_SPAN, step).entered();
        let next = step_metrics::before(&self.job, &self.position.progress);
        let Self { job, learner, position, validity, saver, .. } = self;
        let progress = &mut position.progress;
        let mut metrics = None;
        let made = stepper.step(
            &mut StepContext {
                spec: &job.spec,
                learner,
                validity,
                feed,
                controls: context.controls,
                is_writing: &mut || saver.is_busy(),
                ahead,
                overlap,
            },
            &mut *context.collective,
            next,
            &mut |pending, collective| {
                let read = step_metrics::read(pending, collective, &mut progress.watch, &job.spec);
                metrics = Some(read?);
                Ok(())
            },
        );
        match made {
            Ok(StepEnd::Made(_)) => {}
            Ok(StepEnd::Abandoned(votes)) => return Ok(StepResult::Abandoned(votes)),
            Err(error) => {
                if metrics.is_some_and(|(_, votes)| votes.save) {
                    // All ranks voted for this save and will not vote again: treat it like a save that was lost.
                    progress.saved = Some(progress.step);
                }
                return Err(error);
            }
        }
        job.inputs.plan().advance(progress);
        context.controls.activity().stepped(progress.step);
        drop(span);
        let at = (context.collective.rank(), progress.step);
        self.profiling.after_step(learner, at, &job.store);
        Ok(StepResult::Made(metrics))
    }

    /// Metrics of the last update, if its sums have not been read yet.
    fn finish_pending_step(
        &mut self,
        context: &mut GenerationContext<'_>,
        stepper: &mut Stepper<L>,
    ) -> Result<Option<StepMetrics>, Error> {
        let (watch, spec) = (&mut self.position.progress.watch, &self.job.spec);
        let mut metrics = None;
        stepper.finish_pending(
            &mut self.validity,
            &mut *context.collective,
            &mut |pending, collective| {
                metrics = Some(step_metrics::read(pending, collective, watch, spec)?);
                Ok(())
            },
        )?;
        Ok(metrics)
    }

    /// Makes an evaluation that is due. If a vote cuts it short, it stays due.
    fn evaluate(
        &mut self,
        context: &mut GenerationContext<'_>,
        extent: Extent,
        failure: &mut Option<Error>,
    ) -> Result<Votes, Error> {
        self.profiling.before_evaluation(&mut self.learner);
        let _span = trace_span!(target: profile::TARGET, "evaluate").entered();
        let (evaluated, votes) = self.evaluate_set(context, extent, failure)?;
        let Some(evaluation::Evaluated { raw, ema, texts }) = evaluated else {
            return Ok(votes);
        };
        let spec = &self.job.spec;
        let progress = &mut self.position.progress;
        if let Some(divergence) = guard::collapse(progress, &raw, ema.as_ref(), spec) {
            let lr = learning_rate(spec, self.job.inputs.plan(), progress);
            return Err(Error::Diverged(Box::new(Diagnosis {
                divergence,
                step: progress.step,
                batch: BatchMark { epoch: progress.epoch, cursor: progress.cursor },
                lr,
                loss: raw.get("loss"),
                gradient_norm: None,
                samples: Vec::new(),
                evaluated: progress.evaluated_at,
            })));
        }
        progress.record_evaluation(raw.clone(), ema.clone(), extent);
        let (step, epoch) = (progress.step, progress.epoch);
        self.add_evaluation(context);
        if context.collective.rank() == Rank(0) {
            let accuracy = raw;
            let report = RankReport::Evaluated { step, epoch, accuracy, ema, extent, texts };
            (context.report)(report);
        }
        Ok(votes)
    }

    fn done(
        &mut self,
        outcome: Outcome,
        context: &mut GenerationContext<'_>,
    ) -> Result<Outcome, Error> {
        match outcome {
            Outcome::Completed if self.job.spec.checkpoint.has_local() => {
                let whose = (&self.job, context.restore);
                self.local.remove(whose, context.collective, context.report);
            }
            _ => self.local.collect(LOCAL_TIMEOUT, context.report),
        }
        if matches!(outcome, Outcome::Completed) && context.collective.rank() == Rank(0) {
            self.saver.remove_at_end((context.generation, context.restore), &self.job);
        }
        self.saver.finish_removal(&self.job.store);
        self.profiling.finish(context.report);
        let digest = digest::of(&mut self.learner, &self.position.progress)?;
        (context.report)(RankReport::Done { outcome: outcome.clone(), digest });
        Ok(outcome)
    }
}

/// Sends the report of a step from rank 0, at most once per report interval, and every one that is recorded.
fn report_step(
    report: StepReport,
    log_every: u32,
    context: &mut GenerationContext<'_>,
    throughput: &mut Throughput,
) {
    let is_due = log_every > 0 && is_recorded(log_every, report.step);
    if context.collective.rank() == Rank(0)
        && let Some(report) = throughput.report(report, is_due)
    {
        (context.report)(RankReport::Stepped(report));
    }
}

#[cfg(test)]
mod tests;
