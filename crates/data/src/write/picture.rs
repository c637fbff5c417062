//! From the bytes of an image file to what is stored of it.

use std::io::Cursor;

use image::{DynamicImage, ImageReader};

use super::{
    BadImage, Error,
    jpeg::{Compressor, Decompressor},
};
use crate::{
    area::{AreaResizer, Pixels},
    augment::Crop,
    beton::Mode,
    random::{Draws, Operation},
};

/// How images are stored.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Encoding {
    /// Which become JPEGs.
    pub choice: Choice,
    /// Quality of the JPEGs, 1 to 100.
    pub jpeg_quality: u8,
    /// The longer side in pixels that images are reduced to; they are never enlarged.
    pub max_resolution: Option<u32>,
    /// Whether a source that is a JPEG of three channels, is to be one, and is not reduced, is
    /// stored byte by byte as it is.
    pub keep_jpeg: bool,
}

/// Which images become JPEGs; the others are stored raw.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// A share of them, drawn for each by its position in the source. 0 is none, 1 all; between is
    /// ffcv's `proportion`.
    Fraction {
        /// 0 to 1.
        share: f64,
        /// Another seed draws others.
        seed: u64,
    },
    /// Those of more raw bytes than this: ffcv's `smart`.
    LargerThan {
        /// Bytes, 3 per pixel.
        bytes: u64,
    },
}

impl Encoding {
    /// Makes sure that all is in its range.
    ///
    /// # Errors
    /// [`Error::Option`]: the value that is not.
    pub(super) fn check(&self) -> Result<(), Error> {
        let refused = |reason: &str| Err(Error::Option(reason.to_owned()));
        if let Choice::Fraction { share, .. } = self.choice
            && !(0.0..=1.0).contains(&share)
        {
            return refused("the fraction of JPEGs is 0 to 1");
        }
        if !(1..=100).contains(&self.jpeg_quality) {
            return refused("the quality of JPEGs is 1 to 100");
        }
        if self.max_resolution == Some(0) {
            return refused("the maximal resolution is 1 pixel at least");
        }
        Ok(())
    }

    fn mode(&self, position: u64, width: u32, height: u32) -> Mode {
        let is_jpeg = match self.choice {
            Choice::Fraction { share, seed } => {
                Draws::new(seed, 0, position, Operation::Store).uniform() < share
            }
            Choice::LargerThan { bytes } => 3 * u64::from(width) * u64::from(height) > bytes,
        };
        if is_jpeg { Mode::Jpeg } else { Mode::Raw }
    }

    /// The size to be stored: ffcv's arithmetic, and one pixel at least.
    fn size(&self, width: u32, height: u32) -> (u32, u32) {
        match self.max_resolution {
            Some(most) if width.max(height) > most => {
                let ratio = f64::from(most) / f64::from(width.max(height));
                let reduced = |side: u32| ((ratio * f64::from(side)) as u32).max(1);
                (reduced(width), reduced(height))
            }
            _ => (width, height),
        }
    }
}

/// An image ready to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Picture {
    pub(super) mode: Mode,
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) origin: Origin,
}

/// Where the bytes of a picture come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// From its decoded pixels.
    Pixels,
    /// From the source file, untouched.
    Source,
}

/// Prepares images one after the other, with buffers that are reused. One per thread.
pub(super) struct Studio {
    encoding: Encoding,
    decompressor: Decompressor,
    compressor: Compressor,
    resizer: AreaResizer,
    rgb: Vec<u8>,
    reduced: Vec<u8>,
}

impl Studio {
    pub(super) fn new(encoding: Encoding) -> Result<Self, Error> {
        Ok(Self {
            encoding,
            decompressor: Decompressor::new().map_err(Error::Jpeg)?,
            compressor: Compressor::new(encoding.jpeg_quality).map_err(Error::Jpeg)?,
            resizer: AreaResizer::new(),
            rgb: Vec::new(),
            reduced: Vec::new(),
        })
    }

    /// Makes a stored image of a file's bytes, which are looked at to tell its format. `position`
    /// is its place in the source.
    pub(super) fn prepare(&mut self, source: &[u8], position: u64) -> Result<Picture, BadImage> {
        let decoded = self.decode(source)?;
        let (width, height) = self.encoding.size(decoded.width, decoded.height);
        if width.max(height) > u32::from(u16::MAX) {
            return Err(BadImage::TooLarge { width, height });
        }
        let mode = self.encoding.mode(position, width, height);
        let is_reduced = (width, height) != (decoded.width, decoded.height);
        let keep = self.encoding.keep_jpeg && decoded.is_plain_jpeg;
        if keep && mode == Mode::Jpeg && !is_reduced {
            let (bytes, origin) = (source.to_vec(), Origin::Source);
            return Ok(Picture { mode, width, height, bytes, origin });
        }
        if is_reduced {
            self.reduce(decoded, width, height)?;
        }
        let pixels = if is_reduced { &self.reduced } else { &self.rgb };
        let bytes = match mode {
            Mode::Raw => pixels.clone(),
            Mode::Jpeg => self.compressor.encode(pixels, width, height)?.to_vec(),
        };
        Ok(Picture { mode, width, height, bytes, origin: Origin::Pixels })
    }

    /// Decodes into `rgb`. JPEGs are refused at the slightest damage, as Baton's loader would: better
    /// here than in training.
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
        let source = Pixels {
            bytes: &self.rgb,
            width: from.width,
            height: from.height,
            row_bytes: 3 * from.width as usize,
        };
        let whole = Crop { left: 0, top: 0, width: from.width, height: from.height };
        self.resizer
            .resize(source, whole, width, height, &mut self.reduced)
            .map_err(|fault| BadImage::Decode(fault.to_string()))
    }
}

/// What is known of the image in [`Studio::rgb`].
#[derive(Clone, Copy)]
struct Decoded {
    width: u32,
    height: u32,
    is_plain_jpeg: bool,
}

/// As Pillow's `convert("RGB")`: grey is repeated, opacity is dropped without blending. Of 16 bits
/// the upper 8 are taken for colours; for grey, Pillow clips instead, and so does this.
fn to_rgb(image: DynamicImage, rgb: &mut Vec<u8>) -> Result<(), BadImage> {
    rgb.clear();
    let clipped = |value: u16| u8::try_from(value).unwrap_or(u8::MAX);
    let upper = |value: u16| (value >> 8) as u8;
    match image {
        DynamicImage::ImageRgb8(image) => rgb.extend_from_slice(image.as_raw()),
        DynamicImage::ImageRgba8(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]));
        }
        DynamicImage::ImageLuma8(image) => rgb.extend(image.pixels().flat_map(|p| [p[0]; 3])),
        DynamicImage::ImageLumaA8(image) => rgb.extend(image.pixels().flat_map(|p| [p[0]; 3])),
        DynamicImage::ImageLuma16(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| [clipped(pixel[0]); 3]));
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
