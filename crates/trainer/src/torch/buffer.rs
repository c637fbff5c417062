//! Access to libtorch's memory for collectives and checkpoints.

use baton_collectives::{BufferMut, DeviceSliceMut};
use tch::{Device, Tensor};

use super::failure::During;
use crate::learner::Error;

/// The values of a contiguous f32 tensor on its device. An empty tensor becomes an empty host buffer, because libtorch has
/// no address for it.
///
/// The caller must not use these values through another view of their storage while the buffer is in use.
pub(super) fn lend(flat: &mut Tensor) -> BufferMut<'_> {
    let (start, len) = (flat.data_ptr(), flat.numel());
    if len == 0 {
        return BufferMut::Host(&mut []);
    }
    if let Device::Cuda(ordinal) = flat.device() {
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: libtorch allocates in the device's primary context and queues its work on the
        // legacy default stream; otherwise as below.
        #[allow(unsafe_code)]
        return BufferMut::Device(unsafe { DeviceSliceMut::from_raw(start as u64, len, ordinal) });
    }
    // SAFETY: the memory is initialised, lives as long as the tensor, which is borrowed, and these values are not touched
    // through another view meanwhile.
    #[allow(unsafe_code)]
    BufferMut::Host(unsafe { std::slice::from_raw_parts_mut(start.cast(), len) })
}

/// The values of a contiguous f32 tensor on the CPU, for writing; empty for a tensor on another device.
///
/// The caller must not use any other view of the storage meanwhile.
pub(super) fn write(flat: &mut Tensor) -> &mut [f32] {
    match lend(flat) {
        BufferMut::Host(values) => values,
        BufferMut::Device(_) => &mut [],
    }
}

/// The values of a contiguous f32 tensor on the CPU, for reading; empty for a tensor on another device.
///
/// The caller must not write to the storage meanwhile.
pub(super) fn read(flat: &Tensor) -> &[f32] {
    if flat.device() != Device::Cpu || flat.numel() == 0 {
        return &[];
    }
    // SAFETY: as in `lend`, for reading.
    #[allow(unsafe_code)]
    unsafe {
        std::slice::from_raw_parts(flat.data_ptr().cast_const().cast(), flat.numel())
    }
}

/// Values in GPU memory, for tests of collectives without a model.
#[derive(Debug)]
pub struct DeviceBuffer(Tensor);

impl DeviceBuffer {
    /// Copies `values` to the GPU numbered `ordinal`; call [`open`](super::device::open) first.
    ///
    /// # Errors
    /// The GPU does not exist; out of memory.
    pub fn new(values: &[f32], ordinal: usize) -> Result<Self, Error> {
        let tensor = Tensor::f_from_slice(values);
        let tensor = tensor.and_then(|tensor| tensor.f_to_device(Device::Cuda(ordinal)));
        tensor.map(Self).during("copy to the GPU")
    }

    /// The values.
    pub fn buffer(&mut self) -> BufferMut<'_> {
        lend(&mut self.0)
    }
}
