//! `baton checkpoint ls`

use baton_checkpoint::{Entry, EntryState};
use baton_job::exit::Failure;
use baton_proto::v1::CheckpointEntry;

use super::folder::{Folder, with_store};
use crate::{connect::Coordinator, json, output, render};

/// List the checkpoints, newest first
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint ls
  baton checkpoint ls --dir /mnt/shared/job/checkpoints --json")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let entries = entries(&args.folder).await?;
    if args.json {
        for entry in &entries {
            output::line(json::line(&json::ListedCheckpoint::from(entry)));
        }
    } else {
        output::line(render::checkpoints(&entries));
    }
    Ok(())
}

async fn entries(folder: &Folder) -> Result<Vec<CheckpointEntry>, Failure> {
    if folder.dir.is_none()
        && let Ok(mut coordinator) = Coordinator::find(&folder.place)
        && let Ok(entries) = coordinator.checkpoints().await
    {
        return Ok(entries);
    }
    let entries = with_store(folder.find().await?, |store| store.list()).await?;
    Ok(entries.into_iter().map(wire).collect())
}

fn wire(Entry { name, state, .. }: Entry) -> CheckpointEntry {
    match state {
        EntryState::Whole(manifest) => CheckpointEntry {
            name,
            whole: true,
            damage: String::new(),
            epoch: manifest.progress.epoch.0,
            created_unix_seconds: manifest.created_unix_seconds,
            checkpoint: Some(manifest.to_commit().into()),
        },
        EntryState::Damaged(damage) => CheckpointEntry { name, damage, ..Default::default() },
        EntryState::Unfinished => CheckpointEntry {
            name,
            damage: "its save was never finished".to_owned(),
            ..Default::default()
        },
    }
}
