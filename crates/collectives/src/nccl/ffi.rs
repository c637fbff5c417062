//! Safe calls to NCCL.
//!
//! cudarc's `safe` layer is not used, because its communicator blocks and may panic when dropped. In the layer below,
//! every call panics if `libnccl.so` is missing. No call here does: without the library no [`Communicator`] can exist,
//! and the free functions return an error.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::ops::Range;
use std::ptr;

use baton_gpu::Stream;
use baton_job::Rank;
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys::{
    self, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};

use crate::{DeviceSliceMut, Error};

/// NCCL's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Patch level.
    pub patch: u32,
}

impl Version {
    /// From `NCCL_VERSION_CODE`: since 2.9 `22809` means 2.28.9; before, `2804` meant 2.8.4.
    fn from_code(code: u32) -> Self {
        let major_unit = if code < 10_000 { 1_000 } else { 10_000 };
        let (major, rest) = (code / major_unit, code % major_unit);
        Self { major, minor: rest / 100, patch: rest % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Identifier that rank 0 creates and all ranks need to connect.
pub(super) type NcclUniqueId = [u8; 128];

/// Whether `libnccl.so` can be opened.
#[must_use]
pub fn is_present() -> bool {
    // SAFETY: it only opens the library, whose initialisers may run at any time.
    unsafe { sys::is_culib_present() }
}

/// The version of the installed NCCL.
///
/// # Errors
/// NCCL is not installed, or the call fails.
pub fn version() -> Result<Version, Error> {
    require()?;
    let code = result::get_nccl_version().map_err(failed("ncclGetVersion"))?;
    Ok(Version::from_code(code.unsigned_abs()))
}

/// A new identifier, for rank 0 only.
pub(super) fn unique_id() -> Result<NcclUniqueId, Error> {
    require()?;
    let id = result::get_uniqueid().map_err(failed("ncclGetUniqueId"))?;
    Ok(bytemuck::cast(id.internal))
}

/// Checks that NCCL is present. Must come before any other call, because cudarc panics without the library.
fn require() -> Result<(), Error> {
    if is_present() {
        return Ok(());
    }
    Err(Error::LibraryMissing {
        library: "libnccl.so",
        remedy: "install PyTorch's CUDA wheel, which brings it (`pip install torch==2.11.0`; in a checkout, \
                 `make setup`), or put a symlink libnccl.so -> libnccl.so.2 on LD_LIBRARY_PATH",
    })
}

/// A contiguous array of f32 on a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceValues {
    pub(super) address: u64,
    pub(super) len: usize,
}

impl DeviceValues {
    /// The values of `range`, which must be within this array.
    pub(super) fn narrow(self, range: Range<usize>) -> Self {
        Self { address: self.address + (range.start * size_of::<f32>()) as u64, len: range.len() }
    }
}

impl From<&mut DeviceSliceMut<'_>> for DeviceValues {
    fn from(slice: &mut DeviceSliceMut<'_>) -> Self {
        Self { address: slice.address(), len: slice.len() }
    }
}

const NCCL_F32: ncclDataType_t = ncclDataType_t::ncclFloat32;
const NCCL_SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;

/// A communicator that never blocks. Dropping it leaks it, because every way to free it can hang.
#[derive(Debug)]
pub(super) struct Communicator(ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Starts to set up this rank's communicator, on the calling thread's current CUDA device. It can be used as soon
    /// as it [is ready](Self::is_ready).
    pub(super) fn begin(id: NcclUniqueId, rank: Rank, world_size: u32) -> Result<Self, Error> {
        require()?;
        let id = ncclUniqueId { internal: bytemuck::cast(id) };
        let mut config = non_blocking();
        let mut communicator = ptr::null_mut();
        // SAFETY: the pointers are to live variables; NCCL copies from them before it returns.
        let status = unsafe {
            result::comm_init_rank_config(
                &mut communicator,
                world_size as c_int,
                id,
                rank.0 as c_int,
                &mut config,
            )
        };
        accepted("ncclCommInitRankConfig", status)?;
        Ok(Self(communicator))
    }

    /// Whether all requests so far have been set up or queued; returns an error that occurred meanwhile. Until it
    /// returns true, an operation may not be in its stream yet, and no other request is allowed.
    pub(super) fn is_ready(&self) -> Result<bool, Error> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator lives until `abort`, which consumes it.
        let status = unsafe { sys::ncclCommGetAsyncError(self.0, &mut state) };
        status.result().map_err(failed("ncclCommGetAsyncError"))?;
        match state.result().map_err(failed("NCCL"))? {
            NcclStatus::InProgress => Ok(false),
            NcclStatus::Success | NcclStatus::NumResults => Ok(true),
        }
    }

    /// Queues the sum of all ranks' `values` into all ranks' `values`.
    ///
    /// # Safety
    /// For every operation here: `stream` and `values` must be of this communicator's device, and no other code may use
    /// the values until the stream has completed the operation.
    pub(super) unsafe fn all_reduce(
        &self,
        stream: &Stream,
        values: DeviceValues,
    ) -> Result<(), Error> {
        let DeviceValues { address, len } = values;
        let (from, to) = (address as *const c_void, address as *mut c_void);
        // SAFETY: guaranteed by the caller; the communicator is alive.
        let status = unsafe {
            result::all_reduce(from, to, len, NCCL_F32, NCCL_SUM, self.0, stream.raw().cast())
        };
        accepted("ncclAllReduce", status)
    }

    /// Queues the copy of `root`'s `values` to all other ranks.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub(super) unsafe fn broadcast(
        &self,
        stream: &Stream,
        root: Rank,
        values: DeviceValues,
    ) -> Result<(), Error> {
        let DeviceValues { address, len } = values;
        let (from, to, root) = (address as *const c_void, address as *mut c_void, root.0 as c_int);
        // SAFETY: as above.
        let status = unsafe {
            result::broadcast(from, to, len, NCCL_F32, root, self.0, stream.raw().cast())
        };
        accepted("ncclBroadcast", status)
    }

    /// Queues all messages of `calls` as one operation, so that no message waits for another one.
    pub(super) fn group(&self, calls: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        accepted("ncclGroupStart", result::group_start())?;
        let called = calls();
        // The group must be ended even if a call failed.
        let ended = accepted("ncclGroupEnd", result::group_end());
        called.and(ended)
    }

    /// Queues sending `values` to `peer`, which must [receive](Self::receive) the same number. An empty message is
    /// skipped, on both sides.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), except that other code may read the values.
    pub(super) unsafe fn send(
        &self,
        stream: &Stream,
        peer: Rank,
        values: DeviceValues,
    ) -> Result<(), Error> {
        let DeviceValues { address, len } = values;
        if len == 0 {
            return Ok(());
        }
        let (from, peer) = (address as *const c_void, peer.0 as c_int);
        // SAFETY: as above.
        let status =
            unsafe { result::send(from, len, NCCL_F32, peer, self.0, stream.raw().cast()) };
        accepted("ncclSend", status)
    }

    /// Queues receiving `values` from `peer`. As with [`send`](Self::send), an empty message is skipped.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub(super) unsafe fn receive(
        &self,
        stream: &Stream,
        peer: Rank,
        values: DeviceValues,
    ) -> Result<(), Error> {
        let DeviceValues { address, len } = values;
        if len == 0 {
            return Ok(());
        }
        let (to, peer) = (address as *mut c_void, peer.0 as c_int);
        // SAFETY: as above.
        let status = unsafe { result::recv(to, len, NCCL_F32, peer, self.0, stream.raw().cast()) };
        accepted("ncclRecv", status)
    }

    /// Ends all running operations and frees everything. May hang.
    pub(super) fn abort(self) {
        // SAFETY: the communicator is alive, and consumed by this call.
        let _ = unsafe { result::comm_abort(self.0) };
    }
}

/// The values of `NCCL_CONFIG_INITIALIZER` in nccl.h, with `blocking = 0`. cudarc does not have this macro.
fn non_blocking() -> ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 22_803, // That of cudarc's bindings; a newer library reads no further fields.
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
    }
}

/// Accepts success and "in progress".
fn accepted(function: &'static str, status: Result<NcclStatus, NcclError>) -> Result<(), Error> {
    status.map(|_| ()).map_err(failed(function))
}

fn failed(function: &'static str) -> impl Fn(NcclError) -> Error {
    move |NcclError(code)| {
        let (name, meaning) = meaning(code);
        let detail = match last_error_text() {
            text if text.is_empty() => meaning.to_owned(),
            text => format!("{meaning} ({text})"),
        };
        // NCCL has no error code for it.
        let out_of_memory = detail.contains("out of memory");
        Error::Nccl { function, code: code as i32, name, detail, out_of_memory }
    }
}

/// NCCL's text for the last error in this process, or an empty string.
fn last_error_text() -> String {
    // SAFETY: only called after an NCCL function has failed, so the library is present; the function accepts a null
    // communicator and returns null or a string that lives as long as the library.
    let text = unsafe { sys::ncclGetLastError(ptr::null_mut()) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

/// Name and meaning, from the NCCL user guide, "Types: ncclResult_t".
fn meaning(code: ncclResult_t) -> (&'static str, &'static str) {
    use ncclResult_t as R;
    match code {
        R::ncclSuccess => ("ncclSuccess", "no error"),
        R::ncclUnhandledCudaError => ("ncclUnhandledCudaError", "a call to CUDA failed"),
        R::ncclSystemError => ("ncclSystemError", "a call to the operating system failed"),
        R::ncclInternalError => {
            ("ncclInternalError", "a bug in NCCL or memory corruption; set NCCL_DEBUG=WARN")
        }
        R::ncclInvalidArgument => ("ncclInvalidArgument", "an argument is invalid"),
        R::ncclInvalidUsage => (
            "ncclInvalidUsage",
            "the communicator does not allow this call now: two ranks may share one GPU, or the driver is too old \
             for this NCCL",
        ),
        R::ncclRemoteError => ("ncclRemoteError", "a peer left or the network failed"),
        R::ncclInProgress => ("ncclInProgress", "still in progress"),
        R::ncclNumResults => ("ncclNumResults", "unknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_new_version_codes_are_read() {
        assert_eq!(Version::from_code(22_809).to_string(), "2.28.9");
        assert_eq!(Version::from_code(2_804).to_string(), "2.8.4");
    }

    #[test]
    fn each_failure_has_a_name_and_a_meaning() {
        assert_eq!(meaning(ncclResult_t::ncclRemoteError).0, "ncclRemoteError");
    }
}
