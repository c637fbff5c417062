//! Which values a rank's file holds, and reading it. Writing is the [`Snapshot`](crate::Snapshot)'s.

use std::ops::Range;

use baton_job::Rank;
use safetensors::{Dtype, SafeTensors};

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

/// Hands every value of `bytes`, the whole file of `rank`, to `into(region, offset, values)`. See
/// [`ShardHeader`](crate::ShardHeader) for reading a part of it.
///
/// # Errors
/// It is no such file, in words.
pub fn decode(
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
        // In place wherever the file lies in memory as it should.
        match bytemuck::try_cast_slice(tensor.data()) {
            Ok(values) => into(&region.name, range.start, values),
            Err(_) => into(&region.name, range.start, &to_values(tensor.data())),
        }
    }
    Ok(())
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
