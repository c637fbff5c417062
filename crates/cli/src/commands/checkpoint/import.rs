//! `baton checkpoint import`

use std::{os::unix::process::ExitStatusExt, path::PathBuf};

use baton_console::programs;
use baton_job::{
    exit::{FAILED, Failure},
    session::failure_of,
};
use tokio::process::Command;

use crate::{failure::failed, up::decide::NOT_LOADED};

/// Write weights as the checkpoint that a job begins with
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint import resnet50.safetensors --recipe recipes/digits_cpu.toml --into runs/new/checkpoints
  baton up recipes/digits_cpu.toml --run-dir runs/new

The file holds a torchvision state dict in f32, as `baton checkpoint export` writes it. The checkpoint is that \
of step 0: momentum, averaged weights and schedule begin anew. Unlike model.pretrained it leaves the recipe \
as it is.")]
pub(crate) struct Args {
    /// Weights as safetensors, with torchvision's names
    weights: PathBuf,
    /// The recipe of the job; its training data says what goes into the model
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Change one value of the recipe; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The folder or s3://BUCKET/PREFIX to write to, without checkpoints as yet
    #[arg(long, value_name = "LOCATION")]
    into: String,
    /// The file's last layer is for other classes: begin with a new one
    #[arg(long)]
    new_head: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the one program that knows how a model's weights lie in memory.
pub(super) async fn run(args: Args) -> Result<u8, Failure> {
    let mut command = Command::new(programs::find("baton-worker")?);
    command.arg("import").arg(&args.weights).arg("--recipe").arg(&args.recipe);
    for entry in &args.overrides {
        command.args(["--set", entry]);
    }
    command.args(["--into", &args.into]);
    for (is_set, flag) in [(args.new_head, "--new-head"), (args.json, "--json")] {
        if is_set {
            command.arg(flag);
        }
    }
    let ended = command.kill_on_drop(true).status().await;
    let ended = ended.map_err(|error| {
        failed(format!("baton-worker does not start: {error}; build it with `make build`"))
    })?;
    match ended.code() {
        Some(NOT_LOADED) => {
            Err(failed("baton-worker does not find its libraries (named above): run `make setup`"))
        }
        // It has said why.
        Some(code) => Ok(u8::try_from(code).unwrap_or(FAILED)),
        None => {
            let how = failure_of(None, ended.signal(), false).message;
            Err(failed(format!("baton-worker: {how}; nothing was imported")))
        }
    }
}
