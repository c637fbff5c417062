//! Tests of signals that people and schedulers send: to an agent, and to `baton up`, whose children may also die.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{
    fs,
    process::ExitStatus,
    time::{Duration, Instant},
};

use baton_job::exit;
use baton_proto::v1::{StopRequest, watch_events_response::Kind};
use baton_tests::{
    Cluster, ProcessExit, announce_end, binary, children, descendants, hang_up, in_time, interrupt,
    kill, stop, terminate, wake,
};
use tokio::process::Child;

#[tokio::test]
async fn sigint_sigusr1_and_sighup_to_an_agent_save_and_stop_with_the_same_bits() {
    for name in ["SIGINT", "SIGUSR1", "SIGHUP"] {
        let mut cluster = Cluster::endless();
        cluster.start_coordinator(&[]).await;
        cluster.start_agent("node", 2);
        let mut events = cluster.events().await;
        events.saved_at(30).await;

        let agent = cluster.agent_pid(0);
        match name {
            "SIGINT" => interrupt(agent),
            "SIGUSR1" => announce_end(agent),
            _ => hang_up(agent),
        }

        let begins = events.next_of(Kind::Draining).await;
        assert!(begins.message.contains(name), "{begins:?}");
        let (coordinator, agents) = cluster.finish().await;
        let drained = Some(i32::from(exit::DRAINED));
        assert_eq!(coordinator.code(), drained, "{}", cluster.log("coordinator"));
        assert_eq!(agents[0].code(), drained, "{}", cluster.log("agent"));
        cluster.assert_undisturbed_bits().await;
    }
}

async fn end_of(up: &mut Child) -> ExitStatus {
    in_time("`baton up` ends", up.wait()).await.unwrap()
}

#[tokio::test]
async fn a_job_started_by_nohup_outlives_its_terminal() {
    let mut cluster = Cluster::endless();
    let mut up = cluster.up_by_nohup();
    cluster.served_by(&up).await;
    let mut events = cluster.events().await;
    let before = events.saved_at(10).await.step();
    // As the kernel does: all processes of the terminal get it.
    descendants(up.id().unwrap()).into_iter().for_each(hang_up);
    events.saved_at(before + 40).await;
    interrupt(up.id().unwrap());
    let drained = end_of(&mut up).await;
    let log = cluster.log("up");
    assert_eq!(drained.code(), Some(i32::from(exit::DRAINED)), "{log}");
    assert!(!log.contains("SIGHUP"), "{log}");
    cluster.assert_undisturbed_bits().await;
}

/// The process id of a child of `baton up`.
fn child(up: &Child, program: &str) -> u32 {
    let is_program = |pid: &u32| {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.split('\0').next().is_some_and(|path| path.ends_with(program))
    };
    let children = children(up.id().unwrap());
    children.into_iter().find(is_program).unwrap_or_else(|| panic!("no {program} is running"))
}

#[tokio::test]
async fn ctrl_c_saves_and_stops_the_same_command_resumes_and_a_second_ctrl_c_stops_immediately() {
    let mut cluster = Cluster::endless();
    let mut up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    cluster.events().await.saved_at(30).await;
    interrupt(up.id().unwrap());
    let drained = end_of(&mut up).await;
    assert_eq!(drained.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("up"));

    let mut up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    cluster.new_events().await.next_of(Kind::Saved).await;
    let resumed = cluster.status().await.began_with.unwrap();
    assert!(resumed.contains("checkpoint step-"), "{resumed}");
    // Stopped ranks cannot save, so only the second Ctrl-C can end the job.
    let processes = descendants(up.id().unwrap());
    children(child(&up, "baton-worker")).into_iter().for_each(stop);
    let exits: Vec<_> = processes[1..].iter().map(|pid| ProcessExit::of(*pid)).collect();
    let stopped = cluster
        .until("`baton up` ends", async || {
            // Two signals within half a second count as one.
            let ended = up.try_wait().unwrap();
            if ended.is_none() {
                interrupt(up.id().unwrap());
            }
            ended
        })
        .await;
    assert_eq!(stopped.code(), Some(130), "{}", cluster.log("up"));
    for exit in exits {
        in_time("its processes end", exit.wait()).await;
    }
    let log = cluster.log("up");
    assert_eq!(log.matches("press Ctrl-C again to stop immediately").count(), 2, "{log}");
    assert_eq!(log.matches("stopped immediately; the same command resumes").count(), 1, "{log}");
    cluster.assert_undisturbed_bits().await;
}

/// Waits until `baton up` restarts a process that was killed.
async fn is_restarted(cluster: &Cluster, name: &str) {
    let note = format!("the {name} was ended by signal 9; restarting it");
    let look = async || cluster.log("up").contains(&note).then_some(());
    cluster.until(&note, look).await;
}

#[tokio::test]
async fn up_restarts_a_killed_coordinator_and_a_killed_agent_with_the_same_bits() {
    let mut cluster = Cluster::endless();
    let mut up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    cluster.events().await.saved_at(30).await;

    let ranks = children(child(&up, "baton-worker"));
    kill(child(&up, "baton-coordinator"));
    is_restarted(&cluster, "coordinator").await;
    cluster.served_by(&up).await;
    let mut events = cluster.new_events().await;
    events.next_of(Kind::Saved).await;
    assert_eq!(cluster.status().await.generation, 1, "training continued meanwhile");
    assert_eq!(children(child(&up, "baton-worker")), ranks);

    kill(child(&up, "baton-worker"));
    is_restarted(&cluster, "agent").await;
    events.next_of(Kind::TrainingStarted).await;
    events.next_of(Kind::Saved).await;
    assert!(cluster.status().await.generation > 1);

    interrupt(up.id().unwrap());
    let drained = end_of(&mut up).await;
    assert_eq!(drained.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("up"));
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_stopped_job_does_not_begin_again_although_its_coordinator_crashes() {
    let mut cluster = Cluster::endless();
    let mut up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    cluster.events().await.saved_at(30).await;
    let coordinator = child(&up, "baton-coordinator");
    let mut client = cluster.client().await;
    // So that the coordinator cannot end the ranks before it is killed.
    stop(child(&up, "baton-worker"));

    in_time("an answer", client.stop(StopRequest {})).await.unwrap();
    kill(coordinator);
    is_restarted(&cluster, "coordinator").await;
    wake(child(&up, "baton-worker"));

    let ended = end_of(&mut up).await;
    assert_eq!(ended.code(), Some(i32::from(exit::STOPPED)), "{}", cluster.log("up"));
    assert!(!cluster.log("coordinator").contains("generation 2"), "{}", cluster.log("coordinator"));
}

#[tokio::test]
async fn up_saves_and_stops_although_its_coordinator_does_not_answer() {
    let mut cluster = Cluster::endless();
    let mut up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    cluster.events().await.saved_at(30).await;
    stop(child(&up, "baton-coordinator"));

    interrupt(up.id().unwrap());

    let drained = end_of(&mut up).await;
    let log = cluster.log("up");
    assert_eq!(drained.code(), Some(i32::from(exit::DRAINED)), "{log}");
    assert!(log.contains("it is ended, and the agent saves and stops without it"), "{log}");
    cluster.assert_undisturbed_bits().await;
}

/// Kills the coordinator of `baton up`, and the next ones cannot write their file, as on a full disk.
async fn end_coordinator_for_good(cluster: &Cluster, up: &Child) {
    let file = cluster.run_dir().join("coordinator.json");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    kill(child(up, "baton-coordinator"));
    let look = async || cluster.log("up").contains("cannot be written").then_some(());
    cluster.until("the coordinator cannot start", look).await;
}

#[tokio::test]
async fn up_saves_and_stops_although_its_coordinator_can_never_start_again() {
    let mut cluster = Cluster::endless();
    let mut up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    cluster.events().await.saved_at(30).await;
    end_coordinator_for_good(&cluster, &up).await;

    interrupt(up.id().unwrap());

    let drained = end_of(&mut up).await;
    let log = cluster.log("up");
    assert_eq!(drained.code(), Some(i32::from(exit::DRAINED)), "{log}");
    let newest = cluster.checkpoint_names().into_iter().max().unwrap();
    let text = format!("the coordinator gave no answer; the newest checkpoint is {newest})");
    assert!(log.contains(&text), "{text}: {log}");
}

#[tokio::test]
async fn up_does_not_say_drained_if_nothing_is_saved() {
    let mut cluster =
        Cluster::endless().set("checkpoint.every_epochs=1000000").set("cluster.drain_seconds=1.0");
    let mut up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    cluster.events().await.next_of(Kind::TrainingStarted).await;
    end_coordinator_for_good(&cluster, &up).await;
    // They can no longer save.
    children(child(&up, "baton-worker")).into_iter().for_each(stop);

    interrupt(up.id().unwrap());

    let failed = end_of(&mut up).await;
    let log = cluster.log("up");
    assert_eq!(failed.code(), Some(i32::from(exit::FAILED)), "{log}");
    assert!(log.contains("the state was not saved, and there is no checkpoint"), "{log}");
}

#[tokio::test]
async fn a_signal_while_up_waits_for_an_earlier_run_ends_it_as_later_ones_do() {
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.run_dir()).unwrap();
    // What a process of an earlier run holds.
    let lock = fs::File::create(cluster.run_dir().join("baton-up.lock")).unwrap();
    lock.lock().unwrap();
    let mut up = cluster.up(&[], &[]);
    let waits = async || cluster.log("up").contains("waiting for processes").then_some(());
    cluster.until("`baton up` waits", waits).await;

    terminate(up.id().unwrap());

    let ended = end_of(&mut up).await;
    let log = cluster.log("up");
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{log}");
    assert!(log.contains("stopped before the job was started"), "{log}");
}

#[tokio::test]
async fn after_a_kill_of_up_nobody_waits_for_the_coordinator_that_it_had_started() {
    let mut cluster = Cluster::endless();
    let up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    cluster.events().await.saved_at(10).await;
    let agent = ProcessExit::of(child(&up, "baton-worker"));

    let started = Instant::now();
    kill(up.id().unwrap());
    in_time("the agent ends", agent.wait()).await;

    // An agent whose coordinator may come back waits for it for ten seconds.
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    let log = cluster.log("agent");
    assert!(log.contains("the process that started the agent has ended"), "{log}");
}

/// A killed `baton up` may have ended before its children have started.
#[test]
fn programs_that_start_after_the_end_of_their_parent_end_at_once() {
    let cluster = Cluster::new();
    let run = |program: &str, arguments: &[&str]| {
        let mut command = std::process::Command::new(binary(program));
        command.args(arguments).arg("--run-dir").arg(cluster.run_dir());
        // No process has this number.
        command.arg("--exit-with-parent=4194304").output().unwrap()
    };
    let recipe = cluster.recipe().display().to_string();
    let serve = ["serve", "--recipe", &recipe, "--listen", "127.0.0.1:0"];
    let agent = ["agent", "--coordinator", "http://127.0.0.1:9"];
    for ended in [run("baton-coordinator", &serve), run("baton-worker", &agent)] {
        let text = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{text}");
        assert!(text.contains("process 4194304, which started this one, has ended"), "{text}");
    }
}
