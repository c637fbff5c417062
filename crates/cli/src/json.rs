//! What `--json` prints. These are promises to scripts: fields are added, never renamed or removed.
//! Shares are 0..1, durations seconds; what does not exist yet is `null`, as is a number that is
//! infinite or none.

use baton_data::write::Summary;
use baton_job::{
    dry_run::DryRun,
    spec::{Difference, Violation},
};
use baton_plan::Plan;
use baton_proto::v1;
use serde::Serialize;

use crate::render::{activity_name, extent_name, kind_name, outcome_name, phase_name};

/// `baton status --json`.
#[derive(Debug, Serialize)]
pub(crate) struct Status {
    /// UUID of the job, the same over all restarts.
    pub(crate) job_id: String,
    /// The recipe's name.
    pub(crate) name: String,
    /// `gathering`, `backoff`, `forming`, `meeting`, `training`, `settling`, `reattaching`,
    /// `draining` or `ended`.
    pub(crate) phase: String,
    /// Why, in words.
    pub(crate) reason: String,
    /// For how long it has been in this phase.
    pub(crate) phase_seconds: f64,
    /// The newest membership of ranks.
    pub(crate) generation: u64,
    /// Passes over the data to make.
    pub(crate) epochs: u32,
    /// The latest update.
    pub(crate) latest: Option<Step>,
    /// The latest evaluation.
    pub(crate) evaluation: Option<Evaluation>,
    /// The best evaluation.
    pub(crate) best: Option<Evaluation>,
    /// The last committed checkpoint.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Its age, if this coordinator saw it being committed.
    pub(crate) checkpoint_age_seconds: Option<f64>,
    /// The folder that holds the checkpoints.
    pub(crate) checkpoint_location: String,
    /// The ranks of the newest generation.
    pub(crate) ranks: Vec<Rank>,
    /// All nodes.
    pub(crate) nodes: Vec<Node>,
    /// Samples that could not be used and were replaced or left out: by all rank processes heard of
    /// since the coordinator started, also those that are gone.
    pub(crate) skipped_samples: u64,
    /// Training that went wrong over the job's whole life, in order: why the step went back.
    pub(crate) divergences: Vec<Divergence>,
    /// What the job has cost.
    pub(crate) spending: Spending,
    /// The newest 1,000 failures and planned changes of nodes over the job's whole life, oldest first.
    pub(crate) recoveries: Vec<Recovery>,
    /// The number of all of them.
    pub(crate) recoveries_total: u64,
    /// Messages refused because they came from an older generation or connection.
    pub(crate) stale_messages: u64,
    /// Where the state came from that training last began with, in words.
    pub(crate) began_with: Option<String>,
    /// Why the newest save failed, if it did.
    pub(crate) save_problem: Option<String>,
    /// How far saving and stopping has come, while draining.
    pub(crate) drain: Option<Drain>,
    /// Estimated time to the end, while training.
    pub(crate) eta_seconds: Option<f64>,
    /// How the job ended, once it has.
    pub(crate) outcome: Option<Outcome>,
}

/// One optimizer update.
#[derive(Debug, Serialize)]
pub(crate) struct Step {
    /// Updates made.
    pub(crate) step: u64,
    /// Whole passes made.
    pub(crate) epoch: u32,
    /// Updates in all.
    pub(crate) total_steps: u64,
    /// Batches of the present pass.
    pub(crate) steps_per_epoch: u64,
    /// Those of them that are behind, also those that were left out.
    pub(crate) step_of_epoch: u64,
    /// Mean loss of the batch.
    pub(crate) loss: f64,
    /// Top-1 of the batch.
    pub(crate) top1: f64,
    /// Learning rate.
    pub(crate) lr: f64,
    /// L2 norm of the whole gradient before clipping.
    pub(crate) gradient_norm: Option<f64>,
    /// Factor on the loss; of fp16 only.
    pub(crate) loss_scale: Option<f64>,
    /// Side of the training images in pixels; 0 for arrays.
    pub(crate) resolution: u32,
    /// Samples of a full update.
    pub(crate) global_batch: u64,
    /// All ranks together, over the last seconds.
    pub(crate) samples_per_second: f64,
    /// Share of time that rank 0 waited for its loader.
    pub(crate) loader_wait: f64,
}

/// One evaluation.
#[derive(Debug, Serialize)]
pub(crate) struct Evaluation {
    /// After this many updates.
    pub(crate) step: u64,
    /// Mean loss.
    pub(crate) loss: f64,
    /// Share of samples whose first guess is right.
    pub(crate) top1: f64,
    /// Share of samples with the label among the first five guesses.
    pub(crate) top5: f64,
    /// Number of samples.
    pub(crate) samples: u64,
    /// How well a regression fits, whose `top1` and `top5` mean nothing.
    pub(crate) fit: Option<Fit>,
    /// What was found with the averaged weights; of the latest evaluation only.
    pub(crate) ema: Option<Averaged>,
    /// `full`, or `subset` for a quick look; of the latest evaluation only.
    pub(crate) extent: Option<String>,
}

/// How well a regression's outputs fit.
#[derive(Debug, Serialize)]
pub(crate) struct Fit {
    /// Mean absolute error, in units of the label.
    pub(crate) mae: f64,
    /// Pearson's correlation, -1..1.
    pub(crate) pearson: f64,
    /// Spearman's rank correlation, -1..1.
    pub(crate) spearman: f64,
}

/// What was found with averaged weights.
#[derive(Debug, Serialize)]
pub(crate) struct Averaged {
    /// Mean loss.
    pub(crate) loss: f64,
    /// Share of samples whose first guess is right.
    pub(crate) top1: f64,
    /// Share of samples with the label among the first five guesses.
    pub(crate) top5: f64,
    /// How well a regression fits.
    pub(crate) fit: Option<Fit>,
}

/// Training that went wrong, and what was done about it.
#[derive(Debug, Serialize)]
pub(crate) struct Divergence {
    /// The generation that found it.
    pub(crate) generation: u64,
    /// Updates made before it.
    pub(crate) step: u64,
    /// The batch's pass over the data, counted from 0.
    pub(crate) epoch: u32,
    /// Samples of the pass before the batch.
    pub(crate) cursor: u64,
    /// What was found, in words.
    pub(crate) cause: String,
    /// What was done, in words.
    pub(crate) remedy: String,
    /// The generation that went back, and the first step that is no good; null if the job ended.
    pub(crate) rollback: Option<Rollback>,
}

/// A way back.
#[derive(Debug, Serialize)]
pub(crate) struct Rollback {
    /// The generation that goes on.
    pub(crate) generation: u64,
    /// The first step that is no good.
    pub(crate) before: u64,
    /// `lower_lr` or `skip_batch`.
    pub(crate) remedy: &'static str,
}

/// Time that machines are paid for, over the job's whole life.
#[derive(Debug, Serialize)]
pub(crate) struct Spending {
    /// For how many hours nodes have been attached.
    pub(crate) hours: f64,
    /// At how many hours the recipe's limits end the job.
    pub(crate) most_hours: Option<f64>,
    /// What the hours cost, if there is a price.
    pub(crate) dollars: Option<f64>,
    /// What the whole job will have cost at the present rate, while it trains.
    pub(crate) projected_dollars: Option<f64>,
}

/// One committed checkpoint.
#[derive(Debug, Serialize)]
pub(crate) struct Checkpoint {
    /// Name of its folder.
    pub(crate) name: String,
    /// The generation that wrote it.
    pub(crate) generation: u64,
    /// Updates made.
    pub(crate) step: u64,
    /// Size of all its files.
    pub(crate) bytes: u64,
    /// Seconds that training stood still for it; `null` where that was not seen.
    pub(crate) stall_seconds: Option<f64>,
    /// Seconds from there until it was committed.
    pub(crate) save_seconds: Option<f64>,
    /// Top-1, if it was evaluated there.
    pub(crate) top1: Option<f64>,
    /// How well a regression fits there.
    pub(crate) fit: Option<Fit>,
}

/// A wish to save and stop.
#[derive(Debug, Serialize)]
pub(crate) struct Drain {
    /// Why, in words.
    pub(crate) reason: String,
    /// Until nobody waits for it any more.
    pub(crate) seconds_left: f64,
    /// The update after which all ranks stop, once they have agreed on it.
    pub(crate) stop_step: Option<u64>,
    /// From the wish until they had.
    pub(crate) agreed_after_seconds: Option<f64>,
    /// From the wish until the state was copied.
    pub(crate) copied_after_seconds: Option<f64>,
    /// From the wish until it was durable and committed.
    pub(crate) durable_after_seconds: Option<f64>,
}

/// One rank.
#[derive(Debug, Serialize)]
pub(crate) struct Rank {
    /// Its number.
    pub(crate) rank: u32,
    /// Its node.
    pub(crate) node: String,
    /// Its number there.
    pub(crate) local_rank: u32,
    /// `starting`, `ready`, `meeting`, `training`, `waiting`, `gone`, `done` or `unheard`.
    pub(crate) state: String,
    /// How its loader does, once it has told and while its process lives.
    pub(crate) loader: Option<Loader>,
    /// What it did when it was last heard of.
    pub(crate) pulse: Option<Pulse>,
    /// Seconds since it was last heard of.
    pub(crate) heartbeat_age_seconds: Option<f64>,
    /// Its own time per update, divided by the median over all ranks.
    pub(crate) slowness: Option<f64>,
}

/// What a rank does.
#[derive(Debug, Serialize)]
pub(crate) struct Pulse {
    /// `restoring`, `loading`, `computing`, `exchanging`, `evaluating` or `saving`.
    pub(crate) activity: String,
    /// Seconds it has been at it.
    pub(crate) seconds: f64,
    /// Updates made.
    pub(crate) step: u64,
    /// Seconds that an update takes of the rank's own time, exchanges left out; 0 before the first.
    pub(crate) own_step_seconds: f64,
}

/// One rank's loader.
#[derive(Debug, Serialize)]
pub(crate) struct Loader {
    /// Share of the last seconds that the rank's training waited for it.
    pub(crate) wait: f64,
    /// Finished batches that wait for training.
    pub(crate) ready: u32,
    /// The most finished batches there can be.
    pub(crate) room: u32,
    /// Samples that could not be used, since the rank's process started.
    pub(crate) skipped: u64,
    /// What was wrong with the last of them: file, sample and byte.
    pub(crate) last_skipped: Option<String>,
}

/// One node.
#[derive(Debug, Serialize)]
pub(crate) struct Node {
    /// Its name.
    pub(crate) node: String,
    /// Ranks it can run.
    pub(crate) slots: u32,
    /// Whether its agent is connected.
    pub(crate) attached: bool,
}

/// `baton recoveries --json`.
#[derive(Debug, Serialize)]
pub(crate) struct Recoveries {
    /// Number of recoveries over the job's whole life.
    pub(crate) recoveries_total: u64,
    /// Median over the failures below that came to their first update; planned changes left out.
    pub(crate) median_total_seconds: Option<f64>,
    /// The longest of them.
    pub(crate) worst_total_seconds: Option<f64>,
    /// Updates that had to be made again for all below.
    pub(crate) lost_steps: u64,
    /// The newest 1,000, oldest first.
    pub(crate) recoveries: Vec<Recovery>,
}

/// A failure or a planned change of nodes, and its recovery. A part of it begins where the one before it ended, and is
/// `null` until it has ended; for good, if the generation that took over failed before its first update.
#[derive(Debug, Serialize)]
pub(crate) struct Recovery {
    /// The generation that took over; the one that failed, until another is opened.
    pub(crate) generation: u64,
    /// What failed, or which nodes came or went.
    pub(crate) cause: String,
    /// Nodes came or went; nothing failed.
    pub(crate) planned: bool,
    /// Since the first word of it.
    pub(crate) age_seconds: f64,
    /// From that word until the new generation was opened: to hear who died, and a pause before a restart.
    pub(crate) settle_seconds: Option<f64>,
    /// Until the ranks that hold state had left the old generation and were ready again.
    pub(crate) tear_down_seconds: Option<f64>,
    /// Until the ranks that had to be started were ready too; 0 if there were none.
    pub(crate) respawn_seconds: Option<f64>,
    /// Until all ranks had met. If one could not tell, it stays `null` and counts to the next part.
    pub(crate) rendezvous_seconds: Option<f64>,
    /// Until all ranks had the state.
    pub(crate) restore_seconds: Option<f64>,
    /// Until the first update was done.
    pub(crate) first_step_seconds: Option<f64>,
    /// All parts together, once the first update was done.
    pub(crate) total_seconds: Option<f64>,
    /// Updates that had to be made again; known once all ranks have the state.
    pub(crate) lost_steps: u64,
}

/// How a job ended.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// `completed`, `drained`, `limit_reached`, `stopped` or `failed`.
    pub(crate) kind: String,
    /// Why it was drained or failed, or which limit is reached.
    pub(crate) reason: Option<String>,
}

/// One event: a line of `baton watch --json`.
#[derive(Debug, Serialize)]
pub(crate) struct Event {
    /// Rises by one over the job's whole life; `baton watch --after ID` goes on from it.
    pub(crate) id: u64,
    /// When, milliseconds since 1970-01-01 UTC.
    pub(crate) unix_millis: u64,
    /// `node_joined`, `node_lost`, `generation_opened`, `training_started`, `evaluated`, `diverged`,
    /// `ends_early`, `saved`, `save_failed`, `rank_failed`, `samples_skipped`, `recovered`, `draining`
    /// or `ended`.
    pub(crate) kind: String,
    /// In which generation.
    pub(crate) generation: u64,
    /// At which step, where that means something.
    pub(crate) step: Option<u64>,
    /// In words.
    pub(crate) message: String,
}

/// One line of `baton checkpoint ls --json`.
#[derive(Debug, Serialize)]
pub(crate) struct ListedCheckpoint {
    /// Name of its folder.
    pub(crate) name: String,
    /// Whether all its files are there and of the right size.
    pub(crate) whole: bool,
    /// `whole`, `damaged` or `unfinished`.
    pub(crate) state: &'static str,
    /// What is wrong, if it is not whole.
    pub(crate) damage: Option<String>,
    /// Updates made.
    pub(crate) step: Option<u64>,
    /// Whole passes made.
    pub(crate) epoch: Option<u32>,
    /// Top-1, if it was evaluated there.
    pub(crate) top1: Option<f64>,
    /// How well a regression fits there.
    pub(crate) fit: Option<Fit>,
    /// Size of all its files.
    pub(crate) bytes: Option<u64>,
    /// When it was committed, seconds since 1970-01-01 UTC.
    pub(crate) created_unix_seconds: Option<u64>,
    /// The generation that wrote it.
    pub(crate) generation: Option<u64>,
    /// How many ranks wrote it.
    pub(crate) ranks: Option<u32>,
    /// Top-5, if it was evaluated there.
    pub(crate) top5: Option<f64>,
    /// What was found there with the averaged weights.
    pub(crate) ema: Option<Averaged>,
    /// Why its run keeps it: some of `newest`, `last`, `best`, `every_epochs`, `outside_run`, `damaged`,
    /// `in_progress`; `null` if only the coordinator can see the folder.
    pub(crate) kept_because: Option<Vec<&'static str>>,
    /// Why the next save removes it: `not_asked_for`, `condemned` (training went wrong there) or
    /// `dead_save`.
    pub(crate) removed_because: Option<&'static str>,
    /// The metric in words, for people.
    #[serde(skip)]
    pub(crate) metric: Option<String>,
    /// Why it stays or goes in words, for people.
    #[serde(skip)]
    pub(crate) verdict: Option<String>,
}

/// One line of `baton checkpoint verify --json`.
#[derive(Debug, Serialize)]
pub(crate) struct VerifiedCheckpoint {
    /// Name of its folder.
    pub(crate) name: String,
    /// `whole`: every byte is as it was written; `damaged` or `unfinished`.
    pub(crate) state: &'static str,
    /// What is wrong, if it is damaged.
    pub(crate) problem: Option<String>,
    /// Number of its files, if its manifest can be read.
    pub(crate) files: Option<u64>,
    /// Size of all its files.
    pub(crate) bytes: Option<u64>,
}

/// `baton checkpoint export --json`.
#[derive(Debug, Serialize)]
pub(crate) struct ExportedWeights {
    /// Name of the checkpoint.
    pub(crate) checkpoint: String,
    /// The file written.
    pub(crate) path: String,
    /// Network, by its recipe name.
    pub(crate) arch: String,
    /// Updates made.
    pub(crate) step: u64,
    /// `f32`, `f16` or `bf16`.
    pub(crate) dtype: String,
    /// Whether the weights are the averaged ones.
    pub(crate) averaged: bool,
    /// Size of the file.
    pub(crate) bytes: u64,
}

/// `baton checkpoint diff --json`.
#[derive(Debug, Serialize)]
pub(crate) struct CheckpointDifference {
    /// Whether recipe, position and state are all the same.
    pub(crate) same: bool,
    /// The first checkpoint.
    pub(crate) a: ComparedCheckpoint,
    /// The second one.
    pub(crate) b: ComparedCheckpoint,
    /// Between their recipes.
    pub(crate) recipe: RecipeDifference,
    /// Between their positions: what was made, evaluated and saved so far.
    pub(crate) progress: Vec<Difference>,
    /// All regions of the state.
    pub(crate) regions: Vec<ComparedPart>,
    /// Named tensors, by the largest relative difference; as many as `--top` says, and none of those
    /// that are the same.
    pub(crate) tensors: Vec<ComparedPart>,
    /// Named tensors that are not the same.
    pub(crate) different_tensors: u64,
    /// All named tensors.
    pub(crate) all_tensors: u64,
}

/// A checkpoint in a comparison.
#[derive(Debug, Serialize)]
pub(crate) struct ComparedCheckpoint {
    /// Where it lies.
    pub(crate) location: String,
    /// Name of its folder.
    pub(crate) name: String,
    /// UUID of the job that wrote it.
    pub(crate) job_id: String,
    /// Network, by its recipe name.
    pub(crate) arch: String,
    /// The generation that wrote it.
    pub(crate) generation: u64,
    /// How many ranks wrote it.
    pub(crate) ranks: u32,
}

/// A region or tensor in a comparison.
#[derive(Debug, Serialize)]
pub(crate) struct ComparedPart {
    /// Its name.
    pub(crate) name: String,
    /// `same` (in all bits), `different`, `other_shape`, `only_in_a` or `only_in_b`.
    pub(crate) finding: &'static str,
    /// How many values differ, if `different`.
    pub(crate) different: Option<u64>,
    /// How many there are, if `different`.
    pub(crate) values: Option<u64>,
    /// Largest |a - b|, if `different`.
    pub(crate) largest_absolute: Option<f64>,
    /// Largest |a - b| / max(|a|, |b|), if `different`.
    pub(crate) largest_relative: Option<f64>,
}

/// `baton checkpoint rm --json`.
#[derive(Debug, Serialize)]
pub(crate) struct RemovedCheckpoints {
    /// Names of what is gone.
    pub(crate) removed: Vec<String>,
    /// Size of its files.
    pub(crate) freed_bytes: u64,
}

/// `baton checkpoint cp --json`.
#[derive(Debug, Serialize)]
pub(crate) struct CopiedCheckpoint {
    /// Name of its folder, the same in both places.
    pub(crate) name: String,
    /// Where it was copied to.
    pub(crate) location: String,
    /// Files written by this copy, the manifest not among them.
    pub(crate) written_files: u64,
    /// Size of those.
    pub(crate) written_bytes: u64,
    /// Files that were there already and match their digests.
    pub(crate) kept_files: u64,
    /// Whether the whole checkpoint was there already.
    pub(crate) was_there: bool,
}

/// One line of `baton up --json`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum UpLine {
    /// Something happened in the job.
    Event(Event),
    /// Where the job stands; at least one per epoch and every ten seconds while it trains.
    Progress(Status),
    /// Something that `baton up` itself did.
    Note {
        /// In words.
        message: String,
    },
    /// The last line.
    End {
        /// With which `baton up` ends.
        exit_code: u8,
        /// Where the job stood.
        status: Option<Status>,
    },
}

/// `baton data write --json`.
#[derive(Debug, Serialize)]
pub(crate) struct WrittenData {
    /// Images stored.
    pub(crate) samples: u64,
    /// Bad images left out.
    pub(crate) skipped: u64,
    /// Those of the samples that are JPEGs.
    pub(crate) jpeg: u64,
    /// Those of the samples that are raw.
    pub(crate) raw: u64,
    /// Those of the JPEGs that are their files' own bytes.
    pub(crate) untouched: u64,
    /// Length of the samples' image files in bytes.
    pub(crate) source_bytes: u64,
    /// Length of the samples' images as stored, in bytes.
    pub(crate) stored_bytes: u64,
    /// The files written, in the order of the samples.
    pub(crate) files: Vec<WrittenFile>,
    /// The list of class names, if the source has names.
    pub(crate) classes: Option<String>,
    /// Duration of this run.
    pub(crate) seconds: f64,
}

/// `baton data synth --json`.
#[derive(Debug, Serialize)]
pub(crate) struct SynthesizedData {
    /// The files written: the one for training, the one for validation.
    pub(crate) files: [WrittenFile; 2],
    /// Field that the model sees.
    pub(crate) input_field: &'static str,
    /// Shape of its values.
    pub(crate) shape: [u32; 2],
    /// Field that the model learns to tell.
    pub(crate) label_field: &'static str,
    /// Duration of this run.
    pub(crate) seconds: f64,
}

/// A file of a data set.
#[derive(Debug, Serialize)]
pub(crate) struct WrittenFile {
    /// Where.
    pub(crate) path: String,
    /// Samples in it.
    pub(crate) samples: u64,
    /// Its length in bytes.
    pub(crate) bytes: u64,
    /// Whether an earlier run wrote it.
    pub(crate) kept: bool,
}

impl WrittenData {
    pub(crate) fn new(summary: &Summary, seconds: f64) -> Self {
        let tally = summary.tally;
        let files = summary.files.iter().map(|file| WrittenFile {
            path: file.path.display().to_string(),
            samples: file.samples,
            bytes: file.bytes,
            kept: file.kept,
        });
        Self {
            samples: tally.samples,
            skipped: tally.skipped,
            jpeg: tally.jpeg,
            raw: tally.samples - tally.jpeg,
            untouched: tally.untouched,
            source_bytes: tally.source_bytes,
            stored_bytes: tally.stored_bytes,
            files: files.collect(),
            classes: summary.classes.as_ref().map(|path| path.display().to_string()),
            seconds,
        }
    }
}

/// One line of `baton recipe check --json`.
#[derive(Debug, Serialize)]
pub(crate) struct CheckedRecipe {
    /// The file.
    pub(crate) recipe: String,
    /// Whether it can be run, as far as was seen.
    pub(crate) ok: bool,
    /// Why it is no recipe at all, or its data cannot be read.
    pub(crate) problem: Option<String>,
    /// Its values against the rules.
    pub(crate) faults: Vec<Violation>,
    /// Why nobody knows the size of its training set, and with it `run`.
    pub(crate) not_walked_because: Option<String>,
    /// What would run, but is hardly meant.
    pub(crate) doubts: Vec<Violation>,
    /// What it comes to.
    pub(crate) run: Option<DryRun>,
}

/// `baton recipe diff --json`.
#[derive(Debug, Serialize)]
pub(crate) struct RecipeDifference {
    /// Those that differ, by their dotted paths.
    pub(crate) fields: Vec<Difference>,
    /// Whether anything that decides the resulting weights differs.
    pub(crate) weights_can_differ: bool,
}

/// `baton plan --json`.
#[derive(Debug, Serialize)]
pub(crate) struct PlannedRecipe<'a> {
    /// Its name.
    pub(crate) recipe: String,
    /// Of the training set.
    pub(crate) samples: u64,
    /// Of the validation set.
    pub(crate) val_samples: u64,
    /// When the prices were looked up; `null` with `--price`.
    pub(crate) prices_looked_up: Option<&'static str>,
    /// One for each machine.
    pub(crate) plans: &'a [Plan],
}

/// One line of JSON.
pub(crate) fn line(value: &impl Serialize) -> String {
    // Plain structs, strings and numbers: nothing here can fail.
    serde_json::to_string(value).unwrap_or_default()
}

impl From<&v1::GetStatusResponse> for Status {
    fn from(status: &v1::GetStatusResponse) -> Self {
        Self {
            job_id: status.job_id.clone(),
            name: status.name.clone(),
            phase: phase_name(status.phase()),
            reason: status.reason.clone(),
            phase_seconds: status.phase_seconds,
            generation: status.generation,
            epochs: status.epochs,
            latest: status.latest.as_ref().map(Into::into),
            evaluation: status.evaluation.as_ref().map(Into::into),
            best: status.best.as_ref().map(Into::into),
            checkpoint: status.checkpoint.as_ref().map(Into::into),
            checkpoint_age_seconds: status.checkpoint_age_seconds,
            checkpoint_location: status.checkpoint_location.clone(),
            ranks: status.ranks.iter().map(Into::into).collect(),
            nodes: status.nodes.iter().map(Into::into).collect(),
            skipped_samples: status.skipped_samples,
            divergences: status.incidents.iter().map(Into::into).collect(),
            spending: status.spending.unwrap_or_default().into(),
            recoveries: status.recoveries.iter().map(Into::into).collect(),
            recoveries_total: status.recoveries_total,
            stale_messages: status.stale_messages,
            began_with: status.began_with.clone(),
            save_problem: status.save_problem.clone(),
            drain: status.drain.clone().map(Into::into),
            eta_seconds: status.eta_seconds,
            outcome: status.outcome.as_ref().map(Into::into),
        }
    }
}

impl From<&v1::Step> for Step {
    fn from(step: &v1::Step) -> Self {
        Self {
            step: step.step,
            epoch: step.epoch,
            total_steps: step.total_steps,
            steps_per_epoch: step.steps_per_epoch,
            step_of_epoch: step.step_of_epoch,
            loss: step.loss,
            top1: step.top1,
            lr: step.lr,
            gradient_norm: step.gradient_norm,
            loss_scale: step.loss_scale,
            resolution: step.resolution,
            global_batch: step.global_batch,
            samples_per_second: step.samples_per_second,
            loader_wait: step.loader_wait,
        }
    }
}

impl From<&v1::EvaluatedStep> for Evaluation {
    fn from(evaluated: &v1::EvaluatedStep) -> Self {
        let v1::Accuracy { loss, top1, top5, samples, fit } =
            evaluated.accuracy.unwrap_or_default();
        Self {
            step: evaluated.step,
            loss,
            top1,
            top5,
            samples,
            fit: fit.map(Into::into),
            ema: evaluated.ema.map(Into::into),
            extent: extent_name(evaluated.extent()),
        }
    }
}

impl From<v1::Fit> for Fit {
    fn from(v1::Fit { mae, pearson, spearman }: v1::Fit) -> Self {
        Self { mae, pearson, spearman }
    }
}

impl From<v1::Accuracy> for Averaged {
    fn from(v1::Accuracy { loss, top1, top5, fit, .. }: v1::Accuracy) -> Self {
        Self { loss, top1, top5, fit: fit.map(Into::into) }
    }
}

impl From<baton_job::progress::Fit> for Fit {
    fn from(fit: baton_job::progress::Fit) -> Self {
        let baton_job::progress::Fit { mae, pearson, spearman } = fit;
        Self { mae, pearson, spearman }
    }
}

impl From<baton_job::progress::Accuracy> for Averaged {
    fn from(accuracy: baton_job::progress::Accuracy) -> Self {
        let baton_job::progress::Accuracy { loss, top1, top5, fit, .. } = accuracy;
        Self { loss, top1, top5, fit: fit.map(Into::into) }
    }
}

impl From<&v1::Incident> for Divergence {
    fn from(incident: &v1::Incident) -> Self {
        let diagnosis = incident.diagnosis.clone().unwrap_or_default();
        let v1::BatchMark { epoch, cursor } = diagnosis.batch.unwrap_or_default();
        Self {
            generation: incident.generation,
            step: diagnosis.step,
            epoch,
            cursor,
            cause: incident.cause.clone(),
            remedy: incident.remedy.clone(),
            rollback: incident.rollback.map(Into::into),
        }
    }
}

impl From<v1::Rollback> for Rollback {
    fn from(v1::Rollback { generation, before, skip }: v1::Rollback) -> Self {
        let remedy = if skip.is_some() { "skip_batch" } else { "lower_lr" };
        Self { generation, before, remedy }
    }
}

impl From<v1::Spending> for Spending {
    fn from(spending: v1::Spending) -> Self {
        let v1::Spending { hours, most_hours, dollars, projected_dollars } = spending;
        Self { hours, most_hours, dollars, projected_dollars }
    }
}

impl From<&v1::Checkpoint> for Checkpoint {
    fn from(checkpoint: &v1::Checkpoint) -> Self {
        let v1::Checkpoint { name, generation, step, accuracy, bytes, took } = checkpoint;
        Self {
            name: name.clone(),
            generation: *generation,
            step: *step,
            bytes: *bytes,
            stall_seconds: took.map(|took| took.stall_seconds),
            save_seconds: took.map(|took| took.seconds),
            top1: accuracy.map(|accuracy| accuracy.top1),
            fit: accuracy.and_then(|accuracy| accuracy.fit).map(Into::into),
        }
    }
}

impl From<&v1::RankStatus> for Rank {
    fn from(status: &v1::RankStatus) -> Self {
        let v1::RankStatus {
            rank,
            node_id,
            local_rank,
            state,
            loader,
            pulse,
            heartbeat_age_seconds,
            slowness,
        } = status.clone();
        Self {
            rank,
            node: node_id,
            local_rank,
            state,
            loader: loader.map(Into::into),
            pulse: pulse.map(Into::into),
            heartbeat_age_seconds,
            slowness,
        }
    }
}

impl From<v1::DrainStatus> for Drain {
    fn from(status: v1::DrainStatus) -> Self {
        let v1::DrainStatus {
            reason,
            seconds_left,
            stop_step,
            agreed_after_seconds,
            copied_after_seconds,
            durable_after_seconds,
        } = status;
        Self {
            reason,
            seconds_left,
            stop_step,
            agreed_after_seconds,
            copied_after_seconds,
            durable_after_seconds,
        }
    }
}

impl From<v1::Pulse> for Pulse {
    fn from(pulse: v1::Pulse) -> Self {
        let activity = activity_name(pulse.activity());
        let v1::Pulse { seconds, step, own_step_seconds, .. } = pulse;
        Self { activity, seconds, step, own_step_seconds }
    }
}

impl From<v1::Loader> for Loader {
    fn from(loader: v1::Loader) -> Self {
        let v1::Loader { wait, ready, room, skipped, last_skipped } = loader;
        Self { wait, ready, room, skipped, last_skipped }
    }
}

impl From<&v1::NodeStatus> for Node {
    fn from(status: &v1::NodeStatus) -> Self {
        let v1::NodeStatus { node_id, slots, attached } = status.clone();
        Self { node: node_id, slots, attached }
    }
}

impl From<&v1::Recovery> for Recovery {
    fn from(recovery: &v1::Recovery) -> Self {
        Self {
            generation: recovery.generation,
            cause: recovery.cause.clone(),
            planned: recovery.planned,
            age_seconds: recovery.age_seconds,
            settle_seconds: recovery.settle_seconds,
            tear_down_seconds: recovery.tear_down_seconds,
            respawn_seconds: recovery.respawn_seconds,
            rendezvous_seconds: recovery.rendezvous_seconds,
            restore_seconds: recovery.restore_seconds,
            first_step_seconds: recovery.first_step_seconds,
            total_seconds: recovery.total_seconds,
            lost_steps: recovery.lost_steps,
        }
    }
}

impl From<&v1::Outcome> for Outcome {
    fn from(outcome: &v1::Outcome) -> Self {
        let failure = outcome.failure.as_ref().map(|failure| failure.message.clone());
        let reason = failure.or_else(|| Some(outcome.reason.clone()).filter(|r| !r.is_empty()));
        Self { kind: outcome_name(outcome.kind()), reason }
    }
}

impl From<&v1::WatchEventsResponse> for Event {
    fn from(event: &v1::WatchEventsResponse) -> Self {
        Self {
            id: event.id,
            unix_millis: event.unix_millis,
            kind: kind_name(event.kind()),
            generation: event.generation,
            step: event.step,
            message: event.message.clone(),
        }
    }
}
