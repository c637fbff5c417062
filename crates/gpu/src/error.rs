//! Errors of the CUDA driver and of kernels.

use cudarc::driver::result::DriverError;

/// Error of an operation on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The CUDA driver reported an error.
    #[error("{function}: {name} (CUDA error {code}){}", remedy(*.code))]
    Cuda {
        /// The driver function.
        function: &'static str,
        /// `CUresult`.
        code: u32,
        /// Its name.
        name: String,
    },
    /// A shared library was not found.
    #[error("{library} not found: {remedy}")]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
        /// How to install it.
        remedy: &'static str,
    },
    /// NVRTC, the compiler of kernels, reported an error.
    #[error("{function}: {name}{}{log}", if log.is_empty() { "" } else { ": " })]
    Nvrtc {
        /// The NVRTC function.
        function: &'static str,
        /// `nvrtcResult`.
        name: String,
        /// The compiler's messages; empty for other errors.
        log: String,
    },
    /// CUPTI does not report the calls of this process.
    #[error(
        "CUPTI does not report the calls of this process to CUDA: install the nvidia-cuda-cupti of its PyTorch"
    )]
    CallsNotReported,
    /// A kernel cannot run on the host.
    #[error("kernel {name}: {problem}")]
    HostKernel {
        /// Its name.
        name: String,
        /// The problem.
        problem: &'static str,
    },
}

impl Error {
    /// Whether the GPU's memory was exhausted.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Cuda { code: OUT_OF_MEMORY, .. })
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// The remedy for a `CUresult` that is caused by the machine rather than by this program.
fn remedy(code: u32) -> &'static str {
    match code {
        OUT_OF_MEMORY => {
            ": out of memory on the GPU; see which other processes use it in `nvidia-smi`"
        }
        // CUDA_ERROR_DEVICE_UNAVAILABLE.
        46 => {
            ": the GPU is in use; see `nvidia-smi`, and its compute mode: in `EXCLUSIVE_PROCESS` only one \
             process can use it"
        }
        // CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INVALID_DEVICE.
        100 | 101 => ": see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES",
        // CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_UNKNOWN.
        214 | 719 | 999 => {
            ": the GPU or its driver has failed; see `dmesg | grep Xid`, and reset or replace it"
        }
        // CUDA_ERROR_SYSTEM_NOT_READY.
        802 => ": NVSwitch is not ready; start nvidia-fabricmanager of the driver's version",
        // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.
        803 => ": the driver's kernel module and its library differ; reboot the machine",
        // CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE.
        804 => ": the driver is too old for this CUDA; install a newer one",
        _ => "",
    }
}

/// For `map_err`: converts an error of the driver.
pub(crate) fn failed(function: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| Error::Cuda {
        function,
        code: error.0 as u32,
        name: error
            .error_name()
            .map_or_else(|_| "unknown".to_owned(), |name| name.to_string_lossy().into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    #[test]
    fn errors_with_a_cause_on_the_machine_have_a_remedy() {
        let text = |code: CUresult| remedy(code as u32);
        assert!(text(CUresult::CUDA_ERROR_OUT_OF_MEMORY).starts_with(": out of memory"));
        assert!(text(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE).contains("EXCLUSIVE_PROCESS"));
        assert!(text(CUresult::CUDA_ERROR_NO_DEVICE).contains("CUDA_VISIBLE_DEVICES"));
        assert!(text(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE).contains("Xid"));
        assert!(text(CUresult::CUDA_ERROR_SYSTEM_NOT_READY).contains("fabricmanager"));
        assert!(text(CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH).contains("reboot"));
        assert!(text(CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE).contains("too old"));
        assert_eq!(text(CUresult::CUDA_ERROR_INVALID_VALUE), "");
    }
}
