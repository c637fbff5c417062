//! A copy of the device's state that the host reads later.
#![allow(unsafe_code)]

use crate::memory::{copy, copy_out};
use crate::{Device, DeviceMemory, Error, Event, Pinned, Stream};

/// Bytes that cross to the host at a time.
const CHUNK: usize = 4 << 20;

/// Holds values as they were: [`freeze`](Self::freeze) has the device copy them within its own memory,
/// which takes it a fraction of a millisecond and the host no time at all; a thread that may wait
/// [reads](Self::thaw) the copy while training goes on.
#[derive(Debug)]
pub struct Freezer {
    torch: Stream,
    stream: Stream,
    memory: Option<DeviceMemory>,
    /// On libtorch's stream, behind the copy.
    frozen: Event,
    /// On our stream, behind the last read of the copy.
    thawed: Event,
    /// Two chunks on their way, each with a mark behind it.
    crossing: [Option<(Pinned, Event)>; 2],
}

impl Freezer {
    /// An empty one.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        Ok(Self {
            torch: Stream::of_torch(device),
            stream: Stream::new(device)?,
            memory: None,
            frozen: Event::new(device)?,
            thawed: Event::new(device)?,
            crossing: [None, None],
        })
    }

    /// Copies `bytes` bytes at the device address `from`, as they are after all that libtorch has
    /// queued. What was frozen before is gone.
    ///
    /// # Errors
    /// Out of memory.
    ///
    /// # Safety
    /// So many bytes of the device lie at `from`, and only work on libtorch's stream changes them.
    pub unsafe fn freeze(&mut self, from: u64, bytes: usize) -> Result<(), Error> {
        let memory = match self.memory.take() {
            Some(memory) if memory.len() == bytes => memory,
            _ => DeviceMemory::new(self.torch.device(), bytes)?,
        };
        self.torch.wait_for(&self.thawed)?;
        // SAFETY: the caller's promise for `from`; the memory is ours, just as long, and its reader is
        // waited for.
        unsafe { copy(&self.torch, memory.address(), from, bytes) }?;
        self.torch.mark(&self.frozen)?;
        self.memory = Some(memory);
        Ok(())
    }

    /// Waits for what was frozen, and writes it to `to`, which is as long.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// `to` is longer than what was frozen.
    pub fn thaw(&mut self, to: &mut [u8]) -> Result<(), Error> {
        let frozen = self.memory.as_ref();
        assert!(frozen.map_or(0, DeviceMemory::len) >= to.len(), "callers keep the length");
        let Some(memory) = frozen else { return Ok(()) };
        self.stream.wait_for(&self.frozen)?;
        let device = self.stream.device();
        let mut previous: Option<(&mut [u8], usize)> = None;
        for (number, chunk) in to.chunks_mut(CHUNK).enumerate() {
            let turn = number % 2;
            if self.crossing[turn].is_none() {
                self.crossing[turn] = Some((Pinned::new(device, CHUNK)?, Event::new(device)?));
            }
            if let Some((pinned, arrived)) = &mut self.crossing[turn] {
                let from = memory.address() + (number * CHUNK) as u64;
                // SAFETY: both are ours; the chunk before last, which was here, has been taken below.
                unsafe { copy_out(&self.stream, &mut pinned.bytes_mut()[..chunk.len()], from) }?;
                self.stream.mark(arrived)?;
            }
            // While this one crosses, the one before is taken out.
            if let Some((chunk, turn)) = previous.replace((chunk, turn)) {
                take(&self.crossing[turn], chunk)?;
            }
        }
        if let Some((chunk, turn)) = previous {
            take(&self.crossing[turn], chunk)?;
        }
        self.stream.mark(&self.thawed)
    }
}

fn take(crossing: &Option<(Pinned, Event)>, to: &mut [u8]) -> Result<(), Error> {
    if let Some((pinned, arrived)) = crossing {
        arrived.wait()?;
        to.copy_from_slice(&pinned.bytes()[..to.len()]);
    }
    Ok(())
}
