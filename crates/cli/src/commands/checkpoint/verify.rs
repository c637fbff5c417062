//! `baton checkpoint verify`

use std::num::NonZeroUsize;

use baton_checkpoint::{Entry, EntryState, Error, Manifest, Store, WRITTEN_BY_NEWER};
use baton_job::exit::Failure;

use super::folder::{FolderFlags, named, none_complete, store_failure, with_store};
use crate::{
    commands::{
        bar::{BYTES, bar},
        threads,
    },
    failure::bad_input,
    human, json,
};

/// Default maximum number of files read at the same time.
const DEFAULT_MAX_JOBS: usize = 8;

/// Read all files of checkpoints and compare them with their digests
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint verify                               all checkpoints
  baton checkpoint verify step-0000000440-gen-000003
  baton checkpoint verify --dir s3://bucket/job --jobs 4 --json

An unfinished save does not count as damaged, nor does a checkpoint that its job removes meanwhile. Exit codes: 0 no damage, 2 some are damaged, or written by a \
newer Baton and unreadable for this one.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: FolderFlags,
    /// Names of the checkpoints [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Number of files read at the same time [default: number of cores, at most 8]
    #[arg(long, value_name = "N", value_parser = threads)]
    jobs: Option<NonZeroUsize>,
    /// Print one JSON object per checkpoint
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let location = args.folder.find().await?.location;
    let (names, jobs) = (args.names, args.jobs.unwrap_or_else(default_jobs));
    let verified = with_store(location, move |store| verify(store, &names, jobs)).await?;
    verified.iter().for_each(|one| json::print(args.json, one, text));
    let all = human::count(verified.len() as u64, "checkpoint");
    let count = |state| verified.iter().filter(|one| one.state == state).count();
    match (count("damaged"), count("newer")) {
        (0, 0) => Ok(()),
        (0, newer) => {
            Err(bad_input(format!("{newer} of {all} {WRITTEN_BY_NEWER}: verify with that version")))
        }
        (damaged, _) => Err(bad_input(format!(
            "{damaged} of {all} damaged: jobs do not resume from these; `baton checkpoint rm --force NAME` removes one"
        ))),
    }
}

fn default_jobs() -> NonZeroUsize {
    let max = NonZeroUsize::MIN.saturating_add(DEFAULT_MAX_JOBS - 1);
    std::thread::available_parallelism().map_or(NonZeroUsize::MIN, |cores| cores.min(max))
}

fn verify(
    store: &Store,
    names: &[String],
    jobs: NonZeroUsize,
) -> Result<Vec<json::VerifiedCheckpoint>, Failure> {
    let mut entries = store.list().map_err(store_failure)?;
    if entries.is_empty() && names.is_empty() {
        return Err(none_complete(store.location()));
    }
    for name in names {
        named(&entries, name, store.location())?;
    }
    entries.retain(|entry| names.is_empty() || names.contains(&entry.name));
    let complete: Vec<&Manifest> =
        entries.iter().filter_map(|entry| entry.state.manifest()).collect();
    let bar = bar(
        BYTES,
        complete.iter().map(|manifest| manifest.all_bytes()).fold(0, u64::saturating_add),
    );
    let mut outcomes = store.verify(&complete, jobs, &|bytes| bar.inc(bytes)).into_iter();
    bar.finish_and_clear();
    entries.iter().map(|entry| finding(entry, || outcomes.next())).collect()
}

/// The result for one entry; `outcome` is called if the entry's files were read.
fn finding(
    entry: &Entry,
    outcome: impl FnOnce() -> Option<Result<(), Error>>,
) -> Result<json::VerifiedCheckpoint, Failure> {
    let (state, problem) = match &entry.state {
        EntryState::Unfinished => ("unfinished", None),
        EntryState::Damaged(problem) => ("damaged", Some(problem.clone())),
        EntryState::Newer(version) => ("newer", Some(version.to_string())),
        EntryState::Complete(_) => match outcome() {
            None | Some(Ok(())) => ("complete", None),
            Some(Err(Error::Damaged { problem, .. })) => ("damaged", Some(problem)),
            // By the job that writes the others.
            Some(Err(Error::Missing { .. })) => ("removed", None),
            // A file that cannot be read now may still be intact.
            Some(Err(error)) => return Err(store_failure(error)),
        },
    };
    let manifest = entry.state.manifest();
    Ok(json::VerifiedCheckpoint {
        name: entry.name.clone(),
        state,
        problem,
        files: manifest.map(|manifest| (manifest.shards.len() + manifest.frozen.len()) as u64),
        bytes: manifest.map(Manifest::all_bytes),
    })
}

fn text(verified: &json::VerifiedCheckpoint) -> String {
    let json::VerifiedCheckpoint { name, state, problem, files, bytes } = verified;
    match (problem, files.zip(*bytes)) {
        (Some(problem), _) if *state == "newer" => format!("{name}: {problem}"),
        (Some(problem), _) => format!("{name}: {state}: {problem}"),
        (None, _) if *state == "removed" => format!("{name}: was removed while it was read"),
        (None, Some((files, bytes))) => {
            let (bytes, files) = (human::bytes(bytes), human::count(files, "file"));
            format!("{name}: {state}: {bytes} in {files} match their digests")
        }
        (None, None) => format!("{name}: {state}: nothing to verify"),
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::commands::checkpoint::samples;

    #[test]
    fn every_checkpoint_is_verified_in_one_line() {
        let sample = samples::run();
        // A flipped bit does not change the file's size.
        let manifest = pick_step(&sample.store, 66);
        let shard = sample.folder.path().join(manifest.name()).join(&manifest.shards[0].file);
        let mut bytes = std::fs::read(&shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(shard, bytes).unwrap();
        let verified = verify(&sample.store, &[], default_jobs()).unwrap();
        let lines: Vec<String> = verified.iter().map(text).collect();
        assert_snapshot!(lines.join("\n"));
        let lines: Vec<String> = verified.iter().map(json::line).collect();
        assert_snapshot!("as_json", lines.join("\n"));
    }

    fn pick_step(store: &Store, step: u64) -> Manifest {
        let entries = store.list().unwrap();
        let mut complete = entries.iter().filter_map(|entry| entry.state.manifest());
        complete.find(|manifest| manifest.step.0 == step).unwrap().clone()
    }

    #[test]
    fn only_the_named_checkpoints_are_read_and_an_unknown_name_is_rejected() {
        let sample = samples::run();
        let store = &sample.store;
        let names = ["step-0000000088-gen-000002".to_owned()];
        assert_eq!(verify(store, &names, default_jobs()).unwrap().len(), 1);
        let names = [names[0].clone(), "step-0000000089-gen-000002".to_owned()];
        let error = verify(store, &names, default_jobs()).unwrap_err().message;
        assert!(error.contains("did you mean step-0000000088-gen-000002?"), "{error}");
    }
}
