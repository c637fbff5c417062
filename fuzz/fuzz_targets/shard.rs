//! A shard's file: its safetensors header, read whole and read in parts, which must agree.
#![no_main]

use std::sync::LazyLock;

use baton_checkpoint::{Manifest, SaveId, ShardHeader, decode_shard, slice_of};
use baton_fuzz::{SHARD_MANIFEST, memory::within, tell};
use baton_job::{Generation, Rank, Step};
use libfuzzer_sys::fuzz_target;

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
        let mut whole: Vec<(String, usize, Vec<f32>)> = Vec::new();
        let decoded = tell(decode_shard(bytes, manifest, RANK, &mut |region, offset, values| {
            whole.push((region.to_owned(), offset, values.to_vec()));
        }));
        let header = tell(ShardHeader::parse(bytes, bytes.len() as u64));
        let places = manifest.regions.iter().map(|region| {
            let slice = slice_of(region.len, RANK, manifest.world_size);
            header.as_ref()?.place(&region.name, slice.len()).ok()
        });
        let places: Option<Vec<_>> = places.collect();
        assert_eq!(
            decoded.is_some(),
            places.is_some(),
            "one way to read it takes it, one does not"
        );
        for ((region, _, values), place) in whole.iter().zip(places.into_iter().flatten()) {
            let part = &bytes[place.start as usize..place.end as usize];
            let parts =
                part.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("4")));
            assert!(parts.eq(values.iter().map(|value| value.to_bits())), "{region}");
        }
    });
});
