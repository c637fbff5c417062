//! Eviction order of a full cache: a pure function.
//!
//! Shards without a planned use are evicted first, the least recently used before the others; then shards whose next
//! use is furthest in the future (Belady's rule, which is possible because the future is known). Prefetching never
//! evicts a shard that is needed before the one it fetches.

use std::{cmp::Reverse, time::SystemTime};

/// One shard in the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Time of the last use or fetch by any process.
    pub(super) last_used: SystemTime,
    /// Position of the next use in this process' plan.
    pub(super) next_use: Option<usize>,
}

/// When the shard to be fetched is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Demand {
    /// A caller is waiting for it.
    Now,
    /// At this position of the plan.
    At(usize),
}

/// Indexes of the candidates that may be evicted, in the order of eviction.
pub(super) fn order(candidates: &[Candidate], demand: Demand) -> Vec<usize> {
    let may_evict = |candidate: &Candidate| match (demand, candidate.next_use) {
        (Demand::Now, _) | (Demand::At(_), None) => true,
        (Demand::At(position), Some(next)) => next > position,
    };
    let mut order: Vec<usize> =
        (0..candidates.len()).filter(|&index| may_evict(&candidates[index])).collect();
    order.sort_by_key(|&index| {
        let Candidate { last_used, next_use } = candidates[index];
        (next_use.is_some(), Reverse(next_use), last_used)
    });
    order
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn candidate(seconds: u64, next_use: Option<usize>) -> Candidate {
        let last_used = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        Candidate { last_used, next_use }
    }

    #[test]
    fn unneeded_shards_are_evicted_first_the_oldest_before_the_others() {
        let cached = [candidate(1, Some(0)), candidate(9, None), candidate(5, None)];

        assert_eq!(order(&cached, Demand::Now), [2, 1, 0]);
    }

    #[test]
    fn of_the_needed_shards_the_one_needed_last_is_evicted_first() {
        let cached = [candidate(1, Some(3)), candidate(2, Some(7)), candidate(3, Some(5))];

        assert_eq!(order(&cached, Demand::Now), [1, 2, 0]);
    }

    #[test]
    fn prefetching_keeps_shards_that_are_needed_earlier() {
        let cached = [candidate(1, Some(3)), candidate(2, Some(7)), candidate(3, Some(5))];

        assert_eq!(order(&cached, Demand::At(5)), [1]);
    }

    proptest! {
        #[test]
        fn a_waiting_caller_may_evict_everything(
            cached in prop::collection::vec((0_u64..9, prop::option::of(0_usize..9)), 0..9),
        ) {
            let cached: Vec<_> = cached.into_iter().map(|(at, next)| candidate(at, next)).collect();
            let mut order = order(&cached, Demand::Now);
            order.sort_unstable();
            prop_assert_eq!(order, (0..cached.len()).collect::<Vec<_>>());
        }
    }
}
