//! A few numbers, read when they have come.
#![allow(unsafe_code)]

use crate::memory::copy_out;
use crate::{Device, Error, Event, Pinned, Stream};

/// `N` f32 on their way from the device.
#[derive(Debug)]
pub struct Readback<const N: usize> {
    torch: Stream,
    pinned: Pinned,
    arrived: Event,
}

impl<const N: usize> Readback<N> {
    /// With nothing on its way: the values are zeros.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        Ok(Self {
            torch: Stream::of_torch(device),
            pinned: Pinned::new(device, N * size_of::<f32>())?,
            arrived: Event::new(device)?,
        })
    }

    /// Sends for the values at the device address `from`, as they are after all that libtorch has
    /// queued. Nobody waits for them, and those sent for before are gone.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// `N` f32 of the device lie at `from`, and only work on libtorch's stream changes them.
    pub unsafe fn send_for(&mut self, from: u64) -> Result<(), Error> {
        // SAFETY: the caller's promise; the page-locked memory is read only after the mark.
        unsafe { copy_out(&self.torch, self.pinned.bytes_mut(), from) }?;
        self.torch.mark(&self.arrived)
    }

    /// The values sent for; waits for them.
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
