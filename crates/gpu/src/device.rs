//! One GPU, in the context that all of this process shares.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result, sys};

use crate::Error;
use crate::error::failed;

/// A GPU whose primary context this process holds. It is retained once and never released, as
/// libtorch does it: both compute in the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    ordinal: i32,
    /// A `CUcontext`.
    context: usize,
}

impl Device {
    /// The device with this CUDA ordinal, made the calling thread's current one.
    ///
    /// # Errors
    /// No driver, no such device.
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

    /// Has the calling thread's later calls go to this device.
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

/// cudarc panics where the library is missing, so this comes before any other call.
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
