//! `baton recipe diff`

use std::path::PathBuf;

use baton_job::exit::{FAILED, Failure, OK};
use baton_recipe::spec::FieldDifference;
use comfy_table::{Table, presets};
use serde_json::Value;

use super::{find, read};
use crate::json;

/// Show the values in which two recipes differ
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe diff resnet50_ffcv_16ep resnet50_ffcv_88ep
  baton recipe diff recipes/digits_cpu.toml mine.toml --json
  baton recipe diff digits_cpu digits_cpu --set cluster.max_ranks=1   the effect of a change

Defaults are filled in first. Exit codes, as diff(1): 0 the same, 1 different, 2 bad input.")]
pub(crate) struct Args {
    /// Recipe file, or the name of a recipe in recipes/
    #[arg(value_name = "A")]
    a: PathBuf,
    /// The other recipe
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
    let difference = json::RecipeDifference::of(a.differences(&b));
    let same = difference.fields.is_empty();
    json::print(args.json, &difference, text);
    Ok(if same { OK } else { FAILED })
}

/// The difference as text.
pub(crate) fn text(difference: &json::RecipeDifference) -> String {
    if difference.fields.is_empty() {
        return "the same".to_owned();
    }
    let verdict = match difference.weights_can_differ {
        true => "the resulting weights can differ",
        false => {
            "both give the same weights up to the shorter run's end; the last bits also depend on the device and\non \
             cluster.threads_per_rank, and can differ unless precision.determinism is strict"
        }
    };
    format!("{}\n\n{verdict}", table(&difference.fields))
}

/// A table of differing fields.
pub(crate) fn table(fields: &[FieldDifference]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["FIELD", "A", "B"]);
    for FieldDifference { field, a, b } in fields {
        let shown = |value: &Option<Value>| value.as_ref().map_or("-".to_owned(), Value::to_string);
        table.add_row([field.clone(), shown(a), shown(b)]);
    }
    table.trim_fmt()
}
