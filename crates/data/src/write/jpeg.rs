//! Safe wrapper of libjpeg-turbo: encodes like ffcv's writer, and decodes JPEGs from any source.
#![allow(unsafe_code)] // Calls of C functions; each block explains why it is sound.

use std::ffi::c_int;

use turbojpeg_sys as sys;

use super::BadImage;
use crate::turbojpeg::{Handle, PIXELS_PER_BYTE};

/// Maximum side of a JPEG, which has 16 bits: so the casts to C's `int` below lose nothing.
const MAX_SIDE: u32 = 65_535;

/// Encodes RGB as baseline JPEG with 4:2:0 chroma, standard Huffman tables and the accurate DCT, like ffcv's writer
/// with OpenCV.
pub(super) struct Compressor {
    handle: Handle,
    /// Buffer with the last JPEG at its start.
    buffer: Vec<u8>,
}

impl Compressor {
    /// `quality` is 1 to 100. Fails if memory is exhausted.
    pub(super) fn new(quality: u8) -> Result<Self, String> {
        let mut handle = Handle::new(sys::TJINIT_TJINIT_COMPRESS)?;
        handle.set(sys::TJPARAM_TJPARAM_QUALITY, quality.into())?;
        handle.set(sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_420 as c_int)?;
        // We own the buffer, so the library must not replace it.
        handle.set(sys::TJPARAM_TJPARAM_NOREALLOC, 1)?;
        Ok(Self { handle, buffer: Vec::new() })
    }

    /// Encodes pixels: u8, shape (height, width, 3), RGB.
    pub(super) fn encode(
        &mut self,
        rgb: &[u8],
        width: u32,
        height: u32,
    ) -> Result<&[u8], BadImage> {
        let refused = |reason: &str| Err(BadImage::Encode(reason.to_owned()));
        let sides = 1..=MAX_SIDE;
        if !sides.contains(&width) || !sides.contains(&height) {
            return refused("a side has 1 to 65535 pixels");
        }
        let row_bytes = 3 * width as usize;
        if rgb.len() != row_bytes * height as usize {
            return refused("the number of bytes does not match the image's size");
        }
        let (width, height) = (width as c_int, height as c_int);
        // SAFETY: a pure function of its arguments.
        let max_bytes =
            unsafe { sys::tj3JPEGBufSize(width, height, sys::TJSAMP_TJSAMP_420 as c_int) };
        if self.buffer.len() < max_bytes as usize {
            self.buffer.resize(max_bytes as usize, 0);
        }
        let mut start = self.buffer.as_mut_ptr();
        let mut size = self.buffer.len() as sys::size_t;
        // SAFETY: the handle is live. `rgb` has `height` rows of `row_bytes`, as just checked.
        // With NOREALLOC the library writes into the buffer at `start` and needs `size` to be
        // at least `tj3JPEGBufSize`, which it is; it keeps neither pointer.
        let code = unsafe {
            sys::tj3Compress8(
                self.handle.raw(),
                rgb.as_ptr(),
                width,
                row_bytes as c_int,
                height,
                sys::TJPF_TJPF_RGB as c_int,
                &raw mut start,
                &raw mut size,
            )
        };
        self.handle.check(code).map_err(BadImage::Encode)?;
        let encoded = self.buffer.get(..size as usize);
        encoded.ok_or_else(|| BadImage::Encode("libjpeg-turbo returned an invalid size".to_owned()))
    }
}

/// Properties in the header of a JPEG.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) width: u32,
    pub(super) height: u32,
    /// Whether ffcv's decoder supports it: three channels of 8 bits, lossy, Huffman codes.
    pub(super) is_plain_colour: bool,
    is_cmyk: bool,
}

/// Decodes JPEGs of any size and colours to RGB.
pub(super) struct Decompressor {
    handle: Handle,
    /// The last image as CMYK.
    cmyk: Vec<u8>,
}

impl Decompressor {
    /// Fails if memory is exhausted.
    pub(super) fn new() -> Result<Self, String> {
        Ok(Self { handle: Self::handle()?, cmyk: Vec::new() })
    }

    fn handle() -> Result<Handle, String> {
        let mut handle = Handle::new(sys::TJINIT_TJINIT_DECOMPRESS)?;
        handle.guard()?;
        Ok(handle)
    }

    /// Decodes a whole image to u8, shape (height, width, 3), RGB: with the accurate inverse DCT and smooth chroma,
    /// like Pillow; grey and CMYK are converted like with Pillow's `convert("RGB")`. `rgb` is resized to exactly that
    /// length.
    pub(super) fn decode(&mut self, jpeg: &[u8], rgb: &mut Vec<u8>) -> Result<Header, BadImage> {
        let outcome = self.try_decode(jpeg, rgb);
        if outcome.is_err() {
            // After some failures in a header the library treats the next image as a continuation of the failed one.
            self.handle = Self::handle().map_err(BadImage::Decode)?;
        }
        outcome
    }

    fn try_decode(&mut self, jpeg: &[u8], rgb: &mut Vec<u8>) -> Result<Header, BadImage> {
        let header = self.header(jpeg)?;
        let Header { width, height, .. } = header;
        let pixels = u64::from(width) * u64::from(height);
        if pixels > (jpeg.len() as u64).saturating_mul(PIXELS_PER_BYTE) {
            let reason = format!("{} bytes cannot hold {width}x{height} pixels", jpeg.len());
            return Err(BadImage::Decode(reason));
        }
        let pixels = pixels as usize;
        if header.is_cmyk {
            self.cmyk.resize(4 * pixels, 0);
            decompress(&mut self.handle, jpeg, &mut self.cmyk, 4, &header)?;
            rgb.resize(3 * pixels, 0);
            let (inks, _) = self.cmyk.as_chunks::<4>();
            let (colours, _) = rgb.as_chunks_mut::<3>();
            for (colour, ink) in colours.iter_mut().zip(inks) {
                *colour = rgb_of_ink(*ink);
            }
        } else {
            rgb.resize(3 * pixels, 0);
            decompress(&mut self.handle, jpeg, rgb, 3, &header)?;
        }
        Ok(header)
    }

    fn header(&mut self, jpeg: &[u8]) -> Result<Header, BadImage> {
        // SAFETY: the handle is live, and pointer and length are those of a slice.
        let code = unsafe {
            sys::tj3DecompressHeader(self.handle.raw(), jpeg.as_ptr(), jpeg.len() as sys::size_t)
        };
        self.handle.check(code).map_err(BadImage::Decode)?;
        let get = |parameter| self.handle.get(parameter);
        let colours = u32::try_from(get(sys::TJPARAM_TJPARAM_COLORSPACE)).unwrap_or(u32::MAX);
        let precision = get(sys::TJPARAM_TJPARAM_PRECISION);
        if precision != 8 {
            return Err(BadImage::Pixels(format!("{precision}-bit")));
        }
        let side = |parameter| match u32::try_from(get(parameter)) {
            Ok(side @ 1..=MAX_SIDE) => Ok(side),
            _ => Err(BadImage::Decode("there is no image in it".to_owned())),
        };
        Ok(Header {
            width: side(sys::TJPARAM_TJPARAM_JPEGWIDTH)?,
            height: side(sys::TJPARAM_TJPARAM_JPEGHEIGHT)?,
            is_plain_colour: [sys::TJCS_TJCS_YCbCr, sys::TJCS_TJCS_RGB].contains(&colours)
                && get(sys::TJPARAM_TJPARAM_LOSSLESS) == 0
                && get(sys::TJPARAM_TJPARAM_ARITHMETIC) == 0,
            is_cmyk: [sys::TJCS_TJCS_CMYK, sys::TJCS_TJCS_YCCK].contains(&colours),
        })
    }
}

/// Converts a pixel of a CMYK JPEG like Pillow. By Adobe's convention 255 means no ink.
fn rgb_of_ink([cyan, magenta, yellow, black]: [u8; 4]) -> [u8; 3] {
    let light = u32::from(black);
    [cyan, magenta, yellow].map(|value| {
        let product = u32::from(255 - value) * light + 128;
        // Divided by 255, rounded.
        let dimmed = ((product >> 8) + product) >> 8;
        light.saturating_sub(dimmed) as u8
    })
}

/// Decodes to `channels` bytes per pixel (3: RGB, 4: CMYK), into a buffer of that length.
fn decompress(
    handle: &mut Handle,
    jpeg: &[u8],
    out: &mut [u8],
    channels: usize,
    header: &Header,
) -> Result<(), BadImage> {
    let format = if channels == 4 { sys::TJPF_TJPF_CMYK } else { sys::TJPF_TJPF_RGB };
    let row_bytes = channels * header.width as usize;
    if out.len() != row_bytes * header.height as usize {
        return Err(BadImage::Decode("its buffer has another size: this is a bug".to_owned()));
    }
    // SAFETY: the handle is live, and input pointer and length are those of a slice. The
    // decoder writes rows of `channels` bytes per pixel, `row_bytes` apart. It reads the size from
    // the header again, from the same borrowed bytes, so it is that of `header`.
    // That is exactly the length of `out`, as just checked; scaling and cropping are never set.
    let code = unsafe {
        sys::tj3Decompress8(
            handle.raw(),
            jpeg.as_ptr(),
            jpeg.len() as sys::size_t,
            out.as_mut_ptr(),
            row_bytes as c_int,
            format as c_int,
        )
    };
    handle.check(code).map_err(BadImage::Decode)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREY: &[u8] = include_bytes!("../../tests/fixtures/grey-16x8.jpg");
    const CMYK: &[u8] = include_bytes!("../../tests/fixtures/cmyk-16x8.jpg");

    /// The pixels of the CMYK file as converted by Pillow 13.0.
    const CMYK_AS_RGB: [u8; 3] = [207, 46, 190];

    /// Markers of a JPEG up to its first scan.
    fn markers(jpeg: &[u8]) -> Vec<u8> {
        let (mut at, mut markers) = (2, Vec::new());
        while markers.last() != Some(&0xDA) {
            markers.push(jpeg[at + 1]);
            at += 2 + usize::from(u16::from_be_bytes([jpeg[at + 2], jpeg[at + 3]]));
        }
        markers
    }

    #[test]
    fn a_jpeg_is_a_plain_baseline_jfif_stream_like_those_of_ffcv() {
        let rgb: Vec<u8> = (0..3 * 33 * 17).map(|i| (i % 251) as u8).collect();
        let mut compressor = Compressor::new(90).unwrap();
        let jpeg = compressor.encode(&rgb, 33, 17).unwrap();
        // APP0, two tables for quantization, the frame, four for Huffman codes, the scan.
        assert_eq!(markers(jpeg), [0xE0, 0xDB, 0xDB, 0xC0, 0xC4, 0xC4, 0xC4, 0xC4, 0xDA]);
        let frame = jpeg.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
        let sampling: Vec<u8> = (0..3).map(|channel| jpeg[frame + 11 + 3 * channel]).collect();
        assert_eq!(sampling, [0x22, 0x11, 0x11], "4:2:0");

        let mut decoded = Vec::new();
        let header = Decompressor::new().unwrap().decode(jpeg, &mut decoded).unwrap();
        assert_eq!((header.width, header.height, decoded.len()), (33, 17, rgb.len()));
        assert!(header.is_plain_colour);
    }

    #[test]
    fn a_used_compressor_gives_the_same_result_as_a_new_one() {
        let mut used = Compressor::new(75).unwrap();
        for (width, height) in [(64, 64), (1, 1), (7, 100), (64, 64)] {
            let rgb: Vec<u8> = (0..3 * width * height).map(|i| (i * 7 % 256) as u8).collect();
            let fresh = Compressor::new(75).unwrap().encode(&rgb, width, height).unwrap().to_vec();
            assert_eq!(used.encode(&rgb, width, height).unwrap(), fresh);
        }
    }

    #[test]
    fn invalid_sizes_and_qualities_are_refused() {
        let mut compressor = Compressor::new(90).unwrap();
        for (width, height, len) in [(0, 1, 0), (2, 2, 11), (65_501, 1, 3 * 65_501), (65_536, 1, 1)]
        {
            let refused = compressor.encode(&vec![0; len], width, height);
            assert!(matches!(refused, Err(BadImage::Encode(_))), "{width}x{height}");
        }
        assert!(Compressor::new(0).is_err());
        assert!(Compressor::new(101).is_err());
        assert!(compressor.encode(&[5; 12], 2, 2).is_ok());
    }

    #[test]
    fn grey_and_cmyk_are_converted_to_rgb_and_are_not_plain() {
        let mut decompressor = Decompressor::new().unwrap();
        let mut rgb = Vec::new();
        let header = decompressor.decode(GREY, &mut rgb).unwrap();
        assert!(!header.is_plain_colour && rgb == [100; 3 * 16 * 8]);
        let header = decompressor.decode(CMYK, &mut rgb).unwrap();
        assert!(!header.is_plain_colour && rgb.len() == 3 * 16 * 8);
        assert_eq!(rgb[..3], CMYK_AS_RGB);
        assert!(rgb.as_chunks::<3>().0.iter().all(|pixel| *pixel == CMYK_AS_RGB));
    }

    #[test]
    fn a_truncated_jpeg_is_an_error_and_does_not_affect_later_images() {
        let mut decompressor = Decompressor::new().unwrap();
        let mut rgb = Vec::new();
        for end in 0..GREY.len() - 2 {
            assert!(decompressor.decode(&GREY[..end], &mut rgb).is_err(), "cut at {end}");
            assert!(decompressor.decode(GREY, &mut rgb).is_ok(), "after a cut at {end}");
        }
    }

    #[test]
    fn no_memory_is_allocated_for_too_many_pixels() {
        let mut jpeg = GREY.to_vec();
        let frame = jpeg.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
        jpeg[frame + 5..frame + 9].copy_from_slice(&[0xFF; 4]);
        let mut rgb = Vec::new();
        let refused = Decompressor::new().unwrap().decode(&jpeg, &mut rgb);
        assert!(matches!(refused, Err(BadImage::Decode(_))));
        assert!(rgb.capacity() < 100_000);
    }
}
