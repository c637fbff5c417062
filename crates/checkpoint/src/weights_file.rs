//! A check of a safetensors file with weights, before it is read as a whole.

use std::{fs::OpenOptions, io::Read, os::unix::fs::OpenOptionsExt, path::Path};

use rustix::fs::OFlags;
use safetensors::tensor::Metadata;

use crate::{folder, shard::LENGTH_BYTES};

/// Maximum size of a header, in bytes; that of the safetensors library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Checks that `path` is a safetensors file as long as its header says. Reads only the header, so that a device, a named
/// pipe or some other large file costs no memory.
///
/// # Errors
/// One line with the file and what is wrong.
pub fn check_weights_file(path: &Path) -> Result<(), String> {
    check(path).map_err(|problem| {
        format!("weights {path:?}: {problem}; give a file as `baton checkpoint export` writes it")
    })
}

fn check(path: &Path) -> Result<(), String> {
    let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let opened = OpenOptions::new().read(true).custom_flags(nonblock).open(path);
    let mut file = opened.map_err(|error| error.to_string())?;
    folder::check_is_regular(&file).map_err(|error| error.to_string())?;
    let file_bytes = file.metadata().map_err(|error| error.to_string())?.len();
    let invalid = |problem: &str| format!("not a valid safetensors file: {problem}");

    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(|_| invalid("it is too short for a header"))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES.min(file_bytes - LENGTH_BYTES.min(file_bytes)) {
        return Err(invalid(&format!("its header cannot have {length} bytes")));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json).map_err(|error| error.to_string())?;
    let tensors: Metadata = serde_json::from_slice(&json)
        .map_err(|error| invalid(&format!("its header cannot be read ({error})")))?;
    match (LENGTH_BYTES + length).checked_add(tensors.data_len() as u64) {
        Some(bytes) if bytes == file_bytes => Ok(()),
        _ => Err(invalid("its header does not match the size of the file")),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        path::PathBuf,
    };

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;

    /// A file with this header and this many bytes of values, which take no space on the disk.
    fn file(folder: &Path, length: u64, header: &str, values: u64) -> PathBuf {
        let path = folder.join("weights.safetensors");
        fs::write(&path, [&length.to_le_bytes(), header.as_bytes()].concat()).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(LENGTH_BYTES + header.len() as u64 + values).unwrap();
        path
    }

    #[test]
    fn weights_are_checked_without_reading_the_whole_file() {
        const TERABYTE: u64 = 1 << 40;
        const HEADER: &str = r#"{"fc":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let folder = tempfile::tempdir().unwrap();
        let length = HEADER.len() as u64;
        let of = |length, header, values| check(&file(folder.path(), length, header, values));
        assert_eq!(of(length, HEADER, 8), Ok(()));
        for (problem, found) in [
            ("does not match the size", of(length, HEADER, 7)),
            ("does not match the size", of(length, HEADER, TERABYTE)),
            ("cannot have 18446744073709551615 bytes", of(u64::MAX, HEADER, 8)),
            ("cannot have 1099511627776 bytes", of(TERABYTE, "", 2 * TERABYTE)),
            ("cannot have 100 bytes", of(100, "", 99)),
            ("cannot be read", of(0, "", TERABYTE)),
            ("cannot be read", of(length - 1, HEADER, 9)),
        ] {
            let found = found.unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
        fs::write(folder.path().join("short"), "1234567").unwrap();
        let short = check(&folder.path().join("short")).unwrap_err();
        assert!(short.contains("too short"), "{short}");
    }

    #[test]
    fn weights_that_are_a_device_a_pipe_or_a_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        for path in [Path::new("/dev/zero"), &pipe, folder.path()] {
            let refused = check_weights_file(path).unwrap_err();
            assert_eq!(
                refused,
                format!(
                    "weights {path:?}: it is not a regular file; give a file as `baton checkpoint export` writes it"
                )
            );
        }
        let missing = check_weights_file(Path::new("/nowhere")).unwrap_err();
        assert!(missing.contains("No such file"), "{missing}");
    }
}
