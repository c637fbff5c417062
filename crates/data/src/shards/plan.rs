//! The order in which shards will be used, and the part of it that fits into the cache.

use std::collections::{HashMap, HashSet};

/// Shards in the order of their use. Positions do not change when shards are removed from the plan.
#[derive(Debug, Default)]
pub(super) struct PrefetchPlan {
    /// Number of the plan; a replaced plan gets a new number.
    pub(super) version: u64,
    /// Position and shard of each remaining use, in order.
    rest: Vec<(usize, usize)>,
}

impl PrefetchPlan {
    pub(super) fn replace(&mut self, shards: impl Iterator<Item = usize>) {
        self.version += 1;
        self.rest = shards.enumerate().collect();
    }

    /// Removes the next use of a shard, which has been requested.
    pub(super) fn remove_next_use(&mut self, shard: usize) {
        if let Some(index) = self.rest.iter().position(|&(_, next)| next == shard) {
            self.rest.remove(index);
        }
    }

    /// Shard → position of its next use.
    pub(super) fn next_uses(&self) -> HashMap<usize, usize> {
        // In reverse, so that the first use of a shard replaces later ones.
        self.rest.iter().rev().map(|&(position, shard)| (shard, position)).collect()
    }

    /// The next different shards that together fit into `max_bytes`, as (position, shard).
    pub(super) fn window(
        &self,
        max_bytes: u64,
        bytes: impl Fn(usize) -> u64,
    ) -> Vec<(usize, usize)> {
        let (mut seen, mut used) = (HashSet::new(), 0_u64);
        let mut window = Vec::new();
        for &(position, shard) in &self.rest {
            if !seen.insert(shard) {
                continue;
            }
            used = used.saturating_add(bytes(shard));
            if used > max_bytes {
                break;
            }
            window.push((position, shard));
        }
        window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(shards: &[usize]) -> PrefetchPlan {
        let mut plan = PrefetchPlan::default();
        plan.replace(shards.iter().copied());
        plan
    }

    #[test]
    fn the_window_contains_the_shards_that_fit_each_once() {
        let plan = plan(&[4, 2, 4, 7, 1]);

        assert_eq!(plan.window(30, |_| 10), [(0, 4), (1, 2), (3, 7)]);
        assert_eq!(plan.window(9, |_| 10), []);
    }

    #[test]
    fn removing_a_use_leaves_the_following_one() {
        let mut plan = plan(&[4, 2, 4]);
        assert_eq!(plan.next_uses()[&4], 0);

        plan.remove_next_use(4);
        assert_eq!(plan.next_uses()[&4], 2);

        plan.remove_next_use(4);
        plan.remove_next_use(4);
        assert_eq!(plan.window(99, |_| 10), [(1, 2)]);
    }
}
