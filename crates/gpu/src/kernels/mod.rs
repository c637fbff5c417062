//! Kernels of our own, written once in CUDA C: on a GPU they are compiled when the program starts, and a
//! copy compiled with the program runs the same source on the host, where tests compare it with plain
//! arithmetic.
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

/// All of them, for NVRTC.
pub(crate) const SOURCE: &CStr = match CStr::from_bytes_with_nul(
    concat!(
        "#line 1 \"device.cuh\"\n",
        include_str!("device.cuh"),
        "#line 1 \"numbers.cuh\"\n",
        include_str!("numbers.cuh"),
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

/// How a value lies in memory; arithmetic is f32 throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE 754 binary32.
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

    /// What a kernel's name ends with.
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
    let code = Arc::new(compile(SOURCE, architecture)?);
    compiled.push((architecture, code.clone()));
    Ok(code)
}

/// A place where kernels run. Addresses given to a kernel are those of its place's memory.
#[derive(Debug)]
pub struct Kernels(Place);

#[derive(Debug)]
enum Place {
    Host { seed: u64 },
    Device { stream: Stream, module: Module },
}

impl Kernels {
    /// On the host: slow, one thread of it, done when the call returns.
    #[must_use]
    pub fn on_host() -> Self {
        Self(Place::Host { seed: 0 })
    }

    /// On the device of `stream`, queued there. Compiles them, which takes a second or two.
    ///
    /// # Errors
    /// No NVRTC, or one that does not know the device's architecture.
    pub fn on_stream(stream: Stream) -> Result<Self, Error> {
        let device: Device = stream.device();
        let module = Module::load(device, &code_for(device.ordinal())?)?;
        Ok(Self(Place::Device { stream, module }))
    }

    /// Compiles them for the GPU with this ordinal, so that [`on_stream`](Self::on_stream) need not. Takes none of
    /// the GPU's memory.
    ///
    /// # Errors
    /// As there.
    pub fn compile_ahead(ordinal: i32) -> Result<(), Error> {
        code_for(ordinal).map(drop)
    }

    /// Runs or queues a kernel.
    ///
    /// # Errors
    /// There is no such kernel; the device refused.
    ///
    /// # Safety
    /// As [`Module::launch`]; on the host until this returns.
    unsafe fn launch<A: Copy>(&self, name: &str, grid: Grid, arguments: &A) -> Result<(), Error> {
        match &self.0 {
            // SAFETY: the caller's promise.
            Place::Host { seed } => unsafe { host::run(name, grid, *seed, arguments) },
            // SAFETY: the caller's promise.
            Place::Device { stream, module } => unsafe {
                module.launch(stream, name, grid, arguments)
            },
        }
    }
}
