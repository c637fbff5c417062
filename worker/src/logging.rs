//! One way of logging for agent and ranks: to standard error, filtered by `RUST_LOG`.

use tracing_subscriber::EnvFilter;

/// Starts it; to be called once.
pub(crate) fn start() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
}
