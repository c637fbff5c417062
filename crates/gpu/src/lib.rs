//! The CUDA driver, made safe as far as it can be.
//!
//! | start here | for |
//! |---|---|
//! | [`Device`] | the primary context that this process shares with libtorch |
//! | [`Stream`], [`Event`] | order between queues of work on one device |
//! | [`DeviceMemory`], [`Pinned`] | memory, and copies that nobody waits for |
//! | [`Adder`] | sums of values that lie on the device |
//! | [`Uploads`] | inputs that cross to the device while it computes on those before |
//! | [`Freezer`] | a copy of the device's state that the host reads later |
//! | [`Readback`] | a few numbers, read when they have come |
//! | [`HostWaits`] | which calls had the host wait for the device: the proof that none does |
//! | [`kernels`] | kernels of our own, on a GPU or on the host |
//! | [`module`] | CUDA C compiled while the program runs |
//!
//! libtorch works in each device's primary context on the legacy default stream. Streams of our own do
//! not synchronise with that one (`CU_STREAM_NON_BLOCKING`): every order between the two is an event,
//! written down where it is needed.
//!
//! The driver is opened when first needed, so that one program runs on machines with and without it. Tests
//! put `baton-fake-gpu` in its place, which does what is queued late and in any order that CUDA allows.

mod add;
mod device;
mod error;
mod freezer;
pub mod kernels;
mod memory;
pub mod module;
mod readback;
mod stream;
mod uploads;
mod waits;

pub use add::Adder;
pub use device::Device;
pub use error::Error;
pub use freezer::Freezer;
pub use memory::{DeviceMemory, Pinned, copy, copy_in, copy_out};
pub use readback::Readback;
pub use stream::{Event, Stream};
pub use uploads::{Ticket, Uploads};
pub use waits::HostWaits;
