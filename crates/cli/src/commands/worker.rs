//! `baton eval`, `baton predict` and `baton generate`: commands of `baton-worker`, which has libtorch.

use std::{os::unix::process::CommandExt, process::Command};

use baton_console::programs;
use baton_job::exit::Failure;

use super::follow::Arguments;
use crate::failure::failed;

/// Measure weights on a data set: the metrics, the prediction for each sample, scores by class
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  baton eval --help\n  baton eval --weights resnet50.safetensors --data val.beton --by-class"
)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    arguments: Arguments,
}

/// Predict classes or values of new data
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  baton predict --help\n  baton predict --recipe r.toml --weights resnet50.safetensors --data new.beton --out predictions.csv"
)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    arguments: Arguments,
}

/// Let a language model write
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  baton generate --help\n  baton generate --recipe r.toml --weights adapter.safetensors --prompt \"Write a haiku.\""
)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    arguments: Arguments,
}

pub(crate) fn eval(args: &EvalArgs) -> Failure {
    become_worker("eval", &args.arguments)
}

pub(crate) fn predict(args: &PredictArgs) -> Failure {
    become_worker("predict", &args.arguments)
}

pub(crate) fn generate(args: &GenerateArgs) -> Failure {
    become_worker("generate", &args.arguments)
}

/// Returns only if it fails.
fn become_worker(command: &str, Arguments { arguments }: &Arguments) -> Failure {
    let worker = match programs::find("baton-worker") {
        Ok(worker) => worker,
        Err(failure) => return failure,
    };
    let error = Command::new(&worker).arg(command).args(arguments).exec();
    failed(format!("{} does not start: {error}", worker.display()))
}
