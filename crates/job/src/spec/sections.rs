//! The sections of a recipe, one struct each. Units stand in the names.

use serde::{Deserialize, Serialize};

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Which one.
    pub arch: Arch,
    /// Number of outputs.
    pub num_classes: u32,
    /// Start the last BatchNorm scale of every residual block at zero (Goyal et al. 2017, §5.1).
    #[serde(default)]
    pub zero_init_gamma: bool,
    /// Keep activations and convolution weights in NHWC order.
    #[serde(default = "yes")]
    pub channels_last: bool,
    /// Blur before every strided convolution (Zhang 2019).
    #[serde(default)]
    pub blur_pool: bool,
}

/// Networks by their torchvision names, and a plain-Rust one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// ResNet-18.
    Resnet18,
    /// ResNet-34.
    Resnet34,
    /// ResNet-50 v1.5.
    Resnet50,
    /// ResNet-101 v1.5.
    Resnet101,
    /// ResNet-152 v1.5.
    Resnet152,
    /// Softmax regression on pixels, in plain Rust: milliseconds per epoch, for trying out
    /// everything around the training itself.
    Linear,
}

impl Arch {
    /// Its name in recipes and checkpoints.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Resnet18 => "resnet18",
            Self::Resnet34 => "resnet34",
            Self::Resnet50 => "resnet50",
            Self::Resnet101 => "resnet101",
            Self::Resnet152 => "resnet152",
            Self::Linear => "linear",
        }
    }
}

/// The files and how they are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Training set: a `.beton` file, a glob such as `/data/train-*.beton`, or the same in an object
    /// store (`s3://bucket/train-*.beton`).
    pub train: String,
    /// Validation set, as `train`.
    pub val: String,
    /// Name of the field that the model sees: RGB images, or arrays for 1-D models.
    #[serde(default = "input_field")]
    pub input_field: String,
    /// Name of the Int label field.
    #[serde(default = "label_field")]
    pub label_field: String,
    /// Order of samples in an epoch.
    #[serde(default)]
    pub order: Order,
    /// Samples shuffled with each other in quasi-random order, at least: what the memory of a node
    /// should hold twice.
    #[serde(default = "shuffle_window")]
    pub shuffle_window: u64,
    /// How a crop gets the size of a sample.
    #[serde(default)]
    pub resize: Resize,
    /// What becomes of samples that cannot be used.
    #[serde(default)]
    pub on_bad_sample: OnBadSample,
    /// Leave out the last samples of an epoch that do not fill a global batch.
    #[serde(default = "yes")]
    pub drop_last: bool,
    /// Decoding threads per rank.
    #[serde(default = "one")]
    pub decode_threads: u32,
    /// Decoded micro-batches held ready per rank.
    #[serde(default = "three")]
    pub prefetch_batches: u32,
    /// Keep a rank's decoding threads on its share of the node's cores.
    #[serde(default = "yes")]
    pub pin_threads: bool,
    /// Folder for copies of remote shards, on a fast local disk; empty means `cache` in the run folder.
    #[serde(default)]
    pub cache_dir: String,
    /// Most that the copies of remote shards may take, in GiB; shared by the ranks of a node.
    #[serde(default = "cache_gib")]
    pub cache_gib: f64,
    /// Mean per channel, in 0..255 units.
    #[serde(default = "imagenet_mean")]
    pub mean: [f32; 3],
    /// Standard deviation per channel, in 0..255 units.
    #[serde(default = "imagenet_std")]
    pub std: [f32; 3],
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

/// Random changes to training images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Augment {
    /// Area of the random crop as a share of the image.
    pub crop_scale: [f64; 2],
    /// Width over height of the random crop.
    pub crop_ratio: [f64; 2],
    /// Probability of a horizontal flip.
    pub flip: f64,
    /// MixUp's beta parameter; 0 is off.
    pub mixup_alpha: f64,
    /// Share of batches that get CutMix.
    pub cutmix_probability: f64,
}

impl Default for Augment {
    fn default() -> Self {
        Self {
            crop_scale: [0.08, 1.0],
            crop_ratio: [3.0 / 4.0, 4.0 / 3.0],
            flip: 0.5,
            mixup_alpha: 0.0,
            cutmix_probability: 0.0,
        }
    }
}

/// Length and batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// Passes over the training data.
    pub epochs: u32,
    /// Samples per optimizer update, over all ranks.
    pub global_batch: u32,
    /// Side of the training images in pixels.
    pub resolution: u32,
    /// Parts the global batch is always split into, whatever the number of ranks; a power of two.
    #[serde(default = "eight")]
    pub virtual_ranks: u32,
    /// Micro-batches per virtual rank and update.
    #[serde(default = "one")]
    pub grad_accumulation: u32,
    /// Largest norm of the gradient; absent is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_grad_norm: Option<f64>,
    /// Progressive resize: resolution and batch by epoch. Empty is off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<Phase>,
    /// Compute each stage's activations twice instead of keeping them.
    #[serde(default)]
    pub recompute: bool,
}

/// One phase of progressive resize.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Its first epoch.
    pub from_epoch: u32,
    /// Side of the images in pixels.
    pub resolution: u32,
    /// Samples per optimizer update.
    pub global_batch: u32,
}

/// The update rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Optimizer {
    /// Stochastic gradient descent as in `torch.optim.SGD`.
    Sgd {
        /// Factor on the running gradient.
        #[serde(default)]
        momentum: f64,
        /// Look ahead by one momentum step.
        #[serde(default)]
        nesterov: bool,
        /// L2 penalty.
        #[serde(default)]
        weight_decay: f64,
        /// Decay BatchNorm parameters and biases too.
        #[serde(default)]
        decay_norm_and_bias: bool,
    },
    /// Adam with decoupled weight decay as in `torch.optim.AdamW`.
    AdamW {
        /// Factors on the running gradient and its square.
        #[serde(default = "adam_betas")]
        betas: [f64; 2],
        /// Added to the denominator.
        #[serde(default = "adam_eps")]
        eps: f64,
        /// Decoupled decay.
        #[serde(default)]
        weight_decay: f64,
        /// Decay BatchNorm parameters and biases too.
        #[serde(default)]
        decay_norm_and_bias: bool,
    },
}

/// The learning rate as a function of the sample cursor. It is never scaled by the batch silently.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// One value throughout.
    Constant {
        /// The value.
        lr: f64,
    },
    /// Linear from near zero to the peak, then half a cosine down to `final_lr`.
    WarmupCosine {
        /// Highest value.
        peak_lr: f64,
        /// Length of the rise.
        warmup_epochs: f64,
        /// Value at the end.
        #[serde(default)]
        final_lr: f64,
    },
    /// Smith & Topin 2018 as in `torch.optim.lr_scheduler.OneCycleLR` with cosine annealing.
    OneCycle {
        /// Highest value.
        peak_lr: f64,
        /// Share of training spent rising.
        #[serde(default = "third")]
        pct_start: f64,
        /// peak / start.
        #[serde(default = "twenty_five")]
        div_factor: f64,
        /// start / end.
        #[serde(default = "ten_thousand")]
        final_div_factor: f64,
    },
    /// Straight lines between (epoch, value) points, as ffcv-imagenet's "cyclic" schedule.
    PiecewiseLinear {
        /// Points in rising order of epoch; the first is at epoch 0.
        points: Vec<[f64; 2]>,
    },
}

/// The objective.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Loss {
    /// Share of the target spread over all classes (Szegedy et al. 2016, §7).
    pub label_smoothing: f64,
}

/// Number formats.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// Format of activations and of the weights' working copy; masters are always fp32.
    pub compute: Compute,
    /// What is promised about bits.
    pub determinism: Determinism,
}

/// Working number format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// IEEE single.
    #[default]
    Fp32,
    /// bfloat16.
    Bf16,
    /// IEEE half with dynamic loss scaling.
    Fp16,
}

/// What is promised about bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Determinism {
    /// The fixed tree over virtual ranks: one result for every number of ranks.
    #[default]
    Strict,
    /// The library's own all-reduce: one result for one number of ranks.
    Fast,
}

/// Moving average of the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ema {
    /// Share kept per update.
    pub decay: f64,
}

/// When and how accuracy is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Evaluation {
    /// Epochs between evaluations; the last epoch is always evaluated.
    pub every_epochs: u32,
    /// Side of the images in pixels; 0 takes the training resolution.
    pub resolution: u32,
    /// Side of the centre crop as a share of the short side.
    pub crop_ratio: f64,
    /// Images per forward pass.
    pub batch: u32,
    /// Average with the mirrored image.
    pub flip: bool,
    /// Share of the validation set used before the last epoch.
    pub subset: f64,
}

impl Default for Evaluation {
    fn default() -> Self {
        Self {
            every_epochs: 1,
            resolution: 0,
            crop_ratio: 224.0 / 256.0,
            batch: 64,
            flip: false,
            subset: 1.0,
        }
    }
}

/// When and where state is saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Checkpoint {
    /// Folder; empty means `checkpoints` in the run folder.
    pub dir: String,
    /// Epochs between saves; 0 is off.
    pub every_epochs: u32,
    /// Updates between saves; 0 is off.
    pub every_steps: u64,
    /// Newest ones kept.
    pub keep_last: u32,
    /// Keep the one with the best metric too.
    pub keep_best: bool,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self { dir: String::new(), every_epochs: 1, every_steps: 0, keep_last: 3, keep_best: true }
    }
}

/// Processes and devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    /// Training starts with no fewer ranks.
    pub min_ranks: u32,
    /// No more ranks take part; 0 means as many as there are virtual ranks.
    pub max_ranks: u32,
    /// Where ranks compute.
    pub device: Device,
    /// How ranks exchange gradients.
    pub collective: CollectiveKind,
    /// libtorch threads per rank on CPU. Results are bit-identical only for one value of it.
    pub threads_per_rank: u32,
    /// How long a vanished node may take to come back before its ranks are given up.
    pub node_grace_seconds: f64,
    /// Longest wait for ranks to start and meet.
    pub rendezvous_seconds: f64,
    /// Longest wait inside one collective operation.
    pub collective_seconds: f64,
    /// Longest wait for ranks to save and stop once asked.
    pub drain_seconds: f64,
    /// Generations that may die one after the other without a new step before the job fails.
    pub restart_limit: u32,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            min_ranks: 1,
            max_ranks: 0,
            device: Device::Auto,
            collective: CollectiveKind::Auto,
            threads_per_rank: 1,
            node_grace_seconds: 5.0,
            rendezvous_seconds: 120.0,
            collective_seconds: 300.0,
            drain_seconds: 100.0,
            restart_limit: 3,
        }
    }
}

/// Where ranks compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// CUDA where there is a GPU, else CPU.
    #[default]
    Auto,
    /// CPU.
    Cpu,
    /// CUDA; an error without a GPU.
    Cuda,
}

/// How ranks exchange gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CollectiveKind {
    /// NCCL on GPUs if `precision.determinism = "fast"`, else TCP.
    #[default]
    Auto,
    /// Baton's own, over TCP, in host memory.
    Tcp,
    /// NVIDIA's library, in device memory.
    Nccl,
}

/// When to stop early.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Stop once evaluated top-1 accuracy (0..1) reaches this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_top1: Option<f64>,
    /// Stop with a checkpoint after so many hours of training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hours: Option<f64>,
    /// Stop with a checkpoint once so many dollars are spent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dollars: Option<f64>,
}

fn yes() -> bool {
    true
}
fn one() -> u32 {
    1
}
fn three() -> u32 {
    3
}
fn eight() -> u32 {
    8
}
fn shuffle_window() -> u64 {
    16_384
}
fn cache_gib() -> f64 {
    100.0
}
fn input_field() -> String {
    "image".to_owned()
}
fn label_field() -> String {
    "label".to_owned()
}
/// ImageNet's statistics as torchvision uses them, times 255.
fn imagenet_mean() -> [f32; 3] {
    [123.675, 116.28, 103.53]
}
fn imagenet_std() -> [f32; 3] {
    [58.395, 57.12, 57.375]
}
fn adam_betas() -> [f64; 2] {
    [0.9, 0.999]
}
fn adam_eps() -> f64 {
    1e-8
}
fn third() -> f64 {
    0.3
}
fn twenty_five() -> f64 {
    25.0
}
fn ten_thousand() -> f64 {
    1e4
}
