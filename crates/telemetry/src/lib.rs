//! What a job has to tell, in the forms that others read: a file of its numbers over its whole life, a page for
//! Prometheus, event files for TensorBoard, and a report at its end.

#![forbid(unsafe_code)]

mod error;
pub mod history;
pub mod prometheus;
pub mod report;
pub mod tensorboard;

pub use error::Error;
