//! The few calls to the CUDA driver that this crate needs, made safe.
//!
//! libtorch works in each device's primary context on the legacy default stream. So do we, which
//! orders our work after torch's and before what torch queues next.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result, sys};

use crate::{DeviceSliceMut, Error};

/// CUDA's name for "the default stream that synchronises with the others".
pub(crate) const LEGACY_DEFAULT_STREAM: sys::CUstream = std::ptr::null_mut();

/// Copies all of `from` to host memory after everything queued on the device's default stream.
pub(crate) fn copy_to_host(from: &DeviceSliceMut<'_>, to: &mut [f32]) -> Result<(), Error> {
    assert_eq!(from.len(), to.len(), "callers check lengths");
    if to.is_empty() {
        return Ok(());
    }
    activate(from.device())?;
    // SAFETY: `from` guarantees that its address is that of `len` f32 values in the context just
    // made current, lent to us; `to` is as long. The call returns when the copy is complete.
    unsafe { result::memcpy_dtoh_sync(to, from.address()) }.map_err(failed("cuMemcpyDtoH"))
}

/// Overwrites all of `to` after everything queued on the device's default stream.
pub(crate) fn copy_from_host(to: &mut DeviceSliceMut<'_>, from: &[f32]) -> Result<(), Error> {
    assert_eq!(from.len(), to.len(), "callers check lengths");
    if from.is_empty() {
        return Ok(());
    }
    activate(to.device())?;
    // SAFETY: as in `copy_to_host`, and `to` is borrowed mutably.
    unsafe { result::memcpy_htod_sync(to.address(), from) }.map_err(failed("cuMemcpyHtoD"))
}

/// Makes the primary context of `device` the calling thread's current one.
pub(crate) fn activate(device: i32) -> Result<(), Error> {
    let context = primary_context(device)?;
    // SAFETY: the context was retained and is never released.
    unsafe { result::ctx::set_current(context) }.map_err(failed("cuCtxSetCurrent"))
}

/// Whether all work queued on the current context's default stream is done; never waits.
pub(crate) fn default_stream_is_idle() -> Result<bool, Error> {
    // SAFETY: the default stream always exists; without a current context the call says so.
    match unsafe { sys::cuStreamQuery(LEGACY_DEFAULT_STREAM) } {
        sys::CUresult::CUDA_SUCCESS => Ok(true),
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        other => Err(failed("cuStreamQuery")(result::DriverError(other))),
    }
}

/// Retains each device's primary context once and keeps it as long as the process lives, as libtorch
/// does.
fn primary_context(device: i32) -> Result<sys::CUcontext, Error> {
    /// Context addresses by ordinal.
    static RETAINED: Mutex<BTreeMap<i32, usize>> = Mutex::new(BTreeMap::new());

    let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&context) = retained.get(&device) {
        return Ok(context as sys::CUcontext);
    }
    // cudarc panics where the library is missing, so this comes before any other call.
    // SAFETY: it only opens libcuda.so, whose initialisers may run at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::LibraryMissing {
            library: "libcuda.so",
            remedy: "install the NVIDIA driver, or train on the CPU",
        });
    }
    result::init().map_err(failed("cuInit"))?;
    let handle = result::device::get(device).map_err(failed("cuDeviceGet"))?;
    // SAFETY: the handle comes from `cuDeviceGet`.
    let context = unsafe { result::primary_ctx::retain(handle) }
        .map_err(failed("cuDevicePrimaryCtxRetain"))?;
    retained.insert(device, context as usize);
    Ok(context)
}

fn failed(function: &'static str) -> impl Fn(result::DriverError) -> Error {
    move |error| Error::Cuda {
        function,
        code: error.0 as u32,
        name: error
            .error_name()
            .map_or_else(|_| "unknown".to_owned(), |name| name.to_string_lossy().into_owned()),
    }
}
