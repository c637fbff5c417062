//! The recipe: one file that defines a job completely.
//!
//! A [`JobSpec`] is always valid: [`JobSpec::from_toml`] refuses unknown keys, values out of range and features that
//! this build does not have, each with field, value and rule.
//!
//! `docs/recipes.md` repeats the doc comments of the fields of all sections, and a test compares them: run `make fix`
//! after a change.
//!
//! # What may change in the sections
//!
//! Recipes of every earlier version, also those in journals and checkpoints, must stay readable, and lead to the same
//! weights. So a new key has a default, which stands for what was done before the key existed; no key or variant is
//! renamed or removed (a better spelling is added, and [`JobSpec::deprecated_keys`] names the deprecated one); no
//! default that affects the weights changes; and no rule refuses a value that an earlier version trained with.
//! [`JobSpec::recipe_hash`] may change, as it is only displayed.

mod adapter;
mod augment;
mod checkpoint;
mod cluster;
mod data;
mod difference;
mod ema;
mod error;
mod evaluation;
mod guard;
mod limits;
mod loss;
mod model;
mod optimizer;
mod patterns;
mod precision;
mod resolve;
mod rules;
mod schedule;
#[cfg(test)]
mod tests;
mod train;

use std::{io, path::Path};

use serde::{Deserialize, Serialize};

pub(crate) use self::model::ignored;
pub use self::{
    adapter::{ALL_LINEAR, Adapter, BaseFormat},
    augment::{Augment, AugmentSignal, RandAugment},
    checkpoint::Checkpoint,
    cluster::{Cluster, CollectiveKind, DeviceChoice},
    data::{Data, OnBadSample, Order, Resize, TARGET_INPUT},
    difference::FieldDifference,
    ema::Ema,
    error::{Error, Violation},
    evaluation::{Evaluation, Generate, SyntaxLanguage, spread},
    guard::{Guard, GuardRemedy},
    limits::{Limits, Target},
    loss::{LossKind, LossSpec},
    model::{Arch, ModelSpec, Pointwise},
    optimizer::OptimizerSpec,
    patterns::NamePatterns,
    precision::{Compute, Determinism, LossScale, Precision},
    resolve::{Resolved, ValueOrigin},
    schedule::Schedule,
    train::{Train, TrainPhase, is_recorded},
};

/// A complete, valid job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// Name of the job and of its run folder: letters, digits, `-`, `_`, `.`; never inherited from a base.
    pub name: String,
    /// Seed of all random numbers: initial weights, sample order, augmentation.
    #[serde(default)]
    pub seed: u64,
    /// The network.
    pub model: ModelSpec,
    /// Low-rank adapters of a language model; absent means that all weights are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<Adapter>,
    /// The data sets and how they are read.
    pub data: Data,
    /// Random changes to training images.
    #[serde(default)]
    pub augment: Augment,
    /// Length of training and batch size.
    pub train: Train,
    /// The update rule.
    pub optimizer: OptimizerSpec,
    /// The learning rate as a function of the sample cursor.
    pub schedule: Schedule,
    /// The loss function.
    #[serde(default)]
    pub loss: LossSpec,
    /// Number formats.
    #[serde(default)]
    pub precision: Precision,
    /// Moving average of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema: Option<Ema>,
    /// When and how training is evaluated.
    #[serde(default)]
    pub evaluation: Evaluation,
    /// When and where the state is saved.
    #[serde(default)]
    pub checkpoint: Checkpoint,
    /// Processes and devices.
    #[serde(default)]
    pub cluster: Cluster,
    /// When to stop early.
    #[serde(default)]
    pub limits: Limits,
    /// Detection and remedy of divergence.
    #[serde(default)]
    pub guard: Guard,
}

/// Whether a value need not be written.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl JobSpec {
    /// Reads a recipe file and its bases with `read`, like [`Resolved::read`].
    ///
    /// # Errors
    /// The same as those of [`Resolved::read`].
    pub fn read(
        file: &Path,
        overrides: &[String],
        read: impl Fn(&Path) -> io::Result<String>,
    ) -> Result<Self, Error> {
        Resolved::read(file, overrides, read).map(|resolved| resolved.spec)
    }

    /// Reads a recipe without bases and applies `overrides`, each `dotted.key=value` with a TOML value.
    ///
    /// # Errors
    /// A base, unknown keys, wrong types, or values that violate a rule.
    pub fn from_toml(text: &str, overrides: &[String]) -> Result<Self, Error> {
        let alone = Path::new("");
        Self::read(alone, overrides, |path| match path == alone {
            true => Ok(text.to_owned()),
            false => Err(io::Error::other(
                "this recipe was sent without its folder: send the output of `baton recipe show FILE --toml`",
            )),
        })
    }

    /// Reads the JSON with which a coordinator sends the recipe to its agents.
    ///
    /// # Errors
    /// Like those of [`Self::from_toml`].
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let spec: Self = serde_json::from_str(text).map_err(Error::Json)?;
        spec.validated()
    }

    /// The recipe as JSON, for [`Self::from_json`].
    #[must_use]
    pub fn to_json(&self) -> String {
        // Serializing plain structs, strings and numbers cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The recipe as TOML with every value, for [`from_toml`](Self::from_toml).
    #[must_use]
    pub fn to_toml(&self) -> String {
        // Serializing cannot fail, as above.
        toml::to_string(self).unwrap_or_default()
    }

    /// Deprecated keys that the recipe uses.
    #[must_use]
    pub fn deprecated_keys(&self) -> Vec<Violation> {
        let target = self.limits.target_top1.and_then(|value| {
            let rule = format!("is the deprecated spelling of {}", self.limits.target()?);
            let field = "limits.target_top1".into();
            Some(Violation { field, value: value.to_string(), rule })
        });
        target.into_iter().collect()
    }

    fn validated(self) -> Result<Self, Error> {
        let violations = rules::violations(&self);
        if violations.is_empty() { Ok(self) } else { Err(Error::Invalid(violations)) }
    }

    /// BLAKE3 hash of all values that affect the weights, for people to compare recipes.
    #[must_use]
    pub fn recipe_hash(&self) -> String {
        // Serializing cannot fail, as above.
        let values = serde_json::to_string(&self.weight_values()).unwrap_or_default();
        blake3::hash(values.as_bytes()).to_hex().to_string()
    }
}
