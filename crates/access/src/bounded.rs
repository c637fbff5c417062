//! Reads small files that a user names, without trust in their size: a device such as `/dev/zero` never ends.

use std::{
    fs::File,
    io::{self, ErrorKind, Read},
    path::Path,
};

/// Largest file with tokens, bytes.
pub(crate) const MAX_TOKENS_BYTES: u64 = 64 << 10;
/// Largest file with certificates or a key, bytes; all authorities of a system are 0.2 MB.
pub(crate) const MAX_PEM_BYTES: u64 = 4 << 20;
/// Largest recipe or calibration, bytes.
pub const MAX_RECIPE_BYTES: u64 = 1 << 20;

/// The text of a file of at most `max_bytes`, which may also be a pipe.
///
/// # Errors
/// The file cannot be read, is larger, or is no text.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let problem = format!("is larger than {} KiB; is it the right file?", max_bytes >> 10);
        return Err(io::Error::new(ErrorKind::FileTooLarge, problem));
    }
    String::from_utf8(bytes)
        .map_err(|_| io::Error::new(ErrorKind::InvalidData, "is not a text file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_an_end_and_a_large_file_are_refused() {
        let error = read_text(Path::new("/dev/zero"), 2_048).unwrap_err();
        assert_eq!(error.to_string(), "is larger than 2 KiB; is it the right file?");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "x".repeat(2_048)).unwrap();
        assert_eq!(read_text(file.path(), 2_048).unwrap().len(), 2_048);
        assert_eq!(read_text(file.path(), 2_047).unwrap_err().kind(), ErrorKind::FileTooLarge);
        // Also if the limit is inside of a character.
        std::fs::write(file.path(), "ü".repeat(2_048)).unwrap();
        assert_eq!(read_text(file.path(), 2_046).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }
}
