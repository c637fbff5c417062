//! Runs real processes through many random faults, for a program and for an adapter of a quantised language model; the
//! result must have the same bits.
//!
//! ```text
//! BATON_CHAOS_SEED=17      cargo test -p baton-tests --test chaos    the faults of this seed
//! BATON_CHAOS_FAULTS=100   cargo test -p baton-tests --test chaos    this number of faults
//! ```
//! `proof/` does the same for a ResNet on three hosts, with faults of all kinds; `crates/trainer/tests/suite/chaos.rs` with threads,
//! thousands of times.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests may panic and print"
)]

#[path = "kit/language.rs"]
mod language;

use std::{
    cell::Cell,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use baton_job::exit;
use baton_proto::v1::{DrainRequest, get_status_response::Phase};
use baton_tests::{Cluster, kill, stop, terminate};
use language::Files;

/// Number of faults in an ordinary test run.
const FAULTS: u64 = 8;
/// Agents: their names and ranks.
const NODES: [(&str, u32); 2] = [("a", 2), ("b", 1)];

#[derive(Clone, Copy, Debug)]
enum Fault {
    KillRank,
    StopRank,
    KillAgent,
    KillCoordinator,
    /// A node's machine is taken away, and replaced by another.
    Notice,
    KillAll,
    Drain,
}

const ALL: [Fault; 7] = [
    Fault::KillRank,
    Fault::StopRank,
    Fault::KillAgent,
    Fault::KillCoordinator,
    Fault::Notice,
    Fault::KillAll,
    Fault::Drain,
];

fn set_up(cluster: Cluster) -> Cluster {
    cluster
        .set("evaluation.every_epochs=20")
        .set("checkpoint.every_steps=50")
        .set("cluster.hang_seconds=3")
        .set("cluster.rendezvous_seconds=10")
        .set("cluster.min_ranks=1")
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[tokio::test]
async fn random_faults_change_no_bit_of_a_program() {
    let fixture = "../crates/program/tests/fixtures/small.pt2";
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture).canonicalize().unwrap();
    let cluster = Cluster::endless()
        .set("model.arch=program")
        .set(&format!("model.program={}", program.display()))
        .set("train.resolution=8")
        .set("schedule={ kind='constant', lr=0.01 }");
    assert_faults_change_no_bit(cluster).await;
}

#[tokio::test]
async fn random_faults_change_no_bit_of_an_adapter_of_a_quantised_model() {
    let files = Files::new();
    let cluster = files.train(Cluster::endless()).set("adapter.base='nf4'");
    assert_faults_change_no_bit(cluster.set("schedule.lr=0.001")).await;
}

async fn assert_faults_change_no_bit(cluster: Cluster) {
    let faults = number("BATON_CHAOS_FAULTS").unwrap_or(FAULTS);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = number("BATON_CHAOS_SEED").unwrap_or(since_epoch.as_secs());
    println!("BATON_CHAOS_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut cluster = set_up(cluster);
    start(&mut cluster, "127.0.0.1:0").await;
    let mut kinds: Vec<Fault> = Vec::new();
    let all_ranks = NODES.iter().map(|(_, ranks)| ranks).sum();
    for number in 0..faults {
        let before = trains(&cluster, all_ranks).await;
        // The fault comes at any moment of a step.
        tokio::time::sleep(Duration::from_millis(rng.u64(0..300))).await;
        if kinds.is_empty() {
            kinds.extend(ALL);
            rng.shuffle(&mut kinds);
        }
        let fault = kinds.pop().unwrap();
        println!("{number}: {fault:?} at step {before}");
        inject(&mut cluster, fault, &mut rng).await;
    }
    // The last fault must be recovered from, too.
    trains(&cluster, all_ranks).await;
    drain(&mut cluster).await;
    println!("if the bits differ: rerun with BATON_CHAOS_SEED={seed}");
    cluster.assert_undisturbed_bits().await;
}

async fn drain(cluster: &mut Cluster) {
    cluster.client().await.drain(DrainRequest { reason: "chaos".to_owned() }).await.unwrap();
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(
        coordinator.code(),
        Some(i32::from(exit::DRAINED)),
        "{}",
        cluster.log("coordinator")
    );
}

async fn start(cluster: &mut Cluster, listen: &str) {
    cluster.start_coordinator(&["--listen", listen]).await;
    for (node, ranks) in NODES {
        cluster.start_agent(node, ranks);
    }
}

/// Waits until this number of ranks train, and have made a step; returns it. A node whose ranks fail again before a new step
/// is quarantined for a minute.
async fn trains(cluster: &Cluster, ranks: u32) -> u64 {
    let first = Cell::new(None);
    let look = async || {
        let status = cluster.status().await;
        let step = status.latest.as_ref().map_or(0, |latest| latest.step);
        assert!(status.phase() != Phase::Ended, "the job ended: {}", status.reason);
        if status.phase() != Phase::Training || status.ranks.len() != ranks as usize {
            first.set(None);
            return None;
        }
        let before = first.get().unwrap_or(step);
        first.set(Some(before));
        (step > before).then_some(step)
    };
    cluster.until(&format!("{ranks} ranks train"), look).await
}

async fn inject(cluster: &mut Cluster, fault: Fault, rng: &mut fastrand::Rng) {
    // Agents are in the order of their starts.
    let agent = rng.usize(0..NODES.len());
    let generation = cluster.status().await.generation;
    match fault {
        Fault::KillRank | Fault::StopRank => {
            let pid = running_rank(cluster, agent, rng).await;
            if matches!(fault, Fault::KillRank) {
                kill(pid)
            } else {
                stop(pid)
            }
            opened(cluster, generation).await;
        }
        Fault::KillAgent => {
            let (node, ranks) = cluster.agent(agent);
            cluster.kill_agent(agent).await;
            cluster.start_agent(&node, ranks);
            opened(cluster, generation).await;
        }
        Fault::KillCoordinator => {
            let address = cluster.url().trim_start_matches("http://").to_owned();
            cluster.kill_coordinator().await;
            cluster.start_coordinator(&["--listen", &address]).await;
        }
        Fault::Notice => {
            let (node, ranks) = cluster.agent(agent);
            terminate(cluster.agent_pid(agent));
            let left = cluster.agent_ends(agent).await;
            assert_eq!(left.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));
            // The job has continued without this node.
            let others: u32 = NODES.iter().map(|(_, ranks)| ranks).sum();
            trains(cluster, others - ranks).await;
            let smaller = cluster.status().await;
            assert!(smaller.ranks.iter().all(|rank| rank.node_id != node), "{smaller:?}");
            cluster.start_agent(&node, ranks);
            opened(cluster, smaller.generation).await;
        }
        Fault::KillAll => {
            cluster.kill_coordinator().await;
            for _ in NODES {
                cluster.kill_agent(0).await;
            }
            start(cluster, "127.0.0.1:0").await;
        }
        Fault::Drain => {
            drain(cluster).await;
            start(cluster, "127.0.0.1:0").await;
        }
    }
}

/// The process id of a random rank of an agent. An agent has none while it replaces its ranks.
async fn running_rank(cluster: &Cluster, agent: usize, rng: &mut fastrand::Rng) -> u32 {
    cluster.until("the agent runs ranks", async || rng.choice(cluster.rank_pids(agent))).await
}

/// Waits for a newer generation to train.
async fn opened(cluster: &Cluster, generation: u64) {
    let opened = async || (cluster.status().await.generation > generation).then_some(());
    cluster.until(&format!("a generation after {generation}"), opened).await;
}
