//! `baton-worker`: the agent of a node, its rank processes, and tools around them.
//!
//! | subcommand | what it does |
//! |---|---|
//! | `agent` | one per node: starts, watches and stops ranks; the rules are in `baton_job::session` ([`agent`]) |
//! | `rank` | trains; one per GPU, started by the agent only ([`rank`]) |
//! | `eval` | measures the accuracy of exported weights ([`eval`]) |
//! | `predict` | writes the predictions for new data ([`predict`]) |
//! | `generate` | lets a language model write ([`generate`]) |
//! | `import` | writes given weights as the first checkpoint of a job ([`import`]) |
//! | `probe` | computes one step for given inputs, to be compared with PyTorch ([`probe`]) |
//! | `bench` | measures seconds per training step ([`mod@bench`]) |
//! | `gpu-check` | checks CUDA, NCCL and the kernels on a machine with a GPU ([`gpu_check`]) |
//! | `machine` | shows what libtorch and the driver offer ([`machine`]) |
//!
//! Agent and rank exchange the messages of [`link`] over a socket pair. The rank's end is its standard input, so no
//! file descriptor number has to be passed; when it is closed the rank exits.

#![forbid(unsafe_code)]

mod agent;
mod bench;
mod eval;
mod generate;
mod gpu_check;
mod import;
mod link;
mod logging;
mod machine;
mod predict;
mod predictions;
mod probe;
mod rank;
mod signals;

use std::process::ExitCode;

use baton_console::output;
use baton_job::exit::{Failure, Outcome};
use clap::{Parser, Subcommand};
use tikv_jemallocator::Jemalloc;

/// Also used by libtorch's calls of `malloc`. glibc returns large blocks to the kernel at every step, and the kernel
/// has to clear them again: a step at 128 px took 1.95 s with glibc and takes 1.72 s with jemalloc, see
/// `docs/measurements/step.md`. Its options are set in `.cargo/config.toml`.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Runs the ranks of a training job on this machine.
#[derive(Debug, Parser)]
#[command(
    version = baton_build_info::VERSION,
    after_help = "\
Exit codes: 0 completed, 75 drained (run the same command to continue), 3 stopped by a user, 4 a budget is \
used up (raise the limit), 2 bad input or diverged training (do not requeue), 1 any other failure.

Examples:
  baton-worker agent --coordinator http://127.0.0.1:29600 --ranks 2
  baton-worker eval --weights resnet50.safetensors --data assets/digits/digits-val.beton
  baton-worker generate --recipe recipes/smollm2_lora_cpu.toml --prompt \"Write a haiku.\"
  baton-worker bench --arch resnet50 --resolution 64 --batch 16"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run this node's part of a job.
    Agent(agent::Args),
    /// A rank process; started by the agent.
    #[command(hide = true)]
    Rank(rank::Args),
    /// Measure the accuracy of exported weights.
    Eval(eval::Args),
    /// Predict classes or values of new data.
    Predict(predict::Args),
    /// Let a language model write.
    Generate(generate::Args),
    /// Write weights as the first checkpoint of a job.
    Import(import::Args),
    /// Compute one step for given inputs, to compare it with PyTorch.
    Probe(probe::Args),
    /// Measure seconds per training step on made-up images.
    Bench(bench::Args),
    /// Check CUDA, NCCL and the GPU kernels, and compare the loss with the CPU's.
    GpuCheck(gpu_check::Args),
    /// Show what libtorch and NVIDIA's driver offer here; a part of `baton doctor`.
    Machine(machine::Args),
}

fn main() -> ExitCode {
    baton_console::signals::ignore_file_size_signal();
    let result = match Args::parse().command {
        Command::Agent(args) => agent::run(args),
        Command::Rank(args) => rank::run(&args).map(|()| Outcome::Completed),
        Command::Eval(args) => eval::run(&args).map(|()| Outcome::Completed),
        Command::Predict(args) => predict::run(&args).map(|()| Outcome::Completed),
        Command::Generate(args) => generate::run(&args).map(|()| Outcome::Completed),
        Command::Import(args) => import::run(&args).map(|()| Outcome::Completed),
        Command::Probe(args) => probe::run(&args).map(|()| Outcome::Completed),
        Command::Bench(args) => bench::run(&args).map(|()| Outcome::Completed),
        Command::GpuCheck(args) => gpu_check::run(&args).map(|()| Outcome::Completed),
        Command::Machine(args) => {
            machine::run(&args);
            Ok(Outcome::Completed)
        }
    };
    match result {
        Ok(outcome) => ExitCode::from(outcome.exit_code()),
        Err(failure) => {
            output::error(&failure);
            ExitCode::from(exit_code(failure))
        }
    }
}

fn exit_code(failure: Failure) -> u8 {
    Outcome::Failed { failure }.exit_code()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Commands without `--json`, with the reason.
    const WITHOUT_JSON: [(&str, &str); 2] = [
        ("agent", "runs until the job ends and prints no result, only its log"),
        ("rank", "is started by an agent, and reports to it"),
    ];

    #[test]
    fn every_command_that_prints_a_result_has_json_and_is_in_the_documentation() {
        let documentation = include_str!("../../docs/watching.md");
        let command = Args::command();
        let has_json = |command: &&clap::Command| {
            command.get_arguments().any(|flag| flag.get_long() == Some("json"))
        };
        let (with, without): (Vec<_>, Vec<_>) = command.get_subcommands().partition(has_json);
        let without: Vec<&str> = without.iter().map(|command| command.get_name()).collect();
        assert_eq!(without, WITHOUT_JSON.map(|(command, _)| command));
        for command in with {
            let name = command.get_name();
            let is_documented = documentation.contains(&format!("`baton-worker {name}`"));
            assert!(
                is_documented,
                "the section JSON of docs/watching.md has no `baton-worker {name}`"
            );
        }
    }
}
