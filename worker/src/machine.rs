//! `baton-worker machine`

use baton_collectives::nccl;
use baton_console::{human, json, machine::Machine};
use baton_trainer::torch::device::{gpu_problem, torch_version};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use crate::agent;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  baton-worker machine
  baton doctor                                     checks programs, disk and ports too")]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) {
    json::print(args.json, &found(), text);
}

fn found() -> Machine {
    // First, as it opens libtorch's CUDA half.
    let gpu_problem = gpu_problem();
    let memory = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let system = System::new_with_specifics(memory);
    // A container has less than its machine.
    let memory = system.cgroup_limits().map_or(
        [system.total_memory(), system.available_memory()],
        |limits| {
            let total = limits.total_memory.min(system.total_memory());
            [total, limits.free_memory.min(system.available_memory()).min(total)]
        },
    );
    let (driver, gpus) = agent::shown_by_driver().unzip();
    Machine {
        libtorch: torch_version(),
        cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64),
        memory_bytes: memory[0],
        memory_available_bytes: memory[1],
        driver,
        gpus: gpus.unwrap_or_default(),
        gpu_problem,
        nccl: nccl::version().ok().map(|version| version.to_string()),
    }
}

fn text(machine: &Machine) -> String {
    let or_none = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
    let mut lines = vec![
        format!("libtorch   {}", machine.libtorch),
        format!("cores      {}", machine.cores),
        format!(
            "memory     {}, {} available",
            human::bytes(machine.memory_bytes),
            human::bytes(machine.memory_available_bytes)
        ),
        format!("driver     {}", or_none(&machine.driver)),
        format!("NCCL       {}", or_none(&machine.nccl)),
    ];
    lines.extend(machine.gpus.iter().enumerate().map(|(number, gpu)| {
        format!(
            "GPU {number}      {}, {}, {} free",
            gpu.name,
            human::bytes(gpu.memory_bytes),
            human::bytes(gpu.memory_free_bytes)
        )
    }));
    lines.extend(machine.gpu_problem.clone());
    lines.join("\n")
}
