//! The manifest: description of a checkpoint's content.

use std::{collections::HashMap, fmt};

use baton_job::{Generation, JobId, Rank, message::Commit};
use baton_recipe::{
    JobSpec, Step,
    data_summary::DataSummary,
    progress::{Accuracy, Outdated, Progress, better},
};
use serde::{Deserialize, Serialize};

use crate::{
    ALIGNMENT, Error, FlatRegion, Float, FrozenEntry, NewerVersion, SaveId, StateLayout,
    shard::slice_of,
};

/// Format version that this build writes, and the newest version that it can read.
///
/// | version | added fields |
/// |---|---|
/// | 1 | |
/// | 2 | `layout`, `frozen`; later the optional `train_samples`, `program` and `data` |
pub const VERSION: u32 = 2;

/// Maximum size of a manifest, bytes. The manifest of a ResNet-152 with 8 shards has about 150 kB.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// The commit record of one checkpoint: a JSON file whose last field, `blake3`, is the digest of the text
/// before it. [`Store::add_evaluation`](crate::Store::add_evaluation) can replace `progress` after the commit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version.
    pub version: u32,
    /// The job that wrote the checkpoint.
    pub job: JobId,
    /// Name of the network in the recipe.
    pub arch: String,
    /// The recipe as JSON.
    pub recipe: String,
    /// The generation that wrote the checkpoint.
    pub generation: Generation,
    /// Number of updates made.
    pub step: Step,
    /// The position of training.
    pub progress: Progress,
    /// Number of samples of the training set, in checkpoints from before `data`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train_samples: Option<u64>,
    /// The data that the state was trained with; absent if the writer did not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataSummary>,
    /// Digest of the network's program, if its definition is a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Seed of all random numbers of the run.
    pub seed: u64,
    /// Number of virtual ranks, the fixed parts of every global batch.
    pub virtual_ranks: u32,
    /// Number of ranks that wrote the checkpoint, and of shards.
    pub world_size: u32,
    /// Number of the tensors' layout in the regions: [`StateLayout::version`].
    #[serde(default = "first_layout")]
    pub layout: u32,
    /// The state's flat f32 buffers.
    pub regions: Vec<RegionInfo>,
    /// Frozen regions, in files that other checkpoints share.
    #[serde(default)]
    pub frozen: Vec<FrozenEntry>,
    /// Named tensors in the regions and frozen regions.
    pub tensors: Vec<TensorInfo>,
    /// The files, in the order of ranks.
    pub shards: Vec<ShardEntry>,
    /// Time of the commit, seconds since 1970-01-01 UTC.
    pub created_unix_seconds: u64,
}

/// The layout of every manifest of version 1.
fn first_layout() -> u32 {
    1
}

/// A flat f32 buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionInfo {
    /// Name, e.g. `weights`.
    pub name: String,
    /// Number of values.
    pub len: usize,
}

/// A named tensor in a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Name in torchvision.
    pub name: String,
    /// Shape in torchvision; four dimensions are OIHW.
    pub shape: Vec<usize>,
    /// The region that contains the tensor.
    pub region: String,
    /// Position of the first value in the region, in values.
    pub offset: usize,
    /// Whether the values are stored in OHWI order.
    pub channels_last: bool,
    /// The type in PyTorch, if that is not floating-point; older versions do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub integers: Option<baton_model::Integers>,
}

impl TensorInfo {
    /// Number of values; `None` if the product of the shape overflows.
    pub(crate) fn len(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |len, side| len.checked_mul(*side))
    }
}

/// One rank's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name in the checkpoint's folder.
    pub file: String,
    /// Size, bytes.
    pub bytes: u64,
    /// BLAKE3 digest, hex.
    pub blake3: String,
    /// The rank that wrote the file.
    pub rank: Rank,
}

/// A file of a checkpoint.
#[derive(Debug)]
pub(crate) struct FileInfo {
    /// Name of the checkpoint.
    checkpoint: String,
    /// Path in the store.
    pub(crate) path: String,
    /// Name for messages.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) blake3: String,
}

impl FileInfo {
    /// The file of a frozen region.
    pub(crate) fn frozen(checkpoint: &str, frozen: &FrozenEntry) -> Self {
        let (checkpoint, path) = (checkpoint.to_owned(), frozen.path());
        let (name, bytes, blake3) = (path.clone(), frozen.bytes, frozen.blake3.clone());
        Self { checkpoint, path, name, bytes, blake3 }
    }

    pub(crate) fn damaged(&self, what: impl fmt::Display) -> Error {
        let problem = format!("{}{what}", self.name);
        Error::Damaged { name: self.checkpoint.clone(), problem }
    }
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

    /// A rank's file.
    pub(crate) fn shard(&self, shard: &ShardEntry) -> FileInfo {
        let checkpoint = self.name();
        let path = format!("{checkpoint}/{}", shard.file);
        let (name, bytes, blake3) = (shard.file.clone(), shard.bytes, shard.blake3.clone());
        FileInfo { checkpoint, path, name, bytes, blake3 }
    }

    /// All files except the manifest: first the files of this checkpoint only, then files that others may share.
    pub(crate) fn files(&self) -> impl Iterator<Item = FileInfo> {
        let name = self.name();
        let frozen = self.frozen.iter().map(move |frozen| FileInfo::frozen(&name, frozen));
        self.shards.iter().map(|shard| self.shard(shard)).chain(frozen)
    }

    /// Total size of the shards, which only this checkpoint uses, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).fold(0, u64::saturating_add)
    }

    /// Total size of all files, including those that other checkpoints share, bytes.
    #[must_use]
    pub fn all_bytes(&self) -> u64 {
        self.frozen.iter().map(|frozen| frozen.bytes).fold(self.bytes(), u64::saturating_add)
    }

    /// The regions and tensors of the state.
    #[must_use]
    pub fn state_layout(&self) -> StateLayout {
        let regions = self.regions.iter().map(|region| FlatRegion {
            name: region.name.clone(),
            float: Float::F32,
            len: region.len,
            frozen: false,
        });
        let frozen = self.frozen.iter().map(|frozen| FlatRegion {
            name: frozen.region.clone(),
            float: frozen.float,
            len: frozen.len,
            frozen: true,
        });
        StateLayout { regions: regions.chain(frozen).collect(), tensors: self.tensors.clone() }
    }

    /// Accuracy of exactly this state; `None` if it was not evaluated.
    #[must_use]
    pub fn accuracy(&self) -> Option<&Accuracy> {
        let progress = &self.progress;
        let here = progress.cursor == 0 && progress.evaluated == Some(progress.epoch);
        progress.last_evaluation.as_ref().filter(|_| here)
    }

    /// The score for comparing checkpoints: accuracy of the better of raw and averaged weights.
    #[must_use]
    pub fn best_accuracy(&self) -> Option<&Accuracy> {
        Some(better(self.accuracy()?, self.progress.last_ema.as_ref()))
    }

    /// Which results in this checkpoint cannot be compared with those of a run with this recipe, data and program.
    #[must_use]
    pub fn outdated_in(
        &self,
        spec: &JobSpec,
        data: Option<&DataSummary>,
        program: Option<&str>,
    ) -> Outdated {
        let of = |spec: &JobSpec| (spec.data.train.clone(), spec.data.val.clone());
        // An older version did not record what the sets hold.
        let has_other_sets = self.data.is_none()
            && JobSpec::from_saved(&self.recipe).is_ok_and(|saved| of(&saved) != of(spec));
        let by_paths = if has_other_sets { Outdated::Evaluations } else { Outdated::Nothing };
        spec.outdates(&self.recipe).max(by_paths).max(self.outdated_by_files(data, program))
    }

    /// The same, if only the contents of the data sets and the program may differ.
    fn outdated_by_files(&self, data: Option<&DataSummary>, program: Option<&str>) -> Outdated {
        if self.program.as_deref().is_some_and(|digest| program != Some(digest)) {
            return Outdated::Evaluations;
        }
        match (&self.data, data) {
            (Some(old), Some(new)) if new.val.difference(&old.val).is_some() => {
                Outdated::Evaluations
            }
            (Some(old), Some(new)) if new.train.difference(&old.train).is_some() => Outdated::Loss,
            _ => Outdated::Nothing,
        }
    }

    /// Whether evaluations in both can be compared: those of this one did not begin anew since the older one.
    pub(crate) fn is_comparable_with(&self, older: &Self) -> bool {
        let (data, program) = (self.data.as_ref(), self.program.as_deref());
        let outdated = match self.recipe == older.recipe {
            // Usual, and then it need not be one that this version can read.
            true => older.outdated_by_files(data, program),
            false => JobSpec::from_saved(&self.recipe)
                .map_or(Outdated::Evaluations, |spec| older.outdated_in(&spec, data, program)),
        };
        outdated != Outdated::Evaluations
    }

    /// The report of this commit.
    #[must_use]
    pub fn to_commit(&self) -> Commit {
        Commit {
            name: self.name(),
            generation: self.generation,
            step: self.step,
            accuracy: self.accuracy().cloned(),
            bytes: self.bytes(),
            took: None,
            fence_lost: false,
        }
    }

    /// JSON text that was checked to be readable.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        let not_committable = |problem| Error::NotCommittable { name: self.name(), problem };
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| not_committable(error.to_string()))?;
        let text = Self::seal(&text);
        if text.len() as u64 > MAX_BYTES {
            return Err(not_committable(format!("its manifest has more than {MAX_BYTES} bytes")));
        }
        // JSON has no NaN: a run that diverged must not leave an unreadable manifest.
        Self::parse(self.id(), text.as_bytes()).map_err(|error| {
            not_committable(format!(
                "it could not be read again, is an accuracy not finite? ({error})"
            ))
        })?;
        Ok(text.into_bytes())
    }

    /// Appends the digest of the JSON text, without which it cannot be parsed: JSON with a flipped bit may still be valid.
    #[must_use]
    pub fn seal(json: &str) -> String {
        let json = json.trim_end();
        let text = json.strip_suffix('}').unwrap_or(json).trim_end();
        format!("{text}{SEAL}{}{END}", blake3::hash(text.as_bytes()).to_hex())
    }

    /// Parses the manifest from the folder of `id` and checks that it is consistent. Does not check the files.
    ///
    /// # Errors
    /// [`Error::Damaged`] with what is wrong; [`Error::NewerVersion`].
    pub fn parse(id: SaveId, bytes: &[u8]) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct VersionField {
            version: u32,
        }
        let damaged = |problem| Error::Damaged { name: id.name(), problem };
        if !is_sealed(bytes) {
            return Err(damaged("its manifest does not match its digest".to_owned()));
        }
        let found: VersionField = serde_json::from_slice(bytes)
            .map_err(|error| damaged(format!("its manifest has no valid version ({error})")))?;
        if found.version > VERSION {
            let version = NewerVersion { found: found.version, supported: VERSION };
            return Err(Error::NewerVersion { name: id.name(), version });
        }
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|error| damaged(format!("its manifest cannot be parsed ({error})")))?;
        if manifest.id() != id {
            return Err(damaged(format!("its manifest belongs to {}", manifest.name())));
        }
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    /// Checks consistency. The sizes are untrusted input: no memory may be allocated for them unless the files are
    /// large enough.
    fn check(&self) -> Result<(), String> {
        if self.progress.step != self.step {
            return Err(format!("its progress belongs to step {}", self.progress.step));
        }
        let regions = self.regions.iter().map(|region| (&region.name, region.len));
        let frozen = self.frozen.iter().map(|frozen| (&frozen.region, frozen.len));
        let mut lens = HashMap::new();
        for (name, len) in regions.chain(frozen) {
            if lens.insert(name, len).is_some() {
                return Err(format!("region {name} is listed twice"));
            }
        }
        let ranks = (0..self.world_size).map(Rank);
        if self.world_size == 0 || !self.shards.iter().map(|shard| shard.rank).eq(ranks) {
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
                return Err(format!("{:?} is not a file name", shard.file));
            }
        }
        for frozen in &self.frozen {
            let bytes = frozen.len.checked_mul(frozen.float.bytes()).map(|bytes| bytes as u64);
            if bytes.is_none_or(|bytes| bytes > frozen.bytes || !bytes.is_multiple_of(4)) {
                return Err(format!("{} cannot hold {} values", frozen.path(), frozen.len));
            }
            // The digest is used as a file name, so it must be valid hex.
            if blake3::Hash::from_hex(&frozen.blake3).is_err() {
                return Err(format!("{:?} is not a digest", frozen.blake3));
            }
        }
        let is_aligned = self.layout > first_layout() || !self.frozen.is_empty();
        for tensor in &self.tensors {
            if is_aligned && !tensor.offset.is_multiple_of(ALIGNMENT) {
                let name = &tensor.name;
                return Err(format!("tensor {name} does not begin at a multiple of {ALIGNMENT}"));
            }
            let len = tensor.len();
            if len == Some(0) {
                // Its region may have no values either, and is left out then.
                continue;
            }
            let end = len.and_then(|len| len.checked_add(tensor.offset));
            let fits = lens.get(&tensor.region).zip(end).is_some_and(|(len, end)| end <= *len);
            if !fits {
                return Err(format!("tensor {} is outside region {}", tensor.name, tensor.region));
            }
        }
        Ok(())
    }
}

/// The text between a manifest's content and its digest. The digest is the last field in every version, so that
/// a newer manifest can be distinguished from a damaged one.
const SEAL: &str = ",\n  \"blake3\": \"";
const END: &str = "\"\n}";

pub(crate) fn is_sealed(bytes: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(bytes) else { return false };
    let Some((text, digest)) = text.rsplit_once(SEAL) else { return false };
    digest.strip_suffix(END) == Some(blake3::hash(text.as_bytes()).to_hex().as_str())
}
