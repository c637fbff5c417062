//! Our own kernels, written once in CUDA C. For a GPU they are compiled when the program starts; a copy that is
//! compiled with the program runs the same source on the host, where tests compare it with plain arithmetic.
//!
//! A new source is listed in `KERNEL_SOURCE` and in `host.cpp`. Results must not depend on the order in which blocks
//! and threads run, and a change that moves a bit needs an entry in the CHANGELOG.
#![allow(unsafe_code)]

pub mod batch_norm;
mod host;
pub mod sgd;

#[cfg(test)]
mod tests;

use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::module::{Architecture, Grid, Module, compile};
use crate::{Device, Error, Stream};

/// Source of all kernels, for NVRTC.
pub(crate) const KERNEL_SOURCE: &CStr = match CStr::from_bytes_with_nul(
    concat!(
        "#line 1 \"device.cuh\"\n",
        include_str!("device.cuh"),
        "#line 1 \"numbers.cuh\"\n",
        include_str!("numbers.cuh"),
        "#line 1 \"batch_norm.h\"\n",
        include_str!("batch_norm.h"),
        "#line 1 \"batch_norm.cu\"\n",
        include_str!("batch_norm.cu"),
        "#line 1 \"sgd.cu\"\n",
        include_str!("sgd.cu"),
        "\0",
    )
    .as_bytes(),
) {
    Ok(source) => source,
    Err(_) => c"",
};

/// Storage format of a value; all arithmetic is f32. The kernels compare its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Element {
    /// IEEE 754 binary32.
    #[default]
    F32,
    /// The upper half of an f32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
}

impl Element {
    /// Bytes of a value.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Suffix of kernel names.
    fn suffix(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// The kernels' machine code for a GPU, compiled once per process and architecture.
fn code_for(ordinal: i32) -> Result<Arc<Vec<u8>>, Error> {
    static COMPILED: Mutex<Vec<(Architecture, Arc<Vec<u8>>)>> = Mutex::new(Vec::new());

    let architecture = Architecture::of(ordinal)?;
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, code)) = compiled.iter().find(|(known, _)| *known == architecture) {
        return Ok(code.clone());
    }
    let code = Arc::new(compile(KERNEL_SOURCE, architecture)?);
    compiled.push((architecture, code.clone()));
    Ok(code)
}

/// The kernels for the host or for one device. Addresses in kernel arguments must be in that memory.
#[derive(Debug)]
pub struct Kernels(KernelTarget);

#[derive(Debug)]
enum KernelTarget {
    /// `seed` determines the order in which blocks and threads run; 0 means ascending.
    Host {
        seed: u64,
    },
    Device {
        stream: Stream,
        module: Module,
    },
}

impl Kernels {
    /// Kernels on the host: slow, in the calling thread, done when the call returns.
    #[must_use]
    pub fn on_host() -> Self {
        Self(KernelTarget::Host { seed: 0 })
    }

    /// Kernels on the device of `stream`, queued there. Compiles them, which takes a second or two.
    ///
    /// # Errors
    /// NVRTC is missing or does not support the device's architecture.
    pub fn on_stream(stream: Stream) -> Result<Self, Error> {
        let device: Device = stream.device();
        let module = Module::load(device, &code_for(device.ordinal())?)?;
        Ok(Self(KernelTarget::Device { stream, module }))
    }

    /// Compiles the kernels for the GPU with this ordinal, so that [`on_stream`](Self::on_stream) is fast later. Uses
    /// no GPU memory.
    ///
    /// # Errors
    /// As [`on_stream`](Self::on_stream).
    pub fn compile_ahead(ordinal: i32) -> Result<(), Error> {
        code_for(ordinal).map(drop)
    }

    /// Runs or queues a kernel.
    ///
    /// # Errors
    /// The kernel does not exist; the device failed.
    ///
    /// # Safety
    /// As [`Module::launch`]; on the host until this returns.
    unsafe fn launch<A: Copy>(&self, name: &str, grid: Grid, arguments: &A) -> Result<(), Error> {
        match &self.0 {
            // SAFETY: guaranteed by the caller.
            KernelTarget::Host { seed } => unsafe { host::run(name, grid, *seed, arguments) },
            // SAFETY: guaranteed by the caller.
            KernelTarget::Device { stream, module } => unsafe {
                module.launch(stream, name, grid, arguments)
            },
        }
    }
}
