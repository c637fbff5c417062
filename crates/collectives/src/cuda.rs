//! Copies between device buffers and the host.
#![allow(unsafe_code)]

use baton_gpu::{Device, Stream, StreamEvent, copy_in, copy_out};
use bytemuck::{cast_slice, cast_slice_mut};

use crate::{DeviceSliceMut, Error};

/// Copies all of `from` to host memory after all work that libtorch has queued, and waits until the copy is complete.
pub(crate) fn copy_to_host(from: &DeviceSliceMut<'_>, to: &mut [f32]) -> Result<(), Error> {
    assert_eq!(from.len(), to.len(), "callers check lengths");
    if to.is_empty() {
        return Ok(());
    }
    let device = Device::open(from.device())?;
    let stream = Stream::of_torch(device);
    // SAFETY: `from` guarantees that its address is that of `len` f32 values of the device, borrowed for this call;
    // `to` has the same length and is borrowed until the copy is complete.
    unsafe { copy_out(&stream, cast_slice_mut(to), from.address()) }?;
    wait(&stream, device)
}

/// Overwrites all of `to` after all work that libtorch has queued, and waits until it is complete.
pub(crate) fn copy_from_host(to: &mut DeviceSliceMut<'_>, from: &[f32]) -> Result<(), Error> {
    assert_eq!(from.len(), to.len(), "callers check lengths");
    if from.is_empty() {
        return Ok(());
    }
    let device = Device::open(to.device())?;
    let stream = Stream::of_torch(device);
    // SAFETY: as in `copy_to_host`, and `to` is borrowed mutably.
    unsafe { copy_in(&stream, to.address(), cast_slice(from)) }?;
    wait(&stream, device)
}

fn wait(stream: &Stream, device: Device) -> Result<(), Error> {
    let finished = StreamEvent::new(device)?;
    stream.mark(&finished)?;
    Ok(finished.wait()?)
}
