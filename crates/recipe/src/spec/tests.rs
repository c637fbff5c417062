//! Tests of valid and invalid recipes.

use std::io;

use super::*;
use crate::{kit::RECIPE as MINIMAL, progress::Outdated};

fn refused(overrides: &[&str]) -> String {
    let overrides: Vec<String> = overrides.iter().map(|&entry| entry.to_owned()).collect();
    JobSpec::from_toml(MINIMAL, &overrides).unwrap_err().to_string()
}

#[test]
fn minimal_recipe_gets_defaults_and_survives_serialization() {
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
fn a_section_with_a_kind_that_is_no_table_is_refused_with_an_example() {
    for change in ["optimizer=sgd", "optimizer=3"] {
        assert_eq!(
            refused(&[change]),
            format!(
                "recipe: override `{change}`: optimizer must be a table, e.g. {{kind = \"sgd\"}}"
            )
        );
    }
    assert!(refused(&["schedule=[]"]).contains("schedule must be a table, e.g. {kind ="));
    let (before, _) = MINIMAL.split_once("[optimizer]").unwrap();
    let text = format!("schedule = 1\noptimizer = \"sgd\"\n{before}");
    let error = JobSpec::from_toml(&text, &[]).unwrap_err().to_string();
    assert!(error.contains("at line 2") && error.contains("must be a table"), "{error}");
}

#[test]
fn more_outputs_than_any_gpu_has_memory_for_are_refused() {
    for outputs in ["16777217", "4000000000"] {
        let expected = format!("model.num_classes = {outputs}: must be at most 16777216");
        let error = refused(&[&format!("model.num_classes={outputs}")]);
        assert!(error.contains(&expected), "{error}");
    }
    let most = ["model.num_classes=16777216".to_owned()];
    assert!(JobSpec::from_toml(MINIMAL, &most).is_ok());
}

/// Each message has field, value, rule and remedy.
#[test]
fn wrong_values_are_refused() {
    for (entries, expected) in [
        (&["schedule.lr=-0.1"][..], "schedule.lr = -0.1: must be at least 0"),
        (&["train.grad_accumulation=3"], "virtual_ranks x train.grad_accumulation = 24"),
        (
            &["train.phases=[{from_epoch=1, resolution=160, global_batch=100}]"],
            "train.phases.global_batch = 100: must be a multiple of train.virtual_ranks = 8",
        ),
        (
            &["train.phases=[{from_epoch=1, resolution=176, global_batch=64}]"],
            "train.phases.resolution = 176: must be a multiple of 32 if train.phases changes it, \
             e.g. 192",
        ),
        (
            &["train.phases=[{from_epoch=2, resolution=64, global_batch=64}]"],
            "train.phases.from_epoch = 2: must be 0 (after the previous phase and its ramp) or later, \
             and below train.epochs = 2",
        ),
        (
            &["train.phases=[{from_epoch=1, resolution=64, global_batch=64, ramp_epochs=9}]"],
            "train.phases.ramp_epochs = 9: must end by train.epochs = 2",
        ),
        (
            &["loss.kind=mse", "augment.mixup_alpha=0.2"],
            "augment.mixup_alpha = 0.2: is for classification only: set it to 0, or loss.kind = \"cross_entropy\"",
        ),
        (
            &["augment.cutmix_probability=1.5"],
            "augment.cutmix_probability = 1.5: must be in [0, 1]",
        ),
        (&["train.clip_grad_norm=0.0"], "train.clip_grad_norm = 0: must be above 0"),
        (&["train.layer_decay=0.0"], "train.layer_decay = 0: must be above 0 and at most 1"),
        (&["train.layer_decay=1.01"], "train.layer_decay = 1.01: must be above 0 and at most 1"),
        (&["optimizer={ kind='muon', momentum=1.0 }"], "optimizer.momentum = 1: must be in [0, 1)"),
        (
            &["optimizer={ kind='muon', adamw=['head'] }"],
            "optimizer.adamw = head: is the name of no parameter",
        ),
        // They would be infinite, and 0.
        (&["train.clip_grad_norm=1e60"], "must be from 1.2e-38 to 3.4e38, for 32-bit floats"),
        (&["augment.cutmix_alpha=1e-60"], "must be from 1.2e-38 to 3.4e38, for 32-bit floats"),
        (
            &["loss.class_weights=[1.0, 2.0]"],
            "loss.class_weights = [1.0, 2.0]: must have a factor for each of the model.num_classes",
        ),
        (
            &["loss.kind=mse", "loss.class_weights=[1.0, 2.0]"],
            "loss.class_weights = [1.0, 2.0]: is for loss.kind = \"cross_entropy\" only: remove it",
        ),
        (&["loss.class_weights=[1.0, 0.0]"], "loss.class_weights = [1.0, 0.0]: must be above 0"),
        (&["loss.kind=quantile"], "loss.quantile = absent: must be between 0 and 1 with loss.kind"),
        (&["loss.quantile=0.9"], "loss.quantile = 0.9: needs loss.kind = \"quantile\""),
        (
            &["loss.kind=quantile", "loss.quantile=1.0"],
            "loss.quantile = 1: must be between 0 and 1",
        ),
        (&["augment.erase=2.0"], "augment.erase = 2: must be in [0, 1]"),
        (
            &["augment.shift=32"],
            "augment.shift = 32: must be below the smallest resolution of the training, 32 pixels",
        ),
        (
            &["augment.rand_augment.magnitude=31"],
            "augment.rand_augment.magnitude = 31: must be 0..30",
        ),
        (
            &["augment.rand_augment={}", "augment.trivial_augment=true"],
            "augment.trivial_augment = true: is beside augment.rand_augment: choose one of the two",
        ),
        (
            &["augment.alternate_flips=true", "augment.flip=0.0"],
            "augment.alternate_flips = true: would flip every image in every second epoch",
        ),
        (
            &["augment.signal.noise=0.1"],
            "augment.signal = a section: is for arrays only: remove it with model.arch = \"resnet18\"",
        ),
        (
            &["model.arch=resnet34_1d", "augment.erase=0.1"],
            "augment.erase = 0.1: is for images only: remove it with model.arch = \"resnet34_1d\"",
        ),
        (
            &["model.arch=resnet34_1d", "augment.signal.shift=1.5"],
            "augment.signal.shift = 1.5: must be in [0, 1]",
        ),
        (&["ema.decay=1.0"], "ema.decay = 1: must be between 0 and 1"),
        (&["model.freeze=['layer1']"], "model.freeze = [layer1]: must be stem, layer1,"),
        (&["model.freeze=['stem']"], "would keep random weights: set model.pretrained to a file"),
        (&["limits.max_dollars=10.0"], "limits.max_dollars = 10: needs the price: set"),
        (&["limits.target_top1=78.0"], "must be above 0 and at most 1, e.g. 0.78 for 78 %"),
        (
            &["limits.target={metric='top1', value=78.0}"],
            "limits.target.value = 78: must be above 0 and at most 1, e.g. 0.78 for 78 %",
        ),
        (
            &["limits.target={metric='loss', value=-1.0}"],
            "limits.target.value = -1: must be a number, at least 0",
        ),
        (
            &["loss.kind=mse", "limits.target={metric='spearman', value=1.5}"],
            "limits.target.value = 1.5: must be a number from -1 to 1",
        ),
        (
            &["limits.target={metric='mae', value=0.5}"],
            "limits.target.metric = mae: is not a metric of this recipe; its metrics are top1, top5, loss",
        ),
        (
            &["limits={target={metric='top1', value=0.5}, target_top1=0.5}"],
            "limits.target_top1 = 0.5: is the deprecated spelling of limits.target, which is set too",
        ),
        (
            &["evaluation.best=top_1"],
            "evaluation.best = top_1: is not a metric of this recipe; its metrics are top1, top5, loss",
        ),
        (&["guard.lr_factor=1.0"], "guard.lr_factor = 1: must be between 0 and 1"),
        (&["evaluation.subset=0.0"], "evaluation.subset = 0: must be above 0 and at most 1"),
        (
            &["schedule={kind='step', lr=0.1, milestones=[5.0]}"],
            "schedule.milestones = [5.0]: must be increasing epochs between 0 and train.epochs = 2",
        ),
        (
            &["model.arch=linear", "train.clip_grad_norm=1.0"],
            "train.clip_grad_norm = 1: is not supported by model.arch = \"linear\": remove or change it",
        ),
        (
            &["model.arch=resnet34_1d", "model.blur_pool=true"],
            "model.blur_pool = true: is for images only",
        ),
        (
            &["model.channels_last=false", "precision.fused=true"],
            "precision.fused = true: needs model.channels_last = true",
        ),
        (
            &["model.channels_last=false", "model.pointwise=product"],
            "model.pointwise = product: is for the built-in networks of images",
        ),
        (
            &["model.arch=resnet34_1d", "model.pointwise=convolution"],
            "model.pointwise = convolution: is for the built-in networks of images",
        ),
        (
            &["model.arch=linear", "model.pointwise=product"],
            "model.pointwise = product: is for the built-in networks of images",
        ),
        (
            &["model.arch=resnet34_1d", "precision.fused=true"],
            "precision.fused = true: is for images only",
        ),
    ] {
        let error = refused(entries);
        assert!(error.contains(expected), "{entries:?}: {error}");
    }
}

#[test]
fn a_change_of_several_lines_is_refused_as_a_whole() {
    let error = refused(&["train.epochs=3\nseed = 4"]);
    assert!(error.contains("train.epochs=3"), "{error}");
}

#[test]
fn a_number_that_is_not_finite_is_refused_by_the_name_of_its_key() {
    for (change, expected) in [
        ("data.mean=[nan, 1, 1]", "data.mean = NaN: must be a finite number"),
        ("data.std=[1, inf, 1]", "data.std = inf: must be a finite number"),
        ("schedule.points=[[0.0, 0.1], [inf, 0.1]]", "schedule.points = inf: must be a finite"),
        ("schedule.div_factor=inf", "schedule.div_factor = inf: must be a finite number"),
        ("loss.huber_delta=nan", "loss.huber_delta = NaN: must be above 0"),
    ] {
        let kind = match change.split('=').next() {
            Some("schedule.points") => "schedule={kind='piecewise_linear', points=[]}",
            Some("schedule.div_factor") => "schedule={kind='one_cycle', peak_lr=0.1}",
            _ => "seed=1",
        };
        let error = refused(&[kind, change]);
        assert!(error.contains(expected), "{change}: {error}");
        assert_eq!(error.matches(" = ").count(), 1, "{change}: {error}");
    }
}

#[test]
fn times_too_short_for_any_rank_are_refused() {
    for field in ["rendezvous_seconds", "collective_seconds", "drain_seconds"] {
        let error = refused(&[&format!("cluster.{field}=0.5")]);
        assert!(error.contains(&format!("cluster.{field} = 0.5: must be 1..86400")), "{error}");
        let least = [format!("cluster.{field}=1.0")];
        assert!(JobSpec::from_toml(MINIMAL, &least).is_ok(), "{field}");
    }
    assert!(JobSpec::from_toml(MINIMAL, &["cluster.node_grace_seconds=0.0".to_owned()]).is_ok());
}

#[test]
fn a_checkpoint_folder_with_an_unknown_scheme_or_a_tilde_is_refused_without_its_password() {
    let error = refused(&["checkpoint.dir='http://user:secret@host/x'"]);
    assert_eq!(error, "recipe: checkpoint.dir = http://…: must be a folder or s3://bucket/prefix");
    for dir in ["s3://", "s3:///x"] {
        let error = refused(&[&format!("checkpoint.dir='{dir}'")]);
        assert!(error.contains("checkpoint.dir = s3://…: must be a folder or s3://b"), "{error}");
    }
    let error = refused(&["checkpoint.dir='~/runs/x'"]);
    assert!(
        error.starts_with("recipe: checkpoint.dir = ~/runs/x: must not begin with ~"),
        "{error}"
    );
    for dir in ["s3://bucket/x", "/shared/x", "relative"] {
        assert!(JobSpec::from_toml(MINIMAL, &[format!("checkpoint.dir='{dir}'")]).is_ok(), "{dir}");
    }
}

#[test]
fn a_name_too_long_for_a_folder_is_refused() {
    let name = |len: usize| format!("name='{}'", "n".repeat(len));
    assert!(refused(&[&name(201)]).contains("must be 1..200 letters"));
    assert!(JobSpec::from_toml(MINIMAL, &[name(200)]).is_ok());
}

#[test]
fn unknown_schedule_is_refused_with_a_list_of_known_ones() {
    let error = refused(&["schedule.kind=cyclic"]);
    assert!(error.contains("cyclic") && error.contains("piecewise_linear"), "{error}");
}

#[test]
fn every_part_of_a_recipe_can_be_used_together() {
    let entries = [
        "model.blur_pool=true",
        "augment.mixup_alpha=0.2",
        "augment.cutmix_probability=0.3",
        "train.grad_accumulation=2",
        "train.clip_grad_norm=1.0",
        "train.phases=[{from_epoch=1, resolution=64, global_batch=32, ramp_epochs=1}]",
        "train.recompute=['layer1', 'layer4']",
        "precision.compute=bf16",
        "precision.fused=true",
        "ema.decay=0.999",
        "evaluation.flip=true",
        "evaluation.subset=0.1",
        "evaluation.best=loss",
        "limits={target={metric='top5', value=0.78}, patience=3, max_hours=1.0, max_dollars=9.0, dollars_per_hour=11.0}",
        "optimizer={kind='lars', momentum=0.9, weight_decay=1e-4}",
    ];
    let spec = JobSpec::from_toml(MINIMAL, &entries.map(str::to_owned)).unwrap();
    assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
}

#[test]
fn the_deprecated_key_of_a_target_has_the_same_meaning_and_is_reported() {
    let read = |entry: &str| JobSpec::from_toml(MINIMAL, &[entry.to_owned()]).unwrap();
    let old = read("limits.target_top1=0.78");
    let new = read("limits.target={metric='top1', value=0.78}");
    assert_eq!(old.limits.target(), new.limits.target());
    assert_eq!(new.deprecated_keys(), []);
    assert_eq!(
        old.deprecated_keys()[0].to_string(),
        "limits.target_top1 = 0.78: is the deprecated spelling of \
         limits.target = { metric = \"top1\", value = 0.78 }"
    );
}

#[test]
fn the_first_metric_decides_the_best_evaluation_unless_the_recipe_names_another() {
    let names = |entries: &[&str]| -> Vec<String> {
        let entries: Vec<String> = entries.iter().map(|&entry| entry.to_owned()).collect();
        let spec = JobSpec::from_toml(MINIMAL, &entries).unwrap();
        crate::task::best_first(&spec).into_iter().map(|metric| metric.name.into_owned()).collect()
    };
    assert_eq!(names(&[]), ["top1", "top5", "loss"]);
    assert_eq!(names(&["evaluation.best=loss"]), ["loss", "top1", "top5"]);
    assert_eq!(names(&["loss.kind=mse"]), ["spearman", "pearson", "mae", "loss"]);
}

#[test]
fn override_without_value_is_refused_with_an_example() {
    assert!(refused(&["train.epochs"]).contains("section.key=value"));
}

#[test]
fn a_list_that_is_not_toml_is_no_string() {
    for value in ["[[0, .05]]", "[0, 1", "{ epoch = 1", "\"open"] {
        let change = format!("schedule.points={value}");
        let error = refused(&[change.as_str()]);
        let expected = format!("recipe: override `{change}`: the value is not valid TOML: ");
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn recipe_hash_depends_only_on_what_affects_the_weights() {
    let hash =
        |entry: &str| JobSpec::from_toml(MINIMAL, &[entry.to_owned()]).unwrap().recipe_hash();
    let base = hash("seed=0");
    assert_eq!(hash("cluster.max_ranks=2"), base);
    assert_eq!(hash("checkpoint.every_steps=7"), base);
    assert_eq!(hash("data.cache_dir=/nvme"), base);
    assert_eq!(hash("limits.max_hours=1.0"), base);
    assert_eq!(hash("train.log_every=25"), base);
    assert_ne!(hash("seed=1"), base);
    assert_ne!(hash("train.virtual_ranks=4"), base);
}

/// [`MINIMAL`] as an older or a newer version saved it.
fn saved_by_another_version(edit: impl FnOnce(&mut serde_json::Value)) -> String {
    let minimal = JobSpec::from_toml(MINIMAL, &[]).unwrap().to_json();
    let mut saved = serde_json::from_str(&minimal).unwrap();
    edit(&mut saved);
    saved.to_string()
}

fn changes(overrides: &[&str], saved: &str) -> Vec<String> {
    let overrides: Vec<String> = overrides.iter().map(|&entry| entry.to_owned()).collect();
    JobSpec::from_toml(MINIMAL, &overrides).unwrap().changes_since(saved)
}

#[test]
fn a_field_missing_in_a_saved_recipe_has_its_default() {
    let older = saved_by_another_version(|recipe| {
        assert!(recipe["loss"].as_object_mut().unwrap().remove("label_smoothing").is_some());
        assert!(recipe["optimizer"].as_object_mut().unwrap().remove("nesterov").is_some());
        assert!(recipe.as_object_mut().unwrap().remove("guard").is_some());
    });
    assert_eq!(changes(&[], &older), [""; 0]);
    assert_eq!(changes(&["loss.label_smoothing=0.1"], &older), ["loss.label_smoothing: 0.0 → 0.1"]);
}

#[test]
fn a_field_of_a_newer_version_is_reported_with_a_remedy() {
    let newer = saved_by_another_version(|recipe| recipe["train"]["warp"] = 9.into());
    assert_eq!(
        changes(&[], &newer),
        ["train.warp: unknown field `warp`; a newer Baton wrote it: continue with that version"]
    );
    let newer = saved_by_another_version(|recipe| recipe["optimizer"]["kind"] = "warp".into());
    let named = changes(&[], &newer);
    assert!(named[0].starts_with("optimizer.kind: unknown variant `warp`; "), "{named:?}");
}

#[test]
fn a_saved_value_that_was_not_finite_is_not_ascribed_to_a_newer_version() {
    let older = saved_by_another_version(|recipe| {
        assert!(recipe["data"]["mean"][0].is_number());
        recipe["data"]["mean"][0] = serde_json::Value::Null;
    });
    assert_eq!(
        changes(&[], &older),
        [
            "data.mean[0]: instead of a number there is null, as an older Baton saved NaN and infinity"
        ]
    );
}

#[test]
fn only_changes_that_affect_the_weights_are_reported_against_a_saved_state() {
    let saved = saved_by_another_version(|_| ());
    assert_eq!(
        changes(&["train.epochs=3", "schedule={kind='constant', lr=0.2}"], &saved),
        ["schedule.lr: 0.1 → 0.2", "train.epochs: 2 → 3"]
    );
    let unimportant = [
        "name=other",
        "checkpoint.every_steps=7",
        "cluster.max_ranks=2",
        "limits.max_hours=1.0",
        "data.cache_dir=/nvme",
        "data.decode_threads=9",
    ];
    assert_eq!(changes(&unimportant, &saved), [""; 0]);
}

#[test]
fn a_change_outdates_only_the_results_that_depend_on_it() {
    let same = JobSpec::from_toml(MINIMAL, &[]).unwrap();
    let saved = same.to_json();
    let outdated = |entry: &str| {
        let spec = JobSpec::from_toml(MINIMAL, &[entry.to_owned()]).unwrap();
        assert_ne!(spec, same, "{entry}");
        spec.outdates(&saved)
    };
    let nothing = [
        "train.epochs=3",
        "train.global_batch=32",
        "schedule={kind='constant', lr=0.2}",
        "optimizer.momentum=0.8",
        "seed=1",
        "guard.loss_rise=0.7",
        "evaluation.every_epochs=2",
        "evaluation.batch=8",
        "data.decode_threads=9",
        "data.train=elsewhere.beton",
        "data.val=elsewhere.beton",
        "limits.patience=3",
    ];
    for entry in nothing {
        assert_eq!(outdated(entry), Outdated::Nothing, "{entry}");
    }
    let loss = ["data.order=sequential", "augment.flip=0.0", "model.zero_init_gamma=true"];
    for entry in loss {
        assert_eq!(outdated(entry), Outdated::Loss, "{entry}");
    }
    let evaluations = [
        "data.mean=[1.0, 2.0, 3.0]",
        "loss.label_smoothing=0.1",
        "evaluation.best=loss",
        "evaluation.samples=8",
        "train.resolution=64",
    ];
    for entry in evaluations {
        assert_eq!(outdated(entry), Outdated::Evaluations, "{entry}");
    }
    let newer = saved_by_another_version(|recipe| recipe["train"]["warp"] = 9.into());
    assert_eq!(same.outdates(&newer), Outdated::Evaluations, "what has changed is not known");
    assert_eq!(same.outdates(&saved), Outdated::Nothing);
}

#[test]
fn the_strict_order_works_with_every_collective() {
    for collective in ["auto", "tcp", "nccl"] {
        let strict =
            ["precision.determinism=strict".to_owned(), format!("cluster.collective={collective}")];
        JobSpec::from_toml(MINIMAL, &strict).unwrap();
    }
}

/// Reads `derived.toml` from these files.
fn with_files(files: &[(&str, &str)], changes: &[&str]) -> Result<Resolved, Error> {
    let changes: Vec<String> = changes.iter().map(|&entry| entry.to_owned()).collect();
    Resolved::read(Path::new("jobs/derived.toml"), &changes, |path| {
        let file = files.iter().find(|(name, _)| Path::new("jobs").join(name) == path);
        let (_, text) =
            file.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such file"))?;
        Ok((*text).to_owned())
    })
}

/// The error for `derived.toml`, in one line.
fn refused_with_files(files: &[(&str, &str)], changes: &[&str]) -> String {
    let error = with_files(files, changes).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn a_recipe_changes_single_values_of_its_base() {
    let derived = "
        name = 'derived'
        base = '../base.toml'
        model.freeze = []
        train.epochs = 4
        optimizer = { kind = 'sgd', nesterov = true }
    ";
    let base = MINIMAL.replace("num_classes = 10", "num_classes = 10\nfreeze = ['stem']");
    let files = [("derived.toml", derived), ("../base.toml", &base)];
    let Resolved { spec, set, origins } = with_files(&files, &["train.global_batch=32"]).unwrap();
    assert_eq!(
        (spec.name.as_str(), spec.train.epochs, spec.train.global_batch),
        ("derived", 4, 32)
    );
    assert!(spec.model.freeze.is_empty());
    let OptimizerSpec::Sgd { momentum, nesterov, .. } = spec.optimizer else { panic!("{spec:?}") };
    assert_eq!((momentum, nesterov), (0.9, true));
    let file = |path: &str| Some(ValueOrigin::File(Path::new("jobs").join(path)));
    assert_eq!(origins.get("train.epochs").cloned(), file("derived.toml"));
    assert_eq!(origins.get("optimizer.momentum").cloned(), file("../base.toml"));
    assert!(matches!(origins.get("train.global_batch"), Some(ValueOrigin::Change(_))));
    assert_eq!(origins.get("train.virtual_ranks"), None);
    // Sent to another machine, it gives the same recipe.
    let sent = JobSpec::from_toml(&set.to_string(), &[]).unwrap();
    assert_eq!(sent, spec);
}

#[test]
fn another_kind_inherits_no_keys_of_the_old_kind() {
    let derived = "
        name = 'derived'
        base = 'base.toml'
        [optimizer]
        kind = 'adamw'
        [schedule]
        kind = 'step'
        lr = 0.2
        milestones = [1.0]
        [loss]
        kind = 'mse'
    ";
    let base = format!("{MINIMAL}[loss]\nlabel_smoothing = 0.1\n");
    let spec = with_files(&[("derived.toml", derived), ("base.toml", &base)], &[]).unwrap().spec;
    assert!(
        matches!(spec.optimizer, OptimizerSpec::AdamW { .. }) && spec.loss.label_smoothing == 0.0
    );
}

#[test]
fn a_base_can_have_a_base() {
    let files = [
        ("derived.toml", "name = 'derived'\nbase = 'a/near.toml'\nseed = 1"),
        ("a/near.toml", "base = 'far.toml'\nseed = 2\ntrain.epochs = 3"),
        ("a/far.toml", MINIMAL),
    ];
    let spec = with_files(&files, &[]).unwrap().spec;
    assert_eq!((spec.seed, spec.train.epochs, spec.train.global_batch), (1, 3, 64));
}

#[test]
fn a_name_is_not_inherited() {
    let files = [("derived.toml", "base = 'base.toml'"), ("base.toml", MINIMAL)];
    assert!(refused_with_files(&files, &[]).contains("missing field `name`"));
    assert_eq!(with_files(&files, &["name=other"]).unwrap().spec.name, "other");
}

#[test]
fn errors_of_bases_name_the_location_of_the_base() {
    let loops = [
        ("derived.toml", "name = 'derived'\nbase = 'one.toml'"),
        ("one.toml", "base = 'two.toml'"),
        ("two.toml", "seed = 1\nbase = 'one.toml'"),
    ];
    assert_eq!(
        refused_with_files(&loops, &[]),
        "recipe: in base jobs/two.toml at line 2, column 8: bases form a cycle, jobs/derived.toml -> \
         jobs/one.toml -> jobs/two.toml -> jobs/one.toml: remove one base"
    );
    let itself = [("derived.toml", "base = 'derived.toml'")];
    assert!(refused_with_files(&itself, &[]).contains("at line 1, column 8: bases form a cycle"));
    // Here the path is different each time.
    let deeper = [("derived.toml", "base = 'x/../derived.toml'")];
    let deep = Resolved::read(Path::new("derived.toml"), &[], |_| Ok(deeper[0].1.to_owned()));
    assert!(
        deep.unwrap_err()
            .to_string()
            .contains("more than 7 bases, derived.toml -> x/../derived.toml")
    );
    for (base, expected) in [
        (
            "base = 'none.toml'",
            "recipe: at line 1, column 8: base = \"none.toml\" cannot be read: no such file; it is a \
             path from this file's folder",
        ),
        (
            "base = 3",
            "recipe: at line 1, column 8: base must be a path from this file to another recipe, e.g. \
             base = \"other.toml\"",
        ),
    ] {
        assert_eq!(refused_with_files(&[("derived.toml", base)], &[]), expected);
    }
    assert!(refused(&["base=other.toml"]).contains("give a file that has this base"));
    let alone = JobSpec::from_toml("base = 'other.toml'", &[]).unwrap_err().to_string();
    assert!(alone.contains("baton recipe show FILE --toml"), "{alone}");
}

#[test]
fn errors_name_the_location_where_the_value_was_written() {
    let base = MINIMAL.replace("epochs = 2", "epochs = 2\nepoch_count = 3");
    let derived = "name = 'derived'\nbase = 'base.toml'\nseed = 1\n";
    let error = refused_with_files(&[("derived.toml", derived), ("base.toml", &base)], &[]);
    assert!(error.contains("in base jobs/base.toml at line 11, column 1: unknown"), "{error}");
    let derived = format!("{derived}train.epochs = 'two'\n");
    let files = [("derived.toml", derived.as_str()), ("base.toml", MINIMAL)];
    let error = refused_with_files(&files, &[]);
    let expected = "train.epochs: string \"two\" in place of a whole number";
    assert_eq!(error, format!("recipe: at line 4, column 16: {expected}"));
    for (change, problem) in [
        ("train.epochs=[2]", "train.epochs: an array in place of a whole number"),
        ("augment.flip=often", "augment.flip: string \"often\" in place of a number"),
        ("model.channels_last=1", "model.channels_last: integer `1` in place of true or false"),
        ("optimizer.weight_decay={}", "a table or a date in place of a number"),
    ] {
        assert!(refused(&[change]).ends_with(problem), "{}", refused(&[change]));
    }
    let error = refused_with_files(&[files[0], ("base.toml", "seed = ")], &[]);
    assert!(error.starts_with("recipe: in base jobs/base.toml at line 1, column "), "{error}");
    for change in ["train.epoch=3", "train.epochs=few", "optimizer.betas=[0.9, 0.99]"] {
        let error = refused(&[change]);
        assert!(error.starts_with(&format!("recipe: override `{change}`: ")), "{error}");
    }
}

#[test]
fn values_that_the_network_ignores_are_refused_as_a_change_and_allowed_in_a_file() {
    let of_resnet = MINIMAL.replace("num_classes = 10", "num_classes = 10\nzero_init_gamma = true");
    let changes = |more: &[&str]| {
        [&["model.arch=linear"], more]
            .concat()
            .iter()
            .map(|&one| one.to_owned())
            .collect::<Vec<_>>()
    };
    let spec = JobSpec::from_toml(&of_resnet, &changes(&[])).unwrap();
    assert!(spec.model.zero_init_gamma);
    assert_eq!(ignored(&spec)[0].field, "model.zero_init_gamma");
    for (change, expected) in [
        ("model.zero_init_gamma=true", "model.zero_init_gamma = true: is ignored by model.arch"),
        ("model.channels_last=false", "model.channels_last = false: is ignored by model.arch"),
        (
            "optimizer={ kind = 'sgd', weight_decay = 0.1, decay_norm_and_bias = false }",
            "decays its biases too: set it to true",
        ),
    ] {
        let error = JobSpec::from_toml(&of_resnet, &changes(&[change])).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

const LANGUAGE_MODEL: &str = r#"
name = "tune"
[model]
arch = "causal_lm"
path = "models/tiny"
[adapter]
rank = 8
alpha = 16
[data]
train = "train.beton"
val = "val.beton"
sequence = 64
packing = true
[train]
epochs = 2
global_batch = 8
[optimizer]
kind = "adamw"
[schedule]
kind = "warmup_linear"
peak_lr = 2.5e-4
warmup_steps = 150
[loss]
kind = "next_token"
"#;

#[test]
fn a_recipe_for_a_language_model_needs_no_number_of_classes() {
    let spec = JobSpec::from_toml(LANGUAGE_MODEL, &[]).unwrap();
    assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
    assert_eq!(JobSpec::from_toml(&spec.to_toml(), &[]).unwrap(), spec);
    let adapter = spec.adapter.unwrap();
    assert_eq!((adapter.scale(), adapter.targets), (2.0, vec!["all-linear".to_owned()]));
}

#[test]
fn wrong_values_for_a_language_model_are_refused() {
    for (change, expected) in [
        ("model.path=''", "model.path = \"\": must be the folder of the model"),
        ("model.num_classes=10", "model.num_classes = 10: is not supported by model.arch"),
        ("adapter.rank=0", "adapter.rank = 0: must be 1..1024"),
        ("adapter.alpha=0.0", "adapter.alpha = 0: must be above 0"),
        ("adapter.alpha=-1.0", "adapter.alpha = -1: must be above 0"),
        ("adapter.dropout=1.0", "adapter.dropout = 1: must be in [0, 1)"),
        ("adapter.targets=[]", "adapter.targets = []: must name linear layers"),
        ("data.sequence=0", "data.sequence = 0: must be 8..1048576"),
        ("data.on_bad_sample=skip", "would replace a text by one of another length"),
        ("data.order=quasi_random", "is not supported by model.arch"),
        ("loss.kind=cross_entropy", "must be next_token with model.arch = \"causal_lm\""),
        ("schedule.warmup_epochs=0.5", "cannot be combined with schedule.warmup_epochs"),
        ("evaluation.best=top1", "its metrics are loss, perplexity, token_accuracy"),
    ] {
        let error =
            JobSpec::from_toml(LANGUAGE_MODEL, &[change.to_owned()]).unwrap_err().to_string();
        assert!(error.contains(expected), "{change}: {error}");
        let is_about_classes = error.contains("num_classes");
        assert_eq!(is_about_classes, change.contains("num_classes"), "{change}: {error}");
    }
    for (change, expected) in [
        ("loss.kind=next_token", "needs model.arch = \"causal_lm\""),
        ("data.sequence=64", "needs model.arch = \"causal_lm\""),
        ("data.packing=true", "needs model.arch = \"causal_lm\""),
        ("model.path=models/tiny", "needs model.arch = \"causal_lm\""),
        ("adapter={rank=8,alpha=16}", "needs model.arch = \"causal_lm\""),
    ] {
        let error = refused(&[change]);
        assert!(error.contains(expected), "{change}: {error}");
    }
}

#[test]
fn a_key_of_many_parts_is_refused_before_it_becomes_as_many_tables() {
    let change = format!("{}=1", vec!["a"; 20_000].join("."));
    let error = JobSpec::from_toml(MINIMAL, &[change]).unwrap_err().to_string();
    assert!(error.contains("its key has 20000 parts"), "{error}");
    assert!(error.len() < 300, "{error}");
}
