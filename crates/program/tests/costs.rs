//! Costs of small programs, against numbers computed by hand from `scripts/parity/fixtures.py`.
//! `make parity ARGS=costs` compares those of large ones with what PyTorch does.

#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod kit;

use baton_program::{
    Amount, OperatorKind, Program, ProgramCosts,
    WorkingFormat::{self, Float32, Half},
};

use self::kit::{GRAPH, changed, fixture};

fn program(name: &str) -> Program {
    Program::read(&fixture(name)).unwrap()
}

fn costs(program: &Program, format: WorkingFormat) -> ProgramCosts<'_> {
    program.costs(format, None).unwrap()
}

/// What each operator keeps, bytes per sample, without those that keep nothing.
fn kept<'a>(costs: &ProgramCosts<'a>) -> Vec<(&'a str, u64)> {
    let kept =
        costs.operators.iter().map(|cost| (cost.node.operator.as_str(), cost.kept.per_sample));
    kept.filter(|(_, bytes)| *bytes > 0).collect()
}

#[test]
fn arithmetic_is_that_of_convolutions_and_linear_layers() {
    let program = program("small.pt2");
    let costs = costs(&program, Float32);
    // A convolution of 3 to 8 channels to 4² pixels; two layers of 8 to 8, one of 8 to 10.
    let (conv, linear) = (8 * 16 * 27, [64, 64, 80]);
    assert_eq!(costs.macs(), Amount { fixed: 0, per_sample: conv + linear.iter().sum::<u64>() });
    let backward: u64 = costs.operators.iter().map(|cost| cost.backward.macs.per_sample).sum();
    // The images need no gradient.
    assert_eq!(backward, conv + 2 * linear.iter().sum::<u64>());
    assert_eq!(costs.gaps(), None);
}

#[test]
fn what_autograd_needs_is_kept_once() {
    let program = program("small.pt2");
    let costs = costs(&program, Float32);
    let expected = [
        // The images, which are the input.
        ("aten::conv2d", 4 * 3 * 64),
        // Its input. ReLU then keeps its result.
        ("aten::batch_norm", 4 * 8 * 16),
        ("aten::relu", 4 * 8 * 16),
        // Stochastic depth: a number per sample.
        ("aten::mul", 4),
        // The mask. `index` and `mul` keep buffers only, which exist anyway.
        ("aten::dropout", 8),
        ("aten::linear", 4 * 8),
        // Its result, which is the input of the next layer too.
        ("aten::tanh", 4 * 8),
        // The part without gradient keeps nothing; the last layer keeps the sum.
        ("aten::linear", 4 * 8),
    ];
    assert_eq!(kept(&costs), expected);
    // Mean and deviation of BatchNorm's 8 channels.
    assert_eq!(costs.kept().fixed, 2 * 4 * 8);
}

#[test]
fn autocast_keeps_copies_of_16_bits_and_weights_once_per_pass() {
    let program = program("small.pt2");
    let costs = costs(&program, Half);
    let expected = [
        ("aten::conv2d", 2 * 3 * 64),
        ("aten::batch_norm", 2 * 8 * 16),
        ("aten::relu", 2 * 8 * 16),
        ("aten::mul", 4),
        ("aten::dropout", 8),
        // From here on the values are float32, because stochastic depth is, until a layer converts them.
        ("aten::linear", 2 * 8),
        ("aten::tanh", 2 * 8),
        ("aten::linear", 2 * 8),
    ];
    assert_eq!(kept(&costs), expected);
    // The tied weight has one copy.
    assert_eq!(costs.kept().fixed, 2 * 4 * 8 + 2 * (8 * 27 + 8 * 8 + 10 * 8));
}

#[test]
fn autocast_converts_arguments_or_only_results_to_float32() {
    // Of the layer before it, 8 values: a half result, a float32 argument, a half argument.
    for (operator, bytes) in [("tanh", 2 * 8), ("log", 4 * 8), ("prod", 2 * 8)] {
        let name = format!("torch.ops.aten.{operator}.default");
        let program = changed("small.pt2", GRAPH, "torch.ops.aten.tanh.default", &name).unwrap();
        let found = kept(&costs(&program, Half));
        assert!(found.contains(&(&format!("aten::{operator}"), bytes)), "{operator}: {found:?}");
    }
}

#[test]
fn a_convolution_with_a_frozen_weight_keeps_its_input_for_the_bias() {
    let shape = r#""sizes": [{"as_int": 8}, {"as_int": 3}, {"as_int": 3}, {"as_int": 3}]"#;
    let of = |trained: bool| format!(r#"{shape}, "requires_grad": {trained}"#);
    let (trained, frozen) = (of(true), of(false));
    let program = changed("small.pt2", "weights_config.json", &trained, &frozen).unwrap();
    let costs = costs(&program, Float32);
    assert_eq!(kept(&costs)[0], ("aten::conv2d", 4 * 3 * 64));
    let conv = costs.operators.iter().find(|cost| cost.kind == OperatorKind::Convolution).unwrap();
    assert_eq!(conv.backward.macs, Amount::default());
}

#[test]
fn views_copies_attention_and_recurrent_layers_are_counted() {
    let program = program("sequence.pt2");
    let costs = costs(&program, Float32);
    // 4² positions of 4 values after pooling.
    let expected = [
        ("aten::conv2d", 4 * 3 * 64),
        // It overwrites its input, and so keeps a copy.
        ("aten::silu_", 4 * 4 * 64),
        // Its input, and where the largest values were.
        ("aten::max_pool2d", 4 * 4 * 64 + 8 * 4 * 16),
        // Its input is a view of pooling's result; mean and deviation of each position.
        ("aten::layer_norm", 4 * 4 * 16 + 8 * 16),
        ("aten::linear", 4 * 4 * 16),
        // Three views of one tensor, the result, and a sum per position.
        ("aten::scaled_dot_product_attention", 4 * 12 * 16 + 4 * 4 * 16 + 4 * 16),
        // All positions, though it reads three of them; results; three gates and half as many states.
        ("aten::gru", 4 * 4 * 16 + 4 * 6 * 3 + 4 * 27 * 3),
        // The frozen layer before it keeps nothing, and the layer behind it the same values.
        ("aten::relu_", 4 * 6),
    ];
    assert_eq!(kept(&costs), expected);
    let macs = |kind| {
        let of_kind = costs.operators.iter().filter(|cost| cost.kind == kind);
        of_kind
            .map(|cost| (cost.forward.macs.per_sample, cost.backward.macs.per_sample))
            .collect::<Vec<_>>()
    };
    assert_eq!(macs(OperatorKind::Convolution), [(768, 768)]);
    // The frozen layer needs the gradient of its input only.
    assert_eq!(macs(OperatorKind::Linear), [(768, 2 * 768), (36, 36), (60, 120)]);
    assert_eq!(macs(OperatorKind::Attention), [(2 * 64 * 16, 5 * 64 * 16)]);
    assert_eq!(macs(OperatorKind::Recurrent), [(3 * (18 * 4 + 18 * 6), 6 * (18 * 4 + 18 * 6))]);
}

#[test]
fn only_kernels_are_launched() {
    let program = program("sequence.pt2");
    let costs = costs(&program, Float32);
    let views: Vec<&str> = costs
        .operators
        .iter()
        .filter(|cost| cost.forward.launches == 0)
        .map(|cost| cost.node.operator.as_str())
        .collect();
    assert_eq!(views, ["aten::flatten", "aten::transpose", "aten::chunk", "aten::slice"]);
    let add = costs.operators.iter().find(|cost| cost.node.operator == "aten::add").unwrap();
    // Two read, one written; and the other way round.
    assert_eq!((add.forward.bytes.per_sample, add.backward.bytes.per_sample), (768, 768));
}

#[test]
fn open_sides_are_those_of_the_recipe() {
    let program = program("sequence.pt2");
    let macs = |side| {
        let costs = program.costs(Float32, Some(side)).unwrap();
        costs.operators.iter().map(|cost| cost.forward.macs.per_sample).max()
    };
    // Attention over 4², 8² and 7² positions.
    assert_eq!(macs(8), Some(2 * 4 * 16 * 16));
    assert_eq!(macs(16), Some(2 * 4 * 64 * 64));
    assert_eq!(macs(15), Some(2 * 4 * 49 * 49));
}

#[test]
fn images_of_another_size_are_refused() {
    let program = program("small.pt2");
    assert!(program.costs(Float32, Some(8)).is_ok());
    let error = program.costs(Float32, Some(9)).unwrap_err().to_string();
    assert!(error.contains("takes x of shape (samples, 3, 8, 8)"), "{error}");
    assert!(error.contains("images of 9 px: set train.resolution"), "{error}");
}

#[test]
fn a_frozen_network_keeps_nothing_and_has_no_backward_pass() {
    let (trained, frozen) = (r#""requires_grad": true"#, r#""requires_grad": false"#);
    let program = changed("small.pt2", "weights_config.json", trained, frozen).unwrap();
    let costs = costs(&program, Float32);
    assert_eq!(costs.kept(), Amount::default());
    assert!(costs.operators.iter().all(|cost| cost.backward.bytes == Amount::default()));
    assert_eq!(costs.macs().per_sample, 3_664);
}

#[test]
fn an_operator_without_a_rule_is_named_and_keeps_its_arguments() {
    let (tanh, other) = ("torch.ops.aten.tanh.default", "torch.ops.aten.digamma.default");
    let program = changed("small.pt2", GRAPH, tanh, other).unwrap();
    let costs = costs(&program, Float32);
    let kept = kept(&costs);
    assert!(kept.contains(&("aten::digamma", 4 * 8)), "{kept:?}");
    let gaps = costs.gaps().unwrap();
    assert_eq!(
        gaps,
        "1 of 18 operators have no rule, and are assumed to keep their arguments and to compute nothing: aten::digamma"
    );
}

/// Sizes of the last linear layer's result.
const OUTPUTS: &str = r#""hint":{"as_int":3}}},{"as_int":10}]"#;

#[test]
fn an_operator_whose_size_is_not_known_is_named_and_not_counted() {
    let unknown = r#""hint":{"as_int":3}}},{"as_expr":{"expr_str":"Symbol('u0')"}}]"#;
    let program = changed("small.pt2", GRAPH, OUTPUTS, unknown).unwrap();
    let costs = costs(&program, Float32);
    assert_eq!(costs.macs().per_sample, 3_664 - 80);
    let gaps = costs.gaps().unwrap();
    assert_eq!(
        gaps,
        "1 of 18 operators are not counted, because a size is not known: aten::linear"
    );
}

#[test]
fn absurd_sizes_do_not_overflow() {
    let most = i64::MAX;
    for new in [
        format!(r#""hint":{{"as_int":3}}}}}},{{"as_int":{most}}},{{"as_int":{most}}}]"#),
        r#""hint":{"as_int":3}}},{"as_int":-1}]"#.to_owned(),
        r#""hint":{"as_int":3}}},{"as_int":0}]"#.to_owned(),
    ] {
        let program = changed("small.pt2", GRAPH, OUTPUTS, &new).unwrap();
        for format in [Float32, Half] {
            let _ = costs(&program, format).kept();
        }
    }
    let program =
        changed("small.pt2", GRAPH, r#"{"as_int":4}"#, &format!(r#"{{"as_int":{most}}}"#));
    let program = program.unwrap();
    assert_eq!(costs(&program, Float32).macs().per_sample, u64::MAX);
}
