//! Sixteen fake GPUs, for tests of code that runs on GPUs.
//!
//! As a shared library this is `libcuda.so`, `libnccl.so` and `libnvtx3interop.so`, with the functions that Baton calls. Device memory
//! is host memory, and ranks are threads of one process, each with its own device.
//!
//! Its purpose is to test **order**. Queued work is not done immediately: work is done only when a thread queries or
//! waits for a device, and a random choice, repeatable by its seed, decides which work. Only the order that CUDA and
//! NCCL guarantee is kept: within a stream, and by events. So where our code forgets to wait, some seed shows a wrong
//! value.
//!
//! | file | content |
//! |---|---|
//! | `machine` | streams, events, memory, and the choice of the next work |
//! | `work` | the kinds of work, and doing them |
//! | `groups` | groups of communicators, and matching the calls of their ranks |
//! | `driver` | the functions of libcuda |
//! | `nccl` | the functions of libnccl |
//! | `nvtx` | the functions of NVTX |
//! | `harness` | running a test in a process that loads this library: [`run`], [`for_seeds`] |
#![allow(unsafe_code)]

mod driver;
mod groups;
mod harness;
mod machine;
mod nccl;
#[allow(non_snake_case, reason = "names of the library")]
mod nvtx;
mod work;

pub use harness::{FakeGpu, for_seeds, run};
