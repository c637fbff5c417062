//! A small tokio runtime with dedicated threads, so that synchronous code can use asynchronous stores.

use std::io;

use tokio::runtime::{Builder, Handle, Runtime};

/// Runs futures while synchronous callers wait for them. Connections to a bucket stay open between calls.
#[derive(Debug)]
pub struct Blocking {
    /// `None` only during drop.
    runtime: Option<Runtime>,
    handle: Handle,
}

impl Blocking {
    /// Starts a runtime with `threads` worker threads.
    ///
    /// # Errors
    /// The system cannot start the threads.
    pub fn new(thread_name: &str, threads: usize) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name(thread_name)
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        Ok(Self { runtime: Some(runtime), handle })
    }

    /// Runs a future and waits until it completes. Do not call this from async code: tokio panics on nested runtimes.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        self.handle.block_on(future)
    }

    /// Handle for spawning background tasks.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for Blocking {
    /// Dropping a `Runtime` waits for its helper threads, and tokio panics if that happens in async code, where
    /// a store may be dropped. So shut down in the background.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
