//! What a checkpoint holds.

use baton_job::{
    Generation, JobId, Rank, Step,
    message::Commit,
    progress::{Accuracy, Progress},
};
use serde::{Deserialize, Serialize};

use crate::{SaveId, shard::slice_of};

/// Format version that this build writes, and the newest it reads.
pub const VERSION: u32 = 1;

/// Largest manifest that is read. ResNet-152's, with 8 shards, has about 150 kB.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// The commit record of one checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version.
    pub version: u32,
    /// The job that wrote it.
    pub job: JobId,
    /// Network, by its recipe name.
    pub arch: String,
    /// `JobSpec::recipe_hash` of the recipe.
    pub recipe_hash: String,
    /// The recipe as JSON.
    pub recipe: String,
    /// The generation that wrote it.
    pub generation: Generation,
    /// Updates made.
    pub step: Step,
    /// The position of training.
    pub progress: Progress,
    /// Root of the random draws.
    pub seed: u64,
    /// Parts of every global batch.
    pub virtual_ranks: u32,
    /// Number of shards.
    pub world_size: u32,
    /// The state's flat f32 buffers.
    pub regions: Vec<RegionInfo>,
    /// Named tensors in the regions.
    pub tensors: Vec<TensorInfo>,
    /// The files, by rank.
    pub shards: Vec<ShardEntry>,
    /// When it was committed, seconds since 1970-01-01 UTC.
    pub created_unix_seconds: u64,
}

/// A flat f32 buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionInfo {
    /// Its name, e.g. `weights`.
    pub name: String,
    /// Number of values.
    pub len: usize,
}

/// A named tensor in a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// torchvision's name.
    pub name: String,
    /// torchvision's shape; four dimensions are OIHW.
    pub shape: Vec<usize>,
    /// The region that holds it.
    pub region: String,
    /// Its first value there.
    pub offset: usize,
    /// Whether the values lie in OHWI order.
    pub channels_last: bool,
}

impl TensorInfo {
    /// Number of values; `None` for a shape that no memory could hold.
    #[must_use]
    pub fn len(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |len, side| len.checked_mul(*side))
    }
}

/// One rank's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Its name in the checkpoint's folder.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Its BLAKE3 digest, hex.
    pub blake3: String,
    /// The rank whose slice it holds.
    pub rank: Rank,
}

impl Manifest {
    /// The checkpoint's identity.
    #[must_use]
    pub fn id(&self) -> SaveId {
        SaveId { generation: self.generation, step: self.step }
    }

    /// The checkpoint's name.
    #[must_use]
    pub fn name(&self) -> String {
        self.id().name()
    }

    /// Size of all shards.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).fold(0, u64::saturating_add)
    }

    /// Accuracy of exactly this state, if it was evaluated.
    #[must_use]
    pub fn accuracy(&self) -> Option<Accuracy> {
        let progress = &self.progress;
        let here = progress.cursor == 0 && progress.evaluated == Some(progress.epoch);
        progress.last_evaluation.filter(|_| here)
    }

    /// What is told about it.
    #[must_use]
    pub fn to_commit(&self) -> Commit {
        Commit {
            name: self.name(),
            generation: self.generation,
            step: self.step,
            accuracy: self.accuracy(),
            bytes: self.bytes(),
        }
    }

    /// Reads a manifest and checks that it makes sense by itself.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let head: Head = serde_json::from_slice(bytes)
            .map_err(|error| format!("its manifest is no manifest ({error})"))?;
        if head.version > VERSION {
            return Err(format!(
                "it has format version {} and this Baton knows {VERSION}: use a newer Baton",
                head.version
            ));
        }
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|error| format!("its manifest cannot be understood ({error})"))?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Sizes come from outside: nothing may be allocated for them unless the files are as large.
    fn check(&self) -> Result<(), String> {
        let ranks = (0..self.world_size).map(Rank);
        if !self.shards.iter().map(|shard| shard.rank).eq(ranks) {
            return Err(format!(
                "its manifest does not list one shard for each of {} ranks",
                self.world_size
            ));
        }
        for shard in &self.shards {
            let values = self.regions.iter().try_fold(0usize, |values, region| {
                values.checked_add(slice_of(region.len, shard.rank, self.world_size).len())
            });
            let bytes = values.and_then(|values| values.checked_mul(4)).map(|bytes| bytes as u64);
            if bytes.is_none_or(|bytes| bytes > shard.bytes) {
                return Err(format!("{} is too small for its part of the regions", shard.file));
            }
            if shard.file.contains('/') || shard.file.contains("..") {
                return Err(format!("{:?} is no file name", shard.file));
            }
        }
        for tensor in &self.tensors {
            let end = tensor.len().and_then(|len| len.checked_add(tensor.offset));
            let region = self.regions.iter().find(|region| region.name == tensor.region);
            let fits = region.zip(end).is_some_and(|(region, end)| end <= region.len);
            if !fits {
                return Err(format!(
                    "tensor {} does not lie in region {}",
                    tensor.name, tensor.region
                ));
            }
        }
        Ok(())
    }
}
