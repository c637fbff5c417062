//! Tests of data transfers between host and device, on fake GPUs that do everything late and in any order that CUDA
//! allows. A failure prints its seed; `BATON_FAKE_GPU_SEED` repeats it.
#![allow(clippy::unwrap_used, unsafe_code)] // Test helpers may panic like tests.

mod adder;
mod device_snapshot;
mod order;
mod readback;
mod uploads;

use baton_gpu::{Device, DeviceMemory, Stream, StreamEvent, copy, copy_in, copy_out};

/// Device memory as libtorch uses it: with work on the legacy stream.
struct Torch {
    device: Device,
    stream: Stream,
    /// Host sources of its copies, kept alive.
    kept: Vec<Box<[u8]>>,
}

impl Torch {
    fn new() -> Self {
        let device = Device::open(0).unwrap();
        Self { device, stream: Stream::of_torch(device), kept: Vec::new() }
    }

    /// Queues a write of `bytes`.
    fn write(&mut self, to: u64, bytes: &[u8]) {
        self.kept.push(bytes.into());
        // SAFETY: kept sources live until all copies are done; tests write to their own memory.
        unsafe { copy_in(&self.stream, to, &self.kept[self.kept.len() - 1]) }.unwrap();
    }

    /// Queues a copy of `bytes` bytes.
    fn copy(&self, to: u64, from: u64, bytes: usize) {
        // SAFETY: as above.
        unsafe { copy(&self.stream, to, from, bytes) }.unwrap();
    }

    /// The bytes after all queued work.
    fn read(&self, from: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        // SAFETY: the copy is waited for before `read` is used.
        unsafe { copy_out(&self.stream, &mut read, from) }.unwrap();
        self.mark().wait().unwrap();
        read
    }

    fn mark(&self) -> StreamEvent {
        let event = StreamEvent::new(self.device).unwrap();
        self.stream.mark(&event).unwrap();
        event
    }

    fn memory(&self, bytes: usize) -> DeviceMemory {
        DeviceMemory::new(self.device, bytes).unwrap()
    }
}

impl Drop for Torch {
    /// Waits, so that the next seed begins with an idle device.
    fn drop(&mut self) {
        self.mark().wait().unwrap();
    }
}

fn random_bytes(random: &mut fastrand::Rng, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.u8(..)).collect()
}
