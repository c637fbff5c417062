//! Parses a checkpoint's manifest, and checks its entries for files and tensors. The input has no digest: no mutation
//! would keep it correct.
#![no_main]

use baton_checkpoint::{Manifest, SaveId, slice_of};
use baton_fuzz::{memory::within, observe};
use baton_job::Generation;
use baton_recipe::Step;
use libfuzzer_sys::fuzz_target;

/// Identity of the checkpoint that the manifest belongs to.
const ID: SaveId = SaveId { generation: Generation(2), step: Step(88) };

fuzz_target!(|bytes: &[u8]| {
    // A digit and a comma of a shape become 8 bytes, and 24 bytes while a vector grows; the rest is names and messages.
    let read = within(32 * bytes.len() + 65_536, || {
        let sealed = str::from_utf8(bytes).ok().map(Manifest::seal);
        observe(Manifest::parse(ID, sealed.as_deref().map_or(bytes, str::as_bytes)))
    });
    let Some(manifest) = read else { return };
    assert_eq!(manifest.id(), ID);
    for shard in &manifest.shards {
        let slice = |len| slice_of(len, shard.rank, manifest.world_size);
        let values: usize = manifest.regions.iter().map(|region| slice(region.len).len()).sum();
        assert!(4 * values as u64 <= shard.bytes, "more values than fit into the file");
        assert!(!shard.file.contains('/'), "a file outside the folder");
    }
    let regions = manifest.state_layout().regions;
    for tensor in &manifest.tensors {
        let region = regions.iter().find(|region| region.name == tensor.region);
        let end = tensor.offset + tensor.shape.iter().product::<usize>();
        assert!(region.is_some_and(|region| end <= region.len), "a tensor outside its region");
    }
    let again = serde_json::to_string_pretty(&manifest).expect("the manifest can be serialized");
    let again = Manifest::seal(&again);
    assert_eq!(Manifest::parse(ID, again.as_bytes()).expect("the output can be parsed"), manifest);
});
