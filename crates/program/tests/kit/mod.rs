//! The programs of tests, and changes of them.

use std::{fs, path::PathBuf};

use baton_program::{Error, Program};

/// The entry of the graph.
pub(crate) const GRAPH: &str = "models/model.json";

/// A program that `scripts/parity/fixtures.py` wrote.
pub(crate) fn fixture(name: &str) -> PathBuf {
    // Tests of crates/plan read them too.
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../program/tests/fixtures").join(name)
}

/// The entries of a fixture, with their names.
pub(crate) fn entries(name: &str) -> Vec<(String, Vec<u8>)> {
    let bytes = fs::read(fixture(name)).unwrap();
    let archive = rawzip::ZipArchive::from_slice(bytes.as_slice()).unwrap();
    let entries = archive.entries().map(|entry| {
        let entry = entry.unwrap();
        let name = str::from_utf8(entry.file_path().as_bytes()).unwrap().to_owned();
        let content = archive.get_entry(entry.wayfinder()).unwrap().data().to_vec();
        (name, content)
    });
    entries.collect()
}

/// The program of these entries.
pub(crate) fn program_of(entries: &[(String, Vec<u8>)]) -> Result<Program, Error> {
    let folder = tempfile::tempdir().unwrap();
    let entries: Vec<(&str, &[u8])> =
        entries.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
    let path = folder.path().join("changed.pt2");
    fs::write(&path, zip(&entries)).unwrap();
    Program::read(&path)
}

/// The program `name` with `new` in place of every `old` in an entry.
pub(crate) fn changed(
    name: &str,
    changed_entry: &str,
    old: &str,
    new: &str,
) -> Result<Program, Error> {
    let mut entries = entries(name);
    for (_, content) in entries.iter_mut().filter(|(name, _)| name.ends_with(changed_entry)) {
        let text = String::from_utf8(content.clone()).unwrap();
        assert!(text.contains(old), "{old}");
        *content = text.replace(old, new).into_bytes();
    }
    program_of(&entries)
}

/// A zip file with these entries, stored.
pub(crate) fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut archive = rawzip::ZipArchiveWriter::new(&mut bytes);
    for (name, content) in entries {
        let file = archive.new_file(name).compression_method(rawzip::CompressionMethod::STORE);
        let (mut entry, config) = file.start().unwrap();
        let mut writer = config.wrap(&mut entry);
        std::io::Write::write_all(&mut writer, content).unwrap();
        let (_, descriptor) = writer.finish().unwrap();
        entry.finish(descriptor).unwrap();
    }
    archive.finish().unwrap();
    bytes
}
