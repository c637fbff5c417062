//! Reads small files that a user names, without trust in their size: a device such as `/dev/zero` never ends.

use std::{
    fs::File,
    io::{self, ErrorKind, Read},
    os::unix::fs::FileTypeExt,
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};

/// Longest time until somebody writes into a pipe.
const PIPE_TIMEOUT: Duration = Duration::from_secs(10);

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
    let file = match path.metadata()?.file_type().is_fifo() {
        true => open_pipe(path, PIPE_TIMEOUT)?,
        false => File::open(path)?,
    };
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let problem = format!("is larger than {} KiB; is it the right file?", max_bytes >> 10);
        return Err(io::Error::new(ErrorKind::FileTooLarge, problem));
    }
    String::from_utf8(bytes)
        .map_err(|_| io::Error::new(ErrorKind::InvalidData, "is not a text file"))
}

/// Opening a pipe waits until another process opens its other end, which may never happen.
fn open_pipe(path: &Path, timeout: Duration) -> io::Result<File> {
    let (sender, opened) = mpsc::channel();
    let owned = path.to_owned();
    // After the timeout nobody takes the file.
    thread::spawn(move || drop(sender.send(File::open(owned))));
    opened.recv_timeout(timeout).unwrap_or_else(|_| {
        let seconds = timeout.as_secs();
        let problem = format!("is a pipe, and nobody has begun to write into it for {seconds} s");
        Err(io::Error::new(ErrorKind::TimedOut, problem))
    })
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

    #[test]
    fn a_pipe_is_read_to_its_end_and_one_without_a_writer_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = |name: &str| {
            let path = folder.path().join(name);
            assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
            path
        };
        let error = open_pipe(&pipe("lonely"), Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().contains("nobody has begun to write"), "{error}");

        let path = pipe("written");
        let writer = path.clone();
        let written = thread::spawn(move || std::fs::write(writer, "text"));
        assert_eq!(read_text(&path, 9).unwrap(), "text");
        written.join().unwrap().unwrap();
    }
}
