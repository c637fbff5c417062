//! One region of a checkpoint's state, without the others.

use std::ops::Range;

use safetensors::{Dtype, tensor::Metadata};

use crate::{Error, Manifest, ShardEntry, Store, slice_of};

/// Largest header that is read. A shard's names a few regions.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// A file begins with the length of its header.
const LENGTH_BYTES: u64 = 8;

impl Store {
    /// All values of the region called `name`. They are taken as they lie; see [`prove`](Self::prove).
    ///
    /// # Errors
    /// There is no such region, or a file does not hold its part of it.
    pub fn read_region(&self, manifest: &Manifest, name: &str) -> Result<Vec<f32>, Error> {
        let damaged = |problem: String| Error::Damaged { name: manifest.name(), problem };
        let region = manifest.regions.iter().find(|region| region.name == name);
        let len = region.ok_or_else(|| damaged(format!("it has no region {name}")))?.len;
        let mut values = Vec::with_capacity(len);
        for shard in &manifest.shards {
            let slice = slice_of(len, shard.rank, manifest.world_size);
            let header = self.read_header(manifest, shard)?;
            let place = header
                .place(name, slice.len())
                .map_err(|problem| damaged(format!("{}: {problem}", shard.file)))?;
            // Blocks are whole numbers of values.
            self.read_blocks(&path(manifest, shard), place, &mut |block| {
                let words = block.as_chunks::<4>().0;
                values.extend(words.iter().map(|word| f32::from_le_bytes(*word)));
            })?;
        }
        Ok(values)
    }

    fn read_header(&self, manifest: &Manifest, shard: &ShardEntry) -> Result<ShardHeader, Error> {
        let damaged = |problem: String| Error::Damaged {
            name: manifest.name(),
            problem: format!("{}: {problem}", shard.file),
        };
        let file = path(manifest, shard);
        let mut bytes = Vec::new();
        self.read_blocks(&file, 0..LENGTH_BYTES, &mut |block| bytes.extend(block))?;
        let end = ShardHeader::end(&bytes, shard.bytes).map_err(damaged)?;
        self.read_blocks(&file, LENGTH_BYTES..end, &mut |block| bytes.extend(block))?;
        ShardHeader::parse(&bytes, shard.bytes).map_err(damaged)
    }
}

fn path(manifest: &Manifest, shard: &ShardEntry) -> String {
    format!("{}/{}", manifest.name(), shard.file)
}

/// What the first bytes of a shard's file say of the others.
#[derive(Clone, Debug)]
pub struct ShardHeader {
    tensors: Metadata,
    end: u64,
}

impl ShardHeader {
    /// Reads the header at the beginning of a file of so many bytes.
    ///
    /// # Errors
    /// It is no safetensors header, in words; or not that of a file of this length.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Self, String> {
        let end = Self::end(bytes, file_bytes)?;
        let whole = usize::try_from(end).ok().and_then(|end| bytes.get(..end));
        let json = whole.ok_or("its header is cut off")?;
        let tensors: Metadata = serde_json::from_slice(&json[LENGTH_BYTES as usize..])
            .map_err(|error| format!("its header cannot be read ({error})"))?;
        if end.checked_add(tensors.data_len() as u64) != Some(file_bytes) {
            return Err("its header is that of another file".to_owned());
        }
        Ok(Self { tensors, end })
    }

    /// The first byte behind the header.
    fn end(bytes: &[u8], file_bytes: u64) -> Result<u64, String> {
        let (length, _) = bytes.split_first_chunk().ok_or("it is too short for a header")?;
        let length = u64::from_le_bytes(*length);
        match length.checked_add(LENGTH_BYTES) {
            Some(end) if length <= MAX_HEADER_BYTES && end <= file_bytes => Ok(end),
            _ => Err(format!("its header cannot have {length} bytes")),
        }
    }

    /// The bytes of the file in which `len` f32 values of a region lie.
    ///
    /// # Errors
    /// The region is not there, or of another type or length, in words.
    pub fn place(&self, region: &str, len: usize) -> Result<Range<u64>, String> {
        let info = self.tensors.info(region).ok_or_else(|| format!("it has no region {region}"))?;
        if info.dtype != Dtype::F32 || info.shape != [len] {
            let (dtype, shape) = (info.dtype, &info.shape);
            return Err(format!("region {region} is {dtype:?} of {shape:?}, not f32 of {len}"));
        }
        let (start, end) = info.data_offsets;
        Ok(self.end + start as u64..self.end + end as u64)
    }
}
