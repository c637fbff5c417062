//! `baton checkpoint import`

use std::{os::unix::process::ExitStatusExt, path::PathBuf};

use baton_console::programs;
use baton_job::{
    exit::{FAILED, Failure},
    session::failure_of,
};
use tokio::process::Command;

use crate::{commands::recipe, failure::failed, up::decide::LIBRARY_MISSING};

/// Write weights as a checkpoint from which a job starts
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint import resnet50.safetensors --recipe recipes/digits_cpu.toml --into runs/new/checkpoints
  baton up recipes/digits_cpu.toml --run-dir runs/new

The file contains a torchvision state dict in f32, as `baton checkpoint export` writes it. The checkpoint is for \
step 0: momentum, averaged weights and schedule start from the beginning. Unlike model.pretrained, it does not \
change the recipe.")]
pub(crate) struct Args {
    /// Weights as safetensors, with torchvision's names
    weights: PathBuf,
    /// Recipe of the job; its training data must be readable, because the model's input shape is read from it
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Change one value of the recipe; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The folder or s3://BUCKET/PREFIX to write to; it must not contain checkpoints
    #[arg(long, value_name = "LOCATION")]
    into: String,
    /// Ignore the file's last layer, which is for other classes, and start with a new one
    #[arg(long)]
    new_head: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs baton-worker, which contains the memory layout of the models' weights.
pub(super) async fn run(args: Args) -> Result<u8, Failure> {
    let spec = recipe::read(&args.recipe, &args.overrides)?;
    if spec.model.arch.is_linear() {
        let problem = "model.arch = \"linear\" cannot be imported: use a ResNet";
        return Err(recipe::about(&args.recipe, problem));
    }
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
    let status = command.kill_on_drop(true).status().await;
    let status = status.map_err(|error| {
        failed(format!("cannot start baton-worker: {error}; `baton doctor` finds out why"))
    })?;
    match status.code() {
        Some(LIBRARY_MISSING) => Err(failed(
            "baton-worker cannot find its libraries (named above): `pip install torch==2.11.0`; in a checkout, \
                 `make setup`",
        )),
        // baton-worker has printed the error.
        Some(code) => Ok(u8::try_from(code).unwrap_or(FAILED)),
        None => {
            let message = failure_of(None, status.signal(), false).message;
            Err(failed(format!("baton-worker: {message}; nothing was imported")))
        }
    }
}
