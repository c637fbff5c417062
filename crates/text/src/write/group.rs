//! Groups of lines, encoded by threads, with the results in order.

use std::{
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    thread,
};

use crate::{
    Error,
    samples::{JsonLines, LineFault, TextFormat},
};

/// Most lines of a group.
const GROUP_LINES: usize = 2_048;
/// Size in bytes from which on a group gets no more lines.
const GROUP_BYTES: usize = 4 << 20;

/// A line of one of the files.
pub(super) struct FileLine<'a> {
    path: &'a Path,
    format: TextFormat,
    number: usize,
    text: Result<String, LineFault>,
}

/// Reads groups of lines from all files.
pub(super) struct LineGroups<'a> {
    files: std::iter::Zip<std::slice::Iter<'a, PathBuf>, std::slice::Iter<'a, TextFormat>>,
    current: Option<(&'a Path, TextFormat, JsonLines)>,
}

impl<'a> LineGroups<'a> {
    pub(super) fn new(paths: &'a [PathBuf], formats: &'a [TextFormat]) -> Self {
        Self { files: paths.iter().zip(formats), current: None }
    }

    /// The next group; `None` after the last one.
    pub(super) fn next(&mut self) -> Result<Option<Vec<FileLine<'a>>>, Error> {
        let (mut lines, mut bytes) = (Vec::new(), 0);
        while lines.len() < GROUP_LINES && bytes < GROUP_BYTES {
            let (path, format, reader) = match &mut self.current {
                Some(current) => current,
                none => match self.files.next() {
                    Some((path, format)) => none.insert((path, *format, JsonLines::open(path)?)),
                    None => break,
                },
            };
            match reader.next()? {
                Some((number, text)) => {
                    bytes += text.as_ref().map_or(0, String::len);
                    lines.push(FileLine { path, format: *format, number, text });
                }
                None => self.current = None,
            }
        }
        Ok((!lines.is_empty()).then_some(lines))
    }
}

/// Calls `encode` for each line, in several threads. The results have the order of the lines.
pub(super) fn map<T: Send>(
    lines: &[FileLine<'_>],
    threads: NonZeroUsize,
    encode: &(impl Fn(&str, TextFormat) -> Result<T, LineFault> + Sync),
) -> Result<Vec<Result<T, Error>>, Error> {
    let one = |line: &FileLine<'_>| {
        // The libraries for tokenizers and templates may panic on unusual input.
        let encoded = catch_unwind(AssertUnwindSafe(|| {
            line.text
                .as_deref()
                .map_err(LineFault::clone)
                .and_then(|text| encode(text, line.format))
        }));
        let panicked = |_| Err(LineFault::new("a library panicked, see the message on stderr"));
        encoded.unwrap_or_else(panicked).map_err(|fault| fault.at(line.path, line.number))
    };
    let share = lines.len().div_ceil(threads.get()).max(1);
    thread::scope(|scope| {
        let mut workers = Vec::new();
        for lines in lines.chunks(share) {
            let work = move || lines.iter().map(one).collect::<Vec<_>>();
            let worker =
                thread::Builder::new().name("tokenize".to_owned()).spawn_scoped(scope, work);
            workers.push(worker.map_err(Error::Thread)?);
        }
        let mut results = Vec::with_capacity(lines.len());
        for worker in workers {
            // A panic while a line is encoded was caught above.
            let panicked =
                |_| Error::Tokenizer("a thread panicked, see the message on stderr".to_owned());
            results.extend(worker.join().map_err(panicked)?);
        }
        Ok(results)
    })
}

/// Why a line that can be read cannot be encoded.
pub(super) fn fault(error: Error) -> LineFault {
    LineFault::new(error.to_string())
}
