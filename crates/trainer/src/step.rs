//! One step: the gradients of this rank's virtual ranks, their sum over all ranks, the update.
//!
//! The training loop and `baton-worker bench` both make their steps here, so that a benchmark measures what a job
//! does.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use baton_collectives::{Collective, Part, TreeNode, tree::Fold};
use baton_job::message::{Activity, StepNews};
use baton_recipe::{JobSpec, guard::BatchMark, spec::Determinism};

use crate::{
    Controls, Error, Leaf, Learner, Update, controls::Votes, inputs::Feed, suspects::Suspects,
};

/// Whether the learner's memory holds a state that training can go on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateValidity {
    /// Weights from the seed.
    Untouched,
    /// A part of a state, or an update that should not have been made; of no use.
    Partial,
    /// The state after the last update.
    Complete,
}

/// What a step works with.
pub struct StepContext<'a, L: Learner> {
    /// The recipe.
    pub spec: &'a JobSpec,
    /// The model.
    pub learner: &'a mut L,
    /// [`StateValidity::Partial`] from the beginning of an update to its end.
    pub validity: &'a mut StateValidity,
    /// The other ranks.
    pub collective: &'a mut dyn Collective,
    /// The micro-batches.
    pub feed: &'a mut Feed,
    /// What this rank votes for, and where it shows what it does.
    pub controls: &'a Controls,
    /// Whether this rank still writes its part of a checkpoint; asked as late as its vote allows.
    pub is_writing: &'a mut dyn FnMut() -> bool,
    /// Whether the host goes ahead of the device: [`Learner::runs_ahead`] on all ranks.
    pub ahead: bool,
}

/// A step before it is made.
#[derive(Debug, Default)]
pub struct NextStep {
    /// What the learner needs besides the gradient.
    pub update: Update,
    /// 1 / samples of the global batch.
    pub scale: f32,
    /// Its batch.
    pub batch: BatchMark,
    /// What is known of it before its sums.
    pub news: StepNews,
}

/// A step whose sums have not been read yet.
pub struct PendingStep<L: Learner> {
    /// The sum of all leaves, measured.
    pub total: L::Leaf,
    /// What it was before it was made.
    pub step: NextStep,
    pub(crate) suspects: Suspects<L::Loss>,
}

/// Reads the sums of a step. An error means that the update must not be made, or should not have been.
pub type ReadSums<'a, L> =
    dyn FnMut(&mut PendingStep<L>, &mut dyn Collective) -> Result<(), Error> + 'a;

/// Host time of two parts of a step. Where the host goes ahead, the device needs its own time.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// Adding up gradients, waiting for the other ranks included.
    pub all_reduce: Duration,
    /// Norm, clipping, update and average.
    pub update: Duration,
}

/// Makes the steps of one generation.
pub struct Stepper<L: Learner> {
    /// Virtual ranks of this rank.
    block: Range<u32>,
    /// It keeps the leaves: to allocate 100 MB per virtual rank and step would cost milliseconds.
    fold: Fold<L::Leaf>,
    /// The update that was made last, if its sums have not been read.
    pending: Option<PendingStep<L>>,
}

impl<L: Learner> Stepper<L> {
    /// For the virtual ranks in `block`.
    #[must_use]
    pub fn new(block: Range<u32>) -> Self {
        Self { fold: Fold::new(block.start), block, pending: None }
    }

    /// One update. `read` gets the newest step whose sums are known.
    ///
    /// Until its all-reduce has ended nothing of the state is touched, so a rank that loses its peers in here still
    /// holds the state before it. Where the host goes ahead, the update is queued then, and read when the next one's
    /// gradients are queued behind it: by that time its sums are there, and the device has work. Else it is read first
    /// and made afterwards.
    ///
    /// # Errors
    /// The other ranks are lost, the data cannot be read, the device failed, or `read` refuses.
    pub fn step(
        &mut self,
        context: &mut StepContext<'_, L>,
        next: NextStep,
        read: &mut ReadSums<'_, L>,
    ) -> Result<StepTimes, Error> {
        let mut suspects = Suspects::none();
        for virtual_rank in self.block.clone() {
            let mut leaf = self.leaf(context, next.scale, &mut suspects)?;
            // Once per rank is enough, and the later the sooner it is known.
            let vote = match virtual_rank + 1 == self.block.end {
                true => context.controls.vote((context.is_writing)()),
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
            // Until here the device's faults and its slowness are this rank's own, afterwards somebody else's.
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
        context.learner.measure(&mut total)?;
        let mut pending = PendingStep::<L> { total, step: next, suspects };
        if context.ahead {
            pending.total.send_for_tail()?;
            update(context, &mut pending)?;
            self.pending = Some(pending);
        } else {
            read(&mut pending, context.collective)?;
            update(context, &mut pending)?;
            self.fold.recycle(pending.total);
        }
        Ok(StepTimes { all_reduce: update_began - reduce_began, update: update_began.elapsed() })
    }

    /// Reads the sums of the update that was made last, if that is still to be done.
    ///
    /// # Errors
    /// The device failed, or `read` refuses.
    pub fn finish_pending(
        &mut self,
        validity: &mut StateValidity,
        collective: &mut dyn Collective,
        read: &mut ReadSums<'_, L>,
    ) -> Result<(), Error> {
        let Some(mut pending) = self.pending.take() else { return Ok(()) };
        // It should not have been made, if it went wrong.
        *validity = StateValidity::Partial;
        read(&mut pending, collective)?;
        *validity = StateValidity::Complete;
        self.fold.recycle(pending.total);
        Ok(())
    }

    /// The contribution of one virtual rank: the sum over its micro-batches.
    fn leaf(
        &mut self,
        context: &mut StepContext<'_, L>,
        scale: f32,
        suspects: &mut Suspects<L::Loss>,
    ) -> Result<L::Leaf, Error> {
        let StepContext { learner, feed, controls, .. } = context;
        let vitals = controls.vitals();
        let mut sum: Option<L::Leaf> = None;
        for _ in 0..context.spec.train.grad_accumulation {
            vitals.at(Activity::Loading);
            let batch = feed.next()?.ok_or(Error::Bug("the loader ended"))?;
            vitals.at(Activity::Computing);
            let mut leaf = match self.fold.take_buffer() {
                Some(leaf) => leaf,
                None => learner.new_leaf()?,
            };
            let loss = learner.gradient(&batch, scale, &mut leaf)?;
            suspects.note(&batch.samples, loss);
            feed.recycle(batch);
            // While the device computes this one.
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
        sum.ok_or(Error::Bug("an update without micro-batches"))
    }
}

/// Changes the state.
fn update<L: Learner>(
    context: &mut StepContext<'_, L>,
    pending: &mut PendingStep<L>,
) -> Result<(), Error> {
    *context.validity = StateValidity::Partial;
    context.learner.update(&mut pending.total, &pending.step.update)?;
    *context.validity = StateValidity::Complete;
    Ok(())
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
