//! From stored bytes to the pixels of one sample: decode, crop, resize, flip.

use fast_image_resize::{
    FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer,
    images::{CroppedImage, Image, ImageRef},
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
        let source = ImageRef::new(image.width, image.height, rgb, PixelType::U8x3)
            .map_err(resize_fault)?;
        // A view, not the resizer's own crop option: that one filters across the crop's edges.
        let source = CroppedImage::new(&source, crop.left, crop.top, crop.width, crop.height)
            .map_err(resize_fault)?;
        let mut target = Image::from_slice_u8(resolution, resolution, out, PixelType::U8x3)
            .map_err(resize_fault)?;
        self.resizer.resize(&source, &mut target, &self.resize).map_err(resize_fault)?;
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
    if image.mode == Mode::Raw {
        return Ok(image.bytes);
    }
    let needed = 3 * image.width as usize * image.height as usize;
    if buffer.len() < needed {
        buffer.resize(needed, 0);
    }
    let rgb = &mut buffer[..needed];
    jpeg.decode(image.bytes, image.width, image.height, rgb)?;
    Ok(rgb)
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
