//! Reads programs that `scripts/parity/fixtures.py` wrote, whole and damaged.

#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod kit;

use std::fs;

use baton_model::TensorRole;
use baton_program::{
    Argument, Dtype, Error, ExportTask, InputRoles, InputSource, Normalisation, Program,
};
use baton_recipe::JobSpec;
use tempfile::TempDir;

use self::kit::{GRAPH, changed, entries, fixture, program_of, zip};

/// What a recipe has by default.
const IMAGENET: Normalisation =
    Normalisation { mean: [123.675, 116.28, 103.53], std: [58.395, 57.12, 57.375] };

/// A recipe for a program with ten outputs, and ImageNet's normalisation.
fn recipe(changes: &[&str]) -> JobSpec {
    let text = r#"
        name = "test"
        model = { arch = "program", program = "net.pt2", num_classes = 10 }
        data = { train = "train.beton", val = "val.beton" }
        train = { epochs = 1, global_batch = 8, resolution = 8, virtual_ranks = 1 }
        optimizer = { kind = "sgd" }
        schedule = { kind = "constant", lr = 0.1 }
    "#;
    let changes: Vec<String> = changes.iter().map(|change| (*change).to_owned()).collect();
    JobSpec::from_toml(text, &changes).unwrap()
}

fn small() -> Program {
    Program::read(&fixture("small.pt2")).unwrap()
}

fn refused(name: &str) -> String {
    Program::read(&fixture(name)).unwrap_err().to_string()
}

/// Reads a file with these bytes, and everything in it.
fn read(folder: &TempDir, bytes: &[u8]) -> Result<Program, Error> {
    let path = folder.path().join("damaged.pt2");
    fs::write(&path, bytes).unwrap();
    let program = Program::read(&path)?;
    for parameter in &program.parameters {
        program.storage(&parameter.tensor)?;
    }
    let _ = program.evaluation();
    Ok(program)
}

#[test]
fn tensors_are_those_of_the_state_dict() {
    let program = small();
    let names: Vec<&str> =
        program.parameters.iter().map(|parameter| parameter.tensor.name.as_str()).collect();
    let expected = [
        "conv.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "first.weight",
        "fc.weight",
        "fc.bias",
    ];
    assert_eq!(names, expected);
    assert_eq!(program.parameters[4].aliases, ["second.weight"]);
    assert_eq!(program.parameters[0].tensor.shape, [8, 3, 3, 3]);
    let statistics: Vec<&str> =
        program.statistics.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(statistics, ["norm.running_mean", "norm.running_var"]);
    let constants = program.constants.iter();
    let constants: Vec<_> = constants
        .map(|constant| {
            (constant.tensor.name.as_str(), constant.tensor.dtype, constant.is_persistent)
        })
        .collect();
    assert!(constants.contains(&("order", Dtype::I64, true)), "{constants:?}");
    assert!(constants.contains(&("scale", Dtype::F32, false)), "{constants:?}");

    let order = program.constants.iter().find(|constant| constant.tensor.name == "order").unwrap();
    let bytes = program.storage(&order.tensor).unwrap();
    let values: Vec<i64> =
        bytes.as_chunks().0.iter().map(|value| i64::from_le_bytes(*value)).collect();
    assert_eq!(values, [7, 6, 5, 4, 3, 2, 1, 0]);
}

#[test]
fn constants_that_checkpoints_cannot_hold_are_refused_before_training() {
    let with_order = |values: [i64; 8]| {
        let mut entries = entries("small.pt2");
        let name = "data/weights/weight_7";
        let (_, content) = entries.iter_mut().find(|(entry, _)| entry.ends_with(name)).unwrap();
        *content = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        program_of_values(&entries)
    };
    // The largest integers up to which f32 has all, and larger ones that it has.
    for value in [1 << 24, -(1 << 24), 1 << 40, i64::MIN] {
        with_order([0, 1, 2, 3, 4, 5, 6, value]).unwrap();
    }
    for value in [(1 << 24) + 1, -(1 << 24) - 1, i64::MAX] {
        let error = with_order([0, 1, 2, 3, 4, 5, 6, value]).unwrap_err();
        assert!(error.contains("keeps buffer order with integers that float32 has not"), "{error}");
    }
    let order = r#""order": {"path_name": "weight_7", "is_param": false, "use_pickle": false, "tensor_meta": {"dtype": "#;
    let config = "model_weights_config.json";
    let of_doubles = changed("small.pt2", config, &format!("{order}5"), &format!("{order}8"));
    let error = of_doubles.unwrap().check_constants().unwrap_err().to_string();
    assert!(error.contains("keeps buffer order as float64: make it float32"), "{error}");
}

/// The result of a check of its constants, while the file exists.
fn program_of_values(entries: &[(String, Vec<u8>)]) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let entries: Vec<_> =
        entries.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
    let path = folder.path().join("changed.pt2");
    std::fs::write(&path, zip(&entries)).unwrap();
    let program = baton_program::Program::read(&path).unwrap();
    program.check_constants().map_err(|error| error.to_string())
}

#[test]
fn the_description_has_what_training_changes_and_what_the_state_dict_keeps() {
    let network = small().describe();
    let decays: Vec<&str> = network
        .parameters
        .iter()
        .filter(|tensor| tensor.decays)
        .map(|tensor| tensor.name.as_str())
        .collect();
    assert_eq!(decays, ["conv.weight", "first.weight", "fc.weight"]);
    let hidden = network.parameters.iter().filter(|tensor| tensor.is_hidden);
    let hidden: Vec<&str> = hidden.map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(hidden, ["conv.weight", "first.weight"]);
    let statistics: Vec<(&str, bool)> = network
        .statistics
        .iter()
        .map(|tensor| (tensor.name.as_str(), tensor.is_frozen()))
        .collect();
    // An export counts the updates, so norm.num_batches_tracked is not among them.
    let kept = [("norm.running_mean", false), ("norm.running_var", false), ("order", true)];
    assert_eq!(statistics, kept);
}

#[test]
fn inputs_and_outputs_are_known() {
    let program = small();
    assert_eq!(program.inputs[0].name, "x");
    assert_eq!(program.inputs[0].shape, [None, Some(3), Some(8), Some(8)]);
    assert_eq!(program.inputs[0].max_samples, Some(256));
    assert_eq!(program.outputs[0].shape, [None, Some(10)]);
    assert_eq!(program.min_batch(), 1);
    assert_eq!(program.norms[0].momentum, 0.3);
}

#[test]
fn a_node_names_its_module_and_line() {
    let program = small();
    let node = program.graph.nodes.iter().find(|node| node.operator == "aten::dropout").unwrap();
    let location = node.location.to_string();
    assert!(location.starts_with("node dropout of drop (fixtures.py, line "), "{location}");
}

#[test]
fn counters_that_nothing_reads_are_left_out() {
    let program = small();
    let counter = |operator: &str| program.graph.nodes.iter().any(|node| node.operator == operator);
    assert!(!counter("aten::add_"));
    assert!(counter("aten::batch_norm"));
}

#[test]
fn evaluation_flips_flags_and_keeps_everything_in_stochastic_depth() {
    let program = small();
    let evaluation = program.evaluation().unwrap();
    let node = |operator: &str| evaluation.nodes.iter().find(|node| node.operator == operator);
    assert_eq!(node("aten::dropout").unwrap().argument("train"), Some(&Argument::Bool(false)));
    assert_eq!(
        node("aten::batch_norm").unwrap().argument("training"),
        Some(&Argument::Bool(false))
    );
    assert!(node("aten::bernoulli_").is_none());
    assert_eq!(node("aten::fill_").unwrap().arguments[1].value, Argument::Float(0.8));
}

#[test]
fn a_part_without_gradient_is_put_in_place() {
    let program = small();
    let without: Vec<&str> = program
        .graph
        .nodes
        .iter()
        .filter(|node| !node.has_gradient)
        .map(|node| node.operator.as_str())
        .collect();
    assert_eq!(without, ["aten::mul"]);
}

#[test]
fn every_value_is_made_before_it_is_used_and_released_once() {
    let program = small();
    let graph = &program.graph;
    let mut alive = vec![false; graph.values as usize];
    for (value, _) in &graph.inputs {
        alive[value.0 as usize] = true;
    }
    for node in &graph.nodes {
        assert!(node.uses().iter().all(|value| alive[value.0 as usize]), "{}", node.location);
        node.makes().for_each(|value| alive[value.0 as usize] = true);
        for value in &node.last_uses {
            assert!(std::mem::take(&mut alive[value.0 as usize]), "{}", node.location);
        }
    }
    // What is left is the output, and inputs that nobody uses.
    assert!(alive[graph.outputs[0].0 as usize]);
    let unused = graph.inputs.iter().filter(|(value, _)| alive[value.0 as usize]);
    let unused: Vec<InputSource> = unused.map(|(_, source)| *source).collect();
    assert!(
        unused
            .iter()
            .all(|source| matches!(source, InputSource::Constant(_) | InputSource::Parameter(_)))
    );
}

#[test]
fn programs_that_cannot_be_trained_are_refused_with_a_remedy() {
    let evaluation = refused("evaluation.pt2");
    assert!(evaluation.ends_with("call model.train() before torch.export.export"), "{evaluation}");
    let no_gradient = refused("no_gradient.pt2");
    assert!(
        no_gradient.ends_with("torch.utils.checkpoint needs use_reentrant=False"),
        "{no_gradient}"
    );
    let sparse = refused("sparse_gradient.pt2");
    assert!(
        sparse.contains("embedding of table") && sparse.ends_with("use sparse=False"),
        "{sparse}"
    );
    let fixed = refused("fixed_batch.pt2");
    assert!(fixed.contains("takes exactly 3 samples: export it with dynamic_shapes="), "{fixed}");
}

#[test]
fn what_a_step_would_change_itself_is_refused_with_its_place() {
    for (fixture, place, tensor) in [
        ("running_buffer.pt2", "node lerp_ (fixtures.py, line ", "average"),
        ("changed_parameter.pt2", "node clamp_ (fixtures.py, line ", "fc.weight"),
        ("changed_view.pt2", "node clamp_ (fixtures.py, line ", "fc.weight"),
        (
            "spectral_norm.pt2",
            "node div of 1.parametrizations.weight.0",
            "1.parametrizations.weight.0._u",
        ),
    ] {
        let text = refused(fixture);
        assert!(text.contains(place), "{text}");
        assert!(text.contains(&format!(": changes {tensor} in a step, and only")), "{text}");
    }
}

#[test]
fn files_that_are_none_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let text = read(&folder, b"import torch\n").unwrap_err().to_string();
    assert!(text.contains("damaged.pt2 is not a zip file"), "{text}");
    assert!(text.ends_with("write it with torch.export.save"), "{text}");
    let missing = Program::read(&folder.path().join("none.pt2")).unwrap_err().to_string();
    assert!(missing.contains("none.pt2 cannot be opened (No such file"), "{missing}");
    let pipe = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    let not_a_file = Program::read(&pipe).unwrap_err().to_string();
    assert!(not_a_file.contains("is not a regular file"), "{not_a_file}");
    let not_a_file = Program::read(folder.path()).unwrap_err().to_string();
    assert!(not_a_file.contains("is not a regular file"), "{not_a_file}");
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    let folder = tempfile::tempdir().unwrap();
    let whole = fs::read(fixture("small.pt2")).unwrap();
    assert!(read(&folder, &whole).is_ok());
    for len in (0..whole.len()).step_by(97) {
        assert!(read(&folder, &whole[..len]).is_err(), "{len} of {} bytes", whole.len());
    }
}

/// A changed byte is found by a checksum, or lies where nothing depends on it. It never ends the process.
#[test]
fn a_changed_byte_ends_in_an_error_or_the_same_program() {
    let folder = tempfile::tempdir().unwrap();
    let whole = fs::read(fixture("small.pt2")).unwrap();
    let expected = small().graph;
    let mut refused = 0;
    for index in (0..whole.len()).step_by(31) {
        let mut bytes = whole.clone();
        bytes[index] ^= 0x55;
        match read(&folder, &bytes) {
            Ok(program) => assert_eq!(program.graph, expected, "byte {index}"),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 500, "{refused}");
}

/// The program with this `extra/baton.json`.
fn with_metadata(text: &str) -> Result<Program, Error> {
    let mut entries = entries("small.pt2");
    entries.push(("small/extra/baton.json".to_owned(), text.as_bytes().to_vec()));
    let program = program_of(&entries)?;
    program.fits(&recipe(&[])).map(|_| program)
}

/// What `baton.export` writes, with other fields in place of the last ones.
fn metadata(rest: &str) -> String {
    let all = r#"{"format_version": 1, "task": "classification", "inputs": [{"name": "pixels", "dtype": "float32"}]"#;
    format!("{all}, {rest}}}")
}

#[test]
fn what_export_wrote_is_known() {
    let names: Vec<String> = ('a'..='j').map(String::from).collect();
    let text = format!(
        r#""class_names": {names:?}, "mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375], "new": 1"#
    );
    let program = with_metadata(&metadata(&text)).unwrap();
    // `forward` has another name than the graph.
    assert_eq!(program.inputs[0].name, "pixels");
    let found = program.metadata.clone().unwrap();
    assert_eq!(found.task, ExportTask::Classification);
    assert_eq!(found.inputs, ["pixels"]);
    assert_eq!(found.class_names, names);
    assert_eq!(found.normalisation, Some(IMAGENET));
    // Rounding is no contradiction.
    program.fits(&recipe(&["data.mean=[123.68, 116.28, 103.53]"])).unwrap();
}

#[test]
fn nodes_of_a_module_follow_each_other_or_are_refused() {
    let names = |modules: &[&str]| -> Vec<String> {
        modules.iter().map(|module| (*module).to_owned()).collect()
    };
    let graph = small().graph;
    let spans = graph.spans(&names(&["norm", "conv"])).unwrap();
    let found: Vec<_> = spans.iter().map(|span| (span.module.as_str(), span.nodes.len())).collect();
    assert_eq!(found, [("conv", 1), ("norm", 1)]);
    assert_eq!(spans[0].outputs.len(), 1);
    assert!(spans[1].inputs.contains(&spans[0].outputs[0]));
    assert_eq!(spans[1].inputs.len(), 5, "weight, bias, mean, variance and the activations");
    for (modules, expected) in [
        (&["layer1"][..], "layer1 is no module of the program: choose among conv, norm, drop"),
        (&["conv", "conv"], "conv and conv share operators"),
    ] {
        let error = graph.spans(&names(modules)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let path = format!("model.program={}", fixture("small.pt2").display());
    let error = Program::of_recipe(&recipe(&[&path, "train.recompute=['layer1']"])).unwrap_err();
    assert!(error.to_string().contains("cannot recompute all of train.recompute"), "{error}");
}

#[test]
fn a_recipe_freezes_parameters_and_batch_norms_by_pattern() {
    let path = format!("model.program={}", fixture("small.pt2").display());
    let read = |freeze: &str| Program::of_recipe(&recipe(&[&path, freeze]));
    let frozen = |freeze: &str| -> Vec<String> {
        let (program, _) = read(freeze).unwrap();
        let network = program.describe();
        let tensors = network.parameters.iter().chain(&network.statistics);
        let frozen = tensors.filter(|tensor| tensor.role == TensorRole::Frozen);
        frozen.map(|tensor| tensor.name.clone()).collect()
    };
    assert_eq!(frozen("model.freeze=[]"), [""; 0]);
    assert_eq!(
        frozen("model.freeze=['norm.*', 'second.weight']"),
        ["norm.weight", "norm.bias", "first.weight", "norm.running_mean", "norm.running_var"]
    );
    for (freeze, expected) in [
        ("model.freeze=['nrom.*']", "model.freeze = [nrom.*]: nrom.* is the name of no parameter"),
        ("model.freeze=['*']", "has no parameter to train"),
        ("model.freeze=['norm.running_mean']", "freeze both or none"),
        ("model.no_decay=['norm.running_var']", "norm.running_var is the name of no parameter"),
        (
            "optimizer={ kind='muon', adamw=['head'] }",
            "optimizer.adamw = [head]: head is the name of no parameter",
        ),
        (
            "optimizer={ kind='muon', adamw=['conv.*', 'second.weight'] }",
            "has no weight for optimizer.kind = \"muon\"",
        ),
    ] {
        let error = read(freeze).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// A recipe for `with_loss.pt2`.
const LOSS: [&str; 3] = [
    "loss={ kind='program', metrics=['accuracy', 'digit_error'] }",
    "data.extra_fields=['label']",
    "model.num_classes=1",
];

#[test]
fn a_program_that_computes_its_loss_takes_fields_by_name() {
    let program = Program::read(&fixture("with_loss.pt2")).unwrap();
    let names: Vec<_> = program.inputs.iter().map(|input| input.name.as_str()).collect();
    assert_eq!(names, ["x", "label", "target"]);
    let returned: Vec<_> =
        program.outputs.iter().map(|output| output.name.as_deref().unwrap()).collect();
    assert_eq!(returned, ["loss", "accuracy", "digit_error"]);
    let roles = program.fits(&recipe(&LOSS)).unwrap();
    assert_eq!(roles, InputRoles { main: 0, extras: vec![1], target: Some(2) });
    let metrics = ["digit_error".to_owned(), "accuracy".to_owned()];
    assert_eq!(program.loss_outputs(&metrics), Some(vec![0, 2, 1]));
}

#[test]
fn images_of_every_phase_and_of_the_evaluation_must_have_the_size_that_the_program_takes() {
    let check = |changes: &[&str]| {
        small().check_images(&recipe(changes)).map_err(|error| error.to_string())
    };
    assert_eq!(check(&[]), Ok(()));
    let phase = "train.phases=[{ from_epoch=1, resolution=64, global_batch=8 }]";
    for (changes, side) in [
        (&["train.resolution=16"][..], 16),
        (&["evaluation.resolution=32"], 32),
        (&["train.epochs=2", "train.resolution=32", "evaluation.resolution=32", phase], 32),
    ] {
        let refused = check(changes).unwrap_err();
        let expected = format!("has images of {side} px: set train.resolution");
        assert!(refused.contains(&expected), "{refused}");
    }
}

#[test]
fn a_recipe_that_does_not_fit_the_inputs_or_outputs_is_refused_with_a_remedy() {
    let program = Program::read(&fixture("with_loss.pt2")).unwrap();
    let refused = |program: &Program, changes: &[&str]| {
        program.fits(&recipe(changes)).unwrap_err().to_string()
    };
    for (changes, expected) in [
        (
            &[][..],
            "takes x, label, target, but data.input_field and data.extra_fields are 1 of them",
        ),
        (
            &["data.extra_fields=['age']"],
            "takes no input age, which data.extra_fields names; its inputs are x, label, target",
        ),
        (&[LOSS[0], LOSS[2]], "are 1 of them"),
        (
            &["loss={ kind='program', metrics=['accuracy'] }", LOSS[1], LOSS[2]],
            "returns loss, accuracy, digit_error, but the recipe needs a dictionary of loss and loss.metrics = [accuracy]",
        ),
    ] {
        let error = refused(&program, changes);
        assert!(error.contains(expected), "{error}");
    }
    let error = refused(&small(), &[LOSS[0], LOSS[2]]);
    assert!(error.contains("takes no input target, but with loss.kind = \"program\""), "{error}");
}

#[test]
fn a_loss_for_each_token_is_refused() {
    let program = Program::read(&fixture("token_loss.pt2")).unwrap();
    let changes = ["loss={ kind='program' }", "model.num_classes=1"];
    let error = program.fits(&recipe(&changes)).unwrap_err().to_string();
    assert!(error.contains("another number of values than samples"), "{error}");
}

#[test]
fn a_file_by_plain_torch_has_no_metadata_and_the_same_digest() {
    let plain = small();
    assert_eq!(plain.metadata, None);
    assert_eq!(with_metadata(&metadata(r#""mean": null"#)).unwrap().digest, plain.digest);
}

#[test]
fn a_recipe_that_contradicts_the_metadata_is_refused_with_a_remedy() {
    let text = r#""mean": [123.675, 116.28, 103.53], "std": [58, 57, 57]"#;
    let error = with_metadata(&metadata(text)).unwrap_err().to_string();
    for part in [
        "expects images of data.mean = [123.675, 116.28, 103.53] and data.std = [58.0, 57.0, 57.0]",
        "but the recipe has data.mean = [123.675, 116.28, 103.53] and data.std = [58.395, 57.12, 57.375]",
        "set the recipe to the program's",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(error.lines().count(), 1);
}

#[test]
fn malformed_metadata_is_refused_in_one_line() {
    let long = format!(r#""class_names": ["{}"]"#, "x".repeat(9 << 20));
    for (text, expected) in [
        ("{", "is malformed (EOF while parsing"),
        (r#"{"task": "classification"}"#, "is malformed (missing field `format_version`"),
        (
            r#"{"format_version": 2, "inputs": 3}"#,
            "has format version 2, but this Baton reads version 1: use the Python package",
        ),
        (r#"{"format_version": 1, "task": "song", "inputs": []}"#, "unknown variant `song`"),
        (
            r#"{"format_version": 1, "task": "a\nb\u001b[2J", "inputs": []}"#,
            "unknown variant `a?b?[2J`",
        ),
        (
            r#"{"format_version": 1, "task": "regression", "inputs": []}"#,
            "names 0 inputs, but the graph has 1",
        ),
        (
            &metadata(r#""class_names": ["a", "b"]"#),
            "names 2 classes, but the program returns (samples, 10)",
        ),
        (&metadata(r#""class_names": ["a\u001b[2J"]"#), "a name has a control character"),
        (&metadata(r#""mean": [1, 2, 3]"#), "mean and std go together"),
        (&metadata(r#""mean": [1, 2, 3], "std": [1, 0, 1]"#), "std must be above 0"),
        (&metadata(r#""mean": [1, 2, 1e39], "std": [1, 1, 1]"#), "number out of range"),
        (&metadata(&long), "but at most 8388608 are read"),
    ] {
        let error = with_metadata(text).unwrap_err().to_string();
        let shown = &text[..text.len().min(80)];
        assert!(error.contains("extra/baton.json"), "{shown}: {error}");
        assert!(error.contains(expected), "{shown}: {error}");
        assert_eq!(error.lines().count(), 1, "{shown}: {error}");
    }
}

#[test]
fn what_cannot_be_trained_is_named_with_its_node_and_a_remedy() {
    const DROPOUT: &str = "torch.ops.aten.dropout.default";
    const NESTED: &str = "torch.ops.higher_order.wrap_with_set_grad_enabled";
    const OUTPUTS: &str = r#""output_specs":["#;
    for (old, new, expected) in [
        (
            DROPOUT,
            "torch.ops.torchvision.nms.default",
            ["of drop (fixtures.py", "torchvision::nms is a custom one"],
        ),
        (DROPOUT, "torch.ops.aten.item.default", ["node dropout", "keep it in tensors"]),
        (DROPOUT, "math.floor", ["node dropout", "express it with tensor operators"]),
        (NESTED, "torch.ops.higher_order.cond", ["control flow", "such as torch.where"]),
        (
            NESTED,
            "torch.ops.higher_order.wrap_with_autocast",
            ["enables autocast", "set precision.compute"],
        ),
        (
            "torch.ops.aten.bernoulli_.float",
            "torch.ops.aten.uniform_.default",
            ["aten::uniform_ draws random numbers in evaluation too", "use torch.nn.Dropout"],
        ),
        (
            "torch.ops.aten.batch_norm.default",
            "torch.ops.aten.instance_norm.default",
            ["of norm", "set track_running_stats=False"],
        ),
        (
            r#""arg":{"as_tensor":{"name":"b_norm_running_mean"}},"kind":1},{"name":"running_var","arg":{"as_tensor":{"name":"b_norm_running_var"}}"#,
            r#""arg":{"as_none":true},"kind":1},{"name":"running_var","arg":{"as_none":true}"#,
            ["of norm", "set track_running_stats=True"],
        ),
        (
            r#"{"as_tensor":{"name":"b_norm_running_var"}}"#,
            r#"{"as_tensor":{"name":"b_norm_running_mean"}}"#,
            ["is used twice in a step", "use two modules"],
        ),
        (
            r#"{"as_tensor":{"name":"b_scale"}}"#,
            r#"{"as_tensor":{"name":"b_norm_running_mean"}}"#,
            ["uses norm.running_mean of this BatchNorm in training", "keep a buffer that does not"],
        ),
        // A use of a value, not where it is made.
        (
            r#""name":"input","arg":{"as_tensor":{"name":"conv2d"}"#,
            r#""name":"input","arg":{"as_tensor":{"name":"nobody"}"#,
            ["uses nobody", "the file is damaged"],
        ),
        (
            OUTPUTS,
            r#""output_specs":[{"buffer_mutation":{"arg":{"name":"x"},"buffer_name":"order"}},"#,
            ["returns a new order", "save the result of torch.export.export itself"],
        ),
    ] {
        let program =
            changed("small.pt2", GRAPH, old, new).and_then(|program| program.fits(&recipe(&[])));
        let error = program.unwrap_err().to_string();
        assert!(expected.iter().all(|part| error.contains(part)), "{new}: {error}");
    }
}

/// Versions are checked before anything else is read.
#[test]
fn another_major_version_is_refused_with_both_versions() {
    let folder = tempfile::tempdir().unwrap();
    let model = r#"{"schema_version": {"major": 9, "minor": 2}, "torch_version": "3.1.0"}"#;
    let text = read(&folder, &zip(&[("net/models/model.json", model.as_bytes())]))
        .unwrap_err()
        .to_string();
    assert!(
        text.contains(
            "has schema version 9.2, written by PyTorch 3.1.0, but this Baton reads version 8"
        ),
        "{text}"
    );
    let text = read(&folder, &zip(&[("net/notes.txt", b"")])).unwrap_err().to_string();
    assert!(text.contains("has no models/model.json"), "{text}");
}
