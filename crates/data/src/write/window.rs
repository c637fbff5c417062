//! Windows of long recordings as samples.
//!
//! ```text
//! recordings ─▶ windows with a label, without gaps ─▶ a bucket at random ─▶ each bucket shuffled in memory ─▶ Writer
//! ```
//!
//! Memory holds one recording, the labels, one bucket, 64 KiB for each of the others, and 24 bytes per window.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Read, Seek, SeekFrom, Write as _},
    path::{Path, PathBuf},
};

use super::{
    Array, DEFAULT_PAGE_BYTES, Error, Field, FieldKind, FinishedFile, KeySplit, Value, Writer,
    draft::{Draft, failed, publish_all},
    named_columns::{NamedColumns, OtherColumns},
    recording::{RECORDING_FILES, SignalRecording},
};
use crate::{
    random::{Draws, RandomPurpose},
    with_suffix,
};

/// What to write.
#[derive(Clone, Debug)]
pub struct WindowOptions {
    /// The folder of the recordings.
    pub from: PathBuf,
    /// Positions in time of a window.
    pub length: usize,
    /// Positions from the start of a window to that of the next.
    pub stride: usize,
    /// Positions of the recordings per second; required if labels have a time. `None`: all `.wav` and `.flac` files have the same.
    pub rate: Option<f64>,
    /// Where the labels are.
    pub labels: LabelTable,
    /// The file for training.
    pub to: PathBuf,
    /// Further files, with shares of the recordings, which are then not in the others.
    pub others: Vec<(PathBuf, f64)>,
    /// Seed of the order in which windows are written; `None`: that of the recordings.
    pub shuffle: Option<u64>,
}

/// A CSV or Parquet file with the labels of recordings.
#[derive(Clone, Debug)]
pub struct LabelTable {
    /// The file.
    pub path: PathBuf,
    /// Column with the recording's name, without its ending.
    pub recording: String,
    /// Column with the number to predict.
    pub label: String,
    /// Labels that change with time; `None`: one label per recording.
    pub time: Option<LabelTimes>,
    /// Column whose value decides in which file a recording is; `None`: the recording.
    pub by: Option<String>,
}

/// When labels were taken.
#[derive(Clone, Debug)]
pub struct LabelTimes {
    /// Column with seconds since the beginning of the recording.
    pub column: String,
    /// Farthest label from the middle of a window that it may have, seconds.
    pub within: f64,
}

/// What was written.
#[derive(Clone, Debug, Default)]
pub struct WrittenWindows {
    /// The files, with the numbers of their windows and bytes.
    pub files: Vec<(PathBuf, FinishedFile)>,
    /// The list of the recordings' names, by the numbers in the field `recording`.
    pub recordings: PathBuf,
    /// Windows that were left out because a value is not finite.
    pub with_gaps: u64,
    /// Windows that were left out because no label is near.
    pub without_label: u64,
    /// Recordings without any label, or shorter than a window.
    pub unused_recordings: u64,
}

/// Name of the field with the windows: f32, shape (channels, length).
pub const WINDOW_FIELD: &str = "signal";
/// Name of the field with the labels: Float.
pub const WINDOW_LABEL_FIELD: &str = "label";
/// Name of the field with the number of the recording: Int.
pub const RECORDING_FIELD: &str = "recording";
/// Name of the field with the window's first position in the recording: Int.
pub const START_FIELD: &str = "start";

/// Size up to which a bucket of a shuffle is meant to grow, bytes.
const BUCKET_BYTES: u64 = 64 << 20;
/// Most buckets of all files together, as each is an open file.
const MAX_BUCKETS: u64 = 512;

/// Labels of a recording with their times, in order.
#[derive(Clone, Debug, Default, PartialEq)]
struct RecordingLabels {
    points: Vec<(f64, f64)>,
    /// What decides in which file it is.
    key: String,
}

/// Writes the windows of all recordings.
///
/// `progress` gets the numbers of recordings that are done and of all.
///
/// # Errors
/// A recording or the labels cannot be read, the recordings do not have the same channels, a file would have no window, or
/// a file cannot be written.
pub fn write_windows(
    options: &WindowOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<WrittenWindows, Error> {
    options.check()?;
    let paths = options.recordings()?;
    let labels = options.labels.read()?;
    let names: Vec<String> = paths.iter().map(|path| name_of(path)).collect();
    if let Some(missing) = labels.keys().find(|name| !names.contains(name)) {
        return Err(options.labels.refused(format!(
            "has labels of {missing:?}, and there is no such recording in {}",
            options.from.display()
        )));
    }
    let split = KeySplit::new(options.others.iter().map(|(_, share)| *share));
    let (mut planned, mut channels) = (vec![0; options.others.len() + 1], None);
    let mut rate = options.rate;
    for (path, name) in paths.iter().zip(&names) {
        if let Some(labels) = labels.get(name) {
            let (count, len, found) = SignalRecording::shape_of(path)?;
            if let Some(found) = found.map(f64::from)
                && *rate.get_or_insert(found) != found
            {
                let expected = rate.unwrap_or_default();
                let whose = if options.rate.is_some() { "--rate says" } else { "others have" };
                let reason = format!(
                    "has {found} positions per second, and {whose} {expected}: all must have the same"
                );
                return Err(Error::Source { path: path.clone(), reason });
            }
            planned[split.set(&labels.key)] += options.windows(len);
            if *channels.get_or_insert(count) != count {
                let first = channels.unwrap_or_default();
                let reason = format!(
                    "has {count} channels, and the first recording {first}: all must have the same"
                );
                return Err(Error::Source { path: path.clone(), reason });
            }
        }
    }
    let Some(channels) = channels else {
        return Err(options.labels.refused("has no label of any recording".to_owned()));
    };
    let mut written =
        WrittenWindows { recordings: options.list_path(), ..WrittenWindows::default() };
    // Before any other file is replaced.
    let mut list = Draft::create(&written.recordings)?;
    let mut sets = Vec::new();
    let targets = std::iter::once(&options.to).chain(options.others.iter().map(|(path, _)| path));
    for (number, (target, planned)) in targets.zip(&planned).enumerate() {
        sets.push(WindowSet::create(options, number, target, *planned, channels)?);
    }

    for (number, (path, name)) in paths.iter().zip(&names).enumerate() {
        match labels.get(name) {
            None => written.unused_recordings += 1,
            Some(labels) => {
                let recording = SignalRecording::read(path)?;
                let set = &mut sets[split.set(&labels.key)];
                set.add(options, number, &recording, labels, &mut written)?;
            }
        }
        progress(number as u64 + 1, paths.len() as u64);
    }
    // Before any file is replaced.
    sets.iter().try_for_each(|set| set.check(options))?;
    let mut complete = Vec::new();
    for set in sets {
        let target = set.target.clone();
        let (draft, file) = set.complete(options)?;
        written.files.push((target, file));
        complete.push(draft);
    }
    list.write_lines(&names)?;
    list.sync()?;
    complete.push(list);
    // They belong together.
    publish_all(complete)?;
    Ok(written)
}

impl WindowOptions {
    fn check(&self) -> Result<(), Error> {
        if self.length == 0 || self.stride == 0 {
            return Err(Error::Option("length and stride of windows are at least 1".to_owned()));
        }
        let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
        let has_near_labels = self.labels.time.as_ref().is_none_or(|time| time.within >= 0.0);
        if !self.rate.is_none_or(is_rate) || !has_near_labels {
            return Err(Error::Option(
                "the rate must be above 0, and the distance of labels at least 0".to_owned(),
            ));
        }
        if self.labels.time.is_some() && self.rate.is_none() {
            return Err(Error::Option("labels with a time need the rate".to_owned()));
        }
        super::check_targets(&self.to, &self.others, &[self.list_path()], &self.labels.path)
    }

    /// The file with the names of the recordings.
    fn list_path(&self) -> PathBuf {
        with_suffix(&self.to, ".recordings.txt")
    }

    /// The recordings of the folder, sorted by name.
    fn recordings(&self) -> Result<Vec<PathBuf>, Error> {
        let refused = |reason: String| Error::Source { path: self.from.clone(), reason };
        let entries = self.from.read_dir().map_err(failed("open", &self.from))?;
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed("read", &self.from))?.path();
            if SignalRecording::is_named_by(&path) {
                if path.to_string_lossy().contains(['\n', '\r']) {
                    return Err(refused(format!(
                        "has a file whose name has a line break, {:?}: rename it",
                        name_of(&path)
                    )));
                }
                if !path.is_file() {
                    return Err(refused(format!(
                        "has {}, which is not a regular file: remove it",
                        name_of(&path)
                    )));
                }
                paths.push(path);
            }
        }
        paths.sort();
        if let Some(twice) = paths.windows(2).find(|pair| name_of(&pair[0]) == name_of(&pair[1])) {
            return Err(refused(format!(
                "has two recordings of the name {:?}",
                name_of(&twice[0])
            )));
        }
        if paths.is_empty() {
            return Err(refused(format!(
                "has no recordings: files whose names end with {RECORDING_FILES}"
            )));
        }
        Ok(paths)
    }

    /// Number of windows in so many positions.
    fn windows(&self, len: usize) -> u64 {
        len.checked_sub(self.length).map_or(0, |rest| rest / self.stride + 1) as u64
    }
}

/// The name of a recording: that of its file without the ending.
fn name_of(path: &Path) -> String {
    path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

impl LabelTable {
    fn refused(&self, reason: String) -> Error {
        Error::Source { path: self.path.clone(), reason }
    }

    /// The labels by recording.
    fn read(&self) -> Result<BTreeMap<String, RecordingLabels>, Error> {
        let mut columns: Vec<&str> = vec![&self.recording, &self.label];
        columns.extend(self.time.iter().map(|time| time.column.as_str()));
        columns.extend(self.by.as_deref());
        let mut table = NamedColumns::open(&self.path, &columns, OtherColumns::Skip)?;
        let mut labels: BTreeMap<String, RecordingLabels> = BTreeMap::new();
        while table.next()? {
            let refused = |reason: String| table.place().error(&self.path, reason);
            let mut cells = Vec::with_capacity(columns.len());
            for (number, name) in columns.iter().enumerate() {
                match table.cell(number).text() {
                    Ok(text) => cells.push(text.to_owned()),
                    Err(problem) => return Err(refused(format!("column {name:?} {problem}"))),
                }
            }
            let cell = |number: usize| cells[number].as_str();
            let number = |column: usize| {
                let value = cell(column).parse::<f64>().ok().filter(|value| value.is_finite());
                let wrong = || {
                    refused(format!(
                        "column {:?}: {:?} is not a finite number",
                        columns[column],
                        cell(column)
                    ))
                };
                value.ok_or_else(wrong)
            };
            let name = cell(0).to_owned();
            let time = if self.time.is_some() { number(2)? } else { 0.0 };
            let point = (time, number(1)?);
            let key = if self.by.is_some() { cell(columns.len() - 1) } else { cell(0) };
            let found = labels.entry(name).or_default();
            if found.points.is_empty() {
                key.clone_into(&mut found.key);
            } else if found.key != key {
                return Err(refused(format!(
                    "recording {:?} has both {:?} and {key:?} in column {:?}",
                    cell(0),
                    found.key,
                    self.by.as_deref().unwrap_or_default()
                )));
            } else if self.time.is_none() {
                return Err(refused(format!(
                    "recording {:?} has a second label: name the column with its time",
                    cell(0)
                )));
            }
            found.points.push(point);
        }
        for (name, labels) in &mut labels {
            labels.points.sort_by(|one, other| one.0.total_cmp(&other.0));
            let differ = |pair: &&[(f64, f64)]| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1;
            if let Some(pair) = labels.points.windows(2).find(differ) {
                return Err(self.refused(format!(
                    "recording {name:?} has two labels at {} s, {} and {}: keep one",
                    pair[0].0, pair[0].1, pair[1].1
                )));
            }
        }
        Ok(labels)
    }
}

impl RecordingLabels {
    /// The label at a time; the earlier of two that are equally near.
    fn at(&self, seconds: f64, times: Option<&LabelTimes>) -> Option<f64> {
        let Some(times) = times else { return Some(self.points.first()?.1) };
        let next = self.points.partition_point(|(time, _)| *time < seconds);
        let around = [next.checked_sub(1), Some(next)].into_iter().flatten();
        let near = around.filter_map(|number| self.points.get(number));
        let distance = |point: &&(f64, f64)| (point.0 - seconds).abs();
        let nearest = near.min_by(|one, other| distance(one).total_cmp(&distance(other)))?;
        (distance(&nearest) <= times.within).then_some(nearest.1)
    }
}

/// A file that is being written.
struct WindowSet {
    target: PathBuf,
    writer: Writer,
    /// Files with windows in any order, if they are shuffled.
    buckets: Vec<BufWriter<File>>,
    /// Draws of the buckets.
    draws: Draws,
    windows: u64,
    record: Vec<u8>,
}

/// Bytes of a window before its values: label, recording and start.
const RECORD_HEADER_BYTES: usize = 24;

impl WindowSet {
    fn create(
        options: &WindowOptions,
        number: usize,
        target: &Path,
        planned: u64,
        channels: usize,
    ) -> Result<Self, Error> {
        let shape = vec![channels as u64, options.length as u64];
        let array = Array { shape, dtype: "<f4".to_owned() };
        let fields = vec![
            Field::new(WINDOW_FIELD, FieldKind::NdArray(array)),
            Field::new(WINDOW_LABEL_FIELD, FieldKind::Float),
            Field::new(RECORDING_FIELD, FieldKind::Int),
            Field::new(START_FIELD, FieldKind::Int),
        ];
        let writer = Writer::create(target, fields, planned, DEFAULT_PAGE_BYTES)?;
        let record_bytes = RECORD_HEADER_BYTES + 4 * channels * options.length;
        let mut buckets = Vec::new();
        if options.shuffle.is_some() {
            let bytes = planned.saturating_mul(record_bytes as u64);
            let folder = target.parent().filter(|folder| *folder != Path::new(""));
            let folder = folder.unwrap_or(Path::new("."));
            for _ in 0..bytes
                .div_ceil(BUCKET_BYTES)
                .clamp(1, MAX_BUCKETS / (options.others.len() as u64 + 1))
            {
                let file =
                    tempfile::tempfile_in(folder).map_err(failed("create a file in", folder))?;
                buckets.push(BufWriter::with_capacity(64 << 10, file));
            }
        }
        let seed = options.shuffle.unwrap_or_default();
        let draws = Draws::new(seed, number as u32, 0, RandomPurpose::Bucket);
        let record = vec![0; record_bytes];
        Ok(Self { target: target.to_owned(), writer, buckets, draws, windows: 0, record })
    }

    /// Adds the windows of a recording.
    fn add(
        &mut self,
        options: &WindowOptions,
        number: usize,
        recording: &SignalRecording,
        labels: &RecordingLabels,
        written: &mut WrittenWindows,
    ) -> Result<(), Error> {
        let times = options.labels.time.as_ref();
        let rate = options.rate.unwrap_or(1.0);
        let windows = options.windows(recording.len);
        written.unused_recordings += u64::from(windows == 0);
        let gaps = Gaps::of(recording);
        for window in 0..windows as usize {
            let start = window * options.stride;
            if gaps.meets(start, options.length) {
                written.with_gaps += 1;
                continue;
            }
            let middle = start as f64 + options.length as f64 / 2.0;
            let Some(label) = labels.at(middle / rate, times) else {
                written.without_label += 1;
                continue;
            };
            self.fill(label, number as i64, start, recording, options.length);
            self.windows += 1;
            if self.buckets.is_empty() {
                push(&mut self.writer, &self.record)?;
            } else {
                let bucket = self.draws.below(self.buckets.len() as u64) as usize;
                let written = self.buckets[bucket].write_all(&self.record);
                written.map_err(failed("write a temporary file beside", &self.target))?;
            }
        }
        Ok(())
    }

    fn fill(
        &mut self,
        label: f64,
        number: i64,
        start: usize,
        recording: &SignalRecording,
        length: usize,
    ) {
        let (header, values) = self.record.split_at_mut(RECORD_HEADER_BYTES);
        header[..8].copy_from_slice(&label.to_le_bytes());
        header[8..16].copy_from_slice(&number.to_le_bytes());
        header[16..].copy_from_slice(&(start as i64).to_le_bytes());
        for (channel, values) in values.chunks_mut(4 * length).enumerate() {
            let from = &recording.channel(channel)[start..start + length];
            for (place, value) in values.as_chunks_mut::<4>().0.iter_mut().zip(from) {
                *place = value.to_le_bytes();
            }
        }
    }

    fn check(&self, options: &WindowOptions) -> Result<(), Error> {
        if self.windows == 0 {
            return Err(Error::Source {
                path: options.from.clone(),
                reason: format!(
                    "no window is for {}: all have gaps or no label near, or its share of the recordings is too small",
                    self.target.display()
                ),
            });
        }
        Ok(())
    }

    fn complete(mut self, options: &WindowOptions) -> Result<(Draft, FinishedFile), Error> {
        let record_bytes = self.record.len();
        let seed = options.shuffle.unwrap_or_default();
        for (number, bucket) in self.buckets.into_iter().enumerate() {
            let unreadable = || failed("read a temporary file beside", &self.target);
            let mut file = bucket.into_inner().map_err(|error| unreadable()(error.into_error()))?;
            let mut bytes = Vec::new();
            let read = file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut bytes));
            read.map_err(unreadable())?;
            // Fisher and Yates.
            let mut order: Vec<usize> = (0..bytes.len() / record_bytes).collect();
            let mut draws = Draws::new(seed, 0, number as u64, RandomPurpose::BucketOrder);
            for last in (1..order.len()).rev() {
                order.swap(last, draws.below(last as u64 + 1) as usize);
            }
            for window in order {
                push(&mut self.writer, &bytes[window * record_bytes..][..record_bytes])?;
            }
        }
        self.writer.complete()
    }
}

fn push(writer: &mut Writer, record: &[u8]) -> Result<(), Error> {
    let (header, values) = record.split_at(RECORD_HEADER_BYTES);
    let (words, _) = header.as_chunks::<8>();
    writer.push(&[
        Value::Array(values),
        Value::Float(f64::from_le_bytes(words[0])),
        Value::Int(i64::from_le_bytes(words[1])),
        Value::Int(i64::from_le_bytes(words[2])),
    ])
}

/// The positions at which a value is not finite.
struct Gaps(Vec<usize>);

impl Gaps {
    fn of(recording: &SignalRecording) -> Self {
        let channels = (0..recording.channels).map(|channel| recording.channel(channel));
        let positions = channels.flat_map(|values| values.iter().enumerate());
        let mut gaps: Vec<usize> = positions
            .filter(|(_, value)| !value.is_finite())
            .map(|(position, _)| position)
            .collect();
        gaps.sort_unstable();
        gaps.dedup();
        Self(gaps)
    }

    /// Whether one of them is in a window.
    fn meets(&self, start: usize, length: usize) -> bool {
        let next = self.0.partition_point(|position| *position < start);
        self.0.get(next).is_some_and(|position| *position < start + length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_the_nearest_label_that_is_near_enough() {
        let points = vec![(0.0, 1.0), (10.0, 2.0), (20.0, 3.0)];
        let labels = RecordingLabels { points, key: String::new() };
        let times = |within| LabelTimes { column: String::new(), within };
        let at = |seconds, within| labels.at(seconds, Some(&times(within)));
        assert_eq!(at(0.0, 0.0), Some(1.0));
        assert_eq!(at(4.9, 5.0), Some(1.0));
        assert_eq!(at(5.0, 5.0), Some(1.0), "the earlier of two");
        assert_eq!(at(5.1, 5.0), Some(2.0));
        assert_eq!(at(5.1, 4.8), None);
        assert_eq!(at(30.0, 10.0), Some(3.0));
        assert_eq!(at(30.1, 10.0), None);
        assert_eq!(labels.at(1e9, None), Some(1.0));
    }

    #[test]
    fn gaps_meet_only_windows_that_have_them() {
        let values = vec![0.0, f32::NAN, 0.0, 0.0, 0.0, 0.0, f32::INFINITY, 0.0];
        let gaps = Gaps::of(&SignalRecording { channels: 2, len: 4, values });
        assert_eq!(gaps.0, [1, 2]);
        assert!(gaps.meets(0, 2) && gaps.meets(2, 2) && !gaps.meets(3, 1) && !gaps.meets(0, 1));
    }
}
