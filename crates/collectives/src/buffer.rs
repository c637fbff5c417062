//! Memory that collectives work on: host memory or CUDA memory.

use std::marker::PhantomData;
use std::ops::Range;

use baton_gpu::{Adder, Device, DeviceSnapshot, Stream};

use crate::{Error, cuda};

/// A contiguous array of f32 values, in host memory or on a GPU.
#[derive(Debug)]
pub enum BufferMut<'a> {
    /// Host memory.
    Host(&'a mut [f32]),
    /// CUDA memory.
    Device(DeviceSliceMut<'a>),
}

impl BufferMut<'_> {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device(slice) => slice.len,
        }
    }

    /// Whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same memory, with a shorter lifetime.
    #[must_use]
    pub fn reborrow(&mut self) -> BufferMut<'_> {
        match self {
            Self::Host(values) => BufferMut::Host(values),
            Self::Device(slice) => BufferMut::Device(DeviceSliceMut { ..*slice }),
        }
    }

    /// Only the values of `range`; empty if it is not within the buffer.
    #[must_use]
    pub fn narrow(self, range: Range<usize>) -> Self {
        let range = if range.start <= range.end && range.end <= self.len() { range } else { 0..0 };
        match self {
            Self::Host(values) => Self::Host(&mut values[range]),
            Self::Device(slice) => Self::Device(DeviceSliceMut {
                address: slice.address + (range.start * size_of::<f32>()) as u64,
                len: range.len(),
                ..slice
            }),
        }
    }

    /// A copy of the values.
    ///
    /// # Errors
    /// As [`copy_to_host`](Self::copy_to_host).
    pub fn to_host(&self) -> Result<Vec<f32>, Error> {
        let mut values = vec![0.0; self.len()];
        self.copy_to_host(&mut values)?;
        Ok(values)
    }

    /// Copies the values into `to`. On a device this waits for all work queued on its legacy default stream, which
    /// libtorch uses.
    ///
    /// # Errors
    /// Lengths differ, no CUDA driver, the device failed.
    pub fn copy_to_host(&self, to: &mut [f32]) -> Result<(), Error> {
        same_length("copy_to_host", self.len(), to.len())?;
        match self {
            Self::Host(values) => to.copy_from_slice(values),
            Self::Device(slice) => cuda::copy_to_host(slice, to)?,
        }
        Ok(())
    }

    /// Overwrites the values with `from`. On a device this waits like [`copy_to_host`](Self::copy_to_host).
    ///
    /// # Errors
    /// Lengths differ, no CUDA driver, the device failed.
    pub fn copy_from_host(&mut self, from: &[f32]) -> Result<(), Error> {
        same_length("copy_from_host", self.len(), from.len())?;
        match self {
            Self::Host(values) => values.copy_from_slice(from),
            Self::Device(slice) => cuda::copy_from_host(slice, from)?,
        }
        Ok(())
    }
}

/// A buffer's values in host memory: the buffer itself, or a host copy of a device buffer.
pub(crate) enum Staged<'a> {
    InPlace(&'a mut [f32]),
    HostCopy { device: BufferMut<'a>, values: Vec<f32> },
}

impl<'a> Staged<'a> {
    /// Copies a device buffer's values into one of the `spare` vectors, or a new one.
    pub(crate) fn new(buffer: BufferMut<'a>, spare: &mut Vec<Vec<f32>>) -> Result<Self, Error> {
        match buffer {
            BufferMut::Host(values) => Ok(Self::InPlace(values)),
            BufferMut::Device(_) => {
                let mut values = spare.pop().unwrap_or_default();
                values.resize(buffer.len(), 0.0);
                buffer.copy_to_host(&mut values)?;
                Ok(Self::HostCopy { device: buffer, values })
            }
        }
    }

    /// The values.
    pub(crate) fn values(&mut self) -> &mut [f32] {
        match self {
            Self::InPlace(values) => values,
            Self::HostCopy { values, .. } => values,
        }
    }

    /// Copies a host copy back to the device, and adds its memory to the `spare` vectors.
    pub(crate) fn write_back(self, spare: &mut Vec<Vec<f32>>) -> Result<(), Error> {
        if let Self::HostCopy { mut device, values } = self {
            device.copy_from_host(&values)?;
            spare.push(values);
        }
        Ok(())
    }
}

fn same_length(operation: &'static str, buffer: usize, host: usize) -> Result<(), Error> {
    if buffer == host {
        return Ok(());
    }
    let detail = format!("the buffer has {buffer} values, the host side {host}");
    Err(Error::Protocol { operation, detail })
}

/// A contiguous array of f32 values in CUDA memory, borrowed for `'a`.
#[derive(Debug)]
pub struct DeviceSliceMut<'a> {
    address: u64,
    len: usize,
    device: i32,
    borrowed: PhantomData<&'a mut [f32]>,
}

impl DeviceSliceMut<'_> {
    /// A slice of `len` values at the device address `address` (a `CUdeviceptr`, libtorch's `data_ptr`) on the device
    /// with the ordinal `device`.
    ///
    /// # Safety
    /// For all of `'a`, `address` must point to `len` contiguous, initialised f32 values that were allocated in the
    /// primary context of `device`. No other code may read or write them, except work that is already queued on the
    /// legacy default stream of that device; it runs before any use of this slice. If `len` is 0, `address` can have
    /// any value.
    #[allow(unsafe_code)]
    #[must_use]
    pub unsafe fn from_raw(address: u64, len: usize, device: i32) -> Self {
        Self { address, len, device, borrowed: PhantomData }
    }

    /// Starts a copy of the current values within the device, to be read later; `snapshot` must be of the same device.
    ///
    /// # Errors
    /// Out of memory.
    #[allow(unsafe_code)]
    pub fn capture(&self, snapshot: &mut DeviceSnapshot) -> Result<(), Error> {
        // SAFETY: `from_raw` guarantees that the values are valid. Their owner changes them on libtorch's stream, and
        // so do collectives, whose streams wait for that one.
        unsafe { snapshot.capture(self.address, self.len * size_of::<f32>()) }?;
        Ok(())
    }

    /// Adds `right`, of the same length and on the same device, value by value: one addition of the fixed tree.
    ///
    /// # Errors
    /// Lengths or devices differ; the device failed.
    #[allow(unsafe_code)]
    pub fn add(&mut self, right: &DeviceSliceMut<'_>) -> Result<(), Error> {
        same_length("add", self.len, right.len)?;
        if self.device != right.device {
            let (left, right) = (self.device, right.device);
            let detail = format!("the buffers are on CUDA devices {left} and {right}");
            return Err(Error::Protocol { operation: "add", detail });
        }
        let device = Device::open(self.device)?;
        let stream = Stream::of_torch(device);
        // SAFETY: `from_raw` guarantees that both ranges are valid and that no other code uses this slice, which is
        // borrowed mutably; later work on them is queued on libtorch's stream.
        unsafe { Adder::new(device)?.add(&stream, self.address, right.address, self.len) }?;
        Ok(())
    }

    /// Device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// CUDA ordinal of its device.
    #[must_use]
    pub fn device(&self) -> i32 {
        self.device
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_values_are_copied_out_and_in() {
        let mut memory = [1.0, 2.0, 3.0];
        let mut buffer = BufferMut::Host(&mut memory);

        buffer.reborrow().copy_from_host(&[4.0, 5.0, 6.0]).unwrap();

        assert_eq!(buffer.len(), 3);
        assert_eq!(buffer.to_host().unwrap(), [4.0, 5.0, 6.0]);
    }

    #[test]
    fn lengths_that_differ_are_refused() {
        let mut memory = [0.0; 3];
        let refused = BufferMut::Host(&mut memory).copy_from_host(&[1.0]).unwrap_err();
        assert_eq!(refused.to_string(), "copy_from_host: the buffer has 3 values, the host side 1");
    }

    #[test]
    #[allow(unsafe_code)]
    fn a_device_buffer_without_a_driver_or_device_is_a_typed_error() {
        // SAFETY: no device has this ordinal, so the address is never used.
        let slice = unsafe { DeviceSliceMut::from_raw(0x1000, 2, 4096) };
        let refused = BufferMut::Device(slice).to_host().unwrap_err();
        assert!(matches!(refused, Error::Gpu(_)), "{refused}");
    }
}
