//! Low-rank adapters for language models.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// LoRA (Hu et al. 2021, arXiv 2106.09685): the model keeps its weights `W`, and linear layers compute
/// `W x + scale * B (A x)` with small trained matrices `A` and `B`. Without this section all weights are trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adapter {
    /// Rank of the matrices, 1..1024; PEFT's `r`.
    pub rank: u32,
    /// Numerator of the scale, which is `alpha / rank`; above 0; PEFT's `lora_alpha`.
    pub alpha: f64,
    /// Share of the inputs of `A` that are dropped in training, 0..1; which ones depends on the seed, the epoch and the
    /// sample; PEFT's `lora_dropout`.
    #[serde(default)]
    pub dropout: f64,
    /// Scale by `alpha / sqrt(rank)` (Kalajdzievski 2023, arXiv 2312.03732); PEFT's `use_rslora`.
    #[serde(default)]
    pub rslora: bool,
    /// Linear layers that get matrices: `all-linear`, or ends of names, such as `q_proj` or `layers.3.mlp.down_proj`;
    /// PEFT's `target_modules`.
    #[serde(default = "targets")]
    pub targets: Vec<String>,
    /// Number format of the model's weights: `auto` (that of `precision.compute`), `fp32`, `bf16`; or `nf4` (QLoRA):
    /// 4.13 bits for each weight of a linear layer, the others as `auto`.
    #[serde(default)]
    pub base: BaseFormat,
}

fn targets() -> Vec<String> {
    vec![ALL_LINEAR.to_owned()]
}

/// The target that stands for every linear layer.
pub const ALL_LINEAR: &str = "all-linear";

/// Number format of a model's frozen weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BaseFormat {
    /// That of `precision.compute`.
    #[default]
    Auto,
    /// IEEE single precision.
    Fp32,
    /// bfloat16.
    Bf16,
    /// 4-bit NF4 with double quantisation (QLoRA) for the linear layers; the rest as `auto`.
    Nf4,
}

impl Adapter {
    /// Whether the model's weights are stored in 4 bits.
    #[must_use]
    pub fn is_nf4(&self) -> bool {
        self.base == BaseFormat::Nf4
    }

    /// Factor of `B (A x)`.
    #[must_use]
    pub fn scale(&self) -> f64 {
        let rank = f64::from(self.rank);
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let Some(adapter) = &spec.adapter else { return };
    rules.check(
        spec.model.arch.is_causal_lm(),
        "adapter",
        "a section",
        "needs model.arch = \"causal_lm\"",
    );
    rules.within("adapter.rank", adapter.rank, 1..=1024);
    rules.positive("adapter.alpha", adapter.alpha);
    rules.below_1("adapter.dropout", adapter.dropout);
    rules.check(
        !adapter.targets.is_empty(),
        "adapter.targets",
        "[]",
        "must name linear layers, e.g. [\"all-linear\"]",
    );
}
