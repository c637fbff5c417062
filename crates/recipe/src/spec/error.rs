//! What can be wrong with a recipe.

use std::fmt;

use serde::Serialize;

/// Why a recipe was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The recipe file cannot be read.
    #[error(transparent)]
    Unreadable(std::io::Error),
    /// Not TOML, an unknown key, a value of the wrong type, or a base that cannot be used.
    #[error("recipe: {place}{problem}")]
    Text {
        /// Where, to be put in front; empty if nobody knows.
        place: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// The JSON form handed to an agent does not fit this build.
    #[error(
        "recipe from the coordinator does not fit this build (is it of the same version?): {0}"
    )]
    Json(serde_json::Error),
    /// A recipe saved with a state has a field or value that this version does not know.
    #[error("{0}; a newer Baton wrote it: go on with that version")]
    Saved(String),
    /// An override is not `dotted.key=value`.
    #[error("override `{0}` is not of the form section.key=value, e.g. train.epochs=3")]
    Override(String),
    /// Values against the rules; all of them are listed.
    #[error("recipe: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Invalid(Vec<Violation>),
}

/// One value against one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Dotted path of the key.
    pub field: &'static str,
    /// The value found.
    pub value: String,
    /// What it must be, or what to do instead.
    pub rule: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}: {}", self.field, self.value, self.rule)
    }
}
