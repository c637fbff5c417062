//! The step loop: one generation of training, generic over what learns.
//!
//! Everything that all ranks must do alike — evaluate, save, stop — follows either from the replicated
//! [`Progress`](baton_recipe::progress::Progress) through [`Agenda::due`] or from votes that travel in the gradient's
//! all-reduce. No rank ever decides alone.
//!
//! [`Trainer::run`] takes over the state, and [`Trainer::train`] is the loop. A step is made in `step.rs`, checkpoints
//! are written in `checkpointing.rs`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_checkpoint::Store;
use baton_collectives::Collective;
use baton_job::{
    Generation, JobId, Rank,
    exit::Outcome,
    message::{Activity, RankNews, Restore, StateSource, StepNews},
    plan::virtual_block,
};
use baton_recipe::{
    JobSpec, Step,
    guard::{self, BatchMark, Diagnosis},
    progress::{Agenda, Due, Extent},
    schedule::learning_rate,
    task,
};

use crate::{
    Controls, Error, Inputs, Learner,
    agree::{self, Basis, Position},
    controls::Votes,
    digest, evaluation,
    inputs::Feed,
    learner,
    loader_watch::LoaderWatch,
    saving::Saver,
    step::{StateValidity, StepContext, Stepper},
    step_metrics::{self, StepMetrics},
    throughput::Throughput,
    vitals::Watched,
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

/// A rank's part in a generation.
pub struct GenerationContext<'a> {
    /// The generation.
    pub generation: Generation,
    /// The way to the other ranks.
    pub collective: &'a mut dyn Collective,
    /// Where state comes from if no rank holds any.
    pub restore: &'a Restore,
    /// Requests from outside.
    pub controls: &'a Controls,
    /// Receives what the coordinator should know.
    pub report: &'a mut dyn FnMut(RankNews),
}

/// Between two looks of paused ranks at what is wanted of them.
const PAUSE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Makes a learner as it is before the first step.
pub type Build<L> = Box<dyn Fn() -> Result<L, learner::Error> + Send>;

/// A rank's model and position; it outlives generations.
pub struct Trainer<L: Learner> {
    pub(crate) job: Job,
    build: Build<L>,
    pub(crate) learner: L,
    pub(crate) position: Position,
    /// Whether the learner holds the state after `position`.
    validity: StateValidity,
    pub(crate) saver: Saver,
    loaders: LoaderWatch,
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
            validity: StateValidity::Untouched,
            saver: Saver::default(),
            loaders: LoaderWatch::default(),
        })
    }

    /// The last finished step, if this rank holds the state after it.
    #[must_use]
    pub fn step(&self) -> Option<Step> {
        (self.validity == StateValidity::Complete).then_some(self.position.progress.step)
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
    pub fn run(&mut self, context: &mut GenerationContext<'_>) -> Result<Outcome, Error> {
        self.saver.abandon();
        let vitals = context.controls.vitals();
        let mut watched = Watched { inner: &mut *context.collective, vitals };
        let context = &mut GenerationContext {
            collective: &mut watched,
            report: &mut *context.report,
            ..*context
        };
        self.take_state(context)?;
        vitals.stepped(self.position.progress.step);
        let (rank, world) = (context.collective.rank(), context.collective.world_size());
        let block = virtual_block(self.job.spec.train.virtual_ranks, rank, world);
        let mut feed = self.job.inputs.train_feed(&self.position.progress, block.clone());
        self.loaders.begin();
        let outcome = self.train(context, &mut Stepper::new(block), &mut feed);
        self.loaders.end(feed.stats());
        if let Err(Error::Diverged(_)) = outcome {
            // The better the newest checkpoint, the less is lost; that training went wrong comes first.
            let _ = self.finish_writing(context);
        }
        outcome
    }

    fn train(
        &mut self,
        context: &mut GenerationContext<'_>,
        stepper: &mut Stepper<L>,
        feed: &mut Feed,
    ) -> Result<Outcome, Error> {
        let (rank, vitals) = (context.collective.rank(), context.controls.vitals());
        let mut throughput = Throughput::start(feed.stats().waited);
        if self.position.progress.saved != self.position.durable {
            // One was lost with the last generation, or failed.
            self.save_when_possible(context);
        }
        // All ranks learn what they agreed on after the same step, or they would wait for each other.
        let ahead = agree::gather(context.collective, &self.learner.runs_ahead())?;
        let all_run_ahead = ahead.into_iter().all(|ahead| ahead);
        // The first step is reported as soon as it is made: somebody may wait for it.
        let mut ahead = false;
        // Before the first step too: who meets the others anew while the job is paused makes none.
        let mut agreed = Some(self.vote(context)?);
        loop {
            // Whatever is not just the next step has to know first what the last one came to.
            let is_next = self.agenda().due(&self.position.progress) == Due::Train;
            let is_asked = agreed.is_some_and(|votes| votes.ask(self.saver.is_at_work()));
            if (is_asked || !is_next)
                && let Some((news, votes)) = self.finish_pending_step(context, stepper)?
            {
                report_step(news, context, &mut throughput);
                agreed = Some(agreed.unwrap_or_default().or(votes));
            }
            if let Some(mut votes) = agreed {
                if votes.pause && !votes.stop {
                    votes = self.stay_paused(context, votes)?;
                    // Time spent here is no part of the training rate.
                    vitals.resume();
                    throughput = Throughput::start(feed.stats().waited);
                }
                if votes.stop {
                    vitals.at(Activity::Saving);
                    if rank == Rank(0) {
                        (context.report)(RankNews::Stopping { step: self.position.progress.step });
                    }
                    self.ensure_saved(context)?;
                    let reason = context.controls.reason();
                    return self.done(Outcome::Drained { reason }, context);
                }
                self.drive_checkpoint(votes, context)?;
            }
            agreed = match self.agenda().due(&self.position.progress) {
                Due::Train => {
                    let samples = self.agenda().next_batch(&self.position.progress);
                    let metrics = self.make_step(context, stepper, feed, ahead)?;
                    ahead = all_run_ahead;
                    let stats = feed.stats();
                    throughput.count(samples, stats.waited);
                    if let Some(news) = self.loaders.news(Instant::now(), &stats) {
                        (context.report)(RankNews::Loader(news));
                    }
                    metrics.map(|(news, votes)| {
                        report_step(news, context, &mut throughput);
                        votes
                    })
                }
                Due::PassOver => {
                    let agenda = self.job.inputs.agenda();
                    agenda.pass_over_marked(&mut self.position.progress);
                    None
                }
                Due::Evaluate(extent) => {
                    let votes = self.evaluate(context, extent)?;
                    // Time spent here is no part of the training rate.
                    vitals.resume();
                    throughput = Throughput::start(feed.stats().waited);
                    Some(votes)
                }
                Due::Save => {
                    vitals.at(Activity::Saving);
                    self.save_when_due(context)?;
                    None
                }
                Due::Finish => {
                    if let Some(reason) = self.agenda().ends_early(&self.position.progress)
                        && rank == Rank(0)
                    {
                        (context.report)(RankNews::EndsEarly { reason });
                    }
                    vitals.at(Activity::Saving);
                    self.ensure_saved(context)?;
                    return self.done(Outcome::Completed, context);
                }
            };
        }
    }

    /// What all ranks together want now.
    fn vote(&mut self, context: &mut GenerationContext<'_>) -> Result<Votes, Error> {
        let mine = context.controls.vote(self.saver.is_busy());
        let all = agree::gather(context.collective, &mine)?;
        Ok(all.into_iter().fold(Votes::default(), Votes::or))
    }

    /// Makes no step for as long as any rank is asked to; what all want then. Saves go on meanwhile.
    fn stay_paused(
        &mut self,
        context: &mut GenerationContext<'_>,
        mut votes: Votes,
    ) -> Result<Votes, Error> {
        while votes.pause && !votes.stop {
            self.drive_checkpoint(votes, context)?;
            context.controls.vitals().at(Activity::Paused);
            context.controls.stand_still(PAUSE_POLL_INTERVAL);
            votes = self.vote(context)?;
        }
        Ok(votes)
    }

    fn agenda(&self) -> &Agenda {
        self.job.inputs.agenda()
    }

    fn take_state(&mut self, context: &mut GenerationContext<'_>) -> Result<(), Error> {
        // What was computed before training went back counts no more.
        let counts = self.position.rollbacks == context.restore.rollbacks.len();
        let is_complete = self.validity == StateValidity::Complete;
        let held = (is_complete && counts).then(|| self.position.clone());
        if held.is_none() {
            // From here to the end of this function the memory may hold a part of a state.
            if self.validity != StateValidity::Untouched {
                self.learner = (self.build)()?;
            }
            self.validity = StateValidity::Partial;
        }
        let began = Instant::now();
        let basis = Basis {
            spec: &self.job.spec,
            agenda: self.job.inputs.agenda(),
            store: &self.job.store,
            restore: context.restore,
        };
        let plan = agree::plan(context.collective, held.as_ref(), &mut self.learner, basis)?;
        let step = plan.agreed.position.progress.step;
        let behind = held.as_ref().is_none_or(|held| held.progress.step != step);
        if behind {
            self.validity = StateValidity::Partial;
        }
        agree::carry_out(&plan.source, context.collective, &mut self.learner)?;
        // Also by those who hold the same step: one may have evaluated or saved after it when the others
        // were lost before they knew, and all must go on with the same thing.
        self.position = plan.agreed.position;
        self.validity = StateValidity::Complete;
        let mut source = plan.agreed.source;
        if let StateSource::Checkpoint(restored) = &mut source {
            restored.seconds = began.elapsed().as_secs_f64();
        }
        let progress = self.position.progress.clone();
        (context.report)(RankNews::Started { source, progress });
        Ok(())
    }

    /// One update, and what the newest one came to whose sums are known.
    fn make_step(
        &mut self,
        context: &mut GenerationContext<'_>,
        stepper: &mut Stepper<L>,
        feed: &mut Feed,
        ahead: bool,
    ) -> Result<Option<StepMetrics>, Error> {
        let next = step_metrics::before(&self.job, &self.position.progress);
        let Self { job, learner, position, validity, saver, .. } = self;
        let progress = &mut position.progress;
        let mut metrics = None;
        let made = stepper.step(
            &mut StepContext {
                spec: &job.spec,
                learner,
                validity,
                collective: &mut *context.collective,
                feed,
                controls: context.controls,
                is_writing: &mut || saver.is_busy(),
                ahead,
            },
            next,
            &mut |pending, collective| {
                let read = step_metrics::read(pending, collective, &mut progress.watch, &job.spec);
                metrics = Some(read?);
                Ok(())
            },
        );
        if let Err(error) = made {
            if metrics.is_some_and(|(_, votes)| votes.save) {
                // All wanted it, and will not again: as if it were lost while it was written.
                progress.saved = Some(progress.step);
            }
            return Err(error);
        }
        job.inputs.agenda().advance(progress);
        context.controls.vitals().stepped(progress.step);
        Ok(metrics)
    }

    /// What the update came to whose sums have not been read yet, if there is one.
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

    fn evaluate(
        &mut self,
        context: &mut GenerationContext<'_>,
        extent: Extent,
    ) -> Result<Votes, Error> {
        let saver = &mut self.saver;
        let vote = || context.controls.vote(saver.is_busy());
        let evaluation::Evaluated { raw, ema, votes } = evaluation::evaluate(
            &mut self.learner,
            &self.job.inputs,
            extent,
            context.collective,
            &mut self.loaders,
            vote,
            context.controls.vitals(),
        )?;
        let spec = &self.job.spec;
        let progress = &mut self.position.progress;
        let collapse = || {
            let (name, score) = raw.score()?;
            let best = progress.best.as_ref()?.1.get(name)?;
            guard::collapse(task::find(name)?, best, score, &spec.guard)
        };
        if let Some(divergence) = collapse() {
            let lr = learning_rate(spec, self.job.inputs.agenda(), progress);
            return Err(Error::Diverged(Box::new(Diagnosis {
                divergence,
                step: progress.step,
                batch: BatchMark { epoch: progress.epoch, cursor: progress.cursor },
                lr,
                loss: raw.get("loss"),
                gradient_norm: None,
                samples: Vec::new(),
            })));
        }
        progress.note_evaluation(raw.clone(), ema.clone(), extent);
        if context.collective.rank() == Rank(0) {
            let (step, epoch) = (progress.step, progress.epoch);
            (context.report)(RankNews::Evaluated { step, epoch, accuracy: raw, ema, extent });
        }
        Ok(votes)
    }

    fn done(
        &mut self,
        outcome: Outcome,
        context: &mut GenerationContext<'_>,
    ) -> Result<Outcome, Error> {
        let digest = digest::of(&mut self.learner, &self.position.progress)?;
        (context.report)(RankNews::Done { outcome: outcome.clone(), digest });
        Ok(outcome)
    }
}

/// Rank 0 reports now and again what a step came to.
fn report_step(news: StepNews, context: &mut GenerationContext<'_>, throughput: &mut Throughput) {
    if context.collective.rank() == Rank(0)
        && let Some(news) = throughput.report(news)
    {
        (context.report)(RankNews::Stepped(news));
    }
}

#[cfg(test)]
mod tests;
