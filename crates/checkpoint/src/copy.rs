//! A checkpoint from one store in another.

use bytes::Bytes;
use object_store::PutMode;

use crate::{
    Error, Manifest, Store,
    manifest::{FileInfo, MAX_BYTES},
    name::{LATEST, MANIFEST},
    proof::DIGEST_DIFFERS,
    store::taken,
};

/// What copying did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Files written, the manifest not among them.
    pub written: usize,
    /// Files that an earlier copy had left, and that match their digests.
    pub kept: usize,
    /// Size of the written ones.
    pub written_bytes: u64,
    /// Whether the checkpoint was committed in the destination already. Then all is as it was.
    pub was_there: bool,
}

impl Store {
    /// Copies a checkpoint into the store `to`, under the same name, one file after the other: the
    /// manifest last and create-only. Each file is verified before it is written, and passed over if the
    /// destination holds it already. The destination's fence is raised to the checkpoint's generation, so
    /// that whoever goes on from there is newer. `progress` is told the bytes behind since it was last
    /// called, [`Manifest::all_bytes`] in all.
    ///
    /// # Errors
    /// The checkpoint is damaged; the destination holds another one of that name, or cannot be written.
    pub fn copy_to(
        &self,
        manifest: &Manifest,
        to: &Self,
        progress: &dyn Fn(u64),
    ) -> Result<Copied, Error> {
        let name = manifest.name();
        let path = format!("{name}/{MANIFEST}");
        let commit = self.read(&path, MAX_BYTES)?.ok_or_else(|| Error::Missing {
            name: name.clone(),
            location: self.location().to_owned(),
        })?;
        if to.holds_commit(&name, &path, &commit)? {
            progress(manifest.all_bytes());
            let kept = manifest.files().count();
            return Ok(Copied { kept, was_there: true, ..Copied::default() });
        }
        to.raise_fence(manifest.generation)?;
        let mut copied = Copied::default();
        for file in manifest.files() {
            match to.read_proven(&file, &mut |_, _| {}) {
                Ok(()) => copied.kept += 1,
                // Not there, or what an earlier copy left when it was cut off.
                Err(_) => {
                    let bytes = self.read_whole(&file)?;
                    to.write(&file.path, bytes.into(), PutMode::Overwrite)?;
                    copied.written += 1;
                    copied.written_bytes += file.bytes;
                }
            }
            progress(file.bytes);
        }
        if let Some(there) = to.create(&path, &commit)? {
            return Err(taken(manifest.id(), &there));
        }
        if to.ids()?.first() == Some(&manifest.id()) {
            // The copy stands without it: no reader relies on it.
            let _ = to.write(LATEST, format!("{name}\n").into(), PutMode::Overwrite);
        }
        Ok(copied)
    }

    /// A whole file, verified.
    fn read_whole(&self, file: &FileInfo) -> Result<Bytes, Error> {
        let bytes = self.read(&file.path, file.bytes)?;
        let bytes = bytes.ok_or_else(|| file.damaged(" is missing"))?;
        if blake3::hash(&bytes).to_hex().as_str() == file.blake3 {
            Ok(bytes)
        } else {
            Err(file.damaged(DIGEST_DIFFERS))
        }
    }

    /// Whether this very manifest is there.
    fn holds_commit(&self, name: &str, file: &str, commit: &Bytes) -> Result<bool, Error> {
        match self.read(file, MAX_BYTES)? {
            None => Ok(false),
            Some(there) if there == *commit => Ok(true),
            Some(_) => Err(Error::Exists(name.to_owned())),
        }
    }
}
