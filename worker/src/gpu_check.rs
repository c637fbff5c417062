//! `baton-worker gpu-check`: proves the GPU path on a machine that has one, in a minute.

use std::time::{Duration, Instant};

use baton_collectives::{
    BufferMut, Collective, Part, TreeNode,
    nccl::{self, NcclCollective},
    tcp::TcpCollective,
};
use baton_data::InputType;
use baton_gpu::HostWaits;
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
    learner::Reading,
    torch::{self, Device, Mode, TorchLeaf, TorchLearner},
};

use crate::bench::made_up_batch;

/// Runs every check, prints a line for each, and fails if one failed.
pub(crate) fn run() -> Result<(), Failure> {
    let recipe = recipe()?;
    let device = torch::device::open(&recipe, LocalRank(0))?;
    let recipe = &recipe;
    let checks: [(&str, Check<'_>); 11] = [
        ("NCCL library", Box::new(|| nccl::version().map(|v| v.to_string()).map_err(text))),
        ("NCCL world of one", Box::new(nccl_world_of_one)),
        ("sums of the fixed tree", Box::new(sums_as_on_the_host)),
        ("NCCL abort, then a new generation", Box::new(nccl_abort_and_again)),
        ("ResNet-50: losses as on the CPU", Box::new(move || same_losses(recipe, device))),
        ("ResNet-50: gradient as on the CPU", Box::new(move || same_gradient(recipe, device))),
        ("ResNet-50: the same bits twice", Box::new(move || same_bits(recipe, device))),
        ("ResNet-50: no wait in a step", Box::new(move || no_wait(recipe, device))),
        ("ResNet-50: a copy of the state", Box::new(move || state_copy(recipe, device))),
        ("fused BatchNorm as the plain path", Box::new(move || same_if_fused(recipe, device))),
        ("fused update as the plain one", Box::new(move || same_update(recipe, device))),
    ];
    let all = checks.len();
    say(&format!("libtorch {} on {device:?}", torch::device::torch_version()));
    let mut failed = 0;
    for (name, check) in checks {
        let start = Instant::now();
        let result = check();
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(detail) => say(&format!("ok      {name}: {detail} ({seconds:.2} s)")),
            Err(problem) => {
                failed += 1;
                say(&format!("FAILED  {name}: {problem} ({seconds:.2} s)"));
            }
        }
    }
    if failed == 0 {
        return Ok(());
    }
    Err(exit::device(format!("{failed} of {all} GPU checks failed; see above")))
}

type Check<'a> = Box<dyn Fn() -> Result<String, String> + 'a>;

/// NVIDIA's libraries do not compute in TF32 if this is `0`, whatever a program asks for. libtorch asks for it in
/// convolutions, and it keeps ten bits of a mantissa.
const TF32: &str = "NVIDIA_TF32_OVERRIDE";
/// Of a loss, and of the gradient's norm.
const MOST_DIFFERENCE: f64 = 1e-3;
/// Of the state after an update from the same gradient.
const MOST_UPDATE_DIFFERENCE: f64 = 1e-6;

fn connect() -> Result<NcclCollective, String> {
    let patience = Duration::from_secs(30);
    let options = nccl::Options {
        order: nccl::Order::Library,
        connect_timeout: patience,
        operation_timeout: patience,
        abort_timeout: Duration::from_secs(5),
    };
    let alone = TcpCollective::alone(patience).map_err(text)?;
    NcclCollective::connect(Box::new(alone), 0, options).map_err(text)
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

/// What makes the fixed tree over NCCL the one over TCP.
fn sums_as_on_the_host() -> Result<String, String> {
    // Of all magnitudes, subnormal ones too.
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

fn nccl_abort_and_again() -> Result<String, String> {
    let mut nccl = connect()?;
    nccl.abort_handle().abort();
    let mut buffer = torch::device::DeviceBuffer::new(&[1.0; 8], 0).map_err(text)?;
    if nccl.broadcast(Rank(0), buffer.buffer()).is_ok() {
        return Err("an aborted group still works".to_owned());
    }
    drop(nccl);
    let mut again = connect()?;
    again.broadcast(Rank(0), buffer.buffer()).map_err(text)?;
    Ok("aborted and re-initialised".to_owned())
}

/// Three updates on the same batches on both devices.
fn same_losses(recipe: &JobSpec, gpu: Device) -> Result<String, String> {
    let losses = |device| -> Result<Vec<f64>, baton_trainer::learner::Error> {
        let mut learner = TorchLearner::new(recipe, &InputType::Image, device)?;
        let mut leaf = learner.new_leaf()?;
        let batch = made_up_batch(recipe.train.global_batch, recipe.train.resolution);
        let scale = 1.0 / batch.len() as f32;
        let mut losses = Vec::new();
        for step in 0..3 {
            let loss = learner.gradient(&batch, scale, &mut leaf)?;
            losses.push(loss.value()? / batch.len() as f64);
            learner.measure(&mut leaf)?;
            let update = Update { step: Step(step), lr: 0.01, micro_batches: 1 };
            learner.update(&mut leaf, &update)?;
        }
        Ok(losses)
    };
    let on_gpu = losses(gpu).map_err(text)?;
    let on_cpu = losses(Device::Cpu).map_err(text)?;
    let worst =
        on_gpu.iter().zip(&on_cpu).map(|(gpu, cpu)| ((gpu - cpu) / cpu).abs()).fold(0.0, f64::max);
    let detail = format!("losses {on_gpu:.5?} against {on_cpu:.5?}, worst difference {worst:.1e}");
    if worst < MOST_DIFFERENCE { Ok(detail) } else { Err(detail) }
}

/// The gradient of the first weights on one batch on both devices, in fp32.
fn same_gradient(recipe: &JobSpec, gpu: Device) -> Result<String, String> {
    if std::env::var_os(TF32).is_none_or(|value| value != "0") {
        return Err(format!("set {TF32}=0, as scripts/gpu/check.sh does"));
    }
    let (on_gpu, on_cpu) = (gradient(recipe, gpu)?, gradient(recipe, Device::Cpu)?);
    let difference = difference(&on_gpu, &on_cpu);
    let detail = format!("{} values, difference {difference:.1e} of the norm", on_cpu.len());
    if difference <= MOST_DIFFERENCE { Ok(detail) } else { Err(detail) }
}

/// What continuation to the bit stands on.
fn same_bits(recipe: &JobSpec, gpu: Device) -> Result<String, String> {
    let (first, second) = (gradient(recipe, gpu)?, gradient(recipe, gpu)?);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let other = bits(&first).iter().zip(bits(&second)).filter(|(a, b)| *a != b).count();
    let detail = format!("{other} of {} values of the gradient differ", first.len());
    if other == 0 { Ok(detail) } else { Err(detail) }
}

/// Steps as the step loop makes them, with all calls to CUDA listened to. The one wait that there may be is for
/// the sums of the step before, when the next one's work is queued already.
fn no_wait(recipe: &JobSpec, gpu: Device) -> Result<String, String> {
    const STEPS: u64 = 5;
    let mut learner = TorchLearner::new(recipe, &InputType::Image, gpu).map_err(text)?;
    let batch = made_up_batch(recipe.train.global_batch, recipe.train.resolution);
    let scale = 1.0 / batch.len() as f32;
    let mut waits = None;
    let mut leaves = vec![learner.new_leaf().map_err(text)?, learner.new_leaf().map_err(text)?];
    let mut unread: Option<TorchLeaf> = None;
    // The first steps get memory and try out algorithms.
    for step in 0..2 * STEPS {
        if step == STEPS {
            waits = Some(HostWaits::watch().map_err(text)?);
        }
        let mut leaf = leaves.pop().ok_or("no leaf is free")?;
        learner.gradient(&batch, scale, &mut leaf).map_err(text)?;
        learner.prefetch(&batch).map_err(text)?;
        leaf.set_vote([0.0; 4]).map_err(text)?;
        if let Some(mut before) = unread.take() {
            before.tail().map_err(text)?;
            leaves.push(before);
        }
        learner.measure(&mut leaf).map_err(text)?;
        leaf.send_for_tail().map_err(text)?;
        let update = Update { step: Step(step), lr: 0.01, micro_batches: 1 };
        learner.update(&mut leaf, &update).map_err(text)?;
        unread = Some(leaf);
    }
    let mut found = waits.map(|waits| waits.so_far()).unwrap_or_default();
    let for_sums = found.remove("cuEventSynchronize").unwrap_or_default();
    let detail = format!("{STEPS} steps: {for_sums} waits for the step before; others: {found:?}");
    if found.is_empty() && for_sums <= STEPS { Ok(detail) } else { Err(detail) }
}

/// It is that of the moment when it was taken, though the state changes before it is read.
fn state_copy(recipe: &JobSpec, gpu: Device) -> Result<String, String> {
    let mut learner = TorchLearner::new(recipe, &InputType::Image, gpu).map_err(text)?;
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
    let detail = format!("{} regions; it took {stalls:.2?} ms", expected.len());
    if found == expected { Ok(detail) } else { Err(format!("other values; {detail}")) }
}

/// The gradient with kernels of our own and without, on one device; and the same bits from them twice. In bf16 and
/// fp16 neither is right: rounded elsewhere, ours may be twice as far from fp32.
fn same_if_fused(recipe: &JobSpec, device: Device) -> Result<String, String> {
    let exact = gradient(recipe, device)?;
    let mut details = Vec::new();
    for compute in [Compute::Fp32, Compute::Bf16, Compute::Fp16] {
        let recipe = computing(recipe, compute);
        let fused = fused(&recipe);
        let apart = |recipe| gradient(recipe, device).map(|found| difference(&found, &exact));
        let (plain, found) = (apart(&recipe)?, apart(&fused)?);
        let most = if compute == Compute::Fp32 { MOST_DIFFERENCE } else { 2.0 * plain };
        let detail = format!("{compute:?} {found:.1e} from fp32, plain {plain:.1e}");
        // What is no number is not near.
        if found.is_nan() || found > most {
            return Err(detail);
        }
        let bits = same_bits(&fused, device).map_err(|bits| format!("{detail}; twice: {bits}"))?;
        details.push(format!("{detail}, twice: {bits}"));
    }
    Ok(details.join("; "))
}

/// Weights, momentum and average after one update from the same gradient, in one kernel and in several.
fn same_update(recipe: &JobSpec, device: Device) -> Result<String, String> {
    let updated = |recipe: &JobSpec| -> Result<Vec<f32>, baton_trainer::learner::Error> {
        let mut plain = TorchLearner::new(&averaging(recipe, false), &InputType::Image, device)?;
        let mut leaf = plain.new_leaf()?;
        let batch = made_up_batch(recipe.train.global_batch, recipe.train.resolution);
        plain.gradient(&batch, 1.0 / batch.len() as f32, &mut leaf)?;
        let fused = averaging(recipe, recipe.precision.fused);
        let mut learner = TorchLearner::new(&fused, &InputType::Image, device)?;
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
    let plain = updated(recipe).map_err(text)?;
    let found = updated(&fused(recipe)).map_err(text)?;
    let difference = difference(&found, &plain);
    let detail = format!("{} values, difference {difference:.1e} of the norm", plain.len());
    if difference.is_nan() || difference > MOST_UPDATE_DIFFERENCE {
        return Err(detail);
    }
    for compute in [Compute::Bf16, Compute::Fp16] {
        same_working_copy(&fused(&computing(recipe, compute)), device)
            .map_err(|problem| format!("{detail}; {compute:?}: {problem}"))?;
    }
    Ok(detail)
}

/// The update also casts the weights; libtorch would cast them to the same bits.
fn same_working_copy(recipe: &JobSpec, device: Device) -> Result<(), String> {
    let mut learner = TorchLearner::new(recipe, &InputType::Image, device).map_err(text)?;
    let mut leaf = learner.new_leaf().map_err(text)?;
    let batch = made_up_batch(recipe.train.global_batch, recipe.train.resolution);
    learner.gradient(&batch, 1.0 / batch.len() as f32, &mut leaf).map_err(text)?;
    learner.measure(&mut leaf).map_err(text)?;
    let update = Update { step: Step(0), lr: 0.1, micro_batches: 1 };
    learner.update(&mut leaf, &update).map_err(text)?;
    let by_us = learner.logits(&batch, Mode::Evaluation).map_err(text)?;
    // Whoever is lent the weights may change them, so that they are cast anew afterwards.
    learner.regions();
    let by_torch = learner.logits(&batch, Mode::Evaluation).map_err(text)?;
    match by_us.f_equal(&by_torch) {
        Ok(true) => Ok(()),
        Ok(false) => Err("the working copy has other bits than a cast".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// In another number format. The loss has no factor, so that gradients can be compared.
fn computing(recipe: &JobSpec, compute: Compute) -> JobSpec {
    let mut recipe = recipe.clone();
    recipe.precision.compute = compute;
    recipe.precision.loss_scale.initial = 1.0;
    recipe
}

fn fused(recipe: &JobSpec) -> JobSpec {
    let mut recipe = recipe.clone();
    recipe.precision.fused = true;
    recipe
}

/// With all that an update can do.
fn averaging(recipe: &JobSpec, fused: bool) -> JobSpec {
    let mut recipe = recipe.clone();
    recipe.precision.fused = fused;
    recipe.train.clip_grad_norm = Some(0.1);
    recipe.ema = Some(spec::Ema { decay: 0.9, every_steps: 1 });
    recipe
}

/// The gradient of one batch, by a learner of its own.
fn gradient(recipe: &JobSpec, device: Device) -> Result<Vec<f32>, String> {
    let mut learner = TorchLearner::new(recipe, &InputType::Image, device).map_err(text)?;
    let mut leaf = learner.new_leaf().map_err(text)?;
    let batch = made_up_batch(recipe.train.global_batch, recipe.train.resolution);
    learner.gradient(&batch, 1.0 / batch.len() as f32, &mut leaf).map_err(text)?;
    let regions = learner.regions();
    let len = |name| regions.iter().find(|region| region.name == name).map(|r| r.buffer.len());
    // A leaf begins with the batch's statistics, whose norm is many times the gradient's.
    let (Some(statistics), Some(weights)) = (len("bn_running"), len("weights")) else {
        return Err("the learner has no weights".to_owned());
    };
    let gradient = leaf.buffer().narrow(statistics..statistics + weights);
    gradient.to_host().map_err(text)
}

/// Euclidean, as a share of what is right.
fn difference(found: &[f32], right: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let apart = norm(&mut found.iter().zip(right).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    apart / norm(&mut right.iter().map(|value| f64::from(*value)))
}

fn recipe() -> Result<JobSpec, Failure> {
    let text = r#"
        name = "gpu-check"
        # Otherwise the last bits of activations decide which ones ReLU lets pass, and the gradients of two devices that
        # are both right differ by 2 %.
        model = { arch = "resnet50", num_classes = 10, zero_init_gamma = true }
        data = { train = "none", val = "none" }
        train = { epochs = 1, global_batch = 32, resolution = 64, virtual_ranks = 1 }
        optimizer = { kind = "sgd", momentum = 0.9, weight_decay = 1e-4 }
        schedule = { kind = "constant", lr = 0.01 }
        cluster = { device = "cuda", threads_per_rank = 8 }
    "#;
    let mut recipe = JobSpec::from_toml(text, &[]).map_err(exit::bad_input)?;
    recipe.cluster.device = spec::Device::Cuda;
    Ok(recipe)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[allow(clippy::print_stdout, reason = "the report is this command's output")]
fn say(line: &str) {
    println!("{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_a_share_of_the_norm_and_nothing_between_equals() {
        assert_eq!(difference(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(difference(&[3.0, 4.5], &[3.0, 4.0]), 0.1);
        // What is no number is no gradient.
        assert!(difference(&[f32::NAN, 4.0], &[3.0, 4.0]).is_nan());
    }

    #[test]
    fn one_device_finds_the_same_gradient_twice() {
        let mut recipe = recipe().unwrap();
        (recipe.train.global_batch, recipe.train.resolution) = (4, 32);
        recipe.cluster.threads_per_rank = 1;
        let found = same_bits(&recipe, Device::Cpu).unwrap();
        assert!(found.starts_with("0 of 23528522 "), "{found}");
    }

    #[test]
    fn fused_kernels_pass_their_checks_on_the_host() {
        let mut recipe = recipe().unwrap();
        recipe.model.arch = spec::Arch::named("resnet18").unwrap();
        (recipe.train.global_batch, recipe.train.resolution) = (4, 32);
        recipe.cluster.threads_per_rank = 1;
        let found = same_if_fused(&recipe, Device::Cpu).unwrap();
        assert_eq!(found.matches("twice: 0 of 11181642 ").count(), 3, "{found}");
        same_update(&recipe, Device::Cpu).unwrap();
    }
}
