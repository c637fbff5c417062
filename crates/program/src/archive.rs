//! The zip file: its entries without the folder that contains all of them.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::Path,
};

use rawzip::{
    CompressionMethod, FileReader, RECOMMENDED_BUFFER_SIZE, ZipArchive, ZipArchiveEntryWayfinder,
};

/// An open file, and where its entries are.
#[derive(Debug)]
pub(crate) struct Archive {
    zip: ZipArchive<FileReader>,
    /// By name, without the first folder.
    entries: BTreeMap<String, ArchiveEntry>,
}

#[derive(Clone, Copy, Debug)]
struct ArchiveEntry {
    place: ZipArchiveEntryWayfinder,
    bytes: u64,
    crc32: u32,
    is_stored: bool,
}

impl Archive {
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        // Before it is opened: a pipe without a writer would block.
        let unreadable = |error: io::Error| {
            format!("cannot be opened ({error}): give a file that torch.export.save wrote")
        };
        let metadata = fs::metadata(path).map_err(unreadable)?;
        if !metadata.is_file() {
            return Err("is not a regular file".to_owned());
        }
        let file = File::open(path).map_err(unreadable)?;
        let mut buffer = vec![0; RECOMMENDED_BUFFER_SIZE];
        let not_zip = |error: rawzip::Error| {
            format!("is not a zip file ({error}): write it with torch.export.save")
        };
        let zip = ZipArchive::from_file(file, &mut buffer).map_err(not_zip)?;
        let mut entries = BTreeMap::new();
        let mut directory = zip.entries(&mut buffer);
        while let Some(header) = directory.next_entry().map_err(not_zip)? {
            let Ok(name) = std::str::from_utf8(header.file_path().as_bytes()) else { continue };
            let Some((_, name)) = name.split_once('/') else { continue };
            let entry = ArchiveEntry {
                place: header.wayfinder(),
                bytes: header.uncompressed_size_hint(),
                crc32: header.crc32(),
                is_stored: header.compression_method() == CompressionMethod::STORE,
            };
            if entry.bytes > metadata.len() {
                return Err(format!("{name} is longer than the whole file: it is damaged"));
            }
            entries.insert(name.to_owned(), entry);
        }
        Ok(Self { zip, entries })
    }

    /// Names of all entries that begin with `folder`.
    pub(crate) fn names<'a>(&'a self, folder: &'a str) -> impl Iterator<Item = &'a str> {
        self.entries.keys().map(String::as_str).filter(move |name| name.starts_with(folder))
    }

    /// Adds names, sizes and checksums of all entries that begin with `folder` to a digest.
    pub(crate) fn digest(&self, folder: &str, digest: &mut blake3::Hasher) {
        for (name, entry) in self.entries.iter().filter(|(name, _)| name.starts_with(folder)) {
            digest.update(format!("{name} {} {}\n", entry.bytes, entry.crc32).as_bytes());
        }
    }

    /// Size of an entry, bytes.
    pub(crate) fn size(&self, name: &str) -> Option<u64> {
        self.entries.get(name).map(|entry| entry.bytes)
    }

    /// The content of an entry, with its checksum verified. It is not longer than the file.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>, String> {
        let entry = self.entries.get(name).ok_or_else(|| format!("has no {name}"))?;
        if !entry.is_stored {
            return Err(format!("{name} is compressed: write it with torch.export.save"));
        }
        let damaged = |error: &dyn std::fmt::Display| format!("{name} is damaged: {error}");
        let file = self.zip.get_entry(entry.place).map_err(|error| damaged(&error))?;
        let mut bytes = Vec::new();
        // An allocation of a damaged length ends the process.
        let len = usize::try_from(entry.bytes).map_err(|error| damaged(&error))?;
        bytes.try_reserve_exact(len).map_err(|error| damaged(&error))?;
        let content = file.verifying_reader(file.reader()).take(entry.bytes + 1);
        { content }.read_to_end(&mut bytes).map_err(|error| damaged(&error))?;
        Ok(bytes)
    }
}
