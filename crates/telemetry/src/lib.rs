//! Metrics of a job in the formats of other tools: a history file of the whole job, a page for Prometheus, event files
//! for TensorBoard, and a report.

#![forbid(unsafe_code)]

mod error;
pub mod history;
pub mod prometheus;
pub mod report;
pub mod tensorboard;

pub use error::Error;
