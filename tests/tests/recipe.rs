//! Tests of recipes with all options at once, from file to checkpoint; and of diverging training.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

#[path = "../../crates/data/tests/kit/digits.rs"]
mod digits;

use std::{path::Path, process::Command};

use baton_data::write::{Array, Field, FieldKind, Value, Writer};
use baton_proto::v1::watch_events_response::Kind as Event;
use baton_tests::{Cluster, binary, kill};

use self::digits::write_digits;

/// A ResNet with all options that change its results.
fn everything(few: &str) -> Cluster {
    [
        "model={ arch='resnet18', num_classes=10, blur_pool=true, zero_init_gamma=true }",
        "augment={ mixup_alpha=0.4, cutmix_probability=0.5, crop_scale=[0.5, 1.0], alternate_flips=true, \
         shift=2, rand_augment={}, brightness=0.2, contrast=0.2, saturation=0.2, erase=0.25 }",
        "train={ epochs=3, global_batch=32, resolution=32, virtual_ranks=2, grad_accumulation=2, \
         clip_grad_norm=0.5, recompute=['layer1', 'layer3'], \
         phases=[{ from_epoch=1, resolution=64, global_batch=16, ramp_epochs=1 }] }",
        "optimizer={ kind='adamw', weight_decay=0.05 }",
        "schedule={ kind='one_cycle', peak_lr=2e-3 }",
        "loss.label_smoothing=0.1",
        "precision.compute=bf16",
        "ema={ decay=0.9, every_steps=2 }",
        "evaluation={ every_epochs=1, flip=true, subset=0.5, batch=18, resolution=32 }",
        "checkpoint={ every_epochs=1, every_steps=2 }",
    ]
    .into_iter()
    .fold(on(few), |cluster, entry| cluster.set(entry))
}

fn on(few: &str) -> Cluster {
    Cluster::new().set(&format!("data.train={few}")).set(&format!("data.val={few}"))
}

/// Writes the first digits as a separate set, so that a ResNet needs only a second per epoch.
fn few_digits(folder: &Path, samples: u64) -> String {
    let path = folder.join("few.beton");
    write_digits(&path, 0..samples, |_, _| {});
    path.display().to_string()
}

#[tokio::test]
async fn with_every_option_on_ranks_kills_and_resumes_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let few = few_digits(folder.path(), 32);
    let one = everything(&few).run_to_the_end(1).await;
    let names: Vec<&str> = one.iter().map(|(name, _)| name.as_str()).collect();
    for region in ["weights", "exp_avg", "ema", "bn_running_ema"] {
        assert!(names.contains(&region), "{names:?}");
    }

    let mut killed = everything(&few);
    killed.start_coordinator(&[]).await;
    killed.start_agent("node", 2);
    let mut events = killed.events().await;
    events.saved_at(2).await;
    kill(killed.rank_pids(0)[1]);
    events.next_of(Event::RankFailed).await;
    // Then kill all processes, in another epoch.
    events.saved_at(4).await;
    killed.kill_coordinator().await;
    killed.kill_agent(0).await;
    assert!(killed.run_to_the_end(1).await == one, "two ranks or a kill changed bits");
}

/// Runs `baton`, which must succeed.
fn baton(arguments: &[&str]) {
    let run = Command::new(binary("baton")).args(arguments).output().unwrap();
    assert!(run.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&run.stderr));
}

/// Options that exclude some of [`everything`]: frozen blocks, Nesterov's momentum, Baton's own kernels.
#[tokio::test]
async fn with_frozen_blocks_nesterov_and_fused_kernels_ranks_and_kills_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let few = few_digits(folder.path(), 16);
    let small = || {
        [
            "train={ epochs=2, global_batch=8, resolution=32, virtual_ranks=2 }",
            "evaluation={ every_epochs=2, resolution=32, batch=16 }",
            "checkpoint={ every_epochs=0, every_steps=1 }",
        ]
        .into_iter()
        .fold(on(&few), |cluster, entry| cluster.set(entry))
        .set("optimizer={ kind='sgd', momentum=0.9, nesterov=true, weight_decay=1e-3 }")
        .set("augment.trivial_augment=true")
    };
    let mut before = small().set("model={ arch='resnet18', num_classes=10 }");
    let whole = before.run_to_the_end(1).await;
    let weights = folder.path().join("weights.safetensors").display().to_string();
    let checkpoints = before.run_dir().join("checkpoints").display().to_string();
    baton(&["checkpoint", "export", "--dir", &checkpoints, "--out", &weights]);

    let model = format!(
        "model={{ arch='resnet18', num_classes=10, pretrained='{weights}', freeze=['stem', 'layer1'] }}"
    );
    let tuning = || small().set(&model).set("precision.fused=true");
    let one = tuning().run_to_the_end(1).await;
    let len = |state: &[(String, Vec<f32>)]| {
        state.iter().find(|(name, _)| name == "weights").unwrap().1.len()
    };
    assert!(len(&one) < len(&whole), "nothing is frozen");
    assert_survives_a_kill(tuning(), &one).await;
}

/// Two ranks, one of which is killed, end with `expected`.
async fn assert_survives_a_kill(mut cluster: Cluster, expected: &[(String, Vec<f32>)]) {
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.saved_at(2).await;
    kill(cluster.rank_pids(0)[1]);
    events.next_of(Event::RankFailed).await;
    let (coordinator, _) = cluster.finish().await;
    assert!(coordinator.success(), "{}", cluster.log("coordinator"));
    assert!(cluster.newest_state() == expected, "two ranks or a kill changed bits");
}

/// Signals whose target is a float, with the optimizer that no other story uses.
#[tokio::test]
async fn a_regression_is_learnt_and_evaluated_with_the_same_bits_on_two_ranks_and_through_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let sizes = ["--samples", "512", "--val-samples", "128", "--noise", "0"];
    baton(&[&["data", "synth", "signals", "--out", &out][..], &sizes].concat());
    let regression = || {
        [
            "data.input_field=signal",
            "data.label_field=target",
            "model={ arch='resnet34_1d', num_classes=1, zero_init_gamma=true, channels_last=false }",
            "train={ epochs=2, global_batch=32, virtual_ranks=2 }",
            "optimizer={ kind='lars', momentum=0.9, trust_coefficient=0.02 }",
            "schedule={ kind='warmup_cosine', peak_lr=1.0, warmup_epochs=0.5 }",
            "loss.kind=huber",
            "augment.signal={ noise=0.05, scale=0.1, shift=0.02, time_mask=0.1, channel_mask=0.1 }",
            "evaluation={ every_epochs=2 }",
            "checkpoint={ every_epochs=1, every_steps=2 }",
        ]
        .into_iter()
        .fold(Cluster::new(), |cluster, entry| cluster.set(entry))
        .set(&format!("data.train={out}/signals-train.beton"))
        .set(&format!("data.val={out}/signals-val.beton"))
    };
    let mut learner = regression();
    let one = learner.run_to_the_end(1).await;
    let log = learner.log("coordinator");
    let fit = log.split("validation Spearman ").nth(1).and_then(|rest| rest.split(',').next());
    let fit: f64 = fit.and_then(|number| number.parse().ok()).expect(&log);
    assert!(fit > 0.5, "{log}");
    assert_survives_a_kill(regression(), &one).await;
}

/// Four updates: fp16 has no fast convolutions on CPUs.
#[tokio::test]
async fn the_loss_scale_and_the_number_of_skipped_updates_survive_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let few = few_digits(folder.path(), 16);
    let scaling = || {
        [
            "model={ arch='resnet18', num_classes=10 }",
            "train={ epochs=2, global_batch=8, resolution=32, virtual_ranks=2 }",
            "augment={}",
            "precision={ compute='fp16', loss_scale={ initial=1e30, backoff=1e-27 } }",
            "evaluation={ every_epochs=2, resolution=32, batch=16 }",
            "checkpoint={ every_epochs=0, every_steps=1 }",
        ]
        .into_iter()
        .fold(on(&few), |cluster, entry| cluster.set(entry))
    };
    let one = scaling().run_to_the_end(1).await;
    let (_, scale) = one.iter().find(|(name, _)| name == "loss_scale").unwrap();
    // One update overflowed, three did not.
    assert_eq!(scale[1..], [3.0, 1.0]);
    assert!((scale[0] / 1e3 - 1.0).abs() < 1e-6, "{scale:?}");

    let mut killed = scaling();
    killed.start_coordinator(&[]).await;
    killed.start_agent("node", 2);
    let mut events = killed.events().await;
    events.saved_at(2).await;
    killed.kill_coordinator().await;
    killed.kill_agent(0).await;
    assert!(killed.run_to_the_end(1).await == one);
}

/// Writes arrays of eight values with the class as the first value. The values of one array are so large that its
/// update damages the weights.
fn poisoned_arrays(path: &Path, samples: u64, poison: Option<u64>) {
    let array = Array { dtype: "<f4".to_owned(), shape: vec![8] };
    let fields =
        [Field::new("array", FieldKind::NdArray(array)), Field::new("label", FieldKind::Int)];
    let page = baton_data::write::FFCV_MIN_PAGE_BYTES;
    let mut writer = Writer::create(path, fields.to_vec(), samples, page).unwrap();
    for sample in 0..samples {
        let class = (sample * 7 % 10) as i64;
        let mut values = [0.1_f32; 8];
        values[0] = class as f32;
        if poison == Some(sample) {
            values = [1e30; 8];
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.push(&[Value::Array(&bytes), Value::Int(class)]).unwrap();
    }
    writer.finish().unwrap();
}

fn on_poison(folder: &Path) -> Cluster {
    let (train, val) = (folder.join("train.beton"), folder.join("val.beton"));
    poisoned_arrays(&train, 640, Some(200));
    poisoned_arrays(&val, 100, None);
    Cluster::new()
        .set(&format!("data.train={}", train.display()))
        .set(&format!("data.val={}", val.display()))
        .set("data.input_field=array")
        .set("train.epochs=3")
        .set("guard.window=2")
        .set("augment={}")
}

#[tokio::test]
async fn a_poisoned_batch_is_detected_named_and_skipped_with_the_same_bits_on_any_number_of_ranks()
{
    let folder = tempfile::tempdir().unwrap();
    let skipping = || on_poison(folder.path()).set("guard.remedy=skip_batch");
    let mut first = skipping();
    let one = first.run_to_the_end(1).await;
    let harmless = one.iter().all(|(_, values)| values.iter().all(|value| value.abs() < 1e6));
    assert!(harmless, "{}", first.log("coordinator"));

    let mut three = skipping();
    three.start_coordinator(&[]).await;
    three.start_agent("node", 3);
    let mut events = three.events().await;
    let diverged = events.next_of(Event::Diverged).await;
    for part in ["mean loss rose", "samples", "without that batch and the one before it"] {
        assert!(diverged.message.contains(part), "{}", diverged.message);
    }
    let (coordinator, _) = three.finish().await;
    assert!(coordinator.success(), "{}", three.log("coordinator"));
    assert!(three.newest_state() == one);
}

#[tokio::test]
async fn a_divergence_without_a_remedy_ends_the_job_with_diagnosis_and_advice() {
    let folder = tempfile::tempdir().unwrap();
    // Half the learning rate does not help against a sample of 1e30.
    let mut cluster = on_poison(folder.path()).set("guard.max_rollbacks=2");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(2), "{}", cluster.log("coordinator"));
    let log = cluster.log("coordinator");
    assert!(log.contains("mean loss rose") && log.contains("train.clip_grad_norm"), "{log}");
    let written: Vec<String> = std::fs::read_dir(cluster.run_dir())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("diagnosis-") && name.ends_with(".json"))
        .collect();
    assert_eq!(written.len(), 3, "{written:?}");
}

#[tokio::test]
async fn a_rate_that_is_much_too_high_is_lowered_and_training_completes() {
    let exploding = || {
        Cluster::new()
            .set("train.epochs=4")
            .set("schedule={kind='piecewise_linear', points=[[0.0, 0.1], [2.0, 0.1], [2.1, 1e37], [4.0, 1e37]]}")
            .set("guard.lr_factor=1e-37")
    };
    let one = exploding().run_to_the_end(1).await;
    let mut killed = exploding();
    killed.start_coordinator(&[]).await;
    killed.start_agent("node", 2);
    let mut events = killed.events().await;
    events.next_of(Event::Diverged).await;
    let started = events.next_of(Event::TrainingStarted).await;
    assert!(started.message.contains("from checkpoint"), "{}", started.message);
    // The state of rank 1 from before the rollback is invalid; its newer state is valid.
    let step = killed.status().await.latest.map_or(0, |step| step.step);
    events.saved_at(step + 7).await;
    kill(killed.rank_pids(0)[1]);
    let (coordinator, _) = killed.finish().await;
    assert!(coordinator.success(), "{}", killed.log("coordinator"));
    assert!(killed.newest_state() == one);
}

#[tokio::test]
async fn a_target_completes_the_job_early_with_everything_saved() {
    let mut cluster = Cluster::new().set("train.epochs=500").set("limits.target_top1=0.8");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    let ends_early = events.next_of(Event::EndsEarly).await;
    assert!(ends_early.message.contains("value = 0.8 } is reached"), "{}", ends_early.message);
    let (coordinator, agents) = cluster.finish().await;
    assert!(coordinator.success() && agents[0].success(), "{}", cluster.log("coordinator"));
    assert!(!cluster.newest_state().is_empty());
}

#[tokio::test]
async fn a_job_that_reaches_its_limit_saves_and_stops_with_its_own_exit_code() {
    let mut cluster = Cluster::new()
        .set("train.epochs=100000")
        .set("limits={ max_dollars=0.01, dollars_per_hour=20.0 }");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(4), "{}", cluster.log("coordinator"));
    assert!(!cluster.newest_state().is_empty());
}

/// Weights of a short training, with the recipe for them.
struct Trained {
    cluster: Cluster,
    weights: String,
}

impl Trained {
    const NETWORK: &str = "model={ arch='resnet18', num_classes=10 }";
    const SIZES: &str = "train={ epochs=1, global_batch=16, resolution=32, virtual_ranks=1 }";

    async fn new(folder: &Path, data: &str) -> Self {
        let mut cluster = on(data)
            .set(Self::NETWORK)
            .set(Self::SIZES)
            .set("evaluation={ every_epochs=1, batch=10 }");
        cluster.run_to_the_end(1).await;
        let weights = folder.join("w.safetensors").display().to_string();
        let run_dir = cluster.run_dir().display().to_string();
        baton(&["checkpoint", "export", "--run-dir", &run_dir, "--out", &weights]);
        Self { cluster, weights }
    }

    /// `baton eval` or `baton predict` with these weights.
    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary("baton"));
        command.arg(name).arg("--recipe").arg(self.cluster.recipe());
        command.args(["--weights", &self.weights, "--set", Self::NETWORK, "--set", Self::SIZES]);
        command.args(["--set", "evaluation={ batch=10 }", "--json"]).args(arguments);
        command
    }

    /// What the command prints, which must succeed.
    fn json(&self, name: &str, arguments: &[&str]) -> serde_json::Value {
        let run = self.command(name, arguments).output().unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        serde_json::from_slice(&run.stdout).unwrap()
    }
}

#[tokio::test]
async fn predictions_are_the_same_on_any_number_of_processes_and_through_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let trained = Trained::new(folder.path(), &few_digits(folder.path(), 16)).await;
    let new = folder.path().join("new.beton").display().to_string();
    write_digits(Path::new(&new), 0..360, |_, _| {});
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (one, two, expected) = (path("one.csv"), path("two.csv"), path("expected.csv"));

    // So large that a process needs seconds.
    let size = "evaluation.resolution=96";
    trained.json("eval", &["--data", &new, "--set", size, "--predictions", &expected]);
    let of_one = trained.json("predict", &["--data", &new, "--set", size, "--out", &one]);
    assert_eq!((of_one["predictions"].as_u64(), of_one["found"].as_u64()), (Some(360), Some(0)));
    let text = std::fs::read_to_string(&one).unwrap();
    let expected = std::fs::read_to_string(&expected).unwrap();
    // An evaluation also writes the labels.
    let without_label = |line: &str| {
        let mut values: Vec<&str> = line.split(',').collect();
        values.remove(1);
        values.join(",")
    };
    assert_eq!(text, expected.lines().map(|line| without_label(line) + "\n").collect::<String>());

    let same = ["--data", &new, "--set", size, "--out", &two];
    let arguments = [&same[..], &["--ranks", "2"]].concat();
    let mut child = trained.command("predict", &arguments).spawn().unwrap();
    let has_lines = |part: u32| {
        let path = format!("{two}.parts/part-{part}.csv");
        std::fs::metadata(path).is_ok_and(|file| file.len() > 0)
    };
    let both = async || (has_lines(0) && has_lines(1)).then_some(());
    trained.cluster.until("both parts have lines", both).await;
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!Path::new(&two).exists(), "it was complete before the kill");
    // Its processes end with it. Now one process predicts both parts, one after the other.
    let found = trained.json("predict", &same);
    assert!((20..360).contains(&found["found"].as_u64().unwrap()), "{found}");
    assert_eq!(std::fs::read_to_string(&two).unwrap(), text);
    assert!(!Path::new(&format!("{two}.parts")).exists());
}

#[tokio::test]
async fn an_evaluation_shows_the_prediction_for_each_sample_and_the_scores_of_each_class() {
    let folder = tempfile::tempdir().unwrap();
    let few = few_digits(folder.path(), 32);
    let trained = Trained::new(folder.path(), &few).await;
    let predictions = folder.path().join("predictions.csv").display().to_string();
    let found = trained.json(
        "eval",
        &["--data", &few, "--predictions", &predictions, "--probabilities", "--by-class"],
    );

    // A wrong file in the option is not lost.
    for own in [&trained.weights, &few] {
        let before = std::fs::read(own).unwrap();
        for name in ["eval", "predict"] {
            let option = if name == "eval" { "--predictions" } else { "--out" };
            let refused = trained.command(name, &["--data", &few, option, own]).output().unwrap();
            let message = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert_eq!(refused.status.code(), Some(2), "{message}");
            assert!(message.contains("exists and holds no predictions"), "{message}");
        }
        assert!(std::fs::read(own).unwrap() == before, "{own} has changed");
    }

    let table = std::fs::read_to_string(&predictions).unwrap();
    let mut lines = table.lines();
    assert_eq!(
        lines.next().unwrap(),
        "sample,label,prediction,probability,p0,p1,p2,p3,p4,p5,p6,p7,p8,p9"
    );
    let mut confusion = vec![vec![0_u64; 10]; 10];
    for (sample, line) in lines.enumerate() {
        let values: Vec<f64> = line.split(',').map(|value| value.parse().unwrap()).collect();
        assert_eq!(values[0], sample as f64);
        let [label, prediction] = [values[1] as usize, values[2] as usize];
        assert_eq!(values[3], values[4 + prediction], "{line}");
        assert!(values[4..].iter().all(|probability| *probability <= values[3]), "{line}");
        assert!((values[4..].iter().sum::<f64>() - 1.0).abs() < 1e-5, "{line}");
        confusion[label][prediction] += 1;
    }
    assert_eq!(confusion.iter().flatten().sum::<u64>(), 32, "{table}");
    assert_eq!(found["by_class"]["confusion"], serde_json::json!(confusion));
    let right: u64 = (0..10).map(|class| confusion[class][class]).sum();
    assert_eq!(found["top1"].as_f64().unwrap(), right as f64 / 32.0, "{found}");
    let recall = found["by_class"]["classes"][3]["recall"].as_f64().unwrap();
    let of_three: u64 = confusion[3].iter().sum();
    assert_eq!(recall, confusion[3][3] as f64 / of_three as f64);
}
