//! `baton checkpoint rm`

use baton_checkpoint::{Entry, Kept, Manifest, Store, Verdict, judge};
use baton_job::{exit::Failure, message::Rollback};

use super::{
    folder::{Folder, about, named, with_store},
    keeping::{listed, rollbacks},
};
use crate::{failure::bad_input, human, json, output};

/// Remove checkpoints for good
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint rm step-0000000440-gen-000003
  baton checkpoint rm step-0000000440-gen-000003 step-0000000480-gen-000003 --yes

The newest whole checkpoint, the best one, one of a newer Baton, and a save that may be in progress are \
refused without --force; then nothing is removed. Where there is no terminal to ask on, --yes is needed. A manifest \
goes first: what is half removed is no checkpoint.

A job that uses the folder meanwhile trains on, for its state is in its memory, and saves as before: the \
fence keeps out older generations, not you. What is lost is a place to go back to. A rank that reads the \
checkpoint at that very moment fails, and its job takes the next older one.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Which ones
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    /// Remove also what a job would go on from, or may be writing
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let (location, status) = args.folder.find_with_status().await?;
    let rollbacks = rollbacks(status.as_ref());
    let removed = with_store(location, move |store| {
        let chosen = choose(store, &args.names, args.force, &rollbacks)?;
        if !args.yes {
            ask(&chosen, store.location())?;
        }
        remove(store, &chosen)
    })
    .await?;
    output::line(if args.json { json::line(&removed) } else { text(&removed) });
    Ok(())
}

/// What is to be removed, once it is sure that all of it may be.
fn choose(
    store: &Store,
    names: &[String],
    force: bool,
    rollbacks: &[Rollback],
) -> Result<Vec<Entry>, Failure> {
    let (entries, mut retention) = listed(store, rollbacks)?;
    // Whatever the recipe says of it.
    retention.keep_best = true;
    let verdicts = judge(&entries, &retention);
    for name in names {
        named(&entries, name, store.location())?;
    }
    let judged = entries.into_iter().zip(verdicts);
    let chosen: Vec<(Entry, Verdict)> =
        judged.filter(|(entry, _)| names.contains(&entry.name)).collect();
    let dear = chosen.iter().find_map(|(entry, verdict)| Some((entry, why_dear(verdict)?)));
    match dear {
        Some((entry, why)) if !force => {
            Err(bad_input(format!("{} is {why}: --force removes it all the same", entry.name)))
        }
        _ => Ok(chosen.into_iter().map(|(entry, _)| entry).collect()),
    }
}

/// Why nobody should remove it lightly.
fn why_dear(verdict: &Verdict) -> Option<&'static str> {
    let Verdict::Kept(reasons) = verdict else { return None };
    reasons.iter().find_map(|reason| match reason {
        Kept::Newest => Some("the newest whole checkpoint, from which a job goes on"),
        Kept::Newer => Some("written by a newer Baton, which a job may go on with"),
        Kept::Best => Some("the best checkpoint of its run"),
        Kept::InProgress => Some("perhaps being written at this moment"),
        Kept::Last(_) | Kept::EveryEpochs(_) | Kept::OutsideRun | Kept::Damaged => None,
    })
}

fn ask(chosen: &[Entry], location: &str) -> Result<(), Failure> {
    let manifests = chosen.iter().filter_map(|entry| entry.state.manifest());
    let bytes = manifests.map(Manifest::bytes).fold(0, u64::saturating_add);
    let what = human::count(chosen.len() as u64, "checkpoint");
    let size = if bytes == 0 { String::new() } else { format!(" ({})", human::bytes(bytes)) };
    match output::confirm(format_args!("remove {what}{size} of {location} for good?")) {
        Some(true) => Ok(()),
        Some(false) => Err(bad_input("nothing is removed")),
        None => Err(bad_input("there is no terminal to ask on: --yes removes without asking")),
    }
}

fn remove(store: &Store, chosen: &[Entry]) -> Result<json::RemovedCheckpoints, Failure> {
    let mut gone = json::RemovedCheckpoints { removed: Vec::new(), freed_bytes: 0 };
    for entry in chosen {
        gone.freed_bytes += store.discard(entry.id).map_err(about)?;
        gone.removed.push(entry.name.clone());
    }
    Ok(gone)
}

fn text(gone: &json::RemovedCheckpoints) -> String {
    let what = human::count(gone.removed.len() as u64, "checkpoint");
    format!("removed {what}, {} freed: {}", human::bytes(gone.freed_bytes), gone.removed.join(", "))
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::commands::checkpoint::samples;

    #[test]
    fn removing_tells_what_is_gone() {
        let sample = samples::run();
        let names = ["step-0000000088-gen-000002", "step-0000000066-gen-000002"].map(String::from);
        let chosen = choose(&sample.store, &names, false, &[]).unwrap();
        let gone = remove(&sample.store, &chosen).unwrap();
        let left = sample.store.list().unwrap();
        assert!(!left.iter().any(|entry| names.contains(&entry.name)));
        assert_eq!(gone.removed, names);
        // A manifest's length depends on the numbers in it.
        let gone = json::RemovedCheckpoints { freed_bytes: 12_345, ..gone };
        assert_snapshot!(format!("{}\n{}", text(&gone), json::line(&gone)));
    }

    #[test]
    fn what_a_job_goes_on_from_is_removed_only_by_force() {
        let sample = samples::run();
        let refused = |name: &str| {
            let names = [name.to_owned(), "step-0000000088-gen-000002".to_owned()];
            assert!(choose(&sample.store, &names, true, &[]).is_ok());
            choose(&sample.store, &names, false, &[]).unwrap_err().message
        };
        assert_snapshot!(
            [
                refused("step-0000000110-gen-000002"),
                refused("step-0000000044-gen-000002"),
                refused("step-0000000121-gen-000002"),
            ]
            .join("\n")
        );
        assert_eq!(sample.store.list().unwrap().len(), 9, "nothing is removed");
    }

    #[test]
    fn a_mistyped_name_removes_nothing_and_is_put_right() {
        let sample = samples::run();
        let names = ["step-0000000088-gen-000002", "step-88"].map(String::from);
        let refused = choose(&sample.store, &names, true, &[]).unwrap_err().message;
        assert!(refused.contains("is step-0000000088-gen-000002 meant?"), "{refused}");
    }
}
