//! A network that `torch.export` wrote, with BatchNorm, dropout and stochastic depth, trained by real processes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail loudly")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton_job::exit;
use baton_proto::v1::watch_events_response::Kind;
use baton_tests::{Cluster, binary, children, in_time, interrupt, kill};
use safetensors::{Dtype, tensor::TensorView};

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/program/tests/fixtures");
    folder.join(name).canonicalize().expect("the fixture exists")
}

fn with_program(cluster: Cluster, path: &Path) -> Cluster {
    cluster
        .set("model.arch=program")
        .set(&format!("model.program={}", path.display()))
        .set("train.resolution=8")
        .set("schedule={ kind='constant', lr=0.1 }")
}

fn program(cluster: Cluster) -> Cluster {
    with_program(cluster, &fixture("small.pt2"))
}

/// Names in the module's state dict.
const STATE_DICT: [&str; 12] = [
    "conv.bias",
    "conv.weight",
    "fc.bias",
    "fc.weight",
    "first.weight",
    "norm.bias",
    "norm.num_batches_tracked",
    "norm.running_mean",
    "norm.running_var",
    "norm.weight",
    "order",
    "second.weight",
];

#[tokio::test]
async fn a_program_ends_with_the_same_bits_on_any_number_of_ranks() {
    let short = || program(Cluster::new()).set("train.epochs=15");
    let one = short().run_to_the_end(1).await;
    assert!(short().run_to_the_end(4).await == one, "4 ranks differ from one");

    let mut cluster = short();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    for _ in 0..4 {
        events.next_of(Kind::Evaluated).await;
    }
    let evaluated = events.next_of(Kind::Evaluated).await.message;
    cluster.finish().await;
    assert!(cluster.newest_state() == one, "2 ranks differ from one");
    let top1 = evaluated.split("top-1 ").nth(1).and_then(|rest| rest.split(' ').next());
    let top1: f64 = top1.and_then(|percent| percent.parse().ok()).expect(&evaluated);
    let exported: Vec<String> = cluster.exported().into_keys().collect();
    assert_eq!(exported, STATE_DICT, "as load_state_dict(strict=True) wants them");
    // Of ten classes; the network averages all pixels.
    assert!(top1 > 20.0, "{evaluated}");
}

#[tokio::test]
async fn a_program_continues_after_kills_and_with_other_ranks_with_the_same_bits() {
    let cluster = program(Cluster::endless()).set("checkpoint.every_steps=20");
    cluster.assert_same_bits_through_a_kill_and_with_other_ranks([20, 60, 100]).await;
}

#[tokio::test]
async fn a_program_that_computes_its_loss_trains_with_the_same_bits_on_any_ranks_and_through_a_kill()
 {
    let with_loss = |cluster| {
        with_program(cluster, &fixture("with_loss.pt2"))
            .set("loss={ kind='program', metrics=['accuracy', 'digit_error'] }")
            .set("data.extra_fields=['label']")
            .set("model.num_classes=1")
    };
    let one = with_loss(Cluster::new()).set("train.epochs=4").run_to_the_end(1).await;
    let mut two = with_loss(Cluster::new()).set("train.epochs=4");
    two.start_coordinator(&[]).await;
    two.start_agent("node", 2);
    let evaluated = two.events().await.next_of(Kind::Evaluated).await.message;
    for metric in ["accuracy 0.", "digit_error ", "loss "] {
        assert!(evaluated.contains(metric), "{evaluated}");
    }
    two.finish().await;
    assert!(two.newest_state() == one, "2 ranks differ from one");

    let mut cluster = with_loss(Cluster::endless()).set("checkpoint.every_steps=20");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.saved_at(20).await;
    kill(cluster.rank_pids(0)[0]);
    events.next_of(Kind::RankFailed).await;
    events.next_of(Kind::TrainingStarted).await;
    events.saved_at(60).await;
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_metric_that_is_infinite_or_nan_ends_nothing_and_is_shown_as_such() {
    let mut cluster = with_program(Cluster::new(), &fixture("not_finite_metric.pt2"))
        .set("loss={ kind='program', metrics=['score', 'accuracy'] }")
        .set("model.num_classes=1")
        .set("train.epochs=4");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    let evaluated = events.next_of(Kind::Evaluated).await.message;
    assert!(evaluated.contains("score not finite"), "{evaluated}");
    cluster.finish().await;

    assert!(!cluster.log("coordinator").contains("kind=RankFailed"));
    let curves = fs::read_to_string(cluster.run_dir().join("metrics.jsonl")).unwrap();
    let curves: Vec<serde_json::Value> =
        curves.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps = curves.iter().filter_map(|point| point.get("step")).filter(|step| !step.is_null());
    assert!(steps.clone().count() > 1, "{curves:?}");
    for step in steps {
        assert_eq!(step["metrics"].as_array().map(Vec::len), Some(0), "{step}");
    }
    let score = |point: &serde_json::Value| {
        let metrics = point["evaluation"]["metrics"].as_array()?;
        Some(metrics.iter().find(|metric| metric["name"] == "score")?["value"].clone())
    };
    let scores: Vec<serde_json::Value> = curves.iter().filter_map(score).collect();
    assert!(!scores.is_empty() && scores.iter().all(serde_json::Value::is_null), "{scores:?}");
}

#[tokio::test]
async fn a_run_is_not_continued_with_another_program() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net.pt2");
    fs::copy(fixture("small.pt2"), &path).unwrap();
    let mut cluster = with_program(Cluster::endless(), &path).set("checkpoint.every_steps=10");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(10).await;
    cluster.end().await;

    // The same network with other weights: only the digest shows it.
    fs::copy(fixture("other_weights.pt2"), &path).unwrap();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let (coordinator, _) = cluster.finish().await;
    let log = cluster.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(log.contains("net.pt2 is another one"), "{log}");
}

#[tokio::test]
async fn nodes_with_different_programs_do_not_train_together() {
    let folders = Folders(tempfile::tempdir().unwrap());
    let mut cluster =
        with_program(Cluster::endless(), Path::new("net.pt2")).set("cluster.min_ranks=2");
    cluster.start_coordinator(&[]).await;
    folders.start_agent(&mut cluster, "a", Some("small.pt2"));
    folders.start_agent(&mut cluster, "b", Some("other_weights.pt2"));
    let (coordinator, _) = cluster.finish().await;
    let log = cluster.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(
        log.contains("have different networks in net.pt2: copy the same files to all machines"),
        "{log}"
    );
}

/// Nodes in folders of their own, where the recipe's `net.pt2` may be another file or missing.
struct Folders(tempfile::TempDir);

impl Folders {
    fn start_agent(&self, cluster: &mut Cluster, node: &str, program: Option<&str>) {
        let folder = self.0.path().join(node);
        fs::create_dir(&folder).unwrap();
        if let Some(name) = program {
            fs::copy(fixture(name), folder.join("net.pt2")).unwrap();
        }
        cluster.start_agent_by(&["env", "-C", folder.to_str().unwrap()], node, 1, &[], &[]);
    }
}

#[tokio::test]
async fn a_node_that_joins_with_another_program_is_sent_away_and_training_continues() {
    let folders = Folders(tempfile::tempdir().unwrap());
    let mut cluster =
        with_program(Cluster::endless(), Path::new("net.pt2")).set("checkpoint.every_steps=20");
    cluster.start_coordinator(&[]).await;
    folders.start_agent(&mut cluster, "a", Some("small.pt2"));
    let mut events = cluster.events().await;
    events.saved_at(20).await;

    folders.start_agent(&mut cluster, "b", Some("other_weights.pt2"));
    let sent_away = events.next_of(Kind::NodeLeaves).await.message;
    assert!(sent_away.starts_with("node b is sent away, and training continues"), "{sent_away}");
    assert!(sent_away.contains("have different networks in net.pt2"), "{sent_away}");
    assert_eq!(cluster.agent_ends(1).await.code(), Some(i32::from(exit::BAD_INPUT)));

    let reached = events.next_of(Kind::Saved).await.step();
    events.saved_at(reached + 20).await;
    cluster.end().await;
    // The file of the node that stays is the one that an undisturbed run reads.
    cluster
        .set(&format!("model.program={}", fixture("small.pt2").display()))
        .assert_undisturbed_bits()
        .await;
}

#[tokio::test]
async fn up_keeps_its_coordinator_for_other_agents_when_its_own_is_sent_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net.pt2");
    fs::copy(fixture("small.pt2"), &path).unwrap();
    let mut cluster = with_program(Cluster::endless(), &path).set("checkpoint.every_steps=20");
    let mut up = cluster.up(&[], &[]);
    cluster.served_by(&up).await;
    let mut events = cluster.events().await;
    cluster.start_agent("another", 1);
    events.next_of(Kind::NodesAdded).await;
    events.saved_at(20).await;

    // Its agent starts again, and finds another file.
    fs::copy(fixture("other_weights.pt2"), folder.path().join("new")).unwrap();
    fs::rename(folder.path().join("new"), &path).unwrap();
    let agent =
        children(up.id().unwrap()).into_iter().find(|pid| *pid != own_coordinator(&cluster));
    kill(agent.unwrap());
    events.next_of(Kind::NodeLeaves).await;
    let note = "training continues with the other agents; ";
    let look = async || cluster.log("up").contains(note).then_some(());
    cluster.until(note, look).await;

    let reached = events.next_of(Kind::Saved).await.step();
    events.saved_at(reached + 20).await;
    interrupt(up.id().unwrap());
    let drained = in_time("`baton up` ends", up.wait()).await.unwrap();
    assert_eq!(drained.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("up"));
}

/// The process id of the coordinator that `baton up` has started.
fn own_coordinator(cluster: &Cluster) -> u32 {
    let file = fs::read(cluster.run_dir().join("coordinator.json")).unwrap();
    let endpoint: serde_json::Value = serde_json::from_slice(&file).unwrap();
    u32::try_from(endpoint["pid"].as_u64().unwrap()).unwrap()
}

#[tokio::test]
async fn a_replacement_without_the_program_ends_the_job_after_the_others_have_saved() {
    let folders = Folders(tempfile::tempdir().unwrap());
    // No checkpoint before the one at the end.
    let mut cluster = with_program(Cluster::endless(), Path::new("net.pt2"))
        .set("cluster.min_ranks=2")
        .set("checkpoint.every_steps=1000000");
    cluster.start_coordinator(&[]).await;
    folders.start_agent(&mut cluster, "a", Some("small.pt2"));
    folders.start_agent(&mut cluster, "b", Some("small.pt2"));
    let trains = async || cluster.status().await.latest.filter(|latest| latest.step > 5);
    cluster.until("some steps", trains).await;
    cluster.kill_agent(1).await;
    folders.start_agent(&mut cluster, "c", None);

    let (coordinator, _) = cluster.finish().await;
    let log = cluster.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    let ended = log.lines().rfind(|line| line.contains("net.pt2 cannot be opened")).unwrap();
    let (_, saved) = ended.split_once("the state after step ").expect(ended);
    let (step, _) = saved.split_once(" is saved").expect(ended);
    let step: u64 = step.parse().unwrap();
    let names = cluster.checkpoint_names();
    assert!(names.iter().any(|name| name.starts_with(&format!("step-{step:010}"))), "{names:?}");
}

#[tokio::test]
async fn a_program_that_cannot_be_trained_ends_the_job_with_what_to_do() {
    for (name, setting, expected) in [
        (
            "small.pt2",
            "train.resolution=16",
            "takes x of shape (samples, 3, 8, 8), but the recipe has images of 16 px",
        ),
        (
            "small.pt2",
            "model.num_classes=11",
            "returns (samples, 10), but the recipe has model.num_classes",
        ),
        ("evaluation.pt2", "seed=7", "call model.train() before torch.export.export"),
        ("running_buffer.pt2", "seed=7", "changes average in a step"),
        ("missing.pt2", "seed=7", "missing.pt2 cannot be opened (No such file"),
    ] {
        let path = fixture("small.pt2").with_file_name(name);
        let mut cluster = with_program(Cluster::new(), &path).set(setting);
        cluster.start_coordinator(&[]).await;
        cluster.start_agent("node", 1);
        let (coordinator, agents) = cluster.finish().await;
        let log = cluster.log("coordinator");
        assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{name}: {log}");
        assert_eq!(agents[0].code(), Some(i32::from(exit::BAD_INPUT)), "{name}: {log}");
        assert!(log.contains(expected), "{name}: {log}");
    }
}

#[test]
fn a_probe_takes_images_of_the_size_of_its_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let (images, classes) = (vec![0_u8; 2 * 3 * 8 * 8 * 4], vec![0_u8; 2 * 8]);
    let images = TensorView::new(Dtype::F32, vec![2, 3, 8, 8], &images).unwrap();
    let classes = TensorView::new(Dtype::I64, vec![2], &classes).unwrap();
    let inputs = [("input", images), ("target", classes)];
    safetensors::serialize_to_file(inputs, None, &file("inputs.safetensors")).unwrap();
    let mut probe = std::process::Command::new(binary("baton-worker"));
    probe.args(["probe", "--set", "model.arch=program", "--set"]);
    probe.arg(format!("model.program={}", fixture("small.pt2").display()));
    let recipe = "name = 'probe'\ndata = { train = 'none', val = 'none' }\noptimizer.kind = 'sgd'\n\
                  train = { epochs = 1, global_batch = 2, virtual_ranks = 1, resolution = 64 }\n\
                  schedule = { kind = 'constant', lr = 0.1 }\nmodel.num_classes = 10\n";
    fs::write(file("recipe.toml"), recipe).unwrap();
    probe.arg("--recipe").arg(file("recipe.toml"));
    probe.arg("--inputs").arg(file("inputs.safetensors")).arg("--out").arg(file("out"));

    let output = probe.output().unwrap();

    assert!(output.status.success(), "{output:?}");
    assert!(file("out").exists());
}
