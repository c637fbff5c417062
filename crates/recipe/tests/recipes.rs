//! Tests that every file in `recipes/` is a valid recipe and can run on its data.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail loudly")]

use std::{fs, path::PathBuf};

use baton_recipe::{
    JobSpec,
    dry_run::DryRun,
    schedule::linearly_scaled,
    spec::{Resolved, ValueOrigin},
};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../recipes")
}

/// Names of the recipe files without `.toml`.
fn names() -> Vec<String> {
    let paths = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let mut names: Vec<String> = paths.filter(|path| path.is_file()).map(stem).collect();
    names.sort();
    names
}

fn resolved(name: &str) -> Resolved {
    let file = folder().join(format!("{name}.toml"));
    let resolved = Resolved::read(&file, &[], |path| fs::read_to_string(path));
    resolved.unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn recipe(name: &str) -> JobSpec {
    resolved(name).spec
}

/// Number of samples in the training set of a recipe.
fn training_samples(spec: &JobSpec) -> u64 {
    match spec.data.train.as_str() {
        "/data/imagenet/train_500_0.50_90.beton" => 1_281_167,
        "assets/digits/digits-train.beton" => 1_437,
        // Sequences of a user's own texts.
        "data/train.beton" | "data/functions-train.beton" => 4_000,
        // The output of `baton data synth signals`.
        "data/signals-train.beton" => 8_192,
        other => panic!("add the number of samples of {other} here"),
    }
}

/// The table without the value at a dotted path.
fn without(table: &toml::Table, field: &str) -> toml::Table {
    let mut table = table.clone();
    let mut at = &mut table;
    let (sections, leaf) = field.rsplit_once('.').unwrap_or(("", field));
    for section in sections.split('.').filter(|section| !section.is_empty()) {
        at = at.get_mut(section).unwrap().as_table_mut().unwrap();
    }
    at.remove(leaf).unwrap();
    table
}

#[test]
fn every_recipe_is_valid_and_has_the_name_of_its_file() {
    for name in names() {
        assert_eq!(recipe(&name).name, name);
    }
}

#[test]
fn no_recipe_sets_a_value_that_its_base_or_the_default_gives() {
    for name in names() {
        let file = folder().join(format!("{name}.toml"));
        let own: toml::Table = fs::read_to_string(&file).unwrap().parse().unwrap();
        let whole = resolved(&name);
        for (field, _) in
            whole.origins.iter().filter(|(_, by)| **by == ValueOrigin::File(file.clone()))
        {
            let text = without(&own, field).to_string();
            let rest = JobSpec::read(&file, &[], |path| match path == file {
                true => Ok(text.clone()),
                false => fs::read_to_string(path),
            });
            let is_redundant = rest.is_ok_and(|rest| rest == whole.spec);
            assert!(!is_redundant, "{name} need not set {field}");
        }
    }
}

/// The file has one line of JSON per recipe.
///
/// After an intended change of a recipe, write its line with
/// `BATON_WRITE=1 cargo test -p baton-recipe --test recipes`.
#[test]
fn every_recipe_resolves_to_unchanged_values() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/resolved.jsonl");
    let specs: Vec<JobSpec> = names().iter().map(|name| recipe(name)).collect();
    if std::env::var_os("BATON_WRITE").is_some() {
        let lines: String = specs.iter().map(|spec| spec.to_json() + "\n").collect();
        fs::write(&path, lines).unwrap();
    }
    let before = fs::read_to_string(path).unwrap();
    let before: Vec<JobSpec> =
        before.lines().map(|line| JobSpec::from_json(line).unwrap()).collect();
    assert_eq!(before.len(), specs.len());
    for (before, spec) in before.iter().zip(&specs) {
        assert_eq!(before.differences(spec), [], "{}", spec.name);
        assert_eq!(before, spec);
    }
}

#[test]
fn every_recipe_can_run_on_its_data() {
    for name in names() {
        let spec = recipe(&name);
        let run = DryRun::new(&spec, training_samples(&spec));
        let run = run.unwrap_or_else(|faults| panic!("{name}: {faults:?}"));
        let warnings = run.warnings(&spec);
        assert!(warnings.is_empty(), "{name}: {warnings:?}");
        assert_eq!(
            run.segments.iter().map(|segment| segment.epochs).sum::<u32>(),
            spec.train.epochs
        );
    }
}

#[test]
fn all_shipped_recipes_exist() {
    let expected = [
        "digits_cpu",
        "dilated_signals",
        "efficientnet_digits",
        "gemma2_2b_lora_a100",
        "gemma2_2b_qlora_a100",
        "gemma2_2b_qlora_t4",
        "llama32_1b_lora_l4",
        "resnet34_1d_signals",
        "resnet50_a100_bf16_adamw",
        "resnet50_ffcv_16ep",
        "resnet50_ffcv_24ep",
        "resnet50_ffcv_32ep",
        "resnet50_ffcv_40ep",
        "resnet50_ffcv_56ep",
        "resnet50_ffcv_88ep",
        "resnet50_l4",
        "resnet50_p4d_60ep",
        "resnet50_rsb_a3",
        "resnet50_t4",
        "smollm2_lora_cpu",
        "vit_digits",
    ];
    assert_eq!(names(), expected);
}

/// The epochs, counted from 0, at which ffcv-imagenet's `get_resolution` first gives 192 pixels.
#[test]
fn ffcv_recipes_change_resolution_and_rate_at_the_same_epochs_as_ffcv() {
    for (epochs, switch) in [(16, 12), (24, 19), (32, 25), (40, 32), (56, 45), (88, 71)] {
        let spec = recipe(&format!("resnet50_ffcv_{epochs}ep"));
        let run = DryRun::new(&spec, 1_281_167).unwrap();
        let shown: Vec<_> = run
            .segments
            .iter()
            .map(|s| (s.first_epoch.0, s.resolution, s.global_batch, s.steps_per_epoch))
            .collect();
        assert_eq!(shown, [(0, 160, 4096, 312), (switch, 192, 4096, 312)], "{epochs} epochs");
        assert_eq!((run.epoch_lrs[0], run.peak_lr, run.peak_epoch.0), (1.7e-4, 1.7, 2));
    }
}

#[test]
fn recipes_for_one_gpu_scale_the_rate_of_ffcv_linearly() {
    for (name, published) in
        [("resnet50_t4", "resnet50_ffcv_16ep"), ("resnet50_l4", "resnet50_ffcv_32ep")]
    {
        let peak = |name: &str| DryRun::new(&recipe(name), 1_281_167).unwrap().peak_lr;
        let batch = u64::from(recipe(name).train.global_batch);
        assert_eq!(peak(name), linearly_scaled(peak(published), 4096, batch), "{name}");
    }
}
