//! In which values two trees differ.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::Serialize;
use serde_json::Value;

use super::JobSpec;

/// A value that two trees, such as recipes, do not share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Its dotted path, as for `--set` in a recipe.
    pub field: String,
    /// In the first one; `None` if it has no such field.
    pub a: Option<Value>,
    /// In the second one.
    pub b: Option<Value>,
}

/// `train.epochs: 16 → 20`
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<Value>| value.as_ref().map_or("-".to_owned(), Value::to_string);
        write!(f, "{}: {} → {}", self.field, shown(&self.a), shown(&self.b))
    }
}

impl Difference {
    /// Field by field; a list is one value.
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
}

impl JobSpec {
    /// Defaults are filled in first.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        // A tree of plain structs, strings and numbers has no way to fail here.
        let [a, b] = [self, other].map(|spec| serde_json::to_value(spec).unwrap_or_default());
        Difference::between(a, b)
    }

    /// Those that decide the resulting weights, as [`recipe_hash`](Self::recipe_hash) sees it.
    #[must_use]
    pub fn differences_in_weights(&self, other: &Self) -> Vec<Difference> {
        self.decisive().differences(&other.decisive())
    }
}

/// All values by their dotted paths.
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
