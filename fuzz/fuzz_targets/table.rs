//! The allocation table and the rows: which bytes are whose.
#![no_main]

use std::sync::LazyLock;

use baton_data::{Beton, Error, Layout, beton::FieldType};
use baton_fuzz::{damage, file::Scratch, memory::within, tell};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

fuzz_target!(|bytes: &[u8]| {
    let path = SCRATCH.fill(bytes);
    // Twelve bytes for each sample and eight for each block, twice while a vector grows; a row of them
    // takes eight bytes in the file at least.
    within(8 * bytes.len() + 65_536, || {
        if let Some(beton) = tell(Beton::open(path)) {
            tell(look_up(&beton));
        }
    });
});

fn look_up(beton: &Beton) -> Result<(), Error> {
    let layout = Layout::of_pages(beton)?;
    assert_eq!(layout.samples(), beton.len());
    let mut seen = vec![false; beton.len() as usize];
    for block in 0..layout.blocks() as u32 {
        for number in 0..layout.block_samples(block) {
            let sample = layout.sample(block, number) as usize;
            assert!(!std::mem::replace(&mut seen[sample], true), "sample {sample} comes twice");
        }
    }
    assert!(seen.iter().all(|seen| *seen));

    let mut buffer = Vec::new();
    for field in beton.fields().iter().filter(|field| field.kind == FieldType::RgbImage) {
        let column = beton.image_column(&field.name)?;
        tell(beton.check_images(&column));
        for sample in 0..=beton.len() {
            let Some(place) = tell(beton.image_place(&column, sample)) else { continue };
            assert!(place.start + place.len <= beton.file_bytes());
            let image = beton.image(&column, sample, &mut buffer)?;
            assert_eq!(image.bytes.len() as u64, place.len);
        }
    }
    Ok(())
}

fuzz_mutator!(|data: &mut [u8], size: usize, most: usize, seed: u32| {
    damage::file(data, size, most, seed)
});
