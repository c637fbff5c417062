//! `baton checkpoint diff`

use baton_checkpoint::{ComparedItem, Comparison, Difference, Manifest, Store};
use baton_job::exit::{FAILED, Failure, OK};
use baton_recipe::{JobSpec, progress::Progress, spec};
use comfy_table::{Table, presets};
use serde_json::Value;

use super::folder::{
    BareWord, FolderFlags, FoundFolder, Reference, blocking, open, pick, store_failure,
};
use crate::{
    commands::{
        bar::{BYTES, bar},
        recipe::diff::{table, text as recipe_text},
    },
    failure::bad_input,
    human, json,
};

/// Compare two checkpoints: recipe, position, and every tensor
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint diff step-0000000440-gen-000003 step-0000000880-gen-000003
  baton checkpoint diff runs/a/checkpoints runs/b/checkpoints --top 3      the newest of each folder
  baton checkpoint diff runs/a/checkpoints/step-0000000440-gen-000003 s3://bucket/a --json

Digests are verified first, then bits are compared; the numbers of ranks may differ. The \
relative difference of two values is |a - b| / max(|a|, |b|).
Exit codes, as diff(1): 0 the same recipe, position and bits, 1 different, 2 error.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: FolderFlags,
    /// A name, or a folder or s3://BUCKET/PREFIX, with /NAME for a checkpoint other than the newest
    #[arg(value_name = "A")]
    a: String,
    /// The other checkpoint
    #[arg(value_name = "B")]
    b: String,
    /// Maximum number of tensors to show, the most different first
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<u8, Failure> {
    // An error must not exit with 1, which means that the checkpoints differ.
    let as_bad_input = |failure: Failure| bad_input(failure.message);
    let [a, b] = [&args.a, &args.b].map(|typed| Reference::parse(typed, BareWord::Name));
    let folder = match (&a.location, &b.location) {
        (Some(_), Some(_)) => None,
        _ => Some(args.folder.find().await.map_err(as_bad_input)?),
    };
    let compared = blocking(move || {
        let [a, b] = [a, b].map(|reference| Side::open(reference, folder.as_ref()));
        compare(&a?, &b?, args.top)
    });
    let difference = compared.await.map_err(as_bad_input)?;
    json::print(args.json, &difference, text);
    Ok(if difference.same { OK } else { FAILED })
}

/// One of the two checkpoints.
struct Side {
    store: Store,
    manifest: Manifest,
}

impl Side {
    /// Opens a checkpoint; `folder` is used if the reference has no location.
    fn open(reference: Reference, folder: Option<&FoundFolder>) -> Result<Self, Failure> {
        let named = FoundFolder::at(reference.location.as_deref().unwrap_or_default());
        let folder = folder.filter(|_| reference.location.is_none()).unwrap_or(&named);
        let store = open(&folder.location)?;
        let manifest = pick(&store, folder, reference.name.as_deref())?;
        Ok(Self { store, manifest })
    }

    fn description(&self) -> json::ComparedCheckpoint {
        json::ComparedCheckpoint {
            location: self.store.location().to_owned(),
            name: self.manifest.name(),
            job_id: self.manifest.job.0.to_string(),
            arch: self.manifest.arch.clone(),
            generation: self.manifest.generation.0,
            ranks: self.manifest.world_size,
        }
    }

    /// Its recipe as a JSON value, with defaults if this version accepts the recipe; as a plain string if the recipe is
    /// not valid JSON.
    fn recipe(&self) -> Value {
        let text = &self.manifest.recipe;
        let with_defaults =
            JobSpec::from_saved(text).ok().and_then(|spec| serde_json::to_value(spec).ok());
        let tree = with_defaults.or_else(|| serde_json::from_str(text).ok());
        tree.unwrap_or_else(|| Value::String(text.clone()))
    }

    /// Its position as a JSON value.
    fn progress(&self) -> Value {
        // The past evaluations are for reports only.
        let progress =
            Progress { newest_evaluations: Vec::new(), ..self.manifest.progress.clone() };
        // Serializing plain structs and numbers cannot fail.
        serde_json::to_value(progress).unwrap_or_default()
    }
}

fn compare(a: &Side, b: &Side, top: usize) -> Result<json::CheckpointDifference, Failure> {
    let bar = bar(BYTES, a.manifest.all_bytes().saturating_add(b.manifest.all_bytes()));
    for Side { store, manifest } in [a, b] {
        let one_at_a_time = std::num::NonZeroUsize::MIN;
        let verified = store.verify(&[manifest], one_at_a_time, &|bytes| bar.inc(bytes));
        verified.into_iter().collect::<Result<(), _>>().map_err(store_failure)?;
    }
    bar.finish_and_clear();
    let state = Difference::between((&a.store, &a.manifest), (&b.store, &b.manifest));
    let state = state.map_err(store_failure)?;
    let recipe = json::RecipeDifference::of(spec::FieldDifference::between(a.recipe(), b.recipe()));
    let progress = spec::FieldDifference::between(a.progress(), b.progress());
    let different = || state.tensors.iter().filter(|tensor| tensor.finding != Comparison::Same);
    Ok(json::CheckpointDifference {
        same: recipe.fields.is_empty() && progress.is_empty() && state.is_none(),
        a: a.description(),
        b: b.description(),
        recipe,
        progress,
        regions: state.regions.iter().map(part).collect(),
        tensors: different().take(top).map(part).collect(),
        different_tensors: different().count() as u64,
        all_tensors: state.tensors.len() as u64,
    })
}

fn part(compared: &ComparedItem) -> json::ComparedPart {
    let (finding, spread) = match compared.finding {
        Comparison::Same => ("same", None),
        Comparison::Different(spread) => ("different", Some(spread)),
        Comparison::OtherShape => ("other_shape", None),
        Comparison::OnlyInFirst => ("only_in_a", None),
        Comparison::OnlyInSecond => ("only_in_b", None),
    };
    json::ComparedPart {
        name: compared.name.clone(),
        finding,
        different: spread.map(|spread| spread.different),
        values: spread.map(|spread| spread.values),
        largest_absolute: spread.map(|spread| spread.largest_absolute),
        largest_relative: spread.map(|spread| spread.largest_relative),
    }
}

/// The comparison as text.
fn text(difference: &json::CheckpointDifference) -> String {
    let side = |name: &str, side: &json::ComparedCheckpoint| {
        let json::ComparedCheckpoint {
            location, name: checkpoint, arch, generation, ranks, ..
        } = side;
        let ranks = human::count(u64::from(*ranks), "rank");
        let location = location.trim_end_matches('/');
        format!("{name}  {location}/{checkpoint}: {arch}, generation {generation}, {ranks}")
    };
    let progress = match difference.progress.as_slice() {
        [] => "the same".to_owned(),
        fields => table(fields),
    };
    let mut parts = vec![
        format!("{}\n{}", side("A", &difference.a), side("B", &difference.b)),
        titled("recipe", &recipe_text(&difference.recipe)),
        titled("position", &progress),
        titled("state", &parts_table("REGION", &difference.regions)),
    ];
    let (different, all) = (difference.different_tensors, difference.all_tensors);
    parts.push(match difference.tensors.as_slice() {
        tensors if different > 0 => {
            let shown = match tensors.len() as u64 {
                shown if shown < different => format!(", the {shown} most different"),
                _ => String::new(),
            };
            let table = parts_table("TENSOR", tensors);
            format!("tensors: {different} of {all} differ{shown}\n{table}").trim_end().to_owned()
        }
        _ => format!("tensors: all {all} are the same in all bits"),
    });
    parts.join("\n\n")
}

/// A title with its text: a table starts on the next line, a short text on the same line.
fn titled(title: &str, text: &str) -> String {
    let gap = if text.contains('\n') { '\n' } else { ' ' };
    format!("{title}:{gap}{text}")
}

fn parts_table(title: &str, parts: &[json::ComparedPart]) -> String {
    if parts.is_empty() {
        return String::new();
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([title, "BITS", "VALUES THAT DIFFER", "LARGEST ABSOLUTE", "LARGEST RELATIVE"]);
    for part in parts {
        let finding =
            part.finding.replace('_', " ").replace(" in a", " in A").replace(" in b", " in B");
        let differ = part.different.zip(part.values).map(|(different, values)| {
            format!("{} of {}", human::grouped(different), human::grouped(values))
        });
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let distance = |value: Option<f64>| or_dash(value.map(|value| format!("{value:.3e}")));
        table.add_row([
            part.name.clone(),
            finding,
            or_dash(differ),
            distance(part.largest_absolute),
            distance(part.largest_relative),
        ]);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::commands::checkpoint::samples::{self, Sample};

    /// Compares two checkpoints in a temporary store, whose location is replaced in the result.
    fn compared(a: &Sample, b: &Sample, top: usize) -> json::CheckpointDifference {
        let store = samples::store();
        let [a, b] = [a, b].map(|sample| Side {
            store: open(&store.location()).unwrap(),
            manifest: sample.save(&store.store),
        });
        let mut difference = compare(&a, &b, top).unwrap();
        for side in [&mut difference.a, &mut difference.b] {
            side.location = "runs/demo/checkpoints".to_owned();
        }
        difference
    }

    #[test]
    fn the_same_state_of_other_ranks_is_not_a_difference() {
        let other = Sample { generation: 3, ranks: 3, ..Sample::default() };
        let difference = compared(&Sample::default(), &other, 10);
        assert!(difference.same);
        assert_snapshot!(text(&difference));
    }

    /// Compares checkpoints with another recipe, a later step and three changed values.
    fn changed(top: usize) -> json::CheckpointDifference {
        let weights = vec![0.0, 1.5, 2.0, 3.0, 8.0, f32::NAN];
        let recipe =
            r#"{"checkpoint":{"keep_last":3,"keep_best":true,"keep_every_epochs":4}, "seed":1}"#;
        let later = Sample { step: 110, epoch: 5, weights, recipe, ..Sample::default() };
        compared(&Sample::default(), &later, top)
    }

    #[test]
    fn a_difference_shows_recipe_position_and_tensors() {
        let difference = changed(10);
        assert!(!difference.same);
        assert_snapshot!(text(&difference));
    }

    #[test]
    fn only_the_most_different_tensors_are_shown_but_all_are_counted() {
        let text = text(&changed(1));
        assert!(text.contains("tensors: 2 of 2 differ, the 1 most different"), "{text}");
        assert!(text.contains("\n fc.bias ") && !text.contains("fc.weight"), "{text}");
    }

    #[test]
    fn a_difference_as_json() {
        assert_snapshot!(json::line(&changed(10)));
    }
}
