//! Host and device memory, and copies between them.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;

use cudarc::driver::{result, sys};

use crate::error::failed;
use crate::{Device, Error, Stream};

/// Page-locked host memory, which the device can copy from and to at full speed. Initially zeros.
pub struct Pinned {
    device: Device,
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: it is plain memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `len` bytes. Takes milliseconds, so reuse it.
    ///
    /// # Errors
    /// The host cannot lock more memory.
    pub fn new(device: Device, len: usize) -> Result<Self, Error> {
        device.make_current()?;
        // The driver rejects empty allocations.
        // SAFETY: it is freed once, in `drop`.
        let address = unsafe { result::malloc_host(len.max(1), 0) };
        let address = address.map_err(failed("cuMemHostAlloc"))?.cast::<u8>();
        // SAFETY: this many bytes were just allocated.
        unsafe { address.write_bytes(0, len.max(1)) };
        let address = NonNull::new(address).unwrap_or(NonNull::dangling());
        Ok(Self { device, address, len })
    }

    /// The bytes; no copy into this memory may be in flight.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length and initialised.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }

    /// The bytes, for writing; no copy from or into this memory may be in flight.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: allocated by `malloc_host` and freed once. The driver waits for copies.
            let _ = unsafe { result::free_host(self.address.as_ptr().cast()) };
        }
    }
}

/// Memory on a device, in addition to libtorch's.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Device,
    address: sys::CUdeviceptr,
    len: usize,
}

impl DeviceMemory {
    /// Allocates `len` bytes with undefined values. May wait for the device, so reuse it.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(device: Device, len: usize) -> Result<Self, Error> {
        device.make_current()?;
        // SAFETY: it is freed once, in `drop`.
        let address = unsafe { result::malloc_sync(len.max(1)) }.map_err(failed("cuMemAlloc"))?;
        Ok(Self { device, address, len })
    }

    /// Its device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceMemory {
    /// Frees the memory; the driver waits for the device.
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: allocated by `malloc_sync` and freed once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Queues the copy of `from` to the device address `to`.
///
/// # Errors
/// The device failed.
///
/// # Safety
/// Until `stream` has completed the copy, `from` must not change, and `from.len()` bytes of the stream's device must be
/// valid at `to` and not used by other code.
pub unsafe fn copy_in(stream: &Stream, to: u64, from: &[u8]) -> Result<(), Error> {
    if from.is_empty() {
        return Ok(());
    }
    stream.device().make_current()?;
    // SAFETY: guaranteed by the caller.
    unsafe { result::memcpy_htod_async(to, from, stream.raw().cast()) }
        .map_err(failed("cuMemcpyHtoDAsync"))
}

/// Queues the copy of `to.len()` bytes at the device address `from`.
///
/// # Errors
/// The device failed.
///
/// # Safety
/// Until `stream` has completed the copy, no other code may use `to`, and `to.len()` bytes of the stream's device must
/// be valid at `from` and must not change.
pub unsafe fn copy_out(stream: &Stream, to: &mut [u8], from: u64) -> Result<(), Error> {
    if to.is_empty() {
        return Ok(());
    }
    stream.device().make_current()?;
    // SAFETY: guaranteed by the caller.
    unsafe { result::memcpy_dtoh_async(to, from, stream.raw().cast()) }
        .map_err(failed("cuMemcpyDtoHAsync"))
}

/// Queues the copy of `bytes` bytes from one device address to another.
///
/// # Errors
/// The device failed.
///
/// # Safety
/// Until `stream` has completed the copy, both ranges must be memory of the stream's device; the source must not change
/// and no other code may use the target.
pub unsafe fn copy(stream: &Stream, to: u64, from: u64, bytes: usize) -> Result<(), Error> {
    if bytes == 0 {
        return Ok(());
    }
    stream.device().make_current()?;
    // SAFETY: guaranteed by the caller.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.raw().cast()) }
        .map_err(failed("cuMemcpyDtoDAsync"))
}
