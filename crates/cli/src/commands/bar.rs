//! Progress bars of commands.

use indicatif::{ProgressBar, ProgressStyle};

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
