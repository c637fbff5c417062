//! A small tokio runtime on threads of its own, so that plain threads can wait for the network.

use std::io;

use tokio::runtime::{Builder, Handle, Runtime};

/// Runs futures while plain threads wait for them.
pub(super) struct Io {
    /// `None` only during drop.
    runtime: Option<Runtime>,
    handle: Handle,
}

impl Io {
    pub(super) fn new() -> io::Result<Self> {
        // Two threads decrypt TLS at several GB/s; digests and disk are the caller's.
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("shards-io")
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        Ok(Self { runtime: Some(runtime), handle })
    }

    /// Not to be called from async code: tokio refuses to nest.
    pub(super) fn run<F: Future>(&self, future: F) -> F::Output {
        self.handle.block_on(future)
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for Io {
    /// An ordinary drop waits for helper threads, and tokio panics if async code does that.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
