//! Counts the calls to CUDA in which this process waits for a device, and those that launch a kernel.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::result;
use libloading::Library;

use crate::error::failed;
use crate::{Device, Error};

/// `CUpti_CallbackDomain`: calls of the driver API, and of the runtime API, which libtorch uses.
const DOMAINS: [u32; 2] = [1, 2];
/// `CUpti_ApiCallbackSite`: before the call.
const ENTER: c_int = 0;
/// Names of the CUPTI library: PyTorch's wheel contains the first one and loads it with CUDA.
const NAMES: [&str; 2] = ["libcupti.so.13", "libcupti.so"];

type Subscriber = *mut c_void;
type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const CallbackData);
type Subscribe = unsafe extern "C" fn(*mut Subscriber, Callback, *mut c_void) -> c_int;
type EnableDomain = unsafe extern "C" fn(u32, Subscriber, u32) -> c_int;
type Unsubscribe = unsafe extern "C" fn(Subscriber) -> c_int;

/// The first fields of `CUpti_CallbackData`; the others are not read.
#[repr(C)]
struct CallbackData {
    site: c_int,
    function: *const c_char,
}

/// Receives all CUDA calls of this process, including those of libraries, through NVIDIA's CUPTI. Only one can exist at
/// a time, and no other profiler may be active.
#[derive(Debug)]
pub struct CudaCalls {
    library: Library,
    subscriber: Subscriber,
    /// Boxed for a stable address, which CUPTI keeps.
    counts: Box<Counts>,
}

#[derive(Debug, Default)]
struct Counts(Mutex<BTreeMap<String, u64>>);

impl Counts {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CudaCalls {
    /// Starts counting, after all queued work of the device.
    ///
    /// # Errors
    /// CUPTI is missing, reports an error, or does not report a call of this function.
    pub fn start(device: Device) -> Result<Self, Error> {
        // SAFETY: it only opens the library, whose initialisers may run at any time.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let library = library.ok_or(Error::LibraryMissing {
            library: NAMES[0],
            remedy: "install nvidia-cuda-cupti, a dependency of PyTorch's wheel",
        })?;
        let counts = Box::<Counts>::default();
        let data = ptr::from_ref(&*counts).cast_mut().cast();
        let mut subscriber = ptr::null_mut();
        // SAFETY: the signatures are those of cupti_callbacks.h; the output variable outlives the call, and `counts`
        // lives until `drop` has unsubscribed.
        unsafe {
            let subscribe = symbol::<Subscribe>(&library, c"cuptiSubscribe")?;
            check("cuptiSubscribe", subscribe(&raw mut subscriber, on_cuda_call, data))?;
        }
        let calls = Self { library, subscriber, counts };
        for domain in DOMAINS {
            // SAFETY: as above; the subscriber is alive.
            unsafe {
                let enable = symbol::<EnableDomain>(&calls.library, c"cuptiEnableDomain")?;
                check("cuptiEnableDomain", enable(1, calls.subscriber, domain))?;
            }
        }
        device.make_current()?;
        result::ctx::synchronize().map_err(failed("cuCtxSynchronize"))?;
        let seen = std::mem::take(&mut *calls.counts.lock());
        let is_reported = seen.keys().any(|name| name.starts_with("cuCtxSynchronize"));
        if is_reported { Ok(calls) } else { Err(Error::CallsNotReported) }
    }

    /// Number of calls that waited since the start, by function name.
    #[must_use]
    pub fn waits(&self) -> BTreeMap<String, u64> {
        self.counts().into_iter().filter(|(name, _)| waits(name)).collect()
    }

    /// Number of kernels launched since the start, without cooperative ones and graphs.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.counts().iter().filter(|(name, _)| launches(name)).map(|(_, count)| count).sum()
    }

    fn counts(&self) -> BTreeMap<String, u64> {
        self.counts.lock().clone()
    }
}

impl Drop for CudaCalls {
    fn drop(&mut self) {
        // SAFETY: the subscriber is alive, and not used afterwards.
        unsafe {
            if let Ok(unsubscribe) = symbol::<Unsubscribe>(&self.library, c"cuptiUnsubscribe") {
                let _ = unsubscribe(self.subscriber);
            }
        }
    }
}

/// # Safety
/// `T` must be the type of the function with this name.
unsafe fn symbol<T: Copy>(library: &Library, name: &'static CStr) -> Result<T, Error> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
    found.map(|found| *found).map_err(|_| Error::LibraryMissing {
        library: NAMES[0],
        remedy: "the installed version does not fit: install nvidia-cuda-cupti 13",
    })
}

fn check(function: &'static str, code: c_int) -> Result<(), Error> {
    match code {
        0 => Ok(()),
        _ => Err(Error::Cuda { function, code: code.unsigned_abs(), name: "CUPTI".to_owned() }),
    }
}

/// Called by CUPTI in every thread that calls CUDA.
unsafe extern "C" fn on_cuda_call(
    counts: *mut c_void,
    domain: u32,
    _call: u32,
    data: *const CallbackData,
) {
    if counts.is_null() || data.is_null() || !DOMAINS.contains(&domain) {
        return;
    }
    // SAFETY: in these domains CUPTI's data begins with these fields, and the name is a C string or null.
    let (site, function) = unsafe { ((*data).site, (*data).function) };
    if site != ENTER || function.is_null() {
        return;
    }
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(function) }.to_string_lossy();
    if waits(&name) || launches(&name) {
        // SAFETY: `start` passed this address, and `drop` unsubscribes before it is freed.
        let counts = unsafe { &*counts.cast::<Counts>() };
        *counts.lock().entry(name.into_owned()).or_default() += 1;
    }
}

/// Whether a CUDA function makes the host wait for queued work.
fn waits(name: &str) -> bool {
    let name = name.strip_prefix("cuda").or_else(|| name.strip_prefix("cu")).unwrap_or(name);
    let is_of = |family: &str| name.starts_with(family) && !name.contains("Async");
    // Freeing memory, including host memory, waits for all work that may use it.
    name.contains("Synchronize") || is_of("Memcpy") || is_of("Free") || is_of("MemFree")
}

/// Whether a function of the driver launches a kernel. The runtime's functions call them.
fn launches(name: &str) -> bool {
    name.starts_with("cuLaunchKernel")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_wait_are_distinguished_from_calls_that_queue() {
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
        assert!(launches("cuLaunchKernel") && launches("cuLaunchKernelEx"));
        assert!(!launches("cudaLaunchKernel_v7000") && !launches("cuEventQuery"));
    }

    #[test]
    fn calls_are_counted_by_name_and_only_before_the_call() {
        let counts = Counts::default();
        let address = ptr::from_ref(&counts).cast_mut().cast();
        for (site, name) in
            [(ENTER, c"cuStreamSynchronize"), (1, c"cuStreamSynchronize"), (ENTER, c"cuInit")]
        {
            let data = CallbackData { site, function: name.as_ptr() };
            // SAFETY: all data lives until the end of this scope.
            unsafe { on_cuda_call(address, 1, 0, &raw const data) };
        }
        let expected = BTreeMap::from([("cuStreamSynchronize".to_owned(), 1)]);
        assert_eq!(*counts.0.lock().unwrap(), expected);
    }

    #[test]
    fn without_a_gpu_or_cupti_the_error_names_the_missing_part() {
        let found = Device::open(0).and_then(CudaCalls::start);
        match found {
            Ok(calls) => assert_eq!(calls.waits(), BTreeMap::new()),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    ["cupti", "libcuda", "cuInit"].iter().any(|part| text.contains(part)),
                    "{text}"
                );
            }
        }
    }
}
