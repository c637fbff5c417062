//! Notifies threads of changes and of shutdown.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;

/// Counts changes, so that a waiting thread cannot miss a change that happened before it started to wait.
#[derive(Debug)]
pub(super) struct ChangeSignal {
    changes: Mutex<u64>,
    changed: Condvar,
    is_shut_down: watch::Sender<bool>,
}

impl ChangeSignal {
    pub(super) fn new() -> Self {
        Self {
            changes: Mutex::default(),
            changed: Condvar::new(),
            is_shut_down: watch::Sender::new(false),
        }
    }

    /// Number of changes so far.
    pub(super) fn changes(&self) -> u64 {
        *self.lock()
    }

    /// Signals that a lease has ended, or that the plan has changed.
    pub(super) fn change(&self) {
        *self.lock() += 1;
        self.changed.notify_all();
    }

    /// Waits until there have been more than `seen` changes, at most for `timeout`.
    pub(super) fn wait_for_change(&self, seen: u64, timeout: Duration) {
        // A poisoned lock and a timeout can be ignored: the caller checks its condition again in any case.
        let _ = self.changed.wait_timeout_while(self.lock(), timeout, |changes| *changes <= seen);
    }

    /// Signals shutdown, which ends every wait.
    pub(super) fn shut_down(&self) {
        self.is_shut_down.send_replace(true);
        self.change();
    }

    pub(super) fn is_shut_down(&self) -> bool {
        *self.is_shut_down.borrow()
    }

    /// Waits for shutdown.
    pub(super) async fn shutdown(&self) {
        // This fails only if the sender is dropped, and `self` owns it.
        let _ = self.is_shut_down.subscribe().wait_for(|is_shut_down| *is_shut_down).await;
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
