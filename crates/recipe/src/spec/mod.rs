//! The recipe: one file that says everything about a job.
//!
//! A [`JobSpec`] exists only in validated form: [`JobSpec::from_toml`] refuses unknown keys, values
//! out of range and features this build does not have, each with field, value and rule.

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
    augment::Augment,
    checkpoint::Checkpoint,
    cluster::{Cluster, CollectiveKind, Device},
    data::{Data, OnBadSample, Order, Resize},
    difference::Difference,
    ema::Ema,
    error::{Error, Violation},
    evaluation::Evaluation,
    guard::{Guard, Remedy},
    limits::{Limits, Target},
    loss::{Loss, LossKind},
    model::{Arch, Model},
    optimizer::Optimizer,
    precision::{Compute, Determinism, LossScale, Precision},
    resolve::{Origin, Resolved},
    schedule::Schedule,
    train::{Phase, Train},
};

/// A complete, valid job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// Names the run folder and the job in every display: letters, digits, `-`, `_`, `.`; never taken from
    /// a base.
    pub name: String,
    /// Root of every random draw: initial weights, sample order, augmentation.
    #[serde(default)]
    pub seed: u64,
    /// The network.
    pub model: Model,
    /// The files and how they are read.
    pub data: Data,
    /// Random changes to training images.
    #[serde(default)]
    pub augment: Augment,
    /// Length and batch.
    pub train: Train,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The learning rate as a function of the sample cursor.
    pub schedule: Schedule,
    /// The objective.
    #[serde(default)]
    pub loss: Loss,
    /// Number formats.
    #[serde(default)]
    pub precision: Precision,
    /// Moving average of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema: Option<Ema>,
    /// When and how accuracy is measured.
    #[serde(default)]
    pub evaluation: Evaluation,
    /// When and where state is saved.
    #[serde(default)]
    pub checkpoint: Checkpoint,
    /// Processes and devices.
    #[serde(default)]
    pub cluster: Cluster,
    /// When to stop early.
    #[serde(default)]
    pub limits: Limits,
    /// What is done against training that goes wrong.
    #[serde(default)]
    pub guard: Guard,
}

impl JobSpec {
    /// Reads a recipe file and its bases by `read`, as [`Resolved::read`] does.
    ///
    /// # Errors
    /// As there.
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
    /// A base, unknown keys, wrong types, values against a rule.
    pub fn from_toml(text: &str, overrides: &[String]) -> Result<Self, Error> {
        let alone = Path::new("");
        Self::read(alone, overrides, |path| match path == alone {
            true => Ok(text.to_owned()),
            false => Err(io::Error::other(
                "this recipe came without its folder: send what `baton recipe show FILE --toml` prints",
            )),
        })
    }

    /// Reads the form in which a coordinator hands the recipe to its agents.
    ///
    /// # Errors
    /// As [`Self::from_toml`].
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let spec: Self = serde_json::from_str(text).map_err(Error::Json)?;
        spec.validated()
    }

    /// The form that [`Self::from_json`] reads.
    #[must_use]
    pub fn to_json(&self) -> String {
        // A tree of plain structs, strings and numbers has no way to fail here.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// With every value, as [`from_toml`](Self::from_toml) reads it.
    #[must_use]
    pub fn to_toml(&self) -> String {
        // As above.
        toml::to_string(self).unwrap_or_default()
    }

    /// Keys that are understood but spelt otherwise now.
    #[must_use]
    pub fn old_keys(&self) -> Vec<Violation> {
        let target = self.limits.target_top1.and_then(|value| {
            let rule = format!("is the old spelling of {}", self.limits.target()?);
            Some(Violation { field: "limits.target_top1", value: value.to_string(), rule })
        });
        target.into_iter().collect()
    }

    fn validated(self) -> Result<Self, Error> {
        let violations = rules::violations(&self);
        if violations.is_empty() { Ok(self) } else { Err(Error::Invalid(violations)) }
    }

    /// BLAKE3 of everything that affects the weights, for people to compare.
    #[must_use]
    pub fn recipe_hash(&self) -> String {
        // As above.
        let values = serde_json::to_string(&self.weight_values()).unwrap_or_default();
        blake3::hash(values.as_bytes()).to_hex().to_string()
    }
}
