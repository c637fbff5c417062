//! `baton checkpoint ls`

use std::time::{SystemTime, UNIX_EPOCH};

use baton_checkpoint::{
    Entry, EntryState, KeepReason, Manifest, PruneDecision, RemovalReason, UNFINISHED,
    WRITTEN_BY_NEWER,
};
use baton_job::exit::Failure;
use baton_proto::v1::{self, CheckpointEntry};
use baton_recipe::progress::Accuracy;
use comfy_table::{Table, presets};

use super::{
    folder::{FolderFlags, FoundFolder, with_store},
    keeping::with_decisions,
};
use crate::{connect::Coordinator, human, json, output, render};

/// List the checkpoints, newest first, and why each is kept
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint ls
  baton checkpoint ls --dir /mnt/shared/job/checkpoints --json
  baton checkpoint ls --dir s3://bucket/job

METRIC is the evaluation of exactly these weights, if there was one; \"EMA\" marks the metric of the averaged \
weights if it is better. KEPT BECAUSE is the reason why the next save of the same run keeps the checkpoint, by the \
newest checkpoint's recipe: checkpoint.keep_last, keep_best, keep_every_epochs. Checkpoints of another job are \
outside this run, and damaged ones are never removed automatically; `baton checkpoint rm` removes them.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: FolderFlags,
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

async fn list(folder: &FolderFlags) -> Result<Vec<json::ListedCheckpoint>, Failure> {
    let FoundFolder { location, rollbacks, is_served, .. } = folder.find().await?;
    let with_decisions = with_store(location, move |store| with_decisions(store, &rollbacks)).await;
    match with_decisions {
        Ok(with_decisions) => {
            Ok(with_decisions.iter().map(|(entry, decision)| row(entry, decision)).collect())
        }
        // The folder may exist only on the coordinator's machine.
        Err(unreachable) if is_served => {
            let entries = match Coordinator::find(&folder.target) {
                Ok(mut coordinator) => coordinator.checkpoints().await,
                Err(_) => return Err(unreachable),
            };
            let entries = entries.map_err(|_| unreachable)?;
            Ok(entries.iter().map(json::ListedCheckpoint::from).collect())
        }
        Err(error) => Err(error),
    }
}

fn row(entry: &Entry, decision: &PruneDecision) -> json::ListedCheckpoint {
    let state = match &entry.state {
        EntryState::Complete(_) => "complete",
        EntryState::Damaged(_) => "damaged",
        EntryState::Newer(_) => "newer",
        EntryState::Unfinished => "unfinished",
    };
    let manifest = entry.state.manifest();
    let (kept, removed) = match decision {
        PruneDecision::Kept(reasons) => (reasons.as_slice(), None),
        PruneDecision::Removed(reason) => ([].as_slice(), Some(*reason)),
    };
    let accuracy = manifest.and_then(Manifest::accuracy);
    let ema = accuracy.and_then(|_| manifest?.progress.last_ema.as_ref());
    let to_wire = |accuracy: &Accuracy| v1::Accuracy::from(accuracy.clone());
    let best = manifest.and_then(Manifest::best_accuracy);
    let mark = if best == accuracy { "" } else { " EMA" };
    let metric = best.map(|best| metric(&to_wire(best)) + mark);
    let (accuracy, ema) = (accuracy.map(to_wire), ema.map(to_wire));
    json::ListedCheckpoint {
        name: entry.name.clone(),
        complete: manifest.is_some(),
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
        kept_because: Some(kept.iter().map(|reason| keep_reason_name(*reason)).collect()),
        removed_because: removed.map(removal_reason_name),
        metric,
        verdict: Some(decision.to_string()),
    }
}

/// All metrics but the loss.
fn metric(accuracy: &v1::Accuracy) -> String {
    let metrics = accuracy.named().into_iter().filter(|metric| metric.name != "loss");
    metrics.map(|metric| render::metric(&metric)).collect::<Vec<_>>().join(", ")
}

fn keep_reason_name(reason: KeepReason) -> &'static str {
    match reason {
        KeepReason::Newest => "newest",
        KeepReason::Last(_) => "last",
        KeepReason::Best => "best",
        KeepReason::Guard => "guard",
        KeepReason::EveryEpochs(_) => "every_epochs",
        KeepReason::OutsideRun => "outside_run",
        KeepReason::Damaged => "damaged",
        KeepReason::Newer => "newer",
        KeepReason::InProgress => "in_progress",
    }
}

fn removal_reason_name(reason: RemovalReason) -> &'static str {
    match reason {
        RemovalReason::NotAskedFor => "not_asked_for",
        RemovalReason::Invalidated => "invalidated",
        RemovalReason::DeadSave => "dead_save",
    }
}

impl From<&CheckpointEntry> for json::ListedCheckpoint {
    /// Converts what a coordinator reports about a folder that only it can read.
    fn from(entry: &CheckpointEntry) -> Self {
        let checkpoint = entry.checkpoint.as_ref();
        let accuracy = checkpoint.and_then(|checkpoint| checkpoint.accuracy.as_ref());
        Self {
            name: entry.name.clone(),
            complete: entry.complete,
            damage: (!entry.complete).then(|| entry.damage.clone()),
            step: checkpoint.map(|checkpoint| checkpoint.step),
            epoch: checkpoint.map(|_| entry.epoch),
            top1: accuracy.map(|accuracy| accuracy.top1),
            fit: accuracy.and_then(|accuracy| accuracy.fit),
            bytes: checkpoint.map(|checkpoint| checkpoint.bytes),
            created_unix_seconds: checkpoint.map(|_| entry.created_unix_seconds),
            state: match entry.damage.as_str() {
                _ if entry.complete => "complete",
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

/// The list as a table, with ages at this time.
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
