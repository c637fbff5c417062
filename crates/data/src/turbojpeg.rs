//! Safe wrapper of libjpeg-turbo's JPEG decoder.
#![allow(unsafe_code)] // Calls of C functions; each block explains why it is sound.

mod handle;

use std::ffi::c_int;

use turbojpeg_sys as sys;

pub(crate) use self::handle::Handle;
use crate::{SampleFault, augment::Crop, pixels::Pixels, resize::SourceRect};

/// Maximum number of pixels per byte of Huffman codes: in every scan, each 8 x 8 block takes at least one bit. A larger
/// size is damaged, and no memory may be allocated for it.
pub(crate) const PIXELS_PER_BYTE: u64 = 8 * 64;
/// Maximum number of pixels of one image, 16384 x 16384: three times the limit at which Pillow suspects an attack.
pub(crate) const MAX_PIXELS: u64 = 1 << 28;
/// Number of additional columns decoded on each side of a crop, because smooth chroma depends on neighbouring
/// columns.
const SIDE_COLUMNS: u32 = 2;

/// The inverse DCT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dct {
    /// Within one level of the exact result.
    Accurate,
    /// The DCT that ffcv uses: up to six levels of error at quality 90, and red and blue are darker by one on
    /// average.
    Fast,
}

/// The part of an image to decode, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeRegion {
    /// The needed pixels, not empty.
    pub(crate) crop: Crop,
    /// Factor by which the DCT reduces the image: 1, 2, 4 or 8.
    pub(crate) shrink: u32,
    pub(crate) dct: Dct,
}

/// A decompressor with its tables and buffers, reused for all images.
pub(crate) struct Decompressor(Handle);

impl Decompressor {
    /// Fails if memory is exhausted.
    pub(crate) fn new() -> Result<Self, String> {
        let mut handle = Handle::new(sys::TJINIT_TJINIT_DECOMPRESS)?;
        handle.guard()?;
        Ok(Self(handle))
    }

    /// Decodes a whole image to RGB with the accurate inverse DCT and smooth chroma: u8, shape
    /// (height, width, 3), at the start of `buffer`, which grows as needed.
    pub(crate) fn decode<'a>(
        &mut self,
        jpeg: &[u8],
        width: u32,
        height: u32,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], SampleFault> {
        let crop = Crop { left: 0, top: 0, width, height };
        let region = DecodeRegion { crop, shrink: 1, dct: Dct::Accurate };
        Ok(self.decode_region(jpeg, width, height, &region, buffer)?.0.bytes)
    }

    /// Decodes a part of an image of `width` x `height` pixels to RGB with smooth chroma, into `buffer`, which grows
    /// as needed.
    ///
    /// Without shrinking the result is exactly the crop, with the same pixels as when the whole image is decoded:
    /// rows above it are only Huffman-decoded, rows below it are not even read. With shrinking the result is the
    /// pixels that the crop touches, and the position of the crop in them. (A progressive image without all of its
    /// scans differs at the edges of the crop, because the library smooths blocks using their neighbours there. A
    /// lossless image is never shrunk.)
    pub(crate) fn decode_region<'a>(
        &mut self,
        jpeg: &[u8],
        width: u32,
        height: u32,
        region: &DecodeRegion,
        buffer: &'a mut Vec<u8>,
    ) -> Result<(Pixels<'a>, SourceRect), SampleFault> {
        let outcome = self.try_decode(jpeg, width, height, region, buffer);
        if outcome.is_err() {
            // After some failures in a header the library treats the next image as a continuation of the failed one.
            *self = Self::new().map_err(SampleFault::Jpeg)?;
        }
        outcome
    }

    fn try_decode<'a>(
        &mut self,
        jpeg: &[u8],
        width: u32,
        height: u32,
        region: &DecodeRegion,
        buffer: &'a mut Vec<u8>,
    ) -> Result<(Pixels<'a>, SourceRect), SampleFault> {
        self.read_header(jpeg, width, height)?;
        let DecodeRegion { crop, shrink, dct } = *region;
        // The library ignores the scale of a lossless image, and would write beyond the end of a smaller buffer.
        let shrink = if self.is_lossless() { 1 } else { shrink };
        let scaled = |length: u32| length.div_ceil(shrink);
        let whole = PixelRect { left: 0, top: 0, right: scaled(width), bottom: scaled(height) };
        let needed = PixelRect {
            left: crop.left / shrink,
            top: crop.top / shrink,
            right: scaled(crop.left + crop.width),
            bottom: scaled(crop.top + crop.height),
        };
        let decoded = match self.mcu_columns() {
            Some(columns) => needed.widened(columns / shrink, &whole),
            None => whole,
        };
        let area = if decoded == whole { PixelRect::default() } else { decoded };
        let fast = c_int::from(dct == Dct::Fast);
        self.0.set(sys::TJPARAM_TJPARAM_FASTDCT, fast).map_err(SampleFault::Jpeg)?;
        // SAFETY: the handle is live; the callee refuses invalid values.
        let code = unsafe {
            sys::tj3SetScalingFactor(
                self.0.raw(),
                sys::tjscalingfactor { num: 1, denom: shrink as c_int },
            )
        };
        self.0.check(code).map_err(SampleFault::Jpeg)?;
        // SAFETY: as above.
        let code = unsafe { sys::tj3SetCroppingRegion(self.0.raw(), area.region()) };
        self.0.check(code).map_err(SampleFault::Jpeg)?;

        let row_bytes = 3 * (decoded.right - decoded.left) as usize;
        let rows = (decoded.bottom - decoded.top) as usize;
        if buffer.len() < row_bytes * rows {
            buffer.resize(row_bytes * rows, 0);
        }
        let out = &mut buffer[..row_bytes * rows];
        // SAFETY: the handle is live, and input pointer and length are those of a slice. The decoder writes the rows
        // of the region just set, or of the whole scaled image if it is empty, with as many bytes each and
        // `row_bytes` apart: exactly the length of `out`. It parses the header again, from the same bytes in our
        // memory, so the size is the one just checked; a stream of tables without an image, for which the first parse
        // sets no size, is refused by the second.
        let code = unsafe {
            sys::tj3Decompress8(
                self.0.raw(),
                jpeg.as_ptr(),
                jpeg.len() as sys::size_t,
                out.as_mut_ptr(),
                row_bytes as c_int,
                sys::TJPF_TJPF_RGB as c_int,
            )
        };
        self.0.check(code).map_err(SampleFault::Jpeg)?;

        let pixels = Pixels::new(out, decoded.right - decoded.left, rows as u32);
        let touched = pixels.crop(needed.within(&decoded))?;
        let shrink = f64::from(shrink);
        let window = SourceRect {
            left: f64::from(crop.left) / shrink - f64::from(needed.left),
            top: f64::from(crop.top) / shrink - f64::from(needed.top),
            width: f64::from(crop.width) / shrink,
            height: f64::from(crop.height) / shrink,
        };
        Ok((touched, window))
    }

    /// Checks that the image has the size in its row, and that it may be decoded.
    fn read_header(&mut self, jpeg: &[u8], width: u32, height: u32) -> Result<(), SampleFault> {
        if !jpeg.starts_with(&[0xFF, 0xD8]) {
            return Err(SampleFault::NotJpeg);
        }
        // SAFETY: the handle is live, and pointer and length are those of a slice.
        let code = unsafe {
            sys::tj3DecompressHeader(self.0.raw(), jpeg.as_ptr(), jpeg.len() as sys::size_t)
        };
        self.0.check(code).map_err(SampleFault::Jpeg)?;
        let jpeg_width = self.get(sys::TJPARAM_TJPARAM_JPEGWIDTH);
        let jpeg_height = self.get(sys::TJPARAM_TJPARAM_JPEGHEIGHT);
        if (jpeg_width, jpeg_height) != (width, height) {
            return Err(SampleFault::JpegSize { jpeg_width, jpeg_height, width, height });
        }
        let colours = self.get(sys::TJPARAM_TJPARAM_COLORSPACE);
        if colours == sys::TJCS_TJCS_CMYK || colours == sys::TJCS_TJCS_YCCK {
            return Err(SampleFault::Cmyk);
        }
        let stored = jpeg.len() as u64;
        let pixels = u64::from(width) * u64::from(height);
        if pixels > stored.saturating_mul(PIXELS_PER_BYTE) {
            return Err(SampleFault::TooFewBytes { stored, width, height });
        }
        if pixels > MAX_PIXELS {
            return Err(SampleFault::TooManyPixels { width, height, max_pixels: MAX_PIXELS });
        }
        Ok(())
    }

    /// A property of the last header; `u32::MAX` if unknown.
    fn get(&self, parameter: sys::TJPARAM) -> u32 {
        u32::try_from(self.0.get(parameter)).unwrap_or(u32::MAX)
    }

    fn is_lossless(&self) -> bool {
        self.get(sys::TJPARAM_TJPARAM_LOSSLESS) != 0
    }

    /// A region must start at a multiple of this number of columns, a multiple of the width of an MCU (minimum coded
    /// unit). `None` if the image can only be decoded as a whole.
    ///
    /// The library reports the ratio of the components, not their sampling factors: without subsampling, all may be 1,
    /// 2 or 3 blocks wide, and 4:4:0 may be written as 2x2 to 2x1. It refuses a region that does not start with a whole
    /// unit, so a region has to start at a multiple of all possible units.
    fn mcu_columns(&self) -> Option<u32> {
        let sampling = self.get(sys::TJPARAM_TJPARAM_SUBSAMP);
        match sampling as sys::TJSAMP {
            _ if self.is_lossless() => None,
            sys::TJSAMP_TJSAMP_GRAY => Some(8),
            sys::TJSAMP_TJSAMP_444 => Some(48),
            sys::TJSAMP_TJSAMP_422 | sys::TJSAMP_TJSAMP_420 | sys::TJSAMP_TJSAMP_440 => Some(16),
            sys::TJSAMP_TJSAMP_411 => Some(32),
            _ => None,
        }
    }
}

/// A rectangle by its edges, in pixels of the scaled image; right and bottom are exclusive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PixelRect {
    left: u32,
    top: u32,
    right: u32,
    bottom: u32,
}

impl PixelRect {
    /// The rectangle with the additional columns that affect its pixels, starting at a multiple of `columns`.
    fn widened(self, columns: u32, whole: &Self) -> Self {
        let left = self.left.saturating_sub(SIDE_COLUMNS) / columns * columns;
        Self { left, right: (self.right + SIDE_COLUMNS).min(whole.right), ..self }
    }

    /// Its position in an enclosing rectangle.
    fn within(self, outer: &Self) -> Crop {
        Crop {
            left: self.left - outer.left,
            top: self.top - outer.top,
            width: self.right - self.left,
            height: self.bottom - self.top,
        }
    }

    fn region(self) -> sys::tjregion {
        sys::tjregion {
            x: self.left as c_int,
            y: self.top as c_int,
            w: (self.right - self.left) as c_int,
            h: (self.bottom - self.top) as c_int,
        }
    }
}

#[cfg(test)]
mod tests;
