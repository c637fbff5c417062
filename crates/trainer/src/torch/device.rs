//! Prepares libtorch in this process: threads, determinism, CPU or GPU.
//!
//! The same binary runs on both. It links only `libtorch_cpu`; if there is an NVIDIA driver, `libtorch_cuda.so` is
//! opened at start and registers CUDA with libtorch in its static initialisers. This must happen before any code asks
//! libtorch about CUDA, because libtorch remembers the first answer: call [`open`] before any other function of this
//! crate that uses libtorch.

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
    spec::{Determinism, DeviceChoice},
};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
use tch::{Cuda, Device};

pub use super::buffer::DeviceBuffer;
use crate::learner::Error;

/// Loads in advance what [`open`] needs for any device: libtorch's CUDA half, which takes seconds, if there are GPUs
/// and the recipe allows them. Reserves no GPU memory.
pub fn prepare(spec: &JobSpec) {
    if spec.cluster.device != DeviceChoice::Cpu {
        // Errors are reported later, by `open` and when a learner is built.
        let found = gpus();
        if spec.precision.fused && matches!(found, GpuSearch::Gpus(1..)) {
            let _ = baton_gpu::kernels::Kernels::compile_ahead(0);
        }
    }
}

/// Sets threads and determinism from the recipe and chooses this process's device: with CUDA, the GPU with the number
/// `local_rank`.
///
/// `cluster.device = "auto"` chooses the CPU only if there is no NVIDIA driver or no GPU. A GPU that cannot be used is
/// an error, because training on the CPU instead would be a costly surprise.
///
/// # Errors
/// [`Error::Device`] with a remedy: no driver, a libtorch without CUDA, no GPU, too few GPUs.
pub fn open(spec: &JobSpec, local_rank: LocalRank) -> Result<Device, Error> {
    set_threads(spec.cluster.threads_per_rank);
    let device = match spec.cluster.device {
        DeviceChoice::Cpu => Device::Cpu,
        choice => choose(choice, local_rank, gpus()).map_err(Error::Device)?,
    };
    let determinism = spec.precision.determinism;
    // The flags of one device also change what the other computes.
    match device.is_cuda() {
        true => set_determinism(determinism),
        false => set_cpu_determinism(determinism),
    }
    Ok(device)
}

/// With `strict`, operations on a CPU give the same bits each time with any number of threads.
fn set_cpu_determinism(determinism: Determinism) {
    // SAFETY: sets flags of the process.
    #[allow(unsafe_code)]
    unsafe {
        baton_set_deterministic_cpu(determinism == Determinism::Strict);
    }
}

/// With `strict`, the operations of Baton's own models give the same bits each time on a GPU.
fn set_determinism(determinism: Determinism) {
    let fast = determinism == Determinism::Fast;
    // This mode times algorithms and may choose differently in each run.
    Cuda::cudnn_set_benchmark(fast);
    // By default libtorch also takes algorithms that add in any order, for gradients of convolutions and of attention.
    // SAFETY: sets flags of the process.
    #[allow(unsafe_code)]
    unsafe {
        baton_set_deterministic(!fast);
    }
}

// Defined in context.cpp.
#[allow(unsafe_code)]
unsafe extern "C" {
    fn baton_set_deterministic(deterministic: bool);
    fn baton_set_deterministic_cpu(deterministic: bool);
    #[cfg(test)]
    fn baton_is_deterministic() -> bool;
}

/// Sets the number of libtorch threads inside one operation. Between operations libtorch gets one thread, because
/// training is one chain of operations. Results are bit-identical only for the same value of `threads`.
pub fn set_threads(threads: u32) {
    static INTEROP: Once = Once::new();
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
    // libtorch allows this once per process; tch panics the second time.
    INTEROP.call_once(|| {
        if tch::get_num_interop_threads() != 1 {
            tch::set_num_interop_threads(1);
        }
    });
}

/// Version of the running libtorch, e.g. `2.11.0`; `unknown` before 2.10.
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

/// Result of a search for GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum GpuSearch {
    /// `libcuda.so.1` does not load.
    NoDriver,
    /// A driver, but libtorch's CUDA half does not load.
    NoTorchCuda(String),
    /// Number of GPUs that this process may use.
    Gpus(u32),
}

fn choose(choice: DeviceChoice, local_rank: LocalRank, found: GpuSearch) -> Result<Device, String> {
    match found {
        GpuSearch::NoDriver | GpuSearch::Gpus(0) if choice == DeviceChoice::Auto => Ok(Device::Cpu),
        GpuSearch::NoDriver => Err(
            "no NVIDIA driver (libcuda.so.1) on this node: install it, or set cluster.device = \"cpu\""
                .to_owned(),
        ),
        GpuSearch::NoTorchCuda(reason) => Err(format!(
            "this node has an NVIDIA driver, but libtorch's CUDA half does not load ({reason}): \
             install the torch wheel with its dependencies, or set cluster.device = \"cpu\""
        )),
        GpuSearch::Gpus(0) => Err(
            "the NVIDIA driver shows no GPU: see `nvidia-smi` and CUDA_VISIBLE_DEVICES, or set \
             cluster.device = \"cpu\""
                .to_owned(),
        ),
        GpuSearch::Gpus(count) if local_rank.0 >= count => Err(format!(
            "local rank {local_rank} has no GPU, as this node shows {count}: start at most {count} \
             ranks here, or see CUDA_VISIBLE_DEVICES"
        )),
        GpuSearch::Gpus(_) => Ok(Device::Cuda(local_rank.0 as usize)),
    }
}

fn gpus() -> GpuSearch {
    let count = match driver_gpus() {
        None => return GpuSearch::NoDriver,
        Some(0) => return GpuSearch::Gpus(0),
        Some(count) => count,
    };
    // In the folder of libtorch_cpu.so, else in the dynamic loader's search path.
    let torch_cuda = torch_folder().unwrap_or_default().join("libtorch_cuda.so");
    match load(torch_cuda) {
        Err(error) => GpuSearch::NoTorchCuda(error.to_string()),
        Ok(_) if Cuda::device_count() < i64::from(count) => {
            GpuSearch::NoTorchCuda("the driver is too old for it".to_owned())
        }
        Ok(_) => GpuSearch::Gpus(count),
    }
}

/// Number of GPUs that NVIDIA's driver reports to this process, 0 without a driver. Uses no GPU memory, unlike opening
/// a device.
#[must_use]
pub fn gpu_count() -> u32 {
    driver_gpus().unwrap_or(0)
}

/// Why ranks cannot use the GPUs that NVIDIA's driver shows, with a remedy; `None` if they can, or if there is none.
#[must_use]
pub fn gpu_problem() -> Option<String> {
    choose(DeviceChoice::Auto, LocalRank(0), gpus()).err()
}

/// Memory of a GPU as reported by the driver; `None` for a CPU.
#[must_use]
pub fn memory_bytes(device: Device) -> Option<u64> {
    type DeviceGet = unsafe extern "C" fn(device: *mut c_int, ordinal: c_int) -> c_int;
    type DeviceTotalMem = unsafe extern "C" fn(bytes: *mut usize, device: c_int) -> c_int;
    let Device::Cuda(ordinal) = device else { return None };
    let driver = load("libcuda.so.1".into()).ok()?;
    let (mut handle, mut bytes) = (0, 0);
    // SAFETY: both signatures are those of the CUDA driver API, section "Device Management"; the output variables
    // outlive the calls. Without an initialised driver the functions return an error.
    #[allow(unsafe_code)]
    let is_known = unsafe {
        let get = driver.get::<DeviceGet>(b"cuDeviceGet\0").ok()?;
        let total = driver.get::<DeviceTotalMem>(b"cuDeviceTotalMem_v2\0").ok()?;
        get(&raw mut handle, c_int::try_from(ordinal).ok()?) == 0
            && total(&raw mut bytes, handle) == 0
    };
    is_known.then_some(bytes as u64)
}

/// Number of GPUs that the driver reports; `None` without a driver.
fn driver_gpus() -> Option<u32> {
    type CuInit = unsafe extern "C" fn(flags: c_uint) -> c_int;
    type DeviceGetCount = unsafe extern "C" fn(count: *mut c_int) -> c_int;
    let driver = load("libcuda.so.1".into()).ok()?;
    let mut count = 0;
    // SAFETY: both signatures are those of the CUDA driver API, section "Initialization" and
    // "Device Management"; `count` outlives the call.
    #[allow(unsafe_code)]
    let ready = unsafe {
        let init = driver.get::<CuInit>(b"cuInit\0").ok()?;
        let get_count = driver.get::<DeviceGetCount>(b"cuDeviceGetCount\0").ok()?;
        init(0) == 0 && get_count(&raw mut count) == 0
    };
    // A driver without a GPU refuses to initialise.
    Some(if ready { u32::try_from(count).unwrap_or(0) } else { 0 })
}

/// Opens a library for the rest of the process's life, with its symbols visible to all other libraries.
fn load(path: PathBuf) -> Result<ManuallyDrop<Library>, libloading::Error> {
    // SAFETY: this runs the static initialisers of NVIDIA's driver or of libtorch, which are designed to be loaded this
    // way: Python's `import torch` does the same.
    #[allow(unsafe_code)]
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }?;
    // Never closed: libtorch keeps pointers into it.
    Ok(ManuallyDrop::new(library))
}

/// The folder of the `libtorch_cpu.so` that this process uses.
fn torch_folder() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with("/libtorch_cpu.so"))?;
    let path = line.get(line.find('/')?..)?;
    PathBuf::from(path).parent().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;

    fn refused(choice: DeviceChoice, local_rank: u32, found: GpuSearch) -> String {
        choose(choice, LocalRank(local_rank), found).unwrap_err()
    }

    #[test]
    fn auto_takes_the_gpu_of_the_local_rank() {
        let device = choose(DeviceChoice::Auto, LocalRank(3), GpuSearch::Gpus(8));
        assert_eq!(device, Ok(Device::Cuda(3)));
    }

    #[test]
    fn auto_takes_the_cpu_only_if_there_is_no_gpu() {
        assert_eq!(choose(DeviceChoice::Auto, LocalRank(0), GpuSearch::NoDriver), Ok(Device::Cpu));
        assert_eq!(choose(DeviceChoice::Auto, LocalRank(0), GpuSearch::Gpus(0)), Ok(Device::Cpu));
        let broken =
            refused(DeviceChoice::Auto, 0, GpuSearch::NoTorchCuda("libcudnn.so.9".to_owned()));
        assert!(broken.contains("libcudnn.so.9") && broken.contains("install"), "{broken}");
    }

    #[test]
    fn cuda_without_a_gpu_is_refused_with_a_remedy() {
        let no_driver = refused(DeviceChoice::Cuda, 0, GpuSearch::NoDriver);
        assert!(no_driver.contains("driver") && no_driver.contains("cluster.device"));
        let no_gpu = refused(DeviceChoice::Cuda, 0, GpuSearch::Gpus(0));
        assert!(no_gpu.contains("nvidia-smi"), "{no_gpu}");
    }

    #[test]
    fn more_local_ranks_than_gpus_are_refused() {
        let error = refused(DeviceChoice::Auto, 2, GpuSearch::Gpus(2));
        assert!(error.contains("local rank 2") && error.contains("at most 2"), "{error}");
    }

    #[test]
    #[allow(unsafe_code)]
    fn strict_changes_what_a_gpu_may_use_and_leaves_a_cpu_alone() {
        // SAFETY: reads flags of the process.
        let is_deterministic = || unsafe { baton_is_deterministic() };
        let text = fs::read_to_string("../../recipes/digits_cpu.toml").unwrap();
        let spec = JobSpec::from_toml(&text, &[]).unwrap();
        let chosen = (spec.cluster.device, spec.precision.determinism);
        assert_eq!(chosen, (DeviceChoice::Auto, Determinism::Strict));
        let device = open(&spec, LocalRank(0)).unwrap();
        assert_eq!(is_deterministic(), device.is_cuda());
        set_determinism(Determinism::Strict);
        assert!(is_deterministic());
        set_determinism(Determinism::Fast);
        assert!(!is_deterministic());
    }

    #[test]
    fn on_a_cpu_the_gradient_of_an_indexed_table_has_the_same_bits_each_time() {
        set_threads(4);
        set_cpu_determinism(Determinism::Strict);
        tch::manual_seed(1);
        let table = Tensor::rand([169, 24], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let index = Tensor::randint(169, [64 * 2_401], (Kind::Int64, Device::Cpu));
        let factors = Tensor::rand([64 * 2_401, 24], (Kind::Float, Device::Cpu));
        let gradient = || {
            let loss = (table.index(&[Some(&index)]) * &factors).sum(Kind::Float);
            let [gradient] = &Tensor::run_backward(&[loss], &[&table], false, false)[..] else {
                panic!("one gradient");
            };
            gradient.shallow_clone()
        };
        let first = gradient();
        assert!((0..10).all(|_| gradient() == first));
    }

    #[test]
    fn the_running_libtorch_has_the_pinned_version() {
        assert_eq!(torch_version(), "2.11.0");
        assert!(torch_folder().is_some_and(|folder| folder.join("libc10.so").is_file()));
    }
}
