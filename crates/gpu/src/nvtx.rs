//! Ranges of NVTX, which NVIDIA's tools show beside kernels (`nvToolsExt.h`).

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};

use libloading::Library;

use crate::Error;

/// The library by its file names: since CUDA 12.9, and before.
const LIBRARIES: [&str; 3] = ["libnvtx3interop.so.1", "libnvtx3interop.so", "libnvToolsExt.so.1"];

type PushFunction = unsafe extern "C" fn(*const c_char) -> c_int;
type PopFunction = unsafe extern "C" fn() -> c_int;

/// NVTX's library. Without a tool that has started this process, its functions do nothing.
#[derive(Debug)]
pub struct Nvtx {
    push: PushFunction,
    pop: PopFunction,
    /// Keeps the functions valid.
    _library: Library,
}

impl Nvtx {
    /// Loads the library.
    ///
    /// # Errors
    /// It is not there.
    pub fn open() -> Result<Self, Error> {
        let missing = Error::LibraryMissing {
            library: "libnvtx3interop.so.1 (CUDA 12.9 and later) or libnvToolsExt.so.1",
            remedy: "it comes with the CUDA toolkit, and with `pip install nvidia-nvtx`: add its folder to LD_LIBRARY_PATH",
        };
        LIBRARIES.into_iter().find_map(|name| Self::of(name).ok()).ok_or(missing)
    }

    fn of(name: &str) -> Result<Self, libloading::Error> {
        // SAFETY: the initialisers of NVIDIA's libraries may run at any time.
        let library = unsafe { Library::new(name) }?;
        // SAFETY: these are the types of both functions in `nvToolsExt.h`.
        let (push, pop) = unsafe {
            let push = *library.get::<PushFunction>(b"nvtxRangePushA")?;
            (push, *library.get::<PopFunction>(b"nvtxRangePop")?)
        };
        Ok(Self { push, pop, _library: library })
    }

    /// Begins a range of this thread, within the one that it has begun before.
    pub fn push(&self, name: &CStr) {
        // SAFETY: the text ends with 0, and is copied.
        unsafe { (self.push)(name.as_ptr()) };
    }

    /// Ends this thread's newest range.
    pub fn pop(&self) {
        // SAFETY: it takes nothing, and without a range it does nothing.
        unsafe { (self.pop)() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_nested_for_each_thread() {
        baton_fake_gpu::run("nvtx::tests::ranges_are_nested_for_each_thread", |gpu| {
            let nvtx = Nvtx::open().unwrap();
            nvtx.push(c"outer");
            nvtx.push(c"inner");
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    nvtx.push(c"other");
                    nvtx.pop();
                });
            });
            nvtx.pop();
            nvtx.pop();
            nvtx.pop();
            assert_eq!(gpu.ended_ranges(), ["other", "outer/inner", "outer"]);
        });
    }
}
