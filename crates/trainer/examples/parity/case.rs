//! One recipe and its inputs, in a folder that several recipes may share.
//!
//! | file | content |
//! |---|---|
//! | `NAME.toml` | the recipe |
//! | `weights.safetensors` | weights and running statistics with torchvision's names; absent for programs |
//! | `batches.safetensors` | `inputs`, u8 (batches, samples, side, side, 3) or f32 (batches, samples, …), and `labels`, i64 (batches, samples), or `targets`, f32 (batches, samples, outputs) |
//! | `baton-NAME.safetensors` | Baton's results |

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use baton_data::{Batch, InputType, Inputs};
use baton_recipe::{JobSpec, spec::Schedule};
use baton_trainer::torch::{
    Device, TorchLearner,
    weights::{self, Head},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use tch::Tensor;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tensors by name.
pub(crate) type Named = Vec<(String, Tensor)>;

/// A recipe and its folder.
pub(crate) struct Case {
    pub(crate) folder: PathBuf,
    pub(crate) name: String,
    pub(crate) spec: Arc<JobSpec>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let folder = self.folder.file_name().unwrap_or_default();
        write!(f, "{} {}", folder.display(), self.name)
    }
}

impl Case {
    /// Every recipe in every folder of a part.
    pub(crate) fn all(part: &Path) -> Result<Vec<Self>> {
        let mut cases = Vec::new();
        for folder in sorted(part)? {
            for recipe in sorted(&folder)? {
                if recipe.extension().is_some_and(|extension| extension == "toml") {
                    let spec = JobSpec::from_toml(&fs::read_to_string(&recipe)?, &[])?;
                    let name = recipe.file_stem().unwrap_or_default().to_string_lossy().into();
                    cases.push(Self { folder: folder.clone(), name, spec: Arc::new(spec) });
                }
            }
        }
        Ok(cases)
    }

    /// The recipe's learner with the folder's weights.
    pub(crate) fn learner(&self) -> Result<TorchLearner> {
        let input_type = match &self.batches()?[0].inputs {
            Inputs::Images { .. } => InputType::Image,
            Inputs::Tokens { .. } => InputType::Tokens,
            Inputs::Arrays { shape, .. } => InputType::Array(shape.clone()),
        };
        let mut learner = TorchLearner::new(&self.spec, &input_type, Device::Cpu)?;
        // A program has its own weights.
        let weights = self.folder.join("weights.safetensors");
        if weights.exists() {
            weights::load(&mut learner, &weights, Head::FromFile)?;
        }
        Ok(learner)
    }

    /// The folder's batches; samples are numbered from 0 on.
    pub(crate) fn batches(&self) -> Result<Vec<Batch>> {
        let bytes = fs::read(self.folder.join("batches.safetensors"))?;
        let file = SafeTensors::deserialize(&bytes)?;
        let inputs = file.tensor("inputs")?;
        let (count, samples) = (inputs.shape()[0], inputs.shape()[1]);
        let labels = numbers(file.tensor("labels").ok(), i64::from_le_bytes);
        let targets = numbers(file.tensor("targets").ok(), f32::from_le_bytes);
        let batch = |number| Batch {
            inputs: part_of_inputs(&inputs, number),
            labels: part(&labels, number, count).to_vec(),
            targets: part(&targets, number, count).to_vec(),
            samples: (number * samples..(number + 1) * samples).map(|s| s as u64).collect(),
            ..Batch::default()
        };
        Ok((0..count).map(batch).collect())
    }

    /// The rate of a constant schedule.
    pub(crate) fn rate(&self) -> Result<f64> {
        match self.spec.schedule {
            Schedule::Constant { lr } => Ok(lr),
            _ => Err(format!("{self}: the schedule is not constant").into()),
        }
    }

    /// Writes the results to the recipe's folder.
    pub(crate) fn write(&self, results: &Named) -> Result<()> {
        let file = self.folder.join(format!("baton-{}.safetensors", self.name));
        Ok(Tensor::write_safetensors(results, file)?)
    }
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut paths: Vec<PathBuf> = entries.collect::<Result<_>>()?;
    paths.sort();
    Ok(paths)
}

fn part_of_inputs(inputs: &TensorView<'_>, number: usize) -> Inputs {
    let (count, shape) = (inputs.shape()[0], &inputs.shape()[2..]);
    let bytes = part(inputs.data(), number, count);
    if inputs.dtype() == Dtype::U8 {
        return Inputs::Images { pixels: bytes.into(), resolution: shape[0] as u32 };
    }
    let values = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    Inputs::Arrays { values, shape: shape.iter().map(|side| *side as u64).collect() }
}

/// The values of a tensor; empty if there is no tensor.
fn numbers<T, const SIZE: usize>(
    tensor: Option<TensorView<'_>>,
    of: fn([u8; SIZE]) -> T,
) -> Vec<T> {
    let bytes = tensor.as_ref().map(TensorView::data).unwrap_or_default();
    bytes.as_chunks().0.iter().map(|bytes| of(*bytes)).collect()
}

/// One of `count` equal parts.
fn part<T>(all: &[T], number: usize, count: usize) -> &[T] {
    let each = all.len() / count;
    &all[number * each..(number + 1) * each]
}

/// The tensors with their names prefixed by `folder`.
pub(crate) fn under(folder: &str, tensors: Named) -> impl Iterator<Item = (String, Tensor)> {
    tensors.into_iter().map(move |(name, tensor)| (format!("{folder}/{name}"), tensor))
}
