//! Event files for TensorBoard.
//!
//! A file is a sequence of records: the length as 8 bytes, its masked CRC-32C, the content, its masked CRC-32C, all
//! little endian (TensorFlow's `core/lib/io/record_writer.h` and `core/lib/hash/crc32c.h`). The content is an `Event`
//! in protobuf (TensorFlow's `core/util/event.proto` and `core/framework/summary.proto`); the messages here declare
//! only the fields that are needed.
//!
//! TensorBoard reads all files of a folder as one run, in the order of their names, which begin with the time. Each
//! coordinator writes a new file and keeps the files of earlier ones.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use baton_proto::v1::{
    EvaluatedStep, Extent, GeneratedText, Step, StreamMetricsResponse,
    stream_metrics_response::Metrics,
};
use prost::Message;

use crate::error::Error;

/// Version in the first event of a file. TensorBoard supports [`SessionLog`] from version 2 on.
const FILE_VERSION: &str = "brain.Event:2";

/// `SessionLog.SessionStatus.START`.
const SESSION_START: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct EventRecord {
    /// Seconds since 1970-01-01 UTC.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "EventContent", tags = "3, 5, 7")]
    content: Option<EventContent>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum EventContent {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(EventSummary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct EventSummary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<SummaryValue>,
}

/// `Summary.Value`. Without metadata, TensorBoard reads it as a scalar.
#[derive(Clone, PartialEq, Message)]
struct SummaryValue {
    #[prost(string, tag = "1")]
    tag: String,
    /// In TensorFlow this is part of a oneof, so a zero must be written too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    tensor: Option<TextTensor>,
    #[prost(message, optional, tag = "9")]
    metadata: Option<SummaryMetadata>,
}

/// `SummaryMetadata` (`core/framework/summary.proto`).
#[derive(Clone, PartialEq, Message)]
struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    plugin: Option<PluginData>,
    #[prost(int32, tag = "4")]
    data_class: i32,
}

#[derive(Clone, PartialEq, Message)]
struct PluginData {
    #[prost(string, tag = "1")]
    name: String,
}

/// `TensorProto` of strings (`core/framework/tensor.proto`), shape (texts).
#[derive(Clone, PartialEq, Message)]
struct TextTensor {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<TextTensorShape>,
    #[prost(string, repeated, tag = "8")]
    texts: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct TextTensorShape {
    #[prost(message, repeated, tag = "2")]
    dims: Vec<TensorDim>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorDim {
    #[prost(int64, tag = "1")]
    size: i64,
}

/// `DT_STRING`.
const STRING: i32 = 7;
/// `DataClass.DATA_CLASS_TENSOR`.
const TENSOR: i32 = 2;

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
    /// Creates a new file in this folder, and the folder if it does not exist.
    ///
    /// # Errors
    ///
    /// The folder or the file cannot be created.
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
        let version = EventContent::FileVersion(FILE_VERSION.to_owned());
        events.write(&EventRecord {
            wall_time: unix_seconds as f64,
            step: 0,
            content: Some(version),
        })?;
        events.flush()?;
        Ok(events)
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a point; [`flush`](Self::flush) makes it visible.
    ///
    /// The tags of a step begin with `train/`, those of an evaluation with `val/`, or `val_ema/` with averaged
    /// weights; those of an evaluation on a part of the validation set with `val_subset/` and `val_subset_ema/`.
    /// `val/texts` and `val_subset/texts` have texts that a language model wrote. Where training restarted, an event makes TensorBoard drop later steps, and `run/generation` marks the step.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn add(&mut self, point: &StreamMetricsResponse) -> Result<(), Error> {
        let wall_time = point.unix_millis as f64 / 1e3;
        let event = |step: u64, content| {
            let step = i64::try_from(step).unwrap_or(i64::MAX);
            EventRecord { wall_time, step, content: Some(content) }
        };
        match &point.metrics {
            Some(Metrics::Step(metrics)) => self.write(&event(metrics.step, step(metrics))),
            Some(Metrics::Evaluation(evaluated)) => {
                self.write(&event(evaluated.step, evaluation(evaluated)))
            }
            Some(Metrics::BeganAt(step)) => {
                // TensorBoard also drops the step of this event, so it gets the first invalid step.
                let log = EventContent::SessionLog(SessionLog { status: SESSION_START });
                self.write(&event(step.saturating_add(1), log))?;
                let generation = [("run/generation".to_owned(), point.generation as f64)];
                self.write(&event(*step, scalars(generation)))
            }
            None => Ok(()),
        }
    }

    /// Passes all events to the operating system.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.file.flush().map_err(Error::of("write to", &self.path))
    }

    fn write(&mut self, event: &EventRecord) -> Result<(), Error> {
        let record = record(&event.encode_to_vec());
        self.file.write_all(&record).map_err(Error::of("write to", &self.path))
    }
}

fn step(step: &Step) -> EventContent {
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

fn evaluation(evaluated: &EvaluatedStep) -> EventContent {
    let part = if evaluated.extent() == Extent::Subset { "val_subset" } else { "val" };
    let kinds = [(String::new(), &evaluated.accuracy), ("_ema".to_owned(), &evaluated.ema)];
    let kinds = kinds.into_iter().filter_map(|(weights, found)| Some((weights, found.as_ref()?)));
    let metrics = kinds.flat_map(|(weights, found)| {
        let metrics = found.named().into_iter();
        metrics.map(move |one| (format!("{part}{weights}/{}", one.name), one.value))
    });
    let texts = (!evaluated.texts.is_empty()).then(|| texts(part, &evaluated.texts));
    EventContent::Summary(EventSummary { values: metrics.map(scalar).chain(texts).collect() })
}

/// Texts that a language model wrote, for TensorBoard's page of texts, which reads them as Markdown.
fn texts(part: &str, texts: &[GeneratedText]) -> SummaryValue {
    // An indented line is shown as it is.
    let quoted = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    let shown = texts.iter().map(|GeneratedText { sample, prompt, reference, text }| {
        let parts =
            [("the model's text", text), ("the sample's own text", reference), ("prompt", prompt)];
        let parts = parts.map(|(title, text)| format!("{title}:\n\n{}\n", quoted(text)));
        format!("**sample {sample}**, {}", parts.concat())
    });
    let texts: Vec<String> = shown.collect();
    let dims = vec![TensorDim { size: texts.len() as i64 }];
    SummaryValue {
        tag: format!("{part}/texts"),
        simple_value: None,
        tensor: Some(TextTensor { dtype: STRING, shape: Some(TextTensorShape { dims }), texts }),
        metadata: Some(SummaryMetadata {
            plugin: Some(PluginData { name: "text".to_owned() }),
            data_class: TENSOR,
        }),
    }
}

fn scalar((tag, value): (String, f64)) -> SummaryValue {
    SummaryValue { tag, simple_value: Some(value as f32), ..SummaryValue::default() }
}

fn scalars(values: impl IntoIterator<Item = (String, f64)>) -> EventContent {
    EventContent::Summary(EventSummary { values: values.into_iter().map(scalar).collect() })
}

/// The record with this content.
fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let crcs = [masked_crc(&length), masked_crc(content)].map(u32::to_le_bytes);
    [&length[..], &crcs[0], content, &crcs[1]].concat()
}

/// A CRC-32C, masked so that the CRC of data that contains CRCs is still reliable.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crc_matches_rfc_3720() {
        // The values of appendix B.4.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c::crc32c(&[0xff; 32]), 0x62a8_ab43);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c::crc32c(&ascending), 0x46dd_794e);
    }

    #[test]
    fn the_mask_matches_tensorflow() {
        // Every event file of TensorFlow begins with an event of 24 bytes.
        assert_eq!(masked_crc(&24_u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22]);
        // Calculated by hand: the CRC of "123456789" is 0xe3069283.
        assert_eq!(masked_crc(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn a_zero_is_written() {
        let EventContent::Summary(summary) = scalars([("a".to_owned(), 0.0)]) else {
            panic!("a summary")
        };

        assert_eq!(summary.encode_to_vec(), b"\x0a\x08\x0a\x01a\x15\0\0\0\0");
    }
}
