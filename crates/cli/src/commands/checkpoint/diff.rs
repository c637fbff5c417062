//! `baton checkpoint diff`

use baton_checkpoint::{Compared, Difference, Finding, Manifest, Store};
use baton_job::exit::{FAILED, Failure, OK};
use baton_recipe::{JobSpec, spec};
use comfy_table::{Table, presets};
use serde_json::Value;

use super::{
    bar::bar,
    folder::{Bare, Folder, Reference, about, blocking, open, pick},
};
use crate::{
    commands::recipe::diff::{table, text as recipe_text},
    failure::bad_input,
    human, json, output,
};

/// Show how far two checkpoints lie apart: recipe, position, and every tensor
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint diff step-0000000440-gen-000003 step-0000000880-gen-000003
  baton checkpoint diff runs/a/checkpoints runs/b/checkpoints --top 3      the newest of each
  baton checkpoint diff runs/a/checkpoints/step-0000000440-gen-000003 s3://bucket/a --json

Bits are compared, whatever the numbers of ranks that wrote them; digests are verified first. The \
relative difference of two values is |a - b| / max(|a|, |b|).
Exit codes, as diff(1): 0 the same recipe, position and bits, 1 different, 2 trouble.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// A name; or a folder or s3://BUCKET/PREFIX, with /NAME for another than the newest
    #[arg(value_name = "A")]
    a: String,
    /// The other one
    #[arg(value_name = "B")]
    b: String,
    /// Most tensors that are shown, the most different first
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<u8, Failure> {
    // Exit code 1 is that of a difference.
    let trouble = |failure: Failure| bad_input(failure.message);
    let [a, b] = [&args.a, &args.b].map(|typed| Reference::parse(typed, Bare::Name));
    let folder = match (&a.location, &b.location) {
        (Some(_), Some(_)) => None,
        _ => Some(args.folder.find().await.map_err(trouble)?),
    };
    let compared = blocking(move || {
        let [a, b] = [a, b].map(|reference| Side::open(reference, folder.as_deref()));
        compare(&a?, &b?, args.top)
    });
    let difference = compared.await.map_err(trouble)?;
    output::line(if args.json { json::line(&difference) } else { text(&difference) });
    Ok(if difference.same { OK } else { FAILED })
}

/// One of the two.
struct Side {
    store: Store,
    manifest: Manifest,
}

impl Side {
    /// `folder` is where a name lies that comes without a place.
    fn open(reference: Reference, folder: Option<&str>) -> Result<Self, Failure> {
        let store = open(reference.location.as_deref().or(folder).unwrap_or_default())?;
        let manifest = pick(&store, reference.name.as_deref())?;
        Ok(Self { store, manifest })
    }

    fn told(&self) -> json::ComparedCheckpoint {
        json::ComparedCheckpoint {
            location: self.store.location().to_owned(),
            name: self.manifest.name(),
            job_id: self.manifest.job.0.to_string(),
            arch: self.manifest.arch.clone(),
            generation: self.manifest.generation.0,
            ranks: self.manifest.world_size,
        }
    }

    /// Its recipe as a tree of values, with defaults where this version knows all fields; one that is none
    /// shows as its text.
    fn recipe(&self) -> Value {
        let text = &self.manifest.recipe;
        let known = JobSpec::from_saved(text).ok().and_then(|spec| serde_json::to_value(spec).ok());
        let tree = known.or_else(|| serde_json::from_str(text).ok());
        tree.unwrap_or_else(|| Value::String(text.clone()))
    }

    /// Its position as a tree of values.
    fn progress(&self) -> Value {
        // Plain structs and numbers: nothing here can fail.
        serde_json::to_value(&self.manifest.progress).unwrap_or_default()
    }
}

fn compare(a: &Side, b: &Side, top: usize) -> Result<json::CheckpointDifference, Failure> {
    let bar = bar(a.manifest.all_bytes().saturating_add(b.manifest.all_bytes()));
    for Side { store, manifest } in [a, b] {
        let one_at_a_time = std::num::NonZeroUsize::MIN;
        let proven = store.prove(&[manifest], one_at_a_time, &|bytes| bar.inc(bytes));
        proven.into_iter().collect::<Result<(), _>>().map_err(about)?;
    }
    bar.finish_and_clear();
    let state = Difference::between((&a.store, &a.manifest), (&b.store, &b.manifest));
    let state = state.map_err(about)?;
    let recipe = json::RecipeDifference::of(spec::Difference::between(a.recipe(), b.recipe()));
    let progress = spec::Difference::between(a.progress(), b.progress());
    let different = || state.tensors.iter().filter(|tensor| tensor.finding != Finding::Same);
    Ok(json::CheckpointDifference {
        same: recipe.fields.is_empty() && progress.is_empty() && state.is_none(),
        a: a.told(),
        b: b.told(),
        recipe,
        progress,
        regions: state.regions.iter().map(part).collect(),
        tensors: different().take(top).map(part).collect(),
        different_tensors: different().count() as u64,
        all_tensors: state.tensors.len() as u64,
    })
}

fn part(compared: &Compared) -> json::ComparedPart {
    let (finding, spread) = match compared.finding {
        Finding::Same => ("same", None),
        Finding::Different(spread) => ("different", Some(spread)),
        Finding::OtherShape => ("other_shape", None),
        Finding::OnlyInFirst => ("only_in_a", None),
        Finding::OnlyInSecond => ("only_in_b", None),
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

/// For people.
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

/// A table begins below its title, a few words do not.
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

    /// Two checkpoints in a store whose place is left out of what is told.
    fn compared(a: &Sample, b: &Sample, top: usize) -> json::CheckpointDifference {
        let place = samples::store();
        let [a, b] = [a, b].map(|sample| Side {
            store: open(&place.location()).unwrap(),
            manifest: sample.save(&place.store),
        });
        let mut difference = compare(&a, &b, top).unwrap();
        for side in [&mut difference.a, &mut difference.b] {
            side.location = "runs/demo/checkpoints".to_owned();
        }
        difference
    }

    #[test]
    fn the_same_state_of_other_ranks_is_no_difference() {
        let other = Sample { generation: 3, ranks: 3, ..Sample::default() };
        let difference = compared(&Sample::default(), &other, 10);
        assert!(difference.same);
        assert_snapshot!(text(&difference));
    }

    /// Another recipe, a later step and three values that have moved.
    fn apart(top: usize) -> json::CheckpointDifference {
        let weights = vec![0.0, 1.5, 2.0, 3.0, 8.0, f32::NAN];
        let recipe =
            r#"{"checkpoint":{"keep_last":3,"keep_best":true,"keep_every_epochs":4}, "seed":1}"#;
        let later = Sample { step: 110, epoch: 5, weights, recipe, ..Sample::default() };
        compared(&Sample::default(), &later, top)
    }

    #[test]
    fn a_difference_names_recipe_position_and_tensors() {
        let difference = apart(10);
        assert!(!difference.same);
        assert_snapshot!(text(&difference));
    }

    #[test]
    fn only_the_most_different_tensors_are_shown_and_counted_all() {
        let text = text(&apart(1));
        assert!(text.contains("tensors: 2 of 2 differ, the 1 most different"), "{text}");
        assert!(text.contains("\n fc.bias ") && !text.contains("fc.weight"), "{text}");
    }

    #[test]
    fn a_difference_as_json() {
        assert_snapshot!(json::line(&apart(10)));
    }
}
