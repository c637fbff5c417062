//! Which cores decode for which rank.

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of one rank; none means any.
///
/// Ranks of a node that decode on each other's cores evict each other's caches, and on machines with
/// several sockets read across them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuShare(Vec<usize>);

impl CpuShare {
    /// The share of local rank `local_rank` of `local_ranks` in the cores that this process may use:
    /// neighbours, so that a share lies on one socket where that is possible. No share where there are
    /// fewer cores than ranks.
    #[must_use]
    pub fn of_rank(local_rank: u32, local_ranks: u32) -> Self {
        let Ok(allowed) = sched_getaffinity(None) else { return Self::default() };
        let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        Self(share(by_node(cpus, &nodes()), local_rank as usize, local_ranks as usize))
    }

    /// Keeps this thread to these cores. Where that is forbidden it runs anywhere, only slower.
    pub(super) fn keep_to(&self) {
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

/// Puts the cores of one memory node beside each other: the kernel numbers the second threads of all
/// cores after all first ones.
fn by_node(mut cpus: Vec<usize>, nodes: &[Vec<usize>]) -> Vec<usize> {
    cpus.sort_by_key(|cpu| nodes.iter().position(|node| node.contains(cpu)));
    cpus
}

/// The cores of each memory node, as the kernel tells them; none where it does not.
fn nodes() -> Vec<Vec<usize>> {
    let list = |node: usize| {
        fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()
    };
    (0..).map_while(list).map(|text| numbers(&text)).collect()
}

/// Reads the kernel's way of writing sets: `0-3,8`.
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
    fn a_share_lies_on_one_memory_node() {
        let nodes = [numbers("0-1,4-5\n"), numbers("2-3,6-7\n")];
        let cpus = by_node((0..8).collect(), &nodes);
        assert_eq!(share(cpus.clone(), 0, 2), [0, 1, 4, 5]);
        assert_eq!(share(cpus, 3, 4), [6, 7]);
    }

    #[test]
    fn a_thread_keeps_to_its_share() {
        let whole = CpuShare::of_rank(0, 1);
        let own = CpuShare(vec![whole.0[0]]);
        let wanted = own.clone();
        let seen = std::thread::spawn(move || {
            own.keep_to();
            CpuShare::of_rank(0, 1)
        });
        assert_eq!(seen.join().unwrap(), wanted);
    }
}
