//! What a trial has reached, read from its run folder. Nothing else is kept about a trial, so a sweep that was killed knows
//! as much as one that was not.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use baton_proto::v1::{
    Metric, StreamMetricsResponse, metric::Direction, stream_metrics_response::Metrics,
};
use baton_recipe::{JobSpec, spec::FieldDifference};
use baton_telemetry::history;

use crate::saved_report::{SavedOutcome, SavedReport};

/// How the recipe with which a trial last ended or was saved differs from `spec`; `None` if it does not, or has not ended.
pub(super) fn changed_since(run_dir: &Path, spec: &JobSpec) -> Option<String> {
    // A damaged one is ignored: the trial's next start writes it anew.
    let report = SavedReport::read(run_dir).ok()??;
    let then = JobSpec::from_toml(&report.recipe_toml, &[]).ok()?;
    let changes = then.differences(spec).into_iter();
    let changes: Vec<String> =
        changes.filter(FieldDifference::affects_weights).map(|change| change.to_string()).collect();
    (!changes.is_empty()).then(|| changes.join(", "))
}

/// What a run folder holds about a trial.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TrialRecord {
    /// The evaluations that count, one per step, in order.
    pub(super) evaluations: Vec<EvaluatedTrial>,
    /// Training steps made, and the epoch, counted from 0.
    pub(super) position: Option<(u64, u32)>,
    pub(super) end: SavedEnd,
    /// Why its job last failed.
    pub(super) failure: Option<String>,
    /// Hours of training until its last end.
    pub(super) hours: f64,
    /// What they cost.
    pub(super) dollars: Option<f64>,
}

/// Metrics of the better of raw and averaged weights.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EvaluatedTrial {
    /// Training steps made.
    pub(super) step: u64,
    /// The first one decides.
    pub(super) metrics: Vec<Metric>,
}

/// How the job in a run folder last ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum SavedEnd {
    /// It has not ended, or can be continued.
    #[default]
    Open,
    /// All epochs are done.
    Completed,
    /// A budget of the recipe is used up; this one.
    LimitReached(String),
    /// Training diverges, so another try would end the same way; in which way it diverges.
    Diverged(String),
}

impl EvaluatedTrial {
    /// The value that decides.
    pub(super) fn value(&self) -> Option<f64> {
        self.metrics.first().map(|metric| metric.value)
    }

    /// That value such that more is better; NaN if there is none.
    pub(super) fn score(&self) -> f64 {
        self.metrics.first().map_or(f64::NAN, score)
    }
}

/// A metric's value, such that more is better.
fn score(metric: &Metric) -> f64 {
    match metric.direction() {
        Direction::Lower => -metric.value,
        _ => metric.value,
    }
}

impl TrialRecord {
    /// Reads a run folder; one that is not there yet has reached nothing.
    pub(super) fn read(run_dir: &Path) -> Self {
        let mut record = Self::default();
        let points = history::points_in(&metrics_of(run_dir)).unwrap_or_default();
        points.into_iter().for_each(|point| record.add(point));
        if let Ok(Some(report)) = SavedReport::read(run_dir) {
            record.hours = report.status.spending.hours;
            record.dollars = report.status.spending.dollars;
            record.end = end_of(&report);
            let outcome = report.status.outcome.filter(|outcome| outcome.kind == "failed");
            record.failure = outcome.and_then(|outcome| outcome.reason);
        }
        record
    }

    /// Whether its evaluations were lost: a job that completed was evaluated at its end. Without that evaluation it would
    /// seem the worst.
    pub(super) fn lacks_evaluations(&self) -> bool {
        self.end == SavedEnd::Completed && self.evaluations.is_empty()
    }

    fn add(&mut self, point: StreamMetricsResponse) {
        match point.metrics {
            Some(Metrics::Step(step)) => self.position = Some((step.step, step.epoch)),
            Some(Metrics::Evaluation(found)) => {
                let raw = found.accuracy.map(|accuracy| accuracy.named()).unwrap_or_default();
                let ema = found.ema.map(|accuracy| accuracy.named()).unwrap_or_default();
                let now = EvaluatedTrial { step: found.step, metrics: better(raw, ema) };
                // One on the whole set follows one on a subset.
                self.evaluations.retain(|other| other.step != now.step);
                self.evaluations.push(now);
                self.evaluations.sort_by_key(|evaluated| evaluated.step);
            }
            Some(Metrics::BeganAt(_)) | None => {}
        }
    }
}

fn metrics_of(run_dir: &Path) -> PathBuf {
    run_dir.join("metrics.jsonl")
}

/// The lines that are appended to a file of a trial that trains, without reading all of it each time.
#[derive(Debug)]
pub(super) struct AppendedLines {
    path: PathBuf,
    /// Bytes that were looked at.
    seen: u64,
}

impl AppendedLines {
    /// All metrics of a trial, and those that follow.
    pub(super) fn of_metrics(run_dir: &Path) -> Self {
        Self { path: metrics_of(run_dir), seen: 0 }
    }

    /// What follows in a log.
    pub(super) fn of_log(path: &Path) -> Self {
        let seen = path.metadata().map_or(0, |log| log.len());
        Self { path: path.to_owned(), seen }
    }

    /// Whether there is an evaluation in the lines since the last call.
    pub(super) fn has_evaluation(&mut self) -> bool {
        self.next().contains("\"evaluation\":")
    }

    /// The lines since the last call that say that a process of the trial ended and is started again, as they do in a log.
    pub(super) fn restarts(&mut self) -> Vec<String> {
        let lines = self.next();
        let lines = lines.lines().filter_map(|line| line.strip_prefix("baton: "));
        lines.filter(|line| line.contains("restart")).map(str::to_owned).collect()
    }

    /// The whole lines since the last call.
    fn next(&mut self) -> String {
        String::from_utf8_lossy(&self.new_lines().unwrap_or_default()).into_owned()
    }

    fn new_lines(&mut self) -> std::io::Result<Vec<u8>> {
        let mut file = File::open(&self.path)?;
        // A file that became too long was written anew.
        if file.metadata()?.len() < self.seen {
            self.seen = 0;
        }
        file.seek(SeekFrom::Start(self.seen))?;
        let mut lines = Vec::new();
        file.read_to_end(&mut lines)?;
        let whole = lines.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        lines.truncate(whole);
        self.seen += whole as u64;
        Ok(lines)
    }
}

fn better(raw: Vec<Metric>, ema: Vec<Metric>) -> Vec<Metric> {
    let is_better = |(raw, ema): (&Metric, &Metric)| score(ema) > score(raw);
    if raw.first().zip(ema.first()).is_some_and(is_better) { ema } else { raw }
}

fn end_of(report: &SavedReport) -> SavedEnd {
    let Some(SavedOutcome { kind, reason }) = &report.status.outcome else {
        return SavedEnd::Open;
    };
    let has_diverged = report.status.divergences.last().is_some_and(|last| last.rollback.is_none());
    let reason = reason.clone().unwrap_or_default();
    match kind.as_str() {
        "completed" => SavedEnd::Completed,
        "limit_reached" => SavedEnd::LimitReached(reason),
        "failed" if has_diverged => SavedEnd::Diverged(reason),
        _ => SavedEnd::Open,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _};

    use super::*;

    fn read(metrics: &str, report: Option<&str>) -> TrialRecord {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("metrics.jsonl"), metrics).unwrap();
        if let Some(report) = report {
            fs::write(folder.path().join("report.json"), report).unwrap();
        }
        TrialRecord::read(folder.path())
    }

    /// A line with an evaluation of the raw and of the averaged weights.
    fn evaluation(step: u64, raw: f64, ema: Option<f64>) -> String {
        let metric = |value: f64| {
            format!(
                r#"[{{"name":"loss","value":{value},"direction":"lower","is_fraction":false}}]"#
            )
        };
        let ema = ema.map_or("null".to_owned(), |ema| {
            format!(r#"{{"loss":{ema},"top1":0,"top5":0,"metrics":{}}}"#, metric(ema))
        });
        format!(
            r#"{{"unix_millis":1,"generation":1,"evaluation":{{"step":{step},"loss":{raw},"top1":0,"top5":0,"samples":9,"extent":"full","metrics":{},"ema":{ema}}}}}"#,
            metric(raw)
        ) + "\n"
    }

    fn losses(record: &TrialRecord) -> Vec<(u64, f64)> {
        let evaluations = record.evaluations.iter();
        evaluations.map(|found| (found.step, found.metrics[0].value)).collect()
    }

    #[test]
    fn repeated_evaluations_count_once_and_those_after_a_rollback_anew() {
        let began = r#"{"unix_millis":1,"generation":2,"began_at":20}"#.to_owned() + "\n";
        let lines = [
            r#"{"thinned_to_steps":2}"#.to_owned() + "\n",
            evaluation(10, 0.9, None),
            evaluation(20, 0.8, None),
            evaluation(30, 0.7, None),
            began,
            evaluation(20, 0.8, None),
            evaluation(30, 0.6, Some(0.5)),
            evaluation(40, 0.6, Some(0.65)),
            r#"{"unix_millis":1,"#.to_owned(),
        ];
        let record = read(&lines.concat(), None);
        assert_eq!(losses(&record), [(10, 0.9), (20, 0.8), (30, 0.5), (40, 0.6)]);
        assert_eq!(record.evaluations[2].score(), -0.5);
        assert_eq!(record.end, SavedEnd::Open);
        assert_eq!(TrialRecord::read(Path::new("/nowhere")), TrialRecord::default());
    }

    #[test]
    fn the_report_has_how_the_job_ended_and_what_it_cost() {
        let end = |outcome: &str, divergences: &str| {
            let report = format!(
                r#"{{"status":{{"outcome":{outcome},"divergences":{divergences},"spending":{{"hours":2.0,"dollars":3.0}}}}}}"#
            );
            let record = read("", Some(&report));
            assert_eq!((record.hours, record.dollars), (2.0, Some(3.0)));
            record.end
        };
        assert_eq!(end(r#"{"kind":"completed","reason":null}"#, "[]"), SavedEnd::Completed);
        let limit = end(r#"{"kind":"limit_reached","reason":"max_hours"}"#, "[]");
        assert_eq!(limit, SavedEnd::LimitReached("max_hours".to_owned()));
        let failed = r#"{"kind":"failed","reason":"the loss is NaN"}"#;
        let diverged = SavedEnd::Diverged("the loss is NaN".to_owned());
        assert_eq!(end(failed, r#"[{"rollback":{"before":3}},{"rollback":null}]"#), diverged);
        assert_eq!(end(failed, r#"[{"rollback":{"before":3}}]"#), SavedEnd::Open);
        assert_eq!(end(r#"{"kind":"drained","reason":"x"}"#, "[]"), SavedEnd::Open);
        assert_eq!(end("null", "[]"), SavedEnd::Open);
    }

    #[test]
    fn only_a_job_that_completed_must_have_been_evaluated() {
        let report = |kind: &str| format!(r#"{{"status":{{"outcome":{{"kind":"{kind}"}}}}}}"#);
        let lacks = |metrics: &str, kind| read(metrics, Some(&report(kind))).lacks_evaluations();
        assert!(lacks("", "completed") && lacks("{", "completed"));
        assert!(!lacks(&evaluation(10, 0.5, None), "completed"));
        assert!(!lacks("", "limit_reached") && !lacks("", "drained"));
    }

    #[test]
    fn each_evaluation_is_new_once_also_after_the_file_was_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let mut watch = AppendedLines::of_metrics(folder.path());
        assert!(!watch.has_evaluation(), "there is no file yet");
        let path = folder.path().join("metrics.jsonl");
        let append = |text: &str| {
            let mut file = fs::OpenOptions::new().create(true).append(true).open(&path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        let line = evaluation(10, 0.5, None);
        let (start, end) = line.split_at(line.len() - 1);
        append("{\"step\":{}}\n");
        append(start);
        assert!(!watch.has_evaluation(), "the line is not complete");
        append(end);
        assert_eq!([watch.has_evaluation(), watch.has_evaluation()], [true, false]);
        fs::write(&path, &line).unwrap();
        assert_eq!([watch.has_evaluation(), watch.has_evaluation()], [true, false]);
    }

    #[test]
    fn restarts_in_the_log_of_this_start_are_reported_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("up.log");
        let restart = "the coordinator ended with exit code 1 (no space); restarting it";
        let line = format!("baton: {restart}\n");
        fs::write(&path, &line).unwrap();
        let mut log = AppendedLines::of_log(&path);
        assert!(log.restarts().is_empty(), "of an earlier start");
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(format!("step 10\n{line}").as_bytes()).unwrap();
        assert_eq!(log.restarts(), [restart]);
        assert!(log.restarts().is_empty());
    }
}
