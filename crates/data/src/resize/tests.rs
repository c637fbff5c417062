use fast_image_resize::{
    FilterType, ResizeAlg, ResizeOptions,
    images::{TypedImage, TypedImageRef},
    pixels::U8x3,
};
use proptest::prelude::*;

use super::*;
use crate::{augment::Crop, random::Draws, random::RandomPurpose};

/// Noise, so that every weight affects the result.
fn noise(width: u32, height: u32, seed: u64) -> Vec<u8> {
    let mut draws = Draws::new(seed, 0, 0, RandomPurpose::Crop);
    (0..3 * width * height).map(|_| draws.below(256) as u8).collect()
}

fn resize(pixels: Pixels<'_>, window: SourceRect, side: u32, flip: Flip) -> Vec<u8> {
    let mut out = vec![7; (3 * side * side) as usize];
    Resizer::new().resize(pixels, window, side, flip, &mut out).unwrap();
    out
}

/// Result of another library with the same algorithm as Pillow.
fn reference(bytes: &[u8], width: u32, height: u32, side: u32) -> Vec<u8> {
    let source = TypedImageRef::<U8x3>::from_buffer(width, height, bytes).unwrap();
    let mut out = vec![0; (3 * side * side) as usize];
    let mut target = TypedImage::<U8x3>::from_buffer(side, side, &mut out).unwrap();
    let options = ResizeOptions::new()
        .resize_alg(ResizeAlg::Convolution(FilterType::Bilinear))
        .use_alpha(false);
    fast_image_resize::Resizer::new().resize_typed(&source, &mut target, &options).unwrap();
    out
}

fn largest_difference(a: &[u8], b: &[u8]) -> u8 {
    a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or_default()
}

#[test]
fn single_colours_are_kept() {
    for value in [0, 1, 127, 128, 254, 255] {
        for (width, height, side) in [(7, 9, 31), (300, 200, 16), (64, 64, 64), (1, 1, 5)] {
            let bytes = vec![value; 3 * width as usize * height as usize];
            let pixels = Pixels::new(&bytes, width, height);
            let out = resize(pixels, SourceRect::whole(&pixels), side, Flip::Keep);
            assert!(out.iter().all(|out| *out == value), "{value}: {width}x{height} to {side}");
        }
    }
}

#[test]
fn an_image_of_the_right_size_is_kept() {
    let bytes = noise(33, 33, 1);
    let pixels = Pixels::new(&bytes, 33, 33);
    assert_eq!(resize(pixels, SourceRect::whole(&pixels), 33, Flip::Keep), bytes);
}

#[test]
fn a_side_of_zero_and_wrong_buffer_sizes_are_refused() {
    let bytes = noise(4, 4, 1);
    let pixels = Pixels::new(&bytes, 4, 4);
    let mut resizer = Resizer::new();
    for (side, len) in [(0, 0), (2, 11), (2, 13)] {
        let window = SourceRect::whole(&pixels);
        let outcome = resizer.resize(pixels, window, side, Flip::Keep, &mut vec![0; len]);
        assert!(matches!(outcome, Err(SampleFault::Resize(_))), "{side}, {len}");
    }
}

/// A window that begins between pixels gives the image shifted by a part of a pixel.
#[test]
fn a_window_may_begin_between_pixels() {
    let ramp: Vec<u8> = (0..32 * 4).flat_map(|i| [(i % 32 * 8) as u8; 3]).collect();
    let pixels = Pixels::new(&ramp, 32, 4);
    let window = SourceRect { left: 8.5, top: 0.0, width: 8.0, height: 4.0 };
    let out = resize(pixels, window, 8, Flip::Keep);
    // Halfway between pixels 8 + i and 9 + i.
    let expected: Vec<u8> = (0..8).map(|i| 8 * (8 + i) + 4).collect();
    let row: Vec<u8> = out[..24].iter().step_by(3).copied().collect();
    assert_eq!(row, expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Results must not depend on the processor, because a run may move to another machine.
    #[test]
    fn the_portable_code_gives_the_same_bits(
        width in 1_u32..200, height in 1_u32..90, side in 1_u32..70, seed: u64, flip: bool,
        shift in 0.0_f64..0.5,
    ) {
        let bytes = noise(width, height, seed);
        let pixels = Pixels::new(&bytes, width, height);
        let (w, h) = (f64::from(width) - shift, f64::from(height) - shift);
        let window = SourceRect { left: shift, top: shift, width: w, height: h };
        let flip = if flip { Flip::Mirror } else { Flip::Keep };
        let mut portable = Resizer::new();
        portable.mix_row = portable::mix_row;
        portable.mix_columns = portable::mix_columns;
        let mut out = vec![0; (3 * side * side) as usize];
        portable.resize(pixels, window, side, flip, &mut out).unwrap();
        prop_assert_eq!(out, resize(pixels, window, side, flip));
    }

    #[test]
    fn the_filter_equals_that_of_pillow_up_to_one_level(
        width in 1_u32..300, height in 1_u32..300, side in 1_u32..100, seed: u64,
    ) {
        let bytes = noise(width, height, seed);
        let pixels = Pixels::new(&bytes, width, height);
        let out = resize(pixels, SourceRect::whole(&pixels), side, Flip::Keep);
        let difference = largest_difference(&out, &reference(&bytes, width, height, side));
        prop_assert!(difference <= 1, "{} levels", difference);
    }

    #[test]
    fn a_mirrored_image_has_its_columns_reversed(
        width in 1_u32..80, height in 1_u32..40, side in 1_u32..40, seed: u64,
    ) {
        let bytes = noise(width, height, seed);
        let pixels = Pixels::new(&bytes, width, height);
        let whole = SourceRect::whole(&pixels);
        let mut kept = resize(pixels, whole, side, Flip::Keep);
        for row in kept.as_chunks_mut::<3>().0.chunks_exact_mut(side as usize) {
            row.reverse();
        }
        prop_assert_eq!(resize(pixels, whole, side, Flip::Mirror), kept);
    }

    #[test]
    fn pixels_outside_a_crop_have_no_influence(
        left in 0_u32..20, top in 0_u32..20, width in 1_u32..30, height in 1_u32..30,
        side in 1_u32..40, seed: u64,
    ) {
        let crop = Crop { left, top, width, height };
        let bytes = noise(50, 50, seed);
        let inside = Pixels::new(&bytes, 50, 50).crop(crop).unwrap();
        let copy: Vec<u8> = (0..height as usize).flat_map(|row| inside.row(row)).copied().collect();
        let copy = Pixels::new(&copy, width, height);
        let whole = SourceRect::whole(&inside);
        prop_assert_eq!(
            resize(inside, whole, side, Flip::Keep),
            resize(copy, whole, side, Flip::Keep)
        );
    }
}
