//! The digest of a model's files, remembered beside them: a rank that replaces another starts without reading gigabytes only
//! to compare them.

use std::{
    fs::Permissions,
    io::{self, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use baton_fingerprint::{BootId, Fingerprint};
use serde::{Deserialize, Serialize};

use crate::{
    Error,
    source::{WeightSource, read_text},
};

/// Name of the file with the remembered digest.
const DIGEST_FILE: &str = "baton-digest.json";
/// A file that was changed a shorter time ago may be changed again without another change time.
const SETTLED: Duration = Duration::from_secs(2);

/// What a digest belongs to. If nothing of it has changed, the digest has not changed either.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ModelFiles {
    /// BLAKE3 digest of `config.json`.
    config: String,
    /// The files of weights.
    weights: Vec<WeightFile>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct WeightFile {
    name: String,
    bytes: u64,
    fingerprint: Fingerprint,
}

/// Content of [`DIGEST_FILE`].
#[derive(Debug, Serialize, Deserialize)]
struct DigestRecord {
    files: ModelFiles,
    digest: String,
}

/// The digest of a description and the files of weights.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn of_model(config: &str, source: &WeightSource) -> Result<String, Error> {
    of_model_at(config, source, SystemTime::now())
}

fn of_model_at(config: &str, source: &WeightSource, now: SystemTime) -> Result<String, Error> {
    let record = source.folder().join(DIGEST_FILE);
    // Before the content is read, so that a write in between changes the fingerprint.
    let files = model_files(config, source)?;
    let known = read_text(&record).ok();
    let known = known.and_then(|text| serde_json::from_str::<DigestRecord>(&text).ok());
    if let Some(known) = known.filter(|known| known.files == files) {
        return Ok(known.digest);
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(config.len() as u64).to_le_bytes());
    hasher.update(config.as_bytes());
    source.hash(&mut hasher)?;
    let digest = hasher.finalize().to_hex().to_string();
    if is_settled(source, now)? {
        // Best effort: without the record, the next start computes the digest again.
        let _ = write(&record, &DigestRecord { files, digest: digest.clone() });
    }
    Ok(digest)
}

fn model_files(config: &str, source: &WeightSource) -> Result<ModelFiles, Error> {
    let boot = BootId::current();
    let weights = source.metadata()?.into_iter().map(|(name, metadata)| WeightFile {
        name,
        bytes: metadata.len(),
        fingerprint: Fingerprint::of(&metadata, &boot),
    });
    Ok(ModelFiles {
        config: blake3::hash(config.as_bytes()).to_hex().to_string(),
        weights: weights.collect(),
    })
}

fn is_settled(source: &WeightSource, now: SystemTime) -> Result<bool, Error> {
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let changed = source.metadata()?.into_iter().map(|(_, metadata)| {
        Duration::from_secs(u64::try_from(metadata.ctime()).unwrap_or_default())
    });
    Ok(changed.max().is_none_or(|changed| changed + SETTLED < now))
}

fn write(path: &Path, record: &DigestRecord) -> io::Result<()> {
    let mut file = tempfile::Builder::new()
        .prefix(".baton-digest-")
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(path.parent().unwrap_or(path))?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LATER: Duration = Duration::from_secs(10);

    /// A file of one tensor with this value.
    fn write_weights(path: &Path, value: f32) {
        let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let length = (header.len() as u64).to_le_bytes();
        fs::write(path, [&length[..], header.as_bytes(), &value.to_le_bytes()].concat()).unwrap();
    }

    #[test]
    fn a_digest_is_remembered_until_a_file_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let (path, record) = (folder.path().join("w.safetensors"), folder.path().join(DIGEST_FILE));
        let digest = |config: &str, now: SystemTime| {
            of_model_at(config, &WeightSource::of_file(&path).unwrap(), now).unwrap()
        };
        write_weights(&path, 1.0);
        let first = digest("{}", SystemTime::now());
        assert!(!record.exists(), "the file has just been written");
        assert_eq!(digest("{}", SystemTime::now() + LATER), first);

        // Another digest in the record shows that the file is not read.
        let mut known: DigestRecord = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        known.digest = "remembered".to_owned();
        write(&record, &known).unwrap();
        assert_eq!(digest("{}", SystemTime::now() + LATER), "remembered");
        assert_ne!(digest("{} ", SystemTime::now()), "remembered", "another description");
        write_weights(&path, 2.0);
        let second = digest("{}", SystemTime::now());
        assert!(second != first && second != "remembered");
        write(&record, &known).unwrap();
        fs::write(&record, "{").unwrap();
        assert_eq!(digest("{}", SystemTime::now() + LATER), second, "a damaged record");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no other file is left");
    }
}
