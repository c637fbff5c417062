use std::{fs, path::Path};

use super::*;
use crate::machine::MACHINES;

const IMAGENET: u64 = 1_281_167;

fn spec(name: &str, changes: &[&str]) -> JobSpec {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{name}.toml"));
    let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
    JobSpec::read(&file, &changes, |path| fs::read_to_string(path)).unwrap()
}

fn question(spec: &JobSpec) -> PlanRequest<'_> {
    PlanRequest {
        spec,
        samples: IMAGENET,
        val_samples: 50_000,
        signal: [1, 100],
        program: None,
        language: None,
        dollars_per_hour: None,
        calibration: None,
    }
}

fn plan(name: &str, changes: &[&str], machine: &str) -> RecipePlan {
    let spec = spec(name, changes);
    question(&spec).plan(Machine::named(machine).unwrap()).unwrap()
}

#[test]
fn every_recipe_has_a_plan_on_every_machine() {
    for name in ["digits_cpu", "resnet34_1d_signals", "resnet50_p4d_60ep", "resnet50_t4"] {
        let spec = spec(name, &[]);
        for machine in &MACHINES {
            let plan = question(&spec).plan(machine).unwrap();
            assert!(plan.seconds > 0.0 && plan.seconds.is_finite(), "{name} {}", machine.name);
            assert!(plan.ranks <= machine.gpus);
            let segments: f64 = plan.segments.iter().map(|planned| planned.seconds).sum();
            assert!((plan.seconds - segments - plan.evaluation.seconds).abs() < 1e-6);
        }
    }
}

#[test]
fn cost_is_hours_times_price() {
    let plan = plan("resnet50_p4d_60ep", &[], "p4d.24xlarge");
    let kinds: Vec<&str> = plan.costs.iter().map(|cost| cost.kind).collect();
    assert_eq!(kinds, ["on_demand", "spot"]);
    for cost in &plan.costs {
        assert_eq!(cost.dollars, cost.dollars_per_hour * plan.seconds / 3_600.0);
    }
    let spec = spec("resnet50_p4d_60ep", &[]);
    let given = PlanRequest { dollars_per_hour: Some(11.0), ..question(&spec) };
    let given = given.plan(Machine::named("p4d.24xlarge").unwrap()).unwrap();
    assert_eq!(
        given.costs,
        [Cost { kind: "given", dollars_per_hour: 11.0, dollars: 11.0 * given.seconds / 3_600.0 }]
    );
}

#[test]
fn the_reference_recipe_has_three_segments_and_uses_every_sample() {
    let plan = plan("resnet50_p4d_60ep", &[], "p4d.24xlarge");
    let shown: Vec<_> = plan
        .segments
        .iter()
        .map(|planned| (planned.segment.resolution, planned.step.micro_batch, planned.samples))
        .collect();
    // Whole batches only: 312 of 4,096, 417 of 3,072, 625 of 2,048; 20 epochs each.
    let expected = [(160, 512, 25_559_040), (192, 384, 25_620_480), (224, 256, 25_600_000)];
    assert_eq!(shown, expected);
    // 59 evaluations of a tenth, then one of the whole set; raw and averaged weights.
    assert_eq!((plan.evaluation.samples, plan.evaluation.passes), (59 * 5_000 + 50_000, 2));
    assert_eq!((plan.ranks, plan.fits, plan.micro_batch), (8, true, 256));
    assert!(plan.notes.is_empty(), "{:?}", plan.notes);
}

/// FFCV publishes minutes for its recipes on this machine; they are in the first lines of the recipes.
#[test]
fn ffcvs_published_times_are_met_within_a_fifth() {
    for (name, published) in [("resnet50_ffcv_16ep", 14.9), ("resnet50_ffcv_88ep", 77.2)] {
        let minutes = plan(name, &[], "p4d.24xlarge").seconds / 60.0;
        assert!((minutes / published - 1.0).abs() < 0.2, "{name}: {minutes:.1}");
    }
}

#[test]
fn larger_images_take_longer_and_more_gpus_less_time() {
    let plan = plan("resnet50_p4d_60ep", &[], "p4d.24xlarge");
    let rates: Vec<f64> = plan.segments.iter().map(|planned| -planned.images_per_second).collect();
    assert!(rates.is_sorted(), "{rates:?}");
    let one = super::tests::plan("resnet50_p4d_60ep", &[], "a100-40");
    let faster = one.segments[2].step.seconds / plan.segments[2].step.seconds;
    assert!((6.0..8.0).contains(&faster), "{faster}");
}

#[test]
fn gradients_over_tcp_take_longer_than_over_nvswitch() {
    let seconds = |changes: &[&str]| {
        let plan = plan("resnet50_p4d_60ep", changes, "p4d.24xlarge");
        plan.segments[0].step.all_reduce.unwrap().seconds
    };
    // 2 · 7/8 · 4 B · (25,557,032 + 53,120) values, at 210 and at 0.9 GB/s.
    assert!((seconds(&[]) - 0.000_854).abs() < 1e-6);
    assert!((seconds(&["cluster.collective=tcp"]) - 0.199_19).abs() < 1e-5);
    let strict = ["precision.determinism=strict", "cluster.collective=auto"];
    assert_eq!(seconds(&strict), seconds(&[]));
    assert_eq!(plan("resnet50_t4", &[], "t4").segments[0].step.all_reduce, None);
}

#[test]
fn few_threads_make_the_loader_the_limit() {
    let slow = plan("resnet50_p4d_60ep", &["data.decode_threads=1"], "p4d.24xlarge");
    assert_eq!(slow.limit, Bottleneck::Loader);
    assert_eq!(slow.segments[0].images_per_second, 8.0 * 1_482.0);
    assert_eq!(slow.notes, ["only 8 of 96 vCPUs decode: raise data.decode_threads"]);
    let area = plan("resnet50_p4d_60ep", &["data.resize=area"], "h200");
    assert_eq!(area.loader.unwrap().images_per_second, 11.0 * 1_252.0);
    assert_eq!(plan("resnet34_1d_signals", &[], "t4").loader, None);
}

#[test]
fn a_recipe_that_does_not_fit_gets_a_remedy_that_does() {
    let deep = "model.arch=resnet152";
    let small = plan("resnet50_p4d_60ep", &[deep], "t4");
    assert!(!small.fits, "{:?}", small.memory);
    let remedy = small.notes[0].split("grad_accumulation=").nth(1).unwrap();
    let parts: u32 = remedy.split(' ').next().unwrap().parse().unwrap();
    let with = |parts: u32| {
        let changes = format!("train.grad_accumulation={parts}");
        plan("resnet50_p4d_60ep", &[deep, &changes], "t4").fits
    };
    assert!(with(parts) && !with(parts / 2), "{parts}");
    assert!(small.largest_micro_batch < small.micro_batch, "{small:?}");
}

#[test]
fn mismatches_of_recipe_and_machine_are_noted() {
    let notes = plan("resnet50_p4d_60ep", &[], "p3.8xlarge").notes.join("\n");
    assert!(notes.contains("V100-16 has no bf16"), "{notes}");
    assert!(notes.contains("--set cluster.min_ranks=4"), "{notes}");
    let idle = plan("resnet50_t4", &[], "p4d.24xlarge").notes.join("\n");
    assert!(idle.contains("7 of 8 GPUs are idle"), "{idle}");
    let cpu = plan("digits_cpu", &["cluster.device=cpu"], "l4").notes.join("\n");
    assert!(cpu.contains("cluster.device = cpu"), "{cpu}");
}

#[test]
fn a_calibration_scales_the_gpus_time() {
    let bench = |factor: f64| {
        let machine = Machine::named("h200").unwrap();
        let text = |seconds: f64| {
            format!(
                r#"{{"arch": "resnet50", "resolution": 224, "batch": 256, "compute": "bf16",
                     "on_gpu": true, "step_seconds": {seconds}, "all_reduce_seconds": 0.0}}"#
            )
        };
        let once = Calibration::from_json(&text(1.0)).unwrap().factor(machine).unwrap();
        Calibration::from_json(&text(factor / once)).unwrap()
    };
    let spec = spec("resnet50_a100_bf16_adamw", &["data.decode_threads=24"]);
    let machine = Machine::named("h200").unwrap();
    let seconds = |calibration: Option<&Calibration>| {
        let plan = PlanRequest { calibration, ..question(&spec) }.plan(machine).unwrap();
        (plan.calibration, plan.segments[0].step.seconds)
    };
    let (none, plain) = seconds(None);
    let (factor, slow) = seconds(Some(&bench(2.0)));
    assert_eq!(none, None);
    assert!((factor.unwrap() - 2.0).abs() < 1e-9);
    assert!((slow / plain - 2.0).abs() < 1e-9, "{slow} {plain}");
}

#[test]
fn an_invalid_calibration_is_rejected() {
    let rejected = |text: &str| Calibration::from_json(text).unwrap_err().to_string();
    assert!(rejected("{}").contains("baton-worker bench --json"));
    let bench = |on_gpu: bool, reducing: f64| {
        format!(
            r#"{{"arch": "resnet50", "resolution": 64, "batch": 16, "compute": "fp32",
                 "on_gpu": {on_gpu}, "step_seconds": 0.5, "all_reduce_seconds": {reducing}}}"#
        )
    };
    assert!(rejected(&bench(false, 0.1)).contains("not a GPU"));
    assert!(rejected(&bench(true, 0.5)).contains("all_reduce_seconds"));
    let read = Calibration::from_json(&bench(true, 0.1)).unwrap();
    assert!((read.images_per_second() - 40.0).abs() < 1e-9);
}

#[test]
fn a_recipe_that_cannot_run_has_no_plan() {
    let spec = spec("resnet50_p4d_60ep", &[]);
    let few = PlanRequest { samples: 10, ..question(&spec) };
    let error = few.plan(&MACHINES[0]).unwrap_err().to_string();
    assert!(error.contains("train.global_batch"), "{error}");
    let error = Machine::named("dgx").unwrap_err().to_string();
    assert!(error.contains("`dgx`") && error.contains("p4d.24xlarge, p3.8xlarge"), "{error}");
    let linear =
        super::tests::spec("digits_cpu", &["model.arch=linear", "optimizer={ kind = 'sgd' }"]);
    assert!(matches!(question(&linear).plan(&MACHINES[0]), Err(Error::Linear)));
    let of_program = ["model.arch=program", "model.program=net.pt2", "model.zero_init_gamma=false"];
    let program = super::tests::spec("digits_cpu", &of_program);
    assert!(matches!(question(&program).plan(&MACHINES[0]), Err(Error::ProgramNotRead)));
}

#[test]
fn an_evaluation_that_is_longer_than_a_spot_notice_is_noted() {
    let spec = spec("resnet50_t4", &["cluster.drain_seconds=121.0"]);
    let notes = |val_samples| {
        let request = PlanRequest { val_samples, ..question(&spec) };
        let plan = request.plan(Machine::named("t4").unwrap()).unwrap();
        let expected = val_samples as f64 / plan.evaluation.images_per_second;
        assert_eq!(plan.evaluation.longest_seconds, expected);
        plan.notes.into_iter().filter(|note| note.contains("EC2 spot notice")).collect::<Vec<_>>()
    };
    assert!(matches!(notes(1).as_slice(), [save] if save.starts_with("cluster.drain_seconds")));
    let long = notes(10_000_000);
    assert!(matches!(long.as_slice(), [_, note] if note.contains("evaluation")), "{long:?}");
}
