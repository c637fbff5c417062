//! Errors of a recipe.

use std::{borrow::Cow, fmt};

use serde::Serialize;

/// Why a recipe was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The recipe file cannot be read.
    #[error(transparent)]
    Unreadable(std::io::Error),
    /// Invalid TOML, an unknown key, a value of the wrong type, or a base that cannot be used.
    #[error("recipe: {location}{problem}")]
    Text {
        /// Location in the file, as a prefix of the message; empty if unknown.
        location: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// The JSON that the coordinator sent does not fit this build.
    #[error(
        "recipe from the coordinator does not fit this build (is it of the same version?): {0}"
    )]
    Json(serde_json::Error),
    /// A recipe saved with a state has a field or value that is unknown to this version.
    #[error("{0}; a newer Baton wrote it: continue with that version")]
    Saved(String),
    /// A recipe saved with a state has a null where a number stands: an older version took NaN and infinity, which JSON
    /// does not have.
    #[error("{0}: instead of a number there is null, as an older Baton saved NaN and infinity")]
    SavedNotFinite(String),
    /// An override is not `dotted.key=value`.
    #[error("override `{0}` is not of the form section.key=value, e.g. train.epochs=3")]
    Override(String),
    /// Values that violate rules; all violations are listed.
    #[error("recipe: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Invalid(Vec<Violation>),
}

/// A value that violates a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Dotted path of the key.
    pub field: Cow<'static, str>,
    /// The value found.
    pub value: String,
    /// The rule, or the remedy.
    pub rule: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}: {}", self.field, self.value, self.rule)
    }
}
