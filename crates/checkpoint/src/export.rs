//! Exports the weights of a checkpoint as a file that PyTorch can read.

use std::{
    borrow::Cow,
    cmp::Reverse,
    collections::HashMap,
    fs::OpenOptions,
    io::{self, BufWriter, Write},
    num::NonZeroUsize,
    path::Path,
};

use safetensors::{Dtype, tensor::TensorInfo as HeaderEntry};

pub use crate::Float;
use crate::{
    Error, Manifest, Store, TensorInfo, folder::write_whole, layout::average_of,
    shard::encode_header,
};

/// The weights to export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The trained weights.
    Raw,
    /// Moving averages of the weights and of the BatchNorm statistics.
    Averaged,
}

impl Weights {
    /// The region to read for tensors that the manifest lists in `region`.
    fn region(self, region: &str) -> &str {
        match self {
            Self::Averaged => average_of(region).unwrap_or(region),
            Self::Raw => region,
        }
    }
}

/// Writes the weights and BatchNorm statistics of a checkpoint as safetensors with torchvision's names
/// and shapes, contiguous; floating-point values have the type `float`, and others their own; plus an int64 `num_batches_tracked` for each
/// BatchNorm layer: what torchvision's `load_state_dict` expects. The file appears atomically. Memory
/// holds the exported values and one encoded tensor.
///
/// # Errors
/// The checkpoint is damaged, or has no named tensors or no averages; a value is too large for `float`;
/// the file cannot be written.
pub fn safetensors_as(
    float: Float,
    store: &Store,
    manifest: &Manifest,
    weights: Weights,
    out: &Path,
) -> Result<(), Error> {
    let refused = |problem: String| refused(out, problem);
    let all = WeightValues::read(store, manifest, weights, out)?;
    let mut tensors: Vec<Exported<'_>> = Vec::new();
    for tensor in &manifest.tensors {
        let values = all.slice(tensor);
        let values =
            values.ok_or_else(|| refused(format!("{} is outside its region", tensor.name)))?;
        tensors.push(Exported::Values { tensor, values });
        if let Some(layer) = tensor.name.strip_suffix("running_mean") {
            let steps = i64::try_from(manifest.step.0).unwrap_or(i64::MAX);
            tensors.push(Exported::Count { name: format!("{layer}num_batches_tracked"), steps });
        }
    }
    // The strictest alignment first, as safetensors' own writer does.
    let order = |tensor: &Exported<'_>| Reverse(tensor.dtype(float).1);
    tensors.sort_by(|a, b| (order(a), a.name()).cmp(&(order(b), b.name())));
    let header = header(&tensors, float).map_err(refused)?;
    let open = |options: &mut OpenOptions, path: &Path| options.open(path);
    let written = write_whole(out, open, |file| {
        let mut file = BufWriter::new(file);
        file.write_all(&header)?;
        tensors.iter().try_for_each(|tensor| tensor.write(float, &mut file))?;
        file.flush()
    });
    written.map_err(|error| refused(error.to_string()))
}

fn refused(out: &Path, problem: String) -> Error {
    Error::Export { path: out.display().to_string(), problem }
}

/// The weights of a checkpoint, in memory.
#[derive(Debug)]
pub struct WeightValues<'a> {
    manifest: &'a Manifest,
    weights: Weights,
    regions: HashMap<&'a str, Vec<f32>>,
}

impl<'a> WeightValues<'a> {
    /// Reads the weights, which are for `out`, and compares the digests of all files.
    ///
    /// # Errors
    /// The checkpoint is damaged, or has no named tensors or no averages.
    pub fn read(
        store: &Store,
        manifest: &'a Manifest,
        weights: Weights,
        out: &Path,
    ) -> Result<Self, Error> {
        if manifest.tensors.is_empty() {
            let problem = format!("checkpoint {} has no named tensors", manifest.name());
            return Err(refused(out, problem));
        }
        let has = |name: &str| manifest.regions.iter().any(|region| region.name == name);
        if weights == Weights::Averaged && !has("ema") {
            return Err(refused(
                out,
                format!(
                    "checkpoint {} has no averaged weights, because its recipe has no [ema]",
                    manifest.name()
                ),
            ));
        }
        store
            .verify(&[manifest], NonZeroUsize::MIN, &|_| {})
            .into_iter()
            .collect::<Result<(), _>>()?;
        let mut regions: HashMap<&str, Vec<f32>> = HashMap::new();
        for tensor in manifest.tensors.iter().filter(|tensor| tensor.len() != Some(0)) {
            let name = weights.region(&tensor.region);
            if !regions.contains_key(name) {
                regions.insert(name, store.read_region(manifest, name)?);
            }
        }
        Ok(Self { manifest, weights, regions })
    }

    /// The values of the tensor `name`, in the order of its shape.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Cow<'_, [f32]>> {
        let tensor = self.manifest.tensors.iter().find(|tensor| tensor.name == name)?;
        Some(contiguous(tensor, self.slice(tensor)?))
    }

    /// The values of a tensor as they are stored.
    fn slice(&self, tensor: &TensorInfo) -> Option<&[f32]> {
        if tensor.len() == Some(0) {
            return Some(&[]);
        }
        let all = self.regions.get(self.weights.region(&tensor.region))?;
        all.get(tensor.offset..tensor.offset.checked_add(tensor.len()?)?)
    }
}

/// One tensor of the exported file.
enum Exported<'a> {
    Values { tensor: &'a TensorInfo, values: &'a [f32] },
    Count { name: String, steps: i64 },
}

impl Exported<'_> {
    /// The type, and the size of a value in bytes.
    fn dtype(&self, float: Float) -> (Dtype, usize) {
        match self {
            Self::Values { tensor: TensorInfo { integers: Some(integers), .. }, .. } => {
                (integers.dtype(), integers.bytes())
            }
            Self::Values { .. } => (float.dtype(), float.bytes()),
            Self::Count { .. } => (Dtype::I64, size_of::<i64>()),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Values { tensor, .. } => &tensor.name,
            Self::Count { name, .. } => name,
        }
    }

    fn write(&self, float: Float, file: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Values { tensor, values } => {
                let values = contiguous(tensor, values);
                if let Some(integers) = tensor.integers {
                    return file.write_all(&integers.encode(&values));
                }
                let bytes = float.encode(&values).map_err(|value| {
                    let (name, dtype) = (&tensor.name, float.dtype());
                    io::Error::other(format!("{value} in {name} is too large for {dtype:?}"))
                })?;
                file.write_all(&bytes)
            }
            Self::Count { steps, .. } => file.write_all(&steps.to_le_bytes()),
        }
    }
}

/// The header of the exported file.
fn header(tensors: &[Exported<'_>], float: Float) -> Result<Vec<u8>, String> {
    let mut end = 0;
    let entries = tensors.iter().map(|tensor| {
        let (shape, len) = match tensor {
            Exported::Values { tensor, values } => (tensor.shape.clone(), values.len()),
            Exported::Count { .. } => (Vec::new(), 1),
        };
        let (dtype, bytes) = tensor.dtype(float);
        let start = end;
        end += len * bytes;
        (tensor.name().to_owned(), HeaderEntry { dtype, shape, data_offsets: (start, end) })
    });
    encode_header(entries.collect())
}

/// The values in the order of `tensor.shape`.
pub(crate) fn contiguous<'a>(tensor: &TensorInfo, values: &'a [f32]) -> Cow<'a, [f32]> {
    // Images have two spatial dimensions, signals have one.
    let [outputs, inputs, spatial @ ..] = tensor.shape.as_slice() else { return values.into() };
    if !tensor.channels_last {
        return values.into();
    }
    let (outputs, inputs, positions) = (*outputs, *inputs, spatial.iter().product::<usize>());
    let mut out = Vec::with_capacity(values.len());
    for o in 0..outputs {
        for i in 0..inputs {
            for position in 0..positions {
                out.push(values[(o * positions + position) * inputs + i]);
            }
        }
    }
    out.into()
}
