//! Files written by ffcv, compared with their manifests.

use std::{fs, io::Read, path::PathBuf};

use baton_data::{
    Beton, Dataset, Decoder, ImageTransform, InputType, Mode, Source,
    augment::{Crop, Flip},
    beton::{Field, FieldType},
};
use baton_recipe::spec::Resize;
use flate2::read::GzDecoder;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::sketch::Saved;

const ALL: [&str; 17] = [
    "a_raw",
    "b_jpg90",
    "b2_jpg80_maxres160",
    "c_proportion50",
    "d_smart40000",
    "e2_const96x64_mixed",
    "f_allfields",
    "f2_layouts",
    "f3_imageonly",
    "f4_scalars_only",
    "f5_empty_bytes",
    "g_single",
    "h_pagefill",
    "h2_retry",
    "k_two_workers",
    "u_stock_2MiB",
    "u_stock_default8MiB",
];

pub(crate) fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn unpacked(name: &str) -> Vec<u8> {
    let packed = fs::File::open(folder().join(format!("{name}.gz"))).unwrap();
    let mut bytes = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut bytes).unwrap();
    bytes
}

pub(crate) fn file(name: &str) -> Vec<u8> {
    unpacked(&format!("{name}.beton"))
}

fn manifest(name: &str) -> Value {
    serde_json::from_slice(&unpacked(&format!("{name}.manifest.json"))).unwrap()
}

fn each(check: impl Fn(&str, &Beton, &Value)) {
    for name in ALL {
        let saved = Saved::new(&file(name));
        check(name, &Beton::open(saved.path()).unwrap(), &manifest(name));
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn of_type(beton: &Beton, kind: FieldType) -> impl Iterator<Item = &Field> {
    beton.fields().iter().filter(move |field| field.kind == kind)
}

/// The manifest's entry for one field of each sample.
fn expected<'a>(manifest: &'a Value, field: &'a str) -> impl Iterator<Item = (u64, &'a Value)> {
    let samples = manifest["samples"].as_array().unwrap().iter();
    (0..).zip(samples.map(move |sample| &sample["fields"][field]))
}

/// Compares every image of a file: size, format, stored bytes, decoded pixels.
fn compare_images(name: &str, beton: &Beton, manifest: &Value) {
    let mut decoder = Decoder::new().unwrap();
    let mut buffer = Vec::new();
    for field in of_type(beton, FieldType::RgbImage) {
        let column = beton.image_column(&field.name).unwrap();
        beton.check_images(&column).unwrap();
        for (sample, expected) in expected(manifest, &field.name) {
            let image = beton.image(&column, sample, &mut buffer).unwrap();
            let mode = if image.mode == Mode::Jpeg { "jpg" } else { "raw" };
            assert_eq!(mode, expected["mode"]);
            assert_eq!(u64::from(image.width), number(&expected["width"]));
            assert_eq!(u64::from(image.height), number(&expected["height"]));
            assert_eq!(sha256(image.bytes), expected["stored_sha256"]);
            let pixels = sha256(decoder.decode(&image).unwrap());
            // For raw images there is only one digest of the pixels.
            let digest = if mode == "raw" { "rgb_sha256" } else { "rgb_sha256_islow" };
            assert_eq!(pixels, expected[digest], "{name}, sample {sample}");
        }
    }
}

#[test]
fn fields_and_rows_have_the_layout_of_ffcv() {
    each(|name, beton, manifest| {
        assert_eq!(beton.len(), number(&manifest["header"]["num_samples"]), "{name}");
        let fields = manifest["fields"].as_array().unwrap();
        let offsets = manifest["metadata"]["field_offsets"].as_array().unwrap();
        assert_eq!(beton.fields().len(), fields.len(), "{name}");
        for ((field, expected), offset) in beton.fields().iter().zip(fields).zip(offsets) {
            assert_eq!(field.name, expected["name"], "{name}");
            assert_eq!(field.kind.name(), expected["type"], "{name}");
            assert_eq!(field.offset, number(offset), "{name}");
        }
    });
}

#[test]
fn numbers_are_read() {
    each(|name, beton, manifest| {
        for field in of_type(beton, FieldType::Int) {
            let column = beton.int_column(&field.name).unwrap();
            for (sample, expected) in expected(manifest, &field.name) {
                let value = beton.int(&column, sample).unwrap();
                assert_eq!(value, *expected, "{name}, sample {sample}");
            }
        }
        for field in of_type(beton, FieldType::Float) {
            let column = beton.float_column(&field.name).unwrap();
            for (sample, expected) in expected(manifest, &field.name) {
                let value = beton.float(&column, sample).unwrap();
                assert_eq!(value.to_bits(), expected.as_f64().unwrap().to_bits(), "{name}");
            }
        }
    });
}

#[test]
fn bytes_and_json_are_read() {
    let mut buffer = Vec::new();
    each_with(&mut buffer, |name, beton, manifest, buffer| {
        for field in of_type(beton, FieldType::Bytes) {
            let column = beton.bytes_column(&field.name).unwrap();
            for (sample, expected) in expected(manifest, &field.name) {
                let value = beton.bytes(&column, sample, buffer).unwrap();
                assert_eq!(value.len() as u64, number(&expected["size"]), "{name}");
                assert_eq!(sha256(value), expected["stored_sha256"], "{name}, sample {sample}");
            }
        }
        for field in of_type(beton, FieldType::Json) {
            let column = beton.bytes_column(&field.name).unwrap();
            for (sample, expected) in expected(manifest, &field.name) {
                let value = beton.bytes(&column, sample, buffer).unwrap();
                let value: Value = serde_json::from_slice(value).unwrap();
                assert_eq!(value, expected["json"], "{name}, sample {sample}");
            }
        }
    });
}

fn each_with(buffer: &mut Vec<u8>, mut check: impl FnMut(&str, &Beton, &Value, &mut Vec<u8>)) {
    for name in ALL {
        let saved = Saved::new(&file(name));
        check(name, &Beton::open(saved.path()).unwrap(), &manifest(name), buffer);
    }
}

#[test]
fn arrays_and_tensors_are_read() {
    each(|name, beton, manifest| {
        let descriptors = manifest["fields"].as_array().unwrap();
        for (field, descriptor) in beton.fields().iter().zip(descriptors) {
            if ![FieldType::NdArray, FieldType::TorchTensor].contains(&field.kind) {
                continue;
            }
            let column = beton.array_column(&field.name).unwrap();
            let array = column.array_type();
            assert_eq!(array.dtype.code(), descriptor["dtype"], "{name}");
            let shape: Vec<u64> =
                descriptor["shape"].as_array().unwrap().iter().map(number).collect();
            assert_eq!(array.shape, shape, "{name}");
            let mut value = vec![0; column.value_bytes() as usize];
            for (sample, expected) in expected(manifest, &field.name) {
                beton.array(&column, sample, &mut value).unwrap();
                assert_eq!(sha256(&value), expected["stored_sha256"], "{name}, sample {sample}");
            }
        }
    });
}

#[test]
fn images_have_the_stored_bytes_and_the_pixels_of_libjpeg_turbo() {
    each(compare_images);
}

/// The area resize of a whole image to the same size gives the result of ffcv's decoder.
#[test]
fn jpegs_decoded_like_in_ffcv_have_identical_pixels() {
    let mut decoder = Decoder::new().unwrap();
    let mut compared = 0;
    each_with(&mut Vec::new(), |name, beton, manifest, buffer| {
        for field in of_type(beton, FieldType::RgbImage) {
            let column = beton.image_column(&field.name).unwrap();
            for (sample, expected) in expected(manifest, &field.name) {
                let image = beton.image(&column, sample, buffer).unwrap();
                if image.width != image.height {
                    continue;
                }
                let side = image.width;
                let crop = Crop { left: 0, top: 0, width: side, height: side };
                let transform = ImageTransform {
                    crop,
                    flip: Flip::Keep,
                    resolution: side,
                    resize: Resize::Area,
                };
                let mut out = vec![0; (side * side * 3) as usize];
                decoder.render(&image, &transform, &mut out).unwrap();
                assert_eq!(sha256(&out), expected["rgb_sha256"], "{name}, sample {sample}");
                compared += u32::from(image.mode == Mode::Jpeg);
            }
        }
    });
    assert!(compared > 0, "no square JPEG in any fixture");
}

/// ffcv does not write such files, but they are valid for Baton.
#[test]
fn an_image_may_cross_pages() {
    for name in ["a_raw", "h2_retry"] {
        let mut file = file(name);
        file[4..8].copy_from_slice(&4_096_u32.to_le_bytes());
        let saved = Saved::new(&file);
        compare_images(name, &Beton::open(saved.path()).unwrap(), &manifest(name));
    }
}

#[test]
fn a_dataset_can_use_input_and_label_fields_of_any_name() {
    let saved = Saved::new(&file("f2_layouts"));
    let fields = |input: &str| Source {
        input_field: input.to_owned(),
        label_field: "n".to_owned(),
        ..Source::new(saved.location())
    };
    let set = Dataset::open(fields("right_image")).unwrap();
    assert_eq!(set.label(5).unwrap(), manifest("f2_layouts")["samples"][5]["fields"]["n"]);
    assert_eq!(*set.input_type(), InputType::Image);

    let set = Dataset::open(fields("arr_i16")).unwrap();
    assert_eq!(*set.input_type(), InputType::Array(vec![2, 3, 5]));
}
