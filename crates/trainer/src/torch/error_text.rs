//! Messages of our C++ code, which must not throw into Rust.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_char},
    ptr,
};

use tch::TchError;

/// A buffer for the text of an error, all zero before a call.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ErrorText {
    text: *mut c_char,
    len: usize,
}

impl ErrorText {
    /// Calls a function that writes a text if it fails; `None` from it is a failure.
    pub(super) fn captured<T>(call: impl FnOnce(Self) -> Option<T>) -> tch::Result<T> {
        let mut text: [c_char; 1024] = [0; 1024];
        call(Self { text: text.as_mut_ptr(), len: text.len() }).ok_or_else(|| {
            // SAFETY: initialised with zeros, and the last byte is never written.
            let text = unsafe { CStr::from_ptr(text.as_ptr()) };
            TchError::Torch(text.to_string_lossy().into_owned())
        })
    }

    /// Returns true for success; otherwise writes the error's text and returns false.
    ///
    /// # Safety
    /// `text` has `len` writable bytes, all zero.
    pub(super) unsafe fn write_error(self, result: Result<(), baton_gpu::Error>) -> bool {
        let Err(error) = result else { return true };
        let text = error.to_string();
        let len = text.len().min(self.len.saturating_sub(1));
        // SAFETY: guaranteed by the caller; the last byte stays zero.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), self.text.cast(), len) };
        false
    }
}
