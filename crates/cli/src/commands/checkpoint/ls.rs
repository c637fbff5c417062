//! `baton checkpoint ls`

use std::time::{SystemTime, UNIX_EPOCH};

use baton_checkpoint::{
    Entry, EntryState, Kept, Manifest, Removed, UNFINISHED, Verdict, WRITTEN_BY_NEWER,
};
use baton_job::exit::Failure;
use baton_proto::v1::{self, CheckpointEntry};
use baton_recipe::progress::Accuracy;
use comfy_table::{Table, presets};

use super::{
    folder::{Folder, with_store},
    keeping::{judged, rollbacks},
};
use crate::{connect::Coordinator, human, json, output, render};

/// List the checkpoints, newest first, and why each is kept
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint ls
  baton checkpoint ls --dir /mnt/shared/job/checkpoints --json
  baton checkpoint ls --dir s3://bucket/job

METRIC is that of exactly these weights, if they were evaluated; \"EMA\" marks that of the averaged \
weights where it is the better one. KEPT BECAUSE is what the next save of the same run decides by, after \
the recipe of the newest checkpoint: checkpoint.keep_last, keep_best, keep_every_epochs. Checkpoints of \
another job are outside this run, and damaged ones are left for you; `baton checkpoint rm` removes them.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let listed = list(&args.folder).await?;
    if args.json {
        for checkpoint in &listed {
            output::line(json::line(checkpoint));
        }
    } else {
        output::line(text(&listed, now));
    }
    Ok(())
}

async fn list(folder: &Folder) -> Result<Vec<json::ListedCheckpoint>, Failure> {
    let (location, status) = folder.find_with_status().await?;
    let rollbacks = rollbacks(status.as_ref());
    let judged = with_store(location, move |store| judged(store, &rollbacks)).await;
    match (judged, status) {
        (Ok(judged), _) => Ok(judged.iter().map(|(entry, verdict)| row(entry, verdict)).collect()),
        // The folder may lie on the coordinator's machine alone.
        (Err(unreachable), Some(_)) => {
            let entries = match Coordinator::find(&folder.place) {
                Ok(mut coordinator) => coordinator.checkpoints().await,
                Err(_) => return Err(unreachable),
            };
            let entries = entries.map_err(|_| unreachable)?;
            Ok(entries.iter().map(json::ListedCheckpoint::from).collect())
        }
        (Err(error), None) => Err(error),
    }
}

fn row(entry: &Entry, verdict: &Verdict) -> json::ListedCheckpoint {
    let state = match &entry.state {
        EntryState::Whole(_) => "whole",
        EntryState::Damaged(_) => "damaged",
        EntryState::Newer(_) => "newer",
        EntryState::Unfinished => "unfinished",
    };
    let manifest = entry.state.manifest();
    let (kept, removed) = match verdict {
        Verdict::Kept(reasons) => (reasons.as_slice(), None),
        Verdict::Removed(reason) => ([].as_slice(), Some(*reason)),
    };
    let accuracy = manifest.and_then(Manifest::accuracy);
    let ema = accuracy.and_then(|_| manifest?.progress.last_ema.as_ref());
    let told = |accuracy: &Accuracy| v1::Accuracy::from(accuracy.clone());
    let best = manifest.and_then(Manifest::best_accuracy);
    let mark = if best == accuracy { "" } else { " EMA" };
    let metric = best.map(|best| metric(&told(best)) + mark);
    let (accuracy, ema) = (accuracy.map(told), ema.map(told));
    json::ListedCheckpoint {
        name: entry.name.clone(),
        whole: manifest.is_some(),
        damage: entry.state.problem(),
        step: manifest.map(|manifest| manifest.step.0),
        epoch: manifest.map(|manifest| manifest.progress.epoch.0),
        top1: accuracy.as_ref().map(|accuracy| accuracy.top1),
        fit: accuracy.as_ref().and_then(|accuracy| accuracy.fit),
        bytes: manifest.map(Manifest::bytes),
        created_unix_seconds: manifest.map(|manifest| manifest.created_unix_seconds),
        state,
        generation: Some(entry.id.generation.0),
        ranks: manifest.map(|manifest| manifest.world_size),
        top5: accuracy.as_ref().map(|accuracy| accuracy.top5),
        metrics: accuracy.map(|accuracy| accuracy.named()).unwrap_or_default(),
        ema: ema.map(Into::into),
        kept_because: Some(kept.iter().map(|reason| kept_word(*reason)).collect()),
        removed_because: removed.map(removed_word),
        metric,
        verdict: Some(verdict.to_string()),
    }
}

/// All metrics but the loss.
fn metric(accuracy: &v1::Accuracy) -> String {
    let metrics = accuracy.named().into_iter().filter(|metric| metric.name != "loss");
    metrics.map(|metric| render::metric(&metric)).collect::<Vec<_>>().join(", ")
}

fn kept_word(reason: Kept) -> &'static str {
    match reason {
        Kept::Newest => "newest",
        Kept::Last(_) => "last",
        Kept::Best => "best",
        Kept::EveryEpochs(_) => "every_epochs",
        Kept::OutsideRun => "outside_run",
        Kept::Damaged => "damaged",
        Kept::Newer => "newer",
        Kept::InProgress => "in_progress",
    }
}

fn removed_word(reason: Removed) -> &'static str {
    match reason {
        Removed::NotAskedFor => "not_asked_for",
        Removed::Condemned => "condemned",
        Removed::DeadSave => "dead_save",
    }
}

impl From<&CheckpointEntry> for json::ListedCheckpoint {
    /// What a coordinator tells of a folder that only it can see.
    fn from(entry: &CheckpointEntry) -> Self {
        let checkpoint = entry.checkpoint.as_ref();
        let accuracy = checkpoint.and_then(|checkpoint| checkpoint.accuracy.as_ref());
        Self {
            name: entry.name.clone(),
            whole: entry.whole,
            damage: (!entry.whole).then(|| entry.damage.clone()),
            step: checkpoint.map(|checkpoint| checkpoint.step),
            epoch: checkpoint.map(|_| entry.epoch),
            top1: accuracy.map(|accuracy| accuracy.top1),
            fit: accuracy.and_then(|accuracy| accuracy.fit),
            bytes: checkpoint.map(|checkpoint| checkpoint.bytes),
            created_unix_seconds: checkpoint.map(|_| entry.created_unix_seconds),
            state: match entry.damage.as_str() {
                _ if entry.whole => "whole",
                UNFINISHED => "unfinished",
                problem if problem.starts_with(WRITTEN_BY_NEWER) => "newer",
                _ => "damaged",
            },
            generation: checkpoint.map(|checkpoint| checkpoint.generation),
            ranks: None,
            top5: accuracy.map(|accuracy| accuracy.top5),
            ema: None,
            kept_because: None,
            removed_because: None,
            metrics: accuracy.map(v1::Accuracy::named).unwrap_or_default(),
            metric: accuracy.map(metric),
            verdict: None,
        }
    }
}

/// For people, at this moment.
fn text(listed: &[json::ListedCheckpoint], now_unix_seconds: u64) -> String {
    if listed.is_empty() {
        return "no checkpoints yet".to_owned();
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "NAME",
        "STEP",
        "EPOCH",
        "METRIC",
        "SIZE",
        "AGE",
        "RANKS",
        "STATE",
        "KEPT BECAUSE",
    ]);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for checkpoint in listed {
        let age = checkpoint
            .created_unix_seconds
            .map(|created| human::duration(now_unix_seconds.saturating_sub(created) as f64));
        let state = match &checkpoint.damage {
            Some(problem) if checkpoint.state == "newer" => problem.clone(),
            Some(problem) if checkpoint.state == "damaged" => format!("damaged: {problem}"),
            _ => checkpoint.state.to_owned(),
        };
        table.add_row([
            checkpoint.name.clone(),
            or_dash(checkpoint.step.map(|step| step.to_string())),
            or_dash(checkpoint.epoch.map(|epoch| epoch.to_string())),
            or_dash(checkpoint.metric.clone()),
            or_dash(checkpoint.bytes.map(human::bytes)),
            or_dash(age),
            or_dash(checkpoint.ranks.map(|ranks| ranks.to_string())),
            state,
            or_dash(checkpoint.verdict.clone()),
        ]);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests;
