use std::path::Path;

use baton_recipe::JobSpec;
use insta::{assert_json_snapshot, assert_snapshot};

use super::*;

fn spec(recipe: &str, changes: &[&str]) -> JobSpec {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{recipe}.toml"));
    let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
    recipe::read(&path, &changes).unwrap()
}

fn request(spec: &JobSpec) -> PlanRequest<'_> {
    PlanRequest {
        spec,
        samples: 1_281_167,
        val_samples: 50_000,
        signal: [1, 100],
        program: None,
        language: None,
        dollars_per_hour: None,
        calibration: None,
    }
}

fn plans(request: &PlanRequest<'_>, machines: &[&str]) -> Vec<RecipePlan> {
    let machine = |name: &&str| request.plan(Machine::named(name).unwrap()).unwrap();
    machines.iter().map(machine).collect()
}

fn all() -> Vec<&'static str> {
    MACHINES.iter().map(|machine| machine.name).collect()
}

/// No line is wider than a screen of 100 columns.
fn narrow(text: String) -> String {
    let widest = text.lines().map(|line| line.chars().count()).max();
    assert!(widest <= Some(100), "{widest:?} columns:\n{text}");
    text
}

#[test]
fn the_reference_recipe_on_every_machine() {
    let spec = spec("resnet50_p4d_60ep", &[]);
    let request = request(&spec);
    assert_snapshot!(narrow(table::text(&request, &plans(&request, &all()), true)));
}

#[test]
fn a_given_price_replaces_the_listed_prices() {
    let spec = spec("resnet50_ffcv_16ep", &[]);
    let request = PlanRequest { dollars_per_hour: Some(8.5), ..request(&spec) };
    assert_snapshot!(narrow(table::text(&request, &plans(&request, &["p4d.24xlarge"]), false)));
}

#[test]
fn a_calibration_is_shown() {
    let text = r#"{"arch": "resnet50", "resolution": 224, "batch": 128, "compute": "bf16",
        "on_gpu": true, "step_seconds": 0.1, "all_reduce_seconds": 0.0}"#;
    let measured = Calibration::from_json(text).unwrap();
    let spec = spec("resnet50_a100_bf16_adamw", &[]);
    let request = PlanRequest { calibration: Some(&measured), ..request(&spec) };
    assert_snapshot!(narrow(table::text(&request, &plans(&request, &["a100-40"]), true)));
}

#[test]
fn the_arithmetic_of_several_gpus() {
    let spec = spec("resnet50_p4d_60ep", &[]);
    let request = request(&spec);
    let plan = &plans(&request, &["p4d.24xlarge"])[0];
    let machine = Machine::named("p4d.24xlarge").unwrap();
    assert_snapshot!(narrow(explain::text(&request, plan, machine)));
}

#[test]
fn the_arithmetic_of_signals() {
    let spec = spec("resnet34_1d_signals", &[]);
    let request = PlanRequest { samples: 8_192, val_samples: 2_048, ..request(&spec) };
    let plan = &plans(&request, &["t4"])[0];
    assert_snapshot!(narrow(explain::text(&request, plan, Machine::named("t4").unwrap())));
}

#[test]
fn a_plan_as_json() {
    let spec = spec("resnet50_t4", &[]);
    let request = request(&spec);
    let plans = plans(&request, &["t4"]);
    assert_json_snapshot!(plan_json(&request, &plans));
}

#[test]
fn sizes_and_prices_are_numbers() {
    assert_eq!(price("8.50"), Ok(8.5));
    assert!(["-1", "inf", "cheap"].iter().all(|text| price(text).is_err()));
    assert_eq!(signal("12x1000").unwrap().0, [12, 1_000]);
    assert!(["12", "0x5", "axb", "1x2x3"].iter().all(|text| signal(text).is_err()));
}

#[test]
fn a_language_model_is_planned_from_its_description_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = format!("model.path={}", folder.path().display());
    let spec = spec("gemma2_2b_qlora_t4", &[&path]);
    let error = recipe::decoder(&spec).unwrap_err();
    assert!(error.ends_with("a plan needs only this file of the model"), "{error}");
    let config = r#"{"model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": true}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let (decoder, adapter) = recipe::decoder(&spec).unwrap().unwrap();
    let language = LanguagePlan { decoder: &decoder, adapter: adapter.as_ref(), mean_tokens: 300 };
    let sizes = PlanRequest { samples: 4_000, val_samples: 800, ..request(&spec) };
    let request = PlanRequest { language: Some(language), ..sizes };
    let plans = plans(&request, &["t4"]);
    assert_snapshot!(narrow(table::text(&request, &plans, false)));
    let machine = Machine::named("t4").unwrap();
    assert_snapshot!(narrow(explain::text(&request, &plans[0], machine)));
}
