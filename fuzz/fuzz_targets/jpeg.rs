//! JPEGs, and raw images: decoded whole, and in part as training does.
//!
//! The first bytes of an input say what to see of the image, the rest is the image as stored.
#![no_main]

use baton_data::{
    Decoder, Frame, ImageBytes, Mode, SampleFault,
    augment::{Crop, Flip},
};
use baton_fuzz::{
    damage::{self, FRAME_BYTES},
    memory::within,
    tell,
};
use baton_recipe::spec::Resize;
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

/// Most pixels that a decoder makes of a stored byte (`PIXELS_PER_BYTE` in `turbojpeg.rs`).
const PIXELS_PER_BYTE: usize = 512;
/// Tables and tiles of the resizes for an image as wide as a row can say, and the sample.
const FIXED_BYTES: usize = 16 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, stored)) = bytes.split_first_chunk::<FRAME_BYTES>() else { return };
    let Some((image, frame)) = read(choice, stored) else { return };
    within(3 * PIXELS_PER_BYTE * stored.len() + FIXED_BYTES, || see(&image, &frame));
});

/// What the first bytes say.
fn read<'a>(
    &[flags, left, top, width, height, resolution, raw_width, _]: &[u8; FRAME_BYTES],
    stored: &'a [u8],
) -> Option<(ImageBytes<'a>, Frame)> {
    // One in eight is raw, where the width is free; of a JPEG it has to be right to get anywhere.
    let (mode, image_width, image_height) = if flags & 7 == 7 {
        let image_width = u32::from(raw_width) + 1;
        (Mode::Raw, image_width, (stored.len() / 3) as u32 / image_width)
    } else {
        let (width, height) = damage::jpeg_size(stored).unwrap_or((16, 8));
        (Mode::Jpeg, width, height)
    };
    if image_width == 0 || image_height == 0 {
        // No row says so: see `Beton::image_place`.
        return None;
    }
    let bytes = match mode {
        Mode::Raw => &stored[..(3 * image_width * image_height) as usize],
        Mode::Jpeg => stored,
    };
    // A crop inside the image, in 256ths of what there is.
    let share = |byte: u8, most: u32| ((u64::from(most) * u64::from(byte)) >> 8) as u32;
    let (left, top) = (share(left, image_width), share(top, image_height));
    let mut width = 1 + share(width, image_width - left);
    let mut height = 1 + share(height, image_height - top);
    let mut resolution = 1 + u32::from(resolution) % 97;
    if flags & 8 != 0 {
        // Nothing to resize.
        width = width.min(height).min(128);
        height = width;
        resolution = width;
    }
    let crop = Crop { left, top, width, height };
    let flip = if flags & 16 != 0 { Flip::Mirror } else { Flip::Keep };
    let resize = if flags & 32 != 0 { Resize::Area } else { Resize::Fast };
    let image = ImageBytes { mode, width: image_width, height: image_height, bytes };
    Some((image, Frame { crop, flip, resolution, resize }))
}

fn see(image: &ImageBytes<'_>, frame: &Frame) {
    let mut decoder = Decoder::new().expect("a decoder starts");
    let side = frame.resolution as usize;
    let mut sample = vec![0; 3 * side * side];
    // First the part, so that its buffer is no larger than needed and a write behind it is noticed.
    let seen = tell(decoder.render(image, frame, &mut sample)).is_some();
    let whole = tell(decoder.decode(image)).map(<[u8]>::to_vec);
    if let Some(whole) = &whole {
        assert_eq!(whole.len(), 3 * (image.width * image.height) as usize);
        assert!(seen, "all of the image decodes, and {frame:?} of it does not");
    }
    if seen {
        // A progressive image that lacks scans is smoothed across the borders of blocks, and a block at
        // the edge of a part has no neighbour there.
        if let Some(whole) = &whole
            && !damage::is_progressive(image.bytes)
            && let Frame { crop, flip: Flip::Keep, resize: Resize::Fast, .. } = *frame
            && crop.width == frame.resolution
            && crop.height == frame.resolution
        {
            assert!(sample == cut(whole, image.width, crop), "{crop:?} differs from the whole");
        }
        let mut again = vec![0; sample.len()];
        let outcome: Result<(), SampleFault> = decoder.render(image, frame, &mut again);
        assert!(outcome.is_ok() && again == sample, "the second time is another: {outcome:?}");
    }
}

/// A part of pixels, `width` to a row.
fn cut(pixels: &[u8], width: u32, crop: Crop) -> Vec<u8> {
    let row = |row: u32| {
        let start = 3 * (row * width + crop.left) as usize;
        &pixels[start..start + 3 * crop.width as usize]
    };
    (crop.top..crop.top + crop.height).flat_map(row).copied().collect()
}

fuzz_mutator!(|data: &mut [u8], size: usize, most: usize, seed: u32| {
    damage::jpeg(data, size, most, seed)
});
