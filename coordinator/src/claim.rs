//! Claims a generation in the checkpoint store, which may take minutes.

use baton_checkpoint::{Claimant, Error, Store};
use baton_job::{Generation, engine::Event, exit::Failure};
use tracing::warn;

use crate::{disk, journal::JournalEntry, journal_copy};

/// Raises the fence to a generation that only `claimant` may open; returns the event for the state machine. If `journal` is
/// given, it must not lack entries of its copy in the store.
pub(crate) fn claim(
    store: &Store,
    generation: Generation,
    claimant: &Claimant,
    journal: Option<&[JournalEntry]>,
) -> Event {
    let is_continued = journal.is_some_and(|here| {
        matches!(journal_copy::is_continued(store, claimant.job, here), Ok(true))
    });
    if is_continued {
        let message = format!(
            "another coordinator has continued this job since this one started, with its journal in {}: go on there, or \
             start this one again with another --run-dir",
            store.location()
        );
        return Event::TakenOver { message };
    }
    match store.claim(generation, claimant) {
        Ok(()) => Event::Fenced,
        Err(error @ Error::TakenOver { .. }) => Event::TakenOver { message: error.to_string() },
        Err(error) => {
            let class = disk::store_failure(&error).class;
            let failure = Failure { class, message: error.to_string() };
            warn!(%generation, %failure, "the checkpoint store refuses the generation");
            Event::FenceFailed { failure }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal_copy::kit::{claimant, copied, records_of};

    #[test]
    fn a_generation_is_refused_where_the_copy_of_the_journal_has_gone_on() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        copied(&folder, records_of(0..3));
        let answer = claim(&store, Generation(1), &claimant(), Some(&records_of(0..2)));
        let Event::TakenOver { message } = answer else { panic!("{answer:?}") };
        assert!(message.contains("has continued this job since this one started"), "{message}");
        assert_eq!(store.fence().unwrap(), Generation(0));

        let answer = claim(&store, Generation(1), &claimant(), Some(&records_of(0..4)));
        assert_eq!(answer, Event::Fenced);
        let other = Claimant { owner: "another".to_owned(), ..claimant() };
        let answer = claim(&store, Generation(1), &other, None);
        assert!(matches!(answer, Event::TakenOver { .. }), "{answer:?}");
    }

    #[test]
    fn a_store_that_cannot_be_written_is_a_failure_that_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        std::fs::remove_dir_all(folder.path()).unwrap();
        std::fs::write(folder.path(), "").unwrap();
        let answer = claim(&store, Generation(1), &claimant(), None);
        assert!(matches!(answer, Event::FenceFailed { .. }), "{answer:?}");
    }
}
