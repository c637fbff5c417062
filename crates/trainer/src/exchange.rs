//! Adding up the gradient of a step over all ranks: range by range, beside the backward pass where the learner completes
//! its leaf in spans.
//!
//! A value of the total is the sum of that value of all leaves in the order of the fixed tree, whichever range it is
//! added up in: ranges change no bit.

use std::{ops::Range, sync::mpsc, thread};

use baton_checkpoint::profile::ALL_REDUCE_SPAN;
use baton_collectives::{Collective, Part, TreeNode, tree::Fold};
use tracing::trace_span;

use crate::{
    Error, Leaf, SharedActivity,
    learner::{self, Summand},
    profile,
};

/// This rank's partial sums of one range of the leaves.
pub(crate) struct PartialSums<S> {
    start: usize,
    sums: Vec<(TreeNode, S)>,
}

impl<S: Summand> PartialSums<S> {
    /// Those of `range`: of the sums in `fold`, and of the last virtual rank's leaf, which is not in it.
    pub(crate) fn of<F: Leaf<LeafSpan = S>>(
        fold: &Fold<F>,
        (virtual_rank, last): (u32, S),
        range: Range<usize>,
    ) -> Result<Self, learner::Error> {
        let start = range.start;
        let add = |left: &mut S, right: &S| left.add(right);
        let mut spans = Fold::new(0);
        for (node, sum) in fold.sums() {
            spans.push_node(*node, sum.span(range.clone())?, add)?;
        }
        spans.push_node(TreeNode::leaf(virtual_rank), last, add)?;
        Ok(Self { start, sums: spans.finish() })
    }

    /// Adds them up over all ranks; returns the total, and where it begins in a leaf.
    fn total(
        mut self,
        collective: &mut dyn Collective,
        virtual_ranks: u32,
    ) -> Result<(usize, S), Error> {
        let sums = self.sums.iter_mut();
        let mut parts: Vec<Part<'_>> =
            sums.map(|(node, sum)| Part { node: *node, buffer: sum.buffer() }).collect();
        let values = parts.first().map_or(0, |part| part.buffer.len());
        let _span = trace_span!(target: profile::TARGET, ALL_REDUCE_SPAN, values).entered();
        collective.all_reduce(virtual_ranks, &mut parts)?;
        let (_, total) = self.sums.into_iter().next().ok_or(Error::Bug("a rank without sums"))?;
        Ok((self.start, total))
    }
}

/// Where the gradient is added up.
pub(crate) struct GradientExchange<'a> {
    /// Connection to the other ranks.
    pub(crate) collective: &'a mut dyn Collective,
    /// Of the job.
    pub(crate) virtual_ranks: u32,
    /// Shows the time in which this rank only waits for the others.
    pub(crate) activity: &'a SharedActivity,
}

impl GradientExchange<'_> {
    /// Adds up `sums` over all ranks.
    pub(crate) fn after<S: Summand>(
        &mut self,
        sums: Vec<PartialSums<S>>,
    ) -> Result<Vec<(usize, S)>, Error> {
        let (collective, virtual_ranks) = (&mut *self.collective, self.virtual_ranks);
        self.activity.exchange(|| {
            sums.into_iter().map(|sums| sums.total(collective, virtual_ranks)).collect()
        })
    }

    /// Adds up what `compute` passes on, in that order, while it goes on computing; `computed` is called at its end. All
    /// ranks must pass the same ranges.
    pub(crate) fn beside<S: Summand, T>(
        &mut self,
        compute: impl FnOnce(&mut dyn FnMut(PartialSums<S>)) -> Result<T, Error>,
        computed: impl FnOnce(),
    ) -> Result<(T, Vec<(usize, S)>), Error> {
        let (collective, virtual_ranks) = (&mut *self.collective, self.virtual_ranks);
        let abort = collective.abort_handle();
        let (sender, sums) = mpsc::channel::<PartialSums<S>>();
        thread::scope(|scope| {
            let adding = thread::Builder::new().name("all-reduce".to_owned());
            let adding = adding.spawn_scoped(scope, move || {
                sums.into_iter().map(|sums| sums.total(collective, virtual_ranks)).collect()
            });
            let adding = adding.map_err(|error| {
                learner::Error::Device(format!("cannot start a thread for the all-reduce: {error}"))
            })?;
            // If nobody receives them, an all-reduce has failed; its error is returned below.
            let result = compute(&mut |sums| drop(sender.send(sums)));
            drop(sender);
            if result.is_err() {
                // The others wait for sums that do not come.
                abort.abort();
            }
            computed();
            let waiting = trace_span!(target: profile::TARGET, "wait for the all-reduce");
            let totals = waiting.in_scope(|| self.activity.exchange(|| adding.join()));
            let totals: Result<Vec<(usize, S)>, Error> =
                totals.map_err(|_| Error::Bug("the thread of the all-reduce panicked"))?;
            Ok((result?, totals?))
        })
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
mod tests {
    use std::{
        sync::{Mutex, mpsc::Receiver},
        time::Duration,
    };

    use baton_collectives::{AbortHandle, BufferMut};
    use baton_job::Rank;

    use super::*;
    use crate::{linear::HostLeaf, local};

    const LEN: usize = 6;

    /// The leaf of a virtual rank, with values whose sum depends on the order of additions.
    fn leaf(virtual_rank: u32) -> HostLeaf {
        let value = |index: usize| (1 + index) as f32 / (3 + virtual_rank) as f32;
        HostLeaf((0..LEN).map(value).collect())
    }

    /// The total of all leaves over `ranks` ranks, added up in these ranges.
    fn totals(
        ranks: u32,
        virtual_ranks: u32,
        ranges: &[Range<usize>],
        beside: bool,
    ) -> Vec<HostLeaf> {
        let member = |mut collective: local::LocalCollective| {
            let block = baton_job::plan::virtual_block(virtual_ranks, collective.rank(), ranks);
            let (mut fold, last) = (Fold::new(block.start), block.end - 1);
            for virtual_rank in block.start..last {
                fold.push(leaf(virtual_rank), |sum, leaf| sum.add(leaf)).unwrap();
            }
            let own = leaf(last);
            let activity = SharedActivity::default();
            let collective: &mut dyn Collective = &mut collective;
            let mut exchange = GradientExchange { collective, virtual_ranks, activity: &activity };
            let sums = |range: &Range<usize>| {
                let span = own.span(range.clone()).unwrap();
                PartialSums::of(&fold, (last, span), range.clone()).unwrap()
            };
            let found = match beside {
                false => exchange.after(ranges.iter().map(sums).collect()).unwrap(),
                true => {
                    let pass_on = |send: &mut dyn FnMut(PartialSums<HostLeaf>)| {
                        ranges.iter().map(sums).for_each(send);
                        Ok(())
                    };
                    exchange.beside(pass_on, || ()).unwrap().1
                }
            };
            let mut total = HostLeaf(vec![f32::NAN; LEN]);
            found.into_iter().for_each(|(start, span)| total.put_back(start, span).unwrap());
            total
        };
        thread::scope(|scope| {
            let group = local::group(ranks, Duration::from_secs(60));
            let threads: Vec<_> =
                group.into_iter().map(|each| scope.spawn(|| member(each))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranges_beside_the_computation_or_after_it_change_no_bit_of_the_total() {
        let whole = totals(1, 8, &[0..LEN], false).remove(0);
        let in_order = (1..8).fold(leaf(0), |mut sum, next| {
            sum.add(&leaf(next)).unwrap();
            sum
        });
        assert_ne!(whole, in_order, "the order of additions must matter");
        for ranks in [1, 2, 3, 5, 8] {
            for beside in [false, true] {
                for ranges in [&[0..LEN][..], &[4..5, 1..4, 0..1, 5..LEN]] {
                    for total in totals(ranks, 8, ranges, beside) {
                        assert_eq!(total, whole, "{ranks} ranks, {ranges:?}, beside: {beside}");
                    }
                }
            }
        }
    }

    /// A collective that says when an all-reduce begins; it fails if it is aborted, and ends when the test says so.
    struct Watched {
        begins: mpsc::Sender<usize>,
        ends: Mutex<Receiver<()>>,
        abort: AbortHandle,
    }

    impl Collective for Watched {
        fn rank(&self) -> Rank {
            Rank(0)
        }

        fn world_size(&self) -> u32 {
            2
        }

        fn all_reduce(
            &mut self,
            _virtual_ranks: u32,
            parts: &mut [Part<'_>],
        ) -> Result<(), baton_collectives::Error> {
            self.begins.send(parts[0].buffer.len()).unwrap();
            self.ends.lock().unwrap().recv().unwrap();
            self.abort.check("all_reduce")
        }

        fn broadcast(
            &mut self,
            _root: Rank,
            _buffer: BufferMut<'_>,
        ) -> Result<(), baton_collectives::Error> {
            unreachable!()
        }

        fn all_gather_bytes(
            &mut self,
            _mine: &[u8],
        ) -> Result<Vec<Vec<u8>>, baton_collectives::Error> {
            unreachable!()
        }

        fn abort_handle(&self) -> AbortHandle {
            self.abort.clone()
        }
    }

    fn watched() -> (Watched, Receiver<usize>, mpsc::Sender<()>) {
        let (begins, begun) = mpsc::channel();
        let (end, ends) = mpsc::channel();
        let abort = AbortHandle::new();
        let wake = Mutex::new(end.clone());
        // As a real one: an abort ends the operation.
        abort.on_abort(move || wake.lock().unwrap().send(()).unwrap_or_default());
        (Watched { begins, ends: Mutex::new(ends), abort }, begun, end)
    }

    fn one_sum(range: Range<usize>) -> PartialSums<HostLeaf> {
        let fold: Fold<HostLeaf> = Fold::new(0);
        PartialSums::of(&fold, (0, leaf(0).span(range.clone()).unwrap()), range).unwrap()
    }

    #[test]
    fn a_span_is_added_up_while_the_rest_is_computed() {
        let (mut watched, begun, end) = watched();
        let activity = SharedActivity::default();
        let mut exchange =
            GradientExchange { collective: &mut watched, virtual_ranks: 1, activity: &activity };
        let (is_computed, totals) = exchange
            .beside(
                |send| {
                    send(one_sum(0..4));
                    // It waits for the all-reduce to begin: without an overlap it would wait for ever.
                    assert_eq!(begun.recv().unwrap(), 4);
                    send(one_sum(4..6));
                    end.send(()).unwrap();
                    assert_eq!(begun.recv().unwrap(), 2);
                    end.send(()).unwrap();
                    Ok(true)
                },
                || (),
            )
            .unwrap();
        assert!(is_computed);
        assert_eq!(
            totals.iter().map(|(start, span)| (*start, span.0.len())).collect::<Vec<_>>(),
            [(0, 4), (4, 2)]
        );
    }

    #[test]
    fn a_computation_that_fails_ends_the_all_reduce_beside_it() {
        let (mut watched, begun, _end) = watched();
        let activity = SharedActivity::default();
        let mut exchange =
            GradientExchange { collective: &mut watched, virtual_ranks: 1, activity: &activity };
        let result = exchange.beside(
            |send| {
                send(one_sum(0..4));
                begun.recv().unwrap();
                Err::<(), _>(Error::Bug("the device failed"))
            },
            || (),
        );
        let Err(error) = result else { panic!("it failed") };
        assert!(matches!(error, Error::Bug("the device failed")), "{error}");
    }

    #[test]
    fn an_all_reduce_that_fails_is_the_error_and_the_computation_ends_first() {
        let (mut watched, _begun, _end) = watched();
        watched.abort.abort();
        let activity = SharedActivity::default();
        let mut exchange =
            GradientExchange { collective: &mut watched, virtual_ranks: 1, activity: &activity };
        let mut is_computed = false;
        let result = exchange.beside(
            |send| {
                send(one_sum(0..4));
                send(one_sum(4..6));
                is_computed = true;
                Ok(())
            },
            || (),
        );
        let Err(error) = result else { panic!("it was aborted") };
        assert!(matches!(error, Error::Collective(_)), "{error}");
        assert!(is_computed);
    }
}
