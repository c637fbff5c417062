//! How far reading or writing checkpoints has come.

use indicatif::{ProgressBar, ProgressStyle};

/// Counts bytes; draws on standard error, and only on a terminal.
pub(super) fn bar(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{bar:40} {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left",
    );
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
