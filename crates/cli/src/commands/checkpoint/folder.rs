//! Finds the folder that holds a job's checkpoints, and the checkpoint that is meant.

use std::path::Path;

use baton_checkpoint::{Entry, EntryState, Error, Manifest, SaveId, Store};
use baton_job::exit::Failure;
use baton_proto::v1::GetStatusResponse;

use crate::{
    connect::{self, Coordinator, Where},
    failure::{bad_input, failed},
};

/// Flags of every command that reads checkpoints.
#[derive(Debug, clap::Args)]
pub(super) struct Folder {
    /// Where the checkpoints lie, a folder or s3://BUCKET/PREFIX [default: that of the job, else of
    /// the newest run]
    #[arg(long, value_name = "LOCATION")]
    pub(super) dir: Option<String>,
    #[command(flatten)]
    pub(super) place: Where,
}

impl Folder {
    /// The folder: as named, else as a coordinator says, else in the run folder, else in the newest
    /// run's.
    pub(super) async fn find(&self) -> Result<String, Failure> {
        Ok(self.find_with_status().await?.0)
    }

    /// The folder, and what the coordinator said if it was asked.
    pub(super) async fn find_with_status(
        &self,
    ) -> Result<(String, Option<GetStatusResponse>), Failure> {
        if let Some(dir) = &self.dir {
            return Ok((dir.clone(), None));
        }
        if let Some(status) = self.ask().await {
            return Ok((status.checkpoint_location.clone(), Some(status)));
        }
        let in_run = match &self.place.run_dir {
            Some(run_dir) => run_dir.join(CHECKPOINTS),
            None => connect::newest_below(Path::new(connect::RUNS), CHECKPOINTS)
                .unwrap_or_else(|| Path::new(connect::RUNS).join("*").join(CHECKPOINTS)),
        };
        if in_run.is_dir() {
            return Ok((in_run.display().to_string(), None));
        }
        Err(failed(format!(
            "no coordinator answers, and there is no {}: name the folder of the checkpoints with --dir",
            in_run.display()
        )))
    }

    async fn ask(&self) -> Option<GetStatusResponse> {
        let status = Coordinator::find(&self.place).ok()?.status().await.ok()?;
        Some(status).filter(|status| !status.checkpoint_location.is_empty())
    }
}

/// Where a run folder has its checkpoints unless the recipe says otherwise.
const CHECKPOINTS: &str = "checkpoints";

/// Works on the store at `location`, away from the async threads: its calls block.
pub(super) async fn with_store<T: Send + 'static>(
    location: String,
    work: impl FnOnce(&Store) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    blocking(move || work(&open(&location)?)).await
}

/// Does what blocks, away from the async threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(failed(format!("reading checkpoints: {error}; this is a bug"))),
    }
}

/// The store at `location`, which must be there.
pub(super) fn open(location: &str) -> Result<Store, Failure> {
    Store::open_existing(location).map_err(about)
}

/// What is wrong, and whether another try could help.
pub(super) fn about(error: Error) -> Failure {
    let message = error.to_string();
    match error {
        Error::Missing { .. }
        | Error::Damaged { .. }
        | Error::Exists(_)
        | Error::NewerVersion { .. } => bad_input(message),
        _ => failed(message),
    }
}

/// The one of `entries` that is called `name`.
pub(super) fn named<'a>(
    entries: &'a [Entry],
    name: &str,
    location: &str,
) -> Result<&'a Entry, Failure> {
    entries.iter().find(|entry| entry.name == name).ok_or_else(|| {
        let meant = match nearest(entries, name) {
            Some(meant) => format!(": is {meant} meant?"),
            None => String::new(),
        };
        bad_input(format!(
            "there is no checkpoint {name} in {location}{meant} (`baton checkpoint ls --dir {location}` \
             lists what is there)"
        ))
    })
}

/// The name that was hardly mistyped: one that holds what was typed, else the least different.
fn nearest<'a>(entries: &'a [Entry], typed: &str) -> Option<&'a str> {
    let distance = |entry: &&Entry| {
        let holds = !typed.is_empty() && entry.name.contains(typed);
        (!holds, strsim::damerau_levenshtein(&entry.name, typed))
    };
    entries.iter().min_by_key(distance).map(|entry| entry.name.as_str())
}

/// What the entry holds, if it is whole.
pub(super) fn held(entry: &Entry) -> Result<&Manifest, Failure> {
    let name = &entry.name;
    match &entry.state {
        EntryState::Whole(manifest) => Ok(manifest),
        EntryState::Damaged(problem) => {
            Err(bad_input(format!("checkpoint {name} is damaged: {problem}; take another one")))
        }
        EntryState::Newer(version) => {
            Err(about(Error::NewerVersion { name: name.clone(), version: *version }))
        }
        EntryState::Unfinished => {
            Err(bad_input(format!("the save of {name} was never finished; take another one")))
        }
    }
}

/// The checkpoint called `name`, or the newest whole one; one of a newer Baton is not passed over.
pub(super) fn pick(store: &Store, name: Option<&str>) -> Result<Manifest, Failure> {
    let entries = store.list().map_err(about)?;
    match name {
        Some(name) => held(named(&entries, name, store.location())?).cloned(),
        None => {
            let is_newest =
                |state: &EntryState| matches!(state, EntryState::Whole(_) | EntryState::Newer(_));
            let newest = entries.iter().find(|entry| is_newest(&entry.state));
            held(newest.ok_or_else(|| none_whole(store.location()))?).cloned()
        }
    }
}

/// There is nothing to take the newest of.
pub(super) fn none_whole(location: &str) -> Failure {
    failed(format!("{location} holds no whole checkpoint"))
}

/// A checkpoint as typed: a name, or a location, or both with a slash between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reference {
    /// The folder or address, if it is told.
    pub(super) location: Option<String>,
    /// The name, if it is told.
    pub(super) name: Option<String>,
}

impl Reference {
    /// Where there is no slash, `bare` is what a word that is no checkpoint's name is taken for.
    pub(super) fn parse(typed: &str, bare: Bare) -> Self {
        let trimmed = typed.trim_end_matches('/');
        let is_name = |text: &str| SaveId::parse(text).is_some();
        match trimmed.rsplit_once('/') {
            Some((location, name)) if is_name(name) => {
                // A checkpoint in the root folder.
                let location = if location.is_empty() { "/" } else { location };
                Self { location: Some(location.to_owned()), name: Some(name.to_owned()) }
            }
            None if is_name(trimmed) || (bare == Bare::Name && trimmed == typed) => {
                Self { location: None, name: Some(trimmed.to_owned()) }
            }
            _ => Self { location: Some(typed.to_owned()), name: None },
        }
    }
}

/// What a word without a slash is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bare {
    /// A name, perhaps mistyped.
    Name,
    /// A folder.
    Location,
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "step-0000000440-gen-000003";

    fn parsed(typed: &str, bare: Bare) -> (Option<String>, Option<String>) {
        let Reference { location, name } = Reference::parse(typed, bare);
        (location, name)
    }

    #[test]
    fn a_reference_is_a_name_or_a_location_or_both() {
        let both = |location: &str| (Some(location.to_owned()), Some(NAME.to_owned()));
        for bare in [Bare::Name, Bare::Location] {
            assert_eq!(parsed(NAME, bare), (None, Some(NAME.to_owned())));
            assert_eq!(parsed(&format!("runs/a/{NAME}"), bare), both("runs/a"));
            assert_eq!(parsed(&format!("s3://b/p/{NAME}/"), bare), both("s3://b/p"));
            assert_eq!(parsed(&format!("/{NAME}"), bare), both("/"));
            assert_eq!(parsed("s3://b/p/", bare), (Some("s3://b/p/".to_owned()), None));
        }
        assert_eq!(parsed("step-440", Bare::Name), (None, Some("step-440".to_owned())));
        assert_eq!(parsed("folder/", Bare::Name), (Some("folder/".to_owned()), None));
        assert_eq!(parsed("folder", Bare::Location), (Some("folder".to_owned()), None));
    }

    #[test]
    fn the_nearest_name_holds_what_was_typed_or_differs_least() {
        let entry = |generation, step| {
            let id = SaveId {
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
