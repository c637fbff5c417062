//! Values of every type: by `baton data verify`, one by one, and as training sees them.
#![no_main]

use std::{
    path::Path,
    sync::{Arc, LazyLock},
};

use baton_data::{
    Beton, Dataset, Error, Labels, Loader, Options, Request, Source, View,
    beton::{Field, FieldType},
    verify::{Tools, Verifier},
};
use baton_fuzz::{damage, file::Scratch, memory::within, tell};
use baton_recipe::spec::{OnBadSample, Resize};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

/// Threads, and tiles of the resizes for a raw image as wide as such a file can hold.
const FIXED_BYTES: usize = 1 << 20;
/// Most bytes of pixels that a decoder makes of a stored byte (`PIXELS_PER_BYTE` in `turbojpeg.rs`).
const JPEG_FACTOR: usize = 3 * 512;

fuzz_target!(|bytes: &[u8]| {
    let path = SCRATCH.fill(bytes);
    let Some(beton) = tell(Beton::open(path)) else { return };
    let has_images = beton.fields().iter().any(|field| field.kind == FieldType::RgbImage);
    // What is wrong with a value is told in up to 150 bytes, for each cell of 8 bytes or more.
    let factor = if has_images { 32 + JPEG_FACTOR } else { 32 };
    within(factor * bytes.len() + FIXED_BYTES, || {
        tell(verify(&beton));
        for field in beton.fields() {
            for sample in 0..=beton.len() {
                tell(value(&beton, field, sample));
            }
        }
        // Whole numbers where there are any, and every field once.
        let whole = beton.fields().iter().find(|field| field.kind == FieldType::Int);
        for policy in [OnBadSample::Fail, OnBadSample::Skip] {
            for (input, next) in beton.fields().iter().zip(beton.fields().iter().cycle().skip(1)) {
                let with_loader = bytes.len().is_multiple_of(16);
                for label in whole.into_iter().chain([next]) {
                    tell(train(path, input, label, policy, with_loader));
                }
            }
        }
    });
});

fn verify(beton: &Beton) -> Result<(), Error> {
    let verifier = Verifier::new(beton)?;
    let mut tools = Tools::new()?;
    for fault in verifier.faults() {
        tell::<()>(Err(fault));
    }
    for sample in 0..=beton.len() {
        tell(verifier.check(sample, &mut tools));
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
            // Without samples there is no value to make room for, and no page to compare it with.
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
    tell(Dataset::open(Source { labels: Labels::Classes(10), ..source.clone() }));
    tell(Dataset::open(source.clone()));
    let outputs = label.array_type().map_or(1, |array| array.elements());
    let labels = Labels::Values(u32::try_from(outputs).unwrap_or(u32::MAX));
    let set = Dataset::open(Source { labels, ..source })?;
    for sample in 0..=set.len() {
        tell(set.label(sample));
        tell(set.targets(sample));
    }
    // Threads take longer than all else, so only some inputs get any.
    if with_loader && !set.is_empty() {
        let samples = (0..set.len().min(8)).collect();
        let view = View::Evaluate { resolution: 4, resize: Resize::Fast, crop_ratio: 0.75 };
        let request = Request { epoch: 0, samples, view };
        for batch in Loader::start(Arc::new(set), &Options::new(1, 1), [request].into_iter()) {
            assert!(!matches!(batch, Err(Error::Panicked)));
            tell(batch);
        }
    }
    Ok(())
}

fuzz_mutator!(|data: &mut [u8], size: usize, most: usize, seed: u32| {
    damage::file(data, size, most, seed)
});
