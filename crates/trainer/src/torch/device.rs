//! Readies libtorch in this process: threads, determinism, CPU or GPU.
//!
//! One binary serves both. It links `libtorch_cpu` alone; where there is an NVIDIA driver,
//! `libtorch_cuda.so` is opened at start and registers CUDA with libtorch by its static
//! initialisers. This must come before anything asks libtorch about CUDA, as libtorch remembers
//! the first answer: call [`open`] before any other function of this crate that touches libtorch.

use std::{
    ffi::{c_int, c_uint},
    fs,
    mem::ManuallyDrop,
    path::PathBuf,
    sync::Once,
};

use baton_job::ids::LocalRank;
use baton_recipe::{
    JobSpec,
    spec::{Determinism, Device as Wanted},
};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
use tch::{Cuda, Device};

pub use super::buffer::DeviceBuffer;
use crate::learner::Error;

/// Loads what [`open`] needs whatever the device: libtorch's CUDA half, seconds of work, if there are GPUs and the
/// recipe allows them. Reserves no memory of theirs.
pub fn prepare(spec: &JobSpec) {
    if spec.cluster.device != Wanted::Cpu {
        // What is wrong is told by `open`, and by whoever builds a learner.
        let found = gpus();
        if spec.precision.fused && matches!(found, Found::Gpus(1..)) {
            let _ = baton_gpu::kernels::Kernels::compile_ahead(0);
        }
    }
}

/// Sets threads and determinism as the recipe says and picks this process's device: with CUDA, the
/// GPU numbered `local_rank`.
///
/// `cluster.device = "auto"` takes the CPU only where there is no NVIDIA driver or no GPU: a GPU
/// that cannot be used is an error, as training on the CPU instead would be a costly surprise.
///
/// # Errors
/// [`Error::Device`] with a remedy: no driver, a libtorch without CUDA, no GPU, too few GPUs.
pub fn open(spec: &JobSpec, local_rank: LocalRank) -> Result<Device, Error> {
    set_threads(spec.cluster.threads_per_rank);
    let found = match spec.cluster.device {
        Wanted::Cpu => return Ok(Device::Cpu),
        Wanted::Auto | Wanted::Cuda => gpus(),
    };
    let device = choose(spec.cluster.device, local_rank, found).map_err(Error::Device)?;
    // Timing algorithms against each other picks differently from run to run.
    Cuda::cudnn_set_benchmark(spec.precision.determinism == Determinism::Fast);
    Ok(device)
}

/// Sets libtorch's threads inside one operation; between operations it gets one, as training is one
/// chain of operations. Results are bit-identical only for one value of `threads`.
pub fn set_threads(threads: u32) {
    static INTEROP: Once = Once::new();
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
    // libtorch allows this once per process and panics through tch the second time.
    INTEROP.call_once(|| {
        if tch::get_num_interop_threads() != 1 {
            tch::set_num_interop_threads(1);
        }
    });
}

/// The version of the libtorch that is running, e.g. `2.11.0`; `unknown` before 2.10.
#[must_use]
pub fn torch_version() -> String {
    type AbiVersion = unsafe extern "C" fn() -> u64;
    // SAFETY: the symbol is declared `uint64_t aoti_torch_abi_version()` in libtorch's stable C
    // interface (torch/csrc/inductor/aoti_torch/c/shim.h) and only returns a constant.
    #[allow(unsafe_code)]
    let packed = unsafe {
        Library::this().get::<AbiVersion>(b"aoti_torch_abi_version\0").map(|version| version())
    };
    match packed {
        Ok(packed) => {
            // Major, minor and patch are the three highest bytes (torch/headeronly/version.h).
            let [major, minor, patch, ..] = packed.to_be_bytes();
            format!("{major}.{minor}.{patch}")
        }
        Err(_) => "unknown".to_owned(),
    }
}

/// What a search for GPUs came to.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    /// `libcuda.so.1` does not load.
    NoDriver,
    /// A driver, but libtorch's CUDA half does not load.
    NoTorchCuda(String),
    /// So many GPUs that this process may see.
    Gpus(u32),
}

fn choose(wanted: Wanted, local_rank: LocalRank, found: Found) -> Result<Device, String> {
    match found {
        Found::NoDriver | Found::Gpus(0) if wanted == Wanted::Auto => Ok(Device::Cpu),
        Found::NoDriver => Err(
            "no NVIDIA driver (libcuda.so.1) on this node: install it, or set cluster.device = \"cpu\""
                .to_owned(),
        ),
        Found::NoTorchCuda(reason) => Err(format!(
            "this node has an NVIDIA driver, but libtorch's CUDA half does not load ({reason}): \
             install the torch wheel with its dependencies, or set cluster.device = \"cpu\""
        )),
        Found::Gpus(0) => Err(
            "the NVIDIA driver shows no GPU: see `nvidia-smi` and CUDA_VISIBLE_DEVICES, or set \
             cluster.device = \"cpu\""
                .to_owned(),
        ),
        Found::Gpus(count) if local_rank.0 >= count => Err(format!(
            "local rank {local_rank} has no GPU, as this node shows {count}: start at most {count} \
             ranks here, or see CUDA_VISIBLE_DEVICES"
        )),
        Found::Gpus(_) => Ok(Device::Cuda(local_rank.0 as usize)),
    }
}

fn gpus() -> Found {
    let count = match driver_gpus() {
        None => return Found::NoDriver,
        Some(0) => return Found::Gpus(0),
        Some(count) => count,
    };
    // Beside libtorch_cpu.so, else wherever the loader searches.
    let torch_cuda = torch_folder().unwrap_or_default().join("libtorch_cuda.so");
    match load(torch_cuda) {
        Err(error) => Found::NoTorchCuda(error.to_string()),
        Ok(_) if Cuda::device_count() < i64::from(count) => {
            Found::NoTorchCuda("the driver is too old for it".to_owned())
        }
        Ok(_) => Found::Gpus(count),
    }
}

/// GPUs that NVIDIA's driver shows this process, 0 without a driver. Takes no GPU memory, unlike
/// opening a device.
#[must_use]
pub fn gpu_count() -> u32 {
    driver_gpus().unwrap_or(0)
}

/// The memory of a GPU as the driver tells it; none of a CPU.
#[must_use]
pub fn memory_bytes(device: Device) -> Option<u64> {
    type DeviceGet = unsafe extern "C" fn(device: *mut c_int, ordinal: c_int) -> c_int;
    type DeviceTotalMem = unsafe extern "C" fn(bytes: *mut usize, device: c_int) -> c_int;
    let Device::Cuda(ordinal) = device else { return None };
    let driver = load("libcuda.so.1".into()).ok()?;
    let (mut handle, mut bytes) = (0, 0);
    // SAFETY: both signatures are those of the CUDA driver API, section "Device Management"; what is written to
    // outlives the calls. Without a driver that was initialised they return an error.
    #[allow(unsafe_code)]
    let told = unsafe {
        let get = driver.get::<DeviceGet>(b"cuDeviceGet\0").ok()?;
        let total = driver.get::<DeviceTotalMem>(b"cuDeviceTotalMem_v2\0").ok()?;
        get(&raw mut handle, c_int::try_from(ordinal).ok()?) == 0
            && total(&raw mut bytes, handle) == 0
    };
    told.then_some(bytes as u64)
}

/// Nothing without a driver.
fn driver_gpus() -> Option<u32> {
    type Init = unsafe extern "C" fn(flags: c_uint) -> c_int;
    type DeviceGetCount = unsafe extern "C" fn(count: *mut c_int) -> c_int;
    let driver = load("libcuda.so.1".into()).ok()?;
    let mut count = 0;
    // SAFETY: both signatures are those of the CUDA driver API, section "Initialization" and
    // "Device Management"; `count` outlives the call.
    #[allow(unsafe_code)]
    let ready = unsafe {
        let init = driver.get::<Init>(b"cuInit\0").ok()?;
        let get_count = driver.get::<DeviceGetCount>(b"cuDeviceGetCount\0").ok()?;
        init(0) == 0 && get_count(&raw mut count) == 0
    };
    // A driver without a GPU refuses to initialise.
    Some(if ready { u32::try_from(count).unwrap_or(0) } else { 0 })
}

/// Opens a library for the rest of the process's life, its symbols visible to all.
fn load(path: PathBuf) -> Result<ManuallyDrop<Library>, libloading::Error> {
    // SAFETY: runs the static initialisers of NVIDIA's driver or of libtorch, which are made to be
    // loaded this way: Python's `import torch` does the same.
    #[allow(unsafe_code)]
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }?;
    // Never closed: libtorch keeps pointers into it.
    Ok(ManuallyDrop::new(library))
}

/// The folder of the `libtorch_cpu.so` that this process runs with.
fn torch_folder() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with("/libtorch_cpu.so"))?;
    let path = line.get(line.find('/')?..)?;
    PathBuf::from(path).parent().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(wanted: Wanted, local_rank: u32, found: Found) -> String {
        choose(wanted, LocalRank(local_rank), found).unwrap_err()
    }

    #[test]
    fn auto_takes_the_gpu_of_the_local_rank() {
        let device = choose(Wanted::Auto, LocalRank(3), Found::Gpus(8));
        assert_eq!(device, Ok(Device::Cuda(3)));
    }

    #[test]
    fn auto_takes_the_cpu_only_where_there_is_no_gpu() {
        assert_eq!(choose(Wanted::Auto, LocalRank(0), Found::NoDriver), Ok(Device::Cpu));
        assert_eq!(choose(Wanted::Auto, LocalRank(0), Found::Gpus(0)), Ok(Device::Cpu));
        let broken = refused(Wanted::Auto, 0, Found::NoTorchCuda("libcudnn.so.9".to_owned()));
        assert!(broken.contains("libcudnn.so.9") && broken.contains("install"), "{broken}");
    }

    #[test]
    fn cuda_without_a_gpu_is_refused_with_a_remedy() {
        let no_driver = refused(Wanted::Cuda, 0, Found::NoDriver);
        assert!(no_driver.contains("driver") && no_driver.contains("cluster.device"));
        let no_gpu = refused(Wanted::Cuda, 0, Found::Gpus(0));
        assert!(no_gpu.contains("nvidia-smi"), "{no_gpu}");
    }

    #[test]
    fn more_local_ranks_than_gpus_are_refused() {
        let error = refused(Wanted::Auto, 2, Found::Gpus(2));
        assert!(error.contains("local rank 2") && error.contains("at most 2"), "{error}");
    }

    #[test]
    fn running_libtorch_is_the_pinned_one() {
        assert_eq!(torch_version(), "2.11.0");
        assert!(torch_folder().is_some_and(|folder| folder.join("libc10.so").is_file()));
    }
}
