//! `baton-worker import`: writes given weights as the first checkpoint of a job.

use std::path::PathBuf;

use baton_checkpoint::{Store, check_weights_file};
use baton_console::{json, parent::Parent};
use baton_data::{Dataset, Source};
use baton_job::{
    JobId,
    exit::{Failure, bad_input},
};
use baton_trainer::{
    Error,
    torch::{self, TorchLearner, weights::Head},
    write_initial_checkpoint,
};
use serde::Serialize;

use crate::eval::recipe;

/// Write weights as the first checkpoint of a job; same as `baton checkpoint import`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Weights in torchvision's names, as `baton checkpoint export` writes them.
    weights: PathBuf,
    /// Recipe of the job.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Change one value of the recipe. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Folder or s3://BUCKET/PREFIX to write to; must contain no checkpoints.
    #[arg(long, value_name = "LOCATION")]
    into: String,
    /// Start with a new last layer, if the one in the file is for other classes.
    #[arg(long)]
    new_head: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Output of `--json`.
#[derive(Serialize)]
struct Imported<'a> {
    checkpoint: String,
    location: &'a str,
    arch: &'a str,
    bytes: u64,
}

/// Writes the checkpoint and prints its name.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    // `baton checkpoint import` may be terminated, and then nobody waits for the result.
    Parent::follow(rustix::process::Signal::TERM, None)?;
    let spec = recipe(&args.recipe, &args.overrides)?;
    check_weights_file(&args.weights).map_err(bad_input)?;
    let source = Source::of_recipe(&spec, &spec.data.train, Source::new("").cache_dir);
    let set = Dataset::open(source).map_err(Error::from)?;
    // The checkpoint's bytes do not depend on the device.
    let device = torch::Device::Cpu;
    let mut learner = TorchLearner::new(&spec, set.input_type(), device)?;
    let head = if args.new_head { Head::New } else { Head::FromFile };
    torch::weights::load(&mut learner, &args.weights, head).map_err(bad_input)?;
    let store = Store::open(&args.into).map_err(bad_input)?;
    let commit = write_initial_checkpoint(&mut learner, JobId::default(), &spec, &store)?;
    let (arch, location) = (spec.model.arch.name(), store.location());
    let imported = Imported { checkpoint: commit.name, location, arch, bytes: commit.bytes };
    json::print(args.json, &imported, |imported| {
        format!(
            "wrote checkpoint {} to {location}: {arch} with the weights of {}; a job of this recipe with \
             checkpoint.dir = {location:?} starts from it",
            imported.checkpoint,
            args.weights.display()
        )
    });
    Ok(())
}
