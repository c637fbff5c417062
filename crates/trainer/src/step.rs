//! One step: the gradients of this rank's virtual ranks, their sum over all ranks, the update.
//!
//! The training loop and `baton-worker bench` both use this code, so that a benchmark measures what a job does.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use baton_collectives::{Collective, tree::Fold};
use baton_job::{
    exit::Class,
    message::{Activity, StepReport},
};
use baton_recipe::{JobSpec, guard::BatchMark};
use tracing::{trace, trace_span};

use crate::{
    Controls, Error, Leaf, Learner, Update,
    controls::Votes,
    exchange::{GradientExchange, PartialSums},
    inputs::BatchFeed,
    learner::{self, Summand, VOTE},
    profile,
    suspects::Suspects,
};

/// Whether the learner's memory contains a state from which training can continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateValidity {
    /// Initial weights only; no update was made or loaded.
    Untouched,
    /// An incomplete state, or a state after an update that should not have been made; it cannot be used.
    Partial,
    /// The complete state after the last update.
    Complete,
}

/// The resources of a step.
pub struct StepContext<'a, L: Learner> {
    /// The recipe.
    pub spec: &'a JobSpec,
    /// The model.
    pub learner: &'a mut L,
    /// [`StateValidity::Partial`] from the beginning of an update to its end.
    pub validity: &'a mut StateValidity,
    /// The micro-batches.
    pub feed: &'a mut BatchFeed,
    /// Requests to vote on, and the activity to show.
    pub controls: &'a Controls,
    /// Whether this rank is still writing its shard of a checkpoint; called as late as the vote allows.
    pub is_writing: &'a mut dyn FnMut() -> bool,
    /// Whether the host queues work ahead of the device: [`Learner::runs_ahead`] is true on all ranks.
    pub ahead: bool,
    /// Whether gradients are added up beside the backward pass; the same on all ranks, and not with `ahead`.
    pub overlap: bool,
}

/// Description of a step before it is made.
#[derive(Debug, Default)]
pub struct NextStep {
    /// Inputs of the update other than the gradient.
    pub update: Update,
    /// 1 / samples of the global batch.
    pub scale: f32,
    /// Position of its batch.
    pub batch: BatchMark,
    /// The part of its report that is known before its sums are.
    pub report: StepReport,
}

/// A step whose sums have not been read yet.
pub struct PendingStep<L: Learner> {
    /// The sum of all leaves, measured.
    pub total: L::Leaf,
    /// Its description.
    pub step: NextStep,
    pub(crate) suspects: Suspects<L::Loss>,
}

/// Reads the sums of a step. An error means that the update must not be made, or must be discarded if it was made.
pub type ReadSums<'a, L> =
    dyn FnMut(&mut PendingStep<L>, &mut dyn Collective) -> Result<(), Error> + 'a;

/// Host time of two parts of a step. If the host runs ahead, this does not include the device's time.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// Adding gradients, including the wait for the other ranks.
    pub all_reduce: Duration,
    /// Norm, clipping, update and moving average.
    pub update: Duration,
}

/// Result of [`Stepper::step`].
#[derive(Clone, Copy, Debug)]
pub enum StepEnd {
    /// The update was made.
    Made(StepTimes),
    /// A rank's data did not arrive before a stop or a pause was requested: no rank made the update. These are the votes
    /// of all ranks.
    Abandoned(Votes),
}

/// Longest time that a rank waits for its data before it looks at the requests.
pub(crate) const DATA_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Makes the steps of one generation.
pub struct Stepper<L: Learner> {
    /// Virtual ranks of this rank.
    block: Range<u32>,
    /// Keeps the leaves: allocating 100 MB per virtual rank and step would cost milliseconds.
    fold: Fold<L::Leaf>,
    /// The last update, if its sums have not been read yet.
    pending: Option<PendingStep<L>>,
    /// Why this rank cannot continue, although the state is intact.
    failure: Option<Error>,
}

impl<L: Learner> Stepper<L> {
    /// A stepper for the virtual ranks in `block`.
    #[must_use]
    pub fn new(block: Range<u32>) -> Self {
        Self { fold: Fold::new(block.start), block, pending: None, failure: None }
    }

    /// Virtual ranks of this rank.
    pub(crate) fn block(&self) -> &Range<u32> {
        &self.block
    }

    /// Why this rank cannot continue, although the state is intact: all ranks save and stop. An evaluation that fails sets
    /// it too.
    pub(crate) fn failure(&mut self) -> &mut Option<Error> {
        &mut self.failure
    }

    /// Makes one update. `read` is called with the newest step whose sums are known.
    ///
    /// The state is not changed before the all-reduce has ended, so a rank that loses its peers in this call still has
    /// the state before the step. If the host runs ahead, the update is queued at once, and its sums are read when the
    /// next step's gradients are queued behind it: by then the sums are ready, and the device has work. Otherwise the
    /// sums are read first, and the update is made afterwards.
    ///
    /// While a rank waits for its data, it looks at the requests: a stop or a pause must not wait for a disk. If a sample
    /// cannot be used and the recipe does not skip it, the rank votes for a stop, so that all ranks save before the job
    /// ends.
    ///
    /// # Errors
    /// The other ranks are lost, the data cannot be read, the device failed, or `read` returned an error.
    pub fn step(
        &mut self,
        context: &mut StepContext<'_, L>,
        collective: &mut dyn Collective,
        next: NextStep,
        read: &mut ReadSums<'_, L>,
    ) -> Result<StepEnd, Error> {
        let mut attempt = Attempt { suspects: Suspects::none(), abandon: false };
        let last =
            self.block.end.checked_sub(1).ok_or(Error::Bug("a rank without virtual ranks"))?;
        for virtual_rank in self.block.start..last {
            let mut leaf = self.leaf(context, (&next, virtual_rank), &mut attempt, None)?;
            leaf.set_vote(Votes::default().to_tail())?;
            self.fold.push(leaf, |sum, leaf| sum.add(leaf))?;
        }
        let is_alone = collective.world_size() == 1;
        let mut exchange = GradientExchange {
            collective,
            virtual_ranks: context.spec.train.virtual_ranks,
            activity: context.controls.activity(),
        };
        let spans = match context.overlap && !is_alone {
            true => context.learner.spans().to_vec(),
            false => Vec::new(),
        };
        let mut reduce_began = Instant::now();
        let (leaf, totals) = if spans.is_empty() {
            let mut leaf = self.last_leaf(context, &next, &mut attempt, None)?;
            let whole = 0..leaf.value_count();
            let own = leaf.span(whole.clone())?;
            let sums = PartialSums::of(&self.fold, (last, own), whole)?;
            self.finish_pending(context.validity, exchange.collective, read)?;
            if !is_alone {
                // Wait here, so that a device fault or delay before this point is not attributed to the other ranks.
                leaf.tail()?;
            }
            reduce_began = Instant::now();
            let totals = exchange.after(vec![sums])?;
            (leaf, totals)
        } else {
            exchange.beside(
                |send| {
                    let mut spans = Spans { ranges: &spans, sent: 0, send };
                    self.last_leaf(context, &next, &mut attempt, Some(&mut spans))
                },
                || reduce_began = Instant::now(),
            )?
        };
        let update_began = Instant::now();

        let mut leaves = self.fold.finish().into_iter().map(|(_, leaf)| leaf).chain([leaf]);
        let mut total = leaves.next().ok_or(Error::Bug("a rank without virtual ranks"))?;
        leaves.for_each(|leaf| self.fold.recycle(leaf));
        for (start, span) in totals {
            total.put_back(start, span)?;
        }
        if !context.ahead {
            let votes = Votes::from_tail(&total.tail()?[VOTE]);
            if votes.abandon {
                self.fold.recycle(total);
                return Ok(StepEnd::Abandoned(votes));
            }
        }
        context.learner.measure(&mut total)?;
        let mut pending = PendingStep::<L> { total, step: next, suspects: attempt.suspects };
        if context.ahead {
            pending.total.start_tail_readback()?;
            update(context, &mut pending)?;
            self.pending = Some(pending);
        } else {
            read(&mut pending, exchange.collective)?;
            update(context, &mut pending)?;
            self.fold.recycle(pending.total);
        }
        let update = update_began.elapsed();
        Ok(StepEnd::Made(StepTimes { all_reduce: update_began - reduce_began, update }))
    }

    /// Reads the sums of the last update, if they have not been read.
    ///
    /// # Errors
    /// The device failed, or `read` returned an error.
    pub fn finish_pending(
        &mut self,
        validity: &mut StateValidity,
        collective: &mut dyn Collective,
        read: &mut ReadSums<'_, L>,
    ) -> Result<(), Error> {
        let Some(mut pending) = self.pending.take() else { return Ok(()) };
        // If `read` fails, the update should not have been made.
        *validity = StateValidity::Partial;
        read(&mut pending, collective)?;
        *validity = StateValidity::Complete;
        self.fold.recycle(pending.total);
        Ok(())
    }

    /// Memory for a leaf.
    fn take_leaf(&mut self, learner: &mut L) -> Result<L::Leaf, Error> {
        match self.fold.take_buffer() {
            Some(leaf) => Ok(leaf),
            None => Ok(learner.new_leaf()?),
        }
    }

    /// Contribution of the last virtual rank, with the votes of this rank. `spans`, if any, are passed on.
    fn last_leaf(
        &mut self,
        context: &mut StepContext<'_, L>,
        next: &NextStep,
        attempt: &mut Attempt<L::Loss>,
        mut spans: Option<&mut Spans<'_, L>>,
    ) -> Result<L::Leaf, Error> {
        let last = self.block.end - 1;
        let mut leaf = self.leaf(context, (next, last), attempt, spans.as_deref_mut())?;
        // One vote per rank is enough; a late vote includes the most recent requests.
        let votes = context.controls.vote((context.is_writing)());
        let stop = votes.stop || self.failure.is_some();
        leaf.set_vote(Votes { abandon: attempt.abandon, stop, ..votes }.to_tail())?;
        if let Some(spans) = spans {
            spans.send_rest(&self.fold, (last, &leaf))?;
        }
        Ok(leaf)
    }

    /// Contribution of one virtual rank: the sum over its micro-batches. If its data does not arrive before a stop or a
    /// pause is requested, or cannot be used, the step is abandoned: all ranks must add the same number of leaves, but the
    /// values of this one are never used.
    fn leaf(
        &mut self,
        context: &mut StepContext<'_, L>,
        at: (&NextStep, u32),
        attempt: &mut Attempt<L::Loss>,
        spans: Option<&mut Spans<'_, L>>,
    ) -> Result<L::Leaf, Error> {
        if !attempt.abandon {
            match self.computed_leaf(context, at, &mut attempt.suspects, spans) {
                // A learner that runs ahead cannot abandon a step.
                Err(error) if !context.ahead && error.failure().class == Class::BadInput => {
                    self.failure = Some(error);
                }
                Err(error) => return Err(error),
                Ok(Some(leaf)) => return Ok(leaf),
                Ok(None) => {}
            }
            attempt.abandon = true;
        }
        self.take_leaf(context.learner)
    }

    /// Contribution of one virtual rank. `None` if its data did not arrive before a stop or a pause was requested.
    ///
    /// A learner that runs ahead makes its update before the votes are known, so it must wait for its data.
    fn computed_leaf(
        &mut self,
        context: &mut StepContext<'_, L>,
        (next, virtual_rank): (&NextStep, u32),
        suspects: &mut Suspects<L::Loss>,
        mut spans: Option<&mut Spans<'_, L>>,
    ) -> Result<Option<L::Leaf>, Error> {
        let StepContext { learner, feed, controls, .. } = context;
        let activity = controls.activity();
        let mut sum: Option<L::Leaf> = None;
        for left in (0..context.spec.train.grad_accumulation).rev() {
            activity.set(Activity::Loading);
            let waiting = trace_span!(target: profile::TARGET, "wait for data").entered();
            while !context.ahead && !feed.wait_until_ready(DATA_POLL_INTERVAL) {
                if controls.interrupts_waiting() {
                    return Ok(None);
                }
            }
            let batch = feed.next()?.ok_or(Error::Bug("the loader ended"))?;
            drop(waiting);
            let BatchMark { epoch, cursor } = next.batch;
            trace!(target: "baton::samples", epoch = epoch.0, cursor, virtual_rank, samples = ?batch.samples);
            activity.set(Activity::Computing);
            let computing =
                trace_span!(target: profile::TARGET, "gradient", virtual_rank).entered();
            let mut leaf = self.take_leaf(learner)?;
            let loss = match spans.as_deref_mut().filter(|_| left == 0) {
                None => learner.gradient(&batch, next.scale, &mut leaf)?,
                Some(spans) => {
                    let (fold, sum) = (&self.fold, sum.as_ref());
                    let completed =
                        &mut |leaf: &L::Leaf| spans.send(fold, virtual_rank, (sum, leaf));
                    let loss =
                        learner.gradient_in_spans(&batch, next.scale, &mut leaf, completed)?;
                    // It may complete none early.
                    spans.send_others(fold, virtual_rank, (sum, &leaf))?;
                    loss
                }
            };
            drop(computing);
            suspects.note(&batch.samples, loss);
            feed.recycle(batch);
            // The copy runs while the device computes this batch.
            if context.ahead
                && let Some(next) = feed.peek()
            {
                learner.prefetch(next)?;
            }
            sum = Some(match sum {
                None => leaf,
                Some(mut whole) => {
                    let spans = spans.as_deref().filter(|_| left == 0);
                    let spans = spans.map_or(&[][..], |spans| spans.ranges);
                    for range in learner::rest(spans, leaf.value_count()) {
                        let mut span = whole.span(range.clone())?;
                        span.add(&leaf.span(range.clone())?)?;
                        whole.put_back(range.start, span)?;
                    }
                    self.fold.recycle(leaf);
                    whole
                }
            });
        }
        sum.map(Some).ok_or(Error::Bug("an update without micro-batches"))
    }
}

/// What is known of a step while it is made.
struct Attempt<T> {
    suspects: Suspects<T>,
    /// A part of this rank is missing.
    abandon: bool,
}

/// The spans of the last leaf, each of which is passed on as soon as it is complete.
struct Spans<'a, L: Learner> {
    ranges: &'a [Range<usize>],
    /// How many of them have been passed on.
    sent: usize,
    send: &'a mut dyn FnMut(PartialSums<<L::Leaf as Leaf>::LeafSpan>),
}

impl<L: Learner> Spans<'_, L> {
    /// Passes the next one on: that of `leaf`, added to that of the sum of the micro-batches before.
    fn send(
        &mut self,
        fold: &Fold<L::Leaf>,
        virtual_rank: u32,
        (sum, leaf): (Option<&L::Leaf>, &L::Leaf),
    ) -> Result<(), learner::Error> {
        let Some(range) = self.ranges.get(self.sent) else { return Ok(()) };
        self.sent += 1;
        let mut own = leaf.span(range.clone())?;
        if let Some(sum) = sum {
            let mut whole = sum.span(range.clone())?;
            whole.add(&own)?;
            own = whole;
        }
        let sums = PartialSums::of(fold, (virtual_rank, own), range.clone())?;
        (self.send)(sums);
        Ok(())
    }

    /// Passes on the spans that have not been, of a leaf that is complete.
    fn send_others(
        &mut self,
        fold: &Fold<L::Leaf>,
        virtual_rank: u32,
        leaf: (Option<&L::Leaf>, &L::Leaf),
    ) -> Result<(), learner::Error> {
        while self.sent < self.ranges.len() {
            self.send(fold, virtual_rank, leaf)?;
        }
        Ok(())
    }

    /// Passes on what is left of the last leaf, with its tail.
    fn send_rest(
        &mut self,
        fold: &Fold<L::Leaf>,
        (virtual_rank, leaf): (u32, &L::Leaf),
    ) -> Result<(), learner::Error> {
        // Of a step that this rank has abandoned.
        self.send_others(fold, virtual_rank, (None, leaf))?;
        for range in learner::rest(self.ranges, leaf.value_count()) {
            let own = leaf.span(range.clone())?;
            (self.send)(PartialSums::of(fold, (virtual_rank, own), range)?);
        }
        Ok(())
    }
}

/// Applies the update to the learner's state.
fn update<L: Learner>(
    context: &mut StepContext<'_, L>,
    pending: &mut PendingStep<L>,
) -> Result<(), Error> {
    let _span = trace_span!(target: profile::TARGET, "update").entered();
    *context.validity = StateValidity::Partial;
    context.learner.update(&mut pending.total, &pending.step.update)?;
    *context.validity = StateValidity::Complete;
    Ok(())
}
