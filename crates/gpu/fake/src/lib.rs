//! Sixteen GPUs that are not there, for tests of what runs on GPUs.
//!
//! As a shared library this is `libcuda.so` and `libnccl.so` at once, as far as Baton calls them. Device
//! memory is host memory, and ranks are threads of one process, each with a device of its own.
//!
//! The point of it is **order**. What is queued is not done then: something is done only when somebody
//! asks or waits for a device, and a random choice, repeatable by its seed, says what. Only the order
//! that CUDA and NCCL promise is kept: that within a stream, and that which events make. So where our
//! code forgets to wait, some seed shows a wrong value.
//!
//! | file | is about |
//! |---|---|
//! | `world` | streams, events, memory, and what is done next |
//! | `work` | what can be queued, and doing it |
//! | `groups` | where ranks meet |
//! | `driver` | the functions of libcuda |
//! | `nccl` | the functions of libnccl |
//! | `harness` | running a test in a process that finds this library: [`run`], [`for_seeds`] |
#![allow(unsafe_code)]

mod driver;
mod groups;
mod harness;
mod nccl;
mod work;
mod world;

pub use harness::{FakeGpu, for_seeds, run};
