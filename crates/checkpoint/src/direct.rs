//! Direct I/O: reads and writes files without the page cache.
//!
//! A shard is written once and rarely read, so the page cache is more useful for the training data. On a virtual
//! machine that has returned its free memory to the host, each new page of the cache also has to be waited for
//! (`docs/measurements/checkpoint.md`). Direct I/O needs whole sectors and memory aligned to the sector size.
//! Where the file system does not support direct I/O, the page cache is used.

use std::{
    fs::{File, OpenOptions},
    io,
    ops::{Deref, DerefMut, Range},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::folder;

/// Alignment of offsets, lengths and memory, bytes. No disk has larger sectors.
const ALIGNMENT: usize = 4096;
/// Bytes that are read or written at a time.
const BLOCK_BYTES: usize = 2 << 20;

/// Writes a file with the concatenated `pieces`. The file appears atomically and is durable. Returns its
/// BLAKE3 digest.
pub(crate) fn write<'a>(
    out: &Path,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> io::Result<blake3::Hash> {
    folder::write_whole(out, open, |file| {
        let mut hasher = blake3::Hasher::new();
        let mut block = AlignedBlock::new(BLOCK_BYTES);
        let (mut filled, mut offset) = (0, 0);
        for mut piece in pieces {
            while !piece.is_empty() {
                let (head, rest) = piece.split_at(piece.len().min(BLOCK_BYTES - filled));
                hasher.update(head);
                block[filled..filled + head.len()].copy_from_slice(head);
                filled += head.len();
                piece = rest;
                if filled == BLOCK_BYTES {
                    write_at(file, &block, offset)?;
                    offset += BLOCK_BYTES as u64;
                    filled = 0;
                }
            }
        }
        write_at(file, &block[..filled], offset)?;
        Ok(hasher.finalize())
    })
}

/// Passes the bytes `range` of a file to `each`, in order, in blocks. If the range starts and ends at
/// multiples of 4 bytes, each block does too.
pub(crate) fn read(file: &Path, range: Range<u64>, each: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let file = open(OpenOptions::new().read(true), file)?;
    folder::check_is_regular(&file)?;
    let mut offset = range.start - range.start % ALIGNMENT as u64;
    let max_len = range.end.saturating_sub(offset).min(BLOCK_BYTES as u64) as usize;
    let mut block = AlignedBlock::new(max_len.next_multiple_of(ALIGNMENT));
    while offset < range.end {
        let len = (range.end - offset).min(BLOCK_BYTES as u64) as usize;
        let read = read_at(&file, &mut block[..len.next_multiple_of(ALIGNMENT)], offset)?;
        if read < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        each(&block[range.start.saturating_sub(offset) as usize..len]);
        offset += len as u64;
    }
    Ok(())
}

/// Opens a file for direct I/O if the file system supports it. Never waits: see [`folder::check_is_regular`].
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = |flags: OFlags| i32::try_from(flags.bits()).unwrap_or_default();
    match options.custom_flags(flags(OFlags::DIRECT | OFlags::NONBLOCK)).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            options.custom_flags(flags(OFlags::NONBLOCK)).open(path)
        }
        opened => opened,
    }
}

fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    if bytes.len().is_multiple_of(ALIGNMENT) {
        match file.write_all_at(bytes, offset) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            done => return done,
        }
    }
    disable_direct_io(file)?;
    file.write_all_at(bytes, offset)
}

/// Fills `block`, or reads up to the end of the file. Returns the number of bytes read.
fn read_at(file: &File, block: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < block.len() {
        match file.read_at(&mut block[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // For example, the end of the file is not a multiple of the sector size.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => disable_direct_io(file)?,
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Makes further operations use the page cache. An error if they do already, so that callers do not retry
/// forever.
fn disable_direct_io(file: &File) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    if !flags.contains(OFlags::DIRECT) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(fcntl_setfl(file, flags - OFlags::DIRECT)?)
}

/// A buffer whose address is a multiple of [`ALIGNMENT`].
struct AlignedBlock {
    memory: Vec<u8>,
    range: Range<usize>,
}

impl AlignedBlock {
    fn new(bytes: usize) -> Self {
        let memory = vec![0; bytes + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, range: start..start + bytes }
    }
}

impl Deref for AlignedBlock {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }
}

impl DerefMut for AlignedBlock {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_any_length_and_ranges_of_them_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        for len in [0, 1, 4095, 4096, 4100, BLOCK_BYTES, BLOCK_BYTES + 4, 2 * BLOCK_BYTES + 5000] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 4096) as u8).collect();
            let (head, tail) = bytes.split_at(len / 3);
            let digest = write(&file, [head, &[], tail]).unwrap();
            assert_eq!(digest, blake3::hash(&bytes));
            assert!(std::fs::read(&file).unwrap() == bytes, "{len} bytes");
            for range in [0..len, len / 5..len, 0..len / 2, len / 3..len / 2] {
                let mut part: Vec<u8> = Vec::new();
                read(&file, range.start as u64..range.end as u64, &mut |block| {
                    part.extend_from_slice(block)
                })
                .unwrap();
                assert!(part == bytes[range.clone()], "{range:?} of {len}");
            }
            let beyond = read(&file, 0..len as u64 + 1, &mut |_| {}).unwrap_err();
            assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
        }
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "no temporary file is left"
        );
    }

    #[test]
    fn a_file_system_without_direct_io_uses_the_page_cache() {
        // No kernel has direct I/O for the files of /proc; tmpfs has it since Linux 6.6.
        let file = Path::new("/proc/version");
        let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap();
        let refused = OpenOptions::new().read(true).custom_flags(direct).open(file).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        let expected = std::fs::read(file).unwrap();
        let mut found = Vec::new();
        read(file, 0..expected.len() as u64, &mut |block| found.extend_from_slice(block)).unwrap();
        assert_eq!(found, expected);
    }
}
