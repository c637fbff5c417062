use proptest::prelude::*;

use super::{handle::MAX_SCANS, *};
use crate::random::{Draws, RandomPurpose};

/// Format of a JPEG.
#[derive(Clone, Copy, Debug)]
struct JpegFormat {
    sampling: sys::TJSAMP,
    is_progressive: bool,
}

const WIDTH: u32 = 111;
const HEIGHT: u32 = 93;

/// Coloured noise, rough and smooth, so that every pixel affects its neighbours.
fn jpeg(kind: JpegFormat, seed: u64) -> Vec<u8> {
    let mut draws = Draws::new(seed, 0, 0, RandomPurpose::Crop);
    let pixels: Vec<u8> = (0..WIDTH * HEIGHT)
        .flat_map(|i| {
            let smooth = (i % WIDTH + i / WIDTH) as u8;
            [smooth, draws.below(256) as u8, smooth ^ draws.below(64) as u8]
        })
        .collect();
    compress(&pixels, kind)
}

fn compress(pixels: &[u8], kind: JpegFormat) -> Vec<u8> {
    // SAFETY: pointers and sizes are those of live slices; the library allocates the buffer, which is freed below.
    unsafe {
        let handle = sys::tj3Init(sys::TJINIT_TJINIT_COMPRESS as c_int);
        for (parameter, value) in [
            (sys::TJPARAM_TJPARAM_QUALITY, 90),
            (sys::TJPARAM_TJPARAM_SUBSAMP, kind.sampling as c_int),
            (sys::TJPARAM_TJPARAM_PROGRESSIVE, c_int::from(kind.is_progressive)),
        ] {
            assert_eq!(sys::tj3Set(handle, parameter as c_int, value), 0);
        }
        let (mut buffer, mut len) = (std::ptr::null_mut(), 0);
        let code = sys::tj3Compress8(
            handle,
            pixels.as_ptr(),
            WIDTH as c_int,
            0,
            HEIGHT as c_int,
            sys::TJPF_TJPF_RGB as c_int,
            &raw mut buffer,
            &raw mut len,
        );
        assert_eq!(code, 0);
        let jpeg = std::slice::from_raw_parts(buffer, len as usize).to_vec();
        sys::tj3Free(buffer.cast());
        sys::tj3Destroy(handle);
        jpeg
    }
}

const SAMPLINGS: [sys::TJSAMP; 7] = [
    sys::TJSAMP_TJSAMP_444,
    sys::TJSAMP_TJSAMP_422,
    sys::TJSAMP_TJSAMP_420,
    sys::TJSAMP_TJSAMP_GRAY,
    sys::TJSAMP_TJSAMP_440,
    sys::TJSAMP_TJSAMP_411,
    sys::TJSAMP_TJSAMP_441,
];

fn decode(jpeg: &[u8], part: &DecodeRegion) -> (Vec<u8>, SourceRect) {
    let (mut decompressor, mut buffer) = (Decompressor::new().unwrap(), Vec::new());
    let (pixels, window) =
        decompressor.decode_region(jpeg, WIDTH, HEIGHT, part, &mut buffer).unwrap();
    let rows = 0..pixels.height as usize;
    (rows.flat_map(|row| pixels.row(row)).copied().collect(), window)
}

fn whole(shrink: u32, dct: Dct) -> DecodeRegion {
    DecodeRegion { crop: Crop { left: 0, top: 0, width: WIDTH, height: HEIGHT }, shrink, dct }
}

/// A part of decoded pixels, `width` to a row.
fn cut(pixels: &[u8], width: u32, [left, top, right, bottom]: [u32; 4]) -> Vec<u8> {
    (top..bottom)
        .flat_map(|row| {
            &pixels[(3 * (row * width + left)) as usize..(3 * (row * width + right)) as usize]
        })
        .copied()
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Also at the edges, where smooth chroma uses pixels outside.
    #[test]
    fn a_region_has_the_same_pixels_as_the_whole_image(
        sampling in 0_usize..7, is_progressive: bool, is_fast: bool, scale in 0_u32..4,
        left in 0..WIDTH, top in 0..HEIGHT, width in 1..=WIDTH, height in 1..=HEIGHT, seed in 0_u64..4,
    ) {
        let kind = JpegFormat { sampling: SAMPLINGS[sampling], is_progressive };
        let jpeg = jpeg(kind, seed);
        let (width, height) = (width.min(WIDTH - left), height.min(HEIGHT - top));
        let crop = Crop { left, top, width, height };
        let dct = if is_fast { Dct::Fast } else { Dct::Accurate };
        let shrink = 1 << scale;
        let (part, window) = decode(&jpeg, &DecodeRegion { crop, shrink, dct });
        let (all, _) = decode(&jpeg, &whole(shrink, dct));
        let edges = [
            left / shrink,
            top / shrink,
            (left + width).div_ceil(shrink),
            (top + height).div_ceil(shrink),
        ];
        prop_assert!(part == cut(&all, WIDTH.div_ceil(shrink), edges), "{:?} {:?}", kind, crop);
        let start = |edge: u32| f64::from(edge) / f64::from(shrink) - f64::from(edge / shrink);
        prop_assert_eq!((window.left, window.top), (start(left), start(top)));
    }
}

/// Rows below a crop are not read, so damage there has no effect.
#[test]
fn damage_below_a_region_is_ignored_and_above_it_is_an_error() {
    let kind = JpegFormat { sampling: sys::TJSAMP_TJSAMP_420, is_progressive: false };
    let mut jpeg = jpeg(kind, 1);
    let len = jpeg.len();
    jpeg.truncate(len / 2);
    let (mut decompressor, mut buffer) = (Decompressor::new().unwrap(), Vec::new());
    let mut try_rows = |top: u32, height: u32| {
        let crop = Crop { left: 0, top, width: WIDTH, height };
        let part = DecodeRegion { crop, shrink: 1, dct: Dct::Accurate };
        decompressor.decode_region(&jpeg, WIDTH, HEIGHT, &part, &mut buffer).map(|_| ())
    };
    assert_eq!(try_rows(0, 8), Ok(()));
    assert!(matches!(try_rows(HEIGHT - 8, 8), Err(SampleFault::Jpeg(_))));
    assert_eq!(try_rows(0, 8), Ok(()), "after a failure");
}

#[test]
fn more_scans_than_any_encoder_writes_are_refused() {
    let kind = JpegFormat { sampling: sys::TJSAMP_TJSAMP_GRAY, is_progressive: true };
    let jpeg = jpeg(kind, 1);
    // Repeat the last scan.
    let scan = jpeg.windows(2).rposition(|marker| marker == [0xFF, 0xDA]).unwrap();
    let (head, tail) = jpeg[..jpeg.len() - 2].split_at(scan);
    let many = [head, &tail.repeat(MAX_SCANS as usize), &[0xFF, 0xD9]].concat();
    let mut decompressor = Decompressor::new().unwrap();
    let refused = decompressor.decode(&many, WIDTH, HEIGHT, &mut Vec::new()).map(|_| ());
    assert!(matches!(refused, Err(SampleFault::Jpeg(_))), "{refused:?}");
}
