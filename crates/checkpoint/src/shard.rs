//! One rank's slice of the state as a safetensors file.

use std::ops::Range;

use baton_job::Rank;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::manifest::Manifest;

/// The slice of a region of `len` values that `rank` of `world_size` writes: contiguous, the first
/// ones longer by one where the numbers do not divide.
#[must_use]
pub fn slice_of(len: usize, rank: Rank, world_size: u32) -> Range<usize> {
    let world = world_size.max(1) as usize;
    let (share, longer) = (len / world, len % world);
    // A rank beyond the world gets nothing, rather than a range beyond the region.
    let start = |rank: usize| rank.min(world) * share + rank.min(longer);
    start(rank.0 as usize)..start(rank.0 as usize + 1)
}

/// A rank's slice of one region.
#[derive(Clone, Copy, Debug)]
pub struct RegionSlice<'a> {
    /// The region.
    pub name: &'a str,
    /// The slice.
    pub values: &'a [f32],
}

/// The file's bytes.
pub(crate) fn encode(slices: &[RegionSlice<'_>]) -> Result<Vec<u8>, String> {
    // The safetensors crate panics on a name given twice.
    for (i, slice) in slices.iter().enumerate() {
        if slices[..i].iter().any(|other| other.name == slice.name) {
            return Err(format!("region {} is there twice", slice.name));
        }
    }
    serialize(slices).map_err(|error| error.to_string())
}

fn serialize(slices: &[RegionSlice<'_>]) -> Result<Vec<u8>, safetensors::SafeTensorError> {
    let bytes: Vec<(&str, Vec<u8>)> =
        slices.iter().map(|slice| (slice.name, to_bytes(slice.values))).collect();
    let views = bytes.iter().zip(slices).map(|((name, bytes), slice)| {
        Ok((*name, TensorView::new(Dtype::F32, vec![slice.values.len()], bytes)?))
    });
    let views: Vec<(&str, TensorView<'_>)> =
        views.collect::<Result<_, safetensors::SafeTensorError>>()?;
    safetensors::serialize(views, None)
}

/// Hands every value of the file of `rank` to `into(region, offset, values)`.
pub(crate) fn decode(
    bytes: &[u8],
    manifest: &Manifest,
    rank: Rank,
    into: &mut dyn FnMut(&str, usize, &[f32]),
) -> Result<(), String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    for region in &manifest.regions {
        let range = slice_of(region.len, rank, manifest.world_size);
        let tensor = tensors.tensor(&region.name).map_err(|error| error.to_string())?;
        let right = tensor.dtype() == Dtype::F32 && tensor.shape() == [range.len()];
        if !right {
            return Err(format!(
                "region {} is {:?} of {:?}, not f32 of {}",
                region.name,
                tensor.dtype(),
                tensor.shape(),
                range.len()
            ));
        }
        into(&region.name, range.start, &to_values(tensor.data()));
    }
    Ok(())
}

pub(crate) fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn to_values(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.as_chunks::<4>().0;
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn slices_cover_a_region_exactly(len in 0usize..10_000, world in 1u32..70) {
            let mut next = 0;
            for rank in 0..world {
                let slice = slice_of(len, Rank(rank), world);
                prop_assert_eq!(slice.start, next);
                next = slice.end;
            }
            prop_assert_eq!(next, len);
            prop_assert!(slice_of(len, Rank(world), world).is_empty());
        }
    }
}
