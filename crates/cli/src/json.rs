//! What `--json` prints. These are promises to scripts: fields are added, never renamed or removed.
//! Shares are 0..1, durations seconds; what does not exist yet is `null`, as is a number that is
//! infinite or none. What the coordinator answers is printed as its messages are.

use baton_data::write::Summary;
use baton_plan::Plan;
use baton_proto::{
    Averaged,
    v1::{Fit, GetStatusResponse, Metric, Recovery, WatchEventsResponse},
};
use baton_recipe::{
    dry_run::DryRun,
    spec::{Difference, Violation},
};
use serde::Serialize;

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

/// `baton pause --json` and `baton resume --json`.
#[derive(Debug, Serialize)]
pub(crate) struct Asked {
    /// `pause` or `resume`.
    pub(crate) asked: &'static str,
    /// The job, the place of its coordinator, and who named that place.
    pub(crate) job: String,
}

/// One line of `baton checkpoint ls --json`.
#[derive(Debug, Serialize)]
pub(crate) struct ListedCheckpoint {
    /// Name of its folder.
    pub(crate) name: String,
    /// Whether all its files are there and of the right size.
    pub(crate) whole: bool,
    /// `whole`, `damaged`, `newer` (a newer Baton wrote it) or `unfinished`.
    pub(crate) state: &'static str,
    /// Why it cannot be resumed from, if it is not whole.
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
    /// All metrics, if it was evaluated there; evaluations are compared by the first one.
    pub(crate) metrics: Vec<Metric>,
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
    /// `whole`: every byte is as it was written; `damaged`, `newer` (a newer Baton wrote it) or
    /// `unfinished`.
    pub(crate) state: &'static str,
    /// What is wrong, if it is damaged; how new it is, if a newer Baton wrote it.
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
pub(crate) enum UpLine<'a> {
    /// Something happened in the job.
    Event(&'a WatchEventsResponse),
    /// Where the job stands; at least one per epoch and every ten seconds while it trains.
    Progress(&'a GetStatusResponse),
    /// Something that `baton up` itself did.
    Note {
        /// In words.
        message: &'a str,
    },
    /// The last line.
    End {
        /// With which `baton up` ends.
        exit_code: u8,
        /// Where the job stood.
        status: Option<&'a GetStatusResponse>,
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
    /// Keys that are understood but spelt otherwise now.
    pub(crate) old_keys: Vec<Violation>,
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
    /// Whether anything that affects the resulting weights differs.
    pub(crate) weights_can_differ: bool,
}

impl RecipeDifference {
    pub(crate) fn of(fields: Vec<Difference>) -> Self {
        let weights_can_differ = fields.iter().any(Difference::affects_weights);
        Self { fields, weights_can_differ }
    }
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
