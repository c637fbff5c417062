//! `baton-worker gpu-check`: proves the GPU path on a machine that has one, in a minute.

use std::time::{Duration, Instant};

use baton_collectives::{
    BufferMut, Collective, Part, TreeNode, local,
    nccl::{self, NcclCollective},
};
use baton_data::InputType;
use baton_job::{
    JobSpec, Rank, Step,
    exit::{Class, Failure},
    ids::LocalRank,
    spec,
};
use baton_trainer::{
    Error, Learner, Update,
    torch::{self, Device, TorchLearner},
};

use crate::bench::made_up_batch;

/// Runs every check, prints a line for each, and fails if one failed.
pub(crate) fn run() -> Result<(), Failure> {
    let recipe = recipe()?;
    let device = torch::device::open(&recipe, LocalRank(0)).map_err(device_failure)?;
    let checks: [(&str, Check); 4] = [
        ("NCCL library", Box::new(|| nccl::version().map(|v| v.to_string()).map_err(text))),
        ("NCCL world of one", Box::new(nccl_world_of_one)),
        ("NCCL abort, then a new generation", Box::new(nccl_abort_and_again)),
        ("ResNet-50: loss and state as on the CPU", Box::new(move || same_as_cpu(&recipe, device))),
    ];
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
    let message = format!("{failed} of 4 GPU checks failed; see above");
    Err(Failure { class: Class::Device, message })
}

type Check = Box<dyn Fn() -> Result<String, String>>;

fn connect() -> Result<NcclCollective, String> {
    let patience = Duration::from_secs(30);
    let options = nccl::Options {
        connect_timeout: patience,
        operation_timeout: patience,
        abort_timeout: Duration::from_secs(5),
    };
    let alone = local::group(1, patience).into_iter().next().ok_or("no group")?;
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

/// Three updates on the same batches on both devices. TF32 convolutions, cuDNN's default, keep ten
/// bits of mantissa: hence the tolerance.
fn same_as_cpu(recipe: &JobSpec, gpu: Device) -> Result<String, String> {
    let losses = |device| -> Result<Vec<f64>, baton_trainer::learner::Error> {
        let mut learner = TorchLearner::new(recipe, &InputType::Image, device)?;
        let mut leaf = learner.new_leaf()?;
        let batch = made_up_batch(recipe.train.global_batch, recipe.train.resolution);
        let scale = 1.0 / batch.len() as f32;
        let mut losses = Vec::new();
        for step in 0..3 {
            losses.push(learner.gradient(&batch, scale, &mut leaf)?.loss / batch.len() as f64);
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
    if worst < 5e-3 { Ok(detail) } else { Err(detail) }
}

fn recipe() -> Result<JobSpec, Failure> {
    let text = r#"
        name = "gpu-check"
        model = { arch = "resnet50", num_classes = 10 }
        data = { train = "none", val = "none" }
        train = { epochs = 1, global_batch = 32, resolution = 64, virtual_ranks = 1 }
        optimizer = { kind = "sgd", momentum = 0.9, weight_decay = 1e-4 }
        schedule = { kind = "constant", lr = 0.01 }
        cluster = { device = "cuda", threads_per_rank = 8 }
    "#;
    let mut recipe = JobSpec::from_toml(text, &[])
        .map_err(|error| Failure { class: Class::BadInput, message: error.to_string() })?;
    recipe.cluster.device = spec::Device::Cuda;
    Ok(recipe)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn device_failure(error: baton_trainer::learner::Error) -> Failure {
    Error::from(error).failure()
}

#[allow(clippy::print_stdout, reason = "the report is this command's output")]
fn say(line: &str) {
    println!("{line}");
}
