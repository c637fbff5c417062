//! Word between threads that something changed, and that all is over.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;

/// Counts changes; whoever waits for the next cannot miss one that came before it waited.
#[derive(Debug)]
pub(super) struct Signal {
    changes: Mutex<u64>,
    changed: Condvar,
    is_over: watch::Sender<bool>,
}

impl Signal {
    pub(super) fn new() -> Self {
        Self {
            changes: Mutex::default(),
            changed: Condvar::new(),
            is_over: watch::Sender::new(false),
        }
    }

    /// How many changes there were.
    pub(super) fn changes(&self) -> u64 {
        *self.lock()
    }

    /// A lease ended, or the plan is another.
    pub(super) fn change(&self) {
        *self.lock() += 1;
        self.changed.notify_all();
    }

    /// Waits until there were more than `seen` changes, but not longer than `most`.
    pub(super) fn wait_beyond(&self, seen: u64, most: Duration) {
        // Neither a poisoned lock nor a timeout changes what the caller does: it looks again.
        let _ = self.changed.wait_timeout_while(self.lock(), most, |changes| *changes <= seen);
    }

    /// Ends every wait from now on.
    pub(super) fn end(&self) {
        self.is_over.send_replace(true);
        self.change();
    }

    pub(super) fn is_over(&self) -> bool {
        *self.is_over.borrow()
    }

    /// Comes back when all is over.
    pub(super) async fn over(&self) {
        // It fails only when the sender is gone, and `self` has it.
        let _ = self.is_over.subscribe().wait_for(|is_over| *is_over).await;
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
