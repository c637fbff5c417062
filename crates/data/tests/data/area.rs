//! The area resize, compared with OpenCV's as used by FFCV.

use std::{fs, io::Read};

use baton_data::{
    Decoder, ImageTransform,
    area::{AreaResizer, Pixels},
    augment::{Crop, Flip, center_crop},
};
use baton_recipe::spec::Resize;
use flate2::read::GzDecoder;
use serde_json::Value;

use crate::{
    fixtures::{file, folder, sha256},
    sketch::{Opened, Saved},
};

/// Images that FFCV stored raw, and FFCV's results for them.
struct References {
    json: Value,
    images: Vec<(u32, u32, Vec<u8>)>,
}

fn number(value: &Value) -> u32 {
    value.as_u64().unwrap().try_into().unwrap()
}

fn references() -> References {
    let json: Value =
        serde_json::from_str(&fs::read_to_string(folder().join("a_raw.area.json")).unwrap())
            .unwrap();
    let mut pixels = GzDecoder::new(fs::File::open(folder().join("a_raw.rgb.gz")).unwrap());
    let image = |image: &Value| {
        let (width, height) = (number(&image["width"]), number(&image["height"]));
        let mut bytes = vec![0; 3 * (width * height) as usize];
        pixels.read_exact(&mut bytes).unwrap();
        (width, height, bytes)
    };
    let images = json["images"].as_array().unwrap().iter().map(image).collect();
    References { json, images }
}

fn resize(
    resizer: &mut AreaResizer,
    (width, height, bytes): &(u32, u32, Vec<u8>),
    crop: Crop,
    [target_width, target_height]: [u32; 2],
) -> String {
    let source = Pixels { bytes, width: *width, height: *height, row_bytes: 3 * *width as usize };
    let mut out = vec![0; 3 * (target_width * target_height) as usize];
    let source = source.crop(crop).unwrap();
    resizer.resize(source, target_width, target_height, &mut out).unwrap();
    sha256(&out)
}

#[test]
fn crops_of_every_kind_are_bit_identical_to_those_of_opencv() {
    let References { json, images } = references();
    let mut resizer = AreaResizer::default();
    for reference in json["crops"].as_array().unwrap() {
        let [left, top, width, height] = [0, 1, 2, 3].map(|i| number(&reference["crop"][i]));
        let crop = Crop { left, top, width, height };
        let target = [0, 1].map(|i| number(&reference["target"][i]));
        let image = &images[number(&reference["sample"]) as usize];
        let digest = resize(&mut resizer, image, crop, target);
        assert_eq!(digest, reference["sha256"], "{crop:?} to {target:?}");
    }
}

#[test]
fn centre_crops_are_bit_identical_to_those_of_ffcv() {
    let References { json, images } = references();
    let mut resizer = AreaResizer::default();
    for (image, expected) in images.iter().zip(json["images"].as_array().unwrap()) {
        let crop = center_crop(224.0 / 256.0, image.0, image.1);
        assert_eq!(resize(&mut resizer, image, crop, [64, 64]), expected["center64"], "{crop:?}");
    }
}

/// From the stored JPEG to the sample: FFCV's inverse DCT, crop and resize.
#[test]
fn samples_of_jpegs_are_bit_identical_to_those_of_ffcv() {
    let text = fs::read_to_string(folder().join("b_jpg90.area.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let saved = Saved::new(&file("b_jpg90"));
    let (opened, mut decoder) = (Opened::new(&saved.path()), Decoder::new().unwrap());
    let mut render = |sample: u64, crop: Option<Crop>, resolution: u32| {
        let image = opened.image(sample);
        let centre = || center_crop(224.0 / 256.0, image.width, image.height);
        let crop = crop.unwrap_or_else(centre);
        let transform = ImageTransform { crop, flip: Flip::Keep, resolution, resize: Resize::Area };
        let mut out = vec![0; 3 * (resolution * resolution) as usize];
        decoder.render(&image, &transform, &mut out).unwrap();
        sha256(&out)
    };
    for (sample, expected) in (0..).zip(json["images"].as_array().unwrap()) {
        assert_eq!(render(sample, None, 64), expected["center64"], "sample {sample}");
    }
    let mut squares = 0;
    for reference in json["crops"].as_array().unwrap() {
        let [left, top, width, height] = [0, 1, 2, 3].map(|i| number(&reference["crop"][i]));
        let [target_width, target_height] = [0, 1].map(|i| number(&reference["target"][i]));
        if target_width != target_height {
            continue;
        }
        squares += 1;
        let crop = Crop { left, top, width, height };
        let sample = u64::from(number(&reference["sample"]));
        assert_eq!(render(sample, Some(crop), target_width), reference["sha256"], "{crop:?}");
    }
    assert!(squares > 0);
}
