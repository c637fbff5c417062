//! Recipes good and bad.

use super::*;

const MINIMAL: &str = r#"
name = "demo"
[model]
arch = "resnet18"
num_classes = 10
[data]
train = "train.beton"
val = "val.beton"
[train]
epochs = 2
global_batch = 64
resolution = 32
[optimizer]
kind = "sgd"
momentum = 0.9
[schedule]
kind = "constant"
lr = 0.1
"#;

fn refused(overrides: &[&str]) -> String {
    let overrides: Vec<String> = overrides.iter().map(|&entry| entry.to_owned()).collect();
    JobSpec::from_toml(MINIMAL, &overrides).unwrap_err().to_string()
}

#[test]
fn minimal_recipe_gets_defaults_and_survives_the_wire() {
    let spec = JobSpec::from_toml(MINIMAL, &[]).unwrap();
    assert_eq!(spec.train.virtual_ranks, 8);
    assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
}

#[test]
fn unknown_key_is_refused_by_name_and_line() {
    let text = MINIMAL.replace("epochs = 2", "epochs = 2\nepoch_count = 3");
    let error = JobSpec::from_toml(&text, &[]).unwrap_err().to_string();
    assert!(error.contains("epoch_count") && error.contains("line 11"), "{error}");
    assert!(!error.contains('\n'), "{error}");
}

#[test]
fn unknown_key_inside_a_tagged_section_is_refused() {
    let error = refused(&["optimizer.betas=[0.9, 0.99]"]);
    assert!(error.contains("betas"), "{error}");
}

#[test]
fn violation_names_field_value_and_rule() {
    assert_eq!(
        refused(&["train.global_batch=60"]),
        "recipe: train.global_batch = 60: must be a multiple of train.virtual_ranks = 8"
    );
}

#[test]
fn all_violations_are_listed_at_once() {
    let error = refused(&["train.epochs=0", "schedule.lr=-1.0", "loss.label_smoothing=1.0"]);
    for field in ["train.epochs = 0", "schedule.lr = -1", "loss.label_smoothing = 1"] {
        assert!(error.contains(field), "{field} is missing in {error}");
    }
}

#[test]
fn features_of_later_versions_are_refused_not_ignored() {
    for entry in [
        "model.blur_pool=true",
        "augment.mixup_alpha=0.2",
        "augment.cutmix_probability=0.3",
        "train.grad_accumulation=2",
        "train.clip_grad_norm=1.0",
        "train.phases=[{from_epoch=0, resolution=160, global_batch=4096}]",
        "train.recompute=true",
        "precision.compute=bf16",
        "ema.decay=0.999",
        "evaluation.flip=true",
        "evaluation.subset=0.1",
        "limits.target_top1=0.78",
        "limits.max_hours=1.0",
        "limits.max_dollars=10.0",
    ] {
        let error = refused(&[entry]);
        assert!(error.contains("not implemented yet"), "{entry}: {error}");
    }
}

#[test]
fn override_without_value_is_refused_with_an_example() {
    assert!(refused(&["train.epochs"]).contains("section.key=value"));
}

#[test]
fn recipe_hash_ignores_where_it_runs_and_sees_what_it_computes() {
    let hash =
        |entry: &str| JobSpec::from_toml(MINIMAL, &[entry.to_owned()]).unwrap().recipe_hash();
    let base = hash("seed=0");
    assert_eq!(hash("cluster.max_ranks=2"), base);
    assert_eq!(hash("checkpoint.every_steps=7"), base);
    assert_ne!(hash("seed=1"), base);
    assert_ne!(hash("train.virtual_ranks=4"), base);
}

#[test]
fn strict_order_over_nccl_is_refused_with_both_ways_out() {
    let error = refused(&["cluster.collective=nccl"]);
    assert!(error.contains("determinism") && error.contains("auto"), "{error}");
}
