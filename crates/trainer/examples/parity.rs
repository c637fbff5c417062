//! Baton's side of `make parity`: computes, from the weights and batches that
//! `scripts/parity/parity.py` wrote, everything that torch computed, for comparison there.

use std::{env, error::Error, fs, path::Path};

use baton_data::Batch;
use baton_job::{JobSpec, Step};
use baton_trainer::{
    Learner,
    torch::{Device, Mode, TorchLeaf, TorchLearner, device, weights},
};
use safetensors::SafeTensors;
use tch::Tensor;

/// The optimizers and their learning rates, as in parity.py.
const OPTIMIZERS: [(&str, &str, f64); 3] = [
    ("sgd", "{ kind = 'sgd', momentum = 0.9, weight_decay = 0.1 }", 0.1),
    ("nesterov", "{ kind = 'sgd', momentum = 0.9, nesterov = true, weight_decay = 0.1 }", 0.1),
    ("adamw", "{ kind = 'adamw', weight_decay = 0.1 }", 0.01),
];

type Named = Vec<(String, Tensor)>;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::args().nth(1).ok_or("usage: parity FOLDER")?;
    // As many as in parity.py, for the same rounding.
    device::set_threads(1);
    for case in fs::read_dir(folder)? {
        let case = case?;
        let arch = case.file_name().into_string().map_err(|name| format!("{name:?}"))?;
        eprintln!("parity: {arch}, Baton");
        for (format, channels_last) in [("nhwc", true), ("nchw", false)] {
            let results = results(&case.path(), &arch, channels_last)?;
            let file = case.path().join(format!("baton-{format}.safetensors"));
            Tensor::write_safetensors(&results, file)?;
        }
    }
    Ok(())
}

/// Every result by the name it has in parity.py.
fn results(case: &Path, arch: &str, channels_last: bool) -> Result<Named, Box<dyn Error>> {
    let batch = batch(&case.join("batch.safetensors"))?;
    let new_learner = |optimizer| -> Result<TorchLearner, Box<dyn Error>> {
        let spec = JobSpec::from_toml(&recipe(arch, channels_last, optimizer), &[])?;
        let mut learner = TorchLearner::new(&spec, Device::Cpu)?;
        weights::load(&mut learner, &case.join("weights.safetensors"))?;
        Ok(learner)
    };
    let (mut results, gradient) = model_results(new_learner(OPTIMIZERS[0].1)?, &batch)?;
    for (name, optimizer, lr) in OPTIMIZERS {
        let mut learner = new_learner(optimizer)?;
        for step in 0..2 {
            learner.update(&gradient, Step(step), lr, 1)?;
        }
        let (weights, _) = weights_and_running(&learner)?;
        results.extend(under(name, weights));
    }
    Ok(results)
}

/// Logits, loss, gradients and the running statistics after one update; and the gradients again, as
/// an update takes them.
fn model_results(
    mut learner: TorchLearner,
    batch: &Batch,
) -> Result<(Named, TorchLeaf), Box<dyn Error>> {
    let evaluation = learner.logits(batch, Mode::Evaluation)?;
    let training = learner.logits(batch, Mode::Training)?;
    let mut leaf = learner.new_leaf()?;
    let sums = learner.gradient(batch, 1.0 / batch.len() as f32, &mut leaf)?;
    let loss = Tensor::from((sums.loss / batch.len() as f64) as f32);
    let mut results = vec![
        ("logits.evaluation".to_owned(), evaluation),
        ("logits.training".to_owned(), training),
        ("loss".to_owned(), loss),
    ];
    results.extend(under("gradient", learner.gradients(&leaf)?));
    learner.update(&leaf, Step(0), 0.0, 1)?;
    let (_, running) = weights_and_running(&learner)?;
    results.extend(under("running", running));
    Ok((results, leaf))
}

fn weights_and_running(learner: &TorchLearner) -> Result<(Named, Named), Box<dyn Error>> {
    let all = learner.state_dict()?;
    Ok(all.into_iter().partition(|(name, _)| !name.contains("running_")))
}

fn under(folder: &str, tensors: Named) -> impl Iterator<Item = (String, Tensor)> {
    tensors.into_iter().map(move |(name, tensor)| (format!("{folder}/{name}"), tensor))
}

fn batch(path: &Path) -> Result<Batch, Box<dyn Error>> {
    let bytes = fs::read(path)?;
    let file = SafeTensors::deserialize(&bytes)?;
    let (images, labels) = (file.tensor("images")?, file.tensor("labels")?);
    let labels: Vec<i64> =
        labels.data().as_chunks().0.iter().map(|label| i64::from_le_bytes(*label)).collect();
    let samples = (0..labels.len() as u64).collect();
    Ok(Batch::of_images(images.data(), u32::try_from(images.shape()[1])?, labels, samples))
}

fn recipe(arch: &str, channels_last: bool, optimizer: &str) -> String {
    format!(
        r#"
        name = "parity"
        model = {{ arch = "{arch}", num_classes = 1000, channels_last = {channels_last} }}
        data = {{ train = "none", val = "none" }}
        train = {{ epochs = 1, global_batch = 16, resolution = 64, virtual_ranks = 1 }}
        optimizer = {optimizer}
        schedule = {{ kind = "constant", lr = 0.1 }}
        loss = {{ label_smoothing = 0.1 }}
        "#
    )
}
