//! From stored bytes to the pixels of one sample: decode, crop, resize, flip.

use std::time::{Duration, Instant};

use baton_recipe::spec::Resize;

use crate::{
    Error, SampleFault,
    area::AreaResizer,
    augment::{Crop, Flip},
    beton::{Beton, ImageBytes, ImagePlace, Mode},
    pixels::Pixels,
    resize::{Resizer, Window},
    turbojpeg::{Dct, Decompressor, Part},
};

/// Which part of an image becomes a sample, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frame {
    /// What is seen of the image.
    pub crop: Crop,
    /// Which way round.
    pub flip: Flip,
    /// Side of the sample in pixels.
    pub resolution: u32,
    /// How the crop gets that size.
    pub resize: Resize,
}

/// Decodes images one after the other, into buffers that it keeps.
///
/// One per thread; it is not `Send`.
pub struct Decoder {
    jpeg: Decompressor,
    /// The last image as stored; longer than needed after a larger one.
    stored: Vec<u8>,
    /// The pixels of the last JPEG; longer than needed after a larger one.
    rgb: Vec<u8>,
    fast: Resizer,
    area: AreaResizer,
}

impl Decoder {
    /// A decoder without buffers yet.
    ///
    /// # Errors
    /// [`Error::Decoder`]: libjpeg-turbo did not start.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            jpeg: Decompressor::new().map_err(Error::Decoder)?,
            stored: Vec::new(),
            rgb: Vec::new(),
            fast: Resizer::new(),
            area: AreaResizer::new(),
        })
    }

    /// The whole image: u8, shape (height, width, 3), RGB. Raw images are not copied. JPEGs are
    /// decoded by libjpeg-turbo with the accurate inverse DCT; grey ones become RGB.
    ///
    /// # Errors
    /// The bytes are no JPEG, a damaged one, one of another size than the row says, or CMYK.
    pub fn decode<'a>(&'a mut self, image: &ImageBytes<'a>) -> Result<&'a [u8], SampleFault> {
        match image.mode {
            Mode::Raw => Ok(image.bytes),
            Mode::Jpeg => self.jpeg.decode(image.bytes, image.width, image.height, &mut self.rgb),
        }
    }

    /// Writes the sample that `frame` shows of an image into `out`: u8, shape
    /// (resolution, resolution, 3), RGB. A crop of that very size is copied, bit by bit.
    ///
    /// Of a JPEG only what the crop needs is decoded. If the crop is twice as large as the sample or
    /// more and the resize is fast, the inverse DCT already reduces it; else pixels outside the crop
    /// have no influence. With [`Resize::Area`] the pixels are ffcv's own.
    ///
    /// # Errors
    /// As [`decode`](Self::decode); or the crop is not inside the image, or `out` is of another size.
    pub fn render(
        &mut self,
        image: &ImageBytes<'_>,
        frame: &Frame,
        out: &mut [u8],
    ) -> Result<(), SampleFault> {
        let Self { jpeg, rgb, fast, area, .. } = self;
        let &ImageBytes { mode, width, height, bytes } = image;
        let (pixels, window) = match mode {
            Mode::Raw => {
                let pixels = Pixels::new(bytes, width, height).crop(frame.crop)?;
                (pixels, Window::whole(&pixels))
            }
            Mode::Jpeg => {
                frame.crop.check_inside(width, height)?;
                jpeg.decode_part(bytes, width, height, &part(frame), rgb)?
            }
        };
        let (side, flip) = (frame.resolution, frame.flip);
        match frame.resize {
            Resize::Fast => fast.resize(pixels, window, side, flip, out),
            Resize::Area => {
                let Pixels { width, height, .. } = pixels;
                area.resize(pixels, Crop { left: 0, top: 0, width, height }, side, side, out)?;
                if flip == Flip::Mirror {
                    mirror(out, side);
                }
                Ok(())
            }
        }
    }

    /// As [`render`](Self::render), of an image in a file; of a raw one only the rows of the crop are
    /// read.
    pub(crate) fn render_stored(
        &mut self,
        beton: &Beton,
        sample: u64,
        place: &ImagePlace,
        frame: &Frame,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let mut stored = std::mem::take(&mut self.stored);
        let &ImagePlace { mode, width, height, len, .. } = place;
        let (rows, frame) = match mode {
            Mode::Jpeg => (0..height, *frame),
            Mode::Raw => {
                let (top, end) = (frame.crop.top, frame.crop.top + frame.crop.height);
                (top..end, Frame { crop: Crop { top: 0, ..frame.crop }, ..*frame })
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
        let outcome = beton.image_part(sample, place, part, &mut stored).and_then(|bytes| {
            self.render(&ImageBytes { mode, width, height, bytes }, &frame, out)
                .map_err(|fault| beton.sample_error(sample, place.start, fault))
        });
        self.stored = stored;
        outcome
    }

    /// Makes a sample and tells how long each stage took. `huffman` is no stage but the least that any
    /// decoder of a JPEG must do: entropy decoding down to the last row of the crop.
    pub(crate) fn time_stages(
        &mut self,
        beton: &Beton,
        sample: u64,
        place: &ImagePlace,
        frame: &Frame,
        out: &mut [u8],
    ) -> Result<Vec<(&'static str, Duration)>, Error> {
        let mut stored = std::mem::take(&mut self.stored);
        let begun = Instant::now();
        let bytes = beton.image_part(sample, place, 0..place.len, &mut stored)?;
        let mut stages = vec![("read", begun.elapsed())];
        let &ImagePlace { mode, width, height, .. } = place;
        let image = ImageBytes { mode, width, height, bytes };
        let refused = |fault| beton.sample_error(sample, place.start, fault);

        let begun = Instant::now();
        let mut decoded = Duration::ZERO;
        if mode == Mode::Jpeg {
            let part = part(frame);
            self.jpeg.decode_part(bytes, width, height, &part, &mut self.rgb).map_err(refused)?;
            decoded = begun.elapsed();
            stages.push(("decode", decoded));
            let last = frame.crop.top + frame.crop.height - 1;
            let crop = Crop { left: 0, top: last, width: 1, height: 1 };
            let least = Part { crop, ..part };
            let begun = Instant::now();
            self.jpeg.decode_part(bytes, width, height, &least, &mut self.rgb).map_err(refused)?;
            stages.push(("huffman", begun.elapsed()));
        }
        let begun = Instant::now();
        self.render(&image, frame, out).map_err(refused)?;
        stages.push(("resize", begun.elapsed().saturating_sub(decoded)));
        self.stored = stored;
        Ok(stages)
    }
}

/// What to decode of a JPEG.
fn part(frame: &Frame) -> Part {
    let Crop { width, height, .. } = frame.crop;
    match frame.resize {
        Resize::Area => Part { crop: frame.crop, shrink: 1, dct: Dct::Fast },
        Resize::Fast => {
            let reduction = width.min(height) / frame.resolution.max(1);
            // The largest power of two that leaves the resize something to reduce.
            let shrink = 1 << reduction.clamp(1, 8).ilog2();
            Part { crop: frame.crop, shrink, dct: Dct::Accurate }
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

    /// An image whose pixel (x, y) is `colour(x, y)`.
    fn picture(width: u32, height: u32, colour: impl Fn(u32, u32) -> [u8; 3]) -> Vec<u8> {
        (0..height)
            .flat_map(|y| (0..width).map(move |x| (x, y)))
            .flat_map(|(x, y)| colour(x, y))
            .collect()
    }

    fn frame(crop: Crop, flip: Flip, resolution: u32) -> Frame {
        Frame { crop, flip, resolution, resize: Resize::Fast }
    }

    fn render(image: &ImageBytes<'_>, crop: Crop, flip: Flip, resolution: u32) -> Vec<u8> {
        let mut out = vec![77; (resolution * resolution * 3) as usize];
        let mut decoder = Decoder::new().unwrap();
        decoder.render(image, &frame(crop, flip, resolution), &mut out).unwrap();
        out
    }

    #[test]
    fn a_crop_of_the_right_size_is_copied() {
        let place = |x, y| [x as u8, y as u8, 200];
        let pixels = picture(20, 10, place);
        let crop = Crop { left: 7, top: 2, width: 5, height: 5 };
        let copy = render(&raw(20, 10, &pixels), crop, Flip::Keep, 5);
        assert_eq!(copy, picture(5, 5, |x, y| place(x + 7, y + 2)));
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

    /// The answer of Pillow 13.0 to `resize((3, 3), BILINEAR)` on the same picture.
    #[test]
    fn the_filter_is_the_one_torchvision_and_pillow_use() {
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
    fn a_decoder_shrinks_and_grows_with_its_images() {
        let whole = Crop { left: 0, top: 0, width: 16, height: 8 };
        let grey = render(&jpeg(GREY), whole, Flip::Keep, 8);
        let large = picture(64, 64, |x, _| [x as u8; 3]);
        let mut decoder = Decoder::new().unwrap();
        for _ in 0..2 {
            assert_eq!(decoder.decode(&raw(64, 64, &large)).unwrap(), large);
            let mut out = vec![0; 8 * 8 * 3];
            decoder.render(&jpeg(GREY), &frame(whole, Flip::Keep, 8), &mut out).unwrap();
            assert_eq!(out, grey);
        }
    }

    #[test]
    fn a_grey_jpeg_becomes_rgb() {
        assert_eq!(Decoder::new().unwrap().decode(&jpeg(GREY)).unwrap(), [100; 16 * 8 * 3]);
    }

    #[test]
    fn a_cmyk_jpeg_is_refused() {
        let refused = Decoder::new().unwrap().decode(&jpeg(CMYK)).unwrap_err();
        assert_eq!(refused, SampleFault::Cmyk);
    }

    #[test]
    fn bytes_that_are_no_jpeg_are_refused() {
        let mut decoder = Decoder::new().unwrap();
        for bytes in [&b""[..], b"\xFF", b"\x89PNG"] {
            assert_eq!(decoder.decode(&jpeg(bytes)).unwrap_err(), SampleFault::NotJpeg);
        }
    }

    #[test]
    fn a_jpeg_of_another_size_than_its_row_says_is_refused() {
        let image = ImageBytes { width: 15, ..jpeg(GREY) };
        let refused = Decoder::new().unwrap().decode(&image).unwrap_err();
        let (jpeg_width, jpeg_height, width, height) = (16, 8, 15, 8);
        assert_eq!(refused, SampleFault::JpegSize { jpeg_width, jpeg_height, width, height });
    }

    #[test]
    fn a_jpeg_cut_off_anywhere_is_an_error_and_harms_no_later_image() {
        let mut decoder = Decoder::new().unwrap();
        for end in 0..GREY.len() - 2 {
            assert!(decoder.decode(&jpeg(&GREY[..end])).is_err(), "cut at {end}");
            assert!(decoder.decode(&jpeg(GREY)).is_ok(), "after a cut at {end}");
        }
    }

    /// For such a stream libjpeg-turbo keeps the size of the image before.
    #[test]
    fn a_jpeg_with_tables_only_is_refused() {
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
            &frame(crop, Flip::Keep, 4),
            &mut out,
        );
        assert!(matches!(refused, Err(SampleFault::Resize(_))));
    }
}
