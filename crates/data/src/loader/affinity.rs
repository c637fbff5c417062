//! CPU affinity: the cores that decode for a rank.

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of one rank; empty means any core.
///
/// Ranks of a node that decode on the same cores evict each other's caches. On machines with several sockets they
/// would also access memory across sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuShare(Vec<usize>);

impl CpuShare {
    /// The cores for `local_rank` of `local_ranks`, among those that this process may use. They are contiguous, so
    /// that they are on one socket if possible. Empty if there are fewer cores than ranks.
    #[must_use]
    pub fn of_rank(local_rank: u32, local_ranks: u32) -> Self {
        let Ok(allowed) = sched_getaffinity(None) else { return Self::default() };
        let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        Self(share(by_node(cpus, &nodes()), local_rank as usize, local_ranks as usize))
    }

    /// Restricts this thread, and processes that it then starts, to these cores. Best effort: otherwise the thread is only slower.
    pub fn pin_thread(&self) {
        if self.0.is_empty() {
            return;
        }
        let mut set = CpuSet::new();
        for cpu in &self.0 {
            set.set(*cpu);
        }
        let _ = sched_setaffinity(None, &set);
    }
}

/// An equal, contiguous part of `cpus`.
fn share(cpus: Vec<usize>, number: usize, count: usize) -> Vec<usize> {
    if count == 0 || number >= count || cpus.len() < count {
        return Vec::new();
    }
    let (start, end) = (number * cpus.len() / count, (number + 1) * cpus.len() / count);
    cpus[start..end].to_vec()
}

/// Sorts the cores by memory node. The kernel numbers the second threads of all cores after all first ones, so the
/// numbers alone do not group them.
fn by_node(mut cpus: Vec<usize>, nodes: &[Vec<usize>]) -> Vec<usize> {
    cpus.sort_by_key(|cpu| nodes.iter().position(|node| node.contains(cpu)));
    cpus
}

/// The cores of each memory node; empty if the kernel does not provide them.
fn nodes() -> Vec<Vec<usize>> {
    let list = |node: usize| {
        fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()
    };
    (0..).map_while(list).map(|text| numbers(&text)).collect()
}

/// Parses the kernel's notation for sets: `0-3,8`.
fn numbers(text: &str) -> Vec<usize> {
    let mut all = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            all.extend(first..=last.min(CpuSet::MAX_CPU));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_disjoint_and_cover_all_cores() {
        for (cpus, ranks) in [(96, 8), (7, 3), (2, 2), (5, 1)] {
            let all: Vec<usize> =
                (0..ranks).flat_map(|rank| share((0..cpus).collect(), rank, ranks)).collect();
            assert_eq!(all, (0..cpus).collect::<Vec<_>>(), "{cpus} cores, {ranks} ranks");
        }
    }

    #[test]
    fn more_ranks_than_cores_share_them_all() {
        assert!(share(vec![0, 1], 0, 4).is_empty());
    }

    #[test]
    fn a_share_is_on_one_memory_node() {
        let nodes = [numbers("0-1,4-5\n"), numbers("2-3,6-7\n")];
        let cpus = by_node((0..8).collect(), &nodes);
        assert_eq!(share(cpus.clone(), 0, 2), [0, 1, 4, 5]);
        assert_eq!(share(cpus, 3, 4), [6, 7]);
    }

    #[test]
    fn a_thread_is_pinned_to_its_share() {
        let all = CpuShare::of_rank(0, 1);
        let share = CpuShare(vec![all.0[0]]);
        let expected = share.clone();
        let found = std::thread::spawn(move || {
            share.pin_thread();
            CpuShare::of_rank(0, 1)
        });
        assert_eq!(found.join().unwrap(), expected);
    }
}
