//! The data sets and how they are read.

use serde::{Deserialize, Serialize};

use super::{JobSpec, is_default, rules::Rules};

/// The data sets and how they are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Training set: a `.beton` file, a folder, a pattern such as `/data/train-*.beton`, or the same in an
    /// object store (`s3://bucket/train-*.beton`).
    pub train: String,
    /// Validation set, in the same form as `train`.
    pub val: String,
    /// Name of the field with the model's input: RGB images, or arrays for `resnet34_1d` and `linear`. Ignored by
    /// `causal_lm`, which reads what `baton data tokenize` wrote.
    #[serde(default = "input_field")]
    pub input_field: String,
    /// Names of further fields that a program takes as inputs of these names: Int, Float, arrays. Their values become
    /// float32, in which integers are exact up to 16,777,216, and then what the program takes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_fields: Vec<String>,
    /// Name of the field with the target: Int for classes, Int or Float for a regression.
    #[serde(default = "label_field")]
    pub label_field: String,
    /// Most tokens of a sample and, with `packing`, of a pack, 8..1048576; required by `causal_lm`, and only for it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sequence: u32,
    /// Fill every sequence with several short samples, none of which sees another; `causal_lm` only. `global_batch` then
    /// counts sequences. Which samples share one depends on the seed and the epoch; their number is the same in all epochs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub packing: bool,
    /// Order of the samples in an epoch: `random`, `sequential`, or `quasi_random` (for data that does not fit into
    /// memory). Each order depends only on the seed and the epoch.
    #[serde(default)]
    pub order: Order,
    /// Minimum number of samples that are shuffled with each other in quasi-random order; the memory of a node should
    /// have room for twice as many.
    #[serde(default = "shuffle_window")]
    pub shuffle_window: u64,
    /// How a crop is resized to the size of a sample: `fast`: an antialiased triangle filter; `area`: the same pixels
    /// as ffcv, slower.
    #[serde(default)]
    pub resize: Resize,
    /// What to do with damaged samples: `fail`: end the job and name the sample; `skip`: use the next undamaged sample,
    /// and count the skipped ones.
    #[serde(default)]
    pub on_bad_sample: OnBadSample,
    /// Skip the last samples of an epoch if they do not fill a global batch. If false, each micro-batch of the last
    /// batch needs at least two samples.
    #[serde(default = "drop_last")]
    pub drop_last: bool,
    /// Decoding threads per rank, 1..256.
    #[serde(default = "decode_threads")]
    pub decode_threads: u32,
    /// Number of decoded micro-batches kept ready per rank, 1..64.
    #[serde(default = "prefetch_batches")]
    pub prefetch_batches: u32,
    /// Pin a rank's decoding threads to its part of the node's cores.
    #[serde(default = "pin_threads")]
    pub pin_threads: bool,
    /// Folder for copies of remote shards, on a fast local disk; empty means `cache` in the run folder.
    #[serde(default)]
    pub cache_dir: String,
    /// Maximum total size of the copies of remote shards, in GiB; shared by the ranks of a node.
    #[serde(default = "cache_gib")]
    pub cache_gib: f64,
    /// Mean per channel, which is subtracted; in units of 0..255. The default is that of ImageNet.
    #[serde(default = "mean")]
    pub mean: [f32; 3],
    /// Standard deviation per channel, by which the difference is divided; in units of 0..255, above 0. The default is
    /// that of ImageNet.
    #[serde(default = "std")]
    pub std: [f32; 3],
}

fn input_field() -> String {
    "image".to_owned()
}
fn label_field() -> String {
    "label".to_owned()
}
fn shuffle_window() -> u64 {
    16_384
}
fn drop_last() -> bool {
    true
}
fn decode_threads() -> u32 {
    1
}
fn prefetch_batches() -> u32 {
    3
}
fn pin_threads() -> bool {
    true
}
fn cache_gib() -> f64 {
    100.0
}
/// ImageNet's statistics as torchvision uses them, times 255.
fn mean() -> [f32; 3] {
    [123.675, 116.28, 103.53]
}
fn std() -> [f32; 3] {
    [58.395, 57.12, 57.375]
}

/// Order of the samples in an epoch, which depends only on the seed and the epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// A new permutation every epoch.
    #[default]
    Random,
    /// The order of the file.
    Sequential,
    /// Blocks of samples in a new order every epoch; the samples of a window of blocks are shuffled with each other.
    /// For data that does not fit into memory. A block is a page of a file or, if there are many files, a file.
    QuasiRandom,
}

/// How a crop is resized to the size of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Resize {
    /// Antialiased triangle filter, as in torchvision and Pillow; large crops are already reduced while they are
    /// decoded.
    #[default]
    Fast,
    /// OpenCV's `INTER_AREA` and the fast inverse DCT: the same pixels as ffcv.
    Area,
}

/// What to do with damaged samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnBadSample {
    /// End the job and name the sample.
    #[default]
    Fail,
    /// Use the next undamaged sample instead, and count the skipped one; evaluation omits it.
    Skip,
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let data = &spec.data;
    rules.positive("data.cache_gib", data.cache_gib);
    let std = &data.std;
    rules.check(
        std.iter().all(|std| *std > 0.0),
        "data.std",
        format!("{std:?}"),
        "must be above 0",
    );
    rules.within("data.decode_threads", data.decode_threads, 1..=256);
    rules.within("data.prefetch_batches", data.prefetch_batches, 1..=64);
    extra_fields(spec, rules);
    sequences(spec, rules);
}

/// Longest sequence, in tokens.
const MAX_SEQUENCE: u32 = 1 << 20;

fn sequences(spec: &JobSpec, rules: &mut Rules) {
    let data = &spec.data;
    if !spec.model.arch.is_causal_lm() {
        let only_tokens = "needs model.arch = \"causal_lm\"";
        rules.check(data.sequence == 0, "data.sequence", data.sequence, only_tokens);
        rules.check(!data.packing, "data.packing", true, only_tokens);
        return;
    }
    rules.within("data.sequence", data.sequence, 8..=MAX_SEQUENCE);
    rules.check(
        data.on_bad_sample == OnBadSample::Fail,
        "data.on_bad_sample",
        "skip",
        "would replace a text by one of another length: set it to \"fail\" with model.arch = \"causal_lm\"",
    );
    rules.check(
        data.order != Order::QuasiRandom,
        "data.order",
        "quasi_random",
        "is not supported by model.arch = \"causal_lm\": choose random or sequential",
    );
}

fn extra_fields(spec: &JobSpec, rules: &mut Rules) {
    let fields = &spec.data.extra_fields;
    if fields.is_empty() {
        return;
    }
    let listed = || format!("[{}]", fields.join(", "));
    let mut check = |is_met, rule| rules.check(is_met, "data.extra_fields", listed(), rule);
    check(
        spec.model.arch.is_program(),
        "are inputs of a program: remove them, or set model.arch = \"program\"",
    );
    let is_unique = |index: usize| !fields[..index].contains(&fields[index]);
    let is_free = |name: &String| *name != spec.data.input_field && name != TARGET_INPUT;
    check(
        fields.iter().all(is_free) && (0..fields.len()).all(is_unique),
        "must be different names, other than data.input_field and target",
    );
    let mixes = spec.augment.mixup_alpha != 0.0 || spec.augment.cutmix_probability != 0.0;
    check(!mixes, "cannot be mixed: set augment.mixup_alpha and augment.cutmix_probability to 0");
}

/// Name of a program's input that takes the target, if the program itself returns the loss.
pub const TARGET_INPUT: &str = "target";
