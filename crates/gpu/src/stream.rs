//! Queues of work on a device, and events that mark positions in them.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::{result, sys};

use crate::error::failed;
use crate::{Device, Error};

/// A queue of work. The device does queued work in order; the calls that queue it return before it is done.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: sys::CUstream,
    ours: bool,
}

// SAFETY: the driver lets any thread use a stream, even several threads at once.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream that waits for no other, except by [`wait_for`](Self::wait_for).
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        device.make_current()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("cuStreamCreate"))?;
        Ok(Self { device, raw, ours: true })
    }

    /// The legacy default stream, on which libtorch queues its work.
    #[must_use]
    pub fn of_torch(device: Device) -> Self {
        Self { device, raw: result::stream::null(), ours: false }
    }

    /// The device of this stream.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The `CUstream`.
    #[must_use]
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Makes `event` mark the position after all work queued so far.
    ///
    /// # Errors
    /// The device failed.
    pub fn mark(&self, event: &StreamEvent) -> Result<(), Error> {
        self.device.make_current()?;
        // SAFETY: both are alive and of the device just made current.
        unsafe { result::event::record(event.raw, self.raw) }.map_err(failed("cuEventRecord"))
    }

    /// Makes all work that is queued from now on wait for the newest mark of `event`, if it has one.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait_for(&self, event: &StreamEvent) -> Result<(), Error> {
        self.device.make_current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }
            .map_err(failed("cuStreamWaitEvent"))
    }
}

impl Drop for Stream {
    /// Work that is already queued is still done.
    fn drop(&mut self) {
        if self.ours && self.device.make_current().is_ok() {
            // SAFETY: the stream is our own and is not used any more.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// Marks a position in a [`Stream`].
#[derive(Debug)]
pub struct StreamEvent {
    device: Device,
    raw: sys::CUevent,
}

// SAFETY: the driver lets any thread use an event, even several threads at once.
unsafe impl Send for StreamEvent {}
// SAFETY: as above.
unsafe impl Sync for StreamEvent {}

impl StreamEvent {
    /// An event without a mark, which counts as reached.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        // A thread that waits sleeps: the core can decode images meanwhile.
        const FLAGS: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        device.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the output variable outlives the call.
        unsafe { sys::cuEventCreate(&raw mut raw, FLAGS) }
            .result()
            .map_err(failed("cuEventCreate"))?;
        Ok(Self { device, raw })
    }

    /// Whether all work before the mark is done; does not wait.
    ///
    /// # Errors
    /// Some of that work failed.
    pub fn is_reached(&self) -> Result<bool, Error> {
        self.device.make_current()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(other) => Err(failed("cuEventQuery")(other)),
        }
    }

    /// Waits until all work before the mark is done.
    ///
    /// # Errors
    /// Some of that work failed.
    pub fn wait(&self) -> Result<(), Error> {
        if self.is_reached()? {
            return Ok(());
        }
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.map_err(failed("cuEventSynchronize"))
    }
}

impl Drop for StreamEvent {
    /// Streams that wait for the event already continue to do so.
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: the event is our own and is not used any more.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}
