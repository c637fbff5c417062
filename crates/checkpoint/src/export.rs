//! A checkpoint's weights as a file that PyTorch reads.

use std::{collections::HashMap, path::Path};

use safetensors::{Dtype, tensor::TensorView};

use crate::{Error, Manifest, Store, TensorInfo, folder::write_whole};

/// Which of a checkpoint's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Those that are trained.
    Raw,
    /// Their moving average, with that of the BatchNorm statistics.
    Averaged,
}

impl Weights {
    /// Where they lie that the manifest's tensors have in `region`.
    fn region(self, region: &str) -> &str {
        match (self, region) {
            (Self::Averaged, "weights") => "ema",
            (Self::Averaged, "bn_running") => "bn_running_ema",
            _ => region,
        }
    }
}

/// Writes the weights and BatchNorm statistics of a checkpoint as safetensors with torchvision's names
/// and shapes, all f32 and contiguous, plus an int64 `num_batches_tracked` for each BatchNorm layer:
/// what torchvision's `load_state_dict` expects. The file appears in one piece.
///
/// # Errors
/// The checkpoint is damaged, or holds no named tensors or no average; the file cannot be written.
pub fn safetensors(
    store: &Store,
    manifest: &Manifest,
    weights: Weights,
    out: &Path,
) -> Result<(), Error> {
    let refused = |problem: String| Error::Export { path: out.display().to_string(), problem };
    if manifest.tensors.is_empty() {
        return Err(refused(format!("checkpoint {} names no tensors", manifest.name())));
    }
    let has = |name: &str| manifest.regions.iter().any(|region| region.name == name);
    if weights == Weights::Averaged && !has("ema") {
        return Err(refused(format!(
            "checkpoint {} holds no averaged weights, as its recipe has no [ema]",
            manifest.name()
        )));
    }
    let exported =
        |name: &str| manifest.tensors.iter().any(|tensor| weights.region(&tensor.region) == name);
    let mut regions: HashMap<&str, Vec<f32>> = manifest
        .regions
        .iter()
        .filter(|region| exported(&region.name))
        .map(|region| (region.name.as_str(), vec![0.0; region.len]))
        .collect();
    store.load(manifest, &mut |name, offset, values| {
        if let Some(region) = regions.get_mut(name) {
            region[offset..offset + values.len()].copy_from_slice(values);
        }
    })?;
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for tensor in &manifest.tensors {
        let values = regions.get(weights.region(&tensor.region)).zip(tensor.len());
        let values = values.and_then(|(all, len)| all.get(tensor.offset..tensor.offset + len));
        let values =
            values.ok_or_else(|| refused(format!("{} lies outside its region", tensor.name)))?;
        let bytes = bytemuck::cast_slice(&contiguous(tensor, values)).to_vec();
        tensors.push((tensor.name.clone(), Dtype::F32, tensor.shape.clone(), bytes));
        if let Some(layer) = tensor.name.strip_suffix("running_mean") {
            let steps = i64::try_from(manifest.step.0).unwrap_or(i64::MAX).to_le_bytes().to_vec();
            tensors.push((format!("{layer}num_batches_tracked"), Dtype::I64, Vec::new(), steps));
        }
    }
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes)?))
    });
    let views: Result<Vec<_>, safetensors::SafeTensorError> = views.collect();
    let encoded = views.and_then(|views| safetensors::serialize(views, None));
    let bytes = encoded.map_err(|error| refused(error.to_string()))?;
    write_whole(out, &bytes).map_err(|error| refused(error.to_string()))
}

/// The values in the order of `tensor.shape`.
fn contiguous(tensor: &TensorInfo, values: &[f32]) -> Vec<f32> {
    // Two spatial dimensions in images, one in signals.
    let [outputs, inputs, places @ ..] = tensor.shape.as_slice() else { return values.to_vec() };
    if !tensor.channels_last {
        return values.to_vec();
    }
    let (outputs, inputs, places) = (*outputs, *inputs, places.iter().product::<usize>());
    let mut out = Vec::with_capacity(values.len());
    for o in 0..outputs {
        for i in 0..inputs {
            for place in 0..places {
                out.push(values[(o * places + place) * inputs + i]);
            }
        }
    }
    out
}
