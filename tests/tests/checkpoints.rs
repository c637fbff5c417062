//! Tests of checkpoints of real jobs: in a bucket that outlives the machine, on a full disk, imported from weights.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
};

use baton_fake_s3::Server;
use baton_job::exit;
use baton_proto::v1::watch_events_response::Kind;
use baton_tests::{Cluster, WAIT_TIMEOUT, binary, in_time, skipped};

#[tokio::test]
async fn an_empty_machine_with_only_the_bucket_continues_the_job() {
    let server = Server::start();
    // Every machine has its own run folder.
    let machine = || {
        let location = format!("checkpoint.dir={}", server.location());
        Cluster::endless().set(&location).with_environment(server.environment())
    };
    let mut first = machine();
    first.start_coordinator(&[]).await;
    first.start_agent("first", 2);
    first.events().await.saved_at(60).await;
    first.kill_coordinator().await;
    first.kill_agent(0).await;
    drop(first);

    let mut second = machine();
    second.start_coordinator(&[]).await;
    // Those of the first machine are in the bucket too.
    let mut events = second.new_events().await;
    second.start_agent("second", 3);
    let started = events.next_of(Kind::TrainingStarted).await;
    assert!(started.message.contains("written by 2 ranks"), "{}", started.message);
    second.end().await;
    second.assert_undisturbed_bits().await;
}

#[test]
fn exported_weights_can_be_imported_as_the_first_checkpoint_of_a_job() {
    // A few steps of the smallest ResNet; the 360 validation digits are its training set.
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/digits/digits-val.beton");
    let data = format!("data.train={digits}");
    let mut settings = vec!["model.arch=resnet18", "train.resolution=32", "train.epochs=1", &data];
    settings.extend(["train.global_batch=72", "train.virtual_ranks=1", "ema={decay=0.9}"]);
    settings.push("optimizer.momentum=0.9");
    let resnet = || settings.iter().fold(Cluster::new(), |cluster, setting| cluster.set(setting));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut trained = resnet();
    let state = runtime.block_on(trained.run_to_the_end(1));
    let baton = |arguments: &[&str]| {
        let run = Command::new(binary("baton")).arg("checkpoint").args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&run.stderr).into_owned();
        (run.status.code(), errors)
    };
    let weights = trained.run_dir().join("weights.safetensors");
    let weights = weights.to_str().unwrap();
    let from = trained.run_dir().join("checkpoints");
    let (code, errors) = baton(&["export", "--dir", from.to_str().unwrap(), "--out", weights]);
    assert_eq!(code, Some(0), "{errors}");

    let mut next = resnet();
    let into = next.run_dir().join("checkpoints");
    let recipe = next.recipe();
    let mut import = vec!["import", weights, "--recipe", recipe.to_str().unwrap()];
    import.extend(["--into", into.to_str().unwrap()]);
    import.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    let (code, errors) = baton(&import);
    assert_eq!(code, Some(0), "{errors}");

    let imported = next.newest_state();
    let region = |state: &[(String, Vec<f32>)], name: &str| {
        state.iter().find(|(known, _)| known == name).unwrap().1.clone()
    };
    for name in ["weights", "bn_running"] {
        assert!(region(&imported, name) == region(&state, name), "{name}");
    }
    for name in ["momentum", "ema"] {
        assert!(region(&imported, name).iter().all(|value| *value == 0.0), "{name} starts at zero");
    }

    let (code, errors) = baton(&import);
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("contains checkpoints already"), "{errors}");

    runtime.block_on(async {
        next.start_coordinator(&[]).await;
        next.start_agent("node", 1);
        let started = next.events().await.next_of(Kind::TrainingStarted).await;
        assert!(started.message.contains("step-0000000000-gen-000000"), "{}", started.message);
        let (coordinator, _) = next.finish().await;
        assert!(coordinator.success(), "{}", next.log("coordinator"));
    });

    // `model.pretrained` with the same weights gives the same job.
    let mut pretrained = resnet().set(&format!("model.pretrained={weights}"));
    assert!(runtime.block_on(pretrained.run_to_the_end(1)) == next.newest_state());
}

/// A run whose checkpoints are on a separate small disk, in a mount namespace.
struct SmallDisk {
    cluster: Cluster,
    up: Child,
}

impl SmallDisk {
    /// `None` if the kernel does not allow this.
    fn start() -> Option<Self> {
        let cluster = Cluster::new();
        let disk = cluster.run_dir().join("checkpoints");
        fs::create_dir_all(&disk).unwrap();
        let mounted = "mount -t tmpfs -o size=128k tmpfs \"$1\" && shift && exec \"$@\"";
        let inside = |program: &Path| {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]);
            command.arg(&disk).arg(program);
            command
        };
        let trial = inside(Path::new("true")).output();
        if !trial.is_ok_and(|trial| trial.status.success()) {
            return None;
        }
        let ballast = "head -c 102400 /dev/zero > \"$1/ballast\" && shift && exec \"$@\"";
        let mut command = inside(Path::new("sh"));
        command.args(["-c", ballast, "sh"]).arg(&disk).arg(binary("baton"));
        command.arg("up").arg(cluster.recipe()).args(["--ranks", "2", "--listen", "127.0.0.1:0"]);
        command.args(["--json", "--set", "train.epochs=100000", "--run-dir"]);
        let up = command.arg(cluster.run_dir()).stdout(Stdio::piped()).spawn().unwrap();
        Some(Self { cluster, up })
    }

    /// Frees space on the disk, which is visible only in the namespace of the run.
    fn make_room(&self) {
        let disk = self.cluster.run_dir().join("checkpoints/ballast");
        let disk = disk.strip_prefix("/").unwrap();
        let root = format!("/proc/{}/root", self.up.id());
        fs::remove_file(Path::new(&root).join(disk)).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = self.up.kill();
        let _ = self.up.wait();
    }
}

#[test]
fn training_continues_while_the_disk_is_full_and_the_next_checkpoint_that_fits_is_saved() {
    let Some(mut run) = SmallDisk::start() else {
        return skipped("no mount namespaces: the kernel does not allow them");
    };
    let output = BufReader::new(run.up.stdout.take().unwrap());
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|l| sender.send(l)));
    let wait_for = |expected: &str| loop {
        let line = lines.recv_timeout(WAIT_TIMEOUT).unwrap_or_else(|_| panic!("no {expected:?}"));
        if line.contains(expected) {
            break line;
        }
    };

    let failed = wait_for("save_failed");
    assert!(failed.contains("space"), "{failed}");
    wait_for("save_failed");
    // The first checkpoint may have fitted; the later ones do not.
    let mut new_lines = lines.try_iter();
    assert!(!new_lines.any(|line| line.contains("\"saved\"")), "it fits without free space");
    run.make_room();
    wait_for("\"saved\"");

    baton_tests::terminate(run.up.id());
    assert_eq!(run.up.wait().unwrap().code(), Some(75));
}

#[tokio::test]
async fn a_complete_run_whose_checkpoints_are_gone_says_so() {
    let mut cluster = Cluster::new().set("train.epochs=1");
    cluster.run_to_the_end(1).await;
    std::fs::remove_dir_all(cluster.run_dir().join("checkpoints")).unwrap();
    let up = cluster.up(&[], &[]);
    let ended = in_time("`baton up` ends", up.wait_with_output()).await.unwrap();
    let log = cluster.log("up");
    assert_eq!(ended.status.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(log.contains("has no checkpoint, but this job has saved step-"), "{log}");
}
