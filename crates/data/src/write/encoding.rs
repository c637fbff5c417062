//! Converts an image file to the stored image.

use std::{
    io::Cursor,
    panic::{AssertUnwindSafe, catch_unwind},
};

use image::{DynamicImage, ImageReader};

use super::{
    BadImage, Error,
    jpeg::{Compressor, Decompressor},
};
use crate::{
    area::{AreaResizer, Pixels},
    beton::Mode,
    random::{Draws, RandomPurpose},
    turbojpeg::MAX_PIXELS,
};

/// How images are stored.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Encoding {
    /// Which images are stored as JPEG.
    pub choice: JpegSelection,
    /// Quality of the JPEGs, 1 to 100.
    pub jpeg_quality: u8,
    /// Maximum length of the longer side in pixels; larger images are reduced, none is enlarged.
    pub max_resolution: Option<u32>,
    /// Whether the bytes of a source JPEG with three channels are stored unchanged, if it is to be stored as JPEG and
    /// not reduced.
    pub keep_jpeg: bool,
}

/// Which images are stored as JPEG; the others are stored raw.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum JpegSelection {
    /// A random share of the images, selected by their position in the source: ffcv's `proportion`.
    Fraction {
        /// Share of the images, 0 to 1.
        share: f64,
        /// Seed of the selection.
        seed: u64,
    },
    /// Images above this raw size: ffcv's `smart`.
    LargerThan {
        /// Raw size in bytes, 3 per pixel.
        bytes: u64,
    },
}

impl Encoding {
    /// Checks that all values are valid.
    ///
    /// # Errors
    /// [`Error::Option`] with the first invalid value.
    pub(super) fn check(&self) -> Result<(), Error> {
        let refused = |reason: &str| Err(Error::Option(reason.to_owned()));
        if let JpegSelection::Fraction { share, .. } = self.choice
            && !(0.0..=1.0).contains(&share)
        {
            return refused("the fraction of JPEGs must be 0 to 1");
        }
        if !(1..=100).contains(&self.jpeg_quality) {
            return refused("the quality of JPEGs must be 1 to 100");
        }
        if self.max_resolution == Some(0) {
            return refused("the maximal resolution must be at least 1 pixel");
        }
        Ok(())
    }

    fn mode(&self, position: u64, width: u32, height: u32) -> Mode {
        let is_jpeg = match self.choice {
            JpegSelection::Fraction { share, seed } => {
                Draws::new(seed, 0, position, RandomPurpose::Store).uniform() < share
            }
            JpegSelection::LargerThan { bytes } => 3 * u64::from(width) * u64::from(height) > bytes,
        };
        if is_jpeg { Mode::Jpeg } else { Mode::Raw }
    }

    /// The stored size, computed like in ffcv; at least one pixel.
    fn size(&self, width: u32, height: u32) -> (u32, u32) {
        match self.max_resolution {
            Some(max_side) if width.max(height) > max_side => {
                let ratio = f64::from(max_side) / f64::from(width.max(height));
                let reduced = |side: u32| ((ratio * f64::from(side)) as u32).max(1);
                (reduced(width), reduced(height))
            }
            _ => (width, height),
        }
    }
}

/// An image ready to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredImage {
    pub(super) mode: Mode,
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) origin: Origin,
}

/// Origin of the bytes of a stored image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Encoded from the decoded pixels.
    Pixels,
    /// Copied from the source file.
    Source,
}

/// Encodes images one after the other, with reused buffers; a decoder that panics is an error of its image. Each thread needs its
/// own.
pub(super) struct ImageEncoder {
    encoding: Encoding,
    buffers: Option<EncoderBuffers>,
}

impl ImageEncoder {
    pub(super) fn new(encoding: Encoding) -> Self {
        Self { encoding, buffers: None }
    }

    /// Encodes an image file. The format is detected from its bytes. `position` is the position of the image in the
    /// source.
    ///
    /// # Errors
    /// libjpeg-turbo cannot be started; the inner result is about the image.
    pub(super) fn prepare(
        &mut self,
        source: &[u8],
        position: u64,
    ) -> Result<Result<StoredImage, BadImage>, Error> {
        let mut buffers = match self.buffers.take() {
            Some(buffers) => buffers,
            None => EncoderBuffers::new(self.encoding)?,
        };
        // Decoders of rare formats may panic on unusual files.
        let prepared = catch_unwind(AssertUnwindSafe(|| buffers.prepare(source, position)));
        Ok(match prepared {
            Ok(prepared) => {
                self.buffers = Some(buffers);
                prepared
            }
            Err(_) => {
                Err(BadImage::Decode("its decoder panicked, see the message on stderr".to_owned()))
            }
        })
    }
}

/// libjpeg-turbo and the buffers of an [`ImageEncoder`].
struct EncoderBuffers {
    encoding: Encoding,
    decompressor: Decompressor,
    compressor: Compressor,
    resizer: AreaResizer,
    rgb: Vec<u8>,
    reduced: Vec<u8>,
}

impl EncoderBuffers {
    fn new(encoding: Encoding) -> Result<Self, Error> {
        Ok(Self {
            encoding,
            decompressor: Decompressor::new().map_err(Error::Jpeg)?,
            compressor: Compressor::new(encoding.jpeg_quality).map_err(Error::Jpeg)?,
            resizer: AreaResizer::default(),
            rgb: Vec::new(),
            reduced: Vec::new(),
        })
    }

    fn prepare(&mut self, source: &[u8], position: u64) -> Result<StoredImage, BadImage> {
        let decoded = self.decode(source)?;
        let (width, height) = self.encoding.size(decoded.width, decoded.height);
        let mode = self.encoding.mode(position, width, height);
        check_size(mode, width, height)?;
        let is_reduced = (width, height) != (decoded.width, decoded.height);
        let keep = self.encoding.keep_jpeg && decoded.is_plain_jpeg;
        if keep && mode == Mode::Jpeg && !is_reduced {
            let (bytes, origin) = (source.to_vec(), Origin::Source);
            return Ok(StoredImage { mode, width, height, bytes, origin });
        }
        if is_reduced {
            self.reduce(decoded, width, height)?;
        }
        let pixels = if is_reduced { &self.reduced } else { &self.rgb };
        let bytes = match mode {
            Mode::Raw => pixels.clone(),
            Mode::Jpeg => self.compressor.encode(pixels, width, height)?.to_vec(),
        };
        Ok(StoredImage { mode, width, height, bytes, origin: Origin::Pixels })
    }

    /// Decodes into `rgb`. Refuses JPEGs with any damage, because Baton's loader would refuse them during training.
    fn decode(&mut self, source: &[u8]) -> Result<Decoded, BadImage> {
        if source.starts_with(&[0xFF, 0xD8]) {
            let header = self.decompressor.decode(source, &mut self.rgb)?;
            return Ok(Decoded {
                width: header.width,
                height: header.height,
                is_plain_jpeg: header.is_plain_colour,
            });
        }
        let reader = ImageReader::new(Cursor::new(source)).with_guessed_format();
        let reader = reader.map_err(|error| BadImage::Read(error.to_string()))?;
        if reader.format().is_none() {
            return Err(BadImage::Unknown);
        }
        let image = reader.decode().map_err(|error| BadImage::Decode(error.to_string()))?;
        let (width, height) = (image.width(), image.height());
        if width == 0 || height == 0 {
            return Err(BadImage::Decode("it has no pixels".to_owned()));
        }
        to_rgb(image, &mut self.rgb)?;
        Ok(Decoded { width, height, is_plain_jpeg: false })
    }

    fn reduce(&mut self, from: Decoded, width: u32, height: u32) -> Result<(), BadImage> {
        self.reduced.resize(3 * width as usize * height as usize, 0);
        let source = Pixels::new(&self.rgb, from.width, from.height);
        self.resizer
            .resize(source, width, height, &mut self.reduced)
            .map_err(|fault| BadImage::Decode(fault.to_string()))
    }
}

/// Checks that the format can store an image of this size, and that Baton's loader would not refuse it.
fn check_size(mode: Mode, width: u32, height: u32) -> Result<(), BadImage> {
    if width.max(height) > u32::from(u16::MAX) {
        return Err(BadImage::TooLarge { width, height });
    }
    if mode == Mode::Jpeg && u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(BadImage::TooManyPixels { width, height, max_pixels: MAX_PIXELS });
    }
    Ok(())
}

/// Properties of the image in [`EncoderBuffers::rgb`].
#[derive(Clone, Copy)]
struct Decoded {
    width: u32,
    height: u32,
    is_plain_jpeg: bool,
}

/// Converts like Pillow's `convert("RGB")`: grey values are repeated, the alpha channel is dropped without blending.
/// For 16-bit colours the upper 8 bits are used. Pillow takes 16-bit grey values as they are and clips those that need more
/// than 8 bits, which would make an X-ray white: they are refused.
fn to_rgb(image: DynamicImage, rgb: &mut Vec<u8>) -> Result<(), BadImage> {
    rgb.clear();
    let upper = |value: u16| (value >> 8) as u8;
    match image {
        DynamicImage::ImageRgb8(image) => rgb.extend_from_slice(image.as_raw()),
        DynamicImage::ImageRgba8(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]));
        }
        DynamicImage::ImageLuma8(image) => rgb.extend(image.pixels().flat_map(|p| [p[0]; 3])),
        DynamicImage::ImageLumaA8(image) => rgb.extend(image.pixels().flat_map(|p| [p[0]; 3])),
        DynamicImage::ImageLuma16(image) => {
            for pixel in image.pixels() {
                let value = u8::try_from(pixel[0]).map_err(|_| BadImage::Grey16)?;
                rgb.extend([value; 3]);
            }
        }
        DynamicImage::ImageLumaA16(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| [upper(pixel[0]); 3]));
        }
        DynamicImage::ImageRgb16(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| [0, 1, 2].map(|i| upper(pixel[i]))));
        }
        DynamicImage::ImageRgba16(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| [0, 1, 2].map(|i| upper(pixel[i]))));
        }
        other => return Err(BadImage::Pixels(format!("{:?}", other.color()))),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jpegs_that_the_loader_would_refuse_are_refused() {
        assert_eq!(check_size(Mode::Jpeg, 1 << 14, 1 << 14), Ok(()));
        let error = check_size(Mode::Jpeg, 1 << 14, (1 << 14) + 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "has 16384x16385 pixels, but a JPEG can have at most 268435456: set --max-resolution"
        );
        assert_eq!(check_size(Mode::Raw, 1 << 14, (1 << 14) + 1), Ok(()));
        for mode in [Mode::Jpeg, Mode::Raw] {
            let (width, height) = (1 << 16, 1);
            let too_large = Err(BadImage::TooLarge { width, height });
            assert_eq!(check_size(mode, width, height), too_large);
        }
    }
}
