//! Memory that collectives work on: host or CUDA.

use std::marker::PhantomData;
use std::ops::Range;

use baton_gpu::{Adder, Device, Freezer, Stream};

use crate::{Error, cuda};

/// A run of f32 values, in host memory or on a GPU.
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

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same memory, for a shorter while.
    #[must_use]
    pub fn reborrow(&mut self) -> BufferMut<'_> {
        match self {
            Self::Host(values) => BufferMut::Host(values),
            Self::Device(slice) => BufferMut::Device(DeviceSliceMut { ..*slice }),
        }
    }

    /// The values of `range` alone; none, if it does not lie inside.
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

    /// Copies the values into `to`. From a device this waits for all work queued on its legacy
    /// default stream, which is the one libtorch uses.
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

    /// Overwrites the values with `from`; ordered like [`copy_to_host`](Self::copy_to_host).
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

/// A buffer's values in host memory: in place, or a stand-in for a device buffer.
pub(crate) enum Staged<'a> {
    InPlace(&'a mut [f32]),
    StandIn { device: BufferMut<'a>, values: Vec<f32> },
}

impl<'a> Staged<'a> {
    /// Copies a device buffer's values into one of `spare`, or a new one.
    pub(crate) fn new(buffer: BufferMut<'a>, spare: &mut Vec<Vec<f32>>) -> Result<Self, Error> {
        match buffer {
            BufferMut::Host(values) => Ok(Self::InPlace(values)),
            BufferMut::Device(_) => {
                let mut values = spare.pop().unwrap_or_default();
                values.resize(buffer.len(), 0.0);
                buffer.copy_to_host(&mut values)?;
                Ok(Self::StandIn { device: buffer, values })
            }
        }
    }

    /// The values.
    pub(crate) fn values(&mut self) -> &mut [f32] {
        match self {
            Self::InPlace(values) => values,
            Self::StandIn { values, .. } => values,
        }
    }

    /// Copies a stand-in's values to the device, and puts it back among the spare ones.
    pub(crate) fn write_back(self, spare: &mut Vec<Vec<f32>>) -> Result<(), Error> {
        if let Self::StandIn { mut device, values } = self {
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

/// A run of f32 values in CUDA memory, lent for `'a`.
#[derive(Debug)]
pub struct DeviceSliceMut<'a> {
    address: u64,
    len: usize,
    device: i32,
    lent: PhantomData<&'a mut [f32]>,
}

impl DeviceSliceMut<'_> {
    /// Describes `len` values at the device address `address` (a `CUdeviceptr`, libtorch's
    /// `data_ptr`) on the device with ordinal `device`.
    ///
    /// # Safety
    /// For all of `'a`, `address` must point to `len` contiguous, initialised f32 values that were
    /// allocated in the primary context of `device`; nothing else may read or write them, except
    /// work already queued on the legacy default stream of that device, which comes before any use
    /// made of this slice. Where `len` is 0 nothing is required of `address`.
    #[allow(unsafe_code)]
    #[must_use]
    pub unsafe fn from_raw(address: u64, len: usize, device: i32) -> Self {
        Self { address, len, device, lent: PhantomData }
    }

    /// Has the device copy the values as they are now, to be read later; `freezer` is of this device.
    ///
    /// # Errors
    /// Out of memory.
    #[allow(unsafe_code)]
    pub fn freeze(&self, freezer: &mut Freezer) -> Result<(), Error> {
        // SAFETY: `from_raw` promises that so many values lie there; whoever they were lent by changes them
        // on libtorch's stream, and so do collectives, which have their streams wait for that one.
        unsafe { freezer.freeze(self.address, self.len * size_of::<f32>()) }?;
        Ok(())
    }

    /// Adds `right`, which is as long and on the same device, value by value as the fixed tree does.
    ///
    /// # Errors
    /// Lengths or devices differ; the device refused.
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
        // SAFETY: `from_raw` promises that so many values lie at both, that nobody else uses this slice, which
        // is borrowed mutably, and that later work on them comes on libtorch's stream.
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

    /// Whether there are none.
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
    fn host_values_go_out_and_come_back() {
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
