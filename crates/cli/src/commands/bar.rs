//! Progress bars of commands.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{human, output};

/// Template of a bar that counts bytes.
pub(super) const BYTES: &str =
    "{bar:40} {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left";
/// Template of a bar that counts samples.
pub(super) const SAMPLES: &str = "{bar:40} {pos}/{len} samples  {per_sec}  {eta} left";
/// Template of a bar that counts rows.
pub(super) const ROWS: &str = "{bar:40} {pos} rows  {per_sec}";

/// A progress bar, drawn on standard error if that is a terminal.
pub(super) fn bar(template: &str, length: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Interval between progress lines if there is no terminal for a progress bar.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Progress of a command on standard error: a bar on a terminal, or else lines.
pub(super) struct CommandProgress {
    pub(super) bar: ProgressBar,
    /// Whether nothing is shown.
    is_quiet: bool,
    last_line: Instant,
}

impl CommandProgress {
    pub(super) fn new(template: &str, length: u64, is_quiet: bool) -> Self {
        let bar = bar(template, length);
        if is_quiet {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self { bar, is_quiet, last_line: Instant::now() }
    }

    /// Moves the bar. Returns whether the caller has to print a line: there is no bar, and the last line is old.
    pub(super) fn is_line_due(&mut self, done: u64) -> bool {
        self.bar.set_position(done);
        let is_due =
            self.bar.is_hidden() && !self.is_quiet && self.last_line.elapsed() >= LINE_INTERVAL;
        if is_due {
            self.last_line = Instant::now();
        }
        is_due
    }

    /// Shows that `done` bytes are written.
    pub(super) fn show_bytes(&mut self, done: u64) {
        if self.is_line_due(done) {
            let all = self.bar.length().unwrap_or(done);
            output::note(format_args!("{} of {}", human::bytes(done), human::bytes(all)));
        }
    }

    /// Prints a line above the bar.
    pub(super) fn note(&self, text: impl Display) {
        self.bar.suspend(|| output::note(text));
    }

    pub(super) fn finish(self) {
        self.bar.finish_and_clear();
    }
}
