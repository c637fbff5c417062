//! JSON that `--json` prints and the dashboard reads, where it differs from what `build.rs` derives from the messages.
//!
//! Scripts depend on it: fields may be added, but never renamed or removed. Fractions are 0..1, durations are in
//! seconds; a value that does not exist yet is `null`, and so is a number that is infinite or NaN. Enum values are
//! words, e.g. `training`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::v1::{self, Extent, Fit, GeneratedText, Metric, Step, stream_metrics_response::Metrics};

/// Defines the names of an enum's values.
macro_rules! named {
    ($($type:ty, $prefix:literal;)*) => {$(
        impl $type {
            /// The name for people and scripts.
            #[must_use]
            pub fn name(self) -> String {
                self.as_str_name().trim_start_matches($prefix).to_ascii_lowercase()
            }
        }
    )*};
}

named! {
    v1::Activity, "ACTIVITY_";
    v1::Extent, "EXTENT_";
    v1::get_status_response::Phase, "PHASE_";
    v1::metric::Direction, "DIRECTION_";
    v1::outcome::Kind, "KIND_";
    v1::watch_events_response::Kind, "KIND_";
}

/// Defines functions that serialize an enum field as its name.
macro_rules! write_name {
    ($($function:ident, $type:ty;)*) => {$(
        pub(crate) fn $function<S: Serializer>(value: &i32, to: S) -> Result<S::Ok, S::Error> {
            to.serialize_str(&<$type>::try_from(*value).unwrap_or_default().name())
        }
    )*};
}

write_name! {
    activity, v1::Activity;
    direction, v1::metric::Direction;
    kind, v1::watch_events_response::Kind;
    phase, v1::get_status_response::Phase;
}

pub(crate) fn read_direction<'de, D: Deserializer<'de>>(input: D) -> Result<i32, D::Error> {
    use v1::metric::Direction;
    Ok(match String::deserialize(input)?.as_str() {
        "higher" => Direction::Higher,
        "lower" => Direction::Lower,
        _ => Direction::Unspecified,
    }
    .into())
}

/// Serializes an empty text, which means that there is none, as `null`.
pub(crate) fn null_if_empty<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    Some(text).filter(|text| !text.is_empty()).serialize(to)
}

/// Serializes an absent message as its default, so that the field always exists.
pub(crate) fn or_default<T: Clone + Default + Serialize, S: Serializer>(
    message: &Option<T>,
    to: S,
) -> Result<S::Ok, S::Error> {
    message.clone().unwrap_or_default().serialize(to)
}

/// Reads `null`, which stands for an infinite number or NaN, as NaN.
pub(crate) fn number<'de, D: Deserializer<'de>>(input: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(input)?.unwrap_or(f64::NAN))
}

/// The metrics of a step or of an evaluation, or the step at which training started.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PointJson {
    unix_millis: u64,
    generation: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    evaluation: Option<v1::EvaluatedStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    began_at: Option<u64>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    job_id: String,
}

impl From<v1::StreamMetricsResponse> for PointJson {
    fn from(point: v1::StreamMetricsResponse) -> Self {
        let v1::StreamMetricsResponse { unix_millis, generation, metrics, job_id } = point;
        let (step, evaluation, began_at) = match metrics {
            Some(Metrics::Step(step)) => (Some(step), None, None),
            Some(Metrics::Evaluation(evaluation)) => (None, Some(evaluation), None),
            Some(Metrics::BeganAt(step)) => (None, None, Some(step)),
            None => (None, None, None),
        };
        Self { unix_millis, generation, step, evaluation, began_at, job_id }
    }
}

impl From<PointJson> for v1::StreamMetricsResponse {
    fn from(point: PointJson) -> Self {
        let PointJson { unix_millis, generation, step, evaluation, began_at, job_id } = point;
        let metrics = step.map(|step| Metrics::Step(Step { metrics: step.named(), ..step }));
        let metrics = metrics.or_else(|| evaluation.map(Metrics::Evaluation));
        let metrics = metrics.or_else(|| began_at.map(Metrics::BeganAt));
        Self { unix_millis, generation, metrics, job_id }
    }
}

/// An evaluation; `ema` and `extent` only for the latest one.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EvaluationJson {
    /// Number of steps before the evaluation.
    step: u64,
    #[serde(deserialize_with = "number")]
    loss: f64,
    #[serde(deserialize_with = "number")]
    top1: f64,
    #[serde(deserialize_with = "number")]
    top5: f64,
    samples: u64,
    fit: Option<Fit>,
    /// Result with the averaged weights; of the latest evaluation only.
    ema: Option<AveragedAccuracy>,
    /// `full` or `subset`; of the latest evaluation only.
    extent: Option<String>,
    /// Absent in JSON of versions in which metrics had no names.
    #[serde(default)]
    metrics: Vec<Metric>,
    /// Some of the texts that a language model wrote, shortened; none for the best evaluation.
    #[serde(default)]
    texts: Vec<GeneratedText>,
}

/// Result with averaged weights, on the samples of the evaluation that contains it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AveragedAccuracy {
    #[serde(deserialize_with = "number")]
    loss: f64,
    #[serde(deserialize_with = "number")]
    top1: f64,
    #[serde(deserialize_with = "number")]
    top5: f64,
    fit: Option<Fit>,
    #[serde(default)]
    metrics: Vec<Metric>,
}

impl From<v1::Accuracy> for AveragedAccuracy {
    fn from(accuracy: v1::Accuracy) -> Self {
        let metrics = accuracy.named();
        let v1::Accuracy { loss, top1, top5, samples: _, fit, metrics: _ } = accuracy;
        Self { loss, top1, top5, fit, metrics }
    }
}

impl From<v1::EvaluatedStep> for EvaluationJson {
    fn from(evaluated: v1::EvaluatedStep) -> Self {
        let extent = evaluated.extent_name();
        let v1::EvaluatedStep { step, accuracy, ema, extent: _, texts } = evaluated;
        let accuracy = accuracy.unwrap_or_default();
        let metrics = accuracy.named();
        let v1::Accuracy { loss, top1, top5, samples, fit, metrics: _ } = accuracy;
        let ema = ema.map(Into::into);
        Self { step, loss, top1, top5, samples, fit, ema, extent, metrics, texts }
    }
}

impl From<EvaluationJson> for v1::EvaluatedStep {
    fn from(evaluation: EvaluationJson) -> Self {
        let EvaluationJson { step, loss, top1, top5, samples, fit, ema, extent, metrics, texts } =
            evaluation;
        let accuracy = Some(v1::Accuracy { loss, top1, top5, samples, fit, metrics });
        let ema = ema.map(|AveragedAccuracy { loss, top1, top5, fit, metrics }| v1::Accuracy {
            loss,
            top1,
            top5,
            samples,
            fit,
            metrics,
        });
        let is_of = |known: &Extent| extent.as_ref() == Some(&known.name());
        let extent = [Extent::Full, Extent::Subset].into_iter().find(is_of).unwrap_or_default();
        Self { step, accuracy, ema, extent: extent.into(), texts }
    }
}

impl v1::EvaluatedStep {
    /// `full` or `subset`; `None` if unknown.
    #[must_use]
    pub fn extent_name(&self) -> Option<String> {
        Some(self.extent()).filter(|extent| *extent != Extent::Unspecified).map(Extent::name)
    }
}

/// One committed checkpoint.
#[derive(Debug, Serialize)]
pub(crate) struct CheckpointJson {
    name: String,
    generation: u64,
    step: u64,
    bytes: u64,
    /// `null` if this coordinator did not receive a report of the save.
    stall_seconds: Option<f64>,
    save_seconds: Option<f64>,
    /// `null` if there was no evaluation at this step.
    top1: Option<f64>,
    fit: Option<Fit>,
    metrics: Vec<Metric>,
}

impl From<v1::Checkpoint> for CheckpointJson {
    fn from(checkpoint: v1::Checkpoint) -> Self {
        let v1::Checkpoint { name, generation, step, accuracy, bytes, took } = checkpoint;
        Self {
            name,
            generation,
            step,
            bytes,
            stall_seconds: took.map(|took| took.stall_seconds),
            save_seconds: took.map(|took| took.seconds),
            top1: accuracy.as_ref().map(|accuracy| accuracy.top1),
            fit: accuracy.as_ref().and_then(|accuracy| accuracy.fit),
            metrics: accuracy.map(|accuracy| accuracy.named()).unwrap_or_default(),
        }
    }
}

/// A divergence of training, and its remedy.
#[derive(Debug, Serialize)]
pub(crate) struct DivergenceJson {
    generation: u64,
    step: u64,
    epoch: u32,
    cursor: u64,
    cause: String,
    remedy: String,
    /// `null` if the job ended.
    rollback: Option<RollbackJson>,
}

#[derive(Debug, Serialize)]
struct RollbackJson {
    generation: u64,
    before: u64,
    /// Checkpoints from this step on may be damaged; `null` if none may be.
    suspect_from: Option<u64>,
    /// `lower_lr` or `skip_batch`.
    remedy: &'static str,
}

impl From<v1::Incident> for DivergenceJson {
    fn from(incident: v1::Incident) -> Self {
        let v1::Incident { generation, diagnosis, cause, rollback, remedy } = incident;
        let diagnosis = diagnosis.unwrap_or_default();
        let v1::BatchMark { epoch, cursor } = diagnosis.batch.unwrap_or_default();
        let rollback = rollback.map(|v1::Rollback { generation, before, suspect_from, skip }| {
            let remedy = if skip.is_some() { "skip_batch" } else { "lower_lr" };
            RollbackJson { generation, before, suspect_from, remedy }
        });
        Self { generation, step: diagnosis.step, epoch, cursor, cause, remedy, rollback }
    }
}

/// How a job ended.
#[derive(Debug, Serialize)]
pub(crate) struct OutcomeJson {
    kind: String,
    reason: Option<String>,
}

impl From<v1::Outcome> for OutcomeJson {
    fn from(outcome: v1::Outcome) -> Self {
        Self { kind: outcome.kind().name(), reason: outcome.why() }
    }
}

impl v1::Outcome {
    /// Why the job was drained or failed, or which limit is reached.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        let reason = self.failure.as_ref().map_or(&self.reason, |failure| &failure.message);
        let has_reason = self.failure.is_some() || !reason.is_empty();
        has_reason.then(|| reason.clone())
    }
}
