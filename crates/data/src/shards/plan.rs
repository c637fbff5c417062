//! What will be needed, in which order, and how much of that fits.

use std::collections::{HashMap, HashSet};

/// Shards in the order of need. Positions keep their meaning while needs are met.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Which plan this is: told anew, it is another.
    pub(super) edition: u64,
    /// Position and shard, what is needed next first.
    rest: Vec<(usize, usize)>,
}

impl Plan {
    pub(super) fn replace(&mut self, shards: impl Iterator<Item = usize>) {
        self.edition += 1;
        self.rest = shards.enumerate().collect();
    }

    /// The shard was asked for: its next need is the one after.
    pub(super) fn met(&mut self, shard: usize) {
        if let Some(index) = self.rest.iter().position(|&(_, next)| next == shard) {
            self.rest.remove(index);
        }
    }

    /// Shard → position of its next need.
    pub(super) fn next_needs(&self) -> HashMap<usize, usize> {
        // Backwards, so that the first need of a shard is the one that stays.
        self.rest.iter().rev().map(|&(position, shard)| (shard, position)).collect()
    }

    /// As many different shards as fit into `bound` bytes together, from now on, with positions.
    pub(super) fn window(&self, bound: u64, bytes: impl Fn(usize) -> u64) -> Vec<(usize, usize)> {
        let (mut seen, mut used) = (HashSet::new(), 0_u64);
        let mut window = Vec::new();
        for &(position, shard) in &self.rest {
            if !seen.insert(shard) {
                continue;
            }
            used = used.saturating_add(bytes(shard));
            if used > bound {
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

    fn plan(shards: &[usize]) -> Plan {
        let mut plan = Plan::default();
        plan.replace(shards.iter().copied());
        plan
    }

    #[test]
    fn the_window_is_what_fits_each_shard_once() {
        let plan = plan(&[4, 2, 4, 7, 1]);

        assert_eq!(plan.window(30, |_| 10), [(0, 4), (1, 2), (3, 7)]);
        assert_eq!(plan.window(9, |_| 10), []);
    }

    #[test]
    fn a_need_that_is_met_leaves_the_next() {
        let mut plan = plan(&[4, 2, 4]);
        assert_eq!(plan.next_needs()[&4], 0);

        plan.met(4);
        assert_eq!(plan.next_needs()[&4], 2);

        plan.met(4);
        plan.met(4);
        assert_eq!(plan.window(99, |_| 10), [(1, 2)]);
    }
}
