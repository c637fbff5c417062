//! Counts the calls in which this process waited for a device.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use libloading::Library;

use crate::Error;

/// `CUpti_CallbackDomain`: calls of the driver API, and of the runtime API, which libtorch uses.
const DOMAINS: [u32; 2] = [1, 2];
/// `CUpti_ApiCallbackSite`: before the call.
const ENTER: c_int = 0;
/// Where the library may be: PyTorch's wheel brings the first, and has it open when CUDA is.
const NAMES: [&str; 2] = ["libcupti.so.13", "libcupti.so"];

type Subscriber = *mut c_void;
type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const CallbackData);
type Subscribe = unsafe extern "C" fn(*mut Subscriber, Callback, *mut c_void) -> c_int;
type EnableDomain = unsafe extern "C" fn(u32, Subscriber, u32) -> c_int;
type Unsubscribe = unsafe extern "C" fn(Subscriber) -> c_int;

/// The beginning of `CUpti_CallbackData`; what follows is not looked at.
#[repr(C)]
struct CallbackData {
    site: c_int,
    function: *const c_char,
}

/// Listens to all calls to CUDA in this process, those of libraries too, through NVIDIA's CUPTI. One at a
/// time; no other profiler may be at work.
#[derive(Debug)]
pub struct HostWaits {
    library: Library,
    subscriber: Subscriber,
    /// At an address of its own, which CUPTI holds.
    counts: Box<Counts>,
}

#[derive(Debug, Default)]
struct Counts(Mutex<BTreeMap<String, u64>>);

impl HostWaits {
    /// Begins to count.
    ///
    /// # Errors
    /// There is no CUPTI, or it refuses.
    pub fn watch() -> Result<Self, Error> {
        // SAFETY: it only opens the library, whose initialisers may run at any time.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let library = library.ok_or(Error::LibraryMissing {
            library: NAMES[0],
            remedy: "install nvidia-cuda-cupti, which PyTorch's wheel asks for",
        })?;
        let counts = Box::<Counts>::default();
        let data = ptr::from_ref(&*counts).cast_mut().cast();
        let mut subscriber = ptr::null_mut();
        // SAFETY: the signatures are those of cupti_callbacks.h; what is written to outlives the call, and
        // `counts` lives until `drop` has unsubscribed.
        unsafe {
            let subscribe = symbol::<Subscribe>(&library, c"cuptiSubscribe")?;
            told("cuptiSubscribe", subscribe(&raw mut subscriber, note, data))?;
        }
        let waits = Self { library, subscriber, counts };
        for domain in DOMAINS {
            // SAFETY: as above; the subscriber is alive.
            unsafe {
                let enable = symbol::<EnableDomain>(&waits.library, c"cuptiEnableDomain")?;
                told("cuptiEnableDomain", enable(1, waits.subscriber, domain))?;
            }
        }
        Ok(waits)
    }

    /// Calls that waited, by name, since counting began.
    #[must_use]
    pub fn so_far(&self) -> BTreeMap<String, u64> {
        self.counts.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for HostWaits {
    fn drop(&mut self) {
        // SAFETY: the subscriber is alive, and nobody uses it afterwards.
        unsafe {
            if let Ok(unsubscribe) = symbol::<Unsubscribe>(&self.library, c"cuptiUnsubscribe") {
                let _ = unsubscribe(self.subscriber);
            }
        }
    }
}

/// # Safety
/// `T` is the type of the function of that name.
unsafe fn symbol<T: Copy>(library: &Library, name: &'static CStr) -> Result<T, Error> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
    found.map(|found| *found).map_err(|_| Error::LibraryMissing {
        library: NAMES[0],
        remedy: "this one is of another version: install nvidia-cuda-cupti 13",
    })
}

fn told(function: &'static str, code: c_int) -> Result<(), Error> {
    match code {
        0 => Ok(()),
        _ => Err(Error::Cuda { function, code: code.unsigned_abs(), name: "CUPTI".to_owned() }),
    }
}

/// Called by CUPTI, from whatever thread calls CUDA.
unsafe extern "C" fn note(counts: *mut c_void, domain: u32, _call: u32, data: *const CallbackData) {
    if counts.is_null() || data.is_null() || !DOMAINS.contains(&domain) {
        return;
    }
    // SAFETY: what CUPTI gives in these domains begins like this, and the name is a C string or null.
    let (site, function) = unsafe { ((*data).site, (*data).function) };
    if site != ENTER || function.is_null() {
        return;
    }
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(function) }.to_string_lossy();
    if waits(&name) {
        // SAFETY: `watch` gave this address, and unsubscribes before it is freed.
        let Counts(counts) = unsafe { &*counts.cast::<Counts>() };
        let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(name.into_owned()).or_default() += 1;
    }
}

/// Whether a function of CUDA lets the host wait for work that is queued.
fn waits(name: &str) -> bool {
    let name = name.strip_prefix("cuda").or_else(|| name.strip_prefix("cu")).unwrap_or(name);
    let is_of = |family: &str| name.starts_with(family) && !name.contains("Async");
    // To free memory waits for all that may use it; that of the host is no different.
    name.contains("Synchronize") || is_of("Memcpy") || is_of("Free") || is_of("MemFree")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_wait_are_told_from_those_that_queue() {
        for name in [
            "cuStreamSynchronize",
            "cudaDeviceSynchronize_v3020",
            "cuEventSynchronize",
            "cuMemcpyDtoH_v2",
            "cudaMemcpy_v3020",
            "cudaFree_v3020",
            "cuMemFree_v2",
        ] {
            assert!(waits(name), "{name}");
        }
        for name in
            ["cuMemcpyHtoDAsync_v2", "cudaMemcpyAsync_v3020", "cuLaunchKernel", "cuEventQuery"]
        {
            assert!(!waits(name), "{name}");
        }
    }

    #[test]
    fn what_cupti_tells_is_counted_by_name_before_the_call_alone() {
        let counts = Counts::default();
        let address = ptr::from_ref(&counts).cast_mut().cast();
        for (site, name) in
            [(ENTER, c"cuStreamSynchronize"), (1, c"cuStreamSynchronize"), (ENTER, c"cuInit")]
        {
            let data = CallbackData { site, function: name.as_ptr() };
            // SAFETY: all of it lives here.
            unsafe { note(address, 1, 0, &raw const data) };
        }
        let expected = BTreeMap::from([("cuStreamSynchronize".to_owned(), 1)]);
        assert_eq!(*counts.0.lock().unwrap(), expected);
    }

    #[test]
    fn without_cupti_or_a_gpu_the_error_says_which() {
        match HostWaits::watch() {
            Ok(waits) => assert_eq!(waits.so_far(), BTreeMap::new()),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("cupti") || text.contains("cuptiSubscribe"), "{text}");
            }
        }
    }
}
