//! A rank's part of the state, copied while training stands still and written while it goes on.

use std::sync::Arc;

use bytes::Bytes;
use safetensors::{Dtype, tensor::TensorInfo};

use crate::shard::encode_header;

/// Files hold little-endian values, as safetensors wants; memory is written as it lies.
#[cfg(target_endian = "big")]
compile_error!("Baton writes its memory as it lies, which has to be little-endian");

/// Copies of a rank's slices of all regions. Their memory is used again by the next save, so that a rank
/// needs the size of its slices once, however often it saves.
#[derive(Debug, Default)]
pub struct Snapshot {
    slices: Vec<Slice>,
}

#[derive(Debug)]
struct Slice {
    region: String,
    values: Arc<Values>,
}

#[derive(Debug, Default)]
struct Values(Vec<f32>);

impl AsRef<[u8]> for Values {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

impl Snapshot {
    /// Room for `len` values of `region`, to be overwritten.
    pub fn slice(&mut self, region: &str, len: usize) -> &mut [f32] {
        let known = self.slices.iter().position(|slice| slice.region == region);
        let index = known.unwrap_or_else(|| {
            let (region, values) = (region.to_owned(), Arc::default());
            self.slices.push(Slice { region, values });
            self.slices.len() - 1
        });
        let values = &mut self.slices[index].values;
        // An upload that was given up may still hold the old memory.
        if Arc::get_mut(values).is_none() {
            *values = Arc::default();
        }
        let Some(Values(values)) = Arc::get_mut(values) else { return &mut [] };
        values.resize(len, 0.0);
        values
    }

    /// The slice of each region.
    pub fn values(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.slices.iter().map(|slice| (slice.region.as_str(), slice.values.0.as_slice()))
    }

    /// As a safetensors file, in pieces that lie where they lay.
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
            self.slices.iter().map(|slice| Bytes::from_owner(Shared(slice.values.clone()))),
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

/// `Bytes` wants an owner that is the memory itself.
struct Shared(Arc<Values>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().as_ref()
    }
}
