//! Reads the header, the descriptors and the positions of the sections.
#![no_main]

use std::sync::LazyLock;

use baton_data::Beton;
use baton_fuzz::{damage, file::Scratch, memory::within, observe};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

fuzz_target!(|bytes: &[u8]| {
    let path = SCRATCH.fill(bytes);
    // A descriptor of 1041 bytes is read. It becomes a name, a shape and, in the worst case, a message with the dtype,
    // in which any byte may become three.
    within(8 * bytes.len() + 65_536, || {
        if let Some(beton) = observe(Beton::open(path)) {
            for field in beton.fields() {
                if let Ok(array) = field.array_type() {
                    assert!(array.value_bytes() <= u64::from(u32::MAX));
                    assert!(array.elements() > 0);
                }
                let row_bytes = (beton.file_bytes() - 24).checked_div(beton.len());
                assert!(row_bytes.is_none_or(|row_bytes| field.offset < row_bytes));
            }
        }
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    damage::file(data, size, max_size, seed)
});
