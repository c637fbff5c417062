//! The coordinator's lease in the checkpoint store. It is taken with the coordinator's first generation, so that one that
//! only starts disturbs nobody; or at once, by a coordinator that takes over from a lost one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
};

use baton_checkpoint::{Error, Lease, Store};
use baton_job::standby::RENEWAL_INTERVAL;
use parking_lot::Mutex;
use tracing::{info, warn};

/// How many times a lease is renewed, or could be, from one look for a newer one to the next.
const ROUNDS_PER_LOOK: u64 = 4;

/// The lease of this coordinator; clones refer to the same one.
#[derive(Clone)]
pub(crate) struct HeldLease(Arc<Holder>);

struct Holder {
    store: Store,
    state: Mutex<State>,
    /// Whether it is to be renewed.
    renews: AtomicBool,
    rounds: AtomicU64,
}

enum State {
    /// Not taken yet. `newest` is the number of the newest lease when this coordinator started; a newer one is of a
    /// coordinator that has continued the job since. `None` if ranks may run: then the newest one must be this place's.
    Free {
        lease: Lease,
        newest: Option<u64>,
    },
    Held(Lease),
}

impl HeldLease {
    /// A lease that will be taken by [`secure`](Self::secure): `lease` is what it says.
    pub(crate) fn free(store: Store, lease: Lease, newest: Option<u64>) -> Self {
        Self::of(store, State::Free { lease, newest })
    }

    /// A lease that this coordinator has taken.
    pub(crate) fn taken(store: Store, lease: Lease) -> Self {
        Self::of(store, State::Held(lease))
    }

    fn of(store: Store, state: State) -> Self {
        let renews = AtomicBool::new(false);
        let rounds = AtomicU64::new(0);
        Self(Arc::new(Holder { store, state: Mutex::new(state), renews, rounds }))
    }

    /// Takes the lease, or checks that it is still the newest one. Returns false if the store has lost it, or another folder
    /// is in place of the store.
    ///
    /// # Errors
    /// [`Error::Replaced`] if another coordinator has a newer one; the store cannot be read or written.
    pub(crate) fn secure(&self) -> Result<bool, Error> {
        self.0.secure()
    }

    /// Sets whether the lease is renewed from now on, so that others take over once it is not.
    pub(crate) fn set_renewed(&self, renews: bool) {
        self.0.renews.store(renews, Ordering::Relaxed);
    }

    /// Renews the lease on a thread of its own, until the renewal is dropped. `on_replaced` is called if another coordinator
    /// has taken a newer one.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn keep(
        &self,
        on_replaced: impl FnOnce(Error) + Send + 'static,
    ) -> std::io::Result<Renewal> {
        let (stop, stopped) = mpsc::channel::<()>();
        let holder = self.0.clone();
        let mut on_replaced = Some(on_replaced);
        let renew = move || {
            let mut has_failed = false;
            while stopped.recv_timeout(RENEWAL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                match holder.renew() {
                    Ok(()) => has_failed = false,
                    Err(error @ Error::Replaced { .. }) => {
                        if let Some(on_replaced) = on_replaced.take() {
                            on_replaced(error);
                        }
                        return;
                    }
                    Err(error) => {
                        if !std::mem::replace(&mut has_failed, true) {
                            warn!("the coordinator's lease cannot be renewed: {error}");
                        }
                    }
                }
            }
        };
        thread::Builder::new().name("lease".to_owned()).spawn(renew)?;
        Ok(Renewal { _stop: stop })
    }

    /// Says in the store that this coordinator has ended, and another one should take over.
    pub(crate) fn release(&self) {
        let mut state = self.0.state.lock();
        if let State::Held(lease) = &mut *state {
            lease.released = true;
            if let Err(error) = self.0.store.renew_lease(lease) {
                warn!("the coordinator's lease cannot be released: {error}");
            }
        }
    }
}

/// Stops the renewals when it is dropped.
pub(crate) struct Renewal {
    _stop: Sender<()>,
}

impl Holder {
    fn secure(&self) -> Result<bool, Error> {
        let Self { store, state, .. } = self;
        let mut state = state.lock();
        let (mine, expected) = match &*state {
            State::Held(lease) => return store.has_lease(lease.number),
            State::Free { lease, newest } => (lease, *newest),
        };
        let taken = match store.lease()? {
            Some(found) if found.is_at_place_of(mine) => {
                // Before a restart this coordinator had it.
                let Lease { number, renewals, .. } = found;
                let lease = Lease { number, renewals: renewals + 1, ..mine.clone() };
                store.renew_lease(&lease)?;
                lease
            }
            _ => {
                let lease = Lease { number: expected.unwrap_or(0) + 1, ..mine.clone() };
                store.take_lease(&lease)?;
                lease
            }
        };
        info!(number = taken.number, "this coordinator has the lease of the checkpoint store");
        *state = State::Held(taken);
        Ok(true)
    }

    fn renew(&self) -> Result<(), Error> {
        if matches!(&*self.state.lock(), State::Free { newest: None, .. }) {
            // After a restart: somebody else may have taken over in the meantime.
            self.secure()?;
        }
        let mut state = self.state.lock();
        let State::Held(lease) = &mut *state else { return Ok(()) };
        // Who had nodes may have lost them to another coordinator.
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        if lease.renewals > 0 && round.is_multiple_of(ROUNDS_PER_LOOK) {
            self.store.has_lease(lease.number)?;
        }
        let renews = self.renews.load(Ordering::Relaxed);
        if lease.released || !(renews || lease.renews) {
            return Ok(());
        }
        lease.renews = renews;
        lease.renewals += 1;
        self.store.renew_lease(lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(folder: &tempfile::TempDir) -> Store {
        Store::open(folder.path().to_str().unwrap()).unwrap()
    }

    fn of_host(host: &str) -> Lease {
        Lease { host: host.to_owned(), owner: format!("{host} 1"), ..Lease::default() }
    }

    #[test]
    fn of_two_coordinators_that_start_alike_one_gets_the_lease() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|host| HeldLease::free(store(&folder), of_host(host), Some(0)));
        assert!(a.secure().unwrap());
        let error = b.secure().unwrap_err();
        assert!(matches!(&error, Error::Replaced { by, .. } if by.host == "a"), "{error}");
        assert!(a.secure().unwrap());
    }

    #[test]
    fn one_that_starts_later_replaces_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let a = HeldLease::free(store(&folder), of_host("a"), Some(0));
        a.secure().unwrap();
        let b = HeldLease::free(store(&folder), of_host("b"), Some(1));
        b.secure().unwrap();
        assert!(matches!(a.secure(), Err(Error::Replaced { .. })));
        assert!(b.secure().unwrap());
    }

    #[test]
    fn a_lease_that_is_gone_with_the_store_is_missed() {
        let folder = tempfile::tempdir().unwrap();
        let held = HeldLease::free(store(&folder), of_host("a"), Some(0));
        assert!(held.secure().unwrap());
        std::fs::remove_dir_all(folder.path().join("leases")).unwrap();
        assert!(!held.secure().unwrap());
    }

    #[test]
    fn a_restarted_coordinator_has_its_lease_unless_another_one_took_over() {
        let folder = tempfile::tempdir().unwrap();
        let begun = HeldLease::free(store(&folder), of_host("a"), Some(0));
        begun.secure().unwrap();
        let restarted = |host| HeldLease::free(store(&folder), of_host(host), None);
        let again = restarted("a");
        again.secure().unwrap();
        assert_eq!(store(&folder).lease().unwrap().unwrap().number, 1);

        HeldLease::free(store(&folder), of_host("b"), Some(1)).secure().unwrap();
        assert!(matches!(restarted("a").secure(), Err(Error::Replaced { .. })));
        restarted("b").secure().unwrap();
    }

    #[test]
    fn it_is_renewed_only_while_somebody_can_take_over() {
        let folder = tempfile::tempdir().unwrap();
        let held = HeldLease::free(store(&folder), of_host("a"), Some(0));
        held.secure().unwrap();
        let renewed = || {
            held.0.renew().unwrap();
            let lease = store(&folder).lease().unwrap().unwrap();
            (lease.renews, lease.renewals)
        };
        assert_eq!(renewed(), (false, 0));
        held.set_renewed(true);
        assert_eq!(renewed(), (true, 1));
        assert_eq!(renewed(), (true, 2));
        held.set_renewed(false);
        assert_eq!(renewed(), (false, 3));
        assert_eq!(renewed(), (false, 3));

        store(&folder).take_lease(&Lease { number: 2, ..of_host("b") }).unwrap();
        let is_known = (0..ROUNDS_PER_LOOK).any(|_| held.0.renew().is_err());
        assert!(is_known, "also where it has no nodes any more");
    }
}
