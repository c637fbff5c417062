//! History of a job's metrics, in memory and in a file that survives restarts.
//!
//! Scripts depend on the format of the file: each line is a point, oldest first, as `baton metrics --json` prints it. A
//! line with `began_at` invalidates the points of later steps in earlier lines. A file that was thinned out begins with
//! a line `{"thinned_to_steps":N}`: of every N steps before that, it has only the first reported step. Fields and
//! kinds of lines may be added, but never renamed or removed.

mod points;

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

use baton_proto::v1::{StreamMetricsResponse, stream_metrics_response::Metrics};
use serde::{Deserialize, Serialize};

use self::points::KeptPoints;
use crate::error::Error;

/// Shortest time between two flushes of steps to the file, by the times of the steps, milliseconds.
const FLUSH_INTERVAL_MILLIS: u64 = 1_000;

/// Limits of memory and file size.
#[derive(Debug, Clone, Copy)]
struct HistoryLimits {
    /// Most points of each kind in memory; at least 8.
    points: usize,
    /// Size at which the file is thinned out too, bytes.
    file_bytes: u64,
}

impl Default for HistoryLimits {
    fn default() -> Self {
        Self { points: 4_096, file_bytes: 64 << 20 }
    }
}

/// First line of a file that was thinned out.
#[derive(Debug, Serialize, Deserialize)]
struct ThinnedHeader {
    /// Stride: of every range of this many steps, the file has only the first.
    thinned_to_steps: u64,
}

/// The metric points of the whole job.
///
/// Memory holds at most 4,096 steps, 4,096 evaluations and 4,096 starts of training. If there are more
/// steps, a stride is doubled until at most half of them are left: only the first step of each stride, and the
/// newest step, are kept. When training starts again and no step is left, the stride is 1 again. If there are more
/// evaluations or starts, every second one of the older half is dropped. The file has all points until it exceeds
/// 64 MiB; then it is rewritten with the points in memory.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    file: BufWriter<File>,
    limits: HistoryLimits,
    points: KeptPoints,
    unreadable_lines: u64,
    /// Size of the file, including what is not flushed yet.
    bytes: u64,
    /// Size at which the file is rewritten, bytes.
    rewrite_at: u64,
    /// Time of the last flushed step.
    flushed_unix_millis: u64,
}

impl History {
    /// Opens and reads the file, or creates it.
    ///
    /// If the last line is incomplete or cannot be read, a process died while it wrote this line, and it is removed.
    /// Other lines that cannot be read are skipped and counted.
    ///
    /// # Errors
    ///
    /// The file cannot be read or written.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        Self::with_limits(path.into(), HistoryLimits::default())
    }

    fn with_limits(path: PathBuf, limits: HistoryLimits) -> Result<Self, Error> {
        let file = append_to(&path)?;
        let mut points = KeptPoints::new(limits.points);
        let read = read(&file, &mut points).map_err(Error::of("read", &path))?;
        file.set_len(read.bytes).map_err(Error::of("remove the incomplete last line of", &path))?;
        Ok(Self {
            file: BufWriter::new(file),
            limits,
            points,
            unreadable_lines: read.unreadable_lines,
            bytes: read.bytes,
            rewrite_at: limits.file_bytes,
            flushed_unix_millis: 0,
            path,
        })
    }

    /// Adds a point, and returns whether it is new: a step that is not later than the newest one is skipped.
    ///
    /// Steps are flushed to the file at most once a second, by their own times; all other points at once. The file is
    /// not synced to the disk: a crash of the machine loses a few points of a curve.
    ///
    /// # Errors
    ///
    /// The file cannot be written. The point is in memory nevertheless.
    pub fn add(&mut self, point: StreamMetricsResponse) -> Result<bool, Error> {
        let now = point.unix_millis;
        let is_step = matches!(point.metrics, Some(Metrics::Step(_)));
        let line = line(&point).map_err(Error::of("write to", &self.path))?;
        if !self.points.add(point) {
            return Ok(false);
        }
        if self.bytes + line.len() as u64 > self.rewrite_at {
            self.rewrite()?;
            return Ok(true);
        }
        self.file.write_all(&line).map_err(Error::of("write to", &self.path))?;
        self.bytes += line.len() as u64;
        // The clock may have been set back.
        if is_step && now.abs_diff(self.flushed_unix_millis) < FLUSH_INTERVAL_MILLIS {
            return Ok(true);
        }
        self.flushed_unix_millis = now;
        self.flush()?;
        Ok(true)
    }

    /// Passes all points to the operating system.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.file.flush().map_err(Error::of("write to", &self.path))
    }

    /// Points later than `after_unix_millis`, oldest first; 0 for all.
    #[must_use]
    pub fn points(&self, after_unix_millis: u64) -> Vec<StreamMetricsResponse> {
        self.points.points(after_unix_millis)
    }

    /// Number of lines that could not be read when the file was opened, not counting an incomplete last line.
    #[must_use]
    pub fn unreadable_lines(&self) -> u64 {
        self.unreadable_lines
    }

    /// Writes the points in memory to a new file, which replaces the old one.
    fn rewrite(&mut self) -> Result<(), Error> {
        let mut text = line(&ThinnedHeader { thinned_to_steps: self.points.stride() })
            .map_err(Error::of("write to", &self.path))?;
        for point in self.points.points(0) {
            text.extend(line(&point).map_err(Error::of("write to", &self.path))?);
        }
        let new_path = self.path.with_extension("tmp");
        // Rewrite again only when the size has doubled, however long the lines are. Set this also for the case that the
        // rewrite fails: on a full disk it must not be retried at every point.
        self.rewrite_at = self.limits.file_bytes.max(2 * text.len() as u64).max(2 * self.bytes);
        fs::write(&new_path, &text).map_err(Error::of("write", &new_path))?;
        // Open before the rename: if a call here fails, later points still go to the file with the final name.
        let file = append_to(&new_path)?;
        fs::rename(&new_path, &self.path).map_err(Error::of("replace", &self.path))?;
        self.file = BufWriter::new(file);
        self.bytes = text.len() as u64;
        self.rewrite_at = self.limits.file_bytes.max(2 * self.bytes);
        Ok(())
    }
}

/// The points in a file that another process may be writing, as [`History::points`] would return them all.
///
/// # Errors
///
/// The file cannot be read.
pub fn points_in(path: &Path) -> Result<Vec<StreamMetricsResponse>, Error> {
    let file = File::open(path).map_err(Error::of("open", path))?;
    let mut points = KeptPoints::new(HistoryLimits::default().points);
    read(&file, &mut points).map_err(Error::of("read", path))?;
    Ok(points.points(0))
}

fn append_to(path: &Path) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).open(path).map_err(Error::of("open", path))
}

fn line(content: &impl Serialize) -> std::io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(content)?;
    line.push(b'\n');
    Ok(line)
}

/// Result of reading a file.
struct HistoryFileContent {
    /// Offset of the end of the last readable line.
    bytes: u64,
    unreadable_lines: u64,
}

fn read(file: &File, points: &mut KeptPoints) -> std::io::Result<HistoryFileContent> {
    let mut file = BufReader::new(file);
    let (mut bytes, mut unreadable_lines, mut unreadable_last) = (0, 0, None);
    let mut line = Vec::new();
    loop {
        line.clear();
        if file.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        // Only now it is certain that the unreadable line is not the last one.
        if let Some(length) = unreadable_last.take() {
            unreadable_lines += 1;
            bytes += length;
        }
        let length = line.len() as u64;
        if line.ends_with(b"\n") && read_line(&line, points) {
            bytes += length;
        } else {
            unreadable_last = Some(length);
        }
    }
    Ok(HistoryFileContent { bytes, unreadable_lines })
}

fn read_line(line: &[u8], points: &mut KeptPoints) -> bool {
    if let Ok(point) = serde_json::from_slice(line) {
        points.add(point);
        return true;
    }
    let thinned = serde_json::from_slice::<ThinnedHeader>(line);
    thinned.map(|thinned| points.set_stride(thinned.thinned_to_steps)).is_ok()
}

#[cfg(test)]
mod tests;
