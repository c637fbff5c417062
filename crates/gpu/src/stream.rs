//! Queues of work on a device, and marks in them.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::driver::{result, sys};

use crate::error::failed;
use crate::{Device, Error};

/// A queue of work: what is queued is done in order, and later than whoever queues it goes on.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: sys::CUstream,
    ours: bool,
}

// SAFETY: the driver lets any thread use a stream, several at once too.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A queue of its own, which waits for no other unless told to.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        device.make_current()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("cuStreamCreate"))?;
        Ok(Self { device, raw, ours: true })
    }

    /// The legacy default stream, which libtorch queues its work on.
    #[must_use]
    pub fn of_torch(device: Device) -> Self {
        Self { device, raw: result::stream::null(), ours: false }
    }

    /// The device whose queue it is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The `CUstream`.
    #[must_use]
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Marks the place behind everything queued so far.
    ///
    /// # Errors
    /// The device failed.
    pub fn mark(&self, event: &Event) -> Result<(), Error> {
        self.device.make_current()?;
        // SAFETY: both are alive and of the device just made current.
        unsafe { result::event::record(event.raw, self.raw) }.map_err(failed("cuEventRecord"))
    }

    /// Has all that is queued from now on wait for the newest mark of `event`, if it has one.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait_for(&self, event: &Event) -> Result<(), Error> {
        self.device.make_current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }
            .map_err(failed("cuStreamWaitEvent"))
    }
}

impl Drop for Stream {
    /// What is queued is still done.
    fn drop(&mut self) {
        if self.ours && self.device.make_current().is_ok() {
            // SAFETY: it is ours and nobody uses it any more.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// A mark in a [`Stream`].
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: sys::CUevent,
}

// SAFETY: the driver lets any thread use an event, several at once too.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// One that marks nothing yet, and counts as reached.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        device.make_current()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(failed("cuEventCreate"))?;
        Ok(Self { device, raw })
    }

    /// Whether all before the mark is done; never waits.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn is_reached(&self) -> Result<bool, Error> {
        self.device.make_current()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(other) => Err(failed("cuEventQuery")(other)),
        }
    }

    /// Waits until all before the mark is done.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn wait(&self) -> Result<(), Error> {
        if self.is_reached()? {
            return Ok(());
        }
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.map_err(failed("cuEventSynchronize"))
    }
}

impl Drop for Event {
    /// Who waits for it already still does.
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: it is ours and nobody uses it any more.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}
