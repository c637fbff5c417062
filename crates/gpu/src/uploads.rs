//! Inputs cross to the device while it computes on those before.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use crate::memory::copy_in;
use crate::{Device, DeviceMemory, Error, Event, Pinned, Stream};

/// A queue of uploads with a stream of its own: [`send`](Self::send) copies to page-locked memory and
/// goes on, [`receive`](Self::receive) has libtorch's stream wait for what was sent, and
/// [`release`](Self::release) gives the memory back once libtorch's work on it is done. The host waits
/// only if it is more than two uploads ahead: then the device has work.
#[derive(Debug)]
pub struct Uploads {
    torch: Stream,
    stream: Stream,
    slots: Vec<Slot>,
    /// Slots that nobody holds, the one released first in front.
    free: VecDeque<usize>,
}

/// What [`Uploads::send`] gives for [`Uploads::receive`] and [`Uploads::release`].
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    slot: usize,
    /// Of each part, from the address on.
    offsets: Vec<usize>,
}

impl Ticket {
    /// Bytes from what [`Uploads::receive`] says to part `number`.
    #[must_use]
    pub fn offset(&self, number: usize) -> u64 {
        self.offsets.get(number).copied().unwrap_or_default() as u64
    }
}

#[derive(Debug)]
struct Slot {
    pinned: Pinned,
    memory: DeviceMemory,
    /// On our stream, behind the copy.
    sent: Event,
    /// On libtorch's stream, behind the last use of the copy.
    released: Event,
}

impl Uploads {
    /// One without slots; they are made as they are needed.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: Device) -> Result<Self, Error> {
        Ok(Self {
            torch: Stream::of_torch(device),
            stream: Stream::new(device)?,
            slots: Vec::new(),
            free: VecDeque::new(),
        })
    }

    /// Begins to copy `parts`, one behind the other, each at a multiple of 256 bytes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn send(&mut self, parts: &[&[u8]]) -> Result<Ticket, Error> {
        let bytes = parts.iter().map(|part| aligned(part.len())).sum();
        let number = self.slot(bytes)?;
        let slot = &mut self.slots[number];
        // The host is about to write where the last copy was read from. It is long over, unless the
        // slot came back unused.
        slot.sent.wait()?;
        let (mut at, mut offsets) = (0, Vec::with_capacity(parts.len()));
        for part in parts {
            slot.pinned.bytes_mut()[at..at + part.len()].copy_from_slice(part);
            offsets.push(at);
            at += aligned(part.len());
        }
        self.stream.wait_for(&slot.released)?;
        // SAFETY: both memories are the slot's and large enough. The page-locked one is written to again
        // only after `sent`, see above; the device's is used by nobody before `sent` and after `released`.
        unsafe { copy_in(&self.stream, slot.memory.address(), &slot.pinned.bytes()[..bytes]) }?;
        self.stream.mark(&slot.sent)?;
        Ok(Ticket { slot: number, offsets })
    }

    /// The device address of what was sent, for work that is queued on libtorch's stream from now on
    /// and before it is [released](Self::release).
    ///
    /// # Errors
    /// The device failed.
    pub fn receive(&self, ticket: &Ticket) -> Result<u64, Error> {
        let slot = &self.slots[ticket.slot];
        self.torch.wait_for(&slot.sent)?;
        Ok(slot.memory.address())
    }

    /// Ends what libtorch may do with it.
    ///
    /// # Errors
    /// The device failed.
    pub fn release(&mut self, ticket: Ticket) -> Result<(), Error> {
        self.torch.mark(&self.slots[ticket.slot].released)?;
        self.free.push_back(ticket.slot);
        Ok(())
    }

    /// A free slot with room for `bytes`, an old one if there is any.
    fn slot(&mut self, bytes: usize) -> Result<usize, Error> {
        let device = self.stream.device();
        // Two, so that the host need not wait until the device is done with the one released last.
        let number = if self.free.len() > 1 { self.free.pop_front() } else { None };
        match number {
            Some(number) if self.slots[number].memory.len() >= bytes => Ok(number),
            Some(number) => {
                // To free the old memory waits for the device: images have grown, which is rare. First, as there
                // may be no room for both.
                self.slots[number] = Slot::new(device, 0)?;
                self.slots[number] = Slot::new(device, bytes)?;
                Ok(number)
            }
            None => {
                let new = self.slots.len();
                self.slots.push(Slot::new(device, bytes)?);
                if new == 0 {
                    // The second one at once: later libtorch may have all memory in its cache.
                    self.slots.push(Slot::new(device, bytes)?);
                    self.free.push_back(1);
                }
                Ok(new)
            }
        }
    }
}

impl Slot {
    fn new(device: Device, bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            pinned: Pinned::new(device, bytes)?,
            memory: DeviceMemory::new(device, bytes)?,
            sent: Event::new(device)?,
            released: Event::new(device)?,
        })
    }
}

/// Where what follows so many bytes begins.
fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(256)
}
