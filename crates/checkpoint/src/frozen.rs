//! State that training leaves as it is, such as the weights of frozen blocks: written once, under the name of
//! its digest, for all checkpoints that hold it.
//!
//! Removing such a file is safe where no checkpoint refers to it and none is being saved, so it stays while any
//! save is unfinished and while any manifest cannot be read. One case is left: a job that was just replaced
//! removes a file at the moment when its successor, begun anew, writes the very same one. Then that save fails,
//! and the next one writes the file again.

use std::collections::HashSet;

use bytes::Bytes;
use object_store::{ObjectMeta, path::Path};
use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};

use crate::{
    EntryState, Error, Float, SaveId, Store, manifest::FileInfo, name::FROZEN, shard::encode_header,
};

/// A region that training leaves as it is, in a file of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenEntry {
    /// Its name, e.g. `frozen`.
    pub region: String,
    /// The type of its values.
    pub float: Float,
    /// Number of values.
    pub len: usize,
    /// Size of its file.
    pub bytes: u64,
    /// BLAKE3 digest of its file, hex; the file is called after it.
    pub blake3: String,
}

impl FrozenEntry {
    /// Where its file lies in the store.
    pub(crate) fn path(&self) -> String {
        format!("{FROZEN}/{}.safetensors", self.blake3)
    }
}

impl Store {
    /// Writes a region that training leaves as it is, given as 32-bit words, unless it is there. To be called
    /// once a file of the save is there, which keeps others from removing this one.
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
            .map_err(|problem| Error::Unfit { name: save.name(), problem })?;
        let digest = blake3::Hasher::new().update(&header).update(values).finalize();
        let bytes = (header.len() + values.len()) as u64;
        let blake3 = digest.to_hex().to_string();
        let entry = FrozenEntry { region: region.to_owned(), float, len, bytes, blake3 };
        // Read, not looked for: all checkpoints to come rely on it.
        if self.read_proven(&FileInfo::frozen(&save.name(), &entry), &mut |_, _| {}).is_err() {
            let values = Bytes::from_owner(Words(words));
            self.write_large(&entry.path(), vec![header.into(), values])?;
        }
        Ok(entry)
    }

    /// The files that no checkpoint needs; none while one may be about to need some.
    fn unused_frozen(&self) -> Result<Vec<ObjectMeta>, Error> {
        // Listed first: what is written from now on is not among them.
        let mut files = self.files(FROZEN)?;
        if files.is_empty() {
            return Ok(files);
        }
        let mut used = HashSet::new();
        for entry in self.list()? {
            let EntryState::Whole(manifest) = entry.state else { return Ok(Vec::new()) };
            used.extend(manifest.frozen.iter().map(|frozen| Path::from(frozen.path())));
        }
        files.retain(|file| !used.contains(&file.location));
        Ok(files)
    }

    /// Removes the files that no checkpoint needs any more, if `may` still says so once they are known. Their
    /// size in bytes.
    pub(crate) fn sweep_frozen(&self, may: impl Fn() -> Result<(), Error>) -> Result<u64, Error> {
        let unused = self.unused_frozen()?;
        may()?;
        for file in &unused {
            self.delete(&file.location)?;
        }
        Ok(unused.iter().map(|file| file.size).fold(0, u64::saturating_add))
    }
}

/// `Bytes` wants an owner that is the memory itself.
struct Words(Vec<f32>);

impl AsRef<[u8]> for Words {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}
