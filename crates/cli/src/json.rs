//! The output of `--json`. Scripts rely on it: fields are added, never renamed or removed.
//! Fractions are 0..1, durations are seconds. A value that does not exist yet is `null`, as is a number that is
//! infinite or NaN. The coordinator's messages are printed with their field names.

use std::path::PathBuf;

pub(crate) use baton_console::json::{line, print};
use baton_data::{
    statistics::FieldStatistics,
    survey::Survey,
    write::{FinishedFile, Summary, WrittenTable, WrittenWindows},
};
use baton_plan::{RecipePlan, notice::MissedDeadline};
use baton_proto::{
    AveragedAccuracy,
    v1::{Fit, GetStatusResponse, Metric, Recovery, WatchEventsResponse},
};
use baton_recipe::{
    dry_run::DryRun,
    spec::{FieldDifference, Violation},
};
use baton_text::{TokenSetSize, TokenizedText, Tokenizer};
use serde::Serialize;

/// `baton recoveries --json`.
#[derive(Debug, Serialize)]
pub(crate) struct Recoveries {
    /// Number of recoveries over the job's whole life.
    pub(crate) recoveries_total: u64,
    /// Median over the failures below that reached their first step, without planned changes.
    pub(crate) median_total_seconds: Option<f64>,
    /// The longest of them.
    pub(crate) worst_total_seconds: Option<f64>,
    /// Steps that had to be repeated because of all recoveries below.
    pub(crate) lost_steps: u64,
    /// The newest 1,000 recoveries, oldest first.
    pub(crate) recoveries: Vec<Recovery>,
}

/// `--json` of `baton pause`, `resume`, `drain`, `stop` and `checkpoint now`.
#[derive(Debug, Serialize)]
pub(crate) struct ControlledJob {
    /// `pause`, `resume`, `drain`, `stop` or `checkpoint`.
    pub(crate) request: &'static str,
    /// Name of the job, URL of its coordinator, and where the URL is from.
    pub(crate) job: String,
}

/// `baton cert --json`.
#[derive(Debug, Serialize)]
pub(crate) struct MadeCertificates {
    /// Folder of the files.
    pub(crate) folder: String,
    /// Names of the files.
    pub(crate) files: Vec<String>,
    /// Days for which the certificates are valid.
    pub(crate) days: u32,
}

/// One line of `baton checkpoint ls --json`.
#[derive(Debug, Serialize)]
pub(crate) struct ListedCheckpoint {
    /// Name of its folder.
    pub(crate) name: String,
    /// Whether all its files exist and have the right size.
    pub(crate) complete: bool,
    /// `complete`, `damaged`, `newer` (a newer Baton wrote it) or `unfinished`.
    pub(crate) state: &'static str,
    /// Why no job can resume from it, if it is not complete.
    pub(crate) damage: Option<String>,
    /// Number of steps made.
    pub(crate) step: Option<u64>,
    /// Number of complete epochs.
    pub(crate) epoch: Option<u32>,
    /// Top-1 accuracy, if the model was evaluated at this step.
    pub(crate) top1: Option<f64>,
    /// Fit of a regression, if it was evaluated at this step.
    pub(crate) fit: Option<Fit>,
    /// Size of all its files.
    pub(crate) bytes: Option<u64>,
    /// Time of the commit, Unix seconds.
    pub(crate) created_unix_seconds: Option<u64>,
    /// The generation that wrote it.
    pub(crate) generation: Option<u64>,
    /// Number of ranks that wrote it.
    pub(crate) ranks: Option<u32>,
    /// Top-5 accuracy, if the model was evaluated at this step.
    pub(crate) top5: Option<f64>,
    /// All metrics, if the model was evaluated at this step; evaluations are compared by the first one.
    pub(crate) metrics: Vec<Metric>,
    /// Evaluation of the averaged weights at this step.
    pub(crate) ema: Option<AveragedAccuracy>,
    /// Reasons why its run keeps it, some of `newest`, `last`, `best`, `every_epochs`, `outside_run`, `damaged`,
    /// `in_progress`; `null` if only the coordinator can read the folder.
    pub(crate) kept_because: Option<Vec<&'static str>>,
    /// Why the next save removes it: `not_asked_for` (no retention rule keeps it), `invalidated` (by a rollback) or
    /// `dead_save` (its save was abandoned).
    pub(crate) removed_because: Option<&'static str>,
    /// The metrics as text.
    #[serde(skip)]
    pub(crate) metric: Option<String>,
    /// The reason to keep or remove it, as text.
    #[serde(skip)]
    pub(crate) verdict: Option<String>,
}

/// One line of `baton checkpoint verify --json`.
#[derive(Debug, Serialize)]
pub(crate) struct VerifiedCheckpoint {
    /// Name of its folder.
    pub(crate) name: String,
    /// `complete` (every byte is as it was written), `damaged`, `newer` (a newer Baton wrote it), `unfinished`, or `removed`
    /// while it was read.
    pub(crate) state: &'static str,
    /// What is wrong if it is damaged; the format version if a newer Baton wrote it.
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
    /// Number of steps made.
    pub(crate) step: u64,
    /// `f32`, `f16` or `bf16`.
    pub(crate) dtype: &'static str,
    /// Whether the weights are the averaged ones.
    pub(crate) averaged: bool,
    /// Size of the file, or of all files of the folder.
    pub(crate) bytes: u64,
    /// `safetensors`: one file; `peft`: a folder with an adapter.
    pub(crate) format: &'static str,
}

/// `baton checkpoint merge --json`.
#[derive(Debug, Serialize)]
pub(crate) struct MergedModel {
    /// Name of the checkpoint.
    pub(crate) checkpoint: String,
    /// The folder written.
    pub(crate) path: String,
    /// Folder of the model that was trained.
    pub(crate) model: String,
    /// Number of steps made.
    pub(crate) step: u64,
    /// `same`, `f32`, `f16` or `bf16`.
    pub(crate) dtype: &'static str,
    /// Whether the trained weights are the averaged ones.
    pub(crate) averaged: bool,
    /// Whether an adapter was merged; otherwise all weights are the checkpoint's.
    pub(crate) adapter: bool,
    /// Size of the weights.
    pub(crate) bytes: u64,
}

/// `baton model import --json`.
#[derive(Debug, Serialize)]
pub(crate) struct ImportedModel {
    /// The folder written.
    pub(crate) path: String,
    /// `model_type` of its `config.json`.
    pub(crate) family: String,
    /// Number of weights.
    pub(crate) parameters: u64,
    /// `f32`, `f16` or `bf16`.
    pub(crate) dtype: &'static str,
    /// Size of the weights.
    pub(crate) bytes: u64,
    /// Number of tokens of the vocabulary: one more than the largest id.
    pub(crate) vocab_size: u32,
    /// Whether there is a chat template.
    pub(crate) chat_template: bool,
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
    /// Difference between their recipes.
    pub(crate) recipe: RecipeDifference,
    /// Difference between their positions in the training: steps, evaluations and saves so far.
    pub(crate) progress: Vec<FieldDifference>,
    /// All regions of the state.
    pub(crate) regions: Vec<ComparedPart>,
    /// Named tensors that differ, by the largest relative difference, at most `--top`.
    pub(crate) tensors: Vec<ComparedPart>,
    /// Number of named tensors that differ.
    pub(crate) different_tensors: u64,
    /// Number of all named tensors.
    pub(crate) all_tensors: u64,
}

/// A checkpoint in a comparison.
#[derive(Debug, Serialize)]
pub(crate) struct ComparedCheckpoint {
    /// Folder or URL of its store.
    pub(crate) location: String,
    /// Name of its folder.
    pub(crate) name: String,
    /// UUID of the job that wrote it.
    pub(crate) job_id: String,
    /// Network, by its recipe name.
    pub(crate) arch: String,
    /// The generation that wrote it.
    pub(crate) generation: u64,
    /// Number of ranks that wrote it.
    pub(crate) ranks: u32,
}

/// A region or tensor in a comparison.
#[derive(Debug, Serialize)]
pub(crate) struct ComparedPart {
    /// Its name.
    pub(crate) name: String,
    /// `same` (in all bits), `different`, `other_shape`, `only_in_a` or `only_in_b`.
    pub(crate) finding: &'static str,
    /// Number of values that differ, if `different`.
    pub(crate) different: Option<u64>,
    /// Number of all values, if `different`.
    pub(crate) values: Option<u64>,
    /// Largest |a - b|, if `different`.
    pub(crate) largest_absolute: Option<f64>,
    /// Largest |a - b| / max(|a|, |b|), if `different`.
    pub(crate) largest_relative: Option<f64>,
}

/// `baton checkpoint rm --json`.
#[derive(Debug, Serialize)]
pub(crate) struct RemovedCheckpoints {
    /// Where they were.
    pub(crate) location: String,
    /// Names of the removed checkpoints.
    pub(crate) removed: Vec<String>,
    /// Total size of their files.
    pub(crate) freed_bytes: u64,
}

/// `baton checkpoint cp --json`.
#[derive(Debug, Serialize)]
pub(crate) struct CopiedCheckpoint {
    /// Name of the checkpoint's folder, the same in source and destination.
    pub(crate) name: String,
    /// Destination of the copy.
    pub(crate) location: String,
    /// Number of files written by this copy, without the manifest.
    pub(crate) written_files: u64,
    /// Size of these files.
    pub(crate) written_bytes: u64,
    /// Number of files that already existed and match their digests.
    pub(crate) kept_files: u64,
    /// Whether the complete checkpoint already existed.
    pub(crate) was_there: bool,
}

/// One line of `baton up --json`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum UpLine<'a> {
    /// An event of the job.
    Event(&'a WatchEventsResponse),
    /// The job's status; at least once per epoch and every ten seconds while it trains.
    Progress(&'a GetStatusResponse),
    /// What `baton up` itself did.
    Note {
        /// The text.
        message: &'a str,
    },
    /// The last line.
    End {
        /// Exit code of `baton up`.
        exit_code: u8,
        /// The job's last status.
        status: Option<&'a GetStatusResponse>,
    },
}

/// `baton data write --json`.
#[derive(Debug, Serialize)]
pub(crate) struct WrittenData {
    /// Number of images stored.
    pub(crate) samples: u64,
    /// Number of bad images left out.
    pub(crate) skipped: u64,
    /// Number of samples stored as JPEG.
    pub(crate) jpeg: u64,
    /// Number of samples stored raw.
    pub(crate) raw: u64,
    /// Number of JPEGs stored unchanged.
    pub(crate) untouched: u64,
    /// Size of the samples' source files, bytes.
    pub(crate) source_bytes: u64,
    /// Size of the samples' images as stored, bytes.
    pub(crate) stored_bytes: u64,
    /// The files written, in the order of the samples.
    pub(crate) files: Vec<WrittenFile>,
    /// The list of class names, if the source has names.
    pub(crate) classes: Option<String>,
    /// Duration of this run.
    pub(crate) seconds: f64,
}

/// `baton data table --json`.
#[derive(Debug, Serialize)]
pub(crate) struct WrittenTableFiles {
    /// The files written, that for training first.
    pub(crate) files: Vec<WrittenFile>,
    /// The lists of class names.
    pub(crate) classes: Vec<ClassList>,
    /// Number of bad rows left out.
    pub(crate) skipped: u64,
    /// The first of them: file, line, column and reason.
    pub(crate) first_skipped: Vec<String>,
    /// Duration of this run.
    pub(crate) seconds: f64,
}

/// `baton data window --json`.
#[derive(Debug, Serialize)]
pub(crate) struct WrittenWindowFiles {
    /// The files written, that for training first.
    pub(crate) files: Vec<WrittenFile>,
    /// The list of the recordings' names, by their numbers.
    pub(crate) recordings: String,
    /// Windows left out because a value is not finite.
    pub(crate) with_gaps: u64,
    /// Windows left out because no label is near.
    pub(crate) without_label: u64,
    /// Recordings without any label, or shorter than a window.
    pub(crate) unused_recordings: u64,
    /// Duration of this run.
    pub(crate) seconds: f64,
}

/// A file with the names of a field's classes, in order.
#[derive(Debug, Serialize)]
pub(crate) struct ClassList {
    /// Name of the field.
    pub(crate) field: String,
    /// Path of the file.
    pub(crate) path: String,
}

/// `baton data tokenize --json`.
#[derive(Debug, Serialize)]
pub(crate) struct TokenizedData {
    /// The file for training.
    pub(crate) train: TokenSetSize,
    /// The file for validation.
    pub(crate) val: Option<TokenSetSize>,
    /// Number of bad lines left out.
    pub(crate) skipped: u64,
    /// The first of them: file, line, column and reason.
    pub(crate) first_skipped: Vec<String>,
    /// File of the chat template, if one was used.
    pub(crate) template: Option<String>,
    /// The token with which the template ends a message, if generated texts would go on after it.
    pub(crate) unknown_end: Option<String>,
    /// One more than the largest token of the vocabulary.
    pub(crate) vocab_size: u32,
    /// Duration of this run.
    pub(crate) seconds: f64,
}

impl TokenizedData {
    pub(crate) fn new(
        tokenized: &TokenizedText,
        tokenizer: &Tokenizer,
        first_skipped: Vec<String>,
        seconds: f64,
    ) -> Self {
        Self {
            train: tokenized.train.clone(),
            val: tokenized.val.clone(),
            skipped: tokenized.skipped,
            first_skipped,
            template: tokenized.template.as_ref().map(|path| path.display().to_string()),
            unknown_end: tokenized.unknown_end.clone(),
            vocab_size: tokenizer.vocab_size(),
            seconds,
        }
    }
}

/// `baton data inspect --json`.
#[derive(Debug, Serialize)]
pub(crate) struct InspectedData {
    /// Size and fields.
    #[serde(flatten)]
    pub(crate) survey: Survey,
    /// Statistics of the values, with `--values`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) values: Option<Vec<FieldStatistics>>,
    /// The first samples as text, with `--tokenizer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) texts: Option<Vec<SampleText>>,
}

/// A sample of a file of tokens.
#[derive(Debug, Serialize)]
pub(crate) struct SampleText {
    /// Position in the file.
    pub(crate) sample: u64,
    /// Number of tokens.
    pub(crate) tokens: u64,
    /// Number of labels that are predicted.
    pub(crate) predicted: u64,
    /// Its text: parts with and without loss take turns.
    pub(crate) parts: Vec<SamplePart>,
}

/// A part of a sample.
#[derive(Debug, Serialize)]
pub(crate) struct SamplePart {
    /// Its text; special tokens are included.
    pub(crate) text: String,
    /// Whether the loss counts its tokens.
    pub(crate) loss: bool,
}

/// `baton data synth --json`.
#[derive(Debug, Serialize)]
pub(crate) struct SynthesizedData {
    /// The files written, for training and for validation.
    pub(crate) files: [WrittenFile; 2],
    /// Field with the model's input.
    pub(crate) input_field: &'static str,
    /// Shape of its values.
    pub(crate) shape: [u32; 2],
    /// Field that the model learns to predict.
    pub(crate) label_field: &'static str,
    /// Duration of this run.
    pub(crate) seconds: f64,
}

/// A file of a data set.
#[derive(Debug, Serialize)]
pub(crate) struct WrittenFile {
    /// Path of the file.
    pub(crate) path: String,
    /// Number of samples.
    pub(crate) samples: u64,
    /// Size of the file.
    pub(crate) bytes: u64,
    /// Whether an earlier run wrote it.
    pub(crate) kept: bool,
}

impl From<(PathBuf, FinishedFile)> for WrittenFile {
    fn from((path, finished): (PathBuf, FinishedFile)) -> Self {
        let FinishedFile { samples, bytes } = finished;
        Self { path: path.display().to_string(), samples, bytes, kept: false }
    }
}

impl WrittenWindowFiles {
    pub(crate) fn new(written: WrittenWindows, seconds: f64) -> Self {
        let WrittenWindows { files, recordings, with_gaps, without_label, unused_recordings } =
            written;
        Self {
            files: files.into_iter().map(Into::into).collect(),
            recordings: recordings.display().to_string(),
            with_gaps,
            without_label,
            unused_recordings,
            seconds,
        }
    }
}

impl WrittenTableFiles {
    pub(crate) fn new(written: WrittenTable, seconds: f64) -> Self {
        let list = |(field, path): (String, PathBuf)| ClassList {
            field,
            path: path.display().to_string(),
        };
        let WrittenTable { files, classes, skipped, first_skipped, .. } = written;
        Self {
            files: files.into_iter().map(Into::into).collect(),
            classes: classes.into_iter().map(list).collect(),
            skipped,
            first_skipped,
            seconds,
        }
    }
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
#[derive(Debug, Default, Serialize)]
pub(crate) struct CheckedRecipe {
    /// The file.
    pub(crate) recipe: String,
    /// Whether no check found a fault.
    pub(crate) ok: bool,
    /// Why the recipe or its data cannot be read.
    pub(crate) problem: Option<String>,
    /// Values that violate a rule.
    pub(crate) faults: Vec<Violation>,
    /// Why the size of its training set is unknown, so that `run` is missing.
    pub(crate) not_walked_because: Option<String>,
    /// Why its program was not read.
    pub(crate) program_not_read_because: Option<String>,
    /// Deprecated keys, which are still accepted.
    pub(crate) deprecated_keys: Vec<Violation>,
    /// Values that are valid but probably wrong.
    pub(crate) warnings: Vec<Violation>,
    /// What takes longer than the notices of `--notice` leave.
    pub(crate) missed_deadlines: Vec<MissedDeadline>,
    /// The simulated run.
    pub(crate) run: Option<DryRun>,
}

/// `baton recipe diff --json`.
#[derive(Debug, Serialize)]
pub(crate) struct RecipeDifference {
    /// Fields that differ, by their dotted paths.
    pub(crate) fields: Vec<FieldDifference>,
    /// Whether anything that affects the resulting weights differs.
    pub(crate) weights_can_differ: bool,
}

impl RecipeDifference {
    pub(crate) fn of(fields: Vec<FieldDifference>) -> Self {
        let weights_can_differ = fields.iter().any(FieldDifference::affects_weights);
        Self { fields, weights_can_differ }
    }
}

/// `baton plan --json`.
#[derive(Debug, Serialize)]
pub(crate) struct PlannedRecipe<'a> {
    /// Name of the recipe.
    pub(crate) recipe: String,
    /// Number of samples in the training set.
    pub(crate) samples: u64,
    /// Number of samples in the validation set.
    pub(crate) val_samples: u64,
    /// Mean tokens of a sample of a language model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mean_tokens: Option<u64>,
    /// Date of the price list; `null` with `--price`.
    pub(crate) prices_looked_up: Option<&'static str>,
    /// One plan per machine.
    pub(crate) plans: &'a [RecipePlan],
}
