//! A shard's file: where its header says that values lie, safetensors' own reader must find them.
#![no_main]

use std::sync::LazyLock;

use baton_checkpoint::{Manifest, SaveId, ShardHeader, slice_of};
use baton_fuzz::{SHARD_MANIFEST, memory::within, tell};
use baton_job::{Generation, Rank};
use baton_recipe::Step;
use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;

/// What the manifest says of the file.
static MANIFEST: LazyLock<Manifest> = LazyLock::new(|| {
    let id = SaveId { generation: Generation(2), step: Step(88) };
    Manifest::parse(id, SHARD_MANIFEST.as_bytes()).expect("it is a manifest")
});
/// Whose file it is.
const RANK: Rank = Rank(0);

fuzz_target!(|bytes: &[u8]| {
    let manifest = &*MANIFEST;
    // A digit and a comma of a header become a value of 32 bytes for a while, three times that while a
    // vector grows.
    within(128 * bytes.len() + 65_536, || {
        let Some(header) = tell(ShardHeader::parse(bytes, bytes.len() as u64)) else { return };
        let whole = SafeTensors::deserialize(bytes).expect("safetensors takes it too");
        for region in &manifest.regions {
            let slice = slice_of(region.len, RANK, manifest.world_size);
            let Ok(place) = header.place(&region.name, slice.len()) else { continue };
            let tensor = whole.tensor(&region.name).expect("it has the region too");
            assert_eq!(tensor.data(), &bytes[place.start as usize..place.end as usize]);
            assert_eq!(tensor.data().len(), 4 * slice.len());
        }
    });
});
