//! Differences between two trees of values, and which differences between recipes matter for a saved state.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::Serialize;
use serde_json::Value;

use super::{Error, JobSpec};
use crate::progress::Outdated;

/// Fields and sections that do not affect the resulting weights: where a job runs, how its data is prepared, how often
/// it is saved and when it stops; and where a program or a language model is, whose content checkpoints compare by its digest.
const NO_EFFECT_ON_WEIGHTS: [&str; 12] = [
    "name",
    "model.program",
    "model.path",
    "checkpoint",
    "cluster",
    "limits",
    "train.log_every",
    "data.decode_threads",
    "data.prefetch_batches",
    "data.pin_threads",
    "data.cache_dir",
    "data.cache_gib",
];

/// Fields and sections that decide the training loss of given weights.
const DECIDE_LOSS: [&str; 3] = ["model", "data", "augment"];

/// Fields and sections that decide the loss and the metrics of an evaluation of given weights.
const DECIDE_METRICS: [&str; 21] = [
    "model.arch",
    "model.num_classes",
    "model.blur_pool",
    "adapter",
    "loss",
    "data.input_field",
    "data.extra_fields",
    "data.label_field",
    "data.sequence",
    "data.resize",
    "data.mean",
    "data.std",
    // The last of them is the resolution of evaluations, unless `evaluation.resolution` is another.
    "train.resolution",
    "train.phases",
    "evaluation.resolution",
    "evaluation.crop_ratio",
    "evaluation.flip",
    "evaluation.subset",
    "evaluation.samples",
    "evaluation.best",
    "evaluation.generate",
];

/// A field whose values in two trees, such as recipes, differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldDifference {
    /// Dotted path of the field, as for `--set` in a recipe.
    pub field: String,
    /// Value in the first tree; `None` if it has no such field.
    pub a: Option<Value>,
    /// Value in the second tree; `None` if it has no such field.
    pub b: Option<Value>,
}

/// `train.epochs: 16 → 20`
impl fmt::Display for FieldDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<Value>| value.as_ref().map_or("-".to_owned(), Value::to_string);
        write!(f, "{}: {} → {}", self.field, shown(&self.a), shown(&self.b))
    }
}

impl FieldDifference {
    /// Compares two trees field by field; a list counts as one value.
    #[must_use]
    pub fn between(a: Value, b: Value) -> Vec<Self> {
        let (in_a, in_b) = (values(a), values(b));
        let fields: BTreeSet<&String> = in_a.keys().chain(in_b.keys()).collect();
        let differing = fields.into_iter().filter(|field| in_a.get(*field) != in_b.get(*field));
        differing
            .map(|field| Self {
                field: field.clone(),
                a: in_a.get(field).cloned(),
                b: in_b.get(field).cloned(),
            })
            .collect()
    }

    /// Whether recipes that differ in this field can give different weights.
    #[must_use]
    pub fn affects_weights(&self) -> bool {
        affects_weights(&self.field)
    }

    /// Which results of recipes that differ in this field cannot be compared.
    fn outdates(&self) -> Outdated {
        match &*self.field {
            // Where the sets are decides nothing; checkpoints say what they hold.
            "data.train" | "data.val" => Outdated::Nothing,
            field if !affects_weights(field) => Outdated::Nothing,
            field if is_in(field, &DECIDE_METRICS) => Outdated::Evaluations,
            field if is_in(field, &DECIDE_LOSS) => Outdated::Loss,
            _ => Outdated::Nothing,
        }
    }
}

impl JobSpec {
    /// Differences between two recipes, with all defaults set.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<FieldDifference> {
        // Serializing plain structs, strings and numbers cannot fail.
        let [a, b] = [self, other].map(|spec| serde_json::to_value(spec).unwrap_or_default());
        FieldDifference::between(a, b)
    }

    /// Why this recipe cannot continue with a state of the recipe `saved` (as JSON): every changed field that affects
    /// the weights, as text. Empty if it can. A field that did not exist when `saved` was written has its default; a
    /// field unknown to this version comes from a newer version.
    #[must_use]
    pub fn changes_since(&self, saved: &str) -> Vec<String> {
        match Self::from_saved(saved) {
            Ok(saved) => {
                let differences = saved.differences(self).into_iter();
                differences
                    .filter(FieldDifference::affects_weights)
                    .map(|d| d.to_string())
                    .collect()
            }
            Err(error) => vec![error.to_string()],
        }
    }

    /// Which results in a state of the recipe `saved` (as JSON) cannot be compared with those of this recipe, on the same
    /// data.
    #[must_use]
    pub fn outdates(&self, saved: &str) -> Outdated {
        match Self::from_saved(saved) {
            Ok(saved) => {
                let differences = saved.differences(self).into_iter();
                differences.map(|d| d.outdates()).max().unwrap_or_default()
            }
            // What a newer version has changed is not known.
            Err(_) => Outdated::Evaluations,
        }
    }

    /// All values that affect the weights, by dotted path.
    pub(super) fn weight_values(&self) -> BTreeMap<String, Value> {
        // As in `differences`.
        let mut values = values(serde_json::to_value(self).unwrap_or_default());
        values.retain(|field, _| affects_weights(field));
        values
    }

    /// Reads a recipe that this version or an older one saved as JSON with [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// [`Error::Saved`] with the field that is unknown to this version, or [`Error::SavedNotFinite`].
    pub fn from_saved(saved: &str) -> Result<Self, Error> {
        let json = &mut serde_json::Deserializer::from_str(saved);
        serde_path_to_error::deserialize(json).map_err(|error| {
            let problem = error.inner().to_string();
            if problem.starts_with("invalid type: null") {
                return Error::SavedNotFinite(error.path().to_string());
            }
            // Omit the list of all existing fields.
            let problem = problem.split(", expected").next().unwrap_or(&problem);
            Error::Saved(format!("{}: {problem}", error.path()))
        })
    }
}

fn affects_weights(field: &str) -> bool {
    !is_in(field, &NO_EFFECT_ON_WEIGHTS)
}

/// Whether a field is one of `sections`, which are fields or sections, or in one of them.
fn is_in(field: &str, sections: &[&str]) -> bool {
    sections.iter().any(|section| {
        field.strip_prefix(section).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// All values of a tree, by their dotted paths.
fn values(tree: Value) -> BTreeMap<String, Value> {
    fn collect(value: Value, path: String, into: &mut BTreeMap<String, Value>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    let dot = if path.is_empty() { "" } else { "." };
                    collect(value, format!("{path}{dot}{name}"), into);
                }
            }
            value => {
                into.insert(path, value);
            }
        }
    }
    let mut found = BTreeMap::new();
    collect(tree, String::new(), &mut found);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listed_fields_exist() {
        let recipe = std::fs::read_to_string("../../recipes/digits_cpu.toml").unwrap();
        let is_unknown = |field: &str| {
            let error = JobSpec::from_toml(&recipe, &[format!("{field}='none'")]).err();
            error.is_some_and(|error| error.to_string().contains("unknown field"))
        };
        assert!(is_unknown("model.weights"));
        for listed in NO_EFFECT_ON_WEIGHTS.iter().chain(&DECIDE_LOSS).chain(&DECIDE_METRICS) {
            assert!(!is_unknown(listed), "{listed}");
        }
    }
}
