//! Aborting an operation from another thread.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;

/// Aborts the current operation of a group and all later ones, immediately and permanently.
///
/// Create one per generation and pass it to `connect`, so that the wait for peers can be aborted too.
#[derive(Clone, Default)]
pub struct AbortHandle {
    shared: Arc<AbortState>,
}

#[derive(Default)]
struct AbortState {
    aborted: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

/// Wakes a thread that sleeps where it cannot read the flag.
type Waker = Box<dyn FnOnce() + Send>;

impl AbortHandle {
    /// A handle that no group uses yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Aborts. Never blocks; a second call does nothing.
    pub fn abort(&self) {
        self.shared.aborted.store(true, Ordering::SeqCst);
        let wakers = std::mem::take(&mut *self.wakers());
        for wake in wakers {
            wake();
        }
    }

    /// Whether [`abort`](Self::abort) was called.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.shared.aborted.load(Ordering::SeqCst)
    }

    /// Registers `wake` to be called on an abort; calls it immediately if the group is aborted already.
    pub fn on_abort(&self, wake: impl FnOnce() + Send + 'static) {
        self.wakers().push(Box::new(wake));
        // The flag is read after the push: an abort in between either finds the waker or is detected here.
        if self.is_aborted() {
            self.abort();
        }
    }

    /// An error if the operation must not start or continue.
    ///
    /// # Errors
    /// [`abort`](Self::abort) was called.
    pub fn check(&self, operation: &'static str) -> Result<(), Error> {
        if self.is_aborted() { Err(Error::Aborted { operation }) } else { Ok(()) }
    }

    fn wakers(&self) -> std::sync::MutexGuard<'_, Vec<Waker>> {
        self.shared.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbortHandle").field("aborted", &self.is_aborted()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waker_runs_once_whether_it_is_added_before_or_after_the_abort() {
        let handle = AbortHandle::new();
        let woken = Arc::new(Mutex::new(0));
        let count = |woken: &Arc<Mutex<i32>>| {
            let woken = Arc::clone(woken);
            move || *woken.lock().unwrap() += 1
        };

        handle.on_abort(count(&woken));
        assert!(!handle.is_aborted());
        handle.clone().abort();
        handle.abort();
        assert_eq!(*woken.lock().unwrap(), 1);
        handle.on_abort(count(&woken));
        assert_eq!(*woken.lock().unwrap(), 2);
    }
}
