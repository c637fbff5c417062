//! Progress bars of commands.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{human, output};

/// Template of a bar that counts bytes.
pub(super) const BYTES: &str =
    "{bar:40} {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left";
/// Template of a bar that counts samples.
pub(super) const SAMPLES: &str = "{bar:40} {pos}/{len} samples  {per_sec}  {eta} left";

/// A progress bar, drawn on standard error if that is a terminal.
pub(super) fn bar(template: &str, length: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Interval between progress lines if there is no terminal for a progress bar.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Progress of writing bytes on standard error: a bar on a terminal, or else lines.
pub(super) struct ByteProgress {
    bar: ProgressBar,
    all: u64,
    is_quiet: bool,
    last_line: Instant,
}

impl ByteProgress {
    pub(super) fn new(all: u64, is_quiet: bool) -> Self {
        let bar = bar(BYTES, all);
        if is_quiet || !std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self { bar, all, is_quiet, last_line: Instant::now() }
    }

    /// Shows that `done` bytes are written.
    pub(super) fn show(&mut self, done: u64) {
        self.bar.set_position(done);
        if self.bar.is_hidden() && !self.is_quiet && self.last_line.elapsed() >= LINE_INTERVAL {
            self.last_line = Instant::now();
            output::note(format_args!("{} of {}", human::bytes(done), human::bytes(self.all)));
        }
    }

    pub(super) fn finish(self) {
        self.bar.finish_and_clear();
    }
}
