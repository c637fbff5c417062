//! The coordinator's lease in the checkpoint store. It is taken with the coordinator's first generation, so that one that
//! only starts disturbs nobody; or at once, by a coordinator that takes over from a lost one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
    time::Duration,
};

use baton_checkpoint::{CoordinatorLease, Error, Store};
use baton_job::standby::RENEWAL_INTERVAL;
use parking_lot::Mutex;
use tracing::{info, warn};

/// How many renewals come between two looks for a newer lease.
const RENEWALS_PER_LOOK: u64 = 4;

/// The same for a lease that nobody renews: a person may have started another coordinator.
const IDLE_TURNS_PER_LOOK: u64 = 10;

/// The lease of this coordinator; clones refer to the same one.
#[derive(Clone)]
pub(crate) struct HeldLease(Arc<Holder>);

struct Holder {
    store: Store,
    state: Mutex<LeaseState>,
    /// Whether it is to be renewed.
    renews: AtomicBool,
    /// Number of times that it was not to be renewed.
    idle_turns: AtomicU64,
    /// Wakes the thread that renews it.
    wake: Mutex<Option<Sender<()>>>,
    /// Held while the lease is taken or overwritten, so that the last word is the last and no wish to renew is missed.
    writes: Mutex<()>,
}

/// Who has the newest lease.
#[derive(Debug)]
pub(crate) enum LeaseStatus {
    /// It has the newest lease and renews it, so that agents find the next one if it ends.
    Renewed,
    /// Another one has a newer lease.
    Replaced(Error),
    Other,
}

enum LeaseState {
    /// Not taken yet. `newest` is the number of the newest lease when this coordinator started; a newer one is of a
    /// coordinator that has continued the job since. `None` if ranks may run: then the newest one must be this run folder's.
    Free {
        lease: CoordinatorLease,
        newest: Option<u64>,
    },
    Held(CoordinatorLease),
}

impl HeldLease {
    /// A lease that will be taken by [`secure`](Self::secure): `lease` is what it says.
    pub(crate) fn free(store: Store, lease: CoordinatorLease, newest: Option<u64>) -> Self {
        Self::of(store, LeaseState::Free { lease, newest })
    }

    /// A lease that this coordinator has taken.
    pub(crate) fn taken(store: Store, lease: CoordinatorLease) -> Self {
        Self::of(store, LeaseState::Held(lease))
    }

    fn of(store: Store, state: LeaseState) -> Self {
        let renews = AtomicBool::new(false);
        let (wake, writes) = (Mutex::default(), Mutex::default());
        let (state, idle_turns) = (Mutex::new(state), AtomicU64::new(0));
        Self(Arc::new(Holder { store, state, renews, idle_turns, wake, writes }))
    }

    /// Takes the lease, or checks that it is still the newest one. Returns false if the store has lost it, or another folder
    /// is in place of the store.
    ///
    /// # Errors
    /// [`Error::Replaced`] if another coordinator has a newer one; the store cannot be read or written.
    pub(crate) fn secure(&self) -> Result<bool, Error> {
        self.0.secure()
    }

    /// Renews the lease from now on, so that others take over once that ends.
    pub(crate) fn start_renewals(&self) {
        if !self.0.renews.swap(true, Ordering::Relaxed)
            && let Some(wake) = &*self.0.wake.lock()
        {
            // The first renewal tells them: without it, nobody replaces a coordinator that is lost before.
            let _ = wake.send(());
        }
    }

    /// Whether others or this coordinator have the newest lease; none is taken.
    pub(crate) fn status(&self) -> LeaseStatus {
        let (is_found, folder) = match &*self.0.state.lock() {
            LeaseState::Held(lease) => (lease.renews && lease.address.is_some(), None),
            LeaseState::Free { lease, .. } => (false, Some(lease.folder.clone())),
        };
        let Some(folder) = folder else {
            return match self.secure() {
                Ok(true) if is_found => LeaseStatus::Renewed,
                Err(error @ Error::Replaced { .. }) => LeaseStatus::Replaced(error),
                _ => LeaseStatus::Other,
            };
        };
        // It has not been taken yet. Any newer one is of another coordinator, or of this run folder before a restart.
        match self.0.store.has_lease(0) {
            Err(Error::Replaced { location, by }) if by.folder != folder => {
                LeaseStatus::Replaced(Error::Replaced { location, by })
            }
            _ => LeaseStatus::Other,
        }
    }

    /// Whether the lease has not been taken yet.
    pub(crate) fn is_free(&self) -> bool {
        matches!(&*self.0.state.lock(), LeaseState::Free { .. })
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
        self.keep_every(RENEWAL_INTERVAL, on_replaced)
    }

    fn keep_every(
        &self,
        interval: Duration,
        on_replaced: impl FnOnce(Error) + Send + 'static,
    ) -> std::io::Result<Renewal> {
        let (wake, woken) = mpsc::channel::<()>();
        *self.0.wake.lock() = Some(wake);
        let holder = self.0.clone();
        let renew = move || {
            let mut has_failed = false;
            while woken.recv_timeout(interval) != Err(RecvTimeoutError::Disconnected) {
                match holder.renew() {
                    Ok(()) => has_failed = false,
                    Err(error @ Error::Replaced { .. }) => return on_replaced(error),
                    Err(error) => {
                        if !std::mem::replace(&mut has_failed, true) {
                            warn!("the coordinator's lease cannot be renewed: {error}");
                        }
                    }
                }
            }
        };
        thread::Builder::new().name("lease".to_owned()).spawn(renew)?;
        Ok(Renewal(self.0.clone()))
    }

    /// Its number; `None` if it has not been taken yet.
    pub(crate) fn number(&self) -> Option<u64> {
        match &*self.0.state.lock() {
            LeaseState::Held(lease) => Some(lease.number),
            LeaseState::Free { .. } => None,
        }
    }

    /// What the thread of [`keep`](Self::keep) does each time.
    #[cfg(test)]
    pub(crate) fn renew_once(&self) -> Result<(), Error> {
        self.0.renew()
    }

    /// The last word of a coordinator that ends: another one should take over at once, or, if the job is over, nobody.
    pub(crate) fn end(&self, job_is_over: bool) {
        let _turn = self.0.writes.lock();
        let mut state = self.0.state.lock();
        if let LeaseState::Held(lease) = &mut *state {
            (lease.renews, lease.released, lease.over) = (!job_is_over, !job_is_over, job_is_over);
            if let Err(error) = self.0.store.renew_lease(lease) {
                warn!("the coordinator's lease cannot be released: {error}");
            }
        }
    }
}

/// Stops the renewals when it is dropped.
pub(crate) struct Renewal(Arc<Holder>);

impl Drop for Renewal {
    fn drop(&mut self) {
        *self.0.wake.lock() = None;
    }
}

impl Holder {
    fn secure(&self) -> Result<bool, Error> {
        let held = match &*self.state.lock() {
            LeaseState::Held(lease) => Some(lease.clone()),
            LeaseState::Free { .. } => None,
        };
        match held {
            // The store may take long to answer; renewals do not wait for this.
            Some(lease) => match self.store.has_lease(lease.number) {
                Err(Error::Replaced { by, .. }) if by.folder == lease.folder => {
                    self.adopt(*by, &lease);
                    Ok(true)
                }
                found => found,
            },
            None => self.take().map(|()| true),
        }
    }

    /// Continues with the lease that this run folder had before.
    fn adopt(&self, found: CoordinatorLease, mine: &CoordinatorLease) -> CoordinatorLease {
        let CoordinatorLease { number, renews, renewals, .. } = found;
        let renews = self.renews.fetch_or(renews, Ordering::Relaxed) || renews;
        let lease = CoordinatorLease { number, renews, renewals: renewals + 1, ..mine.clone() };
        *self.state.lock() = LeaseState::Held(lease.clone());
        lease
    }

    fn take(&self) -> Result<(), Error> {
        let _turn = self.writes.lock();
        let (mine, expected) = match &*self.state.lock() {
            LeaseState::Held(_) => return Ok(()),
            LeaseState::Free { lease, newest } => (lease.clone(), *newest),
        };
        let taken = match self.store.lease()? {
            Some(found) if found.folder == mine.folder => {
                let lease = self.adopt(found, &mine);
                self.store.renew_lease(&lease)?;
                lease
            }
            _ => {
                // Others may join before the first generation.
                let renews = self.renews.load(Ordering::Relaxed);
                let lease = CoordinatorLease { number: expected.unwrap_or(0) + 1, renews, ..mine };
                self.store.take_lease(&lease)?;
                *self.state.lock() = LeaseState::Held(lease.clone());
                lease
            }
        };
        info!(number = taken.number, "this coordinator has the lease of the checkpoint store");
        Ok(())
    }

    fn renew(&self) -> Result<(), Error> {
        if matches!(&*self.state.lock(), LeaseState::Free { newest: None, .. }) {
            // After a restart: somebody else may have taken over in the meantime.
            self.take()?;
        }
        let turn = self.writes.lock();
        let renewed = match &mut *self.state.lock() {
            LeaseState::Held(lease) if lease.released || lease.over => return Ok(()),
            LeaseState::Held(lease) if self.renews.load(Ordering::Relaxed) => {
                lease.renews = true;
                lease.renewals += 1;
                Some(lease.clone())
            }
            LeaseState::Held(_) => None,
            LeaseState::Free { .. } => return Ok(()),
        };
        let looks = match renewed {
            Some(renewed) => {
                self.store.renew_lease(&renewed)?;
                renewed.renewals.is_multiple_of(RENEWALS_PER_LOOK)
            }
            None => {
                let turns = self.idle_turns.fetch_add(1, Ordering::Relaxed) + 1;
                turns.is_multiple_of(IDLE_TURNS_PER_LOOK)
            }
        };
        drop(turn);
        if looks {
            self.secure()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn store(folder: &tempfile::TempDir) -> Store {
        Store::open(folder.path().to_str().unwrap()).unwrap()
    }

    /// A lease of a run folder of this name.
    fn of(folder: &str) -> CoordinatorLease {
        let owner = format!("{folder} 1");
        CoordinatorLease { folder: folder.to_owned(), owner, ..CoordinatorLease::default() }
    }

    #[test]
    fn of_two_coordinators_that_start_alike_one_gets_the_lease() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|host| HeldLease::free(store(&folder), of(host), Some(0)));
        assert!(a.secure().unwrap());
        let error = b.secure().unwrap_err();
        assert!(matches!(&error, Error::Replaced { by, .. } if by.folder == "a"), "{error}");
        assert!(a.secure().unwrap());
    }

    #[test]
    fn one_that_starts_later_replaces_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let a = HeldLease::free(store(&folder), of("a"), Some(0));
        a.secure().unwrap();
        let b = HeldLease::free(store(&folder), of("b"), Some(1));
        b.secure().unwrap();
        assert!(matches!(a.secure(), Err(Error::Replaced { .. })));
        assert!(b.secure().unwrap());
    }

    #[test]
    fn a_lease_that_is_gone_with_the_store_is_missed() {
        let folder = tempfile::tempdir().unwrap();
        let held = HeldLease::free(store(&folder), of("a"), Some(0));
        assert!(held.secure().unwrap());
        std::fs::remove_dir_all(folder.path().join("leases")).unwrap();
        assert!(!held.secure().unwrap());
    }

    #[test]
    fn a_restarted_coordinator_has_its_lease_unless_another_one_took_over() {
        let folder = tempfile::tempdir().unwrap();
        let begun = HeldLease::free(store(&folder), of("a"), Some(0));
        begun.secure().unwrap();
        let restarted = |host| HeldLease::free(store(&folder), of(host), None);
        let again = restarted("a");
        again.secure().unwrap();
        assert_eq!(store(&folder).lease().unwrap().unwrap().number, 1);

        HeldLease::free(store(&folder), of("b"), Some(1)).secure().unwrap();
        assert!(matches!(restarted("a").secure(), Err(Error::Replaced { .. })));
        restarted("b").secure().unwrap();
    }

    #[test]
    fn a_coordinator_knows_its_lease_after_a_restart_on_another_machine_and_behind_a_lost_mount() {
        let folder = tempfile::tempdir().unwrap();
        store(&folder).take_lease(&CoordinatorLease { number: 1, ..of("other") }).unwrap();
        HeldLease::free(store(&folder), of("a"), Some(1)).secure().unwrap();
        let away = folder.path().with_extension("away");
        std::fs::rename(folder.path(), &away).unwrap();
        std::fs::create_dir(folder.path()).unwrap();
        let restarted = CoordinatorLease { host: "elsewhere".to_owned(), ..of("a") };
        let again = HeldLease::free(store(&folder), restarted, None);
        again.secure().unwrap();

        std::fs::remove_dir_all(folder.path()).unwrap();
        std::fs::rename(&away, folder.path()).unwrap();
        assert!(again.secure().unwrap(), "it has lease 2");
        again.start_renewals();
        again.0.renew().unwrap();
        let newest = store(&folder).lease().unwrap().unwrap();
        assert_eq!((newest.number, newest.host.as_str()), (2, "elsewhere"));
    }

    #[test]
    fn it_is_renewed_from_the_time_when_somebody_can_take_over_until_the_job_ends() {
        let folder = tempfile::tempdir().unwrap();
        let held = HeldLease::free(store(&folder), of("a"), Some(0));
        held.secure().unwrap();
        let renewed = |held: &HeldLease| {
            held.0.renew().unwrap();
            let lease = store(&folder).lease().unwrap().unwrap();
            (lease.renews, lease.renewals)
        };
        assert_eq!(renewed(&held), (false, 0));
        held.start_renewals();
        assert_eq!(renewed(&held), (true, 1));
        let restarted = HeldLease::free(store(&folder), of("a"), None);
        assert_eq!(renewed(&restarted), (true, 3), "also by the one that was started again");
        restarted.end(true);
        let last = store(&folder).lease().unwrap().unwrap();
        assert!(
            !last.renews && !last.released && last.over,
            "nobody takes over a job that is over"
        );
        assert_eq!(renewed(&restarted), (false, last.renewals), "the last word is the last");
        let again = HeldLease::free(store(&folder), of("a"), None);
        again.secure().unwrap();
        assert!(!store(&folder).lease().unwrap().unwrap().over, "it was started again");
        restarted.end(false);
        let last = store(&folder).lease().unwrap().unwrap();
        assert!(last.renews && last.released);
    }

    #[test]
    fn one_that_others_have_joined_before_is_taken_with_the_promise_to_renew() {
        let folder = tempfile::tempdir().unwrap();
        let held = HeldLease::free(store(&folder), of("a"), Some(0));
        held.start_renewals();
        held.secure().unwrap();
        assert!(store(&folder).lease().unwrap().unwrap().renews);
    }

    #[test]
    fn the_first_renewal_comes_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let held = HeldLease::free(store(&folder), of("a"), Some(0));
        held.secure().unwrap();
        let hour = Duration::from_secs(3600);
        let _renewal = held.keep_every(hour, |error| panic!("{error}")).unwrap();
        held.start_renewals();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !store(&folder).lease().unwrap().unwrap().renews {
            assert!(Instant::now() < deadline, "it was not renewed");
            thread::yield_now();
        }
    }

    #[test]
    fn one_that_renews_learns_that_it_was_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let held = HeldLease::free(store(&folder), of("a"), Some(0));
        held.secure().unwrap();
        held.start_renewals();
        store(&folder).take_lease(&CoordinatorLease { number: 2, ..of("b") }).unwrap();
        let learns = (0..RENEWALS_PER_LOOK).any(|_| held.0.renew().is_err());
        assert!(learns);
    }

    #[test]
    fn one_that_nobody_renews_learns_that_it_was_replaced_by_hand() {
        let folder = tempfile::tempdir().unwrap();
        let held = HeldLease::free(store(&folder), of("a"), Some(0));
        held.secure().unwrap();
        assert!((0..IDLE_TURNS_PER_LOOK).all(|_| held.0.renew().is_ok()));
        store(&folder).take_lease(&CoordinatorLease { number: 2, ..of("b") }).unwrap();
        let learns = (0..IDLE_TURNS_PER_LOOK).any(|_| held.0.renew().is_err());
        assert!(learns);
    }
}
