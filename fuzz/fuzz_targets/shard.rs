//! Parses a shard's header; the safetensors reader must find the same values at the same positions.
#![no_main]

use std::sync::LazyLock;

use baton_checkpoint::{Float, Manifest, SaveId, ShardHeader, slice_of};
use baton_fuzz::{SHARD_MANIFEST, memory::within, observe};
use baton_job::{Generation, Rank};
use baton_recipe::Step;
use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;

/// The manifest that describes the file.
static MANIFEST: LazyLock<Manifest> = LazyLock::new(|| {
    let id = SaveId { generation: Generation(2), step: Step(88) };
    Manifest::parse(id, Manifest::seal(SHARD_MANIFEST).as_bytes()).expect("the manifest is valid")
});
/// Rank that wrote the file.
const RANK: Rank = Rank(0);

fuzz_target!(|bytes: &[u8]| {
    let manifest = &*MANIFEST;
    // A digit and a comma of a header become a temporary value of 32 bytes, and 96 bytes while a vector grows.
    within(128 * bytes.len() + 65_536, || {
        let Some(header) = observe(ShardHeader::parse(bytes, bytes.len() as u64)) else { return };
        let whole =
            SafeTensors::deserialize(bytes).expect("the safetensors reader accepts the file");
        for region in &manifest.regions {
            let slice = slice_of(region.len, RANK, manifest.world_size);
            let Ok(range) = header.byte_range(&region.name, Float::F32, slice.len()) else {
                continue;
            };
            let tensor =
                whole.tensor(&region.name).expect("the safetensors reader finds the region");
            assert_eq!(tensor.data(), &bytes[range.start as usize..range.end as usize]);
            assert_eq!(tensor.data().len(), 4 * slice.len());
        }
    });
});
