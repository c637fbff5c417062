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
            let valid = betas.iter().all(|beta| (0.0..1.0).contains(beta));
            rules.check(valid, "optimizer.betas", format!("{betas:?}"), "must be in [0, 1)");
            rules.positive("optimizer.eps", eps);
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
