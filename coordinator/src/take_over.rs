//! Takes over the job of a coordinator that is lost with its machine: `serve --take-over`.

use baton_checkpoint::{CoordinatorLease, Error, Store};
use baton_job::{
    JobId,
    engine::Record,
    exit::{Failure, bad_input, crash},
};
use baton_recipe::JobSpec;

use crate::{
    args::Args,
    begin::{job_of, store_access},
    disk,
    journal::Journal,
    journal_copy,
    place::ServingPlace,
};

/// The recipe of the job that used this store last.
pub(crate) fn recipe(location: &str) -> Result<JobSpec, Failure> {
    let failure = |error: Error| disk::store_failure(&error);
    let store = Store::open_existing_with(location, &store_access()).map_err(failure)?;
    let claimant = store.claimant(store.fence().map_err(failure)?).map_err(failure)?;
    let claimant = claimant.ok_or_else(|| {
        bad_input(format!("--take-over: no job has trained in the checkpoint store {location}"))
    })?;
    let mut spec = JobSpec::from_json(&claimant.recipe).map_err(|error| {
        bad_input(format!("--take-over: the recipe of {claimant} in {location}: {error}"))
    })?;
    location.clone_into(&mut spec.checkpoint.dir);
    Ok(spec)
}

/// Refuses to continue with a copy of the journal to which the lost coordinator has added since it was read.
pub(crate) fn refuse_newer_copy(
    journal: &Journal,
    records: &[Record],
    store: &Store,
) -> Result<(), Failure> {
    let here = journal.entries().map_err(|error| crash(format!("{error:#}")))?;
    let job = job_of(records).unwrap_or_default();
    match journal_copy::is_continued(store, job, &here) {
        Ok(false) => Ok(()),
        Ok(true) => Err(crash("the other coordinator still wrote its journal; try again")),
        Err(error) => Err(disk::store_failure(&error)),
    }
}

/// Takes the lease after that of the lost coordinator. Returns it, and from where to where the coordinator moves.
pub(crate) fn lease(
    args: &Args,
    place: &ServingPlace,
    store: &Store,
) -> Result<(CoordinatorLease, String), Failure> {
    let failure = |error: Error| disk::store_failure(&error);
    let claimant = store.claimant(store.fence().map_err(failure)?).map_err(failure)?;
    let lost = store.lease().map_err(failure)?.unwrap_or_default();
    let number = args.after.unwrap_or(lost.number) + 1;
    let job = claimant.map_or_else(JobId::default, |claimant| claimant.job);
    let taken = CoordinatorLease { number, renews: true, ..place.lease(job) };
    store.take_lease(&taken).map_err(failure)?;
    let address = taken.address.as_deref().unwrap_or_default();
    let text = format!(
        "the coordinator on host {} does not answer; the one on {} at {address} continues the job",
        lost.host, taken.host
    );
    Ok((taken, text))
}
