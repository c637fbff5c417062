//! Reads values of every type: like `baton data verify`, individually, and like training.
#![no_main]

use std::{
    path::Path,
    sync::{Arc, LazyLock},
};

use baton_data::{
    Beton, Dataset, Error, Labels, Loader, Options, Preprocessing, Request, Source,
    beton::{Field, FieldType},
    verify::{Verifier, VerifyBuffers},
};
use baton_fuzz::{damage, file::Scratch, memory::within, observe};
use baton_recipe::spec::{OnBadSample, Resize};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

/// Memory of threads, and of the resizes' tiles for the widest raw image that a file can contain.
const FIXED_BYTES: usize = 1 << 20;
/// Most bytes of pixels that a decoder makes of a stored byte (`PIXELS_PER_BYTE` in `turbojpeg.rs`).
const JPEG_FACTOR: usize = 3 * 512;

fuzz_target!(|bytes: &[u8]| {
    let path = SCRATCH.fill(bytes);
    let Some(beton) = observe(Beton::open(path)) else { return };
    let has_images = beton.fields().iter().any(|field| field.kind == FieldType::RgbImage);
    // An error message for a value has up to 150 bytes, for each cell of at least 8 bytes.
    let factor = if has_images { 32 + JPEG_FACTOR } else { 32 };
    within(factor * bytes.len() + FIXED_BYTES, || {
        observe(verify(&beton));
        for field in beton.fields() {
            for sample in 0..=beton.len() {
                observe(value(&beton, field, sample));
            }
        }
        // As labels, use an integer field if there is one, and every field once.
        let integers = beton.fields().iter().find(|field| field.kind == FieldType::Int);
        for policy in [OnBadSample::Fail, OnBadSample::Skip] {
            for (input, next) in beton.fields().iter().zip(beton.fields().iter().cycle().skip(1)) {
                let with_loader = bytes.len().is_multiple_of(16);
                for label in integers.into_iter().chain([next]) {
                    observe(train(path, input, label, policy, with_loader));
                }
            }
        }
    });
});

fn verify(beton: &Beton) -> Result<(), Error> {
    let verifier = Verifier::new(beton)?;
    let mut tools = VerifyBuffers::new()?;
    for fault in verifier.faults() {
        observe::<()>(Err(fault));
    }
    for sample in 0..=beton.len() {
        observe(verifier.check(sample, &mut tools));
    }
    Ok(())
}

fn value(beton: &Beton, field: &Field, sample: u64) -> Result<(), Error> {
    let name = &field.name;
    let mut buffer = Vec::new();
    match field.kind {
        FieldType::Float => beton.float(&beton.float_column(name)?, sample).map(|_| ()),
        FieldType::Int => beton.int(&beton.int_column(name)?, sample).map(|_| ()),
        FieldType::Bytes | FieldType::Json => {
            beton.bytes(&beton.bytes_column(name)?, sample, &mut buffer).map(|_| ())
        }
        FieldType::NdArray | FieldType::TorchTensor => {
            let column = beton.array_column(name)?;
            // Without samples, there is no value to allocate a buffer for, and no page to check its size.
            if beton.is_empty() {
                return Ok(());
            }
            assert!(column.value_bytes() <= beton.file_bytes());
            buffer.resize(column.value_bytes() as usize, 0);
            beton.array(&column, sample, &mut buffer)
        }
        FieldType::RgbImage => {
            beton.image(&beton.image_column(name)?, sample, &mut buffer).map(|_| ())
        }
    }
}

fn train(
    path: &Path,
    input: &Field,
    label: &Field,
    on_bad_sample: OnBadSample,
    with_loader: bool,
) -> Result<(), Error> {
    let location = path.to_string_lossy().into_owned();
    let (input_field, label_field) = (input.name.clone(), label.name.clone());
    let source = Source { input_field, label_field, on_bad_sample, ..Source::new(location) };
    observe(Dataset::open(Source { labels: Labels::Classes(10), ..source.clone() }));
    observe(Dataset::open(source.clone()));
    let outputs = label.array_type().map_or(1, |array| array.elements());
    let labels = Labels::Values(u32::try_from(outputs).unwrap_or(u32::MAX));
    let set = Dataset::open(Source { labels, ..source })?;
    for sample in 0..=set.len() {
        observe(set.label(sample));
        observe(set.targets(sample));
    }
    // Threads take most of the time, so start them only for some inputs.
    if with_loader && !set.is_empty() {
        let samples = (0..set.len().min(8)).collect();
        let preprocessing =
            Preprocessing::Evaluate { resolution: 4, resize: Resize::Fast, crop_ratio: 0.75 };
        let request = Request { epoch: 0, samples, preprocessing };
        for batch in Loader::start(Arc::new(set), &Options::new(1, 1), [request].into_iter()) {
            assert!(!matches!(batch, Err(Error::Panicked)));
            observe(batch);
        }
    }
    Ok(())
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    damage::file(data, size, max_size, seed)
});
