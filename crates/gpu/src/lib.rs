//! An interface to the CUDA driver, safe as far as possible.
//!
//! | start here | for |
//! |---|---|
//! | [`Device`] | the primary context that this process shares with libtorch |
//! | [`Stream`], [`StreamEvent`] | order between queues of work on one device |
//! | [`DeviceMemory`], [`Pinned`] | memory, and asynchronous copies |
//! | [`Adder`] | sums of values in device memory |
//! | [`Uploads`] | copies of inputs to the device while it computes on earlier ones |
//! | [`DeviceSnapshot`] | a copy of the device's state that the host reads later |
//! | [`Readback`] | an asynchronous copy of a few numbers to the host |
//! | [`CudaCalls`] | counts the calls in which the host waits for the device, to check that there are none, and the launches |
//! | [`kernels`] | our own kernels, on a GPU or on the host |
//! | [`module`] | CUDA C that is compiled at run time |
//! | [`Nvtx`] | named ranges for NVIDIA's tools |
//!
//! libtorch works in each device's primary context on the legacy default stream. Our own streams do not synchronise
//! with that one (`CU_STREAM_NON_BLOCKING`): only events, recorded where they are needed, order work between the two.
//!
//! The driver is loaded when it is first needed, so that the same program runs on machines with and without it. Tests
//! replace it with `baton-fake-gpu`, which does queued work late and in any order that CUDA allows.

mod add;
mod calls;
mod device;
mod device_snapshot;
mod error;
pub mod kernels;
mod memory;
pub mod module;
mod nvtx;
mod readback;
mod stream;
mod uploads;

pub use add::Adder;
pub use calls::CudaCalls;
pub use device::Device;
pub use device_snapshot::DeviceSnapshot;
pub use error::Error;
pub use memory::{DeviceMemory, Pinned, copy, copy_in, copy_out};
pub use nvtx::Nvtx;
pub use readback::Readback;
pub use stream::{Stream, StreamEvent};
pub use uploads::{Ticket, Uploads};
