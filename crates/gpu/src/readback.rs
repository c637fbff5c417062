//! An asynchronous copy of a few numbers from the device.
#![allow(unsafe_code)]

use crate::memory::copy_out;
use crate::{Device, Error, Pinned, Stream, StreamEvent};

/// Copies `N` f32 from the device.
#[derive(Debug)]
pub struct Readback<const N: usize> {
    torch: Stream,
    pinned: Pinned,
    arrived: StreamEvent,
}

impl<const N: usize> Readback<N> {
    /// A readback without a copy in flight: the values are zeros.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        Ok(Self {
            torch: Stream::of_torch(device),
            pinned: Pinned::new(device, N * size_of::<f32>())?,
            arrived: StreamEvent::new(device)?,
        })
    }

    /// Starts copying the values at the device address `from`, as they are after all work that libtorch has queued.
    /// Does not wait, and replaces the previous values.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// `N` f32 of the device must be valid at `from`, and only work on libtorch's stream may change them.
    pub unsafe fn start(&mut self, from: u64) -> Result<(), Error> {
        // SAFETY: guaranteed by the caller; the page-locked memory is read only after the event.
        unsafe { copy_out(&self.torch, self.pinned.bytes_mut(), from) }?;
        self.torch.mark(&self.arrived)
    }

    /// The values of the last copy; waits for them.
    ///
    /// # Errors
    /// The device failed.
    pub fn values(&self) -> Result<[f32; N], Error> {
        self.arrived.wait()?;
        let mut values = [0.0; N];
        for (value, bytes) in values.iter_mut().zip(self.pinned.bytes().as_chunks::<4>().0) {
            *value = f32::from_ne_bytes(*bytes);
        }
        Ok(values)
    }
}
