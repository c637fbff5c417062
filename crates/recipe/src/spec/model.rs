//! The network.

use std::fmt::{self, Display};

pub use baton_model::Arch;
use baton_model::{InputKind, NetworkDescription, NetworkOptions};
use serde::{Deserialize, Serialize};

use super::{
    Compute, JobSpec, LossKind, NamePatterns, OptimizerSpec, Violation, is_default, rules::Rules,
};

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// `resnet18`, `resnet34`, `resnet50`, `resnet101`, `resnet152` (torchvision's, v1.5); `resnet34_1d`
    /// for signals: kernels of nine samples; `program`: any PyTorch network, exported to the file in `program`;
    /// `causal_lm`: a language model in the folder `path`; `linear`: softmax regression in plain Rust, for tests of
    /// everything except the network.
    pub arch: Arch,
    /// With `arch = "causal_lm"`: a folder with `config.json` and safetensors files, as Hugging Face has them. Families:
    /// `llama` (also SmolLM), `mistral`, `qwen2`, `qwen3`, `gemma2`, `gemma3_text`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// With `arch = "program"`: a file that `torch.export.save` wrote.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub program: String,
    /// Number of outputs, at most 16777216: classes (at least 2), or values of a regression (at least 1). With
    /// `loss.kind = "program"`: number of values of the target. Not for `causal_lm`, which predicts tokens.
    #[serde(default)]
    pub num_classes: u32,
    /// Initialize the last BatchNorm scale of every residual block with 0 (Goyal et al. 2017, §5.1).
    #[serde(default)]
    pub zero_init_gamma: bool,
    /// NHWC memory order of activations and convolution weights: faster convolutions, the same result
    /// except for rounding.
    #[serde(default = "channels_last")]
    pub channels_last: bool,
    /// 1×1 convolutions on a CPU with `channels_last`: `product` of matrices, `convolution` of libtorch, or `auto`, the
    /// default: which is faster is measured when a run begins, and all its ranks and continuations do the same. They differ in
    /// the last bits: choose one where two runs must have the same bits on different processors. No effect on GPUs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pointwise: Pointwise,
    /// A fixed 3 × 3 blur before every strided convolution of 16 channels or more (Zhang 2019), as in
    /// ffcv-imagenet; images only.
    #[serde(default)]
    pub blur_pool: bool,
    /// Initial weights: a safetensors file with torchvision's names; empty means random weights. With `[adapter]`: PEFT's
    /// `adapter_model.safetensors`.
    #[serde(default)]
    pub pretrained: String,
    /// Do not load the classifier of `pretrained`, for another set of classes.
    #[serde(default)]
    pub new_head: bool,
    /// Blocks whose weights and BatchNorm statistics stay unchanged; they must be the first blocks: `stem`, `layer1` …
    /// `layer4` of a ResNet; needs `pretrained`. With `arch = "program"`: patterns for the names of parameters and
    /// statistics, such as `features.0.*`, where `*` stands for any text.
    #[serde(default)]
    pub freeze: Vec<String>,
    /// Patterns for the names of parameters without weight decay, such as `*.pos_embedding`, besides norms and biases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_decay: Vec<String>,
}

/// How 1×1 convolutions are computed on a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pointwise {
    /// As measured when a run begins: convolutions if they are clearly faster, else products.
    #[default]
    Auto,
    /// As products of matrices.
    Product,
    /// As libtorch's convolutions.
    Convolution,
}

impl Display for Pointwise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Product => "product",
            Self::Convolution => "convolution",
        })
    }
}

fn channels_last() -> bool {
    true
}

impl ModelSpec {
    /// The network for inputs with this many channels, with the blocks of [`freeze`](Self::freeze) frozen; `None` for
    /// `linear`, which does not consist of layers.
    #[must_use]
    pub fn describe(&self, channels: u64) -> Option<NetworkDescription> {
        let options = NetworkOptions {
            channels,
            outputs: self.num_classes.into(),
            zero_init_gamma: self.zero_init_gamma,
            blur_pool: self.blur_pool,
        };
        let network = self.arch.describe(&options)?.frozen(&self.freeze);
        let without_decay = self.no_decay_patterns();
        Some(network.without_decay(|name| without_decay.matches(name)))
    }

    /// The file or folder that defines the network; empty if its name does.
    #[must_use]
    pub fn definition(&self) -> &str {
        if self.arch.is_causal_lm() { &self.path } else { &self.program }
    }

    /// The patterns of [`freeze`](Self::freeze) for a program.
    #[must_use]
    pub fn freeze_patterns(&self) -> NamePatterns {
        NamePatterns::of(&self.freeze)
    }

    /// The patterns of [`no_decay`](Self::no_decay), likewise.
    #[must_use]
    pub fn no_decay_patterns(&self) -> NamePatterns {
        NamePatterns::of(&self.no_decay)
    }
}

impl JobSpec {
    /// Checks that every pattern describes one of the model's `parameters` or, to freeze them, `statistics`.
    ///
    /// # Errors
    /// The key, the pattern and what is wrong.
    pub fn check_patterns<'a>(
        &self,
        parameters: impl Iterator<Item = &'a str> + Clone,
        statistics: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), String> {
        let unused = |field: &str, texts: &[String], unused: Option<&str>| match unused {
            None => Ok(()),
            Some(pattern) => Err(format!(
                "{field} = [{}]: {pattern} is the name of no parameter",
                texts.join(", ")
            )),
        };
        let Self { model, optimizer, .. } = self;
        let all = parameters.clone().chain(statistics);
        unused("model.freeze", &model.freeze, model.freeze_patterns().unused(all))?;
        let no_decay = model.no_decay_patterns();
        unused("model.no_decay", &model.no_decay, no_decay.unused(parameters.clone()))?;
        let adamw = optimizer.adamw();
        unused("optimizer.adamw", adamw, NamePatterns::of(adamw).unused(parameters))
    }
}

/// Most outputs of a network. The last layer of the smallest ResNet has 512 weights per output: these are 34 GB, and
/// training needs at least twice as much.
const MAX_OUTPUTS: u32 = 1 << 24;

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let min = match spec.loss.kind {
        _ if spec.model.arch.is_causal_lm() => 0,
        kind if kind.takes_classes() => 2,
        LossKind::NextToken => 0,
        _ => 1,
    };
    rules.check(
        spec.model.num_classes >= min,
        "model.num_classes",
        spec.model.num_classes,
        &format!("must be at least {min}"),
    );
    rules.check(
        spec.model.num_classes <= MAX_OUTPUTS,
        "model.num_classes",
        spec.model.num_classes,
        &format!(
            "must be at most {MAX_OUTPUTS}, because the last layer of more outputs fits into no GPU"
        ),
    );
    let model = &spec.model;
    let is_of_images = model.arch.input_kind() == InputKind::Images && model.channels_last;
    rules.check(
        model.pointwise == Pointwise::Auto || is_of_images,
        "model.pointwise",
        model.pointwise,
        "is for the built-in networks of images with model.channels_last = true: remove it",
    );
    blocks(spec, rules);
    program(spec, rules);
    causal_lm(spec, rules);
    patterns(spec, rules);
    if spec.model.arch.is_linear() {
        linear(spec, rules);
    }
    if spec.model.arch.input_kind() == InputKind::Signals {
        signals(spec, rules);
    }
}

/// Rules for blocks of the network that the recipe names.
fn blocks(spec: &JobSpec, rules: &mut Rules) {
    let model = &spec.model;
    let frozen = &model.freeze;
    let listed = |names: &[String]| format!("[{}]", names.join(", "));
    // The names do not depend on the number of channels.
    if let Some(network) = model.describe(1) {
        let known: Vec<String> = network.block_names().map(str::to_owned).collect();
        rules.check(
            frozen.iter().eq(known.iter().take(frozen.len())),
            "model.freeze",
            listed(frozen),
            &format!("must be {} in this order, beginning with the first", known.join(", ")),
        );
        for name in &spec.train.recompute {
            rules.check(
                known.contains(name),
                "train.recompute",
                name,
                &format!("is not a block of this network: choose among {}", known.join(", ")),
            );
        }
    }
    let pretrained = !model.pretrained.is_empty();
    rules.check(
        frozen.is_empty() || pretrained || model.arch.is_program() || model.arch.is_causal_lm(),
        "model.freeze",
        listed(frozen),
        "would keep random weights: set model.pretrained to a file",
    );
    rules.check(
        !model.new_head || pretrained,
        "model.new_head",
        true,
        "needs model.pretrained; without it, every head is new",
    );
    for name in &spec.train.recompute {
        rules.check(
            !frozen.contains(name),
            "train.recompute",
            name,
            "is frozen and keeps no activations: remove it",
        );
    }
}

/// Rules for patterns of names.
fn patterns(spec: &JobSpec, rules: &mut Rules) {
    let (model, adamw) = (&spec.model, spec.optimizer.adamw());
    rules.patterns("model.no_decay", &model.no_decay);
    rules.patterns("optimizer.adamw", adamw);
    if model.arch.is_program() {
        rules.patterns("model.freeze", &model.freeze);
    }
    let decays_all = match spec.optimizer {
        OptimizerSpec::Sgd { decay_norm_and_bias, .. }
        | OptimizerSpec::AdamW { decay_norm_and_bias, .. }
        | OptimizerSpec::Muon { decay_norm_and_bias, .. } => decay_norm_and_bias,
        OptimizerSpec::Lars { .. } | OptimizerSpec::Lamb { .. } => false,
    };
    rules.check(
        model.no_decay.is_empty() || !decays_all,
        "model.no_decay",
        format!("[{}]", model.no_decay.join(", ")),
        "contradicts optimizer.decay_norm_and_bias = true: set that to false",
    );
    // The names do not depend on the number of channels.
    if let Some(network) = model.describe(1) {
        let names = network.parameters.iter().map(|tensor| tensor.name.as_str());
        for (field, patterns) in
            [("model.no_decay", &model.no_decay[..]), ("optimizer.adamw", adamw)]
        {
            if let Some(unused) = NamePatterns::of(patterns).unused(names.clone()) {
                rules.check(false, field, unused, "is the name of no parameter");
            }
        }
    }
}

/// Refuses options that a program decides itself.
fn program(spec: &JobSpec, rules: &mut Rules) {
    let model = &spec.model;
    if !model.arch.is_program() {
        rules.check(
            model.program.is_empty(),
            "model.program",
            &model.program,
            "needs model.arch = \"program\"",
        );
        return;
    }
    rules.check(
        !model.program.is_empty(),
        "model.program",
        "\"\"",
        "must be the file of the program: write it with torch.export.save",
    );
    let mut unsupported = |used: bool, field: &'static str, remedy: &str| {
        rules.check(!used, field, true, &format!("is part of the program: {remedy}"));
    };
    unsupported(model.zero_init_gamma, "model.zero_init_gamma", "initialise it in Python");
    unsupported(model.blur_pool, "model.blur_pool", "add it in Python");
    unsupported(model.new_head, "model.new_head", "replace the head in Python");
    rules.check(
        !spec.precision.fused,
        "precision.fused",
        true,
        "has kernels only for the networks of model.arch other than \"program\": remove it",
    );
}

/// Rules for language models.
fn causal_lm(spec: &JobSpec, rules: &mut Rules) {
    let (model, is_lm) = (&spec.model, spec.model.arch.is_causal_lm());
    rules.check(
        is_lm != model.path.is_empty(),
        "model.path",
        format!("{:?}", model.path),
        match is_lm {
            true => "must be the folder of the model, with config.json and safetensors files",
            false => "needs model.arch = \"causal_lm\"",
        },
    );
    if !is_lm {
        return;
    }
    let mut unsupported = |used: bool, field: &'static str, value: &dyn Display| {
        let rule = "is not supported by model.arch = \"causal_lm\": remove or change it";
        rules.check(!used, field, value, rule);
    };
    unsupported(model.num_classes != 0, "model.num_classes", &model.num_classes);
    unsupported(model.zero_init_gamma, "model.zero_init_gamma", &true);
    unsupported(model.blur_pool, "model.blur_pool", &true);
    unsupported(model.new_head, "model.new_head", &true);
    unsupported(spec.precision.fused, "precision.fused", &true);
    unsupported(!spec.train.phases.is_empty(), "train.phases", &"a list");
    unsupported(spec.evaluation.flip, "evaluation.flip", &true);
    let augment = &spec.augment;
    unsupported(augment.mixup_alpha != 0.0, "augment.mixup_alpha", &augment.mixup_alpha);
    let cutmix = augment.cutmix_probability;
    unsupported(cutmix != 0.0, "augment.cutmix_probability", &cutmix);
    let other = !matches!(spec.optimizer, OptimizerSpec::Sgd { .. } | OptimizerSpec::AdamW { .. });
    unsupported(other, "optimizer.kind", &spec.optimizer.kind());
    unsupported(
        !model.freeze.is_empty() && spec.adapter.is_some(),
        "model.freeze",
        &"a list beside [adapter], which freezes the whole model",
    );
}

/// Refuses options that the plain-Rust model does not support.
fn linear(spec: &JobSpec, rules: &mut Rules) {
    let (model, train) = (&spec.model, &spec.train);
    let mut unsupported = |used: bool, field: &'static str, value: &dyn Display| {
        let rule = "is not supported by model.arch = \"linear\": remove or change it";
        rules.check(!used, field, value, rule);
    };
    let sgd = matches!(spec.optimizer, OptimizerSpec::Sgd { .. });
    let kind = spec.optimizer.kind();
    unsupported(!sgd, "optimizer.kind", &kind);
    unsupported(model.blur_pool, "model.blur_pool", &true);
    unsupported(!model.no_decay.is_empty(), "model.no_decay", &"patterns");
    unsupported(!model.pretrained.is_empty(), "model.pretrained", &model.pretrained);
    let cross_entropy = spec.loss.kind == LossKind::CrossEntropy;
    unsupported(!cross_entropy, "loss.kind", &"other than cross_entropy");
    unsupported(!spec.loss.class_weights.is_empty(), "loss.class_weights", &"a list");
    unsupported(spec.precision.compute != Compute::Fp32, "precision.compute", &"other than fp32");
    unsupported(spec.precision.fused, "precision.fused", &true);
    unsupported(spec.ema.is_some(), "ema", &"a section");
    unsupported(!train.recompute.is_empty(), "train.recompute", &"stages");
    unsupported(train.layer_decay != 1.0, "train.layer_decay", &train.layer_decay);
    let clip = train.clip_grad_norm;
    unsupported(clip.is_some(), "train.clip_grad_norm", &clip.unwrap_or_default());
    unsupported(spec.augment.mixup_alpha != 0.0, "augment.mixup_alpha", &spec.augment.mixup_alpha);
    let cutmix = spec.augment.cutmix_probability;
    unsupported(cutmix != 0.0, "augment.cutmix_probability", &cutmix);
    unsupported(spec.evaluation.flip, "evaluation.flip", &true);
    let changes = train.phases.iter().any(|phase| phase.resolution != train.resolution);
    unsupported(changes, "train.phases", &"another resolution");
}

/// Values that the network ignores. In a file they are allowed, as they may be for another `arch`; as a change with
/// `--set` they are a mistake.
pub(crate) fn ignored(spec: &JobSpec) -> Vec<Violation> {
    if !spec.model.arch.is_linear() {
        return Vec::new();
    }
    let mut rules = Rules::default();
    let ignored = "is ignored by model.arch = \"linear\": remove it";
    rules.check(!spec.model.zero_init_gamma, "model.zero_init_gamma", true, ignored);
    rules.check(spec.model.channels_last, "model.channels_last", false, ignored);
    if let OptimizerSpec::Sgd { weight_decay, decay_norm_and_bias, .. } = spec.optimizer {
        rules.check(
            weight_decay == 0.0 || decay_norm_and_bias,
            "optimizer.decay_norm_and_bias",
            false,
            "is ignored by model.arch = \"linear\", which decays its biases too: set it to true",
        );
    }
    rules.violations()
}

/// Refuses options that have no meaning in one dimension.
fn signals(spec: &JobSpec, rules: &mut Rules) {
    let arch = spec.model.arch.name();
    let one_dimension = format!("is for images only: remove it with model.arch = \"{arch}\"");
    rules.check(!spec.model.blur_pool, "model.blur_pool", true, &one_dimension);
    rules.check(!spec.evaluation.flip, "evaluation.flip", true, &one_dimension);
    rules.check(!spec.precision.fused, "precision.fused", true, &one_dimension);
}
