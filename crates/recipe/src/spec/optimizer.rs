//! The update rule.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// The update rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum OptimizerSpec {
    /// Stochastic gradient descent as in `torch.optim.SGD` without dampening.
    Sgd {
        /// Factor of the running gradient, in [0, 1).
        #[serde(default)]
        momentum: f64,
        /// Nesterov momentum: look ahead by one momentum step; needs momentum.
        #[serde(default)]
        nesterov: bool,
        /// L2 penalty, in [0, 1).
        #[serde(default)]
        weight_decay: f64,
        /// Also decay BatchNorm parameters and biases.
        #[serde(default)]
        decay_norm_and_bias: bool,
    },
    /// Adam with decoupled weight decay (Loshchilov & Hutter 2019) as in `torch.optim.AdamW`.
    AdamW {
        /// Factors of the running gradient and of its running square, in [0, 1).
        #[serde(default = "betas")]
        betas: [f64; 2],
        /// Added to the denominator, above 0.
        #[serde(default = "eps")]
        eps: f64,
        /// Decoupled decay, multiplied by the learning rate; in [0, 1).
        #[serde(default)]
        weight_decay: f64,
        /// Also decay BatchNorm parameters and biases.
        #[serde(default)]
        decay_norm_and_bias: bool,
    },
    /// SGD with a separate rate for every layer (You et al. 2017), for very large batches. BatchNorm parameters and
    /// biases do not decay and have no separate rate.
    Lars {
        /// Factor of the running gradient, in [0, 1).
        #[serde(default)]
        momentum: f64,
        /// L2 penalty, in [0, 1).
        #[serde(default)]
        weight_decay: f64,
        /// η of the paper: a layer's rate is η · ‖w‖ / (‖g‖ + weight_decay · ‖w‖).
        #[serde(default = "trust_coefficient")]
        trust_coefficient: f64,
        /// Added to the denominator, above 0.
        #[serde(default = "eps")]
        eps: f64,
    },
    /// Adam with a separate rate for every layer (You et al. 2020, arXiv 1904.00962), for very large batches: the norm of
    /// its weights divided by that of its step. BatchNorm parameters and biases do not decay and have no separate rate.
    Lamb {
        /// Factors of the running gradient and of its running square, in [0, 1).
        #[serde(default = "betas")]
        betas: [f64; 2],
        /// Added to the denominator, above 0.
        #[serde(default = "lamb_eps")]
        eps: f64,
        /// Decay, which is part of the step; in [0, 1).
        #[serde(default)]
        weight_decay: f64,
    },
    /// Momentum whose step is made orthogonal, for the weights of convolutions and linear layers (Jordan et al. 2024, as
    /// in `torch.optim.Muon` with `match_rms_adamw`), and AdamW for all other parameters and the last layer.
    Muon {
        /// Factor of the running gradient of those weights, in [0, 1).
        #[serde(default = "muon_momentum")]
        momentum: f64,
        /// Nesterov momentum: look ahead by one momentum step.
        #[serde(default = "nesterov")]
        nesterov: bool,
        /// AdamW's factors of the running gradient and of its running square, in [0, 1).
        #[serde(default = "betas")]
        betas: [f64; 2],
        /// Added to AdamW's denominator, above 0.
        #[serde(default = "eps")]
        eps: f64,
        /// Decoupled decay, multiplied by the learning rate; in [0, 1).
        #[serde(default)]
        weight_decay: f64,
        /// Also decay BatchNorm parameters and biases.
        #[serde(default)]
        decay_norm_and_bias: bool,
        /// Names of further weights for AdamW, where `*` stands for any text.
        #[serde(default)]
        adamw: Vec<String>,
    },
}

impl OptimizerSpec {
    /// The value of `kind` in a recipe.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Sgd { .. } => "sgd",
            Self::AdamW { .. } => "adamw",
            Self::Lars { .. } => "lars",
            Self::Lamb { .. } => "lamb",
            Self::Muon { .. } => "muon",
        }
    }

    /// Patterns for the names of weights that Muon leaves to AdamW.
    #[must_use]
    pub fn adamw(&self) -> &[String] {
        match self {
            Self::Muon { adamw, .. } => adamw,
            _ => &[],
        }
    }
}

fn muon_momentum() -> f64 {
    0.95
}
fn nesterov() -> bool {
    true
}
fn betas() -> [f64; 2] {
    [0.9, 0.999]
}
fn eps() -> f64 {
    1e-8
}
fn lamb_eps() -> f64 {
    1e-6
}
fn trust_coefficient() -> f64 {
    1e-3
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    match spec.optimizer {
        OptimizerSpec::Sgd { momentum, nesterov, weight_decay, .. } => {
            rules.below_1("optimizer.momentum", momentum);
            rules.check(
                !nesterov || momentum > 0.0,
                "optimizer.nesterov",
                nesterov,
                "needs optimizer.momentum above 0",
            );
            rules.below_1("optimizer.weight_decay", weight_decay);
        }
        OptimizerSpec::AdamW { betas, eps, weight_decay, .. }
        | OptimizerSpec::Lamb { betas, eps, weight_decay } => {
            moments(betas, eps, rules);
            rules.below_1("optimizer.weight_decay", weight_decay);
        }
        OptimizerSpec::Muon { momentum, betas, eps, weight_decay, .. } => {
            rules.below_1("optimizer.momentum", momentum);
            moments(betas, eps, rules);
            rules.below_1("optimizer.weight_decay", weight_decay);
        }
        OptimizerSpec::Lars { momentum, weight_decay, trust_coefficient, eps } => {
            rules.below_1("optimizer.momentum", momentum);
            rules.positive("optimizer.trust_coefficient", trust_coefficient);
            rules.positive("optimizer.eps", eps);
            rules.below_1("optimizer.weight_decay", weight_decay);
        }
    }
}

fn moments(betas: [f64; 2], eps: f64, rules: &mut Rules) {
    let valid = betas.iter().all(|beta| (0.0..1.0).contains(beta));
    rules.check(valid, "optimizer.betas", format!("{betas:?}"), "must be in [0, 1)");
    rules.positive("optimizer.eps", eps);
}
