//! Reads programs that `scripts/parity/fixtures.py` wrote, whole and damaged.

#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod kit;

use std::fs;

use baton_program::{Argument, Dtype, Error, InputSource, Program};
use tempfile::TempDir;

use self::kit::{GRAPH, changed, fixture, zip};

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
fn the_description_has_what_training_changes_and_what_the_state_dict_keeps() {
    let network = small().describe();
    let decays: Vec<&str> = network
        .parameters
        .iter()
        .filter(|tensor| tensor.decays)
        .map(|tensor| tensor.name.as_str())
        .collect();
    assert_eq!(decays, ["conv.weight", "first.weight", "fc.weight"]);
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
    assert_eq!(program.input.name, "x");
    assert_eq!(program.input.shape, [None, Some(3), Some(8), Some(8)]);
    assert_eq!(program.input.max_samples, Some(256));
    assert_eq!(program.output, [None, Some(10)]);
    assert_eq!(program.min_batch, 1);
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
    assert!(alive[graph.output.0 as usize]);
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
    let fixed = refused("fixed_batch.pt2");
    assert!(fixed.contains("takes exactly 3 samples: export it with dynamic_shapes="), "{fixed}");
}

#[test]
fn files_that_are_none_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let text = read(&folder, b"import torch\n").unwrap_err().to_string();
    assert!(text.contains("damaged.pt2 is not a zip file"), "{text}");
    assert!(text.ends_with("write it with torch.export.save"), "{text}");
    let missing = Program::read(&folder.path().join("none.pt2")).unwrap_err().to_string();
    assert!(missing.contains("none.pt2 No such file"), "{missing}");
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
            r#"{"as_tensor":{"name":"b_norm_running_var"}}"#,
            r#"{"as_tensor":{"name":"b_norm_running_mean"}}"#,
            ["is used twice in a step", "use two modules"],
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
        let program = changed("small.pt2", GRAPH, old, new).and_then(|program| program.fits(10));
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
