//! Parts of a job's journal in the store, so that the journal survives the loss of the run folder.
//!
//! A part is created once, under the number of its coordinator's lease and those of the first and the last commit in it:
//! `journal/JOB/000002-00000001-00000001.json`; older versions wrote no lease. Its content is the coordinator's. Only the
//! parts of the newest lease are read: a coordinator begins with one that has everything before it, so that one that was
//! replaced, and goes on after it was suspended, changes nothing. As a part is created only once, two coordinators cannot
//! both add the next one. Some hundred parts are later joined to one that covers them, so that a long journal is read in
//! few requests. What a coordinator adds under a number that has been joined is not read.

use std::{cmp::Ordering, fmt, str::FromStr};

use baton_job::JobId;
use bytes::Bytes;
use object_store::path::Path;

use crate::{Error, Store, name::JOURNAL};

/// Largest part, bytes; thousands of entries have one.
const MAX_PART_BYTES: u64 = 256 << 20;
const EXTENSION: &str = ".json";

/// The commits in one part of a journal, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalPart {
    /// Number of the lease of the coordinator that wrote it; 0 for an older version.
    pub lease: u64,
    /// Number of the first commit.
    pub first: u64,
    /// Number of the last one.
    pub last: u64,
}

impl fmt::Display for JournalPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.lease > 0 {
            write!(f, "{:06}-", self.lease)?;
        }
        write!(f, "{:08}-{:08}", self.first, self.last)
    }
}

impl FromStr for JournalPart {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let numbers: Result<Vec<u64>, _> = name.split('-').map(str::parse).collect();
        let part = match numbers.map_err(|_| ())?[..] {
            [first, last] => Self { lease: 0, first, last },
            [lease, first, last] => Self { lease, first, last },
            _ => return Err(()),
        };
        if part.to_string() == name && part.first >= 1 && part.first <= part.last {
            Ok(part)
        } else {
            Err(())
        }
    }
}

impl Store {
    /// The parts of a job's journal of the newest lease that together have every commit once, in order; empty if the store
    /// has none.
    ///
    /// # Errors
    /// A part is missing; the store cannot be read.
    pub fn journal_parts(&self, job: JobId) -> Result<Vec<JournalPart>, Error> {
        let mut all = self.all_parts(job)?;
        let newest = all.iter().map(|part| part.lease).max();
        all.retain(|part| Some(part.lease) == newest);
        let mut parts: Vec<JournalPart> = Vec::new();
        let next = |parts: &[JournalPart]| parts.last().map_or(1, |part| part.last + 1);
        while let Some(part) =
            all.iter().filter(|part| part.first == next(&parts)).max_by_key(|part| part.last)
        {
            parts.push(*part);
        }
        let next = next(&parts);
        match all.iter().find(|part| part.last >= next) {
            Some(later) => {
                let problem = format!("commit {next} is missing, and {later} is there");
                Err(self.damaged_journal(job, &problem))
            }
            None => Ok(parts),
        }
    }

    /// Number of the last commit in any part of this lease; 0 if there is none.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn last_journal_number(&self, job: JobId, lease: u64) -> Result<u64, Error> {
        let all = self.all_parts(job)?.into_iter().filter(|part| part.lease == lease);
        Ok(all.map(|part| part.last).max().unwrap_or(0))
    }

    /// The newest lease under which parts were written; 0 if there is none.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn newest_journal_lease(&self, job: JobId) -> Result<u64, Error> {
        Ok(self.all_parts(job)?.iter().map(|part| part.lease).max().unwrap_or(0))
    }

    fn all_parts(&self, job: JobId) -> Result<Vec<JournalPart>, Error> {
        let files = self.files(&format!("{JOURNAL}/{job}"))?;
        let names = files.iter().filter_map(|file| file.location.filename());
        Ok(names.filter_map(|name| name.strip_suffix(EXTENSION)?.parse().ok()).collect())
    }

    /// The bytes of a part.
    ///
    /// # Errors
    /// It is gone; the store cannot be read.
    pub fn read_journal(&self, job: JobId, part: JournalPart) -> Result<Bytes, Error> {
        let read = self.read(&part_file(job, part), MAX_PART_BYTES)?;
        read.ok_or_else(|| self.damaged_journal(job, &format!("part {part} is gone")))
    }

    /// Adds a part, durable on return. May be repeated.
    ///
    /// # Errors
    /// [`Error::JournalContinued`] if there is another part of these numbers; the store cannot be written.
    pub fn add_to_journal(&self, job: JobId, part: JournalPart, bytes: &[u8]) -> Result<(), Error> {
        match self.create(&part_file(job, part), bytes)? {
            None => Ok(()),
            Some(_) => Err(self.continued_journal(job)),
        }
    }

    /// Removes the parts inside `joined`, which has their commits, and with a first commit those of older leases.
    ///
    /// # Errors
    /// The store cannot be read or written.
    pub fn remove_joined(&self, job: JobId, joined: JournalPart) -> Result<(), Error> {
        let is_covered = |part: &JournalPart| match part.lease.cmp(&joined.lease) {
            Ordering::Less => joined.first == 1,
            Ordering::Equal => {
                *part != joined && part.first >= joined.first && part.last <= joined.last
            }
            Ordering::Greater => false,
        };
        for part in self.all_parts(job)?.into_iter().filter(is_covered) {
            self.delete(&Path::from(part_file(job, part)))?;
        }
        Ok(())
    }

    /// The error about a journal that cannot be read.
    #[must_use]
    pub fn damaged_journal(&self, job: JobId, problem: &str) -> Error {
        Error::DamagedJournal { location: self.journal_location(job), problem: problem.to_owned() }
    }

    /// The error of a coordinator whose journal another one has continued.
    #[must_use]
    pub fn continued_journal(&self, job: JobId) -> Error {
        Error::JournalContinued { location: self.journal_location(job) }
    }

    fn journal_location(&self, job: JobId) -> String {
        format!("{}/{JOURNAL}/{job}", self.location())
    }
}

fn part_file(job: JobId, part: JournalPart) -> String {
    format!("{JOURNAL}/{job}/{part}{EXTENSION}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(first: u64, last: u64) -> JournalPart {
        JournalPart { lease: 4, first, last }
    }

    fn add(store: &Store, first: u64, last: u64) {
        let bytes = format!("{first}");
        store.add_to_journal(JobId::default(), part(first, last), bytes.as_bytes()).unwrap();
    }

    #[test]
    fn a_number_is_given_once_and_the_same_part_may_be_added_again() {
        let store = Store::memory().unwrap();
        assert_eq!(store.journal_parts(JobId::default()).unwrap(), []);
        add(&store, 1, 1);
        add(&store, 1, 1);
        let other = store.add_to_journal(JobId::default(), part(1, 1), b"of another coordinator");
        assert!(matches!(other, Err(Error::JournalContinued { .. })), "{other:?}");
        assert_eq!(store.read_journal(JobId::default(), part(1, 1)).unwrap().as_ref(), b"1");
    }

    #[test]
    fn joined_parts_are_read_once_whether_they_are_removed_or_not() {
        let store = Store::memory().unwrap();
        (1..=5).for_each(|number| add(&store, number, number));
        add(&store, 1, 3);
        let expected = [part(1, 3), part(4, 4), part(5, 5)];
        assert_eq!(store.journal_parts(JobId::default()).unwrap(), expected);
        store.remove_joined(JobId::default(), part(1, 3)).unwrap();
        assert_eq!(store.journal_parts(JobId::default()).unwrap(), expected);
        assert!(store.read_journal(JobId::default(), part(2, 2)).is_err());
        add(&store, 1, 5);
        assert_eq!(store.journal_parts(JobId::default()).unwrap(), [part(1, 5)]);
    }

    #[test]
    fn what_a_coordinator_writes_or_removes_after_it_was_replaced_changes_nothing() {
        let store = Store::memory().unwrap();
        let old = |first, last| JournalPart { lease: 3, ..part(first, last) };
        let add_old = |part| store.add_to_journal(JobId::default(), part, b"old").unwrap();
        (1..=5).for_each(|number| add_old(old(number, number)));
        add(&store, 1, 1);
        assert_eq!(store.journal_parts(JobId::default()).unwrap(), [part(1, 1)]);
        add(&store, 2, 2);
        add_old(old(6, 6));
        add_old(old(1, 7));
        store.remove_joined(JobId::default(), old(1, 7)).unwrap();
        assert_eq!(store.journal_parts(JobId::default()).unwrap(), [part(1, 1), part(2, 2)]);
        assert_eq!(store.last_journal_number(JobId::default(), 4).unwrap(), 2);
        // Joined parts that have the first commit have everything that was before.
        store.remove_joined(JobId::default(), part(2, 2)).unwrap();
        assert_eq!(store.all_parts(JobId::default()).unwrap().len(), 3);
        store.remove_joined(JobId::default(), part(1, 1)).unwrap();
        assert_eq!(store.all_parts(JobId::default()).unwrap(), [part(1, 1), part(2, 2)]);
    }

    #[test]
    fn a_missing_part_is_damage() {
        let store = Store::memory().unwrap();
        add(&store, 1, 1);
        add(&store, 3, 3);
        let error = store.journal_parts(JobId::default()).unwrap_err().to_string();
        assert!(
            error.contains("commit 2 is missing, and 000004-00000003-00000003 is there"),
            "{error}"
        );
    }

    #[test]
    fn only_names_of_parts_are_parts() {
        assert_eq!("000004-00000001-00000100".parse(), Ok(part(1, 100)));
        assert_eq!("00000001-00000100".parse(), Ok(JournalPart { lease: 0, ..part(1, 100) }));
        for name in [
            "1-1",
            "00000000-00000001",
            "00000002-00000001",
            "00000001",
            "a-b",
            "4-00000001-00000100",
            "000000-00000001-00000100",
            "000004-000004-00000001-00000100",
        ] {
            assert_eq!(name.parse::<JournalPart>(), Err(()), "{name}");
        }
    }
}
