//! Files written by the real ffcv, compared with their manifests.

use std::{fs, path::PathBuf};

use baton_data::{
    Beton, Dataset, Decoder, Mode,
    beton::{Field, FieldType},
};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::sketch::Saved;

const ALL: [&str; 8] = [
    "e2_const96x64_mixed",
    "f2_layouts",
    "f3_imageonly",
    "f4_scalars_only",
    "f5_empty_bytes",
    "g_single",
    "h2_retry",
    "k_two_workers",
];

pub(crate) fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn open(name: &str) -> Beton {
    Beton::open(path(&format!("{name}.beton"))).unwrap()
}

fn manifest(name: &str) -> Value {
    let text = fs::read_to_string(path(&format!("{name}.manifest.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn type_name(kind: FieldType) -> &'static str {
    match kind {
        FieldType::Float => "FloatField",
        FieldType::Int => "IntField",
        FieldType::RgbImage => "RGBImageField",
        FieldType::Bytes => "BytesField",
        FieldType::NdArray => "NDArrayField",
        FieldType::Json => "JSONField",
        FieldType::TorchTensor => "TorchTensorField",
    }
}

fn of_type(beton: &Beton, kind: FieldType) -> impl Iterator<Item = &Field> {
    beton.fields().iter().filter(move |field| field.kind == kind)
}

/// Compares every image of a file: place, stored bytes, pixels.
fn compare_images(beton: &Beton, manifest: &Value) {
    let mut decoder = Decoder::new().unwrap();
    for field in of_type(beton, FieldType::RgbImage) {
        let column = beton.image_column(&field.name).unwrap();
        for (sample, expected) in (0..).zip(manifest["samples"].as_array().unwrap()) {
            let expected = &expected["fields"][&field.name];
            let image = beton.image(&column, sample).unwrap();
            let mode = if image.mode == Mode::Jpeg { "jpg" } else { "raw" };
            assert_eq!(mode, expected["mode"]);
            assert_eq!(u64::from(image.width), number(&expected["width"]));
            assert_eq!(u64::from(image.height), number(&expected["height"]));
            assert_eq!(sha256(image.bytes), expected["stored_sha256"]);
            let pixels = decoder.decode(&image).unwrap();
            assert_eq!(sha256(pixels), expected["rgb_sha256_islow"], "sample {sample}");
        }
    }
}

#[test]
fn fields_and_rows_are_laid_out_as_ffcv_does() {
    for name in ALL {
        let (beton, manifest) = (open(name), manifest(name));
        assert_eq!(beton.len(), number(&manifest["header"]["num_samples"]), "{name}");
        let fields = manifest["fields"].as_array().unwrap();
        let offsets = manifest["metadata"]["field_offsets"].as_array().unwrap();
        assert_eq!(beton.fields().len(), fields.len(), "{name}");
        for ((field, expected), offset) in beton.fields().iter().zip(fields).zip(offsets) {
            assert_eq!(field.name, expected["name"], "{name}");
            assert_eq!(type_name(field.kind), expected["type"], "{name}");
            assert_eq!(field.offset, number(offset), "{name}");
        }
    }
}

#[test]
fn whole_numbers_are_read() {
    for name in ALL {
        let (beton, manifest) = (open(name), manifest(name));
        for field in of_type(&beton, FieldType::Int) {
            let column = beton.int_column(&field.name).unwrap();
            for (sample, expected) in (0..).zip(manifest["samples"].as_array().unwrap()) {
                let value = beton.int(&column, sample).unwrap();
                assert_eq!(value, expected["fields"][&field.name], "{name}, sample {sample}");
            }
        }
    }
}

#[test]
fn images_have_the_stored_bytes_and_libjpeg_turbos_pixels() {
    for name in ALL {
        compare_images(&open(name), &manifest(name));
    }
}

/// Not written by ffcv, but harmless: the format's own fields do not need it.
#[test]
fn an_image_may_cross_pages() {
    let mut file = fs::read(path("h2_retry.beton")).unwrap();
    file[4..8].copy_from_slice(&4_096_u32.to_le_bytes());
    let saved = Saved::new(&file);
    compare_images(&Beton::open(saved.path()).unwrap(), &manifest("h2_retry"));
}

#[test]
fn a_dataset_is_an_image_and_a_label_field_of_any_name() {
    let set = Dataset::open(path("f2_layouts.beton"), "right_image", "n").unwrap();
    let manifest = manifest("f2_layouts");
    let expected = &manifest["samples"][5]["fields"];
    assert_eq!(set.label(5).unwrap(), expected["n"]);
    let image = set.image(5).unwrap();
    assert_eq!(sha256(image.bytes), expected["right_image"]["stored_sha256"]);
}
