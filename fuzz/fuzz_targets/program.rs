//! Reads a program. The input is JSON in the file: no mutation of the file itself would keep its checksums correct. It is
//! the graph, or after a byte 0 what `baton.export` wrote about it.
#![no_main]

use std::{io::Write, sync::LazyLock};

use baton_fuzz::{file::Scratch, memory::within, observe};
use baton_program::{Program, WorkingFormat};
use libfuzzer_sys::fuzz_target;
use rawzip::{CompressionMethod, ZipArchive, ZipArchiveWriter};

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

/// The program of which an entry is replaced, and the two entries in its folder.
const PROGRAM: &[u8] = include_bytes!("../../crates/program/tests/fixtures/small.pt2");
const GRAPH: &str = "small/models/model.json";
const METADATA: &str = "small/extra/baton.json";
/// Begins an input that is the metadata; no JSON begins with it.
const METADATA_MARK: u8 = 0;

/// Its entries.
static ENTRIES: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| {
    let archive = ZipArchive::from_slice(PROGRAM).expect("a zip file");
    let entries = archive.entries().map(|entry| {
        let entry = entry.expect("an entry");
        let name = str::from_utf8(entry.file_path().as_bytes()).expect("a name").to_owned();
        let content = archive.get_entry(entry.wayfinder()).expect("a content").data().to_vec();
        (name, content)
    });
    entries.collect()
});

/// The program with this entry in place of its own.
fn zip(replaced: &str, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut archive = ZipArchiveWriter::new(&mut bytes);
    let others = ENTRIES.iter().map(|(name, content)| (name.as_str(), content.as_slice()));
    let others = others.filter(|(name, _)| *name != replaced);
    for (name, content) in others.chain([(replaced, content)]) {
        let file = archive.new_file(name).compression_method(CompressionMethod::STORE);
        let (mut entry, config) = file.start().expect("an entry");
        let mut writer = config.wrap(&mut entry);
        writer.write_all(content).expect("memory");
        let (_, descriptor) = writer.finish().expect("memory");
        entry.finish(descriptor).expect("memory");
    }
    archive.finish().expect("memory");
    bytes
}

fuzz_target!(|input: &[u8]| {
    let (file, json) = match input.strip_prefix(&[METADATA_MARK]) {
        Some(metadata) => (zip(METADATA, metadata), PROGRAM.len() + metadata.len()),
        None => (zip(GRAPH, input), input.len()),
    };
    let path = SCRATCH.fill(&file);
    // A node of 40 bytes becomes a structure of 200, twice that while a vector grows; the buffer of the zip has 64 KiB.
    within(64 * json + (1 << 20), || {
        let Some(program) = observe(Program::read(path)) else { return };
        for tensor in program.parameters.iter().map(|parameter| &parameter.tensor) {
            assert!(program.storage(tensor).is_ok());
        }
        let made = |node: &baton_program::GraphNode| node.makes().collect::<Vec<_>>();
        let values = program.graph.values;
        assert!(program.graph.nodes.iter().flat_map(made).all(|value| value.0 < values));
        let description = program.describe();
        assert_eq!(description.parameters.len(), program.parameters.len());
        let _ = observe(program.evaluation());
        let _ = program.graph.for_training(&program.norms);
        for format in [WorkingFormat::Float32, WorkingFormat::Half] {
            let costs = observe(program.costs(format, Some(224)));
            let _ = costs.map(|costs| (costs.kept(), costs.macs(), costs.gaps()));
        }
    });
});
