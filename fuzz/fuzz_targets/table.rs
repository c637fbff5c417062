//! Reads the allocation table and the rows, which assign the bytes of the file to values.
#![no_main]

use std::sync::LazyLock;

use baton_data::{Beton, Error, SampleBlocks, beton::FieldType};
use baton_fuzz::{damage, file::Scratch, memory::within, observe};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

fuzz_target!(|bytes: &[u8]| {
    let path = SCRATCH.fill(bytes);
    // Twelve bytes for each sample and eight for each block, twice while a vector grows; a row takes at least eight
    // bytes in the file.
    within(8 * bytes.len() + 65_536, || {
        if let Some(beton) = observe(Beton::open(path)) {
            observe(look_up(&beton));
        }
    });
});

fn look_up(beton: &Beton) -> Result<(), Error> {
    let sample_blocks = SampleBlocks::of_pages(beton)?;
    assert_eq!(sample_blocks.samples(), beton.len());
    let mut seen = vec![false; beton.len() as usize];
    for block in 0..sample_blocks.blocks() as u32 {
        for number in 0..sample_blocks.block_samples(block) {
            let sample = sample_blocks.sample(block, number) as usize;
            assert!(!std::mem::replace(&mut seen[sample], true), "sample {sample} comes twice");
        }
    }
    assert!(seen.iter().all(|seen| *seen));

    let mut buffer = Vec::new();
    for field in beton.fields().iter().filter(|field| field.kind == FieldType::RgbImage) {
        let column = beton.image_column(&field.name)?;
        observe(beton.check_images(&column));
        for sample in 0..=beton.len() {
            let Some(location) = observe(beton.image_location(&column, sample)) else { continue };
            assert!(location.start + location.len <= beton.file_bytes());
            let image = beton.image(&column, sample, &mut buffer)?;
            assert_eq!(image.bytes.len() as u64, location.len);
        }
    }
    Ok(())
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    damage::file(data, size, max_size, seed)
});
