//! Finds the folder with a job's checkpoints, and a checkpoint by its name.

use std::{
    collections::BTreeMap,
    fs, io,
    num::NonZeroUsize,
    path::{self, Path, PathBuf},
};

use crate::{
    connect::{self, Coordinator, CoordinatorFlags},
    failure::{bad_input, failed},
    saved_report::SavedReport,
};
use baton_checkpoint::{
    CheckpointReference, Claimant, Entry, EntryState, Error, Manifest, SaveId, Store,
};
use baton_job::{
    Generation, JobId,
    exit::Failure,
    message::{Restore, Rollback},
};
use baton_proto::v1::{GetStatusResponse, InvalidatedCheckpoints};

/// Flags of every command that reads checkpoints.
#[derive(Debug, clap::Args)]
pub(super) struct FolderFlags {
    /// Folder or s3://BUCKET/PREFIX of the checkpoints [default: the job's, or else the newest run's]
    #[arg(long, value_name = "LOCATION")]
    pub(super) dir: Option<String>,
    #[command(flatten)]
    pub(super) target: CoordinatorFlags,
}

impl FolderFlags {
    /// The folder: the one given, or else the one reported by a coordinator, or else the given store or the one of the
    /// given run folder, or else the one of the newest run folder. Names repeat between jobs, so a place that the user
    /// has named, or a coordinator that refuses, is never replaced by another folder.
    pub(super) async fn find(&self) -> Result<FoundFolder, Failure> {
        if let Some(dir) = &self.dir {
            return Ok(FoundFolder::at(dir));
        }
        if let Some(status) = self.status().await? {
            let location = status.checkpoint_location.clone();
            let user = status.job_id.parse().map_or(StoreUser::Any, |id| StoreUser::Job(JobId(id)));
            let rollbacks = rollbacks(&status.invalidated_checkpoints);
            return Ok(FoundFolder { location, user, rollbacks, is_served: true });
        }
        if let Some(store) = &self.target.store {
            return Ok(FoundFolder::at(store));
        }
        let run = self.target.run_dir.clone().or_else(newest_run);
        let run = run.unwrap_or_else(|| Path::new(connect::RUNS).join("*"));
        let report = SavedReport::read(&run)?;
        let location = location_of(&run, report.as_ref()).ok_or_else(|| {
            failed(format!(
                "no coordinator answers, and there is no {}: give the folder of the checkpoints with --dir",
                run.join(CHECKPOINTS).display()
            ))
        })?;
        let user = StoreUser::RunFolder(path::absolute(&run).unwrap_or(run).display().to_string());
        let rollbacks = report
            .map(|report| rollbacks(&report.status.invalidated_checkpoints))
            .unwrap_or_default();
        Ok(FoundFolder { location, user, rollbacks, is_served: false })
    }

    /// The coordinator's status, if there is a coordinator with a job.
    async fn status(&self) -> Result<Option<GetStatusResponse>, Failure> {
        let mut coordinator = match Coordinator::find(&self.target) {
            Ok(coordinator) => coordinator,
            // No coordinator is running in the given run folder.
            Err(failure) if failure.class.is_retriable() => return Ok(None),
            Err(failure) => return Err(failure),
        };
        match coordinator.status().await {
            Ok(status) if !status.checkpoint_location.is_empty() => Ok(Some(status)),
            Ok(_) if coordinator.is_named() => Err(failed(format!(
                "the coordinator at {} has no job: give the folder of the checkpoints with --dir",
                coordinator.url()
            ))),
            Err(failure) if coordinator.is_named() || !failure.class.is_retriable() => Err(failure),
            Ok(_) | Err(_) => Ok(None),
        }
    }
}

/// A folder with checkpoints, which several jobs may have used.
pub(super) struct FoundFolder {
    pub(super) location: String,
    /// Whose checkpoints are meant.
    pub(super) user: StoreUser,
    /// What has invalidated checkpoints of the job, as its coordinator or the report in its run folder says.
    pub(super) rollbacks: Vec<Rollback>,
    /// Whether a coordinator has said where it is.
    pub(super) is_served: bool,
}

impl FoundFolder {
    /// A place that the user has named.
    pub(super) fn at(location: &str) -> Self {
        let (location, rollbacks) = (location.to_owned(), Vec::new());
        Self { location, user: StoreUser::Any, rollbacks, is_served: false }
    }
}

/// Whose checkpoints a command is about.
#[derive(Clone, Debug)]
pub(super) enum StoreUser {
    Any,
    Job(JobId),
    /// The jobs whose coordinators had this run folder, wherever their generations were opened later.
    RunFolder(String),
}

impl StoreUser {
    /// Those of the entries that are of this user; all if it has saved none: it may have begun with those of another one.
    fn own(&self, store: &Store, mut entries: Vec<Entry>) -> Result<Vec<Entry>, Failure> {
        let mut claimants: BTreeMap<Generation, Option<Claimant>> = BTreeMap::new();
        for Entry { id: SaveId { generation, .. }, .. } in &entries {
            if !claimants.contains_key(generation) && !matches!(self, Self::Any) {
                claimants.insert(*generation, store.claimant(*generation).map_err(store_failure)?);
            }
        }
        let jobs: Vec<JobId> = match self {
            Self::Any => return Ok(entries),
            Self::Job(job) => vec![*job],
            Self::RunFolder(folder) => {
                let is_here = |found: &&Claimant| {
                    let real = |folder: &str| fs::canonicalize(folder).ok();
                    let has_real = |place| Some(place) == real(folder);
                    found.run_dir == *folder || real(&found.run_dir).is_some_and(has_real)
                };
                let here = claimants.values().flatten().filter(is_here);
                here.map(|found| found.job).collect()
            }
        };
        let job_of = |entry: &Entry| match entry.state.manifest() {
            Some(manifest) => Some(manifest.job),
            None => claimants.get(&entry.id.generation)?.as_ref().map(|found| found.job),
        };
        let is_own = |entry: &Entry| job_of(entry).is_some_and(|job| jobs.contains(&job));
        // Nor are damaged ones replaced by those of another job.
        let is_saved = |entry: &Entry| !matches!(entry.state, EntryState::Unfinished);
        if entries.iter().any(|entry| is_saved(entry) && is_own(entry)) {
            entries.retain(is_own);
        }
        Ok(entries)
    }
}

/// Default folder of checkpoints inside a run folder.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
/// What every run folder has.
const RUN_JOURNAL: &str = "journal.redb";

/// The run folder whose journal or checkpoints changed last; imported weights have no journal yet.
fn newest_run() -> Option<PathBuf> {
    let newest = |name| connect::newest_below(Path::new(connect::RUNS), name);
    let modified = |path: &PathBuf| fs::metadata(path).and_then(|found| found.modified()).ok();
    let found = [CHECKPOINTS, RUN_JOURNAL].into_iter().filter_map(newest).max_by_key(modified)?;
    found.parent().map(Path::to_owned)
}

/// Whether the recipe puts the checkpoints into a folder or a bucket of their own.
fn is_elsewhere(report: &SavedReport) -> bool {
    let recipe: toml::Table = report.recipe_toml.parse().unwrap_or_default();
    let dir = recipe.get("checkpoint").and_then(|checkpoint| checkpoint.get("dir"));
    dir.and_then(toml::Value::as_str).is_some_and(|dir| !dir.is_empty())
}

fn rollbacks(invalidated: &[InvalidatedCheckpoints]) -> Vec<Rollback> {
    invalidated.iter().map(|&found| found.into()).collect()
}

/// Where the checkpoints of a run folder are: where its report says, if the recipe put them elsewhere, or else in it, as
/// it may have been moved since; `None` if it has neither.
fn location_of(run: &Path, report: Option<&SavedReport>) -> Option<String> {
    let in_run = run.join(CHECKPOINTS);
    if in_run.is_dir() && !report.is_some_and(is_elsewhere) {
        return Some(in_run.display().to_string());
    }
    let location = report?.status.checkpoint_location.clone();
    Some(location).filter(|location| !location.is_empty())
}

/// Runs `work` with the store at `location` on a thread for blocking calls.
pub(super) async fn with_store<T: Send + 'static>(
    location: String,
    work: impl FnOnce(&Store) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    blocking(move || work(&open(&location)?)).await
}

/// Runs blocking `work` on a separate thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(failed(format!("reading checkpoints: {error}; this is a bug"))),
    }
}

/// The store at `location`, which must exist.
pub(crate) fn open(location: &str) -> Result<Store, Failure> {
    if !location.contains("://") {
        let problem = match fs::metadata(location) {
            Ok(found) if !found.is_dir() => Some("is not a folder"),
            Err(_) if location.is_empty() => None,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some("does not exist"),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(bad_input(format!(
                "{location} {problem}: give the folder of the checkpoints"
            )));
        }
    }
    Store::open_existing(location).map_err(store_failure)
}

/// Converts an error of the store, and decides whether a retry could help.
pub(crate) fn store_failure(error: Error) -> Failure {
    match error.is_bad_input() {
        true => bad_input(error),
        false => failed(error),
    }
}

/// The entry with this name.
pub(super) fn named<'a>(
    entries: &'a [Entry],
    name: &str,
    location: &str,
) -> Result<&'a Entry, Failure> {
    entries.iter().find(|entry| entry.name == name).ok_or_else(|| {
        let hint = match nearest(entries, name) {
            Some(nearest) => format!(": did you mean {nearest}?"),
            None => String::new(),
        };
        bad_input(format!(
            "there is no checkpoint {name} in {location}{hint} (`baton checkpoint ls --dir {location}` \
             lists them)"
        ))
    })
}

/// The most similar name: one that contains the typed text, or else the one with the smallest edit distance.
fn nearest<'a>(entries: &'a [Entry], typed: &str) -> Option<&'a str> {
    let distance = |entry: &&Entry| {
        let contains = !typed.is_empty() && entry.name.contains(typed);
        (!contains, strsim::damerau_levenshtein(&entry.name, typed))
    };
    entries.iter().min_by_key(distance).map(|entry| entry.name.as_str())
}

/// The manifest of an entry that must be complete.
pub(super) fn complete_manifest(entry: &Entry) -> Result<&Manifest, Failure> {
    let name = &entry.name;
    match &entry.state {
        EntryState::Complete(manifest) => Ok(manifest),
        EntryState::Damaged(problem) => {
            Err(bad_input(format!("checkpoint {name} is damaged: {problem}; use another one")))
        }
        EntryState::Newer(version) => {
            Err(store_failure(Error::NewerVersion { name: name.clone(), version: *version }))
        }
        EntryState::Unfinished => {
            Err(bad_input(format!("the save of {name} was never finished; use another one")))
        }
    }
}

/// The checkpoint called `name`, or the newest complete one of the folder's user that no rollback has invalidated. It is
/// an error if the newest one is from a newer Baton.
pub(super) fn pick(
    store: &Store,
    folder: &FoundFolder,
    name: Option<&str>,
) -> Result<Manifest, Failure> {
    pick_and_skip(store, folder, name, &Unreadable::new()).map(|(manifest, _)| manifest)
}

/// Like [`pick`], also with the damaged checkpoints that are newer than the picked one, if no name was given.
pub(super) fn pick_and_skip(
    store: &Store,
    folder: &FoundFolder,
    name: Option<&str>,
    unreadable: &Unreadable,
) -> Result<(Manifest, Vec<String>), Failure> {
    let entries = store.list().map_err(store_failure)?;
    if let Some(name) = name {
        let manifest = complete_manifest(named(&entries, name, store.location())?)?;
        return Ok((manifest.clone(), Vec::new()));
    }
    let is_valid = |Entry { id, .. }: &&Entry| {
        !folder.rollbacks.iter().any(|rollback| rollback.invalidates(id.generation, id.step))
    };
    let is_suspect = |Entry { id, .. }: &&Entry| {
        folder.rollbacks.iter().any(|rollback| rollback.suspects(id.generation, id.step))
    };
    let mut damaged = Vec::new();
    let own = folder.user.own(store, entries)?;
    let (mut last_resort, good): (Vec<_>, Vec<_>) =
        own.iter().filter(is_valid).partition(is_suspect);
    last_resort.sort_by_key(|entry| Restore::last_resort_key(entry.id.generation, entry.id.step));
    for entry in good.into_iter().chain(last_resort) {
        let problem = match &entry.state {
            EntryState::Unfinished => continue,
            EntryState::Damaged(problem) => Some(problem),
            EntryState::Complete(_) | EntryState::Newer(_) => unreadable.get(&entry.name),
        };
        match problem {
            None => return Ok((complete_manifest(entry)?.clone(), damaged)),
            Some(problem) => damaged.push(format!("{} ({problem})", entry.name)),
        }
    }
    let none = none_complete(store.location());
    if damaged.is_empty() {
        return Err(none);
    }
    Err(bad_input(format!("{}; damaged: {}", none.message, damaged.join(", "))))
}

/// Checkpoints whose files do not match their manifest: each name with what is wrong.
pub(super) type Unreadable = BTreeMap<String, String>;

/// Works on what [`pick_and_skip`] picks. If no name was given, one that turns out to be damaged is skipped; and a job may
/// remove the newest one meanwhile, after a newer one is there.
pub(super) fn with_picked<T>(
    store: &Store,
    folder: &FoundFolder,
    name: Option<&str>,
    work: impl Fn(&Manifest) -> Result<T, Failure>,
) -> Result<(Manifest, Vec<String>, T), Failure> {
    let mut unreadable = Unreadable::new();
    loop {
        let (manifest, damaged) = pick_and_skip(store, folder, name, &unreadable)?;
        let failure = match work(&manifest) {
            Ok(done) => return Ok((manifest, damaged, done)),
            Err(failure) if name.is_some() => return Err(failure),
            Err(failure) => failure,
        };
        match store.verify(&[&manifest], NonZeroUsize::MIN, &|_| {}).pop() {
            Some(Err(Error::Damaged { problem, .. })) => {
                unreadable.insert(manifest.name(), problem);
            }
            Some(Err(Error::Missing { .. })) => {}
            _ => return Err(failure),
        }
    }
}

/// The error after the work on a checkpoint if newer ones are damaged. `done` is what was not done with these.
pub(super) fn is_newest(name: &str, damaged: &[String], done: &str) -> Result<(), Failure> {
    if damaged.is_empty() {
        return Ok(());
    }
    let damaged = damaged.join(", ");
    Err(failed(format!("{name} is not the newest; damaged and not {done}: {damaged}")))
}

/// The error if there is no complete checkpoint.
pub(super) fn none_complete(location: &str) -> Failure {
    failed(format!("there is no complete checkpoint in {location}"))
}

/// A checkpoint as the user typed it: a name, a location, or both with a slash between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reference {
    /// The folder or URL, if given.
    pub(super) location: Option<String>,
    /// The name, if given.
    pub(super) name: Option<String>,
}

impl Reference {
    /// Parses what the user typed. `bare` decides the meaning of a word without a slash that is not a checkpoint's
    /// name.
    pub(super) fn parse(typed: &str, bare: BareWord) -> Self {
        match typed.parse() {
            Ok(CheckpointReference { location, id }) => Self { location, name: Some(id.name()) },
            Err(_) if bare == BareWord::Name && !typed.contains('/') => {
                Self { location: None, name: Some(typed.to_owned()) }
            }
            Err(_) => Self { location: Some(typed.to_owned()), name: None },
        }
    }
}

/// Meaning of a word without a slash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BareWord {
    /// A name, perhaps mistyped.
    Name,
    /// A folder.
    Location,
}

#[cfg(test)]
mod tests {
    use baton_recipe::Step;

    use super::*;
    use crate::commands::checkpoint::samples::{self, Sample};

    fn of_user(user: StoreUser) -> FoundFolder {
        FoundFolder { user, ..FoundFolder::at("") }
    }

    #[test]
    fn without_a_complete_checkpoint_the_damaged_one_is_named() {
        let sample = samples::store();
        assert!(pick(&sample.store, &FoundFolder::at(""), None).unwrap_err().class.is_retriable());
        let name = Sample::default().save(&sample.store).name();
        let manifest = sample.folder.path().join(&name).join("manifest.json");
        fs::write(manifest, "{").unwrap();
        let failure = pick(&sample.store, &FoundFolder::at(""), None).unwrap_err();
        assert!(!failure.class.is_retriable());
        assert!(failure.message.contains(&format!("damaged: {name} (")), "{failure}");
    }

    #[test]
    fn of_several_jobs_in_a_store_the_newest_checkpoint_of_the_one_that_is_meant_is_taken() {
        let sample = samples::store();
        for (number, run) in [(1, "/runs/a"), (2, "/runs/b")] {
            let claimant = Claimant {
                owner: run.to_owned(),
                job: JobId(uuid::Uuid::from_u128(number.into())),
                name: String::new(),
                recipe: String::new(),
                host: String::new(),
                run_dir: run.to_owned(),
                not_before: None,
            };
            sample.store.claim(Generation(number), &claimant).unwrap();
            let job = number.into();
            Sample { generation: number, job, ..Sample::default() }.save(&sample.store);
        }
        let of = |run: &str| {
            let picked = pick(&sample.store, &of_user(StoreUser::RunFolder(run.to_owned())), None);
            picked.map(|manifest| manifest.generation.0).map_err(|failure| failure.message)
        };
        // A folder that was moved is not known.
        assert_eq!(["/runs/a", "/runs/b", "/runs/c"].map(of), [Ok(1), Ok(2), Ok(2)]);
        let job = StoreUser::Job(JobId(uuid::Uuid::from_u128(1)));
        assert_eq!(pick(&sample.store, &of_user(job), None).unwrap().generation.0, 1);
        assert_eq!(pick(&sample.store, &FoundFolder::at(""), None).unwrap().generation.0, 2);

        let damaged = sample.folder.path().join("step-0000000088-gen-000001/manifest.json");
        fs::write(damaged, "{").unwrap();
        assert!(of("/runs/a").unwrap_err().contains("damaged"), "another job's is no substitute");
    }

    #[test]
    fn a_run_whose_checkpoints_are_elsewhere_says_where() {
        let run = tempfile::tempdir().unwrap();
        let location = || location_of(run.path(), SavedReport::read(run.path()).unwrap().as_ref());
        assert_eq!(location(), None);
        let reported = |dir: &str| {
            let recipe_toml = format!("name = \"a\"\n[checkpoint]\ndir = \"{dir}\"\n");
            let status = serde_json::json!({"checkpoint_location": "s3://bucket/run",
                "invalidated_checkpoints": [{"before_generation": 3, "from_step": 70}]});
            let report = serde_json::json!({"status": status, "recipe_toml": recipe_toml});
            fs::write(run.path().join("report.json"), report.to_string()).unwrap();
        };
        reported("");
        assert_eq!(location().as_deref(), Some("s3://bucket/run"));
        // The run folder may have been moved since.
        fs::create_dir(run.path().join(CHECKPOINTS)).unwrap();
        assert!(location().unwrap().ends_with("/checkpoints"));
        // The job was moved to another store since.
        reported("s3://bucket/run");
        assert_eq!(location().as_deref(), Some("s3://bucket/run"));

        let report = SavedReport::read(run.path()).unwrap().unwrap();
        let invalidated = report.status.invalidated_checkpoints;
        let expected = Rollback {
            generation: Generation(3),
            before: Step(70),
            suspect_from: None,
            skip: None,
        };
        assert_eq!(rollbacks(&invalidated), [expected]);

        // As of version 0.1.
        let old = r#"{"status": {"outcome": {"kind": "failed", "reason": "lost"}, "spending": {"hours": 0.5},
            "divergences": [{"generation": 2, "rollback": null}]}, "events": [], "recipe_toml": ""}"#;
        fs::write(run.path().join("report.json"), old).unwrap();
        assert_eq!(SavedReport::read(run.path()).unwrap().unwrap().status.spending.hours, 0.5);
        // Without it, a checkpoint that was taken back would be the newest.
        fs::write(run.path().join("report.json"), "{\"status\": {").unwrap();
        let problem = SavedReport::read(run.path()).unwrap_err().message;
        assert!(problem.contains("report.json: is damaged (EOF"), "{problem}");
    }

    #[test]
    fn a_store_that_is_named_is_never_replaced_by_the_folder_of_a_run() {
        let sample = samples::run();
        let target =
            CoordinatorFlags { store: Some(sample.location()), ..CoordinatorFlags::default() };
        let flags = FolderFlags { dir: None, target };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let found = runtime.block_on(flags.find()).unwrap();
        assert_eq!(found.location, sample.location());
    }

    #[test]
    fn a_checkpoint_that_turns_out_to_be_damaged_is_skipped_unless_it_was_named() {
        let sample = samples::run();
        let folder = FoundFolder::at("");
        let newest = pick(&sample.store, &folder, None).unwrap().name();
        let shards = fs::read_dir(sample.folder.path().join(&newest)).unwrap();
        let mut shards = shards.map(|entry| entry.unwrap().path());
        let shard = shards.find(|path| path.display().to_string().contains("shard")).unwrap();
        let mut bytes = fs::read(&shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&shard, bytes).unwrap();
        let work = |manifest: &Manifest| {
            let verified = sample.store.verify(&[manifest], NonZeroUsize::MIN, &|_| {}).remove(0);
            verified.map_err(store_failure)
        };

        let named = with_picked(&sample.store, &folder, Some(&newest), work).unwrap_err();
        assert!(named.message.contains("does not match its digest"), "{named}");
        let (other, damaged, ()) = with_picked(&sample.store, &folder, None, work).unwrap();
        assert!(other.name() < newest && damaged.len() == 1, "{damaged:?}");
        assert!(damaged[0].starts_with(&newest) && damaged[0].contains("digest"), "{damaged:?}");
    }

    #[test]
    fn a_checkpoint_that_a_rollback_invalidated_is_not_the_newest() {
        let sample = samples::run();
        let newest = |rollbacks: Vec<Rollback>| {
            let folder = FoundFolder { rollbacks, ..FoundFolder::at("") };
            pick(&sample.store, &folder, None).unwrap().step
        };
        assert_eq!(newest(vec![]), Step(110));
        let rollback = Rollback {
            generation: Generation(3),
            before: Step(70),
            suspect_from: None,
            skip: None,
        };
        assert_eq!(newest(vec![rollback]), Step(66));
    }

    const NAME: &str = "step-0000000440-gen-000003";

    fn parsed(typed: &str, bare: BareWord) -> (Option<String>, Option<String>) {
        let Reference { location, name } = Reference::parse(typed, bare);
        (location, name)
    }

    #[test]
    fn a_reference_is_a_name_or_a_location_or_both() {
        let both = |location: &str| (Some(location.to_owned()), Some(NAME.to_owned()));
        for bare in [BareWord::Name, BareWord::Location] {
            assert_eq!(parsed(NAME, bare), (None, Some(NAME.to_owned())));
            assert_eq!(parsed(&format!("runs/a/{NAME}"), bare), both("runs/a"));
            assert_eq!(parsed(&format!("s3://b/p/{NAME}/"), bare), both("s3://b/p"));
            assert_eq!(parsed(&format!("/{NAME}"), bare), both("/"));
            assert_eq!(parsed("s3://b/p/", bare), (Some("s3://b/p/".to_owned()), None));
        }
        assert_eq!(parsed("step-440", BareWord::Name), (None, Some("step-440".to_owned())));
        assert_eq!(parsed("folder/", BareWord::Name), (Some("folder/".to_owned()), None));
        assert_eq!(parsed("folder", BareWord::Location), (Some("folder".to_owned()), None));
    }

    #[test]
    fn the_nearest_name_contains_the_typed_text_or_differs_least() {
        let entry = |generation, step| {
            let id = baton_checkpoint::SaveId {
                generation: baton_job::Generation(generation),
                step: baton_recipe::Step(step),
            };
            Entry { name: id.name(), id, state: EntryState::Unfinished }
        };
        let entries = [entry(3, 440), entry(2, 88)];
        assert_eq!(nearest(&entries, "440"), Some(NAME));
        assert_eq!(nearest(&entries, "gen-000002"), Some(entries[1].name.as_str()));
        assert_eq!(nearest(&entries, "step-0000000440-gen-000004"), Some(NAME));
        assert_eq!(nearest(&[], "440"), None);
    }
}
