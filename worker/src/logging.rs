//! Logging of agent and ranks: to standard error, filtered by `RUST_LOG`.

use std::io::{self, Write};

use tracing_subscriber::{EnvFilter, fmt::writer::MakeWriterExt as _};

/// Starts logging, to standard error and to `also`. Must be called only once.
pub(crate) fn start(also: impl Write + Clone + Send + Sync + 'static) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        // If the disk of the log is full, a message about that would panic.
        .log_internal_errors(false)
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer((move || also.clone()).and(io::stderr))
        .init();
}
