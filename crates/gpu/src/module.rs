//! Kernels that are compiled at run time for the installed GPU.
//!
//! NVRTC, CUDA's compiler as a library, comes with PyTorch. So the machine that builds Baton needs no CUDA toolkit, and
//! one build runs on every GPU.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::sync::OnceLock;

use cudarc::driver::{result as driver, sys};
use cudarc::nvrtc::{result as nvrtc, sys as nvrtc_sys};

use crate::error::failed;
use crate::{Device, Error, Stream, device};

/// The architecture of a GPU: its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Major number: 9 of 9.0.
    pub major: i32,
    /// Minor number: 0 of 9.0.
    pub minor: i32,
}

impl Architecture {
    /// The architecture of the GPU with this ordinal.
    ///
    /// # Errors
    /// No driver; the GPU does not exist.
    pub fn of(ordinal: i32) -> Result<Self, Error> {
        use sys::CUdevice_attribute as Attribute;

        device::open_driver()?;
        let handle = driver::device::get(ordinal).map_err(failed("cuDeviceGet"))?;
        let attribute = |which| {
            // SAFETY: the handle comes from `cuDeviceGet`.
            unsafe { driver::device::get_attribute(handle, which) }
                .map_err(failed("cuDeviceGetAttribute"))
        };
        Ok(Self {
            major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        })
    }
}

/// Machine code ("cubin") of CUDA C `source` for GPUs of one architecture.
///
/// # Errors
/// NVRTC is missing; it does not support the architecture; the source is wrong (with NVRTC's log).
pub fn compile(source: &CStr, architecture: Architecture) -> Result<Vec<u8>, Error> {
    // This comes before any other call, because cudarc panics without the library.
    // SAFETY: it only opens libnvrtc.so, whose initialisers may run at any time.
    if !unsafe { nvrtc_sys::is_culib_present() } {
        return Err(Error::LibraryMissing {
            library: "libnvrtc.so",
            remedy: "it comes with PyTorch's CUDA wheel: `pip install torch==2.11.0` (in a checkout, \
                     `make setup`), or set precision.fused = false",
        });
    }
    open_builtins();
    let program = NvrtcProgram::new(source)?;
    program.compile(architecture)?;
    program.machine_code()
}

/// Loads NVRTC's second library once and never unloads it. NVRTC opens it by name, but searches neither its own folder
/// nor this program's rpath; it finds a library that is loaded already.
fn open_builtins() {
    static OPENED: OnceLock<Option<libloading::Library>> = OnceLock::new();

    OPENED.get_or_init(|| {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two pointers to two live numbers.
        unsafe { nvrtc_sys::nvrtcVersion(&mut major, &mut minor) }.result().ok()?;
        let name = format!("libnvrtc-builtins.so.{major}.{minor}");
        // If it is missing, NVRTC's log reports it.
        // SAFETY: its initialisers may run at any time.
        unsafe { libloading::Library::new(name) }.ok()
    });
}

/// A program in the compiler.
struct NvrtcProgram(nvrtc_sys::nvrtcProgram);

impl NvrtcProgram {
    fn new(source: &CStr) -> Result<Self, Error> {
        // NVRTC copies the source.
        let program = nvrtc::create_program(source, Some(c"baton.cu"));
        program.map(Self).map_err(refused("nvrtcCreateProgram"))
    }

    fn compile(&self, architecture: Architecture) -> Result<(), Error> {
        let Architecture { major, minor } = architecture;
        let options = [format!("--gpu-architecture=sm_{major}{minor}"), "--std=c++17".to_owned()];
        // SAFETY: the program is alive.
        unsafe { nvrtc::compile_program(self.0, &options) }.map_err(|error| {
            let Error::Nvrtc { function, name, .. } = refused("nvrtcCompileProgram")(error) else {
                return refused("nvrtcCompileProgram")(error);
            };
            Error::Nvrtc { function, name, log: self.log() }
        })
    }

    fn log(&self) -> String {
        // SAFETY: the program is alive.
        let log = unsafe { nvrtc::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.into_iter().map(|byte| byte as u8).collect();
        // Joined to one line, as error messages should be.
        let lines = String::from_utf8_lossy(&bytes);
        let lines = lines.trim_end_matches('\0').lines().map(str::trim).filter(|it| !it.is_empty());
        lines.collect::<Vec<_>>().join("; ")
    }

    fn machine_code(&self) -> Result<Vec<u8>, Error> {
        let mut len = 0;
        // SAFETY: the program is alive and compiled for a real architecture; the second call writes as many bytes as
        // the first one returned.
        unsafe {
            nvrtc_sys::nvrtcGetCUBINSize(self.0, &mut len)
                .result()
                .map_err(refused("nvrtcGetCUBINSize"))?;
            let mut code = vec![0_u8; len];
            nvrtc_sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast())
                .result()
                .map_err(refused("nvrtcGetCUBIN"))?;
            Ok(code)
        }
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed once.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

fn refused(function: &'static str) -> impl Fn(nvrtc::NvrtcError) -> Error {
    move |error| Error::Nvrtc { function, name: format!("{:?}", error.0), log: String::new() }
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block along x, y, z.
    pub threads: [u32; 3],
}

/// Kernels on a device. They are loaded once and never unloaded, so that all queued work can run.
#[derive(Debug)]
pub struct Module {
    device: Device,
    /// A `CUmodule`.
    raw: usize,
}

impl Module {
    /// Loads machine code of `device`'s architecture.
    ///
    /// # Errors
    /// The code is invalid or for another architecture; out of memory.
    pub fn load(device: Device, code: &[u8]) -> Result<Self, Error> {
        device.make_current()?;
        // SAFETY: the driver checks the code, which contains its own length, and copies it.
        let raw = unsafe { driver::module::load_data(code.as_ptr().cast()) }
            .map_err(failed("cuModuleLoadData"))?;
        Ok(Self { device, raw: raw as usize })
    }

    /// Queues a kernel that takes one argument.
    ///
    /// # Errors
    /// The kernel does not exist; the device failed.
    ///
    /// # Safety
    /// `arguments` must have the layout of the kernel's argument. Until `stream` has completed the kernel, the
    /// addresses in it must be valid memory of the device for the kernel's reads and writes, and no other code may use
    /// it.
    pub unsafe fn launch<A: Copy>(
        &self,
        stream: &Stream,
        name: &str,
        grid: Grid,
        arguments: &A,
    ) -> Result<(), Error> {
        debug_assert_eq!(self.device, stream.device(), "the stream must be on the module's device");
        self.device.make_current()?;
        let name = CString::new(name).unwrap_or_default();
        let module = self.raw as sys::CUmodule;
        // SAFETY: the module is never unloaded.
        let function = unsafe { driver::module::get_function(module, name) }
            .map_err(failed("cuModuleGetFunction"))?;
        let [blocks, threads] = [grid.blocks, grid.threads].map(|[x, y, z]| (x, y, z));
        // The driver copies the argument before it returns.
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        let raw = stream.raw().cast();
        // SAFETY: guaranteed by the caller.
        unsafe { driver::launch_kernel(function, blocks, threads, 0, raw, &mut parameters) }
            .map_err(failed("cuLaunchKernel"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: Architecture = Architecture { major: 9, minor: 0 };

    #[test]
    fn our_kernels_compile_for_ampere_and_hopper() {
        for architecture in [Architecture { major: 8, minor: 0 }, HOPPER] {
            // `make setup` installs the compiler on every machine.
            let code = compile(crate::kernels::KERNEL_SOURCE, architecture);
            let code = code.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(&code[..4], b"\x7fELF");
            println!("{architecture:?}: {} bytes of machine code", code.len());
        }
    }

    #[test]
    fn a_wrong_source_is_reported_with_the_compilers_log() {
        let result = compile(c"__global__ void kernel() { nonsense; }", HOPPER);
        let Err(Error::Nvrtc { function, name, log }) = result else { panic!("{result:?}") };
        assert_eq!((function, name.as_str()), ("nvrtcCompileProgram", "NVRTC_ERROR_COMPILATION"));
        assert!(log.contains("\"nonsense\" is undefined"), "{log}");
    }

    #[test]
    fn an_unknown_architecture_is_an_error() {
        let unknown = Architecture { major: 1, minor: 0 };
        let result = compile(c"", unknown);
        assert!(matches!(result, Err(Error::Nvrtc { .. })), "{result:?}");
    }
}
