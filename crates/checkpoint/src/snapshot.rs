//! A rank's part of the state, copied while training is paused and written while training continues.

use std::sync::Arc;

use bytes::Bytes;
use safetensors::{Dtype, tensor::TensorInfo};

use crate::shard::encode_header;

/// safetensors files contain little-endian values, and memory is written without conversion.
#[cfg(target_endian = "big")]
compile_error!(
    "Baton writes memory to files without conversion, so it needs a little-endian machine"
);

/// Copies of a rank's slices of all regions. The next save reuses their memory, so a rank needs memory for one copy
/// of its slices, however often it saves.
#[derive(Debug, Default)]
pub struct Snapshot {
    slices: Vec<Slice>,
}

#[derive(Debug)]
struct Slice {
    region: String,
    values: Arc<SliceValues>,
}

#[derive(Debug, Default)]
struct SliceValues(Vec<f32>);

impl AsRef<[u8]> for SliceValues {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

impl Snapshot {
    /// The buffer for `len` values of `region`; the caller overwrites it.
    pub fn slice(&mut self, region: &str, len: usize) -> &mut [f32] {
        let known = self.slices.iter().position(|slice| slice.region == region);
        let index = known.unwrap_or_else(|| {
            let (region, values) = (region.to_owned(), Arc::default());
            self.slices.push(Slice { region, values });
            self.slices.len() - 1
        });
        let values = &mut self.slices[index].values;
        // An abandoned upload may still use the old memory.
        if Arc::get_mut(values).is_none() {
            *values = Arc::default();
        }
        let Some(SliceValues(values)) = Arc::get_mut(values) else { return &mut [] };
        values.resize(len, 0.0);
        values
    }

    /// The values of each region's slice.
    pub fn values(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.slices.iter().map(|slice| (slice.region.as_str(), slice.values.0.as_slice()))
    }

    /// Encodes a safetensors file, in pieces that refer to the values without copying them.
    pub(crate) fn encode(&self) -> Result<Vec<Bytes>, String> {
        let mut end = 0;
        let mut tensors = Vec::new();
        for Slice { region, values } in &self.slices {
            let (start, len) = (end, values.0.len());
            end += values.as_ref().as_ref().len();
            let info =
                TensorInfo { dtype: Dtype::F32, shape: vec![len], data_offsets: (start, end) };
            tensors.push((region.clone(), info));
        }
        let mut pieces = vec![Bytes::from(encode_header(tensors)?)];
        pieces.extend(
            self.slices.iter().map(|slice| Bytes::from_owner(SharedSlice(slice.values.clone()))),
        );
        Ok(pieces)
    }
}

impl<'a> FromIterator<(&'a str, &'a [f32])> for Snapshot {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a [f32])>>(slices: I) -> Self {
        let mut snapshot = Self::default();
        for (region, values) in slices {
            snapshot.slice(region, values.len()).copy_from_slice(values);
        }
        snapshot
    }
}

/// Owner of the memory for `Bytes`, which needs `AsRef<[u8]>`.
struct SharedSlice(Arc<SliceValues>);

impl AsRef<[u8]> for SharedSlice {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().as_ref()
    }
}
