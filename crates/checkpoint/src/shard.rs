//! A shard: the file written by one rank. It is a safetensors file: 8 bytes of header length, a JSON header padded
//! to a multiple of 8 bytes, the values.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use baton_job::Rank;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::Float;

/// Maximum size of a header, in bytes. The header of a shard lists a few regions only.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Size of the header length at the start of a file, in bytes.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// The slice of a region of `len` values that `rank` of `world_size` writes. The slices are contiguous; if `len` is
/// not divisible by `world_size`, the first slices are one value longer.
#[must_use]
pub fn slice_of(len: usize, rank: Rank, world_size: u32) -> Range<usize> {
    let world = world_size.max(1) as usize;
    let (share, longer) = (len / world, len % world);
    // A rank outside the world gets an empty slice, not a range outside the region.
    let start = |rank: usize| rank.min(world) * share + rank.min(longer);
    start(rank.0 as usize)..start(rank.0 as usize + 1)
}

/// The header length and header of a file that contains `tensors`.
pub(crate) fn encode_header(tensors: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, String> {
    let mut names = HashSet::new();
    if let Some((name, _)) = tensors.iter().find(|(name, _)| !names.insert(name)) {
        return Err(format!("two tensors have the name {name}"));
    }
    let metadata = Metadata::new(None::<HashMap<String, String>>, tensors);
    let metadata = metadata.map_err(|error| error.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes(), json.as_slice()].concat())
}

/// The parsed header of a shard.
#[derive(Clone, Debug)]
pub struct ShardHeader {
    tensors: Metadata,
    end: u64,
}

impl ShardHeader {
    /// Parses the header at the start of a file of `file_bytes` bytes.
    ///
    /// # Errors
    /// A description of the problem: it is not a safetensors header, or does not match the length of the file.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Self, String> {
        let end = Self::end(bytes, file_bytes)?;
        let header = usize::try_from(end).ok().and_then(|end| bytes.get(..end));
        let json = header.ok_or("its header is truncated")?;
        let tensors: Metadata = serde_json::from_slice(&json[LENGTH_BYTES as usize..])
            .map_err(|error| format!("its header cannot be read ({error})"))?;
        if end.checked_add(tensors.data_len() as u64) != Some(file_bytes) {
            return Err("its header does not match the size of the file".to_owned());
        }
        Ok(Self { tensors, end })
    }

    /// Position of the first byte after the header.
    pub(crate) fn end(bytes: &[u8], file_bytes: u64) -> Result<u64, String> {
        let (length, _) = bytes.split_first_chunk().ok_or("it is too short for a header")?;
        let length = u64::from_le_bytes(*length);
        match length.checked_add(LENGTH_BYTES) {
            Some(end) if length <= MAX_HEADER_BYTES && end <= file_bytes => Ok(end),
            _ => Err(format!("its header cannot have {length} bytes")),
        }
    }

    /// The byte range of the file that contains the `len` values of a region.
    ///
    /// # Errors
    /// A description of the problem: the region is missing, or has another type or length.
    pub fn byte_range(&self, region: &str, float: Float, len: usize) -> Result<Range<u64>, String> {
        let info = self.tensors.info(region).ok_or_else(|| format!("it has no region {region}"))?;
        let expected = float.dtype();
        if info.dtype != expected || info.shape != [len] {
            let (dtype, shape) = (info.dtype, &info.shape);
            return Err(format!(
                "region {region} is {dtype:?} of {shape:?}, not {expected:?} of {len}"
            ));
        }
        let (start, end) = info.data_offsets;
        // Files are read in blocks that must contain whole values.
        if !(self.end + start as u64).is_multiple_of(4) {
            return Err(format!("region {region} is not aligned to 4 bytes"));
        }
        Ok(self.end + start as u64..self.end + end as u64)
    }
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
