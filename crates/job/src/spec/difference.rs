//! In which values two recipes differ.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde_json::Value;

use super::JobSpec;

/// A value that two recipes do not share.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Its dotted path, as for `--set`.
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

impl JobSpec {
    /// Field by field, defaults filled in; a list is one value.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let (in_a, in_b) = (values(self), values(other));
        let fields: BTreeSet<&String> = in_a.keys().chain(in_b.keys()).collect();
        let differing = fields.into_iter().filter(|field| in_a.get(*field) != in_b.get(*field));
        differing
            .map(|field| Difference {
                field: field.clone(),
                a: in_a.get(field).cloned(),
                b: in_b.get(field).cloned(),
            })
            .collect()
    }

    /// Those that decide the resulting weights, as [`recipe_hash`](Self::recipe_hash) sees it.
    #[must_use]
    pub fn differences_in_weights(&self, other: &Self) -> Vec<Difference> {
        self.decisive().differences(&other.decisive())
    }
}

/// All values by their dotted paths.
fn values(spec: &JobSpec) -> BTreeMap<String, Value> {
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
    // A tree of plain structs, strings and numbers has no way to fail here.
    collect(serde_json::to_value(spec).unwrap_or_default(), String::new(), &mut found);
    found
}
