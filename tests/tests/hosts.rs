//! The loss of the host with the coordinator, and what its ranks send to the others, measured; a host that reaches only the
//! coordinator, and one that gets no large packets. proof/ has the other faults of hosts and networks.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

#[path = "kit/namespaces.rs"]
mod namespaces;

use std::time::Instant;

use baton_proto::v1::{DrainRequest, get_status_response::Phase};
use baton_tests::Cluster;
use namespaces::{BRIDGE, add_host, address, assert_inside, ip, launcher, run_inside};

const HOSTS: usize = 3;
const RANKS: u32 = 2;
const VIRTUAL_RANKS: &str = "train.virtual_ranks=8";

#[test]
fn the_other_hosts_continue_when_that_of_the_coordinator_is_destroyed() {
    run_inside("a_destroyed_host_inside_the_namespaces");
}

fn start_agent(cluster: &mut Cluster, host: usize) {
    let (launcher, node, at) = (launcher(host), format!("node{host}"), address(host));
    let launcher = launcher.each_ref().map(String::as_str);
    cluster.start_agent_by(&launcher, &node, RANKS, &["--host", &at], &[]);
}

/// Waits until this number of ranks train in a generation after `after`; returns that generation.
async fn trains(cluster: &Cluster, ranks: u32, after: u64) -> u64 {
    let look = async || {
        let status = cluster.status().await;
        assert!(status.phase() != Phase::Ended, "the job ended: {}", status.reason);
        let all = status.ranks.len() == ranks as usize;
        let trains = status.phase() == Phase::Training && all && status.generation > after;
        trains.then_some(status.generation)
    };
    cluster.until(&format!("{ranks} ranks train"), look).await
}

fn set_up(cluster: Cluster) -> Cluster {
    cluster
        .set(VIRTUAL_RANKS)
        .set("cluster.node_grace_seconds=1")
        .set("cluster.collective_seconds=4")
        .set("cluster.rendezvous_seconds=10")
        .set("cluster.restart_limit=20")
}

#[tokio::test]
#[ignore = "started by the test above, inside namespaces"]
async fn a_destroyed_host_inside_the_namespaces() {
    assert_inside();
    let all = HOSTS as u32 * RANKS;
    let store = tempfile::tempdir().unwrap();
    let mut cluster = set_up(Cluster::endless())
        .set("checkpoint.every_steps=50")
        .set(&format!("checkpoint.dir={}", store.path().display()));
    (1..=HOSTS).for_each(add_host);
    let listen = format!("{}:0", address(1));
    let launcher = launcher(1);
    let launcher = launcher.each_ref().map(String::as_str);
    cluster.start_coordinator_by(launcher, &["--listen", &listen, "--insecure"]).await;
    (1..=HOSTS).for_each(|host| start_agent(&mut cluster, host));
    let generation = trains(&cluster, all, 0).await;
    let is_renewed = async || cluster.lease().filter(|lease| lease.renews && lease.renewals > 1);
    cluster.until("the lease is renewed", is_renewed).await;

    // Nothing comes from it any more, not even that its connections end.
    ip("link set v1 down");
    let lost = Instant::now();
    cluster.kill_coordinator().await;
    cluster.kill_agent(0).await;
    cluster.taken_over(2).await;
    println!("another coordinator answers after {:.1} s", lost.elapsed().as_secs_f64());
    trains(&cluster, all - RANKS, generation).await;
    println!("the other hosts train after {:.1} s", lost.elapsed().as_secs_f64());
    let status = cluster.status().await;
    let lost_steps: Vec<u64> = status.recoveries.iter().map(|one| one.lost_steps).collect();
    let none_is_lost = !lost_steps.is_empty() && lost_steps.iter().all(|steps| *steps == 0);
    assert!(none_is_lost, "{lost_steps:?}");

    let reason = "enough".to_owned();
    cluster.client().await.drain(DrainRequest { reason }).await.unwrap();
    for _ in 1..HOSTS {
        cluster.agent_ends(0).await;
    }
    let (epochs, disturbed) = cluster.newest_epoch();
    let undisturbed = Cluster::of_epochs(epochs).set(VIRTUAL_RANKS).run_to_the_end(2).await;
    assert!(disturbed == undisturbed);
}

#[test]
fn ranks_of_a_host_send_one_sum_to_the_others() {
    run_inside("one_sum_inside_the_namespaces");
}

#[test]
fn a_host_that_reaches_only_the_coordinator_is_left_out() {
    run_inside("a_cut_host_inside_the_namespaces");
}

#[tokio::test]
#[ignore = "started by the test above, inside namespaces"]
async fn a_cut_host_inside_the_namespaces() {
    assert_inside();
    let mut cluster = set_up(Cluster::endless()).set("cluster.restart_limit=3");
    (1..=HOSTS).for_each(add_host);
    let listen = format!("{BRIDGE}:0");
    cluster.start_coordinator(&["--listen", &listen, "--insecure"]).await;
    (1..=HOSTS).for_each(|host| start_agent(&mut cluster, host));
    let all = HOSTS as u32 * RANKS;
    let generation = trains(&cluster, all, 0).await;
    // Nothing passes between the second host and the others any more; all reach the coordinator.
    for (host, other) in [(2, 1), (2, 3), (1, 2), (3, 2)] {
        ip(&format!("-n n{host} route add blackhole {}/32", address(other)));
    }
    trains(&cluster, all - RANKS, generation).await;
    let status = cluster.status().await;
    assert!(status.ranks.iter().all(|rank| rank.node_id != "node2"), "{:?}", status.ranks);
    // One, if the second host alone had finished a step.
    let lost_steps: u64 = status.recoveries.iter().map(|one| one.lost_steps).sum();
    assert!(lost_steps <= 1, "{lost_steps}");

    let reason = "enough".to_owned();
    cluster.client().await.drain(DrainRequest { reason }).await.unwrap();
    for _ in 1..=HOSTS {
        cluster.agent_ends(0).await;
    }
    let (epochs, disturbed) = cluster.newest_epoch();
    assert!(disturbed == Cluster::of_epochs(epochs).set(VIRTUAL_RANKS).run_to_the_end(2).await);
}

#[test]
fn a_host_that_joins_and_gets_no_large_packets_is_left_out() {
    run_inside("a_host_with_a_small_mtu_inside_the_namespaces");
}

#[tokio::test]
#[ignore = "started by the test above, inside namespaces"]
async fn a_host_with_a_small_mtu_inside_the_namespaces() {
    assert_inside();
    let mut cluster = set_up(Cluster::endless());
    (1..=HOSTS).for_each(add_host);
    let listen = format!("{BRIDGE}:0");
    cluster.start_coordinator(&["--listen", &listen, "--insecure"]).await;
    (1..HOSTS).for_each(|host| start_agent(&mut cluster, host));
    let others = (HOSTS as u32 - 1) * RANKS;
    let generation = trains(&cluster, others, 0).await;
    // Its packets to the coordinator are small enough; nobody tells it or the others to send smaller ones.
    ip("link set v3 mtu 600");
    ip(&format!("-n n3 route add {BRIDGE}/32 dev e3 mtu lock 500"));
    start_agent(&mut cluster, HOSTS);
    let joined = async || (cluster.status().await.generation > generation).then_some(());
    cluster.until("the third host takes part", joined).await;
    trains(&cluster, others, generation + 1).await;
    let status = cluster.status().await;
    assert!(status.ranks.iter().all(|rank| rank.node_id != "node3"), "{:?}", status.ranks);
    assert!(status.recoveries.iter().all(|one| one.lost_steps == 0), "{:?}", status.recoveries);

    let reason = "enough".to_owned();
    cluster.client().await.drain(DrainRequest { reason }).await.unwrap();
    for _ in 1..=HOSTS {
        cluster.agent_ends(0).await;
    }
    let (epochs, disturbed) = cluster.newest_epoch();
    assert!(disturbed == Cluster::of_epochs(epochs).set(VIRTUAL_RANKS).run_to_the_end(2).await);
}

/// Bytes that the first host has sent to the bridge.
fn sent_by_the_first_host() -> u64 {
    let counters = ip("-n n1 -s -j link show dev e1");
    let counters: serde_json::Value = serde_json::from_str(&counters).unwrap();
    counters[0]["stats64"]["tx"]["bytes"].as_u64().expect("bytes sent")
}

#[tokio::test]
#[ignore = "started by the test above, inside namespaces"]
async fn one_sum_inside_the_namespaces() {
    assert_inside();
    /// Steps between two looks.
    const STEPS: u64 = 300;
    // Softmax regression on 64×64 RGB: weights and biases of 10 classes, in f32.
    let gradient = 4.0 * f64::from((64 * 64 * 3 + 1) * 10);
    // Reports of every step, so that a counter is read soon after its step.
    let mut cluster =
        set_up(Cluster::endless()).set("train.resolution=64").set("train.log_every=1");
    (1..=2).for_each(add_host);
    let listen = format!("{BRIDGE}:0");
    cluster.start_coordinator(&["--listen", &listen, "--insecure"]).await;
    (1..=2).for_each(|host| start_agent(&mut cluster, host));
    trains(&cluster, 2 * RANKS, 0).await;
    let after = async |step: u64| {
        let is_there = async || {
            let latest = cluster.status().await.latest?;
            (latest.step >= step).then(|| (latest.step, sent_by_the_first_host()))
        };
        cluster.until(&format!("step {step}"), is_there).await
    };
    let (first, before) = after(1).await;
    let (last, sent) = after(first + STEPS).await;
    let of_a_step = (sent - before) as f64 / (last - first) as f64 / gradient;
    println!("the first host sends {of_a_step:.2} times the gradient in a step");
    // A ring of four ranks sends 2 · 3/4 of it over the border of a host; without a sum of each host it would be 2.
    // One sum of each of two hosts, and then one half of the total, are 1.
    assert!((0.9..=1.25).contains(&of_a_step), "{of_a_step}");

    let reason = "enough".to_owned();
    cluster.client().await.drain(DrainRequest { reason }).await.unwrap();
    for _ in 1..=2 {
        cluster.agent_ends(0).await;
    }
    let (epochs, with_hosts) = cluster.newest_epoch();
    let mut alone = Cluster::of_epochs(epochs).set(VIRTUAL_RANKS).set("train.resolution=64");
    assert!(with_hosts == alone.run_to_the_end(1).await);
}
