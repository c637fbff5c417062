//! `baton recipe diff`

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use baton_job::{
    JobSpec,
    exit::{FAILED, Failure, OK},
};
use comfy_table::{Table, presets};
use serde_json::Value;

use super::{find, read};
use crate::{json, output};

/// Show in which values two recipes differ
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe diff resnet50_ffcv_16ep resnet50_ffcv_88ep
  baton recipe diff recipes/digits_cpu.toml mine.toml --json
  baton recipe diff digits_cpu digits_cpu --set cluster.max_ranks=1   what a change would change

Defaults are filled in first. Exit codes, as diff(1): 0 the same, 1 different, 2 bad input.")]
pub(crate) struct Args {
    /// A recipe, or the name of one in recipes/
    #[arg(value_name = "A")]
    a: PathBuf,
    /// The other one
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Change one value of B, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<u8, Failure> {
    let a = read(&find(&args.a), &[])?;
    let b = read(&find(&args.b), &args.overrides)?;
    let difference = difference(&a, &b);
    let same = difference.fields.is_empty();
    output::line(if args.json { json::line(&difference) } else { text(&difference) });
    Ok(if same { OK } else { FAILED })
}

fn difference(a: &JobSpec, b: &JobSpec) -> json::RecipeDifference {
    // A tree of plain structs, strings and numbers has no way to fail here.
    let value = |spec: &JobSpec| serde_json::to_value(spec).unwrap_or_default();
    json::RecipeDifference {
        fields: different_fields(value(a), value(b)),
        weights_can_differ: a.recipe_hash() != b.recipe_hash(),
    }
}

/// Field by field; lists are one value.
pub(crate) fn different_fields(a: Value, b: Value) -> Vec<json::DifferentField> {
    let (in_a, in_b) = (values(a), values(b));
    let paths: BTreeSet<&String> = in_a.keys().chain(in_b.keys()).collect();
    let differing = paths.into_iter().filter(|path| in_a.get(*path) != in_b.get(*path));
    let field = |path: &String| json::DifferentField {
        field: path.clone(),
        a: in_a.get(path).cloned(),
        b: in_b.get(path).cloned(),
    };
    differing.map(field).collect()
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

/// For people.
pub(crate) fn text(difference: &json::RecipeDifference) -> String {
    if difference.fields.is_empty() {
        return "the same".to_owned();
    }
    let verdict = match difference.weights_can_differ {
        true => "the resulting weights can differ",
        false => {
            "by their hash both give the same weights as far as they go; the last bits depend on \
             the device too,\non cluster.threads_per_rank, and, unless precision.determinism is \
             strict, on the number of ranks"
        }
    };
    format!("{}\n\n{verdict}", table(&difference.fields))
}

/// What two trees of values do not share.
pub(crate) fn table(fields: &[json::DifferentField]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["FIELD", "A", "B"]);
    for json::DifferentField { field, a, b } in fields {
        let shown = |value: &Option<Value>| value.as_ref().map_or("-".to_owned(), Value::to_string);
        table.add_row([field.clone(), shown(a), shown(b)]);
    }
    table.trim_fmt()
}
