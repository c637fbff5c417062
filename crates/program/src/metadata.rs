//! What the Python package `baton` adds to a program: `extra/baton.json`, written by `baton.export`.
//!
//! The graph says what is computed; this says what the numbers mean. A file that plain `torch.export.save` wrote has
//! none.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{archive::Archive, program::OutputTensor};

/// Name of the entry, without the archive's folder.
const ENTRY: &str = "extra/baton.json";
/// The format that this module reads.
const FORMAT_VERSION: u64 = 1;
/// Largest entry, bytes: a hundred thousand classes with long names.
const MAX_METADATA_BYTES: u64 = 8 << 20;
/// Largest difference of means or deviations that are rounded alike, in units of 0..255.
const ROUNDING: f32 = 0.01;

/// What `baton.export` wrote about a program.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportMetadata {
    /// What the outputs are.
    pub task: ExportTask,
    /// Names of the inputs, as the module's `forward` has them.
    pub inputs: Vec<String>,
    /// Name of each class; empty if they have none.
    pub class_names: Vec<String>,
    /// How the images were normalised that the network expects.
    pub normalisation: Option<Normalisation>,
}

/// What the outputs of a program are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportTask {
    /// Scores of classes.
    Classification,
    /// Values.
    Regression,
    /// The loss of each sample and metrics.
    Loss,
}

impl ExportTask {
    /// Name in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Classification => "classification",
            Self::Regression => "regression",
            Self::Loss => "loss",
        }
    }
}

/// Mean and standard deviation of each channel of RGB images, in units of 0..255, as in a recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalisation {
    /// Is subtracted.
    pub mean: [f32; 3],
    /// The difference is divided by it; above 0.
    pub std: [f32; 3],
}

impl fmt::Display for Normalisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data.mean = {:?} and data.std = {:?}", self.mean, self.std)
    }
}

impl Normalisation {
    /// Whether both are the same, except for rounding.
    pub(crate) fn is_close_to(&self, other: &Self) -> bool {
        let pairs = [(&self.mean, &other.mean), (&self.std, &other.std)];
        let mut values = pairs.into_iter().flat_map(|(left, right)| left.iter().zip(right));
        values.all(|(left, right)| (left - right).abs() <= ROUNDING)
    }
}

/// Only the version, which is checked before anything else is read.
#[derive(Deserialize)]
struct FormatVersion {
    format_version: u64,
}

#[derive(Deserialize)]
struct JsonMetadata {
    task: ExportTask,
    inputs: Vec<JsonInput>,
    #[serde(default)]
    class_names: Vec<String>,
    mean: Option<[f32; 3]>,
    std: Option<[f32; 3]>,
}

/// Shape and type are those of the graph, which are the ones that count.
#[derive(Deserialize)]
struct JsonInput {
    name: String,
}

impl ExportMetadata {
    /// `None` if the file has none.
    pub(crate) fn read(archive: &Archive) -> Result<Option<Self>, String> {
        let Some(bytes) = archive.size(ENTRY) else { return Ok(None) };
        if bytes > MAX_METADATA_BYTES {
            return Err(format!(
                "has {ENTRY} of {bytes} bytes, but at most {MAX_METADATA_BYTES} are read: shorten the names of the classes"
            ));
        }
        let text = archive.read(ENTRY)?;
        // The parser repeats what it does not know, as it is in the file.
        let malformed = |problem: &dyn fmt::Display| {
            let problem = problem.to_string().replace(char::is_control, "?");
            format!("{ENTRY} is malformed ({problem}): write the file with baton.export")
        };
        let parsed = |error: serde_json::Error| malformed(&error);
        let FormatVersion { format_version } = serde_json::from_slice(&text).map_err(parsed)?;
        if format_version != FORMAT_VERSION {
            return Err(format!(
                "{ENTRY} has format version {format_version}, but this Baton reads version {FORMAT_VERSION}: use the \
                 Python package of the same version as this program"
            ));
        }
        let metadata: JsonMetadata = serde_json::from_slice(&text).map_err(parsed)?;
        metadata.check().map(Some).map_err(|problem| malformed(&problem))
    }

    /// Checks it against the graph.
    pub(crate) fn check(&self, inputs: usize, outputs: &[OutputTensor]) -> Result<(), String> {
        if self.inputs.len() != inputs {
            return Err(format!(
                "{ENTRY} names {} inputs, but the graph has {inputs}: write the file with baton.export",
                self.inputs.len()
            ));
        }
        let names = self.class_names.len() as u64;
        if let ([output], 1..) = (outputs, names)
            && output.shape.last().copied().flatten() != Some(names)
        {
            return Err(format!(
                "{ENTRY} names {names} classes, but the program returns {}: write the file with baton.export",
                crate::program::shape_text(&output.shape)
            ));
        }
        Ok(())
    }
}

impl JsonMetadata {
    fn check(self) -> Result<ExportMetadata, String> {
        let inputs: Vec<String> = self.inputs.into_iter().map(|input| input.name).collect();
        // They are printed: nothing may change a terminal or begin a new line.
        if inputs.iter().chain(&self.class_names).any(|name| name.contains(char::is_control)) {
            return Err("a name has a control character".to_owned());
        }
        let normalisation = match (self.mean, self.std) {
            (None, None) => None,
            (Some(mean), Some(std)) => Some(Normalisation { mean, std }),
            _ => return Err("mean and std go together".to_owned()),
        };
        // JSON has no infinities and no NaN.
        if normalisation.is_some_and(|Normalisation { std, .. }| std.iter().any(|std| *std <= 0.0))
        {
            return Err("std must be above 0".to_owned());
        }
        Ok(ExportMetadata { task: self.task, inputs, class_names: self.class_names, normalisation })
    }
}
