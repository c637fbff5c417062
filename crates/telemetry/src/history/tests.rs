use baton_proto::v1::{Accuracy, EvaluatedStep, Extent, GeneratedText, Step};
use baton_recipe::progress::Fit;
use proptest::prelude::*;

use super::*;

fn point(unix_millis: u64, metrics: Metrics) -> StreamMetricsResponse {
    StreamMetricsResponse {
        unix_millis,
        generation: 3,
        metrics: Some(metrics),
        ..Default::default()
    }
}

fn step(step: u64) -> StreamMetricsResponse {
    let loss = 1.0 / (step + 1) as f64;
    point(1_000_000 + step, Metrics::Step(Step { step, loss, ..Default::default() }))
}

fn evaluation(step: u64) -> StreamMetricsResponse {
    let accuracy = Some(
        baton_recipe::progress::Accuracy::from_legacy_fields(360, 0.1, (0.7, 0.9), None).into(),
    );
    let extent = Extent::Full.into();
    point(
        1_000_000 + step,
        Metrics::Evaluation(EvaluatedStep { step, accuracy, extent, ..EvaluatedStep::default() }),
    )
}

fn began(step: u64) -> StreamMetricsResponse {
    point(1_000_000 + step, Metrics::BeganAt(step))
}

fn steps(points: &[StreamMetricsResponse]) -> Vec<u64> {
    let steps = points.iter().filter_map(|point| match &point.metrics {
        Some(Metrics::Step(step)) => Some(step.step),
        _ => None,
    });
    steps.collect()
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    (folder, path)
}

#[test]
fn a_file_that_is_being_written_is_read_without_its_incomplete_line_and_not_changed() {
    let (_folder, path) = folder();
    let mut history = History::open(&path).unwrap();
    for point in [began(0), step(1), evaluation(1), step(2), began(1), step(2)] {
        history.add(point).unwrap();
    }
    history.flush().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes.extend_from_slice(b"{\"unix_millis\":7,");
    fs::write(&path, &bytes).unwrap();
    assert_eq!(points_in(&path).unwrap(), history.points(0));
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert!(points_in(&path.with_extension("none")).is_err());
}

#[test]
fn added_points_are_kept_over_a_restart() {
    let (_folder, path) = folder();
    let fit = Some(Fit { mae: 0.25, pearson: 0.5, spearman: -1.0 });
    let accuracy = Accuracy::from(baton_recipe::progress::Accuracy::from_legacy_fields(
        7,
        0.125,
        (0.0, 0.0),
        fit,
    ));
    let full = point(
        5,
        Metrics::Evaluation(EvaluatedStep {
            step: 2,
            accuracy: Some(accuracy.clone()),
            ema: Some(accuracy),
            extent: Extent::Subset.into(),
            texts: vec![GeneratedText {
                sample: 5,
                text: "x = 1".to_owned(),
                ..GeneratedText::default()
            }],
        }),
    );
    let metrics = Step {
        step: 1,
        epoch: 2,
        total_steps: 3,
        steps_per_epoch: 4,
        loss: 0.1,
        top1: 0.2,
        lr: 1e-300,
        samples_per_second: 123.456,
        loader_wait: 0.3,
        gradient_norm: Some(5.5),
        loss_scale: Some(65536.0),
        resolution: 224,
        global_batch: 1024,
        step_of_epoch: 9,
        metrics: vec![("top1".to_owned(), 0.2).into()],
    };
    let added = [began(0), point(4, Metrics::Step(metrics)), full.clone()];
    let mut history = History::open(&path).unwrap();
    for point in added.clone() {
        history.add(point).unwrap();
    }
    drop(history);

    let history = History::open(&path).unwrap();

    assert_eq!(history.points(0), added);
    assert_eq!(history.points(4), [began(0), full]);
    assert_eq!(history.unreadable_lines(), 0);
}

#[test]
fn a_loss_that_is_not_finite_is_read_as_nan() {
    let (_folder, path) = folder();
    let mut history = History::open(&path).unwrap();
    let metrics = Step { step: 1, loss: f64::INFINITY, ..Default::default() };
    history.add(point(1, Metrics::Step(metrics))).unwrap();
    drop(history);

    let points = History::open(&path).unwrap().points(0);

    assert!(matches!(&points[0].metrics, Some(Metrics::Step(step)) if step.loss.is_nan()));
}

#[test]
fn an_incomplete_last_line_is_overwritten_by_the_next_one() {
    for incomplete in
        ["{\"unix_millis\":17,\"gen", "{\"unix_millis\":17}", "\0\0\0\0", "nonsense\n"]
    {
        let (_folder, path) = folder();
        let mut history = History::open(&path).unwrap();
        history.add(step(1)).unwrap();
        drop(history);
        let mut text = fs::read(&path).unwrap();
        text.extend(incomplete.as_bytes());
        fs::write(&path, text).unwrap();

        let mut history = History::open(&path).unwrap();
        history.add(step(2)).unwrap();
        drop(history);

        let history = History::open(&path).unwrap();
        assert_eq!(history.points(0), [step(1), step(2)], "{incomplete}");
        assert_eq!(history.unreadable_lines(), 0, "{incomplete}");
    }
}

#[test]
fn unreadable_lines_in_the_middle_are_skipped_and_counted() {
    let (_folder, path) = folder();
    let [first, last] = [step(1), step(2)].map(|point| line(&point).unwrap());
    let text = [&first[..], b"\n", b"{\"began_at\":-1}\n", b"\xff\xfe\n", &last[..]].concat();
    fs::write(&path, text).unwrap();

    let history = History::open(&path).unwrap();

    assert_eq!(history.points(0), [step(1), step(2)]);
    assert_eq!(history.unreadable_lines(), 3);
}

#[test]
fn unknown_fields_of_a_newer_version_are_ignored() {
    let (_folder, path) = folder();
    let text = "{\"unix_millis\":9,\"generation\":1,\"began_at\":5,\"mood\":\"good\"}\n";
    fs::write(&path, text).unwrap();

    let history = History::open(&path).unwrap();

    assert!(matches!(history.points(0)[0].metrics, Some(Metrics::BeganAt(5))));
}

#[test]
fn a_rollback_drops_points_of_later_steps_and_keeps_the_mark() {
    let (_folder, path) = folder();
    let mut history = History::open(&path).unwrap();
    for point in
        [began(0), step(1), step(2), evaluation(2), step(3), evaluation(3), began(2), step(3)]
    {
        history.add(point).unwrap();
    }

    let points = history.points(0);

    assert_eq!(points, [began(0), step(1), step(2), evaluation(2), began(2), step(3)]);
}

#[test]
fn a_step_added_twice_is_kept_once() {
    let (_folder, path) = folder();
    let mut history = History::open(&path).unwrap();
    for point in [step(1), step(2), step(1), step(2), step(3)] {
        history.add(point).unwrap();
    }
    drop(history);

    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 3);
    assert_eq!(steps(&History::open(&path).unwrap().points(0)), [1, 2, 3]);
}

#[test]
fn an_evaluation_made_again_replaces_the_first_one() {
    let (_folder, path) = folder();
    let mut history = History::open(&path).unwrap();
    for point in [evaluation(2), began(2), evaluation(2)] {
        history.add(point).unwrap();
    }

    assert_eq!(history.points(0), [began(2), evaluation(2)]);
}

#[test]
fn a_long_job_is_thinned_evenly_and_keeps_its_first_and_last_points() {
    let (_folder, path) = folder();
    let mut history = History::open(&path).unwrap();
    for at in 0..50_000 {
        history.add(step(7 + 10 * at)).unwrap();
    }

    let kept = steps(&history.points(0));

    assert!((2_000..=4_096).contains(&kept.len()), "{}", kept.len());
    assert_eq!((kept[0], kept[kept.len() - 1]), (7, 7 + 10 * 49_999));
    let gaps: Vec<_> = kept.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let (last, others) = gaps.split_last().unwrap();
    let (least, most) = (others.iter().min().unwrap(), others.iter().max().unwrap());
    // One step in ten is added.
    assert!(most - least <= 10 && last <= most, "{least} {most} {last}");
}

#[test]
fn a_file_that_is_too_large_is_rewritten_with_the_points_in_memory() {
    let (folder, path) = folder();
    let limits = HistoryLimits { points: 8, file_bytes: 10_000 };
    let mut history = History::with_limits(path.clone(), limits).unwrap();
    for number in 1..=100 {
        history.add(step(number)).unwrap();
    }
    history.flush().unwrap();

    let text = fs::read_to_string(&path).unwrap();
    let thinned: ThinnedHeader = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert!(thinned.thinned_to_steps.is_power_of_two() && thinned.thinned_to_steps > 1);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let points = history.points(0);
    assert_eq!((steps(&points)[0], *steps(&points).last().unwrap()), (1, 100));
    drop(history);
    assert_eq!(History::with_limits(path, limits).unwrap().points(0), points);
}

#[test]
fn a_second_job_in_the_folder_is_not_thinned_like_the_first() {
    // With the lower limit the file is rewritten in both jobs, with the higher one never.
    for file_bytes in [2_000, 1 << 20] {
        let (_folder, path) = folder();
        let limits = HistoryLimits { points: 8, file_bytes };
        let mut history = History::with_limits(path.clone(), limits).unwrap();
        for number in 1..=1_000 {
            history.add(step(number)).unwrap();
        }
        assert!(history.points.stride() > 100);
        history.add(began(0)).unwrap();
        for number in 1..=8 {
            history.add(step(number)).unwrap();
        }
        assert_eq!(steps(&history.points(0)), [1, 2, 3, 4, 5, 6, 7, 8], "{file_bytes}");
        for number in 9..=100 {
            history.add(step(number)).unwrap();
        }
        let (points, stride) = (history.points(0), history.points.stride());
        drop(history);

        let again = History::with_limits(path, limits).unwrap();

        assert_eq!((again.points(0), again.points.stride()), (points, stride), "{file_bytes}");
    }
}

#[test]
fn steps_are_flushed_once_a_second_and_marks_at_once() {
    let (_folder, path) = folder();
    let lines = || fs::read_to_string(&path).unwrap().lines().count();
    let at = |unix_millis, number| StreamMetricsResponse { unix_millis, ..step(number) };
    let mut history = History::open(&path).unwrap();
    history.add(at(10_000, 1)).unwrap();
    history.add(at(10_999, 2)).unwrap();
    assert_eq!(lines(), 1);

    history.add(at(11_000, 3)).unwrap();
    assert_eq!(lines(), 3);

    history.add(at(11_001, 4)).unwrap();
    history.add(StreamMetricsResponse { unix_millis: 11_002, ..began(4) }).unwrap();
    assert_eq!(lines(), 5);

    history.add(at(11_003, 5)).unwrap();
    history.flush().unwrap();
    assert_eq!(lines(), 6);
}

#[test]
fn the_error_names_a_file_that_cannot_be_opened() {
    let (folder, _) = folder();
    let path = folder.path().join("missing/metrics.jsonl");

    let message = History::open(&path).unwrap_err().to_string();

    assert!(message.starts_with(&format!("cannot open {}: ", path.display())), "{message}");
}

fn any_point() -> impl Strategy<Value = (u8, u64)> {
    (0..20_u8, 0..40_u64)
}

proptest! {
    #[test]
    fn any_history_stays_bounded_and_is_unchanged_by_a_restart(
        series in prop::collection::vec(any_point(), 0..400)
    ) {
        let limits = HistoryLimits { points: 8, file_bytes: 4_000 };
        let (_folder, path) = folder();
        let mut history = History::with_limits(path.clone(), limits).unwrap();
        let mut newest = 0;
        let mut longest = 0;
        for (at, (kind, number)) in series.into_iter().enumerate() {
            // Mostly forward, so that there is something to thin; sometimes back or to any step.
            let point = match kind {
                0..14 => { newest += number / 8; step(newest) }
                14 => step(number),
                15..18 => evaluation(newest.saturating_sub(number / 10)),
                _ => { newest = newest.saturating_sub(number); began(newest) }
            };
            let point = StreamMetricsResponse { unix_millis: 1_000 + at as u64, ..point };
            longest = longest.max(line(&point).unwrap().len() as u64);
            history.add(point).unwrap();
            prop_assert!(history.points(0).len() <= 3 * limits.points);
            // The file may grow to twice the size of the points in memory.
            let most = limits.file_bytes.max(2 * longest * (3 * limits.points as u64 + 1));
            prop_assert!(history.bytes <= most, "{} of {most}", history.bytes);
        }
        let points = history.points(0);
        let kept = steps(&points);
        prop_assert!(kept.is_sorted_by(|a, b| a < b), "{kept:?}");
        history.flush().unwrap();
        prop_assert_eq!(fs::metadata(&path).unwrap().len(), history.bytes);
        drop(history);
        let again = History::with_limits(path, limits).unwrap();
        prop_assert_eq!(again.points(0), points);
        prop_assert_eq!(again.unreadable_lines(), 0);
    }
}
