//! `baton checkpoint verify`

use std::num::NonZeroUsize;

use baton_checkpoint::{Entry, EntryState, Error, Manifest, Store, WRITTEN_BY_NEWER};
use baton_job::exit::Failure;

use super::{
    bar::bar,
    folder::{Folder, about, named, none_whole, with_store},
};
use crate::{failure::bad_input, human, json, output};

/// Most files that are read at once unless told otherwise.
const MOST_JOBS: usize = 8;

/// Read checkpoints whole and compare every file with its digest
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint verify                               all of them
  baton checkpoint verify step-0000000440-gen-000003
  baton checkpoint verify --dir s3://bucket/job --jobs 4 --json

A save that was never finished is no damage. Exit codes: 0 all are whole, 2 some are damaged, or of a \
newer Baton that alone can read them.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Which ones [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Files that are read at once [default: cores, 8 at most]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Print one JSON object per checkpoint
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let location = args.folder.find().await?;
    let (names, jobs) = (args.names, args.jobs.unwrap_or_else(cores));
    let verified = with_store(location, move |store| verify(store, &names, jobs)).await?;
    for one in &verified {
        if args.json {
            output::line(json::line(one));
        } else {
            output::line(text(one));
        }
    }
    let all = human::count(verified.len() as u64, "checkpoint");
    let count = |state| verified.iter().filter(|one| one.state == state).count();
    match (count("damaged"), count("newer")) {
        (0, 0) => Ok(()),
        (0, newer) => {
            Err(bad_input(format!("{newer} of {all} {WRITTEN_BY_NEWER}: verify with that version")))
        }
        (damaged, _) => Err(bad_input(format!(
            "{damaged} of {all} damaged: no job resumes from such; `baton checkpoint rm NAME` removes one"
        ))),
    }
}

fn cores() -> NonZeroUsize {
    let most = NonZeroUsize::MIN.saturating_add(MOST_JOBS - 1);
    std::thread::available_parallelism().map_or(NonZeroUsize::MIN, |cores| cores.min(most))
}

fn verify(
    store: &Store,
    names: &[String],
    jobs: NonZeroUsize,
) -> Result<Vec<json::VerifiedCheckpoint>, Failure> {
    let mut entries = store.list().map_err(about)?;
    if entries.is_empty() && names.is_empty() {
        return Err(none_whole(store.location()));
    }
    for name in names {
        named(&entries, name, store.location())?;
    }
    entries.retain(|entry| names.is_empty() || names.contains(&entry.name));
    let whole: Vec<&Manifest> = entries.iter().filter_map(|entry| entry.state.manifest()).collect();
    let bar = bar(whole.iter().map(|manifest| manifest.all_bytes()).fold(0, u64::saturating_add));
    let mut outcomes = store.prove(&whole, jobs, &|bytes| bar.inc(bytes)).into_iter();
    bar.finish_and_clear();
    entries.iter().map(|entry| finding(entry, || outcomes.next())).collect()
}

/// What was found; `outcome` is asked where the files had to be read.
fn finding(
    entry: &Entry,
    outcome: impl FnOnce() -> Option<Result<(), Error>>,
) -> Result<json::VerifiedCheckpoint, Failure> {
    let (state, problem) = match &entry.state {
        EntryState::Unfinished => ("unfinished", None),
        EntryState::Damaged(problem) => ("damaged", Some(problem.clone())),
        EntryState::Newer(version) => ("newer", Some(version.to_string())),
        EntryState::Whole(_) => match outcome() {
            None | Some(Ok(())) => ("whole", None),
            Some(Err(Error::Damaged { problem, .. })) => ("damaged", Some(problem)),
            // That a file cannot be read now says nothing about it.
            Some(Err(error)) => return Err(about(error)),
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
    fn every_checkpoint_is_judged_in_one_line() {
        let sample = samples::run();
        // A flipped bit that no size tells of.
        let manifest = pick_step(&sample.store, 66);
        let shard = sample.folder.path().join(manifest.name()).join(&manifest.shards[0].file);
        let mut bytes = std::fs::read(&shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(shard, bytes).unwrap();
        let verified = verify(&sample.store, &[], cores()).unwrap();
        let lines: Vec<String> = verified.iter().map(text).collect();
        assert_snapshot!(lines.join("\n"));
        let lines: Vec<String> = verified.iter().map(json::line).collect();
        assert_snapshot!("as_json", lines.join("\n"));
    }

    fn pick_step(store: &Store, step: u64) -> Manifest {
        let entries = store.list().unwrap();
        let mut whole = entries.iter().filter_map(|entry| entry.state.manifest());
        whole.find(|manifest| manifest.step.0 == step).unwrap().clone()
    }

    #[test]
    fn only_the_named_ones_are_read_and_an_unknown_one_is_told() {
        let sample = samples::run();
        let store = &sample.store;
        let names = ["step-0000000088-gen-000002".to_owned()];
        assert_eq!(verify(store, &names, cores()).unwrap().len(), 1);
        let names = [names[0].clone(), "step-0000000089-gen-000002".to_owned()];
        let refused = verify(store, &names, cores()).unwrap_err().message;
        assert!(refused.contains("is step-0000000088-gen-000002 meant?"), "{refused}");
    }
}
