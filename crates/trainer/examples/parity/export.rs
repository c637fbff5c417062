//! A real training on the digits, its checkpoint exported for PyTorch, and Baton's outputs for the validation set.

use std::{path::Path, sync::Arc, time::Duration};

use baton_checkpoint::{
    EntryState, Manifest, Store,
    export::{self, Float, Weights},
};
use baton_collectives::tcp::TcpCollective;
use baton_data::{Batch, Dataset, Loader, Options, Preprocessing, Request, Source};
use baton_job::{Generation, JobId, exit::Outcome, message::Restore};
use baton_recipe::{JobSpec, progress::Accuracy};
use baton_trainer::{
    Controls, GenerationContext, JobInputs, Learner, Trainer, TrainingJob,
    torch::{BatchNormMode, Device, TorchLearner},
};
use tch::Tensor;

use crate::{
    case::{Case, Named, Result},
    updates::averages_of,
};

/// Writes `raw.safetensors` and `averaged.safetensors` to the recipe's folder. Returns the pixels and labels of the
/// validation set, the logits of both models, and the (loss, top-1) that the job measured.
pub(crate) fn results(case: &Case) -> Result<Named> {
    let location = case.folder.join("checkpoints").display().to_string();
    let mut trainer = trainer(&case.spec, &location)?;
    train(&mut trainer)?;

    let manifest = newest(&location)?;
    let store = Store::open_existing(&location)?;
    for (name, weights) in [("raw", Weights::Raw), ("averaged", Weights::Averaged)] {
        let out = case.folder.join(format!("{name}.safetensors"));
        export::safetensors_as(Float::F32, &store, &manifest, weights, &out)?;
    }

    let batch = validation_set(&case.spec)?;
    let (pixels, side) = batch.images().ok_or("the digits are no images")?;
    let side = i64::from(side);
    let pixels = Tensor::from_slice(pixels).f_view([-1, side, side, 3])?;
    let learner = trainer.learner();
    let raw_logits = learner.logits(&batch, BatchNormMode::Evaluation)?;
    show_averages(learner)?;
    let averaged_logits = learner.logits(&batch, BatchNormMode::Evaluation)?;
    let progress = &manifest.progress;
    let accuracy = [&progress.last_evaluation, &progress.last_ema].map(accuracy);
    let [raw_accuracy, averaged_accuracy] = accuracy;
    let results = [
        ("pixels", pixels),
        ("labels", Tensor::from_slice(&batch.labels)),
        ("logits/raw", raw_logits),
        ("logits/averaged", averaged_logits),
        ("accuracy/raw", raw_accuracy),
        ("accuracy/averaged", averaged_accuracy),
    ];
    Ok(results.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect())
}

fn trainer(spec: &Arc<JobSpec>, location: &str) -> Result<Trainer<TorchLearner>> {
    let inputs = JobInputs::open(spec, Path::new(""))?;
    let input_type = inputs.input_type().clone();
    let id = JobId("00000000-0000-0000-0000-000000000000".parse()?);
    let job = TrainingJob {
        id,
        spec: spec.clone(),
        store: Arc::new(Store::open(location)?),
        local: None,
        inputs,
    };
    let spec = spec.clone();
    let build = move || TorchLearner::new(&spec, &input_type, Device::Cpu);
    Ok(Trainer::new(job, Box::new(build))?)
}

/// Runs the whole job on one rank.
fn train(trainer: &mut Trainer<TorchLearner>) -> Result<()> {
    let mut alone = TcpCollective::alone(Duration::from_secs(60))?;
    let (collective, restore) = (&mut alone, &Restore::default());
    let mut context = GenerationContext {
        generation: Generation(1),
        collective,
        restore,
        controls: &Controls::default(),
        report: &mut |_| {},
    };
    match trainer.run(&mut context)? {
        Outcome::Completed => Ok(()),
        other => Err(format!("the job ended with {other:?}").into()),
    }
}

fn newest(location: &str) -> Result<Manifest> {
    match Store::open_existing(location)?.list()?.into_iter().next().map(|entry| entry.state) {
        Some(EntryState::Complete(manifest)) => Ok(*manifest),
        other => Err(format!("the job left {other:?}").into()),
    }
}

/// Overwrites the trained weights with their averages.
fn show_averages(learner: &mut TorchLearner) -> Result<()> {
    for region in ["weights", "bn_running"] {
        let mut regions = learner.regions();
        let find = |name| regions.iter().position(|region| region.name == name).ok_or(name);
        let (from, to) = (find(averages_of(region))?, find(region)?);
        let values = regions[from].buffer.to_host()?;
        regions[to].buffer.copy_from_host(&values)?;
    }
    Ok(())
}

fn accuracy(accuracy: &Option<Accuracy>) -> Tensor {
    let value = |name| accuracy.as_ref().and_then(|found| found.get(name)).unwrap_or_default();
    Tensor::from_slice(&[value("loss"), value("top1")])
}

/// The whole validation set in one batch.
fn validation_set(spec: &JobSpec) -> Result<Batch> {
    let set = Arc::new(Dataset::open(Source::new(&spec.data.val))?);
    let preprocessing = Preprocessing::Evaluate {
        resolution: spec.train.resolution,
        resize: spec.data.resize,
        crop_ratio: spec.evaluation.crop_ratio,
    };
    let request = Request { epoch: 0, samples: (0..set.len()).collect(), preprocessing };
    let mut loader = Loader::start(set, &Options::new(1, 1), [request].into_iter());
    Ok(loader.next().ok_or("the validation set is empty")??)
}
