//! A handle of libjpeg-turbo that is owned.

use std::{
    ffi::{CStr, c_int, c_void},
    ptr::NonNull,
};

use turbojpeg_sys as sys;

/// Most memory that libjpeg-turbo may use beside ours, in MiB: for progressive images it holds all
/// coefficients.
const MOST_MEMORY_MIB: c_int = 1024;
/// Most scans of a progressive image. Encoders write about ten; a damaged stream of thousands of empty
/// ones would take minutes.
pub(super) const MOST_SCANS: c_int = 200;

/// A compressor or decompressor with its tables and buffers.
pub(crate) struct Handle(NonNull<c_void>);

impl Handle {
    /// Fails where memory is exhausted.
    pub(crate) fn new(kind: sys::TJINIT) -> Result<Self, String> {
        // SAFETY: no precondition; the answer is null or a handle that we own.
        let handle = unsafe { sys::tj3Init(kind as c_int) };
        NonNull::new(handle).map(Self).ok_or_else(|| message(std::ptr::null_mut()))
    }

    /// Prepares a decompressor for streams that may be damaged.
    pub(crate) fn guard(&mut self) -> Result<(), String> {
        // A damaged stream is an error, not a picture with a grey half.
        self.set(sys::TJPARAM_TJPARAM_STOPONWARNING, 1)?;
        // Colour profiles and EXIF blocks are not worth copying.
        self.set(sys::TJPARAM_TJPARAM_SAVEMARKERS, 0)?;
        self.set(sys::TJPARAM_TJPARAM_SCANLIMIT, MOST_SCANS)?;
        self.set(sys::TJPARAM_TJPARAM_MAXMEMORY, MOST_MEMORY_MIB)
    }

    /// For calls; it lives as long as this.
    pub(crate) fn raw(&mut self) -> *mut c_void {
        self.0.as_ptr()
    }

    /// What a call's answer means.
    pub(crate) fn check(&mut self, code: c_int) -> Result<(), String> {
        if code == 0 { Ok(()) } else { Err(message(self.raw())) }
    }

    pub(crate) fn set(&mut self, parameter: sys::TJPARAM, value: c_int) -> Result<(), String> {
        // SAFETY: the handle is live; unknown parameters and values are refused by the callee.
        let code = unsafe { sys::tj3Set(self.raw(), parameter as c_int, value) };
        self.check(code)
    }

    pub(crate) fn get(&self, parameter: sys::TJPARAM) -> c_int {
        // SAFETY: the handle is live and not changed; an unknown parameter gives -1.
        unsafe { sys::tj3Get(self.0.as_ptr(), parameter as c_int) }
    }
}

impl Drop for Handle {
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
