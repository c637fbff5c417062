//! Tests of training on every kind of data set, from recipe to checkpoint.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

#[path = "../../crates/data/tests/kit/digits.rs"]
mod digits;

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton_data::write::{Array, FFCV_MIN_PAGE_BYTES, Field, FieldKind, Value, Writer};
use baton_job::exit;
use baton_proto::v1::watch_events_response::Kind as Event;
use baton_tests::{Cluster, kill};

use self::digits::{spoil, write_digits};

fn digits() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/digits/digits-train.beton")
}

/// Writes the digits as files with these numbers of samples; `damage` may change a stored image.
fn shards(folder: &Path, sizes: &[u64], damage: impl Fn(u64, &mut Vec<u8>)) {
    let mut start = 0;
    for (number, size) in sizes.iter().enumerate() {
        let path = folder.join(format!("train-{number}.beton"));
        write_digits(&path, start..start + size, &damage);
        start += size;
    }
}

fn training_on(pattern: &Path) -> Cluster {
    Cluster::new().set(&format!("data.train={}", pattern.display()))
}

fn quasi_random(pattern: &Path) -> Cluster {
    training_on(pattern).set("data.order=quasi_random").set("data.shuffle_window=300")
}

#[tokio::test]
async fn shards_in_quasi_random_order_end_with_the_same_bits_on_any_number_of_ranks_and_through_a_kill()
 {
    let folder = tempfile::tempdir().unwrap();
    shards(folder.path(), &[200, 150, 300, 0, 250, 100, 200], |_, _| {});
    let pattern = folder.path().join("train-*.beton");
    let one = quasi_random(&pattern).run_to_the_end(1).await;
    assert!(quasi_random(&pattern).run_to_the_end(3).await == one, "3 ranks differ from one");

    let mut killed = quasi_random(&pattern);
    killed.start_coordinator(&[]).await;
    killed.start_agent("node", 2);
    let mut events = killed.events().await;
    events.saved_at(30).await;
    kill(killed.rank_pids(0)[1]);
    events.next_of(Event::RankFailed).await;
    let (coordinator, _) = killed.finish().await;
    assert!(coordinator.success(), "{}", killed.log("coordinator"));
    assert!(killed.newest_state() == one, "a kill changed bits");

    // Random order gives another result, so the order matters in this test.
    let random = training_on(&pattern).run_to_the_end(1).await;
    assert!(random != one);
}

/// Random order depends only on the position of a sample in the whole set.
#[tokio::test]
async fn a_set_in_shards_trains_to_the_same_bits_as_the_same_samples_in_one_file() {
    let folder = tempfile::tempdir().unwrap();
    shards(folder.path(), &[700, 500, 200], |_, _| {});
    let many = training_on(&folder.path().join("train-*.beton")).run_to_the_end(2).await;
    let other = tempfile::tempdir().unwrap();
    shards(other.path(), &[1_400], |_, _| {});
    let single = training_on(&other.path().join("train-0.beton")).run_to_the_end(2).await;
    assert!(many == single);
}

#[tokio::test]
async fn bad_samples_end_the_job_with_their_names_or_are_skipped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let pattern = folder.path().join("train-0.beton");
    shards(folder.path(), &[1_400], |sample, bytes| {
        if sample % 200 == 7 {
            spoil(bytes);
        }
    });

    let mut failing = training_on(&pattern).set("checkpoint={ every_epochs=0 }");
    failing.start_coordinator(&[]).await;
    failing.start_agent("node", 2);
    let (coordinator, _) = failing.finish().await;
    assert_eq!(coordinator.code(), Some(2), "{}", failing.log("coordinator"));
    let log = failing.log("coordinator");
    assert!(log.contains("train-0.beton: sample ") && log.contains("does not decode"), "{log}");
    // All ranks hold the state before the step that needs the sample.
    assert_eq!(failing.checkpoint_names().len(), 1, "{log}");

    let skipping = || training_on(&pattern).set("data.on_bad_sample=skip");
    let one = skipping().run_to_the_end(1).await;
    let mut three = skipping();
    three.start_coordinator(&[]).await;
    three.start_agent("node", 3);
    let mut events = three.events().await;
    let skipped = events.next_of(Event::SamplesSkipped).await;
    assert!(skipped.message.contains("train-0.beton: sample "), "{}", skipped.message);
    events.saved_at(1).await;
    assert!(three.status().await.skipped_samples > 0);
    let (coordinator, _) = three.finish().await;
    assert!(coordinator.success(), "{}", three.log("coordinator"));
    assert!(
        three.newest_state() == one,
        "the replacement of a bad sample depends on the number of ranks"
    );
}

#[tokio::test]
async fn a_bad_validation_sample_loses_no_update_of_the_only_rank() {
    let folder = tempfile::tempdir().unwrap();
    shards(folder.path(), &[300], |sample, bytes| {
        if sample == 200 {
            spoil(bytes);
        }
    });
    let val = format!("data.val={}", folder.path().join("train-0.beton").display());
    // Nothing else is saved.
    let mut failing = Cluster::new().set(&val).set("evaluation.every_epochs=2");
    failing = failing.set("train.epochs=2").set("checkpoint={ every_epochs=0 }");
    failing.start_coordinator(&[]).await;
    failing.start_agent("node", 1);
    let (coordinator, _) = failing.finish().await;
    let log = failing.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(log.contains("train-0.beton: sample 200") && log.contains(" is saved"), "{log}");
    assert_eq!(failing.checkpoint_names().len(), 1, "{log}");
    assert!(failing.newest_state() == Cluster::new().set("train.epochs=2").run_to_the_end(1).await);
}

/// Writes waves of two frequencies with noise; the frequency is determined by the class.
fn signals(path: &Path, count: u64) {
    let array = Array { shape: vec![2, 50], dtype: "<f4".to_owned() };
    let fields =
        vec![Field::new("signal", FieldKind::NdArray(array)), Field::new("label", FieldKind::Int)];
    let mut writer = Writer::create(path, fields, count, FFCV_MIN_PAGE_BYTES).unwrap();
    let mut state = 1_u32;
    for sample in 0..count {
        let label = (sample % 2) as i64;
        let frequency = if label == 0 { 0.2 } else { 0.31 };
        let mut bytes = Vec::new();
        for i in 0..100 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let noise = f64::from(state >> 8) / f64::from(1 << 24) - 0.5;
            let value = (f64::from(i) * frequency).sin() + noise;
            bytes.extend((value as f32).to_le_bytes());
        }
        writer.push(&[Value::Array(&bytes), Value::Int(label)]).unwrap();
    }
    writer.finish().unwrap();
}

fn on_signals(folder: &Path) -> Cluster {
    let file = |name: &str| folder.join(name).display().to_string();
    Cluster::new()
        .set(&format!("data.train={}", file("train.beton")))
        .set(&format!("data.val={}", file("val.beton")))
        .set("data.input_field=signal")
        .set("model.num_classes=2")
}

#[tokio::test]
async fn signals_are_learnt_from_arrays() {
    let folder = tempfile::tempdir().unwrap();
    signals(&folder.path().join("train.beton"), 640);
    signals(&folder.path().join("val.beton"), 128);
    let one = on_signals(folder.path()).run_to_the_end(1).await;
    let mut two = on_signals(folder.path());
    two.start_coordinator(&[]).await;
    two.start_agent("node", 2);
    let mut events = two.events().await;
    let evaluated = events.next_of(Event::Evaluated).await.message;
    let top1 = evaluated.split("top-1 ").nth(1).and_then(|rest| rest.split(' ').next());
    let top1: f64 = top1.and_then(|percent| percent.parse().ok()).expect(&evaluated);
    assert!(top1 > 95.0, "{evaluated}");
    two.finish().await;
    assert!(two.newest_state() == one);
}

#[tokio::test]
async fn a_model_of_images_refuses_arrays() {
    let folder = tempfile::tempdir().unwrap();
    signals(&folder.path().join("train.beton"), 640);
    signals(&folder.path().join("val.beton"), 128);
    let mut cluster =
        on_signals(folder.path()).set("model.arch=resnet18").set("train.resolution=32");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(2));
    let log = cluster.log("coordinator");
    assert!(log.contains("holds arrays of shape [2, 50]"), "{log}");
}

#[tokio::test]
async fn the_recipe_can_select_the_pixels_of_ffcv() {
    let area = Cluster::new().set("data.resize=area").run_to_the_end(1).await;
    let fast = Cluster::new().run_to_the_end(1).await;
    assert!(area != fast);
    assert!(Cluster::new().set("data.resize=area").run_to_the_end(2).await == area);
}

/// Every rank reports its loader's statistics.
#[tokio::test]
async fn status_shows_every_ranks_loader() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    // Ranks report one after the other, so check again after each save.
    let status = loop {
        events.next_of(Event::Saved).await;
        let status = cluster.status().await;
        if status.ranks.len() == 2 && status.ranks.iter().all(|rank| rank.loader.is_some()) {
            break status;
        }
    };
    for rank in &status.ranks {
        let loader =
            rank.loader.as_ref().unwrap_or_else(|| panic!("rank {} sent no report", rank.rank));
        assert_eq!(loader.capacity, 3);
        assert!(loader.ready <= 3 && (0.0..=1.0).contains(&loader.wait));
    }
}

#[tokio::test]
async fn nodes_with_other_contents_of_the_same_size_do_not_train_together() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = training_on(Path::new("train.beton")).set("cluster.min_ranks=2");
    cluster.start_coordinator(&[]).await;
    for (node, changed) in [("a", 0), ("b", 1)] {
        let folder = folder.path().join(node);
        fs::create_dir(&folder).unwrap();
        let mut bytes = fs::read(digits()).unwrap();
        let pixel = bytes.len() / 2;
        bytes[pixel] ^= changed;
        fs::write(folder.join("train.beton"), bytes).unwrap();
        cluster.start_agent_by(&["env", "-C", folder.to_str().unwrap()], node, 1, &[], &[]);
    }
    let (coordinator, _) = cluster.finish().await;
    let log = cluster.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    let expected = "train.beton differs between ranks: rank 1 has other contents of the same size, compared with rank 0";
    assert!(log.contains(expected), "{log}");
}

#[tokio::test]
async fn other_data_are_refused_at_a_resume_until_the_flag_allows_them() {
    let folder = tempfile::tempdir().unwrap();
    let set = folder.path().join("train.beton");
    fs::copy(digits(), &set).unwrap();
    let mut cluster = Cluster::endless().set(&format!("data.train={}", set.display()));
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.end().await;
    let mut bytes = fs::read(&set).unwrap();
    let pixel = bytes.len() / 2;
    bytes[pixel] ^= 1;
    fs::write(&set, bytes).unwrap();

    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let (coordinator, _) = cluster.finish().await;
    let log = cluster.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(log.contains("has other contents of the same size"), "{log}");

    cluster.start_coordinator(&["--allow-recipe-change"]).await;
    cluster.start_agent("node", 1);
    cluster.end().await;
}

#[test]
fn a_data_set_in_a_bucket_is_measured_like_one_on_the_disk() {
    let server = baton_fake_s3::Server::start();
    let location = server.location();
    let (_, prefix) = location.trim_start_matches("s3://").split_once('/').unwrap();
    server.put(&format!("{prefix}/digits.beton"), fs::read(digits()).unwrap());
    let bench = std::process::Command::new(baton_tests::binary("baton"))
        .args([
            "data",
            "bench",
            &format!("{location}/digits.beton"),
            "--resolution",
            "32",
            "--json",
        ])
        .envs(server.environment())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&bench.stderr);
    assert!(bench.status.success(), "{errors}");
    let found: serde_json::Value = serde_json::from_slice(&bench.stdout).expect("JSON");
    assert!(found["median_images_per_second"].as_f64().unwrap() > 0.0, "{found}");
}
