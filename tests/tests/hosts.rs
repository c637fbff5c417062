//! Three hosts with two ranks each: a partition, loss in one direction, a slow line, a node lost and back.
//!
//! Each host is a network namespace, on one bridge with the coordinator. The test starts itself again inside
//! namespaces of its own, where it may do all this; where the kernel or the tools do not allow it, it says so
//! and is skipped.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failed test may say so loudly"
)]

use std::{
    process::{Command, Output},
    time::Duration,
};

use baton_checkpoint::{EntryState, Store};
use baton_proto::v1::{DrainRequest, get_status_response::Phase};
use baton_tests::{Cluster, PATIENCE, state_of};

const HOSTS: usize = 3;
const RANKS: u32 = 2;
/// Where everybody reaches the coordinator.
const BRIDGE: &str = "10.77.0.1";

fn address(host: usize) -> String {
    format!("10.77.0.1{host}")
}

#[test]
fn partitions_losses_and_returns_of_hosts_change_no_bit() {
    let prepare = "mount -t tmpfs tmpfs /run && ip link set lo up && ip link add br0 type bridge \
                   && ip addr add 10.77.0.1/24 dev br0 && ip link set br0 up && exec \"$@\"";
    let inside = |program: &std::path::Path| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "--mount", "sh", "-c", prepare, "sh"]);
        command.arg(program);
        command
    };
    let tried = inside("ip".as_ref()).args(["netns", "add", "probe"]).output();
    match tried {
        Ok(Output { status, .. }) if status.success() => {}
        Ok(Output { stderr, .. }) => {
            eprintln!("skipped, no namespaces: {}", String::from_utf8_lossy(&stderr).trim());
            return;
        }
        Err(error) => {
            eprintln!("skipped, no namespaces: {error}");
            return;
        }
    }
    let story = ["--exact", "inside_the_namespaces", "--ignored", "--nocapture"];
    let ended = inside(&std::env::current_exe().unwrap()).args(story).output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout) + String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
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

/// Waits until so many ranks train, in a generation after `after`; that generation.
async fn trains(cluster: &Cluster, ranks: u32, after: u64) -> u64 {
    let wait = async {
        loop {
            let status = cluster.status().await;
            assert!(status.phase() != Phase::Ended, "it ended: {}", status.reason);
            let all = status.ranks.len() == ranks as usize;
            if status.phase() == Phase::Training && all && status.generation > after {
                return status.generation;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let trains = tokio::time::timeout(PATIENCE, wait).await;
    trains.unwrap_or_else(|_| panic!("no {ranks} ranks train:\n{}", cluster.log("coordinator")))
}

/// A constant rate, so that any number of epochs begins alike.
fn cluster(epochs: u64) -> Cluster {
    Cluster::new()
        .set(&format!("train.epochs={epochs}"))
        .set("train.virtual_ranks=8")
        .set("schedule={kind='constant', lr=0.1}")
        .set("checkpoint.every_epochs=1")
        .set("checkpoint.every_steps=0")
        .set("checkpoint.keep_best=false")
        .set("evaluation.every_epochs=1000000")
        .set("cluster.node_grace_seconds=1")
        .set("cluster.collective_seconds=4")
        .set("cluster.rendezvous_seconds=10")
        .set("cluster.restart_limit=20")
}

#[tokio::test]
#[ignore = "started by the test above, inside namespaces"]
async fn inside_the_namespaces() {
    let all = HOSTS as u32 * RANKS;
    let mut cluster = cluster(1_000_000);
    (1..=HOSTS).for_each(add_host);
    let listen = format!("{BRIDGE}:0");
    cluster.start_coordinator(&["--listen", &listen, "--insecure"]).await;
    (1..=HOSTS).for_each(|host| start_agent(&mut cluster, host));
    let mut generation = trains(&cluster, all, 0).await;

    println!("partition: host 3 is cut off, and given up; then it is back");
    ip("link set v3 down");
    generation = trains(&cluster, all - RANKS, generation).await;
    ip("link set v3 up");
    generation = trains(&cluster, all, generation).await;

    println!("loss in one direction: nothing from host 2 reaches host 1");
    ip("-n n2 route add blackhole 10.77.0.11/32");
    let broken = tokio::time::timeout(PATIENCE, async {
        while cluster.status().await.phase() == Phase::Training {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    assert!(broken.await.is_ok(), "nobody noticed");
    ip("-n n2 route del blackhole 10.77.0.11/32");
    generation = trains(&cluster, all, generation).await;

    println!("a slow line: host 1 sends a megabit a second");
    let slow = "netns exec n1 tc qdisc add dev e1 root tbf rate 1mbit burst 32kbit latency 400ms";
    if Command::new("ip").args(slow.split(' ')).status().is_ok_and(|status| status.success()) {
        tokio::time::sleep(Duration::from_secs(3)).await;
        ip("netns exec n1 tc qdisc del dev e1 root");
    } else {
        println!("left out: no traffic control");
    }
    generation = trains(&cluster, all, generation - 1).await;

    println!("host 2 dies, and another one comes in its place");
    ip("link set v2 down");
    cluster.kill_agent(1).await;
    generation = trains(&cluster, all - RANKS, generation).await;
    ip("link set v2 up");
    start_agent(&mut cluster, 2);
    trains(&cluster, all, generation).await;

    let reason = "enough".to_owned();
    cluster.client().await.drain(DrainRequest { reason }).await.unwrap();
    cluster.finish().await;
    let location = cluster.run_dir().join("checkpoints").display().to_string();
    let (epochs, disturbed) = tokio::task::spawn_blocking(move || {
        let store = Store::open_existing(&location).unwrap();
        let at_the_end_of_an_epoch = |state: EntryState| match state {
            EntryState::Whole(manifest) if manifest.progress.cursor == 0 => Some(manifest),
            _ => None,
        };
        let entries = store.list().unwrap().into_iter();
        let manifest = entries.map(|entry| entry.state).find_map(at_the_end_of_an_epoch).unwrap();
        (u64::from(manifest.progress.epoch.0), state_of(&store, &manifest))
    })
    .await
    .unwrap();
    println!("{epochs} epochs");

    let undisturbed = self::cluster(epochs).run_to_the_end(2).await;
    assert!(disturbed == undisturbed);
}
