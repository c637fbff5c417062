//! Decodes JPEGs and raw images completely, and a part of them like training.
//!
//! The first bytes of an input select a part of the image; the rest is the stored image.
#![no_main]

use baton_data::{
    Decoder, ImageBytes, ImageTransform, Mode, SampleFault,
    augment::{Crop, Flip},
};
use baton_fuzz::{
    damage::{self, FRAME_BYTES},
    memory::within,
    observe,
};
use baton_recipe::spec::Resize;
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

/// Most pixels that a decoder creates from a stored byte (`PIXELS_PER_BYTE` in `turbojpeg.rs`).
const PIXELS_PER_BYTE: usize = 512;
/// Memory of the resizes' tables and tiles for the widest possible image, and of the sample.
const FIXED_BYTES: usize = 16 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Some((selection, stored)) = bytes.split_first_chunk::<FRAME_BYTES>() else { return };
    let Some((image, frame)) = read(selection, stored) else { return };
    within(3 * PIXELS_PER_BYTE * stored.len() + FIXED_BYTES, || check(&image, &frame));
});

/// The image, and the selected transform of it.
fn read<'a>(
    &[flags, left, top, width, height, resolution, raw_width, _]: &[u8; FRAME_BYTES],
    stored: &'a [u8],
) -> Option<(ImageBytes<'a>, ImageTransform)> {
    // One in eight inputs is raw, with any width; for a JPEG, a wrong width is refused at once.
    let (mode, image_width, image_height) = if flags & 7 == 7 {
        let image_width = u32::from(raw_width) + 1;
        (Mode::Raw, image_width, (stored.len() / 3) as u32 / image_width)
    } else {
        let (width, height) = damage::jpeg_size(stored).unwrap_or((16, 8));
        (Mode::Jpeg, width, height)
    };
    if image_width == 0 || image_height == 0 {
        // No row has such a size: see `Beton::image_location`.
        return None;
    }
    let bytes = match mode {
        Mode::Raw => &stored[..(3 * image_width * image_height) as usize],
        Mode::Jpeg => stored,
    };
    // A crop inside the image, in 256ths of the available size.
    let share = |byte: u8, size: u32| ((u64::from(size) * u64::from(byte)) >> 8) as u32;
    let (left, top) = (share(left, image_width), share(top, image_height));
    let mut width = 1 + share(width, image_width - left);
    let mut height = 1 + share(height, image_height - top);
    let mut resolution = 1 + u32::from(resolution) % 97;
    if flags & 8 != 0 {
        // Do not resize.
        width = width.min(height).min(128);
        height = width;
        resolution = width;
    }
    let crop = Crop { left, top, width, height };
    let flip = if flags & 16 != 0 { Flip::Mirror } else { Flip::Keep };
    let resize = if flags & 32 != 0 { Resize::Area } else { Resize::Fast };
    let image = ImageBytes { mode, width: image_width, height: image_height, bytes };
    Some((image, ImageTransform { crop, flip, resolution, resize }))
}

fn check(image: &ImageBytes<'_>, frame: &ImageTransform) {
    let mut decoder = Decoder::new().expect("the decoder is created");
    let side = frame.resolution as usize;
    let mut sample = vec![0; 3 * side * side];
    // Render the part first, so that its buffer has exactly the needed size and a write after its end is detected.
    let is_rendered = observe(decoder.render(image, frame, &mut sample)).is_some();
    let whole = observe(decoder.decode(image)).map(<[u8]>::to_vec);
    if let Some(whole) = &whole {
        assert_eq!(whole.len(), 3 * (image.width * image.height) as usize);
        assert!(is_rendered, "the whole image decodes, but {frame:?} of it does not");
    }
    if is_rendered {
        // A progressive image without all scans is smoothed across the borders of blocks, but a block at the edge of a
        // part has no neighbour.
        if let Some(whole) = &whole
            && !damage::is_progressive(image.bytes)
            && let ImageTransform { crop, flip: Flip::Keep, resize: Resize::Fast, .. } = *frame
            && crop.width == frame.resolution
            && crop.height == frame.resolution
        {
            assert!(
                sample == cut(whole, image.width, crop),
                "{crop:?} differs from the whole image"
            );
        }
        let mut again = vec![0; sample.len()];
        let result: Result<(), SampleFault> = decoder.render(image, frame, &mut again);
        assert!(result.is_ok() && again == sample, "the second result differs: {result:?}");
    }
}

/// A crop of pixels with `width` pixels per row.
fn cut(pixels: &[u8], width: u32, crop: Crop) -> Vec<u8> {
    let row = |row: u32| {
        let start = 3 * (row * width + crop.left) as usize;
        &pixels[start..start + 3 * crop.width as usize]
    };
    (crop.top..crop.top + crop.height).flat_map(row).copied().collect()
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    damage::jpeg(data, size, max_size, seed)
});
