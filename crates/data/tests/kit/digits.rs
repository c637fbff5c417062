//! Sets of some of the digits, for tests of any crate; it depends only on `baton_data`.

#![allow(dead_code, reason = "each file uses its part")]
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test may fail loudly")]

use std::{ops::Range, path::Path};

use baton_data::{
    Beton, Mode,
    write::{FFCV_MIN_PAGE_BYTES, Field, FieldKind, Value, Writer},
};

/// Writes these training samples of the digits; `damage` may change a stored JPEG.
pub(crate) fn write_digits(path: &Path, samples: Range<u64>, damage: impl Fn(u64, &mut Vec<u8>)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .find(|folder| folder.join("assets").is_dir());
    let beton = Beton::open(root.unwrap().join("assets/digits/digits-train.beton")).unwrap();
    let images = beton.image_column("image").unwrap();
    let labels = beton.int_column("label").unwrap();
    let fields = [Field::new("image", FieldKind::RgbImage), Field::new("label", FieldKind::Int)];
    let count = samples.end - samples.start;
    let mut writer = Writer::create(path, fields.to_vec(), count, FFCV_MIN_PAGE_BYTES).unwrap();
    for sample in samples {
        let mut buffer = Vec::new();
        let image = beton.image(&images, sample, &mut buffer).unwrap();
        assert_eq!(image.mode, Mode::Jpeg);
        let (mode, width, height) = (image.mode, image.width, image.height);
        let mut bytes = image.bytes.to_vec();
        damage(sample, &mut bytes);
        let label = Value::Int(beton.int(&labels, sample).unwrap());
        writer.push(&[Value::Image { mode, width, height, bytes: &bytes }, label]).unwrap();
    }
    writer.finish().unwrap();
}

/// Makes a JPEG that is complete, and does not decode.
pub(crate) fn spoil(bytes: &mut [u8]) {
    let len = bytes.len();
    bytes[len / 2..len - 2].fill(0);
}
