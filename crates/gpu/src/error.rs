//! What the driver refuses, in words.

use cudarc::driver::result::DriverError;

/// Why something on a GPU failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The CUDA driver refused.
    #[error("{function}: {name} (CUDA error {code}){}", remedy(*.code))]
    Cuda {
        /// The driver's function.
        function: &'static str,
        /// `CUresult`.
        code: u32,
        /// Its name.
        name: String,
    },
    /// A shared library cannot be found.
    #[error("{library} not found: {remedy}")]
    LibraryMissing {
        /// File name looked for.
        library: &'static str,
        /// How to get it.
        remedy: &'static str,
    },
    /// The compiler of kernels refused.
    #[error("{function}: {name}{}{log}", if log.is_empty() { "" } else { ": " })]
    Nvrtc {
        /// Its function.
        function: &'static str,
        /// `nvrtcResult`.
        name: String,
        /// What it says of the source; empty where it was not about that.
        log: String,
    },
    /// A kernel cannot run on the host.
    #[error("kernel {name}: {problem}")]
    HostKernel {
        /// Its name.
        name: String,
        /// What is wrong.
        problem: &'static str,
    },
}

impl Error {
    /// Whether the GPU's memory was too small.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Cuda { code: OUT_OF_MEMORY, .. })
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// What to do about a `CUresult` that says more of the machine than of this program.
fn remedy(code: u32) -> &'static str {
    match code {
        OUT_OF_MEMORY => ": out of memory on the GPU; see who else uses it in `nvidia-smi`",
        46 => {
            ": the GPU is taken; see `nvidia-smi`, and its compute mode: in `EXCLUSIVE_PROCESS` one \
             process has it alone"
        }
        100 | 101 => ": see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES",
        214 | 719 | 999 => {
            ": the GPU or its driver has failed; see `dmesg | grep Xid`, and reset or replace it"
        }
        802 => ": NVSwitch is not ready; start nvidia-fabricmanager of the driver's version",
        803 => ": the driver's kernel module and its library differ; reboot the machine",
        804 => ": the driver is too old for this CUDA; install a newer one",
        _ => "",
    }
}

/// For `map_err`: the driver refused.
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
    fn what_a_machines_owner_can_mend_is_told_with_how() {
        let told = |code: CUresult| remedy(code as u32);
        assert!(told(CUresult::CUDA_ERROR_OUT_OF_MEMORY).starts_with(": out of memory"));
        assert!(told(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE).contains("EXCLUSIVE_PROCESS"));
        assert!(told(CUresult::CUDA_ERROR_NO_DEVICE).contains("CUDA_VISIBLE_DEVICES"));
        assert!(told(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE).contains("Xid"));
        assert!(told(CUresult::CUDA_ERROR_SYSTEM_NOT_READY).contains("fabricmanager"));
        assert!(told(CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH).contains("reboot"));
        assert!(told(CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE).contains("too old"));
        assert_eq!(told(CUresult::CUDA_ERROR_INVALID_VALUE), "");
    }
}
