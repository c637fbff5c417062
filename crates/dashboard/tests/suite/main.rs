//! The dashboard: its routes, its stream and the report as one file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod report;
mod routes;
#[allow(dead_code)]
#[path = "../../../telemetry/tests/outputs/sample.rs"]
mod sample;
mod stream;
#[allow(dead_code)]
#[path = "../support/mod.rs"]
mod support;
