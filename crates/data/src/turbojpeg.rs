//! libjpeg-turbo's JPEG decoder, made safe.
#![allow(unsafe_code)] // Calls into C; each block says why it is sound.

use std::{
    ffi::{CStr, c_int, c_void},
    ptr::NonNull,
};

use turbojpeg_sys as sys;

use crate::SampleFault;

/// Most pixels that a byte of Huffman codes can stand for: in any scan every block of 8 x 8 takes one
/// bit at least. A damaged size beyond that must not become an allocation.
const PIXELS_PER_BYTE: u64 = 8 * 64;

/// A decompressor with its tables and buffers, reused from image to image.
pub(crate) struct Decompressor {
    handle: NonNull<c_void>,
}

impl Decompressor {
    /// Fails where memory is exhausted.
    pub(crate) fn new() -> Result<Self, String> {
        // SAFETY: no precondition; the answer is null or a handle that we own.
        let handle = unsafe { sys::tj3Init(sys::TJINIT_TJINIT_DECOMPRESS as c_int) };
        let handle = NonNull::new(handle).ok_or_else(|| message(std::ptr::null_mut()))?;
        let mut decompressor = Self { handle };
        // A damaged stream is an error, not a picture with a grey half.
        decompressor.set(sys::TJPARAM_TJPARAM_STOPONWARNING, 1)?;
        // Colour profiles and EXIF blocks are not worth copying.
        decompressor.set(sys::TJPARAM_TJPARAM_SAVEMARKERS, 0)?;
        Ok(decompressor)
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
        let outcome = self.try_decode(jpeg, width, height, buffer);
        if outcome.is_err() {
            // After some failures in a header the library takes the next image for more of the same.
            *self = Self::new().map_err(SampleFault::Jpeg)?;
        }
        outcome
    }

    fn try_decode<'a>(
        &mut self,
        jpeg: &[u8],
        width: u32,
        height: u32,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], SampleFault> {
        if !jpeg.starts_with(&[0xFF, 0xD8]) {
            return Err(SampleFault::NotJpeg);
        }
        // SAFETY: the handle is live, and pointer and length are those of a slice.
        let code = unsafe {
            sys::tj3DecompressHeader(self.raw(), jpeg.as_ptr(), jpeg.len() as sys::size_t)
        };
        self.check(code)?;
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
        if u64::from(width) * u64::from(height) > stored.saturating_mul(PIXELS_PER_BYTE) {
            return Err(SampleFault::TooFewBytes { stored, width, height });
        }
        let row_bytes = 3 * width as usize;
        let image_bytes = row_bytes * height as usize;
        if buffer.len() < image_bytes {
            buffer.resize(image_bytes, 0);
        }
        let out = &mut buffer[..image_bytes];
        // SAFETY: the handle is live, and input pointer and length are those of a slice. The
        // decoder writes `JPEGHEIGHT` rows of 3 `JPEGWIDTH` bytes, `row_bytes` apart, which is
        // exactly the length of `out`, for scaling and cropping are never set on this handle. It
        // parses the header again, from the same bytes (see `Mapping::open` for files that change),
        // so the size is the one just checked; a stream of tables without an image, for which the
        // first parse sets no size, is refused by the second.
        let code = unsafe {
            sys::tj3Decompress8(
                self.raw(),
                jpeg.as_ptr(),
                jpeg.len() as sys::size_t,
                out.as_mut_ptr(),
                row_bytes as c_int,
                sys::TJPF_TJPF_RGB as c_int,
            )
        };
        self.check(code)?;
        Ok(out)
    }

    fn raw(&mut self) -> *mut c_void {
        self.handle.as_ptr()
    }

    fn check(&mut self, code: c_int) -> Result<(), SampleFault> {
        if code == 0 { Ok(()) } else { Err(SampleFault::Jpeg(message(self.raw()))) }
    }

    fn set(&mut self, parameter: sys::TJPARAM, value: c_int) -> Result<(), String> {
        // SAFETY: the handle is live; unknown parameters and values are refused by the callee.
        let code = unsafe { sys::tj3Set(self.raw(), parameter as c_int, value) };
        if code == 0 { Ok(()) } else { Err(message(self.raw())) }
    }

    /// A property of the last header; 0 where unknown.
    fn get(&mut self, parameter: sys::TJPARAM) -> u32 {
        // SAFETY: the handle is live; an unknown parameter gives -1.
        let value = unsafe { sys::tj3Get(self.raw(), parameter as c_int) };
        u32::try_from(value).unwrap_or_default()
    }
}

impl Drop for Decompressor {
    fn drop(&mut self) {
        // SAFETY: the handle came from `tj3Init`, is destroyed only here, and nothing borrows it.
        unsafe { sys::tj3Destroy(self.raw()) };
    }
}

/// The library's words for the last failure of a handle, or, for null, of this thread.
fn message(handle: *mut c_void) -> String {
    // SAFETY: the handle is live or null, both allowed; the answer is a NUL-terminated string that
    // stays valid until the next call on the handle, and it is copied before that.
    let text = unsafe { CStr::from_ptr(sys::tj3GetErrorStr(handle)) };
    text.to_string_lossy().into_owned()
}
