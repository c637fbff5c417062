//! Which shards a full cache gives up first: a pure decision.
//!
//! What nobody plans to read goes first, the least recently needed before the rest; then what is
//! needed furthest from now (Belady's rule, which only a known future allows). Fetching ahead never
//! gives up what is needed before that which it fetches.

use std::{cmp::Reverse, time::SystemTime};

/// One shard in the cache, as seen by this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// When a process last used it, or fetched it.
    pub(super) last_needed: SystemTime,
    /// Its position in what this process will need, if any.
    pub(super) next_need: Option<usize>,
}

/// For what room is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// A caller waits.
    Now,
    /// It will be needed, at this position of the plan.
    At(usize),
}

/// The candidates that may be given up, by index, the first to go first.
pub(super) fn order(candidates: &[Candidate], need: Need) -> Vec<usize> {
    let may_go = |candidate: &Candidate| match (need, candidate.next_need) {
        (Need::Now, _) | (Need::At(_), None) => true,
        (Need::At(position), Some(next)) => next > position,
    };
    let mut order: Vec<usize> =
        (0..candidates.len()).filter(|&index| may_go(&candidates[index])).collect();
    order.sort_by_key(|&index| {
        let Candidate { last_needed, next_need } = candidates[index];
        (next_need.is_some(), Reverse(next_need), last_needed)
    });
    order
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn candidate(seconds: u64, next_need: Option<usize>) -> Candidate {
        let last_needed = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        Candidate { last_needed, next_need }
    }

    #[test]
    fn what_nobody_needs_goes_first_and_the_oldest_before_the_rest() {
        let cached = [candidate(1, Some(0)), candidate(9, None), candidate(5, None)];

        assert_eq!(order(&cached, Need::Now), [2, 1, 0]);
    }

    #[test]
    fn of_what_is_needed_the_furthest_goes_first() {
        let cached = [candidate(1, Some(3)), candidate(2, Some(7)), candidate(3, Some(5))];

        assert_eq!(order(&cached, Need::Now), [1, 2, 0]);
    }

    #[test]
    fn fetching_ahead_keeps_what_is_needed_before() {
        let cached = [candidate(1, Some(3)), candidate(2, Some(7)), candidate(3, Some(5))];

        assert_eq!(order(&cached, Need::At(5)), [1]);
    }

    proptest! {
        #[test]
        fn a_waiting_caller_may_have_everything(
            cached in prop::collection::vec((0_u64..9, prop::option::of(0_usize..9)), 0..9),
        ) {
            let cached: Vec<_> = cached.into_iter().map(|(at, next)| candidate(at, next)).collect();
            let mut order = order(&cached, Need::Now);
            order.sort_unstable();
            prop_assert_eq!(order, (0..cached.len()).collect::<Vec<_>>());
        }
    }
}
