//! What the driver refuses, in words.

use cudarc::driver::result::DriverError;

/// Why something on a GPU failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The CUDA driver refused.
    #[error("{function}: {name} (CUDA error {code})")]
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
    #[error("{function}: {name}{}{log}", if log.is_empty() { "" } else { "\n" })]
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
