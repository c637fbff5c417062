//! Event files for TensorBoard.
//!
//! A file is a series of records: the length as 8 bytes, its masked CRC-32C, the content, its masked CRC-32C, all
//! little endian (TensorFlow's `core/lib/io/record_writer.h` and `core/lib/hash/crc32c.h`). Each is an `Event` in
//! protobuf (TensorFlow's `core/util/event.proto` and `core/framework/summary.proto`), of which the messages here have
//! what is needed.
//!
//! Of a folder TensorBoard reads all files in the order of their names, which begin with the time, as one run: each
//! coordinator writes one of its own and leaves those of earlier ones.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use baton_proto::v1::{
    EvaluatedStep, Extent, Step, StreamMetricsResponse, stream_metrics_response::Metrics,
};
use prost::Message;

use crate::error::Error;

/// What the first event of a file says; TensorBoard heeds [`SessionLog`] from version 2 on.
const FILE_VERSION: &str = "brain.Event:2";

/// `SessionLog.SessionStatus.START`.
const START: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970-01-01 UTC.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Value>,
}

/// `Summary.Value`. Without metadata TensorBoard takes it for a scalar.
#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    /// Part of a oneof: a zero must be written too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// An event file.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventFile {
    /// Creates a new file in this folder, and the folder if need be.
    ///
    /// # Errors
    ///
    /// If that cannot be done.
    pub fn create(dir: &Path, unix_seconds: u64, hostname: &str) -> Result<Self, Error> {
        fs::create_dir_all(dir).map_err(Error::of("create folder", dir))?;
        let host: String = hostname
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' })
            .collect();
        // Two coordinators may start in the same second.
        let (path, file) = (0_u32..)
            .map(|attempt| {
                dir.join(format!("events.out.tfevents.{unix_seconds:010}.{host}.{attempt:04}"))
            })
            .map(|path| (File::create_new(&path), path))
            .find_map(|(file, path)| match file {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                other => Some(other.map_err(Error::of("create", &path)).map(|file| (path, file))),
            })
            .unwrap_or_else(|| {
                Err(Error::of("create another event file in", dir)(
                    io::ErrorKind::AlreadyExists.into(),
                ))
            })?;
        let mut events = Self { path, file: BufWriter::new(file) };
        let version = What::FileVersion(FILE_VERSION.to_owned());
        events.write(&Event { wall_time: unix_seconds as f64, step: 0, what: Some(version) })?;
        events.flush()?;
        Ok(events)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a point; [`flush`](Self::flush) makes it visible.
    ///
    /// The tags of an update begin with `train/`, those of an evaluation with `val/`, with averaged weights `val_ema/`,
    /// and of a quick look at a part of the validation set `val_subset/` and `val_subset_ema/`. Where training began
    /// again, TensorBoard is told to forget what came after it, and `run/generation` marks the place.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn add(&mut self, point: &StreamMetricsResponse) -> Result<(), Error> {
        let wall_time = point.unix_millis as f64 / 1e3;
        let event = |step: u64, what| {
            let step = i64::try_from(step).unwrap_or(i64::MAX);
            Event { wall_time, step, what: Some(what) }
        };
        match &point.metrics {
            Some(Metrics::Step(told)) => self.write(&event(told.step, step(told))),
            Some(Metrics::Evaluation(told)) => self.write(&event(told.step, evaluation(told))),
            Some(Metrics::BeganAt(step)) => {
                // TensorBoard forgets this step too, which is good here.
                let log = What::SessionLog(SessionLog { status: START });
                self.write(&event(step.saturating_add(1), log))?;
                let generation = [("run/generation".to_owned(), point.generation as f64)];
                self.write(&event(*step, scalars(generation)))
            }
            None => Ok(()),
        }
    }

    /// Hands everything to the operating system.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.file.flush().map_err(Error::of("write to", &self.path))
    }

    fn write(&mut self, event: &Event) -> Result<(), Error> {
        let record = record(&event.encode_to_vec());
        self.file.write_all(&record).map_err(Error::of("write to", &self.path))
    }
}

fn step(step: &Step) -> What {
    let metrics = step.named().into_iter().map(|one| (format!("train/{}", one.name), one.value));
    let others = [
        ("train/loss", Some(step.loss)),
        ("train/lr", Some(step.lr)),
        ("train/samples_per_second", Some(step.samples_per_second)),
        ("train/loader_wait", Some(step.loader_wait)),
        ("train/gradient_norm", step.gradient_norm),
        ("train/loss_scale", step.loss_scale),
        ("train/resolution", (step.resolution > 0).then_some(f64::from(step.resolution))),
        ("train/epoch", Some(f64::from(step.epoch))),
    ];
    let others = others.into_iter().filter_map(|(tag, value)| Some((tag.to_owned(), value?)));
    scalars(metrics.chain(others))
}

fn evaluation(evaluated: &EvaluatedStep) -> What {
    let part = if evaluated.extent() == Extent::Subset { "val_subset" } else { "val" };
    let kinds = [(String::new(), &evaluated.accuracy), ("_ema".to_owned(), &evaluated.ema)];
    let kinds = kinds.into_iter().filter_map(|(weights, found)| Some((weights, found.as_ref()?)));
    scalars(kinds.flat_map(|(weights, found)| {
        let metrics = found.named().into_iter();
        metrics.map(move |one| (format!("{part}{weights}/{}", one.name), one.value))
    }))
}

fn scalars(values: impl IntoIterator<Item = (String, f64)>) -> What {
    let values =
        values.into_iter().map(|(tag, value)| Value { tag, simple_value: Some(value as f32) });
    What::Summary(Summary { values: values.collect() })
}

/// A record around this content.
fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let crcs = [masked_crc(&length), masked_crc(content)].map(u32::to_le_bytes);
    [&length[..], &crcs[0], content, &crcs[1]].concat()
}

/// A CRC-32C, changed so that the CRC of something that has CRCs in it is still a good one.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crc_is_that_of_rfc_3720() {
        // Its appendix B.4.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c::crc32c(&[0xff; 32]), 0x62a8_ab43);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c::crc32c(&ascending), 0x46dd_794e);
    }

    #[test]
    fn the_mask_is_that_of_tensorflow() {
        // As every event file that TensorFlow wrote begins: with an event of 24 bytes.
        assert_eq!(masked_crc(&24_u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22]);
        // By hand: the CRC of "123456789" is 0xe3069283.
        assert_eq!(masked_crc(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn a_zero_is_written() {
        let What::Summary(summary) = scalars([("a".to_owned(), 0.0)]) else { panic!("a summary") };

        assert_eq!(summary.encode_to_vec(), b"\x0a\x08\x0a\x01a\x15\0\0\0\0");
    }
}
