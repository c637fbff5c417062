//! Claims a generation in the checkpoint store, which may take minutes.

use baton_checkpoint::{Claimant, Error, Store};
use baton_job::{
    Generation, JobId,
    engine::Event,
    exit::{Class, Failure},
};
use tracing::warn;

use crate::{
    disk,
    job::JobInput,
    lease::{HeldLease, LeaseStatus},
};

/// Raises the fence to a generation that only `claimant` may open; returns the input for the job's loop. A store that is
/// outside of the run folder has a lease, which comes first.
pub(crate) fn claim(
    store: &Store,
    generation: Generation,
    claimant: &Claimant,
    lease: Option<&HeldLease>,
) -> JobInput {
    let claims = || {
        if let Some(lease) = lease {
            if lease.is_free() {
                // Who cannot open the generation must not replace the one that can.
                store.check_unclaimed(generation)?;
            }
            lease.secure()?;
        }
        store.claim(generation, claimant)
    };
    match claims() {
        Ok(()) => Event::Fenced.into(),
        Err(error @ Error::Replaced { .. }) => replaced(&error, claimant.job),
        Err(error @ Error::TakenOver { .. }) => match lease.map(HeldLease::status) {
            // One that was replaced woke up and was faster. The next coordinator begins above it, and the agents find
            // that one.
            Some(LeaseStatus::Renewed) => {
                JobInput::Replaced(Failure { class: Class::TakenOver, message: error.to_string() })
            }
            // It was suspended while it claimed.
            Some(LeaseStatus::Replaced(error)) => replaced(&error, claimant.job),
            Some(LeaseStatus::Other) | None => {
                Event::TakenOver { message: error.to_string() }.into()
            }
        },
        Err(error) => {
            let class = disk::store_failure(&error).class;
            let failure = Failure { class, message: error.to_string() };
            warn!(%generation, %failure, "the checkpoint store refuses the generation");
            Event::FenceFailed { failure }.into()
        }
    }
}

/// What follows where another coordinator has taken the lease. If it continues this job, and its address is in the lease,
/// the agents follow it. Otherwise their ranks must end, because they could never commit again.
pub(crate) fn replaced(error: &Error, job: JobId) -> JobInput {
    let message = error.to_string();
    match error {
        Error::Replaced { by, .. } if by.job == job && by.address.is_some() => {
            JobInput::Replaced(Failure { class: Class::TakenOver, message })
        }
        _ => {
            let remedy = "continue there; if that one is lost too, start a coordinator with `baton-coordinator serve \
                          --take-over STORE`; for another job, set checkpoint.dir to a separate store";
            Event::TakenOver { message: format!("{message}; {remedy}") }.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_checkpoint::CoordinatorLease;

    use super::*;
    use crate::journal_copy::kit::{JOB, claimant};

    fn event(input: JobInput) -> Event {
        let JobInput::Event(event) = input else { panic!("no event") };
        *event
    }

    #[test]
    fn a_generation_is_opened_by_one_coordinator_only() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        let answer = event(claim(&store, Generation(1), &claimant(), None));
        assert_eq!(answer, Event::Fenced);
        let other = Claimant { owner: "another".to_owned(), ..claimant() };
        let answer = event(claim(&store, Generation(1), &other, None));
        assert!(matches!(answer, Event::TakenOver { .. }), "{answer:?}");
    }

    #[test]
    fn a_coordinator_that_was_replaced_claims_nothing_and_its_agents_follow_if_they_can() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Store::open(folder.path().to_str().unwrap()).unwrap();
        let mine = CoordinatorLease {
            number: 1,
            folder: "a".to_owned(),
            job: JOB,
            ..CoordinatorLease::default()
        };
        let held = HeldLease::taken(open(), mine.clone());
        open().take_lease(&mine).unwrap();
        let claims = || claim(&open(), Generation(1), &claimant(), Some(&held));

        // A user has started it a second time, where the agents do not find it.
        let next = CoordinatorLease {
            number: 2,
            folder: "b".to_owned(),
            host: "b".to_owned(),
            ..mine.clone()
        };
        open().take_lease(&next).unwrap();
        let answer = event(claims());
        let Event::TakenOver { message } = answer else { panic!("{answer:?}") };
        assert!(message.contains("on host b; continue there"), "{message}");

        let address = Some("http://c:29600".to_owned());
        open().take_lease(&CoordinatorLease { number: 3, address, ..next }).unwrap();
        let JobInput::Replaced(failure) = claims() else { panic!("its agents are dismissed") };
        assert_eq!(failure.class, Class::TakenOver);
        assert!(failure.message.ends_with("at http://c:29600"), "{failure}");
        assert_eq!(open().fence().unwrap(), Generation(0));
    }

    #[test]
    fn a_coordinator_that_cannot_open_its_generation_does_not_replace_the_one_that_can() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Store::open(folder.path().to_str().unwrap()).unwrap();
        let of = |folder: &str| CoordinatorLease {
            folder: folder.to_owned(),
            job: JOB,
            ..CoordinatorLease::default()
        };
        let holder = HeldLease::free(open(), of("a"), Some(0));
        let later = HeldLease::free(open(), of("b"), Some(1));
        for generation in [1, 2] {
            let answer = claim(&open(), Generation(generation), &claimant(), Some(&holder));
            assert_eq!(event(answer), Event::Fenced);
        }
        let other = Claimant { owner: "another".to_owned(), ..claimant() };
        let answer = event(claim(&open(), Generation(2), &other, Some(&later)));
        assert!(matches!(answer, Event::TakenOver { .. }), "{answer:?}");
        assert!(holder.secure().unwrap(), "it still has the lease");
    }

    /// Whose generation was opened by one that took over from it, and is lost now. Others may come with the job's state.
    #[test]
    fn a_coordinator_that_comes_back_with_an_old_journal_ends_nothing_but_itself() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Store::open(folder.path().to_str().unwrap()).unwrap();
        let newer = CoordinatorLease {
            number: 2,
            folder: "b".to_owned(),
            job: JOB,
            address: Some("http://b:29600".to_owned()),
            ..CoordinatorLease::default()
        };
        open().take_lease(&newer).unwrap();
        let other = Claimant { owner: "another".to_owned(), ..claimant() };
        open().claim(Generation(3), &other).unwrap();
        let mine = CoordinatorLease { folder: "a".to_owned(), job: JOB, ..Default::default() };
        let returning = HeldLease::free(open(), mine, None);
        let answer = claim(&open(), Generation(3), &claimant(), Some(&returning));
        let JobInput::Replaced(failure) = answer else { panic!("its agents are dismissed") };
        assert_eq!(failure.class, Class::TakenOver);
        assert!(failure.message.ends_with("at http://b:29600"), "{failure}");
        assert!(returning.is_free());
    }

    #[test]
    fn a_store_that_cannot_be_written_is_a_failure_that_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        std::fs::remove_dir_all(folder.path()).unwrap();
        std::fs::write(folder.path(), "").unwrap();
        let answer = event(claim(&store, Generation(1), &claimant(), None));
        assert!(matches!(answer, Event::FenceFailed { .. }), "{answer:?}");
    }
}
