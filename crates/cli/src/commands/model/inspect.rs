//! `baton model inspect`

use std::{
    collections::BTreeMap,
    fmt::Write,
    path::{Path, PathBuf},
};

use baton_job::exit::Failure;
use baton_program::{
    Amount, Dtype, Error, ExportMetadata, ExportTask, OperatorCost, Program, WorkingFormat,
    program::shape_text,
};
use serde::Serialize;

use crate::{failure::bad_input, human, json};

/// Show what is in a program: inputs, outputs, parameters, operators, and what they cost
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton model inspect net.pt2
  baton model inspect --json net.pt2 | jq .operators

Reads the graph without its weights. Activations are what the backward pass needs, in float32 for the
images of the export; a multiply-add is two FLOPs. `baton plan` adds gradients, optimizer and allowances.
A program that cannot be trained is refused with the reason and what to do, exit code 2; only libtorch
knows whether every operator exists. docs/any-model.md shows how to write a program.")]
pub(crate) struct Args {
    /// The file that torch.export.save wrote
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What a program contains.
#[derive(Debug, Serialize)]
struct InspectedProgram {
    torch_version: String,
    inputs: Vec<InspectedTensor>,
    outputs: Vec<InspectedTensor>,
    /// What `baton.export` wrote; `null` in a file by plain `torch.export.save`.
    metadata: Option<InspectedMetadata>,
    /// Most samples of a batch; absent without a limit.
    max_samples: Option<u64>,
    /// Tensors, a shared one once.
    parameters: usize,
    parameter_values: u64,
    /// Parameters that are not frozen.
    trained_values: u64,
    /// Size of all parameters, bytes.
    parameter_bytes: u64,
    batch_norms: usize,
    constants: usize,
    /// Floating-point operations of a forward pass; a multiply-add is two.
    flops_per_sample: u64,
    /// Activations that are kept for the backward pass, bytes.
    activation_bytes_per_sample: u64,
    /// The same, whatever the number of samples, bytes.
    activation_bytes_per_pass: u64,
    /// Both with `precision.compute = "bf16"` or `"fp16"`; copies of weights are part of the second.
    half_activation_bytes_per_sample: u64,
    half_activation_bytes_per_pass: u64,
    /// The operators that keep most, the largest first.
    largest_activations: Vec<LargeActivation>,
    /// Operators whose costs are not complete; `null` if all are known.
    not_counted: Option<String>,
    /// Number of calls by operator.
    operators: BTreeMap<String, u64>,
    digest: String,
}

#[derive(Debug, Serialize)]
struct InspectedTensor {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<&'static str>,
    /// `null` for sizes that may change.
    shape: Vec<Option<u64>>,
}

#[derive(Debug, Serialize)]
struct InspectedMetadata {
    task: ExportTask,
    /// Names of the inputs, as `forward` has them.
    inputs: Vec<String>,
    /// Empty if the classes have no names.
    class_names: Vec<String>,
    /// Of the images that the network expects, in units of 0..255; `null` if it does not say.
    mean: Option<[f32; 3]>,
    std: Option<[f32; 3]>,
}

impl From<&ExportMetadata> for InspectedMetadata {
    fn from(metadata: &ExportMetadata) -> Self {
        Self {
            task: metadata.task,
            inputs: metadata.inputs.clone(),
            class_names: metadata.class_names.clone(),
            mean: metadata.normalisation.map(|normalisation| normalisation.mean),
            std: metadata.normalisation.map(|normalisation| normalisation.std),
        }
    }
}

/// An operator with its activations.
#[derive(Debug, Serialize)]
struct LargeActivation {
    /// Its name in the graph.
    node: String,
    /// Path of its module; empty for the outermost.
    module: String,
    operator: String,
    bytes_per_sample: u64,
}

/// Number of operators that are shown with their activations.
const SHOWN_OPERATORS: usize = 5;

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let found = inspected(&args.file).map_err(bad_input)?;
    json::print(args.json, &found, |found| text(found).trim_end().to_owned());
    Ok(())
}

fn inspected(path: &Path) -> Result<InspectedProgram, Error> {
    let program = Program::read(path)?;
    program.evaluation()?;
    program.check_constants()?;
    let mut operators = BTreeMap::new();
    for node in &program.graph.nodes {
        *operators.entry(node.operator.clone()).or_default() += 1;
    }
    let values = |trained_only: bool| -> u64 {
        let parameters = program.parameters.iter();
        let counted = parameters.filter(|parameter| parameter.requires_grad || !trained_only);
        counted.map(|parameter| parameter.tensor.len()).sum()
    };
    let costs = program.costs(WorkingFormat::Float32, None)?;
    let half = program.costs(WorkingFormat::Half, None)?.kept();
    let Amount { fixed, per_sample } = costs.kept();
    let mut largest: Vec<&OperatorCost<'_>> =
        costs.operators.iter().filter(|cost| cost.kept.per_sample > 0).collect();
    largest.sort_by_key(|cost| std::cmp::Reverse(cost.kept.per_sample));
    largest.truncate(SHOWN_OPERATORS);
    let large = |cost: &OperatorCost<'_>| LargeActivation {
        node: cost.node.location.node.clone(),
        module: cost.node.location.module.clone(),
        operator: cost.node.operator.clone(),
        bytes_per_sample: cost.kept.per_sample,
    };
    let inputs = program.inputs.iter().map(|input| InspectedTensor {
        name: Some(input.name.clone()),
        dtype: Some(input.dtype.name()),
        shape: input.shape.clone(),
    });
    let outputs = program.outputs.iter().map(|output| InspectedTensor {
        name: output.name.clone(),
        dtype: None,
        shape: output.shape.clone(),
    });
    Ok(InspectedProgram {
        parameter_bytes: values(false).saturating_mul(Dtype::F32.bytes()),
        flops_per_sample: costs.macs().per_sample.saturating_mul(2),
        activation_bytes_per_sample: per_sample,
        activation_bytes_per_pass: fixed,
        half_activation_bytes_per_sample: half.per_sample,
        half_activation_bytes_per_pass: half.fixed,
        largest_activations: largest.into_iter().map(large).collect(),
        not_counted: costs.gaps(),
        inputs: inputs.collect(),
        outputs: outputs.collect(),
        metadata: program.metadata.as_ref().map(InspectedMetadata::from),
        max_samples: program.inputs.iter().filter_map(|input| input.max_samples).min(),
        parameters: program.parameters.len(),
        parameter_values: values(false),
        trained_values: values(true),
        batch_norms: program.norms.len(),
        constants: program.constants.len(),
        operators,
        digest: program.digest,
        torch_version: program.torch_version,
    })
}

/// A number of floating-point operations.
fn flops(number: u64) -> String {
    match number as f64 {
        small if small < 1e9 => format!("{:.3} MFLOP", small / 1e6),
        large => format!("{:.3} GFLOP", large / 1e9),
    }
}

fn text(found: &InspectedProgram) -> String {
    let most = found.max_samples.map_or(String::new(), |most| format!(", at most {most} samples"));
    let mut text = format!("written by PyTorch {}\n", found.torch_version);
    // Writing to a string never fails.
    for input in &found.inputs {
        let _ = writeln!(text, "input       {}{most}", described(input));
    }
    for output in &found.outputs {
        let _ = writeln!(text, "output      {}", described(output));
    }
    if let Some(InspectedMetadata { task, class_names, mean, std, .. }) = &found.metadata {
        let _ = writeln!(text, "task        {}", task.name());
        if !class_names.is_empty() {
            let _ = writeln!(text, "classes     {}", first_names(class_names));
        }
        if let (Some(mean), Some(std)) = (mean, std) {
            let _ = writeln!(text, "normalised  mean {mean:?}, std {std:?}");
        }
    }
    let _ = writeln!(
        text,
        "parameters  {} in {}, {} trained, {} frozen: {}\nkept        {}, {}\n\
         arithmetic  {} per sample and forward pass\n\
         activations {} per sample, {} with bf16 or fp16",
        human::grouped(found.parameter_values),
        human::count(found.parameters as u64, "tensor"),
        human::grouped(found.trained_values),
        human::grouped(found.parameter_values - found.trained_values),
        human::bytes(found.parameter_bytes),
        human::count(found.batch_norms as u64, "BatchNorm"),
        human::count(found.constants as u64, "constant"),
        flops(found.flops_per_sample),
        human::bytes(found.activation_bytes_per_sample),
        human::bytes(found.half_activation_bytes_per_sample),
    );
    for LargeActivation { node, module, operator, bytes_per_sample } in &found.largest_activations {
        let place = if module.is_empty() { node } else { module };
        let _ = writeln!(text, "{:>12}  {operator} of {place}", human::bytes(*bytes_per_sample));
    }
    if let Some(gaps) = &found.not_counted {
        let _ = writeln!(text, "not counted {gaps}");
    }
    let _ = writeln!(text, "operators");
    for (operator, calls) in &found.operators {
        let _ = writeln!(text, "{calls:>6}  {operator}");
    }
    text
}

/// Name, type and shape, as far as they are known.
fn described(InspectedTensor { name, dtype, shape }: &InspectedTensor) -> String {
    let words = [name.as_deref(), *dtype].into_iter().flatten().map(str::to_owned);
    words.chain([shape_text(shape)]).collect::<Vec<_>>().join(" ")
}

/// The first names of a list, and how many there are.
fn first_names(names: &[String]) -> String {
    const SHOWN_NAMES: usize = 5;
    let more = if names.len() > SHOWN_NAMES { ", …" } else { "" };
    let first = &names[..names.len().min(SHOWN_NAMES)];
    format!("{}: {}{more}", names.len(), first.join(", "))
}
