//! Seconds for one all-reduce of a ResNet-50's gradients (25.6 M values, 102 MB) between ranks on
//! this machine, over loopback TCP and through shared memory. Ranks are threads; run it on as many idle cores as ranks.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // A tool for developers.

use std::time::{Duration, Instant};

use baton_collectives::tcp::{Listener, RankGroup, TcpCollective, TcpOptions};
use baton_collectives::tree::maximal_subtrees;
use baton_collectives::{AbortHandle, BufferMut, Collective, Part};
use baton_job::plan::virtual_block;
use baton_job::{Generation, MeshSecret, Rank};

const VALUES: usize = 25_600_000;
const REPEATS: usize = 15;
const VIRTUAL_RANKS: u32 = 8;

fn main() {
    for world_size in [2, 3, 4] {
        for shares_memory in [false, true] {
            let mut seconds = measure(world_size, shares_memory);
            seconds.sort_by(f64::total_cmp);
            let (best, median) = (seconds[0], seconds[seconds.len() / 2]);
            println!(
                "ranks={world_size} values={VALUES} shared_memory={shares_memory} median_s={median:.4} best_s={best:.4}"
            );
        }
    }
}

fn measure(world_size: u32, shares_memory: bool) -> Vec<f64> {
    let listeners: Vec<_> = (0..world_size).map(|_| Listener::bind("127.0.0.1").unwrap()).collect();
    let peers: Vec<String> = listeners.iter().map(|l| l.address().to_owned()).collect();
    std::thread::scope(|scope| {
        let spawn = |(rank, listener)| {
            let peers = &peers;
            scope.spawn(move || run_rank(Rank(rank), listener, peers, shares_memory))
        };
        let ranks: Vec<_> = (0..).zip(listeners).map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).next_back().unwrap()
    })
}

fn run_rank(rank: Rank, listener: Listener, peers: &[String], shares_memory: bool) -> Vec<f64> {
    let long = Duration::from_secs(60);
    let options = TcpOptions { connect_timeout: long, operation_timeout: long };
    let abort = AbortHandle::new();
    let secret = &MeshSecret::new([7; MeshSecret::BYTES]);
    let group = RankGroup { generation: Generation(1), rank, peers, secret };
    let mut group = TcpCollective::connect(listener, group, options, abort).unwrap();
    if shares_memory {
        group.share_memory().unwrap();
    }
    let nodes = maximal_subtrees(virtual_block(VIRTUAL_RANKS, rank, group.world_size()));
    let mut sums = vec![vec![1.0; VALUES]; nodes.len()];
    let mut once = || {
        group.all_gather_bytes(&[]).unwrap(); // All ranks begin together.
        let start = Instant::now();
        let mut parts = Vec::new();
        for (&node, sum) in nodes.iter().zip(&mut sums) {
            parts.push(Part { node, buffer: BufferMut::Host(sum) });
        }
        group.all_reduce(VIRTUAL_RANKS, &mut parts).unwrap();
        start.elapsed().as_secs_f64()
    };
    once(); // The first run allocates memory.
    (0..REPEATS).map(|_| once()).collect()
}
