//! `baton-worker`: the agent of a node, its rank processes, and tools around them.
//!
//! | subcommand | what it is |
//! |---|---|
//! | `agent` | one per node: spawns, watches and stops ranks; rules in `baton_job::session` ([`agent`]) |
//! | `rank` | one per GPU, started by the agent only ([`rank`]) |
//! | `eval` | accuracy of exported weights or a checkpoint ([`eval`]) |
//! | `bench` | seconds per training step ([`mod@bench`]) |
//! | `gpu-check` | proof of the GPU path on a GPU machine ([`gpu_check`]) |
//!
//! Agent and rank speak the frames of [`link`] over a socket pair: it is the rank's standard input, so
//! no file descriptor has to be passed by number, and its end is the end of the rank.

#![forbid(unsafe_code)]

mod agent;
mod bench;
mod eval;
mod gpu_check;
mod import;
mod link;
mod logging;
mod rank;
mod signals;

use std::process::ExitCode;

use baton_job::exit::{Failure, Outcome};
use clap::{Parser, Subcommand};
use tikv_jemallocator::Jemalloc;

/// For libtorch as well, whose calls of `malloc` end here: glibc gives large blocks back to the kernel at
/// every step, which has to clear them anew (a step at 128 px took 1.95 s with it and takes 1.72 s, see
/// `docs/measurements/step.md`). How it behaves is set in `.cargo/config.toml`.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Runs the ranks of a training job on this machine.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
Exit codes: 0 completed, 75 drained (the same command continues), 3 stopped by a user, 4 a budget is used \
up (raise the limit), 2 bad input or diverging training (do not requeue), 1 anything else.

Examples:
  baton-worker agent --coordinator http://127.0.0.1:29600 --ranks 2
  baton-worker eval --weights resnet50.safetensors --data assets/digits/digits-val.beton --resolution 32
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
    /// Write weights as the checkpoint that a job begins with.
    Import(import::Args),
    /// Measure seconds per training step on made-up images.
    Bench(bench::Args),
    /// Prove the GPU path: CUDA, NCCL, and the same loss as on the CPU.
    GpuCheck,
}

fn main() -> ExitCode {
    let ended = match Args::parse().command {
        Command::Agent(args) => agent::run(args),
        Command::Rank(args) => rank::run(&args).map(|()| Outcome::Completed),
        Command::Eval(args) => eval::run(&args).map(|()| Outcome::Completed),
        Command::Import(args) => import::run(&args).map(|()| Outcome::Completed),
        Command::Bench(args) => bench::run(&args).map(|()| Outcome::Completed),
        Command::GpuCheck => gpu_check::run().map(|()| Outcome::Completed),
    };
    match ended {
        Ok(outcome) => ExitCode::from(outcome.exit_code()),
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(exit_code(failure))
        }
    }
}

fn exit_code(failure: Failure) -> u8 {
    Outcome::Failed { failure }.exit_code()
}
