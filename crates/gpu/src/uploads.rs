//! Copies of inputs to the device while it computes on earlier ones.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use crate::memory::copy_in;
use crate::{Device, DeviceMemory, Error, Pinned, Stream, StreamEvent};

/// A queue of uploads with a separate stream. [`send`](Self::send) copies to page-locked memory and returns,
/// [`receive`](Self::receive) makes libtorch's stream wait for the upload, and [`release`](Self::release) returns the
/// memory once libtorch's work on it is done. The host waits only if it is more than two uploads ahead: then the device
/// has enough work.
#[derive(Debug)]
pub struct Uploads {
    torch: Stream,
    stream: Stream,
    buffers: Vec<UploadBuffer>,
    /// Indices of unused buffers, in the order of their release.
    free: VecDeque<usize>,
}

/// Returned by [`Uploads::send`], for [`Uploads::receive`] and [`Uploads::release`].
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    buffer: usize,
    /// Offset of each part from the address, bytes.
    offsets: Vec<usize>,
}

impl Ticket {
    /// Offset of part `number` from the address that [`Uploads::receive`] returns, bytes.
    #[must_use]
    pub fn offset(&self, number: usize) -> u64 {
        self.offsets.get(number).copied().unwrap_or_default() as u64
    }
}

#[derive(Debug)]
struct UploadBuffer {
    pinned: Pinned,
    memory: DeviceMemory,
    /// Marks our stream after the copy.
    sent: StreamEvent,
    /// Marks libtorch's stream after the last use of the copy.
    released: StreamEvent,
}

impl Uploads {
    /// A queue without buffers; they are allocated when needed.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        Ok(Self {
            torch: Stream::of_torch(device),
            stream: Stream::new(device)?,
            buffers: Vec::new(),
            free: VecDeque::new(),
        })
    }

    /// Starts copying `parts`, one after the other, each at a multiple of 256 bytes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn send(&mut self, parts: &[&[u8]]) -> Result<Ticket, Error> {
        let bytes = parts.iter().map(|part| aligned(part.len())).sum();
        let number = self.buffer(bytes)?;
        let buffer = &mut self.buffers[number];
        // The host is about to overwrite the source of the last copy. That copy finished long ago, unless the buffer
        // was released unused.
        buffer.sent.wait()?;
        let (mut at, mut offsets) = (0, Vec::with_capacity(parts.len()));
        for part in parts {
            buffer.pinned.bytes_mut()[at..at + part.len()].copy_from_slice(part);
            offsets.push(at);
            at += aligned(part.len());
        }
        self.stream.wait_for(&buffer.released)?;
        // SAFETY: both memory ranges belong to the buffer and are large enough. The page-locked one is overwritten only
        // after `sent`, see above; the device memory is not used before `sent` and after `released`.
        unsafe { copy_in(&self.stream, buffer.memory.address(), &buffer.pinned.bytes()[..bytes]) }?;
        self.stream.mark(&buffer.sent)?;
        Ok(Ticket { buffer: number, offsets })
    }

    /// The device address of the upload, for work that is queued on libtorch's stream between this call and
    /// [`release`](Self::release).
    ///
    /// # Errors
    /// The device failed.
    pub fn receive(&self, ticket: &Ticket) -> Result<u64, Error> {
        let buffer = &self.buffers[ticket.buffer];
        self.torch.wait_for(&buffer.sent)?;
        Ok(buffer.memory.address())
    }

    /// Ends libtorch's use of the upload and makes its memory available again.
    ///
    /// # Errors
    /// The device failed.
    pub fn release(&mut self, ticket: Ticket) -> Result<(), Error> {
        self.torch.mark(&self.buffers[ticket.buffer].released)?;
        self.free.push_back(ticket.buffer);
        Ok(())
    }

    /// The index of a free buffer of at least `bytes` bytes; reuses one if possible.
    fn buffer(&mut self, bytes: usize) -> Result<usize, Error> {
        let device = self.stream.device();
        // Keep one free, so that the host does not have to wait until the device is done with the one released last.
        let number = if self.free.len() > 1 { self.free.pop_front() } else { None };
        match number {
            Some(number) if self.buffers[number].memory.len() >= bytes => Ok(number),
            Some(number) => {
                // Freeing the old memory waits for the device; this is rare, because images rarely become larger. Free
                // it first: there may be no memory for both.
                self.buffers[number] = UploadBuffer::new(device, 0)?;
                self.buffers[number] = UploadBuffer::new(device, bytes)?;
                Ok(number)
            }
            None => {
                let new = self.buffers.len();
                self.buffers.push(UploadBuffer::new(device, bytes)?);
                if new == 0 {
                    // Allocate the second one now: later libtorch's cache may use all memory.
                    self.buffers.push(UploadBuffer::new(device, bytes)?);
                    self.free.push_back(1);
                }
                Ok(new)
            }
        }
    }
}

impl UploadBuffer {
    fn new(device: Device, bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            pinned: Pinned::new(device, bytes)?,
            memory: DeviceMemory::new(device, bytes)?,
            sent: StreamEvent::new(device)?,
            released: StreamEvent::new(device)?,
        })
    }
}

/// `bytes`, rounded up to the next offset for a part.
fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(256)
}
