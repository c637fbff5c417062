//! Converts a stored image to the pixels of one sample: decode, crop, resize, flip.

use std::time::{Duration, Instant};

use baton_recipe::spec::Resize;

use crate::{
    Error, SampleFault,
    area::AreaResizer,
    augment::{Crop, Flip},
    beton::{Beton, ImageBytes, ImageLocation, Mode},
    pixels::Pixels,
    resize::{Resizer, SourceRect},
    turbojpeg::{Dct, DecodeRegion, Decompressor},
};

/// Crop, flip and resize of one image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageTransform {
    /// The part of the image to use.
    pub crop: Crop,
    /// Whether to flip it.
    pub flip: Flip,
    /// Side of the sample in pixels.
    pub resolution: u32,
    /// Algorithm for resizing the crop.
    pub resize: Resize,
}

/// Decodes images one after the other, with reused buffers.
///
/// Each thread needs its own; it is not `Send`.
pub struct Decoder {
    jpeg: Decompressor,
    /// The stored bytes of the last image; longer than needed after a larger one.
    stored: Vec<u8>,
    /// The pixels of the last JPEG; longer than needed after a larger one.
    rgb: Vec<u8>,
    fast: Resizer,
    area: AreaResizer,
}

impl Decoder {
    /// A decoder with empty buffers.
    ///
    /// # Errors
    /// [`Error::Decoder`]: libjpeg-turbo cannot be initialized.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            jpeg: Decompressor::new().map_err(Error::Decoder)?,
            stored: Vec::new(),
            rgb: Vec::new(),
            fast: Resizer::new(),
            area: AreaResizer::default(),
        })
    }

    /// The whole image: u8, shape (height, width, 3), RGB. Raw images are not copied. JPEGs are decoded by
    /// libjpeg-turbo with the accurate inverse DCT; grey images are converted to RGB.
    ///
    /// # Errors
    /// The bytes are not a JPEG, or the JPEG is damaged, has another size than in its row, or is CMYK.
    pub fn decode<'a>(&'a mut self, image: &ImageBytes<'a>) -> Result<&'a [u8], SampleFault> {
        match image.mode {
            Mode::Raw => Ok(image.bytes),
            Mode::Jpeg => self.jpeg.decode(image.bytes, image.width, image.height, &mut self.rgb),
        }
    }

    /// Applies `transform` to an image and writes the sample into `out`: u8, shape (resolution, resolution, 3), RGB.
    /// A crop that already has this size is copied unchanged.
    ///
    /// Only the part of a JPEG that the crop needs is decoded. If the crop is at least twice as large as the sample
    /// and the resize is fast, the inverse DCT already reduces it; otherwise pixels outside the crop have no
    /// influence. With [`Resize::Area`] the pixels are identical to ffcv's.
    ///
    /// # Errors
    /// As [`decode`](Self::decode); or the crop is not inside the image, or `out` has another size.
    pub fn render(
        &mut self,
        image: &ImageBytes<'_>,
        transform: &ImageTransform,
        out: &mut [u8],
    ) -> Result<(), SampleFault> {
        let Self { jpeg, rgb, fast, area, .. } = self;
        let &ImageBytes { mode, width, height, bytes } = image;
        let (pixels, window) = match mode {
            Mode::Raw => {
                let pixels = Pixels::new(bytes, width, height).crop(transform.crop)?;
                (pixels, SourceRect::whole(&pixels))
            }
            Mode::Jpeg => {
                transform.crop.check_inside(width, height)?;
                jpeg.decode_region(bytes, width, height, &decode_region(transform), rgb)?
            }
        };
        let (side, flip) = (transform.resolution, transform.flip);
        match transform.resize {
            Resize::Fast => fast.resize(pixels, window, side, flip, out),
            Resize::Area => {
                area.resize(pixels, side, side, out)?;
                if flip == Flip::Mirror {
                    mirror(out, side);
                }
                Ok(())
            }
        }
    }

    /// Like [`render`](Self::render), for an image in a file. If it is raw, only the rows of the crop are read.
    pub(crate) fn render_stored(
        &mut self,
        beton: &Beton,
        sample: u64,
        location: &ImageLocation,
        transform: &ImageTransform,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let mut stored = std::mem::take(&mut self.stored);
        let &ImageLocation { mode, width, height, len, .. } = location;
        let (rows, transform) = match mode {
            Mode::Jpeg => (0..height, *transform),
            Mode::Raw => {
                let (top, end) = (transform.crop.top, transform.crop.top + transform.crop.height);
                (top..end, ImageTransform { crop: Crop { top: 0, ..transform.crop }, ..*transform })
            }
        };
        let part = match mode {
            Mode::Jpeg => 0..len,
            Mode::Raw => {
                let row_bytes = 3 * u64::from(width);
                row_bytes * u64::from(rows.start)..row_bytes * u64::from(rows.end)
            }
        };
        let height = rows.end - rows.start;
        let outcome = beton.image_part(sample, location, part, &mut stored).and_then(|bytes| {
            self.render(&ImageBytes { mode, width, height, bytes }, &transform, out)
                .map_err(|fault| beton.sample_error(sample, location.start, fault))
        });
        self.stored = stored;
        outcome
    }

    /// Makes a sample and returns the time of each stage. `huffman` is not a stage but the minimum work of any JPEG
    /// decoder: entropy decoding down to the last row of the crop.
    pub(crate) fn time_stages(
        &mut self,
        beton: &Beton,
        sample: u64,
        location: &ImageLocation,
        transform: &ImageTransform,
        out: &mut [u8],
    ) -> Result<Vec<(&'static str, Duration)>, Error> {
        let mut stored = std::mem::take(&mut self.stored);
        let started = Instant::now();
        let bytes = beton.image_part(sample, location, 0..location.len, &mut stored)?;
        let mut stages = vec![("read", started.elapsed())];
        let &ImageLocation { mode, width, height, .. } = location;
        let image = ImageBytes { mode, width, height, bytes };
        let refused = |fault| beton.sample_error(sample, location.start, fault);

        let started = Instant::now();
        let mut decoded = Duration::ZERO;
        if mode == Mode::Jpeg {
            let part = decode_region(transform);
            self.jpeg.decode_region(bytes, width, height, &part, &mut self.rgb).map_err(refused)?;
            decoded = started.elapsed();
            stages.push(("decode", decoded));
            let last = transform.crop.top + transform.crop.height - 1;
            let crop = Crop { left: 0, top: last, width: 1, height: 1 };
            let last_row = DecodeRegion { crop, ..part };
            let started = Instant::now();
            self.jpeg
                .decode_region(bytes, width, height, &last_row, &mut self.rgb)
                .map_err(refused)?;
            stages.push(("huffman", started.elapsed()));
        }
        let started = Instant::now();
        self.render(&image, transform, out).map_err(refused)?;
        stages.push(("resize", started.elapsed().saturating_sub(decoded)));
        self.stored = stored;
        Ok(stages)
    }
}

/// The part of a JPEG to decode.
fn decode_region(transform: &ImageTransform) -> DecodeRegion {
    let Crop { width, height, .. } = transform.crop;
    match transform.resize {
        Resize::Area => DecodeRegion { crop: transform.crop, shrink: 1, dct: Dct::Fast },
        Resize::Fast => {
            let reduction = width.min(height) / transform.resolution.max(1);
            // The largest power of two that does not make the image smaller than the sample.
            let shrink = 1 << reduction.clamp(1, 8).ilog2();
            DecodeRegion { crop: transform.crop, shrink, dct: Dct::Accurate }
        }
    }
}

/// Reverses the pixels of every row.
fn mirror(pixels: &mut [u8], resolution: u32) {
    let (pixels, _) = pixels.as_chunks_mut::<3>();
    for row in pixels.chunks_exact_mut((resolution as usize).max(1)) {
        row.reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREY: &[u8] = include_bytes!("../tests/fixtures/grey-16x8.jpg");
    const CMYK: &[u8] = include_bytes!("../tests/fixtures/cmyk-16x8.jpg");

    fn raw(width: u32, height: u32, bytes: &[u8]) -> ImageBytes<'_> {
        ImageBytes { mode: Mode::Raw, width, height, bytes }
    }

    fn jpeg(bytes: &[u8]) -> ImageBytes<'_> {
        ImageBytes { mode: Mode::Jpeg, width: 16, height: 8, bytes }
    }

    /// An image with the pixels `colour(x, y)`.
    fn picture(width: u32, height: u32, colour: impl Fn(u32, u32) -> [u8; 3]) -> Vec<u8> {
        (0..height)
            .flat_map(|y| (0..width).map(move |x| (x, y)))
            .flat_map(|(x, y)| colour(x, y))
            .collect()
    }

    fn transform(crop: Crop, flip: Flip, resolution: u32) -> ImageTransform {
        ImageTransform { crop, flip, resolution, resize: Resize::Fast }
    }

    fn render(image: &ImageBytes<'_>, crop: Crop, flip: Flip, resolution: u32) -> Vec<u8> {
        let mut out = vec![77; (resolution * resolution * 3) as usize];
        let mut decoder = Decoder::new().unwrap();
        decoder.render(image, &transform(crop, flip, resolution), &mut out).unwrap();
        out
    }

    #[test]
    fn a_crop_of_the_right_size_is_copied() {
        let colour = |x, y| [x as u8, y as u8, 200];
        let pixels = picture(20, 10, colour);
        let crop = Crop { left: 7, top: 2, width: 5, height: 5 };
        let copy = render(&raw(20, 10, &pixels), crop, Flip::Keep, 5);
        assert_eq!(copy, picture(5, 5, |x, y| colour(x + 7, y + 2)));
    }

    #[test]
    fn a_mirrored_sample_has_its_columns_reversed() {
        let pixels = picture(6, 6, |x, y| [x as u8, y as u8, 9]);
        let crop = Crop { left: 1, top: 1, width: 4, height: 4 };
        let mirrored = render(&raw(6, 6, &pixels), crop, Flip::Mirror, 4);
        assert_eq!(mirrored, picture(4, 4, |x, y| [4 - x as u8, y as u8 + 1, 9]));
    }

    #[test]
    fn pixels_outside_the_crop_have_no_influence() {
        let crop = Crop { left: 8, top: 8, width: 16, height: 16 };
        let inside = |v| (8..24).contains(&v);
        let pixels =
            picture(32, 32, |x, y| if inside(x) && inside(y) { [40, 50, 60] } else { [255; 3] });
        for resolution in [4, 7, 15, 33] {
            let sample = render(&raw(32, 32, &pixels), crop, Flip::Keep, resolution);
            assert_eq!(sample, picture(resolution, resolution, |_, _| [40, 50, 60]));
        }
    }

    #[test]
    fn a_reduction_averages_instead_of_skipping_pixels() {
        let pixels = picture(64, 64, |x, y| [255 * ((x + y) % 2) as u8; 3]);
        let whole = Crop { left: 0, top: 0, width: 64, height: 64 };
        for value in render(&raw(64, 64, &pixels), whole, Flip::Keep, 8) {
            assert!((126..=129).contains(&value), "{value} in a fine black and white pattern");
        }
    }

    /// Expected: result of Pillow 13.0's `resize((3, 3), BILINEAR)` on the same image.
    #[test]
    fn the_filter_equals_that_of_torchvision_and_pillow() {
        let pixels = picture(7, 5, |x, y| [(x * 36) as u8, (y * 60) as u8, (x * y * 10) as u8]);
        let whole = Crop { left: 0, top: 0, width: 7, height: 5 };
        let sample = render(&raw(7, 5, &pixels), whole, Flip::Keep, 3);
        let pillow = [
            [[31, 26, 4], [108, 26, 13], [185, 26, 22]],
            [[31, 120, 17], [108, 120, 60], [185, 120, 103]],
            [[31, 214, 31], [108, 214, 107], [185, 214, 184]],
        ];
        assert_eq!(sample, pillow.as_flattened().as_flattened());
    }

    #[test]
    fn a_decoder_handles_images_of_changing_sizes() {
        let whole = Crop { left: 0, top: 0, width: 16, height: 8 };
        let grey = render(&jpeg(GREY), whole, Flip::Keep, 8);
        let large = picture(64, 64, |x, _| [x as u8; 3]);
        let mut decoder = Decoder::new().unwrap();
        for _ in 0..2 {
            assert_eq!(decoder.decode(&raw(64, 64, &large)).unwrap(), large);
            let mut out = vec![0; 8 * 8 * 3];
            decoder.render(&jpeg(GREY), &transform(whole, Flip::Keep, 8), &mut out).unwrap();
            assert_eq!(out, grey);
        }
    }

    #[test]
    fn a_grey_jpeg_is_converted_to_rgb() {
        assert_eq!(Decoder::new().unwrap().decode(&jpeg(GREY)).unwrap(), [100; 16 * 8 * 3]);
    }

    #[test]
    fn a_cmyk_jpeg_is_refused() {
        let refused = Decoder::new().unwrap().decode(&jpeg(CMYK)).unwrap_err();
        assert_eq!(refused, SampleFault::Cmyk);
    }

    #[test]
    fn bytes_that_are_not_a_jpeg_are_refused() {
        let mut decoder = Decoder::new().unwrap();
        for bytes in [&b""[..], b"\xFF", b"\x89PNG"] {
            assert_eq!(decoder.decode(&jpeg(bytes)).unwrap_err(), SampleFault::NotJpeg);
        }
    }

    #[test]
    fn a_jpeg_of_another_size_than_in_its_row_is_refused() {
        let image = ImageBytes { width: 15, ..jpeg(GREY) };
        let refused = Decoder::new().unwrap().decode(&image).unwrap_err();
        let (jpeg_width, jpeg_height, width, height) = (16, 8, 15, 8);
        assert_eq!(refused, SampleFault::JpegSize { jpeg_width, jpeg_height, width, height });
    }

    #[test]
    fn a_truncated_jpeg_is_an_error_and_does_not_affect_later_images() {
        let mut decoder = Decoder::new().unwrap();
        for end in 0..GREY.len() - 2 {
            assert!(decoder.decode(&jpeg(&GREY[..end])).is_err(), "cut at {end}");
            assert!(decoder.decode(&jpeg(GREY)).is_ok(), "after a cut at {end}");
        }
    }

    /// For such a stream libjpeg-turbo keeps the size of the previous image.
    #[test]
    fn a_jpeg_with_only_tables_is_refused() {
        let frame = GREY.windows(2).position(|marker| marker == [0xFF, 0xC0]).unwrap();
        let tables = [&GREY[..frame], &[0xFF, 0xD9]].concat();
        let mut decoder = Decoder::new().unwrap();
        assert!(decoder.decode(&jpeg(GREY)).is_ok());
        let refused = decoder.decode(&jpeg(&tables)).unwrap_err();
        assert!(matches!(refused, SampleFault::Jpeg(_)), "{refused}");
    }

    #[test]
    fn a_crop_outside_the_image_is_refused() {
        let pixels = [0; 4 * 4 * 3];
        let crop = Crop { left: 2, top: 0, width: 3, height: 4 };
        let mut out = [0; 4 * 4 * 3];
        let refused = Decoder::new().unwrap().render(
            &raw(4, 4, &pixels),
            &transform(crop, Flip::Keep, 4),
            &mut out,
        );
        assert!(matches!(refused, Err(SampleFault::Resize(_))));
    }
}
