//! A GPU, in the context that is shared by the whole process.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result, sys};

use crate::Error;
use crate::error::failed;

/// A GPU with its primary context. The context is retained once and never released, as in libtorch: both compute in the
/// same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    ordinal: i32,
    /// A `CUcontext`.
    context: usize,
}

impl Device {
    /// Opens the device with this CUDA ordinal and makes it current in the calling thread.
    ///
    /// # Errors
    /// No driver; the device does not exist.
    pub fn open(ordinal: i32) -> Result<Self, Error> {
        let device = Self { ordinal, context: primary_context(ordinal)? };
        device.make_current()?;
        Ok(device)
    }

    /// Its CUDA ordinal.
    #[must_use]
    pub fn ordinal(self) -> i32 {
        self.ordinal
    }

    /// Makes this device current in the calling thread.
    pub(crate) fn make_current(self) -> Result<(), Error> {
        // SAFETY: the context was retained and is never released.
        unsafe { result::ctx::set_current(self.context as sys::CUcontext) }
            .map_err(failed("cuCtxSetCurrent"))
    }
}

fn primary_context(ordinal: i32) -> Result<usize, Error> {
    static RETAINED: Mutex<BTreeMap<i32, usize>> = Mutex::new(BTreeMap::new());

    let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&context) = retained.get(&ordinal) {
        return Ok(context);
    }
    open_driver()?;
    let handle = result::device::get(ordinal).map_err(failed("cuDeviceGet"))?;
    // SAFETY: the handle comes from `cuDeviceGet`.
    let context = unsafe { result::primary_ctx::retain(handle) }
        .map_err(failed("cuDevicePrimaryCtxRetain"))? as usize;
    retained.insert(ordinal, context);
    Ok(context)
}

/// Loads and initialises the driver. Must come before any other call, because cudarc panics without the library.
pub(crate) fn open_driver() -> Result<(), Error> {
    // SAFETY: it only opens libcuda.so, whose initialisers may run at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::LibraryMissing {
            library: "libcuda.so",
            remedy: "install the NVIDIA driver, or train on the CPU",
        });
    }
    result::init().map_err(failed("cuInit"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_exist_is_a_typed_error() {
        let refused = Device::open(4096).unwrap_err();
        assert!(matches!(refused, Error::LibraryMissing { .. } | Error::Cuda { .. }), "{refused}");
    }
}
