//! A copy of the device's state that the host reads later.
#![allow(unsafe_code)]

use crate::memory::{copy, copy_out};
use crate::{Device, DeviceMemory, Error, Pinned, Stream, StreamEvent};

/// Number of bytes that are copied to the host at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// Keeps a copy of values. [`capture`](Self::capture) copies them within device memory, which takes the device a
/// fraction of a millisecond and the host almost no time. Another thread, which may wait, [reads](Self::read) the copy
/// while training continues.
#[derive(Debug)]
pub struct DeviceSnapshot {
    torch: Stream,
    stream: Stream,
    memory: Option<DeviceMemory>,
    /// Marks libtorch's stream after the copy.
    captured: StreamEvent,
    /// Marks our stream after the last read of the copy.
    last_read: StreamEvent,
    /// Two buffers for chunks, each with an event that marks its copy.
    chunks: [Option<(Pinned, StreamEvent)>; 2],
}

impl DeviceSnapshot {
    /// A snapshot without values.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        Ok(Self {
            torch: Stream::of_torch(device),
            stream: Stream::new(device)?,
            memory: None,
            captured: StreamEvent::new(device)?,
            last_read: StreamEvent::new(device)?,
            chunks: [None, None],
        })
    }

    /// Copies `bytes` bytes at the device address `from`, as they are after all work that libtorch has queued. Replaces
    /// the previous copy.
    ///
    /// # Errors
    /// Out of memory.
    ///
    /// # Safety
    /// `bytes` bytes of the device must be valid at `from`, and only work on libtorch's stream may change them.
    pub unsafe fn capture(&mut self, from: u64, bytes: usize) -> Result<(), Error> {
        let memory = match self.memory.take() {
            Some(memory) if memory.len() == bytes => memory,
            _ => DeviceMemory::new(self.torch.device(), bytes)?,
        };
        self.torch.wait_for(&self.last_read)?;
        // SAFETY: guaranteed by the caller for `from`; the memory is our own, of the same length, and the stream waits
        // for its last read.
        unsafe { copy(&self.torch, memory.address(), from, bytes) }?;
        self.torch.mark(&self.captured)?;
        self.memory = Some(memory);
        Ok(())
    }

    /// Waits for the copy, and writes it to `to`, which may be shorter.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// `to` is longer than the copy.
    pub fn read(&mut self, to: &mut [u8]) -> Result<(), Error> {
        let copied = self.memory.as_ref();
        assert!(
            copied.map_or(0, DeviceMemory::len) >= to.len(),
            "cannot read more than was captured"
        );
        let Some(memory) = copied else { return Ok(()) };
        self.stream.wait_for(&self.captured)?;
        let device = self.stream.device();
        let mut previous: Option<(&mut [u8], usize)> = None;
        for (number, chunk) in to.chunks_mut(CHUNK_BYTES).enumerate() {
            let turn = number % 2;
            if self.chunks[turn].is_none() {
                self.chunks[turn] =
                    Some((Pinned::new(device, CHUNK_BYTES)?, StreamEvent::new(device)?));
            }
            if let Some((pinned, arrived)) = &mut self.chunks[turn] {
                let from = memory.address() + (number * CHUNK_BYTES) as u64;
                // SAFETY: both are our own; the chunk before last, which used this buffer, was copied out below.
                unsafe { copy_out(&self.stream, &mut pinned.bytes_mut()[..chunk.len()], from) }?;
                self.stream.mark(arrived)?;
            }
            // While this chunk is copied, the previous one is copied out of its buffer.
            if let Some((chunk, turn)) = previous.replace((chunk, turn)) {
                take(&self.chunks[turn], chunk)?;
            }
        }
        if let Some((chunk, turn)) = previous {
            take(&self.chunks[turn], chunk)?;
        }
        self.stream.mark(&self.last_read)
    }
}

fn take(buffer: &Option<(Pinned, StreamEvent)>, to: &mut [u8]) -> Result<(), Error> {
    if let Some((pinned, arrived)) = buffer {
        arrived.wait()?;
        to.copy_from_slice(&pinned.bytes()[..to.len()]);
    }
    Ok(())
}
