//! The sections of a recipe, one struct each. Units stand in the names.

use serde::{Deserialize, Serialize};

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Which one.
    pub arch: Arch,
    /// Number of outputs: classes, or values of a regression.
    pub num_classes: u32,
    /// Start the last BatchNorm scale of every residual block at zero (Goyal et al. 2017, §5.1).
    #[serde(default)]
    pub zero_init_gamma: bool,
    /// Keep activations and convolution weights in NHWC order.
    #[serde(default = "yes")]
    pub channels_last: bool,
    /// Blur before every strided convolution of 16 channels or more (Zhang 2019, as in
    /// ffcv-imagenet).
    #[serde(default)]
    pub blur_pool: bool,
    /// Weights to begin with: a safetensors file with torchvision's names; empty begins at random.
    #[serde(default)]
    pub pretrained: String,
    /// Leave the classifier of `pretrained` out: for another set of classes.
    #[serde(default)]
    pub new_head: bool,
    /// Stages that keep their weights and statistics, from the first on.
    #[serde(default)]
    pub freeze: Vec<Stage>,
}

/// Parts of a ResNet, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// The first convolution.
    Stem,
    /// First residual stage.
    Layer1,
    /// Second residual stage.
    Layer2,
    /// Third residual stage.
    Layer3,
    /// Fourth residual stage.
    Layer4,
}

impl Stage {
    /// All of them, in order.
    pub const ALL: [Self; 5] = [Self::Stem, Self::Layer1, Self::Layer2, Self::Layer3, Self::Layer4];
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
    /// ResNet-34 with kernels of nine samples in one dimension, for signals.
    #[serde(rename = "resnet34_1d")]
    Resnet34In1d,
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
            Self::Resnet34In1d => "resnet34_1d",
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
    /// Name of the label field: Int for classes, Int or Float for a regression.
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
    /// MixUp's beta parameter (Zhang et al. 2018); 0 is off. Batches that get CutMix get no MixUp.
    pub mixup_alpha: f64,
    /// Share of batches that get CutMix (Yun et al. 2019).
    pub cutmix_probability: f64,
    /// CutMix's beta parameter.
    pub cutmix_alpha: f64,
}

impl Default for Augment {
    fn default() -> Self {
        Self {
            crop_scale: [0.08, 1.0],
            crop_ratio: [3.0 / 4.0, 4.0 / 3.0],
            flip: 0.5,
            mixup_alpha: 0.0,
            cutmix_probability: 0.0,
            cutmix_alpha: 1.0,
        }
    }
}

/// Length and batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// Passes over the training data.
    pub epochs: u32,
    /// Samples per optimizer update, over all ranks; until the first of `phases`.
    pub global_batch: u32,
    /// Side of the training images in pixels; until the first of `phases`. Signals ignore it.
    #[serde(default = "thirty_two")]
    pub resolution: u32,
    /// Parts the global batch is always split into, whatever the number of ranks; a power of two.
    #[serde(default = "eight")]
    pub virtual_ranks: u32,
    /// Micro-batches per virtual rank and update, one after the other: less memory, same batch.
    #[serde(default = "one")]
    pub grad_accumulation: u32,
    /// Largest L2 norm of the whole gradient, which is scaled down to it; absent is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_grad_norm: Option<f64>,
    /// Progressive resize: resolution and batch from an epoch on. Empty is off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<Phase>,
    /// Stages whose activations are computed a second time for the gradient instead of kept.
    #[serde(default)]
    pub recompute: Vec<Stage>,
}

/// What changes at an epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Its first epoch, counted from 0.
    pub from_epoch: u32,
    /// Side of the images in pixels.
    pub resolution: u32,
    /// Samples per optimizer update.
    pub global_batch: u32,
    /// Epochs in which the resolution rises to this one from the one before, in multiples of 32; 0 is
    /// at once.
    #[serde(default)]
    pub ramp_epochs: u32,
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
    /// SGD with a rate of its own for every layer (You et al. 2017), for very large batches. BatchNorm
    /// parameters and biases neither decay nor get a rate of their own.
    Lars {
        /// Factor on the running gradient.
        #[serde(default)]
        momentum: f64,
        /// L2 penalty.
        #[serde(default)]
        weight_decay: f64,
        /// The paper's η: a layer's rate is η · ‖weights‖ / (‖gradient‖ + weight_decay · ‖weights‖).
        #[serde(default = "thousandth")]
        trust_coefficient: f64,
        /// Added to the denominator.
        #[serde(default = "adam_eps")]
        eps: f64,
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
    /// `lr · gamma^n` after n of the milestones, as `torch.optim.lr_scheduler.MultiStepLR`.
    Step {
        /// Value before the first milestone.
        lr: f64,
        /// Epochs at which the value drops, rising.
        milestones: Vec<f64>,
        /// Factor of each drop.
        #[serde(default = "tenth")]
        gamma: f64,
        /// Length of the linear rise from near zero at the start.
        #[serde(default)]
        warmup_epochs: f64,
    },
}

/// The objective.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Loss {
    /// Which one.
    pub kind: LossKind,
    /// Share of the target spread over all classes (Szegedy et al. 2016, §7).
    pub label_smoothing: f64,
    /// Distance from the target at which Huber's loss turns from a square to a line.
    pub huber_delta: f64,
}

impl Default for Loss {
    fn default() -> Self {
        Self { kind: LossKind::CrossEntropy, label_smoothing: 0.0, huber_delta: 1.0 }
    }
}

/// What is minimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Classification.
    #[default]
    CrossEntropy,
    /// Regression: the square of the difference.
    Mse,
    /// Regression: Huber 1964; as `torch.nn.HuberLoss`.
    Huber,
}

impl LossKind {
    /// Whether labels are values rather than classes.
    #[must_use]
    pub fn is_regression(self) -> bool {
        self != Self::CrossEntropy
    }
}

/// Number formats.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// Format of activations and of the weights' working copy; masters are always fp32.
    pub compute: Compute,
    /// What is promised about bits.
    pub determinism: Determinism,
    /// Kernels of our own for BatchNorm with what follows it, and for SGD.
    pub fused: bool,
    /// Of fp16 only.
    pub loss_scale: LossScale,
}

/// Dynamic loss scaling as in `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossScale {
    /// First factor on the loss.
    pub initial: f64,
    /// Its change after `growth_interval` updates without overflow.
    pub growth: f64,
    /// Its change after an overflow, whose update is left out.
    pub backoff: f64,
    /// Updates between two growths.
    pub growth_interval: u32,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { initial: 65_536.0, growth: 2.0, backoff: 0.5, growth_interval: 2_000 }
    }
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
    /// Share kept each time.
    pub decay: f64,
    /// Updates between two times.
    #[serde(default = "one")]
    pub every_steps: u32,
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
    /// Share of the validation set used before the last epoch: always the same samples, evenly spread.
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
    /// Folder or `s3://bucket/prefix`; empty means `checkpoints` in the run folder.
    pub dir: String,
    /// Epochs between saves; 0 is off.
    pub every_epochs: u32,
    /// Updates between saves; 0 is off.
    pub every_steps: u64,
    /// Newest ones kept.
    pub keep_last: u32,
    /// Keep the one with the best metric too.
    pub keep_best: bool,
    /// Keep those of the end of every so many epochs for ever too; 0 is off.
    pub keep_every_epochs: u32,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self {
            dir: String::new(),
            every_epochs: 1,
            every_steps: 0,
            keep_last: 3,
            keep_best: true,
            keep_every_epochs: 0,
        }
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
    /// A rank that trains and has not answered for so long, or computes or evaluates one batch for so long, or
    /// waits four times as long for its loader or for a save, is killed and replaced; 0: never.
    pub hang_seconds: f64,
    /// Whether every node keeps one more process ready, which takes the place of a rank that dies: it has loaded
    /// the libraries and opened the data, and holds no memory of a GPU.
    pub warm_spare: bool,
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
            hang_seconds: 60.0,
            warm_spare: false,
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
    /// NCCL on GPUs, else TCP.
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
    /// Complete once top-1 accuracy (0..1) of the whole validation set reaches this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_top1: Option<f64>,
    /// Complete after so many evaluations without a better one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u32>,
    /// Stop with a checkpoint once nodes have been attached for so many hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hours: Option<f64>,
    /// Stop with a checkpoint once so many dollars are spent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dollars: Option<f64>,
    /// Price of all nodes together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dollars_per_hour: Option<f64>,
}

/// What is done against training that goes wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Guard {
    /// Watch at all; without it only a loss or gradient that is no number ends the job.
    pub enabled: bool,
    /// Updates over which the loss is averaged.
    pub window: u32,
    /// The averaged loss may rise above its lowest value by this share of its first value.
    pub loss_rise: f64,
    /// An evaluation below this share of the best one is a collapse; 0 is off.
    pub accuracy_collapse: f64,
    /// What changes after going back to the last good checkpoint.
    pub remedy: Remedy,
    /// Factor on the learning rate from then on.
    pub lr_factor: f64,
    /// Times to go back before the job fails.
    pub max_rollbacks: u32,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            enabled: true,
            window: 20,
            loss_rise: 0.5,
            accuracy_collapse: 0.25,
            remedy: Remedy::LowerLr,
            lr_factor: 0.5,
            max_rollbacks: 3,
        }
    }
}

/// What changes after a rollback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// The learning rate.
    #[default]
    LowerLr,
    /// The batch at which training went wrong and the one before it are left out.
    SkipBatch,
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
fn thirty_two() -> u32 {
    32
}
fn tenth() -> f64 {
    0.1
}
fn thousandth() -> f64 {
    1e-3
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
