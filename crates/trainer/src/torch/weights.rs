//! Reading exported weights: one safetensors file with torchvision's names and shapes.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, SafeTensors};
use tch::{Kind, Tensor};

use super::{failure::During, learner::TorchLearner};
use crate::learner;

/// A counter that torchvision's files carry and nothing here needs.
const UNUSED: &str = ".num_batches_tracked";

/// Why weights were not read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file did not open.
    #[error("weights {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not a safetensors file, or a damaged one.
    #[error("weights {path:?}: not a valid safetensors file: {message}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// Made for another network.
    #[error(
        "weights {path:?} do not fit model.arch and model.num_classes (for other classes set \
         model.new_head = true): {}", problems.join("; ")
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// Every tensor that is missing, unknown or of the wrong shape.
        problems: Vec<String>,
    },
    /// libtorch refused.
    #[error(transparent)]
    Learner(#[from] learner::Error),
}

/// What becomes of the classifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// It comes from the file.
    FromFile,
    /// It keeps its values: the file's is of other classes.
    New,
}

/// Overwrites all weights and running statistics of `learner` with those in the file at `path`.
/// The optimizer's state stays as it is.
///
/// # Errors
/// The file is unreadable, damaged, or does not hold exactly the network's tensors in f32; the
/// learner is then unchanged.
pub fn load(learner: &mut TorchLearner, path: &Path, head: Head) -> Result<(), Error> {
    let bytes = fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|error| Error::Format { path: path.to_owned(), message: error.to_string() })?;
    let mut views = learner.state_views()?;
    let new: HashSet<&str> = match head {
        Head::New => learner.head().collect(),
        Head::FromFile => HashSet::new(),
    };
    views.retain(|(slot, _)| !new.contains(slot.name.as_str()));
    let wanted = views.iter().map(|(slot, _)| (slot.name.as_str(), slot.shape.as_slice()));
    let problems = mismatches(&file, wanted, &new);
    if !problems.is_empty() {
        return Err(Error::Mismatch { path: path.to_owned(), problems });
    }
    for (slot, mut view) in views {
        // Present and of this shape: checked above.
        let Ok(tensor) = file.tensor(&slot.name) else { continue };
        Tensor::f_from_data_size(tensor.data(), &slot.shape, Kind::Float)
            .and_then(|tensor| view.f_copy_(&tensor))
            .during("copy weights")?;
    }
    learner.invalidate();
    Ok(())
}

/// What speaks against the tensors of `file`, of which those that are `ignored` do not matter.
fn mismatches<'a>(
    file: &SafeTensors<'_>,
    wanted: impl Iterator<Item = (&'a str, &'a [i64])>,
    ignored: &HashSet<&'a str>,
) -> Vec<String> {
    let mut problems = Vec::new();
    let mut known = ignored.clone();
    for (name, shape) in wanted {
        known.insert(name);
        match file.tensor(name) {
            Err(_) => problems.push(format!("{name} is missing")),
            Ok(tensor) => {
                let same = tensor.shape().iter().map(|&side| side as i64).eq(shape.iter().copied());
                if !same || tensor.dtype() != Dtype::F32 {
                    let (found, dtype) = (tensor.shape(), tensor.dtype());
                    problems.push(format!("{name} is {found:?} {dtype:?}, not {shape:?} F32"));
                }
            }
        }
    }
    let mut unknown: Vec<_> = file.names();
    unknown.retain(|name| !known.contains(name) && !name.ends_with(UNUSED));
    unknown.sort_unstable();
    problems.extend(unknown.into_iter().map(|name| format!("{name} is unknown")));
    problems
}
