//! Compiles the `.proto` files with protox, so that no `protoc` binary is needed, and derives the JSON for users'
//! tools: fields in the order of the `.proto` files, with the same names except for those in [`FIELDS`].

use std::{env, fs, path::PathBuf};

/// Messages whose JSON is derived from their fields.
const JSON: [&str; 22] = [
    "CheckpointEntry",
    "DrainStatus",
    "EvaluationProgress",
    "Fit",
    "GeneratedText",
    "GetStatusResponse",
    "Gpu",
    "Host",
    "InvalidatedCheckpoints",
    "Loader",
    "LocalCheckpoint",
    "Metric",
    "NodeStatus",
    "PauseStatus",
    "RankHeartbeat",
    "RankStatus",
    "Recovery",
    "Spending",
    "Step",
    "StreamLogsResponse",
    "SubmitJobResponse",
    "WatchEventsResponse",
];

/// Messages whose JSON is that of a type of `src/json.rs`.
const OTHER_JSON: [(&str, &str); 5] = [
    ("Checkpoint", "into = \"crate::json::CheckpointJson\""),
    (
        "EvaluatedStep",
        "into = \"crate::json::EvaluationJson\", from = \"crate::json::EvaluationJson\"",
    ),
    ("Incident", "into = \"crate::json::DivergenceJson\""),
    ("Outcome", "into = \"crate::json::OutcomeJson\""),
    (
        "StreamMetricsResponse",
        "into = \"crate::json::PointJson\", from = \"crate::json::PointJson\"",
    ),
];

/// Messages that are also deserialized, from the files of a job's metrics and of its report.
const DESERIALIZED: [&str; 7] = [
    "EvaluatedStep",
    "Fit",
    "GeneratedText",
    "InvalidatedCheckpoints",
    "Metric",
    "Step",
    "StreamMetricsResponse",
];

/// Fields whose JSON is customized.
const FIELDS: [(&str, &str); 21] = [
    ("CheckpointEntry.damage", "serialize_with = \"crate::json::null_if_empty\""),
    ("Fit.mae", NUMBER),
    ("Fit.pearson", NUMBER),
    ("Fit.spearman", NUMBER),
    ("GetStatusResponse.incidents", "rename = \"divergences\""),
    ("GetStatusResponse.phase", "serialize_with = \"crate::json::phase\""),
    ("GetStatusResponse.spending", "serialize_with = \"crate::json::or_default\""),
    (
        "Metric.direction",
        "serialize_with = \"crate::json::direction\", deserialize_with = \"crate::json::read_direction\"",
    ),
    // Files written before the rename have `is_share`.
    ("Metric.is_fraction", "alias = \"is_share\""),
    ("Metric.value", NUMBER),
    ("NodeStatus.node_id", "rename = \"node\""),
    ("RankHeartbeat.activity", "serialize_with = \"crate::json::activity\""),
    ("RankStatus.node_id", "rename = \"node\""),
    ("Step.loader_wait", NUMBER),
    ("Step.loss", NUMBER),
    ("Step.lr", NUMBER),
    ("Step.metrics", "default"),
    ("Step.samples_per_second", NUMBER),
    ("Step.top1", NUMBER),
    (
        "StreamLogsResponse.node_id",
        "rename = \"node\", serialize_with = \"crate::json::null_if_empty\"",
    ),
    ("WatchEventsResponse.kind", "serialize_with = \"crate::json::kind\""),
];

const NUMBER: &str = "deserialize_with = \"crate::json::number\"";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["common", "job", "node"].map(|name| format!("baton/v1/{name}.proto"));
    println!("cargo:rerun-if-changed=baton");
    let mut compiler = protox::Compiler::new(["."])?;
    compiler.include_source_info(true).include_imports(true).open_files(&files)?;
    let descriptors = compiler.encode_file_descriptor_set();
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors)?;
    let mut build = tonic_prost_build::configure();
    let path = |name: &str| format!(".baton.v1.{name}");
    for name in JSON.into_iter().chain(OTHER_JSON.map(|(name, _)| name)) {
        build = build.message_attribute(path(name), "#[derive(serde::Serialize)]");
    }
    for name in DESERIALIZED {
        build = build.message_attribute(path(name), "#[derive(serde::Deserialize)]");
    }
    for (name, attribute) in OTHER_JSON {
        build = build.message_attribute(path(name), format!("#[serde({attribute})]"));
    }
    for (name, attribute) in FIELDS {
        build = build.field_attribute(path(name), format!("#[serde({attribute})]"));
    }
    build.compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
