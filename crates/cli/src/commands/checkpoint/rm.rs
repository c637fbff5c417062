//! `baton checkpoint rm`

use baton_checkpoint::{Entry, KeepReason, Manifest, PruneDecision, Store, prune_decisions};
use baton_job::{Generation, exit::Failure, message::Rollback};

use super::{
    folder::{FolderFlags, FoundFolder, named, store_failure, with_store},
    keeping::listed,
};
use crate::{failure::bad_input, human, json, output};

/// Remove checkpoints permanently
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint rm step-0000000440-gen-000003
  baton checkpoint rm step-0000000440-gen-000003 step-0000000480-gen-000003 --yes

The newest complete checkpoint, the best one, one of a newer Baton, and a save that may be in progress are removed \
only with --force; without it, nothing is removed. Without a terminal, --yes is needed. A checkpoint's manifest is \
removed first, so a partly removed checkpoint is never used.

A job that uses the folder continues to train and to save, because its state is in memory and the fence does not \
affect this command. But it can no longer roll back to a removed checkpoint. A rank that is reading the checkpoint at \
that time fails, and its job restores the next older one.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: FolderFlags,
    /// Names of the checkpoints
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// Do not ask for confirmation
    #[arg(long, short)]
    yes: bool,
    /// Also remove checkpoints from which a job would resume, or that may be being written
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let FoundFolder { location, rollbacks, .. } = args.folder.find().await?;
    let removed = with_store(location, move |store| {
        let chosen = choose(store, &args.names, args.force, &rollbacks)?;
        if !args.yes {
            confirm(&chosen, store.location())?;
        }
        remove(store, &chosen)
    })
    .await?;
    json::print(args.json, &removed, text);
    Ok(())
}

/// The entries to remove, after checking that all of them may be removed.
fn choose(
    store: &Store,
    names: &[String],
    force: bool,
    rollbacks: &[Rollback],
) -> Result<Vec<Entry>, Failure> {
    let (entries, mut retention) = listed(store, rollbacks)?;
    // The best checkpoint is protected even if the recipe does not keep it.
    retention.keep_best = true;
    let is_of_run = |entry: &Entry| entry.id.generation >= retention.restore.not_before;
    if !entries.iter().any(|entry| entry.state.manifest().is_some() && is_of_run(entry)) {
        // The run before goes on if this one, begun with --resume, fails before it has saved anything.
        retention.restore.not_before = Generation(0);
    }
    let decisions = prune_decisions(&entries, &retention);
    for name in names {
        named(&entries, name, store.location())?;
    }
    let decided = entries.into_iter().zip(decisions);
    let chosen: Vec<(Entry, PruneDecision)> =
        decided.filter(|(entry, _)| names.contains(&entry.name)).collect();
    let protected =
        chosen.iter().find_map(|(entry, decision)| Some((entry, protection(decision)?)));
    match protected {
        Some((entry, reason)) if !force => {
            Err(bad_input(format!("{} is {reason}: add --force to remove it", entry.name)))
        }
        _ => Ok(chosen.into_iter().map(|(entry, _)| entry).collect()),
    }
}

/// Why a checkpoint is removed only with `--force`, if it is.
fn protection(decision: &PruneDecision) -> Option<&'static str> {
    let PruneDecision::Kept(reasons) = decision else { return None };
    reasons.iter().find_map(|reason| match reason {
        KeepReason::Newest => Some("the newest complete checkpoint, from which a job resumes"),
        KeepReason::Newer => {
            Some("written by a newer Baton, and a job of that version may resume from it")
        }
        KeepReason::Best => Some("the best checkpoint of its run"),
        KeepReason::InProgress => Some("possibly still being written"),
        KeepReason::Guard => Some("what training goes back to if it has diverged"),
        KeepReason::Last(_)
        | KeepReason::EveryEpochs(_)
        | KeepReason::OutsideRun
        | KeepReason::Damaged => None,
    })
}

fn confirm(chosen: &[Entry], location: &str) -> Result<(), Failure> {
    let manifests = chosen.iter().filter_map(|entry| entry.state.manifest());
    let bytes = manifests.map(Manifest::bytes).fold(0, u64::saturating_add);
    let count = human::count(chosen.len() as u64, "checkpoint");
    let size = if bytes == 0 { String::new() } else { format!(" ({})", human::bytes(bytes)) };
    match output::confirm(format_args!("permanently remove {count}{size} of {location}?")) {
        Some(true) => Ok(()),
        Some(false) => Err(bad_input("nothing was removed")),
        None => Err(bad_input("cannot ask for confirmation without a terminal: add --yes")),
    }
}

fn remove(store: &Store, chosen: &[Entry]) -> Result<json::RemovedCheckpoints, Failure> {
    let mut result = json::RemovedCheckpoints {
        location: store.location().to_owned(),
        removed: Vec::new(),
        freed_bytes: 0,
    };
    for entry in chosen {
        result.freed_bytes += store.discard(entry.id).map_err(store_failure)?;
        result.removed.push(entry.name.clone());
    }
    Ok(result)
}

fn text(result: &json::RemovedCheckpoints) -> String {
    let count = human::count(result.removed.len() as u64, "checkpoint");
    let (bytes, names) = (human::bytes(result.freed_bytes), result.removed.join(", "));
    format!("removed {count} from {}, {bytes} freed: {names}", result.location)
}

#[cfg(test)]
mod tests {
    use baton_checkpoint::Claimant;
    use baton_job::JobId;
    use insta::assert_snapshot;

    use super::*;
    use crate::commands::checkpoint::samples;

    #[test]
    fn the_removed_checkpoints_are_listed() {
        let sample = samples::run();
        let names = ["step-0000000088-gen-000002", "step-0000000066-gen-000002"].map(String::from);
        let chosen = choose(&sample.store, &names, false, &[]).unwrap();
        let result = remove(&sample.store, &chosen).unwrap();
        let left = sample.store.list().unwrap();
        assert!(!left.iter().any(|entry| names.contains(&entry.name)));
        assert_eq!(result.removed, names);
        assert_eq!(result.location, sample.store.location());
        // A manifest's length depends on the numbers in it.
        let location = "[folder]".to_owned();
        let result = json::RemovedCheckpoints { location, freed_bytes: 12_345, ..result };
        assert_snapshot!(format!("{}\n{}", text(&result), json::line(&result)));
    }

    #[test]
    fn a_protected_checkpoint_is_removed_only_with_force() {
        let sample = samples::run();
        let rejected = |name: &str| {
            let names = [name.to_owned(), "step-0000000088-gen-000002".to_owned()];
            assert!(choose(&sample.store, &names, true, &[]).is_ok());
            choose(&sample.store, &names, false, &[]).unwrap_err().message
        };
        assert_snapshot!(
            [
                rejected("step-0000000110-gen-000002"),
                rejected("step-0000000044-gen-000002"),
                rejected("step-0000000121-gen-000002"),
            ]
            .join("\n")
        );
        assert_eq!(sample.store.list().unwrap().len(), 9, "nothing is removed");
    }

    #[test]
    fn the_newest_checkpoint_is_protected_while_a_later_run_has_saved_nothing() {
        let sample = samples::run();
        let claimant = Claimant {
            owner: "later".to_owned(),
            job: JobId::default(),
            name: String::new(),
            recipe: String::new(),
            host: String::new(),
            run_dir: String::new(),
            not_before: Some(Generation(7)),
        };
        sample.store.claim(Generation(7), &claimant).unwrap();
        let names = ["step-0000000110-gen-000002".to_owned()];
        let failure = choose(&sample.store, &names, false, &[]).unwrap_err();
        assert!(failure.message.contains("the newest complete checkpoint"), "{failure}");
    }

    #[test]
    fn a_mistyped_name_removes_nothing_and_is_corrected() {
        let sample = samples::run();
        let names = ["step-0000000088-gen-000002", "step-88"].map(String::from);
        let error = choose(&sample.store, &names, true, &[]).unwrap_err().message;
        assert!(error.contains("did you mean step-0000000088-gen-000002?"), "{error}");
    }
}
