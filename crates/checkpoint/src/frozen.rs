//! Frozen state, which training does not change, such as the weights of frozen blocks: written once, named by its
//! digest, and shared by all checkpoints that contain it.
//!
//! Such a file can be removed safely if no checkpoint refers to it and no save is in progress. So it is kept while
//! any save is unfinished and while any manifest cannot be read. One race remains: a job that was just replaced
//! removes a file while its successor, started from scratch, writes the same file. Then that save fails, and the
//! next save writes the file again.

use std::collections::HashSet;

use bytes::Bytes;
use object_store::{ObjectMeta, path::Path};
use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};

use crate::{
    EntryState, Error, Float, SaveId, Store, manifest::FileInfo, name::FROZEN, shard::encode_header,
};

/// A frozen region and its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenEntry {
    /// Name of the region, e.g. `frozen`.
    pub region: String,
    /// The type of its values.
    pub float: Float,
    /// Number of values.
    pub len: usize,
    /// Size of the file, in bytes.
    pub bytes: u64,
    /// BLAKE3 digest of the file, in hex; also the name of the file.
    pub blake3: String,
}

impl FrozenEntry {
    /// Path of the file in the store.
    pub(crate) fn path(&self) -> String {
        format!("{FROZEN}/{}.safetensors", self.blake3)
    }
}

impl Store {
    /// Writes a frozen region, given as 32-bit words, unless its file exists. Call this after another file of the
    /// save was written: an unfinished save prevents the removal of frozen files.
    ///
    /// # Errors
    /// A newer generation has taken over; the file cannot be written.
    pub fn write_frozen(
        &self,
        save: &SaveId,
        region: &str,
        float: Float,
        words: Vec<f32>,
    ) -> Result<FrozenEntry, Error> {
        self.check_fence(save.generation)?;
        let values = bytemuck::cast_slice::<f32, u8>(&words);
        let len = values.len() / float.bytes();
        let info =
            TensorInfo { dtype: float.dtype(), shape: vec![len], data_offsets: (0, values.len()) };
        let header = encode_header(vec![(region.to_owned(), info)])
            .map_err(|problem| Error::NotCommittable { name: save.name(), problem })?;
        let digest = blake3::Hasher::new().update(&header).update(values).finalize();
        let bytes = (header.len() + values.len()) as u64;
        let blake3 = digest.to_hex().to_string();
        let entry = FrozenEntry { region: region.to_owned(), float, len, bytes, blake3 };
        // Verify the content, not only that the file exists: all later checkpoints depend on it.
        if self.read_verified(&FileInfo::frozen(&save.name(), &entry), &mut |_, _| {}).is_err() {
            let values = Bytes::from_owner(WordBuffer(words));
            self.write_large(&entry.path(), vec![header.into(), values])?;
        }
        Ok(entry)
    }

    /// The files that no checkpoint refers to; empty while an unfinished save or unreadable manifest may need some.
    fn unused_frozen(&self) -> Result<Vec<ObjectMeta>, Error> {
        // List the files first, so that files written from now on are not included.
        let mut files = self.files(FROZEN)?;
        if files.is_empty() {
            return Ok(files);
        }
        let mut used = HashSet::new();
        for entry in self.list()? {
            let EntryState::Complete(manifest) = entry.state else { return Ok(Vec::new()) };
            used.extend(manifest.frozen.iter().map(|frozen| Path::from(frozen.path())));
        }
        files.retain(|file| !used.contains(&file.location));
        Ok(files)
    }

    /// Removes the files that no checkpoint refers to, and returns their total size in bytes. `check` runs after
    /// they are determined and before they are removed; an error stops the removal.
    pub(crate) fn sweep_frozen(&self, check: impl Fn() -> Result<(), Error>) -> Result<u64, Error> {
        let unused = self.unused_frozen()?;
        check()?;
        for file in &unused {
            self.delete(&file.location)?;
        }
        Ok(unused.iter().map(|file| file.size).fold(0, u64::saturating_add))
    }
}

/// Owner of a buffer for `Bytes`, which needs `AsRef<[u8]>`.
struct WordBuffer(Vec<f32>);

impl AsRef<[u8]> for WordBuffer {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}
