//! Reads exported weights: one safetensors file with torchvision's names and shapes.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
};

use baton_language::peft::check_description;
use safetensors::{Dtype, SafeTensors};
use tch::{Kind, Tensor};

use super::{failure::During, learner::TorchLearner};
use crate::learner;

/// Suffix of a counter in torchvision's files that is not used here.
const UNUSED: &str = ".num_batches_tracked";

/// Suffix of the variances of BatchNorm.
const VARIANCE: &str = "running_var";

/// Error while reading weights.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened or read.
    #[error("weights {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Not a safetensors file, or a damaged one.
    #[error("weights {path:?}: not a valid safetensors file: {message}")]
    Format {
        /// The file.
        path: PathBuf,
        /// Error of the safetensors reader.
        message: String,
    },
    /// The file contains the weights of another network.
    #[error(
        "weights {path:?} do not fit the recipe's model: {}; other classes need model.new_head = true, an adapter \
         the rank and the targets of the file",
        first_of(problems)
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// Every tensor that is missing, unknown or of the wrong shape.
        problems: Vec<String>,
    },
    /// The file contains other numbers than f32.
    #[error("weights {path:?} cannot be used: {}; convert them to float32", first_of(problems))]
    Dtype {
        /// The file.
        path: PathBuf,
        /// Every tensor of another type.
        problems: Vec<String>,
    },
    /// The matrices of an adapter would be scaled differently than where they were trained.
    #[error("weights {path:?} do not fit the recipe's adapter: {problem}")]
    Adapter {
        /// The file.
        path: PathBuf,
        /// What differs, and what to do.
        problem: String,
    },
    /// The file contains values with which no network can be trained.
    #[error(
        "weights {path:?} cannot be used: {}; export them again from a state before they were damaged",
        first_of(problems)
    )]
    Values {
        /// The file.
        path: PathBuf,
        /// Every tensor with such values.
        problems: Vec<String>,
    },
    /// libtorch reported an error.
    #[error(transparent)]
    Learner(#[from] learner::Error),
}

/// The first problems as text, and how many follow: another network differs in every tensor.
fn first_of(problems: &[String]) -> String {
    const SHOWN: usize = 3;
    let shown = problems.iter().take(SHOWN).cloned();
    let more = problems.len().saturating_sub(SHOWN);
    let rest = (more > 0).then(|| format!("and {more} more"));
    shown.chain(rest).collect::<Vec<_>>().join("; ")
}

/// Source of the classifier's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// The file.
    FromFile,
    /// The current weights: the file's classifier is for other classes.
    New,
}

/// Overwrites all weights and running statistics of `learner` with those in the file at `path`. The optimizer's state
/// does not change.
///
/// # Errors
/// The file is unreadable, damaged, or does not contain exactly the network's tensors in f32, or they have values that
/// are not finite or negative variances; or an adapter's description beside it says another scale than the recipe. The
/// learner is then unchanged.
pub fn load(learner: &mut TorchLearner, path: &Path, head: Head) -> Result<(), Error> {
    let bytes = fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|error| Error::Format { path: path.to_owned(), message: error.to_string() })?;
    let mut views = learner.state_views()?;
    let mut ignored: HashSet<&str> = match head {
        Head::New => learner.head().collect(),
        Head::FromFile => HashSet::new(),
    };
    for (entry, _) in &views {
        if entry.is_constant {
            ignored.insert(&entry.name);
        }
        ignored.extend(entry.aliases.iter().map(String::as_str));
    }
    views.retain(|(entry, _)| !ignored.contains(entry.name.as_str()));
    let expected = views.iter().map(|(entry, _)| (entry.name.as_str(), entry.shape.as_slice()));
    let problems = mismatches(&file, expected, &ignored);
    if !problems.is_empty() {
        return Err(Error::Mismatch { path: path.to_owned(), problems });
    }
    let names = views.iter().map(|(entry, _)| entry.name.as_str());
    let problems = other_types(&file, names);
    if !problems.is_empty() {
        return Err(Error::Dtype { path: path.to_owned(), problems });
    }
    if let Some(adapter) = &learner.recipe.adapter {
        check_description(path, adapter)
            .map_err(|problem| Error::Adapter { path: path.to_owned(), problem })?;
    }
    let tensors = views.iter().filter_map(|(entry, _)| {
        // The tensor exists and has this type: checked above.
        file.tensor(&entry.name).ok().map(|tensor| (entry.name.as_str(), tensor))
    });
    let problems: Vec<_> =
        tensors.filter_map(|(name, tensor)| impossible_values(name, tensor.data())).collect();
    if !problems.is_empty() {
        return Err(Error::Values { path: path.to_owned(), problems });
    }
    for (entry, mut view) in views {
        // The tensor exists and has this shape: checked above.
        let Ok(tensor) = file.tensor(&entry.name) else { continue };
        Tensor::f_from_data_size(tensor.data(), &entry.shape, Kind::Float)
            .and_then(|tensor| view.f_copy_(&tensor))
            .during("copy weights")?;
    }
    // All working copies are cast again before they are used.
    learner.invalidate();
    Ok(())
}

/// What is wrong with the f32 values of a tensor. They would make the first loss NaN, and the data would seem to be at
/// fault.
fn impossible_values(name: &str, bytes: &[u8]) -> Option<String> {
    let count = |is_wrong: fn(f32) -> bool| {
        let values = bytes.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value));
        values.filter(|&value| is_wrong(value)).count()
    };
    let is_variance = name.ends_with(VARIANCE);
    let (wrong, one, more) = match count(|value| !value.is_finite()) {
        0 if is_variance => (count(|value| value < 0.0), "negative variance", "negative variances"),
        wrong => (wrong, "value that is not finite", "values that are not finite"),
    };
    (wrong > 0).then(|| format!("{name} has {wrong} {}", if wrong == 1 { one } else { more }))
}

/// The tensors that are not f32.
fn other_types<'a>(file: &SafeTensors<'_>, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let types = names.filter_map(|name| Some((name, file.tensor(name).ok()?.dtype())));
    let others = types.filter(|(_, dtype)| *dtype != Dtype::F32);
    others.map(|(name, dtype)| format!("{name} is {dtype:?}")).collect()
}

/// Differences between the tensors of `file` and the expected names and shapes, except those that are `ignored`.
fn mismatches<'a>(
    file: &SafeTensors<'_>,
    expected: impl Iterator<Item = (&'a str, &'a [i64])>,
    ignored: &HashSet<&'a str>,
) -> Vec<String> {
    let mut problems = Vec::new();
    let mut known = ignored.clone();
    for (name, shape) in expected {
        known.insert(name);
        match file.tensor(name) {
            Err(_) => problems.push(format!("{name} is missing")),
            Ok(tensor) => {
                let same = tensor.shape().iter().map(|&dim| dim as i64).eq(shape.iter().copied());
                if !same {
                    problems.push(format!("{name} is {:?}, not {shape:?}", tensor.shape()));
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
