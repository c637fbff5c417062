//! Logging of agent and ranks: to standard error, filtered by `RUST_LOG`.

use std::io::{self, Write};

use baton_trainer::profile;
use tracing_subscriber::{
    EnvFilter, Layer as _, fmt::writer::MakeWriterExt as _, layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

/// Starts logging, to standard error and to `also`. Must be called only once.
pub(crate) fn start(also: impl Write + Clone + Send + Sync + 'static) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt::layer()
        // If the disk of the log is full, a message about that would panic.
        .log_internal_errors(false)
        .with_ansi(false)
        .with_writer((move || also.clone()).and(io::stderr))
        .with_filter(filter);
    let registry = tracing_subscriber::registry().with(log).with(profile::layer());
    // A layer that is not there would have a price while a profile is recorded.
    match profile::nvtx_layer() {
        Ok(Some(ranges)) => registry.with(ranges).init(),
        Ok(None) => registry.init(),
        Err(problem) => {
            registry.init();
            tracing::warn!("BATON_NVTX is set, but there are no ranges: {problem}");
        }
    }
}
