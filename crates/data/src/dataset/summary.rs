//! The digest of a data set that is computed at every start, so it reads little.

use baton_recipe::data_summary::{ContentDigest, SetSummary};

use super::{Dataset, Shard, Shards};
use crate::Error;

/// Up to this many bytes, all files of a set are read.
const WHOLE_SET_BYTES: u64 = 64 << 20;
/// Number of blocks that are read of a larger set. They are far apart: a network disk takes a millisecond for each.
const SAMPLED_BLOCKS: u64 = 128;
/// Size of a block, bytes.
const SAMPLED_BYTES: usize = 4096;
/// Number of bytes that are read at a time from a small set.
const READ_BYTES: usize = 1 << 20;

impl Dataset {
    /// What tells this set from others. Two sets of files above 64 MiB that differ only in values of equal length, at
    /// places that are not read here, have the same summary.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn summary(&self) -> Result<SetSummary, Error> {
        let (bytes, contents) = match &self.shards {
            Shards::Local(shards) => {
                let bytes = shards.iter().map(|shard| shard.beton.file_bytes()).sum();
                (bytes, ContentDigest::Files(digest(shards.iter().map(AsRef::as_ref), bytes)?))
            }
            Shards::Remote(_) => {
                let (bytes, tags) = self.set.tags();
                (bytes, ContentDigest::Objects(blake3::hash(tags.as_bytes()).to_string()))
            }
        };
        Ok(SetSummary { samples: self.len(), bytes, contents })
    }
}

/// The digest of files of `bytes` in total.
fn digest<'a>(
    shards: impl Iterator<Item = &'a Shard> + Clone,
    bytes: u64,
) -> Result<String, Error> {
    let mut digest = blake3::Hasher::new();
    if bytes <= WHOLE_SET_BYTES {
        for Shard { beton, .. } in shards {
            digest.update(&beton.file_bytes().to_le_bytes());
            let mut buffer = vec![0; READ_BYTES];
            for start in (0..beton.file_bytes()).step_by(READ_BYTES) {
                let part = (beton.file_bytes() - start).min(READ_BYTES as u64) as usize;
                beton.read_bytes(start, &mut buffer[..part])?;
                digest.update(&buffer[..part]);
            }
        }
        return Ok(digest.finalize().to_string());
    }
    let blocks = || Blocks { stride: bytes / SAMPLED_BLOCKS, next: 0 };
    let mut ahead = blocks();
    for Shard { beton, .. } in shards.clone() {
        ahead.of_file(beton.file_bytes(), |start| {
            beton.read_ahead(start, SAMPLED_BYTES as u64);
            Ok(())
        })?;
    }
    let mut blocks = blocks();
    for Shard { beton, .. } in shards {
        digest.update(&beton.file_bytes().to_le_bytes());
        digest.update(beton.head());
        blocks.of_file(beton.file_bytes(), |start| {
            let mut block = [0; SAMPLED_BYTES];
            beton.read_bytes(start, &mut block)?;
            digest.update(&block);
            Ok(())
        })?;
    }
    Ok(digest.finalize().to_string())
}

/// The blocks that are read, at equal distances over all files.
struct Blocks {
    stride: u64,
    /// Start of the next block, from the start of the next file.
    next: u64,
}

impl Blocks {
    /// Calls `read` with the start of every block in the next file, of `bytes`.
    fn of_file(
        &mut self,
        bytes: u64,
        mut read: impl FnMut(u64) -> Result<(), Error>,
    ) -> Result<(), Error> {
        while self.next + SAMPLED_BYTES as u64 <= bytes {
            read(self.next)?;
            self.next += self.stride;
        }
        self.next = self.next.saturating_sub(bytes);
        Ok(())
    }
}
