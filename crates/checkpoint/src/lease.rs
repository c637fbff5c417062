//! The lease of the coordinator: which coordinator serves the job of a store, where, and that it still does.
//!
//! A lease is an object that one coordinator creates and only that one overwrites: `leases/000002.json`. The highest number
//! is the current lease, so a coordinator takes over from another one by creating the next number, which only one of
//! several can. A lease that renews is overwritten every second. Who watches one that does not change for some seconds, by
//! their own clock, knows that its holder is gone; no clock is compared with another machine's.
//!
//! A lease is for finding a coordinator and for electing the next one. That no two write the checkpoints of one generation
//! is the work of the fence alone.

use baton_job::{JobId, standby::SeenLease};
use object_store::{PutMode, path::Path};
use serde::{Deserialize, Serialize};

use crate::{Error, Store, name::LEASES};

/// A coordinator's claim to serve the job of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorLease {
    /// From 1; the name of the object.
    #[serde(skip)]
    pub number: u64,
    /// Random identity of the coordinator's process.
    pub owner: String,
    /// The job.
    pub job: JobId,
    /// Random identity of the run folder, by which a coordinator that was started again, even on another machine with the
    /// same folder, knows its own lease.
    pub folder: String,
    /// Name of the coordinator's machine.
    pub host: String,
    /// The run folder on that machine.
    pub run_dir: String,
    /// URL at which agents and tools reach the coordinator; `None` where only its agents' flags know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Whether it is overwritten every second, so that one that does not change is that of a lost coordinator. Once it is
    /// renewed, it is until the job ends.
    pub renews: bool,
    /// How often it was overwritten.
    pub renewals: u64,
    /// Whether the coordinator has ended and another one should take over at once.
    #[serde(default)]
    pub released: bool,
    /// Whether the coordinator has ended together with the job, so that nobody should take over.
    #[serde(default)]
    pub over: bool,
}

impl CoordinatorLease {
    fn file(number: u64) -> String {
        format!("{LEASES}/{number:06}{EXTENSION}")
    }

    fn to_bytes(&self) -> Vec<u8> {
        format!("{}\n", serde_json::json!(self)).into_bytes()
    }
}

impl From<CoordinatorLease> for SeenLease {
    fn from(lease: CoordinatorLease) -> Self {
        let CoordinatorLease { number, job, address, renews, renewals, released, over, .. } = lease;
        Self { number, address, renews, renewals, released, job, over }
    }
}

const EXTENSION: &str = ".json";
/// Largest lease, bytes.
const MAX_BYTES: u64 = 64 << 10;
/// Number of older leases that are kept, for people.
const KEPT: u64 = 8;

impl Store {
    /// The newest lease; `None` if there is none.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn lease(&self) -> Result<Option<CoordinatorLease>, Error> {
        let Some(number) = self.lease_numbers()?.into_iter().max() else { return Ok(None) };
        let bytes = self.read(&CoordinatorLease::file(number), MAX_BYTES)?.unwrap_or_default();
        // One whose holder crashed before it was written is a lease that nobody renews.
        let lease: CoordinatorLease = serde_json::from_slice(&bytes).unwrap_or_default();
        Ok(Some(CoordinatorLease { number, ..lease }))
    }

    fn lease_numbers(&self) -> Result<Vec<u64>, Error> {
        let files = self.files(LEASES)?;
        let names = files.iter().filter_map(|file| file.location.filename());
        // No job has as many coordinators as a larger number would mean: that is not a lease.
        let number = |name: &str| {
            let number = u64::from(name.strip_suffix(EXTENSION)?.parse::<u32>().ok()?);
            CoordinatorLease::file(number).ends_with(name).then_some(number)
        };
        Ok(names.filter_map(number).collect())
    }

    /// Takes a lease of a number that is free.
    ///
    /// # Errors
    /// [`Error::Replaced`] if another coordinator has taken this number or a higher one; the store cannot be read or
    /// written.
    pub fn take_lease(&self, lease: &CoordinatorLease) -> Result<(), Error> {
        if self.create(&CoordinatorLease::file(lease.number), &lease.to_bytes())?.is_some() {
            return Err(self.replaced());
        }
        let numbers = self.lease_numbers()?;
        if numbers.iter().any(|number| *number > lease.number) {
            return Err(self.replaced());
        }
        for old in numbers.into_iter().filter(|number| number + KEPT < lease.number) {
            self.delete(&Path::from(CoordinatorLease::file(old)))?;
        }
        Ok(())
    }

    /// Overwrites the holder's own lease. One that has been replaced changes nothing by this.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn renew_lease(&self, lease: &CoordinatorLease) -> Result<(), Error> {
        self.write(
            &CoordinatorLease::file(lease.number),
            lease.to_bytes().into(),
            PutMode::Overwrite,
        )
    }

    /// Whether the newest lease is the holder's own, of this number; false if the store has lost it.
    ///
    /// # Errors
    /// [`Error::Replaced`] if another coordinator has taken a newer one; the store cannot be read.
    pub fn has_lease(&self, number: u64) -> Result<bool, Error> {
        match self.lease_numbers()?.into_iter().max() {
            Some(newest) if newest > number => Err(self.replaced()),
            newest => Ok(newest == Some(number)),
        }
    }

    /// The error of a coordinator that another one has replaced.
    fn replaced(&self) -> Error {
        Error::Replaced {
            location: self.location().to_owned(),
            by: self.lease().ok().flatten().map(Box::new).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(number: u64, owner: &str) -> CoordinatorLease {
        let owner = owner.to_owned();
        CoordinatorLease {
            number,
            host: owner.clone(),
            owner,
            renews: true,
            ..CoordinatorLease::default()
        }
    }

    #[test]
    fn a_number_is_taken_by_one_coordinator_only() {
        let store = Store::memory().unwrap();
        assert_eq!(store.lease().unwrap(), None);
        store.take_lease(&lease(1, "a")).unwrap();
        store.take_lease(&lease(1, "a")).unwrap();
        let error = store.take_lease(&lease(1, "b")).unwrap_err();
        let Error::Replaced { by, .. } = &error else { panic!("{error}") };
        assert_eq!(by.owner, "a");
        assert_eq!(store.lease().unwrap(), Some(lease(1, "a")));
    }

    #[test]
    fn a_replaced_coordinator_learns_of_it_and_changes_nothing() {
        let store = Store::memory().unwrap();
        store.take_lease(&lease(1, "a")).unwrap();
        let renewed = CoordinatorLease { renewals: 1, ..lease(1, "a") };
        store.renew_lease(&renewed).unwrap();
        assert_eq!(store.lease().unwrap(), Some(renewed.clone()));

        store.take_lease(&lease(2, "b")).unwrap();
        let refused = store.has_lease(1);
        assert!(matches!(refused, Err(Error::Replaced { .. })), "{refused:?}");
        store.renew_lease(&renewed).unwrap();
        assert!(store.has_lease(2).unwrap());
        let late = store.take_lease(&lease(1, "c"));
        assert!(matches!(late, Err(Error::Replaced { .. })), "{late:?}");
        assert_eq!(store.lease().unwrap(), Some(lease(2, "b")));
    }

    #[test]
    fn a_lease_without_content_is_one_that_nobody_renews() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        store.write(&CoordinatorLease::file(3), Vec::new().into(), PutMode::Overwrite).unwrap();
        let found = store.lease().unwrap().unwrap();
        assert_eq!(found, CoordinatorLease { number: 3, ..CoordinatorLease::default() });
    }

    #[test]
    fn files_with_impossible_numbers_are_not_leases() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        store.take_lease(&lease(1, "a")).unwrap();
        for name in [
            "leases/18446744073709551615.json",
            "leases/000009.json#1",
            "leases/+00009.json",
            "leases/x.json",
        ] {
            std::fs::write(folder.path().join(name), "{}").unwrap();
        }
        assert!(store.has_lease(1).unwrap());
        assert_eq!(store.lease().unwrap(), Some(lease(1, "a")));
    }

    #[test]
    fn only_the_newest_leases_are_kept() {
        let store = Store::memory().unwrap();
        for number in 1..=12 {
            store.take_lease(&lease(number, "a")).unwrap();
        }
        assert_eq!(store.lease_numbers().unwrap().into_iter().min(), Some(4));
    }
}
