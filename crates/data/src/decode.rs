//! From stored bytes to the pixels of one sample: decode, crop, resize, flip.

use fast_image_resize::{
    FilterType, ResizeAlg, ResizeOptions, Resizer,
    images::{TypedCroppedImage, TypedImage, TypedImageRef},
    pixels::U8x3,
};

use crate::{
    Error, SampleFault,
    augment::{Crop, Flip},
    beton::{ImageBytes, Mode},
    turbojpeg::Decompressor,
};

/// Decodes images one after the other. Keeps its buffers: once it has seen the largest image, only
/// the resizer's tables of filter weights are allocated per image.
///
/// One per thread; it is not `Send`.
pub struct Decoder {
    jpeg: Decompressor,
    /// The last JPEG, u8, shape (height, width, 3); longer than needed after a larger one.
    rgb: Vec<u8>,
    resizer: Resizer,
    resize: ResizeOptions,
}

impl Decoder {
    /// A decoder without buffers yet.
    ///
    /// # Errors
    /// [`Error::Decoder`]: libjpeg-turbo did not start.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            jpeg: Decompressor::new().map_err(Error::Decoder)?,
            rgb: Vec::new(),
            resizer: Resizer::new(),
            // Linear interpolation whose kernel widens with the reduction, so that nothing
            // aliases: torchvision's `antialias=True`, Pillow's `BILINEAR`.
            resize: ResizeOptions::new()
                .resize_alg(ResizeAlg::Convolution(FilterType::Bilinear))
                .use_alpha(false),
        })
    }

    /// The whole image: u8, shape (height, width, 3), RGB. Raw images are not copied. JPEGs are
    /// decoded by libjpeg-turbo with the accurate inverse DCT; grey ones become RGB.
    ///
    /// # Errors
    /// The bytes are no JPEG, a damaged one, one of another size than the row says, or CMYK.
    pub fn decode<'a>(&'a mut self, image: &ImageBytes<'a>) -> Result<&'a [u8], SampleFault> {
        whole_image(&mut self.jpeg, &mut self.rgb, image)
    }

    /// Writes `crop`, resized to a square of `resolution` pixels and flipped, into `out`: u8, shape
    /// (resolution, resolution, 3), RGB. A crop of that very size is copied, bit by bit.
    ///
    /// Pixels outside the crop have no influence.
    ///
    /// # Errors
    /// As [`decode`](Self::decode); or the crop is not inside the image, or `out` is too short.
    pub fn render(
        &mut self,
        image: &ImageBytes<'_>,
        crop: Crop,
        flip: Flip,
        resolution: u32,
        out: &mut [u8],
    ) -> Result<(), SampleFault> {
        let rgb = whole_image(&mut self.jpeg, &mut self.rgb, image)?;
        let source = TypedImageRef::<U8x3>::from_buffer(image.width, image.height, rgb)
            .map_err(resize_fault)?;
        // A view, not the resizer's own crop option: that one filters across the crop's edges.
        let Crop { left, top, width, height } = crop;
        let source =
            TypedCroppedImage::from_ref(&source, left, top, width, height).map_err(resize_fault)?;
        let mut target =
            TypedImage::<U8x3>::from_buffer(resolution, resolution, out).map_err(resize_fault)?;
        self.resizer.resize_typed(&source, &mut target, &self.resize).map_err(resize_fault)?;
        if flip == Flip::Mirror {
            mirror(out, resolution);
        }
        Ok(())
    }
}

fn whole_image<'a>(
    jpeg: &mut Decompressor,
    buffer: &'a mut Vec<u8>,
    image: &ImageBytes<'a>,
) -> Result<&'a [u8], SampleFault> {
    match image.mode {
        Mode::Raw => Ok(image.bytes),
        Mode::Jpeg => jpeg.decode(image.bytes, image.width, image.height, buffer),
    }
}

/// Reverses the pixels of every row.
fn mirror(pixels: &mut [u8], resolution: u32) {
    let (pixels, _) = pixels.as_chunks_mut::<3>();
    for row in pixels.chunks_exact_mut((resolution as usize).max(1)) {
        row.reverse();
    }
}

fn resize_fault(error: impl std::fmt::Display) -> SampleFault {
    SampleFault::Resize(error.to_string())
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

    fn render(image: &ImageBytes<'_>, crop: Crop, flip: Flip, resolution: u32) -> Vec<u8> {
        let mut out = vec![77; (resolution * resolution * 3) as usize];
        let mut decoder = Decoder::new().unwrap();
        decoder.render(image, crop, flip, resolution, &mut out).unwrap();
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
            decoder.render(&jpeg(GREY), whole, Flip::Keep, 8, &mut out).unwrap();
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
        let refused =
            Decoder::new().unwrap().render(&raw(4, 4, &pixels), crop, Flip::Keep, 4, &mut out);
        assert!(matches!(refused, Err(SampleFault::Resize(_))));
    }
}
