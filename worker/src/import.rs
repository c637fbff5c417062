//! `baton-worker import`: weights as a checkpoint that training begins with.

use std::path::PathBuf;

use baton_checkpoint::Store;
use baton_data::{Dataset, Source};
use baton_job::{
    JobId,
    exit::{Failure, bad_input},
};
use baton_trainer::{
    Error,
    torch::{self, TorchLearner, weights::Head},
    write_first,
};
use serde::Serialize;

use crate::eval::recipe;

/// Write weights as the checkpoint that a job begins with; `baton checkpoint import` is the same.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Weights in torchvision's names, as `baton checkpoint export` writes them.
    weights: PathBuf,
    /// The recipe of the job.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Change one value of the recipe. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The folder or s3://BUCKET/PREFIX to write to, without checkpoints as yet.
    #[arg(long, value_name = "LOCATION")]
    into: String,
    /// The file's last layer is for other classes: begin with a new one.
    #[arg(long)]
    new_head: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Imported<'a> {
    checkpoint: String,
    location: &'a str,
    arch: &'a str,
    bytes: u64,
}

/// Writes the checkpoint and says which.
#[allow(clippy::print_stdout, reason = "the result is this command's output")]
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let spec = recipe(&args.recipe, &args.overrides)?;
    let source = Source::of_recipe(&spec, &spec.data.train, Source::new("").cache_dir);
    let set = Dataset::open(source).map_err(Error::from)?;
    // Wherever it is to be trained, its bytes are the same.
    let device = torch::Device::Cpu;
    let mut learner = TorchLearner::new(&spec, set.input_type(), device)?;
    let head = if args.new_head { Head::New } else { Head::FromFile };
    torch::weights::load(&mut learner, &args.weights, head).map_err(bad_input)?;
    let store = Store::open(&args.into).map_err(bad_input)?;
    let commit = write_first(&mut learner, JobId::default(), &spec, &store)?;
    let (arch, location) = (spec.model.arch.name(), store.location());
    let imported = Imported { checkpoint: commit.name, location, arch, bytes: commit.bytes };
    if args.json {
        println!("{}", serde_json::to_string(&imported).unwrap_or_default());
    } else {
        println!(
            "wrote checkpoint {} to {location}: {arch} with the weights of {}; a job of this recipe with \
             checkpoint.dir = {location:?} begins with it",
            imported.checkpoint,
            args.weights.display()
        );
    }
    Ok(())
}
