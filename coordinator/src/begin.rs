//! Starts or resumes a job from a recipe and a run folder.

use std::{
    ffi::OsStr,
    fs, io,
    net::SocketAddr,
    path::{self, Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use baton_access::bounded::{MAX_RECIPE_BYTES, read_text};
use baton_checkpoint::{
    BucketAccess, CheckpointReference, Claimant, CoordinatorLease, EntryState, Error as StoreError,
    Store,
};
use baton_job::{
    Generation, JobId,
    engine::{Engine, Event, JobOrigin, RanksOfLostJob, Record},
    exit::{Failure, Outcome, bad_input, crash},
    message::Restore,
};
use baton_recipe::JobSpec;

use crate::{
    args::Args,
    clock::Clock,
    disk,
    job::{Apart, JobLoop},
    journal::Journal,
    journal_copy::{self, JournalCopy},
    lease::HeldLease,
    metrics::{JobMetrics, METRICS_FILE},
    place::ServingPlace,
    served::ServedJob,
    take_over,
    traces::{Timeline, Traces},
};

/// A job being served, and the thread of its loop.
pub(crate) struct RunningJob {
    pub(crate) served: Arc<ServedJob>,
    pub(crate) thread: JoinHandle<anyhow::Result<Option<Failure>>>,
}

/// Resumes the job of the run folder, or starts a new one. `address` is the one that this coordinator serves on.
pub(crate) fn begin(
    args: &Args,
    spec: JobSpec,
    address: SocketAddr,
) -> Result<RunningJob, Failure> {
    let clock = Clock::start();
    let place = ServingPlace::of(args, address)?;
    let PreparedJob { engine, journal, store, records, lease, first_event } =
        prepare(args, &spec, &place, clock)?;
    let collector = args.otlp_endpoint.as_ref();
    let traces = collector.map(|at| traces(at, &engine, &journal, &records)).transpose()?;
    let metrics = JobMetrics::open(&args.run_dir).map_err(|error| {
        let problem = format!("{error:#}");
        disk::full(&args.run_dir, &problem).unwrap_or_else(|| {
            bad_input(format!("{problem}; move it away, or make the run folder writable"))
        })
    })?;
    let metrics = Arc::new(metrics);
    let engine = engine.after_step(metrics.reached());
    let job_id = engine.origin().job;
    let store_location = store.location().to_owned();
    tracing::info!(job = %job_id, recipe = %spec.to_json(), "serving");
    let apart = is_apart(&spec, &args.run_dir)
        .then(|| apart(args, &spec, &journal, place.lease(job_id), lease));
    let apart = match apart.transpose() {
        Err(error) if args.take_over.is_none() => {
            tracing::warn!("the journal is not copied: {error:#}");
            None
        }
        apart => apart.map_err(|error| crash(format!("{error:#}")))?,
    };
    let ServingPlace { owner, host, run_dir, .. } = place;
    let recipe = spec.to_json();
    let (name, not_before) = (spec.name.clone(), Some(engine.origin().restore.not_before));
    let claimant = Claimant { owner, job: job_id, name, recipe, host, run_dir, not_before };
    let claim = (store, claimant);
    let run_dir = args.run_dir.clone();
    let (job_loop, job) =
        JobLoop::new(engine, (journal, apart), claim, run_dir, clock, metrics.clone(), traces);
    if let Some(event) = first_event {
        job.send(event.into());
    }
    let thread = thread::Builder::new()
        .name("job".to_owned())
        .spawn(move || job_loop.run())
        .map_err(|error| crash(format!("cannot start a thread: {error}")))?;
    let served = ServedJob { job, job_id, spec: Arc::new(spec), store_location, metrics };
    Ok(RunningJob { served: Arc::new(served), thread })
}

/// The recipe given by the flags, or the recipe of the job that was submitted to this run folder before.
pub(crate) fn recipe(args: &Args) -> Result<Option<JobSpec>, Failure> {
    if let Some(location) = &args.take_over {
        return take_over::recipe(location).map(Some);
    }
    if let Some(path) = &args.recipe {
        return read_recipe(path, &args.overrides).map(Some);
    }
    let path = submitted_recipe(&args.run_dir);
    if path.exists() { read_recipe(&path, &[]).map(Some) } else { Ok(None) }
}

/// Stores the recipe of a submitted job, so that a restarted coordinator finds it.
pub(crate) fn store_recipe(run_dir: &Path, recipe: &str) -> Result<(), Failure> {
    let path = submitted_recipe(run_dir);
    let temporary = path.with_extension("toml.tmp");
    let written = fs::create_dir_all(run_dir)
        .and_then(|()| fs::write(&temporary, recipe))
        .and_then(|()| fs::rename(&temporary, &path));
    written.map_err(|error| {
        disk::failure(&path, format!("{}: cannot be written: {error}", path.display()))
    })
}

/// Removes the stored recipe of a job that cannot start, so that the next coordinator does not try it again.
pub(crate) fn remove_recipe(run_dir: &Path) {
    let _ = fs::remove_file(submitted_recipe(run_dir));
}

fn submitted_recipe(run_dir: &Path) -> PathBuf {
    run_dir.join("recipe.toml")
}

/// The journal in a run folder.
const JOURNAL_FILE: &str = "journal.redb";

struct PreparedJob {
    engine: Engine,
    journal: Journal,
    store: Store,
    /// Records read from the journal.
    records: Vec<Record>,
    lease: LeaseAtStart,
    /// Whether another coordinator's job is continued, or why its history is not.
    first_event: Option<Event>,
}

/// The lease of a store when a coordinator starts.
enum LeaseAtStart {
    /// Ranks may run, so nobody waits for the store.
    Unread,
    /// Number of the newest one; 0 if there is none.
    Newest(u64),
    /// The one that this coordinator has taken.
    Taken(CoordinatorLease),
}

fn traces(
    endpoint: &str,
    engine: &Engine,
    journal: &Journal,
    records: &[Record],
) -> Result<Traces, Failure> {
    let past = journal.events_after(0).map_err(|error| bad_input(format!("{error:#}")))?;
    let timeline = Timeline::new(engine.origin().job, records, &past);
    Traces::to(endpoint, timeline)
        .map_err(|error| bad_input(format!("--otlp-endpoint {endpoint}: {error}")))
}

/// Longest wait for the lease before the coordinator serves.
const LEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Opens the store and the journal, and resumes the job in them or starts a new one.
fn prepare(
    args: &Args,
    spec: &JobSpec,
    place: &ServingPlace,
    clock: Clock,
) -> Result<PreparedJob, Failure> {
    let path = args.run_dir.join(JOURNAL_FILE);
    let new_run = args.no_auto_resume || args.resume.is_some();
    // With --resume nothing is changed before its checkpoint is found.
    if let Some(typed) = &args.resume
        && let CheckpointReference { location: None, id } = checkpoint(typed)?
    {
        // A name is one of this job's own store; without it nothing can start. Another location may be readable only on the
        // machine of the rank that reads it.
        let store = open_store(spec, &args.run_dir, false)?;
        store.manifest(&id.name()).map_err(|error| bad_input(format!("--resume: {error}")))?;
    }
    let (mut journal, mut records) = open_journal(&path)?;
    let mut ended_elsewhere = None;
    if !new_run && args.take_over.is_none() && has_ended_elsewhere(args, spec, place, &records) {
        tracing::info!("the job went on and ended at another coordinator: it continues from there");
        ended_elsewhere = job_of(&records);
        (journal, records) = begin_anew(journal, &path)?;
    }
    let store = open_store(spec, &args.run_dir, !new_run && may_have_ranks(&records))?;
    if !new_run && args.take_over.is_none() {
        (journal, records) = without_refused_resume(journal, records, &path, &store)?;
        if is_apart(spec, &args.run_dir) && has_restored_nothing(&journal, &records)? {
            // The store may have the journal of the job before.
            (journal, records) = begin_anew(journal, &path)?;
        }
    }
    let (mut lease, mut first_event) = (LeaseAtStart::Unread, None);
    if args.take_over.is_some() {
        journal = without_other_job(journal, &records, &args.run_dir, &store)?;
        // First the journal: who cannot continue must not replace the one that may still serve.
        (records, _) = continue_lost_job(&mut journal, spec, &store, RanksOfLostJob::MayRun, None)?;
        if records.is_empty() {
            return Err(bad_input(format!(
                "--take-over: {} has no journal of a job that runs; start the job with `baton up`",
                store.location()
            )));
        }
        let (taken, text) = take_over::lease(args, place, &store)?;
        (lease, first_event) = (LeaseAtStart::Taken(taken), Some(Event::CoordinatorMoved { text }));
        take_over::refuse_newer_copy(&journal, &records, &store)?;
    } else if !may_have_ranks(&records) {
        // Before the journal's copy is read: who takes a lease later has continued the job.
        let newest = store.lease().map_err(|error| disk::store_failure(&error))?;
        if let Some(newest) =
            newest.as_ref().filter(|it| it.over && Some(it.job) == job_of(&records))
        {
            // Else agents that are cut off from this coordinator would believe that the job has ended.
            let goes_on = CoordinatorLease { over: false, ..newest.clone() };
            if let Err(error) = store.renew_lease(&goes_on) {
                tracing::warn!(%error, "the lease in the checkpoint store still says that the job has ended");
            }
        }
        lease = LeaseAtStart::Newest(newest.map_or(0, |newest| newest.number));
    }
    let may_be_replaced = args.no_auto_resume || args.allow_recipe_change;
    if (new_run || records.is_empty()) && !may_be_replaced {
        refuse_store_of_another_recipe(spec, &store)?;
    }
    if new_run && !records.is_empty() {
        (journal, records) = begin_anew(journal, &path)?;
    }
    if !new_run && args.take_over.is_none() {
        // Ranks that may run must not wait for the store; the fence ends an older journal.
        if !may_have_ranks(&records) && is_apart(spec, &args.run_dir) {
            match job_of(&records) {
                Some(job) => refuse_older_folder(&journal, job, &store)?,
                None => {
                    let ranks = RanksOfLostJob::Lost;
                    (records, first_event) =
                        continue_lost_job(&mut journal, spec, &store, ranks, ended_elsewhere)?;
                }
            }
        }
        refuse_lost_checkpoints(&records, &store)?;
    }
    let engine = match Engine::replay(spec, &records, clock.now()) {
        Some(resumed) => {
            let resumed = match args.restarted_after {
                Some(began) => resumed.after_crash(Generation(began), &records),
                None => resumed,
            };
            let changes = changes(resumed.origin(), spec, &store)?;
            let undoes_change = !changes.is_empty() && undoes_change(spec, &records, &store)?;
            if !changes.is_empty() && !args.allow_recipe_change && !undoes_change {
                return Err(other_recipe(args, &changes));
            }
            let restore = resumed.restore();
            // Other data do not show in the recipe: only the ranks compare them, and the permission does not cover
            // what has changed since this run's own checkpoints. Ranks that may run go on as they are.
            let covers_all = may_have_ranks(&records) || !Record::has_saved(&records);
            let is_allowed = restore.allow_recipe_change && covers_all;
            let is_allowed_now = args.allow_recipe_change && !is_allowed;
            if changes.is_empty() && !is_allowed_now && !may_go_on(&resumed, &store)? {
                resumed
            } else {
                refuse_store_of_another_job(resumed.origin().job, place, &store)?;
                // A checkpoint that the old run must not resume from is excluded for this run too.
                let was_allowed = restore.allow_recipe_change && !undoes_change;
                let allow_recipe_change = was_allowed || args.allow_recipe_change;
                let mut restore = Restore { allow_recipe_change, ..restore };
                restore.continued.push(resumed.origin().job);
                (journal, records) = begin_anew(journal, &path)?;
                let origin = new_origin(spec, &store, |_| restore)?;
                Engine::continuing(&resumed, spec, origin, clock.now())
            }
        }
        None => Engine::new(
            spec,
            new_origin(spec, &store, |first| requested_restore(args, first))?,
            clock.now(),
        ),
    };
    Ok(PreparedJob { engine, journal, store, records, lease, first_event })
}

/// Whether the job of this run folder was taken over by another coordinator and is over there: the copy of the journal has
/// what followed. A store that does not answer at once says no: ranks that may run must not wait for it.
fn has_ended_elsewhere(
    args: &Args,
    spec: &JobSpec,
    place: &ServingPlace,
    records: &[Record],
) -> bool {
    let Some(job) = job_of(records).filter(|_| is_apart(spec, &args.run_dir)) else { return false };
    let access = BucketAccess {
        request_timeout: LEASE_TIMEOUT,
        retry_timeout: Duration::ZERO,
        ..store_access()
    };
    let store = Store::open_existing_with(&store_location(spec, &args.run_dir), &access);
    let Ok(store) = store else { return false };
    let Ok(Some(newest)) = store.lease() else { return false };
    let is_elsewhere = newest.job == job && newest.folder != place.lease(job).folder;
    // One that was killed after the end has not said that it is over.
    is_elsewhere && (newest.over || journal_copy::has_ended(&store, job))
}

/// Refuses the run folder of a job that another coordinator has continued since, with the journal's copy.
fn refuse_older_folder(journal: &Journal, job: JobId, store: &Store) -> Result<(), Failure> {
    let here = journal.entries().map_err(|error| crash(format!("{error:#}")))?;
    match journal_copy::is_continued(store, job, &here) {
        Ok(true) => {}
        Ok(false) => return Ok(()),
        Err(error) => {
            tracing::warn!(%error, "the copy of the journal in the checkpoint store cannot be read");
            return Ok(());
        }
    }
    Err(bad_input(format!(
        "another coordinator has continued this job, with its journal in {}: go on there, or give a new --run-dir, or \
         start a new run here with --no-auto-resume",
        store.location()
    )))
}

/// Continues the job that used the store last, whose run folder is lost, with the copy of its journal. Returns its
/// records, or none if there is no such job, and the event that says so. Training resumes from the newest checkpoint in
/// either case.
fn continue_lost_job(
    journal: &mut Journal,
    spec: &JobSpec,
    store: &Store,
    ranks: RanksOfLostJob,
    known: Option<JobId>,
) -> Result<(Vec<Record>, Option<Event>), Failure> {
    let has_budget = spec.limits.max_hours.is_some() || spec.limits.max_dollars.is_some();
    let taken = match journal_copy::of_last_job(store, ranks, has_budget, known) {
        Ok(taken) => taken,
        Err(error @ StoreError::DamagedJournal { .. }) if has_budget => {
            // It would be spent a second time without anybody's consent.
            let newest = store.newest().map_err(|error| disk::store_failure(&error))?;
            let consent = match newest {
                Some(newest) => format!("--resume {}", newest.name()),
                None => "--no-auto-resume".to_owned(),
            };
            return Err(bad_input(format!(
                "the used part of the budget is unknown: {error}; to go on and count hours and dollars from zero, give \
                 {consent}"
            )));
        }
        Err(error @ StoreError::DamagedJournal { .. }) if ranks == RanksOfLostJob::MayRun => {
            return Err(bad_input(format!(
                "--take-over: {error}; start the job with `baton up`: training resumes from the newest checkpoint"
            )));
        }
        Err(error @ StoreError::DamagedJournal { .. }) => {
            let problem = format!(
                "the history of the job before is lost, and training resumes from the newest checkpoint: {error}"
            );
            return Ok((Vec::new(), Some(Event::JournalCopyFailed { problem })));
        }
        Err(error) => return Err(disk::store_failure(&error)),
    };
    let unusable = |error: anyhow::Error| crash(format!("{error:#}"));
    let is_continued = !taken.is_empty();
    if is_continued {
        journal.fill(taken).map_err(unusable)?;
        tracing::info!("continues the job with the journal in {}", store.location());
    }
    let records = journal.records().map_err(unusable)?;
    let goes_on = is_continued && Record::outcome(&records).is_none();
    let moved = goes_on.then(|| Event::CoordinatorMoved {
        text: format!("continues the job with the copy of its journal in {}", store.location()),
    });
    Ok((records, moved))
}

/// The journal's copy and the coordinator's lease, in a store that is not lost together with the run folder.
fn apart(
    args: &Args,
    spec: &JobSpec,
    journal: &Journal,
    lease: CoordinatorLease,
    at_start: LeaseAtStart,
) -> anyhow::Result<Apart> {
    let location = store_location(spec, &args.run_dir);
    let open = || Store::open_existing_with(&location, &store_access());
    let job = lease.job;
    let lease = match at_start {
        LeaseAtStart::Taken(taken) => HeldLease::taken(open()?, taken),
        LeaseAtStart::Newest(number) => HeldLease::free(open()?, lease, Some(number)),
        LeaseAtStart::Unread => HeldLease::free(open()?, lease, None),
    };
    let copy = JournalCopy::start(open()?, (job, lease.clone()), journal.entries()?)?;
    Ok(Apart { copy, lease, is_standby: args.take_over.is_some() })
}

/// Whether the store is outside of the run folder.
fn is_apart(spec: &JobSpec, run_dir: &Path) -> bool {
    let location = store_location(spec, run_dir);
    if location.contains("://") {
        return true;
    }
    let whole = |path: &Path| fs::canonicalize(path).or_else(|_| path::absolute(path));
    match (whole(Path::new(&location)), whole(run_dir)) {
        (Ok(store), Ok(run_dir)) => !store.starts_with(run_dir),
        _ => false,
    }
}

/// Whether a job that is complete may go on, because its recipe now says otherwise when to end early.
fn may_go_on(resumed: &Engine, store: &Store) -> Result<bool, Failure> {
    if resumed.outcome().is_none() {
        return Ok(false);
    }
    let failure = |error: StoreError| disk::store_failure(&error);
    // The journal has the recipe with which the job began, and the store that of its last generation.
    let claimant = store.claimant(store.fence().map_err(failure)?).map_err(failure)?;
    let last = claimant.filter(|claimant| claimant.job == resumed.origin().job);
    let last = last.and_then(|claimant| JobSpec::from_saved(&claimant.recipe).ok());
    Ok(last.is_some_and(|last| resumed.may_go_on(&last)))
}

/// A changed recipe continues from the newest checkpoint of the store, which must not be another job's.
fn refuse_store_of_another_job(
    job: JobId,
    place: &ServingPlace,
    store: &Store,
) -> Result<(), Failure> {
    let failure = |error: StoreError| disk::store_failure(&error);
    let fence = store.fence().map_err(failure)?;
    let claimant = store.claimant(fence).map_err(failure)?;
    // This run folder may have begun another job itself, with the recipe before this one.
    let is_own = |other: &Claimant| {
        other.job == job || (&other.host, &other.run_dir) == (&place.host, &place.run_dir)
    };
    match claimant.filter(|other| !is_own(other)) {
        None => Ok(()),
        Some(other) => Err(bad_input(format!(
            "checkpoint store {} was taken over with generation {fence} by {other}, so its newest checkpoint is not of \
             run folder {}: give this job another store with checkpoint.dir (`baton checkpoint cp` copies a checkpoint), \
             or begin a new run here from one of its checkpoints with --resume NAME --allow-recipe-change",
            store.location(),
            place.run_dir
        ))),
    }
}

/// A job that is complete does not start, so no rank would notice that its checkpoints are gone.
fn refuse_lost_checkpoints(records: &[Record], store: &Store) -> Result<(), Failure> {
    let is_complete = matches!(Record::last_turn(records), Some(Record::Ended(Outcome::Completed)));
    let saved = records.iter().rev().find_map(|record| match record {
        Record::Saved(commit) => Some(commit.name.clone()),
        _ => None,
    });
    let Some(name) = saved.filter(|_| is_complete) else { return Ok(()) };
    // A store that cannot be read says nothing about what it holds.
    match store.list() {
        Ok(entries) if entries.is_empty() => {
            let location = store.location().to_owned();
            Err(bad_input(StoreError::CheckpointsGone { location, name }.to_string()))
        }
        _ => Ok(()),
    }
}

/// Opens the checkpoint store, and tests that it can be written, because otherwise the first save would fail hours
/// later. If ranks may run that hold state, this coordinator must serve them even without the store.
fn open_store(spec: &JobSpec, run_dir: &Path, may_have_ranks: bool) -> Result<Store, Failure> {
    let access = store_access();
    let location = store_location(spec, run_dir);
    Store::open_with(&location, &access).or_else(|error| {
        let failure = disk::store_failure(&error);
        if !may_have_ranks {
            return Err(failure);
        }
        let store = Store::open_existing_with(&location, &access).map_err(|_| failure.clone())?;
        tracing::warn!(%failure, "the checkpoint store cannot be written; ranks that run keep their state");
        Ok(store)
    })
}

/// The job's loop tries again itself.
pub(crate) fn store_access() -> BucketAccess {
    BucketAccess {
        request_timeout: Duration::from_secs(20),
        retry_timeout: Duration::from_secs(15),
        ..BucketAccess::default()
    }
}

/// Whether the coordinator before this one left a generation open.
fn may_have_ranks(records: &[Record]) -> bool {
    matches!(Record::last_turn(records), Some(Record::Opened { .. }))
}

/// The job of a journal.
pub(crate) fn job_of(records: &[Record]) -> Option<JobId> {
    Record::origin(records).map(|origin| origin.job)
}

/// The checkpoint of `--resume`.
pub(crate) fn checkpoint(typed: &str) -> Result<CheckpointReference, Failure> {
    typed.parse().map_err(|error| bad_input(format!("--resume: {error}")))
}

/// Refuses a new run in a store that a job of another recipe uses or has used: opening a generation would end that job,
/// and restoring its checkpoints would fail afterwards.
fn refuse_store_of_another_recipe(spec: &JobSpec, store: &Store) -> Result<(), Failure> {
    let failure = |error: StoreError| disk::store_failure(&error);
    let claimant = journal_copy::last_claimant(store).map_err(failure)?;
    let user = claimant.map(|claimant| (format!("is used by {claimant}"), claimant.recipe));
    // A job of an older version is known only by its checkpoints.
    let newest = store.newest().map_err(failure)?;
    let newest = newest.map(|manifest| {
        let name = JobSpec::from_saved(&manifest.recipe).map(|saved| saved.name);
        let name = name.map(|name| format!(" `{name}`")).unwrap_or_default();
        (format!("has checkpoint {} of job{name}", manifest.name()), manifest.recipe)
    });
    for (what, recipe) in [user, newest].into_iter().flatten() {
        let changes = spec.changes_since(&recipe);
        if !changes.is_empty() {
            return Err(bad_input(format!(
                "checkpoint store {} {what}, whose recipe would give different weights ({}): set checkpoint.dir to \
                 another store, or continue from these checkpoints with --allow-recipe-change, or start a new run \
                 there with --no-auto-resume; both flags end the other job if it still runs",
                store.location(),
                changes.join(", ")
            )));
        }
    }
    Ok(())
}

/// Differences between the recipes that prevent `spec` from continuing the job in the journal.
fn changes(origin: &JobOrigin, spec: &JobSpec, store: &Store) -> Result<Vec<String>, Failure> {
    let mut saved = origin.recipe.clone();
    if saved.is_none() {
        // A journal of format 1 has no recipe; the checkpoints of its job have it.
        let entries = store.list().map_err(|error| disk::store_failure(&error))?;
        saved = entries.into_iter().find_map(|entry| match entry.state {
            EntryState::Complete(manifest) if manifest.job == origin.job => Some(manifest.recipe),
            _ => None,
        });
    }
    Ok(saved.map_or_else(Vec::new, |saved| spec.changes_since(&saved)))
}

/// Whether this recipe is that of the newest checkpoint, and the run of the journal with another one has saved nothing:
/// its ranks may have refused `--allow-recipe-change`, so only the recipe from before can go on.
fn undoes_change(spec: &JobSpec, records: &[Record], store: &Store) -> Result<bool, Failure> {
    if may_have_ranks(records) || Record::has_saved(records) {
        return Ok(false);
    }
    let newest = store.newest().map_err(|error| disk::store_failure(&error))?;
    Ok(newest.is_some_and(|newest| spec.changes_since(&newest.recipe).is_empty()))
}

fn new_origin(
    spec: &JobSpec,
    store: &Store,
    restore: impl FnOnce(Generation) -> Restore,
) -> Result<JobOrigin, Failure> {
    let first_generation =
        store.unused_generation().map_err(|error| disk::store_failure(&error))?;
    let job = JobId(uuid::Uuid::new_v4());
    let restore = restore(first_generation);
    Ok(JobOrigin { job, recipe: Some(spec.to_json()), first_generation, restore })
}

/// The state that the user's flags request for a new run.
fn requested_restore(args: &Args, first_generation: Generation) -> Restore {
    let allow_recipe_change = args.allow_recipe_change;
    let is_new_run = args.no_auto_resume || args.resume.is_some();
    let not_before = if is_new_run { first_generation } else { Generation(0) };
    Restore { not_before, path: args.resume.clone(), allow_recipe_change, ..Restore::default() }
}

fn other_recipe(args: &Args, changes: &[String]) -> Failure {
    let remedy = match args.recipe {
        Some(_) => {
            "undo the change, or give another --run-dir, or continue with the old state with --allow-recipe-change, \
             or start a new run here with --no-auto-resume"
        }
        None => {
            "undo the change, or start the coordinator with another --run-dir, or with --allow-recipe-change to \
             continue with the old state, or with --no-auto-resume to start a new run here"
        }
    };
    bad_input(format!(
        "run folder {} has a run of another recipe, and this recipe would give different weights ({}): {remedy}",
        args.run_dir.display(),
        changes.join(", ")
    ))
}

fn open_journal(path: &Path) -> Result<(Journal, Vec<Record>), Failure> {
    Journal::open(path).map_err(|error| disk::failure(path, format!("{error:#}")))
}

/// An empty journal in place of this one, which is kept beside it.
fn begin_anew(journal: Journal, path: &Path) -> Result<(Journal, Vec<Record>), Failure> {
    drop(journal);
    set_aside(path)?;
    open_journal(path)
}

/// The journal for a takeover of the job that used the store last, without the history of another job: the folders of an
/// agent's coordinators have the same names for every store.
fn without_other_job(
    journal: Journal,
    records: &[Record],
    run_dir: &Path,
    store: &Store,
) -> Result<Journal, Failure> {
    let lost = journal_copy::last_job(store).map_err(|error| disk::store_failure(&error))?;
    match job_of(records) {
        // A damaged store may not name a job.
        Some(job) if lost.is_some_and(|lost| lost != job) => {
            set_aside(&run_dir.join(METRICS_FILE))?;
            begin_anew(journal, &run_dir.join(JOURNAL_FILE)).map(|(journal, _)| journal)
        }
        _ => Ok(journal),
    }
}

/// The run before one that `--resume` began and that ended before any rank trained, for example because the checkpoint is of
/// another recipe: the run before goes on as if that had not been tried.
fn without_refused_resume(
    mut journal: Journal,
    mut records: Vec<Record>,
    path: &Path,
    store: &Store,
) -> Result<(Journal, Vec<Record>), Failure> {
    while has_restored_nothing(&journal, &records)? {
        let Some(before) = names_aside(path).take_while(|kept| kept.exists()).last() else { break };
        let (mut previous, known) = open_journal(&before)?;
        if !has_restored_nothing(&previous, &known)? {
            // The next generation must be newer than those of the runs that are left out.
            let fence = store.fence().map_err(|error| disk::store_failure(&error))?;
            let added = Record::after_loss(&known, fence, RanksOfLostJob::Lost).unwrap_or_default();
            let appended = added.iter().try_for_each(|record| previous.append(record));
            let added = appended.and_then(|()| previous.commit());
            added.map_err(|error| crash(format!("{error:#}")))?;
        }
        drop((journal, previous));
        fs::rename(&before, path)
            .map_err(|error| bad_input(format!("{}: {error}", before.display())))?;
        tracing::info!("--resume restored nothing the last time: the run before it goes on");
        (journal, records) = open_journal(path)?;
    }
    Ok((journal, records))
}

/// Whether the run of this journal began with `--resume` and failed before any rank trained.
fn has_restored_nothing(journal: &Journal, records: &[Record]) -> Result<bool, Failure> {
    journal_copy::has_restored_nothing(records, || journal.events_after(0))
        .map_err(|error| crash(format!("{error:#}")))
}

/// The names of a file of old runs, in the order in which they are used.
fn names_aside(path: &Path) -> impl Iterator<Item = PathBuf> + use<'_> {
    let part = |part: Option<&OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    let (stem, extension) = (part(path.file_stem()), part(path.extension()));
    (1u32..).map(move |n| path.with_file_name(format!("{stem}-{n}.{extension}")))
}

/// Renames a file of the old run, if there is one, so that it is kept.
fn set_aside(path: &Path) -> Result<(), Failure> {
    let kept =
        names_aside(path).find(|kept| !kept.exists()).unwrap_or_else(|| path.with_extension("old"));
    match fs::rename(path, &kept) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(bad_input(format!("{}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}

/// The store of a job. A folder is absolute: agents may run in other folders than this coordinator.
fn store_location(spec: &JobSpec, run_dir: &Path) -> String {
    let folder = match spec.checkpoint.dir.as_str() {
        "" => run_dir.join("checkpoints"),
        dir if dir.contains("://") => return dir.to_owned(),
        dir => PathBuf::from(dir),
    };
    path::absolute(&folder).unwrap_or(folder).display().to_string()
}

fn read_recipe(path: &Path, overrides: &[String]) -> Result<JobSpec, Failure> {
    JobSpec::read(path, overrides, |path| read_text(path, MAX_RECIPE_BYTES))
        .map_err(|error| bad_input(format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{EntryKind, JournalEntry};

    /// A folder in which no process can create files, not even one of root.
    const UNWRITABLE: &str = "/proc";

    #[test]
    fn the_folder_of_a_store_is_the_same_for_programs_in_other_folders() {
        let text = fs::read_to_string("../recipes/digits_cpu.toml").unwrap();
        let location = |dir: &str| {
            let mut spec = JobSpec::from_toml(&text, &[]).unwrap();
            spec.checkpoint.dir = dir.to_owned();
            store_location(&spec, Path::new("run"))
        };
        for dir in ["", "store", "/runs/store"] {
            assert!(Path::new(&location(dir)).is_absolute(), "{dir}");
        }
        assert!(location("").ends_with("run/checkpoints"));
        assert_eq!(location("s3://bucket/store"), "s3://bucket/store");
    }

    #[test]
    fn a_store_that_cannot_be_written_is_refused_unless_ranks_may_run() {
        let text = fs::read_to_string("../recipes/digits_cpu.toml").unwrap();
        let mut spec = JobSpec::from_toml(&text, &[]).unwrap();
        spec.checkpoint.dir = UNWRITABLE.to_owned();
        let run_dir = Path::new("unused");

        let refused = open_store(&spec, run_dir, false).unwrap_err();
        assert!(refused.message.contains(UNWRITABLE), "{refused}");
        let opened = open_store(&spec, run_dir, true).unwrap();
        assert_eq!(opened.location(), UNWRITABLE);
    }

    #[test]
    fn a_damaged_journal_in_the_store_ends_a_take_over_but_not_a_new_start() {
        use crate::journal_copy::kit;
        let folder = tempfile::tempdir().unwrap();
        let store = kit::folder_store(&folder);
        store.claim(Generation(1), &kit::claimant()).unwrap();
        assert!(kit::start(&folder, kit::records_of(0..1)).flush(kit::TIMEOUT));
        let part =
            folder.path().join(format!("journal/{}/000001-00000001-00000001.json", kit::JOB));
        fs::write(part, "damaged").unwrap();
        let text = fs::read_to_string("../recipes/digits_cpu.toml").unwrap();
        let spec = JobSpec::from_toml(&text, &[]).unwrap();
        let (mut journal, _) = Journal::open(&folder.path().join("journal.redb")).unwrap();
        let mut continued = |ranks| continue_lost_job(&mut journal, &spec, &store, ranks, None);

        let refused = continued(RanksOfLostJob::MayRun).unwrap_err();
        assert!(refused.message.contains("part 000001-00000001-00000001"), "{refused}");
        let (records, event) = continued(RanksOfLostJob::Lost).unwrap();
        assert_eq!(records, []);
        assert!(matches!(event, Some(Event::JournalCopyFailed { .. })), "{event:?}");
    }

    #[test]
    fn a_takeover_begins_without_the_history_of_another_job_that_used_the_folder() {
        use crate::journal_copy::kit;
        let (folder, run) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = kit::folder_store(&folder);
        store.claim(Generation(1), &kit::claimant()).unwrap();
        let path = run.path().join(JOURNAL_FILE);
        let of_job = |job| {
            let restore = Restore::default();
            Record::Created(JobOrigin {
                job,
                recipe: None,
                first_generation: Generation(1),
                restore,
            })
        };
        for (job, is_kept) in [(kit::JOB, true), (JobId(uuid::Uuid::from_u128(99)), false)] {
            let (journal, _) = Journal::open(&path).unwrap();
            let (mut journal, _) = begin_anew(journal, &path).unwrap();
            let json = serde_json::to_string(&of_job(job)).unwrap();
            journal.fill(vec![JournalEntry { kind: EntryKind::Record, key: 0, json }]).unwrap();
            fs::write(run.path().join(METRICS_FILE), "{}\n").unwrap();
            let records = journal.records().unwrap();

            let journal = without_other_job(journal, &records, run.path(), &store).unwrap();

            assert_eq!(journal.records().unwrap().is_empty(), !is_kept);
            assert_eq!(run.path().join(METRICS_FILE).exists(), is_kept);
            assert_eq!(run.path().join("metrics-1.jsonl").exists(), !is_kept);
        }
    }

    #[test]
    fn ranks_may_run_only_in_a_generation_that_was_left_open() {
        let origin = JobOrigin {
            job: JobId(uuid::Uuid::nil()),
            recipe: None,
            first_generation: Generation(1),
            restore: Restore::default(),
        };
        let created = Record::Created(origin);
        let opened = Record::Opened { generation: Generation(1), placements: Vec::new() };
        let ended = Record::Ended(baton_job::exit::Outcome::Stopped);
        for (records, expected) in [
            (vec![], false),
            (vec![created.clone()], false),
            (vec![created.clone(), opened.clone()], true),
            (vec![created.clone(), opened.clone(), ended.clone()], false),
            (vec![created, opened.clone(), ended, opened], true),
        ] {
            assert_eq!(may_have_ranks(&records), expected, "{records:?}");
        }
    }
}
