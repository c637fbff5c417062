//! `baton-worker probe`: what one step computes for given inputs, to be compared with PyTorch.

use std::path::PathBuf;

use baton_checkpoint::check_weights_file;
use baton_console::{json, output::refuse_special_file};
use baton_job::{
    exit::{Failure, bad_input, crash},
    ids::LocalRank,
};
use baton_trainer::{
    Learner,
    torch::{self, TorchLearner, probe::ProbeBatch},
};
use serde::Serialize;

use crate::eval::recipe;

/// Compute one step for given inputs, without an update, and write loss, outputs and gradients.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Recipe of the job: network, loss, number format.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Change one value of the recipe, e.g. --set model.pretrained=w.safetensors. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// A safetensors file with the tensors `input` (as the network takes it: normalised, images as NCHW) or
    /// `input.<name>`, and `target` (int64 classes, or float32 values).
    #[arg(long, value_name = "FILE")]
    inputs: PathBuf,
    /// Where to write `loss` (mean of the samples), `output`, `grad.<parameter>` and `buffer.<name>`.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// libtorch threads.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Output of `--json`.
#[derive(Serialize)]
struct Probed {
    loss: f64,
    tensors: usize,
    path: String,
}

/// Computes and writes.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let spec = recipe(&args.recipe, &args.overrides)?;
    check_weights_file(&args.inputs).map_err(bad_input)?;
    refuse_special_file(&args.out)?;
    let batch = ProbeBatch::read(&args.inputs, &spec)?;
    let device = torch::device::open(&spec, LocalRank(0))?;
    torch::device::set_threads(args.threads);
    let mut learner = TorchLearner::new(&spec, &batch.input_type(&spec), device)?;
    learner.load_initial()?;
    let probe = learner.probe(&batch)?;
    let path = args.out.display().to_string();
    probe.write(&args.out).map_err(|error| crash(format!("{path}: {error}")))?;
    let probed = Probed { loss: probe.loss, tensors: probe.tensors.len(), path };
    json::print(args.json, &probed, |probed| {
        format!("loss {}: wrote {} tensors to {}", probed.loss, probed.tensors, probed.path)
    });
    Ok(())
}
