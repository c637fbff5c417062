//! Breaking an operation from another thread.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;

/// Breaks the operation in progress on a group, and all later ones, at once and for ever.
///
/// Make one per generation and give it to `connect`: then waiting for peers can be broken too.
#[derive(Clone, Default)]
pub struct AbortHandle {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    aborted: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

/// Rouses a thread that sleeps where it cannot see the flag.
type Waker = Box<dyn FnOnce() + Send>;

impl AbortHandle {
    /// A handle not yet tied to any group.
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

    /// Has `wake` called when the group is aborted; at once if it is already.
    pub fn on_abort(&self, wake: impl FnOnce() + Send + 'static) {
        self.wakers().push(Box::new(wake));
        // The flag is looked at after the push: an abort in between either saw the waker or is seen.
        if self.is_aborted() {
            self.abort();
        }
    }

    /// The error of an operation that must not start or go on.
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
    fn a_waker_runs_once_whether_it_comes_before_or_after_the_abort() {
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
