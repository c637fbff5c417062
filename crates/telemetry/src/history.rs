//! A job's numbers over its whole life, in memory and in a file that survives restarts.
//!
//! The file is a promise to scripts: each line is a point, oldest first, as `baton metrics --json` prints it. It is a journal: a line with `began_at` says that what earlier lines tell of later steps
//! counts no more. A file that has been thinned out begins with a line `{"thinned_to_steps":N}`: of each N steps it has
//! the first update that was told, or had until then. Fields and kinds of lines are added, never renamed or removed.

mod kept;

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

use baton_proto::v1::{StreamMetricsResponse, stream_metrics_response::Metrics};
use serde::{Deserialize, Serialize};

use self::kept::Kept;
use crate::error::Error;

/// How often updates reach the file, by their own clock.
const FLUSH_MILLIS: u64 = 1_000;

/// How much is kept.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Points of each kind in memory; at least 8.
    points: usize,
    /// Size from which the file is thinned out too.
    file_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { points: 4_096, file_bytes: 64 << 20 }
    }
}

/// The first line of a file that was thinned out.
#[derive(Debug, Serialize, Deserialize)]
struct Thinned {
    /// Of each so many steps there is the first update.
    thinned_to_steps: u64,
}

/// A job's numbers over its whole life.
///
/// In memory there are at most 4,096 updates, 4,096 evaluations and 4,096 marks of where training began. When there
/// would be more updates, a stride is doubled until at most half are left: of each so many steps the first update is
/// kept, and the newest of all. Of the others every second one of the older half goes. The file has everything, until
/// it exceeds 64 MiB: then it is written anew with what is in memory.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    file: BufWriter<File>,
    limits: Limits,
    kept: Kept,
    unreadable_lines: u64,
    /// Size of the file, with what is not yet flushed.
    bytes: u64,
    /// The size at which it is written anew.
    rewrite_at: u64,
    /// When the last flushed point was told.
    flushed_unix_millis: u64,
}

impl History {
    /// Opens the file and reads what is there, or creates it.
    ///
    /// A last line that is torn or cannot be read was being written when a process died: it is cut off. Others that
    /// cannot be read are passed over and counted.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or written.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        Self::with_limits(path.into(), Limits::default())
    }

    fn with_limits(path: PathBuf, limits: Limits) -> Result<Self, Error> {
        let file = append_to(&path)?;
        let mut kept = Kept::new(limits.points);
        let read = read(&file, &mut kept).map_err(Error::of("read", &path))?;
        file.set_len(read.bytes).map_err(Error::of("cut off the torn end of", &path))?;
        Ok(Self {
            file: BufWriter::new(file),
            limits,
            kept,
            unreadable_lines: read.unreadable_lines,
            bytes: read.bytes,
            rewrite_at: limits.file_bytes,
            flushed_unix_millis: 0,
            path,
        })
    }

    /// Takes a point. One that says nothing new, an update that is not after the newest one, is left out.
    ///
    /// Updates reach the file at most once a second, by their own clock; all else at once. Nothing is synced to the
    /// disk: what a crash of the machine takes is a few points of a curve.
    ///
    /// # Errors
    ///
    /// If the file cannot be written. The point is in memory nevertheless.
    pub fn add(&mut self, point: StreamMetricsResponse) -> Result<(), Error> {
        let now = point.unix_millis;
        let is_step = matches!(point.metrics, Some(Metrics::Step(_)));
        let line = line(&point).map_err(Error::of("write to", &self.path))?;
        if !self.kept.take(point) {
            return Ok(());
        }
        if self.bytes + line.len() as u64 > self.rewrite_at {
            return self.rewrite();
        }
        self.file.write_all(&line).map_err(Error::of("write to", &self.path))?;
        self.bytes += line.len() as u64;
        // A clock may also be set back.
        if is_step && now.abs_diff(self.flushed_unix_millis) < FLUSH_MILLIS {
            return Ok(());
        }
        self.flushed_unix_millis = now;
        self.flush()
    }

    /// Hands everything to the operating system.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.file.flush().map_err(Error::of("write to", &self.path))
    }

    /// What was told later than this, oldest first; 0 for all.
    #[must_use]
    pub fn points(&self, after_unix_millis: u64) -> Vec<StreamMetricsResponse> {
        self.kept.points(after_unix_millis)
    }

    /// Lines of the file that could not be read when it was opened, a torn last one left out.
    #[must_use]
    pub fn unreadable_lines(&self) -> u64 {
        self.unreadable_lines
    }

    /// Writes what is in memory to a new file, and puts that in the old one's place.
    fn rewrite(&mut self) -> Result<(), Error> {
        let mut text = line(&Thinned { thinned_to_steps: self.kept.stride() })
            .map_err(Error::of("write to", &self.path))?;
        for point in self.kept.points(0) {
            text.extend(line(&point).map_err(Error::of("write to", &self.path))?);
        }
        let beside = self.path.with_extension("tmp");
        // Not twice as often as it doubles, however long lines get. Also if it fails: a full disk is no reason to try
        // at every point.
        self.rewrite_at = self.limits.file_bytes.max(2 * text.len() as u64).max(2 * self.bytes);
        fs::write(&beside, &text).map_err(Error::of("write", &beside))?;
        // Opened first: whatever fails here, what follows goes to the file of that name.
        let file = append_to(&beside)?;
        fs::rename(&beside, &self.path).map_err(Error::of("replace", &self.path))?;
        self.file = BufWriter::new(file);
        self.bytes = text.len() as u64;
        self.rewrite_at = self.limits.file_bytes.max(2 * self.bytes);
        Ok(())
    }
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

/// What was found in a file.
struct Read {
    /// Where its last good line ends.
    bytes: u64,
    unreadable_lines: u64,
}

fn read(file: &File, kept: &mut Kept) -> std::io::Result<Read> {
    let mut file = BufReader::new(file);
    let (mut bytes, mut unreadable_lines, mut unreadable_last) = (0, 0, None);
    let mut line = Vec::new();
    loop {
        line.clear();
        if file.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        // An unreadable line is only the last one if none follows.
        if let Some(length) = unreadable_last.take() {
            unreadable_lines += 1;
            bytes += length;
        }
        let length = line.len() as u64;
        if line.ends_with(b"\n") && read_line(&line, kept) {
            bytes += length;
        } else {
            unreadable_last = Some(length);
        }
    }
    Ok(Read { bytes, unreadable_lines })
}

fn read_line(line: &[u8], kept: &mut Kept) -> bool {
    if let Ok(point) = serde_json::from_slice(line) {
        kept.take(point);
        return true;
    }
    let thinned = serde_json::from_slice::<Thinned>(line);
    thinned.map(|thinned| kept.set_stride(thinned.thinned_to_steps)).is_ok()
}

#[cfg(test)]
mod tests;
