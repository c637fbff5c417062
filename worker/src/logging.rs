//! One way of logging for agent and ranks: to standard error, filtered by `RUST_LOG`.

use std::io::{self, Write};

use tracing_subscriber::EnvFilter;

use crate::agent::OwnLog;

/// Starts it; to be called once. What is logged goes to `also` too.
pub(crate) fn start(also: Option<OwnLog>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(move || Tee { also: also.clone() })
        .init();
}

/// Standard error, and the way to the coordinator.
struct Tee {
    also: Option<OwnLog>,
}

impl Write for Tee {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if let Some(also) = &self.also {
            also.take(text);
        }
        io::stderr().write_all(text)?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
