//! The first reading: how many samples each set has, and the format of each file.

use super::{OnBadLine, TokenizeOptions};
use crate::{
    Error,
    samples::{JsonLines, LineKeys, TextFormat},
    split::{SampleSet, SampleSplit},
};

/// Numbers of all files. Lines that turn out to be bad later are included, so the sets have at most as many samples.
#[derive(Debug)]
pub(super) struct SampleCounts {
    /// Number of lines that are not blank.
    pub(super) lines: u64,
    pub(super) train: u64,
    pub(super) val: u64,
    /// Format of each file.
    pub(super) formats: Vec<TextFormat>,
}

impl SampleCounts {
    pub(super) fn of(
        options: &TokenizeOptions,
        split: Option<&SampleSplit>,
    ) -> Result<Self, Error> {
        let mut counts = Self { lines: 0, train: 0, val: 0, formats: Vec::new() };
        for path in &options.from {
            let mut lines = JsonLines::open(path)?;
            let mut format = options.format;
            // Why the first line has no known format, if it is skipped.
            let mut first_fault = None;
            while let Some((number, line)) = lines.next()? {
                counts.lines += 1;
                let line = match line {
                    Ok(line) => line,
                    Err(fault) if options.on_bad == OnBadLine::Skip => {
                        first_fault.get_or_insert_with(|| fault.at(path, number));
                        continue;
                    }
                    Err(fault) => return Err(fault.at(path, number)),
                };
                if format.is_none() {
                    match LineKeys::read(&line, None).and_then(|keys| keys.format()) {
                        Ok(found) => format = Some(found),
                        Err(fault) if options.on_bad == OnBadLine::Skip => {
                            first_fault.get_or_insert_with(|| fault.at(path, number));
                        }
                        Err(fault) => return Err(fault.at(path, number)),
                    }
                }
                match split.map(|split| set(split, &line)).transpose() {
                    Ok(None | Some(SampleSet::Train)) => counts.train += 1,
                    Ok(Some(SampleSet::Val)) => counts.val += 1,
                    Err(_) if options.on_bad == OnBadLine::Skip => {}
                    Err(fault) => return Err(fault.at(path, number)),
                }
            }
            let unknown = || {
                let empty =
                    || Error::file(path, "has no lines: it must have one JSON object per line");
                first_fault.unwrap_or_else(empty)
            };
            counts.formats.push(format.filter(|_| lines.has_lines()).ok_or_else(unknown)?);
        }
        Ok(counts)
    }
}

fn set(split: &SampleSplit, line: &str) -> Result<SampleSet, crate::samples::LineFault> {
    // The whole line decides, whatever its keys are.
    let keys = match split.by() {
        None => LineKeys::default(),
        by => LineKeys::read(line, by)?,
    };
    split.set(line, &keys)
}
