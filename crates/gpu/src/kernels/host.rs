//! Runs kernels on the host; see host.cpp.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};

use crate::Error;
use crate::module::Grid;

unsafe extern "C" {
    fn baton_run_kernel(
        name: *const c_char,
        sizes: *const u32,
        seed: u64,
        arguments: *const c_void,
    ) -> c_int;
}

/// Runs a kernel that takes one argument.
///
/// # Errors
/// The kernel does not exist or has a bug.
///
/// # Safety
/// `arguments` must have the layout of the kernel's argument, and the addresses in it must be valid memory for the
/// kernel's reads and writes that no other code uses.
pub(super) unsafe fn run<A: Copy>(
    name: &str,
    grid: Grid,
    seed: u64,
    arguments: &A,
) -> Result<(), Error> {
    let kernel = CString::new(name).unwrap_or_default();
    let sizes = [grid.blocks, grid.threads];
    // SAFETY: six sizes and a zero-terminated string; the rest is guaranteed by the caller.
    let result = unsafe {
        let arguments = std::ptr::from_ref(arguments).cast();
        baton_run_kernel(kernel.as_ptr(), sizes.as_flattened().as_ptr(), seed, arguments)
    };
    let problem = match result {
        0 => return Ok(()),
        1 => "there is no such kernel",
        _ => "the threads of a block reached different barriers",
    };
    Err(Error::HostKernel { name: name.to_owned(), problem })
}
