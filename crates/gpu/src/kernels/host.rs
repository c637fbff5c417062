//! Kernels on the host; see host.cpp.
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
/// There is no such kernel; it is wrong.
///
/// # Safety
/// `arguments` is laid out as the kernel's argument, and what it points to is memory that the kernel may
/// read or write and nobody else uses.
pub(super) unsafe fn run<A: Copy>(
    name: &str,
    grid: Grid,
    seed: u64,
    arguments: &A,
) -> Result<(), Error> {
    let known = CString::new(name).unwrap_or_default();
    let sizes = [grid.blocks, grid.threads];
    // SAFETY: six sizes and a string that ends; the caller's promise for the rest.
    let result = unsafe {
        let arguments = std::ptr::from_ref(arguments).cast();
        baton_run_kernel(known.as_ptr(), sizes.as_flattened().as_ptr(), seed, arguments)
    };
    let problem = match result {
        0 => return Ok(()),
        1 => "there is no such kernel",
        _ => "a block's threads came to different barriers",
    };
    Err(Error::HostKernel { name: name.to_owned(), problem })
}
