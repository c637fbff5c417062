//! One way of logging for agent and ranks: to standard error, filtered by `RUST_LOG`.

use std::{
    env,
    io::{self, Write},
};

use tracing::Level;
use tracing_subscriber::{
    filter::Targets,
    fmt::{self, writer::MakeWriterExt as _},
    layer::{Layer as _, SubscriberExt as _},
    util::SubscriberInitExt as _,
};

/// Starts it; to be called once. What is logged goes to `also` too.
pub(crate) fn start(also: impl Write + Clone + Send + Sync + 'static) {
    let filter = env::var("RUST_LOG").ok().and_then(|filter| filter.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(Level::INFO));
    let log = fmt::layer().with_ansi(false).with_writer((move || also.clone()).and(io::stderr));
    tracing_subscriber::registry().with(log.with_filter(filter)).init();
}
