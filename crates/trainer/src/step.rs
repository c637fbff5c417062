//! One step: the gradients of this rank's virtual ranks, their sum over all ranks, the update.
//!
//! The training loop and `baton-worker bench` both use this code, so that a benchmark measures what a job does.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use baton_collectives::{Collective, Part, TreeNode, tree::Fold};
use baton_job::{
    exit::Class,
    message::{Activity, StepReport},
};
use baton_recipe::{JobSpec, guard::BatchMark, spec::Determinism};
use tracing::trace;

use crate::{
    Controls, Error, Leaf, Learner, Update, controls::Votes, inputs::BatchFeed, learner::VOTE,
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
    /// Connection to the other ranks.
    pub collective: &'a mut dyn Collective,
    /// The micro-batches.
    pub feed: &'a mut BatchFeed,
    /// Requests to vote on, and the activity to show.
    pub controls: &'a Controls,
    /// Whether this rank is still writing its shard of a checkpoint; called as late as the vote allows.
    pub is_writing: &'a mut dyn FnMut() -> bool,
    /// Whether the host queues work ahead of the device: [`Learner::runs_ahead`] is true on all ranks.
    pub ahead: bool,
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
        next: NextStep,
        read: &mut ReadSums<'_, L>,
    ) -> Result<StepEnd, Error> {
        let mut suspects = Suspects::none();
        let mut abandon = false;
        for virtual_rank in self.block.clone() {
            let leaf = match abandon {
                true => None,
                false => match self.leaf(context, (&next, virtual_rank), &mut suspects) {
                    // A learner that runs ahead cannot abandon a step.
                    Err(error) if !context.ahead && error.failure().class == Class::BadInput => {
                        self.failure = Some(error);
                        None
                    }
                    leaf => leaf?,
                },
            };
            abandon = leaf.is_none();
            let mut leaf = match leaf {
                Some(leaf) => leaf,
                // All ranks must add the same number of leaves; the values of this one are never used.
                None => self.take_leaf(context.learner)?,
            };
            // One vote per rank is enough; a late vote includes the most recent requests.
            let vote = match virtual_rank + 1 == self.block.end {
                true => {
                    let votes = context.controls.vote((context.is_writing)());
                    Votes { abandon, stop: votes.stop || self.failure.is_some(), ..votes }
                }
                false => Votes::default(),
            };
            leaf.set_vote(vote.to_tail())?;
            self.fold.push(leaf, |sum, leaf| sum.add(leaf))?;
        }
        let mut sums = self.fold.finish();
        if context.spec.precision.determinism == Determinism::Fast {
            add_up(&mut sums, &mut self.fold)?;
        }
        self.finish_pending(context.validity, context.collective, read)?;
        if context.collective.world_size() > 1
            && let Some((_, leaf)) = sums.last_mut()
        {
            // Wait here, so that a device fault or delay before this point is not attributed to the other ranks.
            leaf.tail()?;
        }
        let reduce_began = Instant::now();
        let mut parts: Vec<Part<'_>> = sums
            .iter_mut()
            .map(|(node, leaf)| Part { node: *node, buffer: leaf.buffer() })
            .collect();
        context.collective.all_reduce(context.spec.train.virtual_ranks, &mut parts)?;
        let update_began = Instant::now();

        let mut sums = sums.into_iter().map(|(_, leaf)| leaf);
        let mut total = sums.next().ok_or(Error::Bug("a rank without virtual ranks"))?;
        sums.for_each(|leaf| self.fold.recycle(leaf));
        if !context.ahead {
            let votes = Votes::from_tail(&total.tail()?[VOTE]);
            if votes.abandon {
                self.fold.recycle(total);
                return Ok(StepEnd::Abandoned(votes));
            }
        }
        context.learner.measure(&mut total)?;
        let mut pending = PendingStep::<L> { total, step: next, suspects };
        if context.ahead {
            pending.total.start_tail_readback()?;
            update(context, &mut pending)?;
            self.pending = Some(pending);
        } else {
            read(&mut pending, context.collective)?;
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

    /// Contribution of one virtual rank: the sum over its micro-batches. `None` if its data did not arrive before a
    /// stop or a pause was requested.
    ///
    /// A learner that runs ahead makes its update before the votes are known, so it must wait for its data.
    fn leaf(
        &mut self,
        context: &mut StepContext<'_, L>,
        (next, virtual_rank): (&NextStep, u32),
        suspects: &mut Suspects<L::Loss>,
    ) -> Result<Option<L::Leaf>, Error> {
        let StepContext { learner, feed, controls, .. } = context;
        let activity = controls.activity();
        let mut sum: Option<L::Leaf> = None;
        for _ in 0..context.spec.train.grad_accumulation {
            activity.set(Activity::Loading);
            while !context.ahead && !feed.wait_until_ready(DATA_POLL_INTERVAL) {
                if controls.interrupts_waiting() {
                    return Ok(None);
                }
            }
            let batch = feed.next()?.ok_or(Error::Bug("the loader ended"))?;
            let BatchMark { epoch, cursor } = next.batch;
            trace!(target: "baton::samples", epoch = epoch.0, cursor, virtual_rank, samples = ?batch.samples);
            activity.set(Activity::Computing);
            let mut leaf = self.take_leaf(learner)?;
            let loss = learner.gradient(&batch, next.scale, &mut leaf)?;
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
                    whole.add(&leaf)?;
                    self.fold.recycle(leaf);
                    whole
                }
            });
        }
        sum.map(Some).ok_or(Error::Bug("an update without micro-batches"))
    }
}

/// Applies the update to the learner's state.
fn update<L: Learner>(
    context: &mut StepContext<'_, L>,
    pending: &mut PendingStep<L>,
) -> Result<(), Error> {
    *context.validity = StateValidity::Partial;
    context.learner.update(&mut pending.total, &pending.step.update)?;
    *context.validity = StateValidity::Complete;
    Ok(())
}

/// Replaces `sums` by their total, for a collective that adds in its own order.
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
