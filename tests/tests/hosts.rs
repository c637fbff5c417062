//! Tests three hosts with two ranks each: a partition, loss in one direction, a slow link, a lost and restarted node, and the
//! loss of the host with the coordinator.
//!
//! Each host is a network namespace, on one bridge with the coordinator. The test starts itself again inside new
//! namespaces, where it has the needed rights. If the kernel or the tools do not allow this, the test is skipped.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{
    process::{Command, Output},
    time::Instant,
};

use baton_proto::v1::{DrainRequest, get_status_response::Phase};
use baton_tests::{Cluster, skipped};

/// Environment variable that is set for the test inside the namespaces.
const INSIDE: &str = "BATON_TEST_INSIDE_NAMESPACES";
const HOSTS: usize = 3;
const RANKS: u32 = 2;
const VIRTUAL_RANKS: &str = "train.virtual_ranks=8";
/// Address of the coordinator.
const BRIDGE: &str = "10.77.0.1";

fn address(host: usize) -> String {
    format!("10.77.0.1{host}")
}

#[test]
fn partitions_losses_and_returns_of_hosts_change_no_bit() {
    run_inside("partitions_inside_the_namespaces");
}

#[test]
fn the_other_hosts_continue_when_that_of_the_coordinator_is_destroyed() {
    run_inside("a_destroyed_host_inside_the_namespaces");
}

/// Runs a test of this file inside new namespaces.
fn run_inside(test: &str) {
    let prepare = "mount -t tmpfs tmpfs /run && ip link set lo up && ip link add br0 type bridge \
                   && ip addr add 10.77.0.1/24 dev br0 && ip link set br0 up && exec \"$@\"";
    let inside = |program: &std::path::Path| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "--mount", "sh", "-c", prepare, "sh"]);
        command.arg(program);
        command
    };
    let probe =
        "ip netns add probe && ip link add v type veth peer name e && ip netns exec probe true";
    let trial = inside("sh".as_ref()).args(["-c", probe]).output();
    match trial {
        Ok(Output { status, .. }) if status.success() => {}
        Ok(Output { stderr, .. }) => {
            let problem = String::from_utf8_lossy(&stderr);
            return skipped(&format!("no network namespaces: {}", problem.trim()));
        }
        Err(error) => return skipped(&format!("no network namespaces: {error}")),
    }
    let arguments = ["--exact", test, "--ignored", "--nocapture"];
    let mut command = inside(&std::env::current_exe().unwrap());
    let ended = command.args(arguments).env(INSIDE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout) + String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
    // A part may have been skipped.
    eprint!("{text}");
}

/// Runs `ip …`, split at spaces.
fn ip(arguments: &str) {
    let ended = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(ended.status.success(), "ip {arguments}: {ended:?}");
}

fn add_host(host: usize) {
    let at = address(host);
    ip(&format!("netns add n{host}"));
    ip(&format!("link add v{host} type veth peer name e{host}"));
    ip(&format!("link set e{host} netns n{host}"));
    ip(&format!("link set v{host} master br0 up"));
    ip(&format!("-n n{host} addr add {at}/24 dev e{host}"));
    ip(&format!("-n n{host} link set e{host} up"));
    ip(&format!("-n n{host} link set lo up"));
}

fn start_agent(cluster: &mut Cluster, host: usize) {
    let (namespace, node, at) = (format!("n{host}"), format!("node{host}"), address(host));
    let launcher = ["ip", "netns", "exec", &namespace];
    cluster.start_agent_by(&launcher, &node, RANKS, &["--host", &at], &[]);
}

/// Current time per step, seconds.
async fn step_seconds(cluster: &Cluster) -> f64 {
    let step = async || cluster.status().await.latest.map_or(0, |latest| latest.step);
    let (before, begin) = (step().await, Instant::now());
    let three_more = async || Some(step().await).filter(|now| *now >= before + 3);
    let now = cluster.until("three more steps", three_more).await;
    begin.elapsed().as_secs_f64() / (now - before) as f64
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
async fn partitions_inside_the_namespaces() {
    // Outside the namespaces, it would change the network of this machine.
    assert!(std::env::var_os(INSIDE).is_some(), "run the test above, which starts this one");
    let all = HOSTS as u32 * RANKS;
    let mut cluster = set_up(Cluster::endless());
    (1..=HOSTS).for_each(add_host);
    let listen = format!("{BRIDGE}:0");
    cluster.start_coordinator(&["--listen", &listen, "--insecure"]).await;
    (1..=HOSTS).for_each(|host| start_agent(&mut cluster, host));
    let mut generation = trains(&cluster, all, 0).await;

    println!("partition: host 3 is disconnected and treated as lost; then it is connected again");
    ip("link set v3 down");
    generation = trains(&cluster, all - RANKS, generation).await;
    ip("link set v3 up");
    generation = trains(&cluster, all, generation).await;

    println!("loss in one direction: nothing from host 2 reaches host 1");
    ip("-n n2 route add blackhole 10.77.0.11/32");
    let detected = async || (cluster.status().await.phase() != Phase::Training).then_some(());
    cluster.until("the loss is detected", detected).await;
    ip("-n n2 route del blackhole 10.77.0.11/32");
    generation = trains(&cluster, all, generation).await;

    println!("a slow link: host 1 sends one megabit per second");
    let quick = step_seconds(&cluster).await;
    let slow = "netns exec n1 tc qdisc add dev e1 root tbf rate 1mbit burst 32kbit latency 400ms";
    if Command::new("ip").args(slow.split(' ')).status().is_ok_and(|status| status.success()) {
        let slowed = async || (step_seconds(&cluster).await >= 5.0 * quick).then_some(());
        cluster.until("the link is slow", slowed).await;
        ip("netns exec n1 tc qdisc del dev e1 root");
    } else {
        skipped("no traffic control in this kernel: the slow link was left out");
    }
    generation = trains(&cluster, all, generation - 1).await;

    println!("host 2 dies, and another one replaces it");
    ip("link set v2 down");
    cluster.kill_agent(1).await;
    generation = trains(&cluster, all - RANKS, generation).await;
    ip("link set v2 up");
    start_agent(&mut cluster, 2);
    trains(&cluster, all, generation).await;

    let reason = "enough".to_owned();
    cluster.client().await.drain(DrainRequest { reason }).await.unwrap();
    cluster.finish().await;
    let (epochs, disturbed) = cluster.newest_epoch();
    println!("{epochs} epochs");

    // With the usual timeouts: this machine may be busy.
    let undisturbed = Cluster::of_epochs(epochs).set(VIRTUAL_RANKS).run_to_the_end(2).await;
    assert!(disturbed == undisturbed);
}

#[tokio::test]
#[ignore = "started by a test above, inside namespaces"]
async fn a_destroyed_host_inside_the_namespaces() {
    assert!(std::env::var_os(INSIDE).is_some(), "run the test above, which starts this one");
    let all = HOSTS as u32 * RANKS;
    let store = tempfile::tempdir().unwrap();
    let mut cluster = set_up(Cluster::endless())
        .set("checkpoint.every_steps=50")
        .set(&format!("checkpoint.dir={}", store.path().display()));
    (1..=HOSTS).for_each(add_host);
    let listen = format!("{}:0", address(1));
    let launcher = ["ip", "netns", "exec", "n1"];
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
