//! An owned handle of libjpeg-turbo.

use std::{
    ffi::{CStr, c_int, c_void},
    ptr::NonNull,
};

use turbojpeg_sys as sys;

/// Maximum memory that libjpeg-turbo allocates, in MiB: for progressive images it stores all coefficients.
const MAX_MEMORY_MIB: c_int = 1024;
/// Maximum number of scans of a progressive image. Encoders write about ten; a damaged stream with thousands of empty
/// scans would take minutes.
pub(super) const MAX_SCANS: c_int = 200;

/// A compressor or decompressor with its tables and buffers.
pub(crate) struct Handle(NonNull<c_void>);

impl Handle {
    /// Fails if memory is exhausted.
    pub(crate) fn new(kind: sys::TJINIT) -> Result<Self, String> {
        // SAFETY: no precondition; the result is null or a handle that we own.
        let handle = unsafe { sys::tj3Init(kind as c_int) };
        NonNull::new(handle).map(Self).ok_or_else(|| message(std::ptr::null_mut()))
    }

    /// Prepares a decompressor for streams that may be damaged.
    pub(crate) fn guard(&mut self) -> Result<(), String> {
        // Without this, a damaged stream would give a partly grey image instead of an error.
        self.set(sys::TJPARAM_TJPARAM_STOPONWARNING, 1)?;
        // Colour profiles and EXIF blocks are not needed.
        self.set(sys::TJPARAM_TJPARAM_SAVEMARKERS, 0)?;
        self.set(sys::TJPARAM_TJPARAM_SCANLIMIT, MAX_SCANS)?;
        self.set(sys::TJPARAM_TJPARAM_MAXMEMORY, MAX_MEMORY_MIB)
    }

    /// The raw handle for calls; valid as long as `self`.
    pub(crate) fn raw(&mut self) -> *mut c_void {
        self.0.as_ptr()
    }

    /// Converts the return code of a call to a result.
    pub(crate) fn check(&mut self, code: c_int) -> Result<(), String> {
        if code == 0 { Ok(()) } else { Err(message(self.raw())) }
    }

    pub(crate) fn set(&mut self, parameter: sys::TJPARAM, value: c_int) -> Result<(), String> {
        // SAFETY: the handle is live; the callee refuses unknown parameters and values.
        let code = unsafe { sys::tj3Set(self.raw(), parameter as c_int, value) };
        self.check(code)
    }

    pub(crate) fn get(&self, parameter: sys::TJPARAM) -> c_int {
        // SAFETY: the handle is live and not changed; the result for an unknown parameter is -1.
        unsafe { sys::tj3Get(self.0.as_ptr(), parameter as c_int) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle came from `tj3Init`, is destroyed only here, and nothing borrows it.
        unsafe { sys::tj3Destroy(self.raw()) };
    }
}

/// The library's message for the last failure of a handle, or, for null, of this thread.
fn message(handle: *mut c_void) -> String {
    // SAFETY: the handle is live or null, both allowed; the result is a NUL-terminated string that
    // stays valid until the next call on the handle, and it is copied before that.
    let text = unsafe { CStr::from_ptr(sys::tj3GetErrorStr(handle)) };
    text.to_string_lossy().into_owned()
}
