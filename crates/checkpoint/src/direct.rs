//! Files that pass by the page cache.
//!
//! A shard is written once and hardly ever read: the cache is of more use to the training data, and on a
//! virtual machine that has given its free memory back to the host every new page of it has to be waited for
//! (`docs/measurements/checkpoint.md`). Disks want whole sectors, from memory at multiples of their size.
//! What a file system cannot do directly goes through the cache as ever.

use std::{
    fs::{File, OpenOptions},
    io,
    ops::{Deref, DerefMut, Range},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::folder;

/// No disk has larger sectors.
const ALIGNMENT: usize = 4096;
/// What is read or written at once.
const BLOCK_BYTES: usize = 2 << 20;

/// Writes a file that holds `pieces` one behind the other; it is complete and durable, or not there. Returns
/// its BLAKE3 digest.
pub(crate) fn write<'a>(
    out: &Path,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> io::Result<blake3::Hash> {
    folder::write_whole(out, open, |file| {
        let mut hasher = blake3::Hasher::new();
        let mut block = Block::new(BLOCK_BYTES);
        let (mut filled, mut offset) = (0, 0);
        for mut piece in pieces {
            while !piece.is_empty() {
                let (now, later) = piece.split_at(piece.len().min(BLOCK_BYTES - filled));
                hasher.update(now);
                block[filled..filled + now.len()].copy_from_slice(now);
                filled += now.len();
                piece = later;
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

/// Hands the bytes `range` of a file to `each`, in order, in blocks that are whole numbers of values if
/// the range is.
pub(crate) fn read(file: &Path, range: Range<u64>, each: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let file = open(OpenOptions::new().read(true), file)?;
    let mut offset = range.start - range.start % ALIGNMENT as u64;
    let most = range.end.saturating_sub(offset).min(BLOCK_BYTES as u64) as usize;
    let mut block = Block::new(most.next_multiple_of(ALIGNMENT));
    while offset < range.end {
        let wanted = (range.end - offset).min(BLOCK_BYTES as u64) as usize;
        let got = read_at(&file, &mut block[..wanted.next_multiple_of(ALIGNMENT)], offset)?;
        if got < wanted {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        each(&block[range.start.saturating_sub(offset) as usize..wanted]);
        offset += wanted as u64;
    }
    Ok(())
}

/// Opens a file for direct use where the file system knows such a thing.
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap_or_default();
    match options.custom_flags(direct).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            options.custom_flags(0).open(path)
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
    use_the_cache(file)?;
    file.write_all_at(bytes, offset)
}

/// Fills `block` up to the end of the file; the number of bytes.
fn read_at(file: &File, block: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < block.len() {
        match file.read_at(&mut block[got..], offset + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // As when the end of the file is no multiple of a sector.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => use_the_cache(file)?,
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// An error if it was used before, so that nobody tries for ever.
fn use_the_cache(file: &File) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    if !flags.contains(OFlags::DIRECT) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(fcntl_setfl(file, flags - OFlags::DIRECT)?)
}

/// Memory that begins at a multiple of [`ALIGNMENT`].
struct Block {
    memory: Vec<u8>,
    range: Range<usize>,
}

impl Block {
    fn new(bytes: usize) -> Self {
        let memory = vec![0; bytes + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, range: start..start + bytes }
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_any_length_hold_what_was_written_and_their_parts_are_read_alike() {
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
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no draft is left");
    }

    #[test]
    fn what_a_file_system_cannot_do_directly_goes_through_the_cache() {
        // In memory; there nothing is direct on older kernels.
        let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
        let file = folder.path().join("file");
        write(&file, [&[7; 5000][..]]).unwrap();
        let mut sum = 0;
        read(&file, 0..5000, &mut |block| sum += block.len()).unwrap();
        assert_eq!(sum, 5000);
    }
}
