//! A small tokio runtime, so that plain threads can use asynchronous stores.

use std::io;

use tokio::runtime::{Builder, Runtime};

/// Runs futures to their end on the calling thread.
pub(crate) struct Blocking {
    /// `None` only during drop.
    runtime: Option<Runtime>,
}

impl Blocking {
    pub(crate) fn new() -> io::Result<Self> {
        // A thread of its own, for a bucket's connections live on between two operations.
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("checkpoint-io")
            .enable_all()
            .build()?;
        Ok(Self { runtime: Some(runtime) })
    }

    /// Not to be called from async code: tokio refuses to nest.
    pub(crate) fn run<F: Future>(&self, future: F) -> F::Output {
        match &self.runtime {
            Some(runtime) => runtime.block_on(future),
            None => futures::executor::block_on(future),
        }
    }
}

impl Drop for Blocking {
    /// An ordinary drop waits for helper threads, and tokio panics if async code does that; a store
    /// may well end its life there. Nothing runs any more: every operation was waited for.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
