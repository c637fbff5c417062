//! `baton-worker gpu-check`: checks CUDA, NCCL and the GPU kernels on a machine with a GPU.
//!
//! Every check must pass on every supported GPU. It needs no network and no files but temporary ones, and compares with the CPU, with
//! libtorch or with a repetition of itself. A failed check does not stop the following ones.

mod language;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use baton_collectives::{
    BufferMut, Collective, Machines, Part, TreeNode,
    nccl::{self, NcclCollective},
    tcp::TcpCollective,
};
use baton_console::{json, output};
use baton_data::{Batch, InputType};
use baton_gpu::CudaCalls;
use baton_job::{
    Rank,
    exit::{self, Failure},
    ids::LocalRank,
};
use baton_recipe::{
    JobSpec, Step,
    spec::{self, Compute},
};
use baton_trainer::{
    Leaf, Learner, StateCopy, Update,
    learner::{DeferredScalar, Region, Summand},
    torch::{self, BatchNormMode, Device, TorchLeaf, TorchLearner},
};
use serde::Serialize;

use crate::bench::synthetic_batch;

/// Check CUDA, NCCL and the GPU kernels, and compare the loss with the CPU's.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print one JSON object per check.
    #[arg(long)]
    json: bool,
}

/// One line of `--json`.
#[derive(Debug, Serialize)]
struct CheckResult<'a> {
    /// Name of the check.
    check: &'a str,
    /// Whether it passed.
    ok: bool,
    /// What it measured, or what is wrong.
    detail: &'a str,
    /// Its duration.
    seconds: f64,
    /// Version of libtorch.
    libtorch: &'a str,
    /// The device, as libtorch calls it.
    device: &'a str,
}

impl CheckResult<'_> {
    fn text(&self) -> String {
        let verdict = if self.ok { "ok    " } else { "FAILED" };
        format!("{verdict}  {}: {} ({:.2} s)", self.check, self.detail, self.seconds)
    }
}

/// Runs every check and prints a line for each; fails if one failed.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let resnet = &Case::of_images(parse(RESNET)?);
    let device = torch::device::open(&resnet.recipe, LocalRank(0))?;
    // Where they cannot be written, each check that needs them fails.
    let models = &language::Models::write(language::FULL);
    let with_models = |check: fn(&language::Models, Device) -> Result<String, String>| {
        move || check(models.as_ref().map_err(String::clone)?, device)
    };
    let checks: [(&str, GpuCheck<'_>); 15] = [
        ("NCCL library", Box::new(|| nccl::version().map(|v| v.to_string()).map_err(text))),
        ("NCCL world of one", Box::new(nccl_world_of_one)),
        ("sums of the fixed tree", Box::new(sums_as_on_the_host)),
        ("NCCL abort, then a new generation", Box::new(nccl_abort_then_reconnect)),
        ("ResNet-50: same losses as on the CPU", Box::new(move || same_losses(resnet, device))),
        ("ResNet-50: same gradient as on the CPU", Box::new(move || same_gradient(resnet, device))),
        ("ResNet-50: same bits when repeated", Box::new(move || same_bits_in_all(resnet, device))),
        ("ResNet-50: step without host waits", Box::new(move || no_wait(resnet, device))),
        ("ResNet-50: copy of the state", Box::new(move || state_copy(resnet, device))),
        ("fused BatchNorm same as plain", Box::new(move || same_if_fused(resnet, device))),
        ("fused update same as plain", Box::new(move || same_update(resnet, device))),
        ("LoRA: same gradient as on the CPU", Box::new(with_models(language::same_gradient))),
        ("LoRA: bf16 as near to fp32 as on the CPU", Box::new(with_models(language::near_fp32))),
        ("LoRA: same bits when repeated", Box::new(with_models(language::same_bits_in_all))),
        ("LoRA: step without host waits", Box::new(with_models(language::no_waits))),
    ];
    let all = checks.len();
    let (libtorch, device) = (torch::device::torch_version(), format!("{device:?}"));
    if !args.json {
        output::line(format_args!("libtorch {libtorch} on {device}"));
    }
    let mut failed = 0;
    for (check, run) in checks {
        let start = Instant::now();
        let result = run();
        let seconds = start.elapsed().as_secs_f64();
        failed += usize::from(result.is_err());
        let (ok, detail) = match &result {
            Ok(detail) => (true, detail),
            Err(problem) => (false, problem),
        };
        let result =
            CheckResult { check, ok, detail, seconds, libtorch: &libtorch, device: &device };
        json::print(args.json, &result, CheckResult::text);
    }
    if failed == 0 {
        return Ok(());
    }
    Err(exit::device(format!(
        "{failed} of {all} GPU checks failed; see the lines with FAILED above"
    )))
}

/// What is computed: a model, and a batch for it.
#[derive(Clone)]
struct Case {
    recipe: JobSpec,
    batch: Batch,
    input: InputType,
}

impl Case {
    fn of_images(recipe: JobSpec) -> Self {
        let batch = synthetic_batch(recipe.train.global_batch, recipe.train.resolution);
        Self { recipe, batch, input: InputType::Image }
    }

    fn learner(&self, device: Device) -> Result<TorchLearner, baton_trainer::learner::Error> {
        TorchLearner::new(&self.recipe, &self.input, device)
    }

    /// Factor of the batch's gradient.
    fn scale(&self) -> f32 {
        1.0 / self.batch.len() as f32
    }
}

/// Returns a line with details, or the problem.
type GpuCheck<'a> = Box<dyn Fn() -> Result<String, String> + 'a>;

/// If this environment variable is `0`, NVIDIA's libraries do not compute in TF32, which keeps only ten bits of the
/// mantissa. libtorch requests TF32 for convolutions by default.
const TF32_OVERRIDE: &str = "NVIDIA_TF32_OVERRIDE";
/// Largest relative difference of a loss, and of a gradient in units of its norm.
const MAX_DIFFERENCE: f64 = 1e-3;
/// Largest difference of the state after an update from the same gradient, in units of its norm.
const MAX_UPDATE_DIFFERENCE: f64 = 1e-6;

fn connect() -> Result<NcclCollective, String> {
    let timeout = Duration::from_secs(30);
    let options = nccl::NcclOptions {
        order: nccl::SummationOrder::Library,
        connect_timeout: timeout,
        operation_timeout: timeout,
        abort_timeout: Duration::from_secs(5),
    };
    let alone = TcpCollective::alone(timeout).map_err(text)?;
    NcclCollective::connect(Box::new(alone), Machines::one(1), 0, options).map_err(text)
}

fn nccl_world_of_one() -> Result<String, String> {
    let mut nccl = connect()?;
    let values: Vec<f32> = (0..1_000_003).map(|i| i as f32).collect();
    let mut buffer = torch::device::DeviceBuffer::new(&values, 0).map_err(text)?;
    let node = TreeNode { start: 0, leaves: 1 };
    nccl.all_reduce(1, &mut [Part { node, buffer: buffer.buffer() }]).map_err(text)?;
    nccl.broadcast(Rank(0), buffer.buffer()).map_err(text)?;
    if buffer.buffer().to_host().map_err(text)? != values {
        return Err("values changed".to_owned());
    }
    let mut host = [1.0_f32];
    match nccl.broadcast(Rank(0), BufferMut::Host(&mut host)) {
        Err(_) => Ok(format!("all-reduce and broadcast of {} values", values.len())),
        Ok(()) => Err("host memory was not refused".to_owned()),
    }
}

/// Checks that sums on the GPU have the same bits as on the host, so that the fixed tree gives the same result over
/// NCCL and TCP.
fn sums_as_on_the_host() -> Result<String, String> {
    // Values of all magnitudes, including subnormal ones.
    let value = |i: u32| f32::from_bits(i.wrapping_mul(2_654_435_761) & 0xbfff_ffff);
    let right: Vec<f32> = (0..1_000_003).map(value).collect();
    let left: Vec<f32> = right.iter().rev().copied().collect();
    let mut on_gpu = torch::device::DeviceBuffer::new(&left, 0).map_err(text)?;
    let mut added = torch::device::DeviceBuffer::new(&right, 0).map_err(text)?;
    match (on_gpu.buffer(), added.buffer()) {
        (BufferMut::Device(mut left), BufferMut::Device(right)) => {
            left.add(&right).map_err(text)?
        }
        _ => return Err("the buffers are not on the GPU".to_owned()),
    }
    let found = on_gpu.buffer().to_host().map_err(text)?;
    let expected = left.iter().zip(&right).map(|(left, right)| left + right);
    let other = found.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let detail = format!("{other} of {} sums have other bits than the host's", found.len());
    if other == 0 { Ok(detail) } else { Err(detail) }
}

fn nccl_abort_then_reconnect() -> Result<String, String> {
    let mut nccl = connect()?;
    nccl.abort_handle().abort();
    let mut buffer = torch::device::DeviceBuffer::new(&[1.0; 8], 0).map_err(text)?;
    if nccl.broadcast(Rank(0), buffer.buffer()).is_ok() {
        return Err("an aborted NCCL communicator still works".to_owned());
    }
    drop(nccl);
    let mut again = connect()?;
    again.broadcast(Rank(0), buffer.buffer()).map_err(text)?;
    Ok("aborted and re-initialised".to_owned())
}

/// Compares the losses of three steps on the same batches on both devices.
fn same_losses(case: &Case, gpu: Device) -> Result<String, String> {
    let [on_gpu, on_cpu] = [gpu, Device::Cpu].map(|device| trained(case, device, 3));
    let ((_, on_gpu), (_, on_cpu)) = (on_gpu.map_err(text)?, on_cpu.map_err(text)?);
    let differences = on_gpu.iter().zip(&on_cpu).map(|(gpu, cpu)| ((gpu - cpu) / cpu).abs());
    // `f64::max` would pass over a loss that is not a number.
    let worst =
        differences.fold(0.0, |worst, one| if one > worst || one.is_nan() { one } else { worst });
    let detail = format!(
        "losses {on_gpu:.5?} on the GPU, {on_cpu:.5?} on the CPU, largest difference {worst:.1e}"
    );
    if worst < MAX_DIFFERENCE { Ok(detail) } else { Err(detail) }
}

/// Compares the gradients of a state after a few steps on one batch on both devices, in fp32.
fn same_gradient(case: &Case, gpu: Device) -> Result<String, String> {
    if std::env::var_os(TF32_OVERRIDE).is_none_or(|value| value != "0") {
        return Err(format!("set {TF32_OVERRIDE}=0, as scripts/gpu/check.sh does"));
    }
    let state = trained_state(case, gpu)?;
    let [on_gpu, on_cpu] = [gpu, Device::Cpu].map(|device| gradient_at(case, device, &state));
    let (on_gpu, on_cpu) = (on_gpu?, on_cpu?);
    let difference = difference(&on_gpu, &on_cpu);
    let detail = format!("{} values, difference {difference:.1e} of the norm", on_cpu.len());
    if difference <= MAX_DIFFERENCE { Ok(detail) } else { Err(detail) }
}

/// Checks that a repeated computation gives the same bits in every number format, plain and fused, at the size of a
/// real training step: libraries choose algorithms by size.
fn same_bits_in_all(case: &Case, device: Device) -> Result<String, String> {
    let mut recipe = case.recipe.clone();
    (recipe.train.global_batch, recipe.train.resolution) = (128, 224);
    // Otherwise most gradients of convolutions are zero in the first step.
    recipe.model.zero_init_gamma = false;
    let case = Case::of_images(recipe);
    let formats = [Compute::Fp32, Compute::Bf16, Compute::Fp16];
    all(formats.into_iter().flat_map(|compute| {
        let plain = computing(&case, compute);
        let fused = fused(&plain);
        [("plain", plain), ("fused", fused)]
            .map(|(name, case)| (format!("{compute:?} {name}"), same_bits(&case, device)))
    }))
}

/// The details of several results; a failure if one of them failed.
fn all(
    results: impl IntoIterator<Item = (String, Result<String, String>)>,
) -> Result<String, String> {
    let mut all_pass = true;
    let details = results.into_iter().map(|(name, result)| {
        all_pass &= result.is_ok();
        let (Ok(detail) | Err(detail)) = result;
        format!("{name}: {detail}")
    });
    let detail = details.collect::<Vec<_>>().join("; ");
    if all_pass { Ok(detail) } else { Err(detail) }
}

/// Checks that a repeated computation gives the same bits, which bit-identical continuation requires.
fn same_bits(case: &Case, device: Device) -> Result<String, String> {
    let (first, second) = (gradient(case, device)?, gradient(case, device)?);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let other = bits(&first).iter().zip(bits(&second)).filter(|(a, b)| *a != b).count();
    let detail = format!("{other} of {} values of the gradient differ", first.len());
    if other == 0 { Ok(detail) } else { Err(detail) }
}

/// Runs steps like the step loop and counts the host's waits in calls to CUDA. The only wait allowed is the one for the
/// sums of the previous step, when the work of the next step is queued already. Counts the kernels too.
fn no_wait(case: &Case, gpu: Device) -> Result<String, String> {
    const STEPS: u64 = 5;
    let mut learner = case.learner(gpu).map_err(text)?;
    let mut calls = None;
    let mut leaves = vec![learner.new_leaf().map_err(text)?, learner.new_leaf().map_err(text)?];
    let mut unread: Option<TorchLeaf> = None;
    // The first steps allocate memory and choose algorithms.
    for step in 0..2 * STEPS {
        if step == STEPS {
            let device = baton_gpu::Device::open(0).map_err(text)?;
            calls = Some(CudaCalls::start(device).map_err(text)?);
        }
        let mut leaf = leaves.pop().ok_or("no leaf is free")?;
        learner.gradient(&case.batch, case.scale(), &mut leaf).map_err(text)?;
        learner.prefetch(&case.batch).map_err(text)?;
        leaf.set_vote([0.0; 4]).map_err(text)?;
        if let Some(mut before) = unread.take() {
            before.tail().map_err(text)?;
            leaves.push(before);
        }
        learner.measure(&mut leaf).map_err(text)?;
        leaf.start_tail_readback().map_err(text)?;
        let update = Update { step: Step(step), lr: 0.01, micro_batches: 1 };
        learner.update(&mut leaf, &update).map_err(text)?;
        unread = Some(leaf);
    }
    let calls = calls.ok_or("no step was counted")?;
    let (mut found, launches) = (calls.waits(), calls.launches());
    let waits_for_sums = found.remove("cuEventSynchronize").unwrap_or_default();
    let detail = format!(
        "{STEPS} steps: {waits_for_sums} waits for the previous step; others: {found:?}; {} kernels a step",
        launches / STEPS
    );
    if found.is_empty() && waits_for_sums <= STEPS && launches > 0 {
        Ok(detail)
    } else {
        Err(detail)
    }
}

/// Checks that a copy has the state of the moment when it was taken, although the state changes before the copy is
/// read.
fn state_copy(case: &Case, gpu: Device) -> Result<String, String> {
    let mut learner = case.learner(gpu).map_err(text)?;
    let state = |learner: &mut TorchLearner| -> Result<Vec<Vec<f32>>, String> {
        let regions = learner.regions().into_iter().filter(|region| region.frozen.is_none());
        regions.map(|region| region.buffer.to_host().map_err(text)).collect()
    };
    let expected = state(&mut learner)?;
    let mut copy = StateCopy::default();
    let mut stalls = Vec::new();
    for _ in 0..3 {
        let start = Instant::now();
        copy.take(&mut learner, Rank(0), 1).map_err(text)?;
        stalls.push(start.elapsed().as_secs_f64() * 1e3);
        copy.snapshot().map_err(text)?;
    }
    copy.take(&mut learner, Rank(0), 1).map_err(text)?;
    for region in &mut learner.regions() {
        let zeros = vec![0.0; region.buffer.len()];
        region.buffer.copy_from_host(&zeros).map_err(text)?;
    }
    let snapshot = copy.snapshot().map_err(text)?;
    let found: Vec<&[f32]> = snapshot.values().map(|(_, values)| values).collect();
    let detail = format!("{} regions; pauses of {stalls:.2?} ms", expected.len());
    if found == expected { Ok(detail) } else { Err(format!("values differ; {detail}")) }
}

/// Compares the gradients with and without our own kernels on one device, and checks that our kernels give the same
/// bits when repeated. In bf16 and fp16 both are inexact and round differently: ours may be twice as far from fp32 as
/// the plain ones.
fn same_if_fused(case: &Case, device: Device) -> Result<String, String> {
    let state = trained_state(case, device)?;
    let gradient = |case: &Case| gradient_at(case, device, &state);
    let exact = gradient(case)?;
    let mut details = Vec::new();
    for compute in [Compute::Fp32, Compute::Bf16, Compute::Fp16] {
        let case = computing(case, compute);
        let fused = fused(&case);
        let distance = |case| gradient(case).map(|found| difference(&found, &exact));
        let (plain, found) = (distance(&case)?, distance(&fused)?);
        let limit = if compute == Compute::Fp32 { MAX_DIFFERENCE } else { 2.0 * plain };
        let detail = format!("{compute:?} {found:.1e} from fp32, plain {plain:.1e}");
        // NaN is a failure.
        if found.is_nan() || found > limit {
            return Err(detail);
        }
        let bits = same_bits(&fused, device).map_err(|bits| format!("{detail}; twice: {bits}"))?;
        details.push(format!("{detail}, twice: {bits}"));
    }
    Ok(details.join("; "))
}

/// Compares weights, momentum and average after one update from the same gradient, in one fused kernel and in several.
fn same_update(case: &Case, device: Device) -> Result<String, String> {
    let updated = |case: &Case| -> Result<Vec<f32>, baton_trainer::learner::Error> {
        let mut plain = averaging(case, false).learner(device)?;
        let mut leaf = plain.new_leaf()?;
        plain.gradient(&case.batch, case.scale(), &mut leaf)?;
        let mut learner = averaging(case, case.recipe.precision.fused).learner(device)?;
        learner.measure(&mut leaf)?;
        learner.update(&mut leaf, &Update { step: Step(0), lr: 0.1, micro_batches: 1 })?;
        let mut state = Vec::new();
        for region in learner.regions() {
            state.extend(region.buffer.to_host().map_err(|error| {
                baton_trainer::learner::Error::Torch {
                    operation: "read the state",
                    message: error.to_string(),
                }
            })?);
        }
        Ok(state)
    };
    let plain = updated(case).map_err(text)?;
    let found = updated(&fused(case)).map_err(text)?;
    let difference = difference(&found, &plain);
    let detail = format!("{} values, difference {difference:.1e} of the norm", plain.len());
    if difference.is_nan() || difference > MAX_UPDATE_DIFFERENCE {
        return Err(detail);
    }
    for compute in [Compute::Bf16, Compute::Fp16] {
        same_working_copy(&fused(&computing(case, compute)), device)
            .map_err(|problem| format!("{detail}; {compute:?}: {problem}"))?;
    }
    Ok(detail)
}

/// Checks that the update casts the weights to the same bits as libtorch.
fn same_working_copy(case: &Case, device: Device) -> Result<(), String> {
    let mut learner = case.learner(device).map_err(text)?;
    let mut leaf = learner.new_leaf().map_err(text)?;
    learner.gradient(&case.batch, case.scale(), &mut leaf).map_err(text)?;
    learner.measure(&mut leaf).map_err(text)?;
    let update = Update { step: Step(0), lr: 0.1, micro_batches: 1 };
    learner.update(&mut leaf, &update).map_err(text)?;
    let by_us = learner.logits(&case.batch, BatchNormMode::Evaluation).map_err(text)?;
    // Borrowing the regions marks the weights as changed, so libtorch casts them again.
    learner.regions();
    let by_torch = learner.logits(&case.batch, BatchNormMode::Evaluation).map_err(text)?;
    match by_us.f_equal(&by_torch) {
        Ok(true) => Ok(()),
        Ok(false) => Err("the bits of the working copy differ from libtorch's cast".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The same in another number format. The loss scale is 1, so that gradients can be compared.
fn computing(case: &Case, compute: Compute) -> Case {
    let mut case = case.clone();
    case.recipe.precision.compute = compute;
    case.recipe.precision.loss_scale.initial = 1.0;
    case
}

fn fused(case: &Case) -> Case {
    let mut case = case.clone();
    case.recipe.precision.fused = true;
    case
}

/// The same with clipping and averaging, so that an update has all its parts.
fn averaging(case: &Case, fused: bool) -> Case {
    let mut case = case.clone();
    case.recipe.precision.fused = fused;
    case.recipe.train.clip_grad_norm = Some(0.1);
    case.recipe.ema = Some(spec::Ema { decay: 0.9, every_steps: 1 });
    case
}

/// Values of a learner's regions, by name.
type RegionValues = BTreeMap<&'static str, Vec<f32>>;

/// A learner after some steps on one batch, and the losses before each.
fn trained(
    case: &Case,
    device: Device,
    steps: u64,
) -> Result<(TorchLearner, Vec<f64>), baton_trainer::learner::Error> {
    let mut learner = case.learner(device)?;
    let mut leaf = learner.new_leaf()?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let loss = learner.gradient(&case.batch, case.scale(), &mut leaf)?;
        losses.push(loss.value()? * f64::from(case.scale()));
        learner.measure(&mut leaf)?;
        let update = Update { step: Step(step), lr: 0.01, micro_batches: 1 };
        learner.update(&mut leaf, &update)?;
    }
    Ok((learner, losses))
}

/// A state after a few steps, in which no parameter's gradient is zero.
fn trained_state(case: &Case, device: Device) -> Result<RegionValues, String> {
    let (mut learner, _) = trained(case, device, 5).map_err(text)?;
    let values = |region: Region<'_>| Ok((region.name, region.buffer.to_host().map_err(text)?));
    learner.regions().into_iter().map(values).collect()
}

/// The gradient of one batch, computed by a new learner with its initial weights.
fn gradient(case: &Case, device: Device) -> Result<Vec<f32>, String> {
    gradient_at(case, device, &RegionValues::new())
}

/// The gradient of one batch, computed by a new learner from a state of [`trained_state`].
fn gradient_at(case: &Case, device: Device, state: &RegionValues) -> Result<Vec<f32>, String> {
    let mut learner = case.learner(device).map_err(text)?;
    for region in &mut learner.regions() {
        if let Some(values) = state.get(region.name) {
            region.buffer.copy_from_host(values).map_err(text)?;
        }
    }
    let mut leaf = learner.new_leaf().map_err(text)?;
    learner.gradient(&case.batch, case.scale(), &mut leaf).map_err(text)?;
    let regions = learner.regions();
    let len = |name| regions.iter().find(|region| region.name == name).map(|r| r.buffer.len());
    // A leaf begins with the batch statistics. They are left out: their norm is many times the gradient's.
    let (Some(statistics), Some(weights)) = (len("bn_running"), len("weights")) else {
        return Err("the learner has no weights".to_owned());
    };
    let gradient = leaf.buffer().narrow(statistics..statistics + weights);
    gradient.to_host().map_err(text)
}

/// Euclidean distance from the expected values, as a share of their norm.
fn difference(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let distance =
        norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    distance / norm(&mut expected.iter().map(|value| f64::from(*value)))
}

const RESNET: &str = r#"
    name = "gpu-check"
    # Otherwise the last bits of activations decide which ones ReLU passes, and the correct gradients of two devices
    # differ by 2 %.
    model = { arch = "resnet50", num_classes = 10, zero_init_gamma = true }
    data = { train = "none", val = "none" }
    train = { epochs = 1, global_batch = 32, resolution = 64, virtual_ranks = 1 }
    optimizer = { kind = "sgd", momentum = 0.9, weight_decay = 1e-4 }
    schedule = { kind = "constant", lr = 0.01 }
    cluster = { device = "cuda", threads_per_rank = 8 }
"#;

fn parse(recipe: &str) -> Result<JobSpec, Failure> {
    let mut recipe = JobSpec::from_toml(recipe, &[]).map_err(exit::bad_input)?;
    recipe.cluster.device = spec::DeviceChoice::Cuda;
    Ok(recipe)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_a_line_of_text_or_of_json() {
        let result = CheckResult {
            check: "NCCL library",
            ok: false,
            detail: "missing",
            seconds: 0.25,
            libtorch: "2.9",
            device: "Cuda(0)",
        };
        assert_eq!(result.text(), "FAILED  NCCL library: missing (0.25 s)");
        let expected = r#"{"check":"NCCL library","ok":false,"detail":"missing","seconds":0.25,"libtorch":"2.9","device":"Cuda(0)"}"#;
        assert_eq!(json::line(&result), expected);
    }

    #[test]
    fn difference_is_a_share_of_the_norm_and_zero_between_equals() {
        assert_eq!(difference(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(difference(&[3.0, 4.5], &[3.0, 4.0]), 0.1);
        // NaN is never equal.
        assert!(difference(&[f32::NAN, 4.0], &[3.0, 4.0]).is_nan());
    }

    /// Small images for a network on the CPU.
    fn images(arch: &str) -> Case {
        let mut recipe = parse(RESNET).unwrap();
        recipe.model.arch = spec::Arch::named(arch).unwrap();
        (recipe.train.global_batch, recipe.train.resolution) = (4, 32);
        recipe.cluster.threads_per_rank = 1;
        Case::of_images(recipe)
    }

    #[test]
    fn repeated_gradient_has_the_same_bits() {
        let found = same_bits(&images("resnet50"), Device::Cpu).unwrap();
        assert!(found.starts_with("0 of 23528522 "), "{found}");
    }

    #[test]
    fn fused_kernels_pass_their_checks_on_the_cpu() {
        let case = images("resnet18");
        let found = same_if_fused(&case, Device::Cpu).unwrap();
        assert_eq!(found.matches("twice: 0 of 11181642 ").count(), 3, "{found}");
        same_update(&case, Device::Cpu).unwrap();
    }

    #[test]
    fn language_models_pass_their_checks_on_the_cpu() {
        let size = language::ModelSize { hidden: 32, lengths: &[17, 1, 5, 12], threads: 1 };
        let models = language::Models::write(size).unwrap();
        let found = language::same_bits_in_all(&models, Device::Cpu).unwrap();
        assert_eq!(found.matches(": 0 of ").count(), 12, "{found}");
        let found = language::near_fp32(&models, Device::Cpu).unwrap();
        assert_eq!(found.matches(" from fp32").count(), 4, "{found}");
        // Rounding changes something.
        assert!(!found.contains(" 0.0e0 from"), "{found}");
    }
}
