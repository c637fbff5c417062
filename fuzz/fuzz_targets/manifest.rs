//! A checkpoint's manifest: what it promises about files and tensors before any of them is read.
#![no_main]

use baton_checkpoint::{Manifest, SaveId, slice_of};
use baton_fuzz::{memory::within, tell};
use baton_job::Generation;
use baton_recipe::Step;
use libfuzzer_sys::fuzz_target;

/// Whose folder the manifest lies in.
const ID: SaveId = SaveId { generation: Generation(2), step: Step(88) };

fuzz_target!(|bytes: &[u8]| {
    // A digit and a comma of a shape become eight bytes, three times those while a vector grows; the rest
    // is names and messages.
    let read = within(32 * bytes.len() + 65_536, || tell(Manifest::parse(ID, bytes)));
    let Some(manifest) = read else { return };
    assert_eq!(manifest.id(), ID);
    for shard in &manifest.shards {
        let slice = |len| slice_of(len, shard.rank, manifest.world_size);
        let values: usize = manifest.regions.iter().map(|region| slice(region.len).len()).sum();
        assert!(4 * values as u64 <= shard.bytes, "more values than the file has room for");
        assert!(!shard.file.contains('/'), "a file outside the folder");
    }
    let regions = manifest.places().regions;
    for tensor in &manifest.tensors {
        let region = regions.iter().find(|region| region.name == tensor.region);
        let end = tensor.offset + tensor.shape.iter().product::<usize>();
        assert!(region.is_some_and(|region| end <= region.len), "a tensor outside its region");
    }
    let again = serde_json::to_vec(&manifest).expect("what was read can be written");
    assert_eq!(Manifest::parse(ID, &again).expect("and read again"), manifest);
});
