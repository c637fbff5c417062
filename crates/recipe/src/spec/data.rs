//! The files and how they are read.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// The files and how they are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Training set: a `.beton` file, a folder, a pattern such as `/data/train-*.beton`, or the same in an
    /// object store (`s3://bucket/train-*.beton`).
    pub train: String,
    /// Validation set, as `train`.
    pub val: String,
    /// Name of the field that the model sees: RGB images, or arrays for `resnet34_1d` and `linear`.
    #[serde(default = "input_field")]
    pub input_field: String,
    /// Name of the field with the target: Int for classes, Int or Float for a regression.
    #[serde(default = "label_field")]
    pub label_field: String,
    /// Order of samples in an epoch: `random`, `sequential`, `quasi_random` (for data that does not fit
    /// into memory); each a function of (seed, epoch).
    #[serde(default)]
    pub order: Order,
    /// Samples shuffled with each other in quasi-random order, at least: what the memory of a node
    /// should hold twice.
    #[serde(default = "shuffle_window")]
    pub shuffle_window: u64,
    /// How a crop gets the size of a sample: `fast`, an antialiased triangle filter; `area`, ffcv's own
    /// pixels, slower.
    #[serde(default)]
    pub resize: Resize,
    /// What happens on samples that cannot be used: `fail` ends the job with the sample's name; `skip`
    /// takes the next good one and counts.
    #[serde(default)]
    pub on_bad_sample: OnBadSample,
    /// Leave out the last samples of an epoch that do not fill a global batch. If false, each
    /// micro-batch of the last batch needs two samples.
    #[serde(default = "drop_last")]
    pub drop_last: bool,
    /// Decoding threads per rank, 1..256.
    #[serde(default = "decode_threads")]
    pub decode_threads: u32,
    /// Decoded micro-batches held ready per rank, 1..64.
    #[serde(default = "prefetch_batches")]
    pub prefetch_batches: u32,
    /// Keep a rank's decoding threads on its share of the node's cores.
    #[serde(default = "pin_threads")]
    pub pin_threads: bool,
    /// Folder for copies of remote shards, on a fast local disk; empty is `cache` in the run folder.
    #[serde(default)]
    pub cache_dir: String,
    /// Most that the copies of remote shards may take, in GiB; shared by the ranks of a node.
    #[serde(default = "cache_gib")]
    pub cache_gib: f64,
    /// Mean per channel, subtracted; in units of 0..255. The default is ImageNet's.
    #[serde(default = "mean")]
    pub mean: [f32; 3],
    /// Standard deviation per channel, divided by; in units of 0..255, above 0. The default is ImageNet's.
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

/// Order of samples in an epoch; each a function of (seed, epoch).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// A new permutation every epoch.
    #[default]
    Random,
    /// As in the file.
    Sequential,
    /// Blocks of samples in a new order every epoch, and the samples of a window of blocks shuffled
    /// with each other: for data that does not fit into memory. A block is a page of a file, or, where
    /// there are many files, a file.
    QuasiRandom,
}

/// How a crop gets the size of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Resize {
    /// Antialiased triangle filter, as torchvision's and Pillow's; large crops are already reduced
    /// while they are decoded.
    #[default]
    Fast,
    /// OpenCV's `INTER_AREA` and the fast inverse DCT: the pixels that ffcv makes.
    Area,
}

/// What becomes of samples that cannot be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnBadSample {
    /// They end the job, with their names.
    #[default]
    Fail,
    /// The next good one takes its place, and it is counted; evaluation leaves it out.
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
    let threads = data.decode_threads;
    rules.check((1..=256).contains(&threads), "data.decode_threads", threads, "must be 1..256");
    let ahead = data.prefetch_batches;
    rules.check((1..=64).contains(&ahead), "data.prefetch_batches", ahead, "must be 1..64");
}
