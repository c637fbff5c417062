//! The calls to NCCL, made safe.
//!
//! cudarc's `safe` layer is not used, as its communicator blocks and may panic when dropped. Even
//! below it everything panics without `libnccl.so`; nothing here does, because a [`Communicator`]
//! cannot exist and free functions return an error then.
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
    /// From `NCCL_VERSION_CODE` as it is since 2.9, `22809` for 2.28.9; before, it was `2804`.
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

/// What rank 0 makes and all ranks must know to meet.
pub(super) type UniqueId = [u8; 128];

/// Whether `libnccl.so` can be opened.
#[must_use]
pub fn is_present() -> bool {
    // SAFETY: it only opens the library, whose initialisers may run at any time.
    unsafe { sys::is_culib_present() }
}

/// The version of the NCCL that is present.
///
/// # Errors
/// None is, or it fails.
pub fn version() -> Result<Version, Error> {
    require()?;
    let code = result::get_nccl_version().map_err(failed("ncclGetVersion"))?;
    Ok(Version::from_code(code.unsigned_abs()))
}

/// A new one, for rank 0 only.
pub(super) fn unique_id() -> Result<UniqueId, Error> {
    require()?;
    let id = result::get_uniqueid().map_err(failed("ncclGetUniqueId"))?;
    Ok(bytemuck::cast(id.internal))
}

/// cudarc panics where the library is missing, so this comes before any other call.
fn require() -> Result<(), Error> {
    if is_present() {
        return Ok(());
    }
    Err(Error::LibraryMissing {
        library: "libnccl.so",
        remedy: "run `make setup` on the GPU machine, or put a symlink libnccl.so -> libnccl.so.2 \
                 on LD_LIBRARY_PATH",
    })
}

/// A run of f32 on a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values {
    pub(super) address: u64,
    pub(super) len: usize,
}

impl Values {
    /// Those of `range` alone, which lies inside.
    pub(super) fn narrow(self, range: Range<usize>) -> Self {
        Self { address: self.address + (range.start * size_of::<f32>()) as u64, len: range.len() }
    }
}

impl From<&mut DeviceSliceMut<'_>> for Values {
    fn from(slice: &mut DeviceSliceMut<'_>) -> Self {
        Self { address: slice.address(), len: slice.len() }
    }
}

const F32: ncclDataType_t = ncclDataType_t::ncclFloat32;
const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;

/// A communicator that never blocks. Dropping it leaks it, as every way to free it can hang.
#[derive(Debug)]
pub(super) struct Communicator(ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Begins to set up this rank's communicator, on the calling thread's current CUDA device. It
    /// can be used when it [is settled](Self::is_settled).
    pub(super) fn begin(id: UniqueId, rank: Rank, world_size: u32) -> Result<Self, Error> {
        require()?;
        let id = ncclUniqueId { internal: bytemuck::cast(id) };
        let mut config = non_blocking();
        let mut communicator = ptr::null_mut();
        // SAFETY: the pointers are to live variables, which NCCL copies from before it returns.
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

    /// Whether everything asked for so far has been set up or queued; tells what failed meanwhile. Before,
    /// an operation may not even be in its stream, and nothing else may be asked for.
    pub(super) fn is_settled(&self) -> Result<bool, Error> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator lives until `abort`, which consumes it.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.0, &mut state) };
        asked.result().map_err(failed("ncclCommGetAsyncError"))?;
        match state.result().map_err(failed("NCCL"))? {
            NcclStatus::InProgress => Ok(false),
            NcclStatus::Success | NcclStatus::NumResults => Ok(true),
        }
    }

    /// Queues the sum of all ranks' `values` into all ranks' `values`.
    ///
    /// # Safety
    /// That of every operation here: `stream` and `values` are of this communicator's device, and until
    /// the stream has come past it nobody else uses the values.
    pub(super) unsafe fn all_reduce(&self, stream: &Stream, values: Values) -> Result<(), Error> {
        let Values { address, len } = values;
        let (from, to) = (address as *const c_void, address as *mut c_void);
        // SAFETY: the caller's promise; the communicator is alive.
        let status =
            unsafe { result::all_reduce(from, to, len, F32, SUM, self.0, stream.raw().cast()) };
        accepted("ncclAllReduce", status)
    }

    /// Queues the copy of `root`'s `values` to all others.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub(super) unsafe fn broadcast(
        &self,
        stream: &Stream,
        root: Rank,
        values: Values,
    ) -> Result<(), Error> {
        let Values { address, len } = values;
        let (from, to, root) = (address as *const c_void, address as *mut c_void, root.0 as c_int);
        // SAFETY: as above.
        let status =
            unsafe { result::broadcast(from, to, len, F32, root, self.0, stream.raw().cast()) };
        accepted("ncclBroadcast", status)
    }

    /// Queues all that `calls` asks for as one operation, in which nobody waits for one message before
    /// the next.
    pub(super) fn group(&self, calls: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        accepted("ncclGroupStart", result::group_start())?;
        let called = calls();
        // Begun is to be ended, whatever became of the calls.
        let ended = accepted("ncclGroupEnd", result::group_end());
        called.and(ended)
    }

    /// Queues sending `values` to `peer`, who must [receive](Self::receive) as many. An empty message is
    /// none, at both ends.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), but that others may read the values.
    pub(super) unsafe fn send(
        &self,
        stream: &Stream,
        peer: Rank,
        values: Values,
    ) -> Result<(), Error> {
        let Values { address, len } = values;
        if len == 0 {
            return Ok(());
        }
        let (from, peer) = (address as *const c_void, peer.0 as c_int);
        // SAFETY: as above.
        let status = unsafe { result::send(from, len, F32, peer, self.0, stream.raw().cast()) };
        accepted("ncclSend", status)
    }

    /// Queues receiving `values` from `peer`. As with [`send`](Self::send), an empty message is none.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub(super) unsafe fn receive(
        &self,
        stream: &Stream,
        peer: Rank,
        values: Values,
    ) -> Result<(), Error> {
        let Values { address, len } = values;
        if len == 0 {
            return Ok(());
        }
        let (to, peer) = (address as *mut c_void, peer.0 as c_int);
        // SAFETY: as above.
        let status = unsafe { result::recv(to, len, F32, peer, self.0, stream.raw().cast()) };
        accepted("ncclRecv", status)
    }

    /// Ends what is going on and frees everything. May hang.
    pub(super) fn abort(self) {
        // SAFETY: the communicator is alive, and gone for its owner after this.
        let _ = unsafe { result::comm_abort(self.0) };
    }
}

/// What `NCCL_CONFIG_INITIALIZER` of nccl.h makes, with `blocking = 0`. cudarc has no such macro.
fn non_blocking() -> ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 22_803, // That of cudarc's bindings; a newer library looks no further.
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

/// Done or going on are both fine.
fn accepted(function: &'static str, status: Result<NcclStatus, NcclError>) -> Result<(), Error> {
    status.map(|_| ()).map_err(failed(function))
}

fn failed(function: &'static str) -> impl Fn(NcclError) -> Error {
    move |NcclError(code)| {
        let (name, meaning) = meaning(code);
        let detail = match last_words() {
            words if words.is_empty() => meaning.to_owned(),
            words => format!("{meaning} ({words})"),
        };
        // NCCL has no code of its own for it.
        let out_of_memory = detail.contains("out of memory");
        Error::Nccl { function, code: code as i32, name, detail, out_of_memory }
    }
}

/// NCCL's own account of the last error in this process, or nothing.
fn last_words() -> String {
    // SAFETY: only called after NCCL failed, hence is present; it takes a null communicator and
    // returns null or a string that lives as long as the library.
    let words = unsafe { sys::ncclGetLastError(ptr::null_mut()) };
    if words.is_null() {
        return String::new();
    }
    // SAFETY: see above.
    unsafe { CStr::from_ptr(words) }.to_string_lossy().trim().to_owned()
}

/// Name and meaning, after the NCCL user guide, "Types: ncclResult_t".
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
        R::ncclInvalidUsage => ("ncclInvalidUsage", "NCCL was used wrongly, or an old driver"),
        R::ncclRemoteError => ("ncclRemoteError", "a peer left or the network failed"),
        R::ncclInProgress => ("ncclInProgress", "still going on"),
        R::ncclNumResults => ("ncclNumResults", "unknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_codes_are_read_old_and_new() {
        assert_eq!(Version::from_code(22_809).to_string(), "2.28.9");
        assert_eq!(Version::from_code(2_804).to_string(), "2.8.4");
    }

    #[test]
    fn each_failure_is_told_in_words() {
        assert_eq!(meaning(ncclResult_t::ncclRemoteError).0, "ncclRemoteError");
    }
}
