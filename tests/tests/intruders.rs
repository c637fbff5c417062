//! Tests that a second agent, a slow client or a damaged journal cannot harm a job.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{fs, process::Command};

use baton_job::exit;
use baton_proto::v1::{GetStatusRequest, StreamMetricsRequest, watch_events_response::Kind};
use baton_tests::{Cluster, binary, in_time};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::Code;

#[tokio::test]
async fn a_second_agent_of_the_same_node_is_refused_and_the_job_continues() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let mut events = cluster.events().await;
    events.next_of(Kind::Saved).await;

    cluster.start_agent("node", 1);
    let refused = cluster.agent_ends(1).await;

    assert_eq!(refused.code(), Some(i32::from(exit::FAILED)));
    let reason = "node node is already attached; give this agent another name with --node-id";
    assert!(cluster.log("agent").contains(reason), "{}", cluster.log("agent"));
    events.next_of(Kind::Saved).await;
    let status = cluster.status().await;
    assert_eq!((status.generation, status.nodes.len()), (1, 1), "{status:?}");
}

#[tokio::test]
async fn a_request_whose_body_never_ends_is_answered() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    let address = cluster.url().trim_start_matches("http://").to_owned();
    let mut client = TcpStream::connect(&address).await.unwrap();
    let request = format!(
        "POST /api/control/drain HTTP/1.1\r\nhost: {address}\r\nx-baton-request: 1\r\n\
         content-type: application/json\r\ncontent-length: 100\r\n\r\n{{"
    );
    client.write_all(request.as_bytes()).await.unwrap();

    let mut answer = Vec::new();
    in_time("the connection is closed", client.read_to_end(&mut answer)).await.unwrap();

    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
}

#[tokio::test]
async fn a_damaged_journal_ends_the_coordinator_with_a_remedy() {
    let mut cluster = Cluster::new().set("train.epochs=1");
    cluster.run_to_the_end(1).await;
    let path = cluster.run_dir().join("journal.redb");
    let mut journal = fs::read(&path).unwrap();
    // The origin of the job is in every copy of its page; the change makes older checkpoints unusable.
    let field = b"\"not_before\":0";
    let places: Vec<usize> =
        (0..journal.len()).filter(|at| journal[*at..].starts_with(field)).collect();
    assert!(!places.is_empty());
    for at in places {
        journal[at + field.len() - 1] ^= 8;
    }
    fs::write(&path, journal).unwrap();

    let output = Command::new(binary("baton-coordinator"))
        .arg("serve")
        .arg("--recipe")
        .arg(cluster.recipe())
        .arg("--run-dir")
        .arg(cluster.run_dir())
        .args(["--set", "train.epochs=1", "--listen", "127.0.0.1:0"])
        .output()
        .unwrap();

    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(i32::from(exit::BAD_INPUT)), "{stderr}");
    let line = format!(
        "error: journal {} is damaged; move it away: training resumes from the newest checkpoint",
        path.display()
    );
    assert!(stderr.contains(&line), "{stderr}");
}

#[tokio::test]
async fn open_streams_are_limited_so_that_unread_ones_cannot_fill_the_memory() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    let follow = || StreamMetricsRequest { after_unix_millis: 0, follow: true };
    let mut open = Vec::new();
    // A connection has 200 at most.
    for _ in 0..2 {
        let mut client = cluster.client().await;
        for _ in 0..128 {
            open.push(client.stream_metrics(follow()).await.unwrap());
        }
    }
    let mut client = cluster.client().await;
    let refused = client.stream_metrics(follow()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("256 streams are open"), "{refused}");
    client.get_status(GetStatusRequest {}).await.unwrap();

    drop(open);
    let again = async || cluster.client().await.stream_metrics(follow()).await.ok();
    cluster.until("closed streams count no more", again).await;
}
