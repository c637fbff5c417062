//! Bytes between two ranks of one machine, through memory that both have mapped.
//!
//! The memory is a file without a name (`memfd_create`): a killed process leaves nothing behind, and neither the size of
//! /dev/shm nor its absence matters. One rank makes it and offers its process, the number of the open file and a token, over
//! their connection. The other opens it in `/proc`, which the kernel allows to the same user in the same PID namespace, and
//! looks for the token, because the numbers may name something else there.
//!
//! Each direction is a ring with one writer and one reader. Their positions count bytes and only grow. Who has nothing to
//! do says that it sleeps, looks once more, and sleeps on the socket: the other sends a byte there. The end of the
//! connection is the end of the peer, too.
#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, OFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals,
    memfd_create,
};

use super::proof::random;

/// Most bytes on their way in one direction: they stay in the cache, and a rank seldom sleeps.
const MAX_CAPACITY: usize = 1 << 20;
/// Fewest bytes on their way in one direction.
const MIN_CAPACITY: usize = 64 << 10;
/// Bytes of all rings into which one rank writes, as long as none is smaller than the smallest.
const MAX_RINGS: usize = 8 << 20;
/// Bytes copied before the other side is shown them, so that it copies at the same time.
const CHUNK: usize = 64 << 10;
/// Where the rings begin.
const RINGS_AT: usize = 4096;
/// Name of the file, as `/proc` shows it.
const MEMORY_NAME: &str = "baton-ranks";

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Capacity of a ring between ranks of a machine with `peers` others.
pub(super) fn capacity(peers: usize) -> usize {
    let share = (MAX_RINGS / peers.max(1)).clamp(MIN_CAPACITY, MAX_CAPACITY);
    // A power of two: positions are divided by it for every piece.
    1 << share.ilog2()
}

/// What one side of a direction tells the other.
#[repr(C, align(128))]
struct SideState {
    /// Number of bytes that it has written or read.
    position: AtomicU64,
    /// Not 0 if it sleeps until the other side's position changes.
    sleeps: AtomicU32,
}

#[repr(C)]
struct RingState {
    writer: SideState,
    reader: SideState,
}

/// What the memory begins with.
#[repr(C)]
struct MemoryHeader {
    token: [AtomicU64; 4],
    rings: [RingState; 2],
}

const _: () = assert!(size_of::<MemoryHeader>() <= RINGS_AT);

/// The memory of two ranks, mapped.
#[derive(Debug)]
struct SharedMemory {
    map: MmapRaw,
    capacity: usize,
}

impl SharedMemory {
    fn size(capacity: usize) -> usize {
        RINGS_AT + 2 * capacity
    }

    fn map(file: &File, capacity: usize) -> io::Result<Self> {
        // Sealed: a file that shrinks would end whoever touches the memory with a signal.
        let seals = fcntl_get_seals(file)?;
        if !seals.contains(SEALS) || file.metadata()?.len() != Self::size(capacity) as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is another file"));
        }
        let map = MmapOptions::new().len(Self::size(capacity)).map_raw(file)?;
        Ok(Self { map, capacity })
    }

    fn header(&self) -> &MemoryHeader {
        // SAFETY: the mapping is longer than a header and begins at a page; every bit pattern is an atomic integer, and
        // both processes touch these only as such.
        unsafe { &*self.map.as_ptr().cast::<MemoryHeader>() }
    }

    /// Address of the byte at `position` of a ring, and how many bytes follow until the ring's end.
    fn at(&self, ring: usize, position: u64) -> (*mut u8, usize) {
        let start = (position % self.capacity as u64) as usize;
        // SAFETY: there are two rings, and `start` is below the capacity.
        let address = unsafe { self.map.as_mut_ptr().add(RINGS_AT + ring * self.capacity + start) };
        (address, self.capacity - start)
    }
}

/// Memory that this rank has made, until its peer has answered.
#[derive(Debug)]
pub(super) struct OfferedMemory {
    memory: SharedMemory,
    /// The peer opens it by its number.
    file: File,
}

/// Names memory of another process: 40 bytes. Zeros offer nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryOffer {
    process: u32,
    file: i32,
    token: [u64; 4],
}

impl MemoryOffer {
    /// Size in bytes.
    pub(super) const SIZE: usize = 40;

    pub(super) fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[0..4].copy_from_slice(&self.process.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.file.to_le_bytes());
        for (to, part) in bytes[8..].chunks_exact_mut(8).zip(self.token) {
            to.copy_from_slice(&part.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::SIZE]) -> Self {
        let word = |at: usize| super::wire::u32_at(bytes, at);
        let token = [8, 16, 24, 32].map(|at| super::wire::u64_at(bytes, at));
        Self { process: word(0), file: word(4).cast_signed(), token }
    }
}

impl OfferedMemory {
    /// Makes memory with two rings.
    pub(super) fn create(capacity: usize) -> io::Result<Self> {
        let file = memfd_create(MEMORY_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        // All of it now: memory that is missing later would end the process.
        fallocate(&file, FallocateFlags::empty(), 0, SharedMemory::size(capacity) as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let file = File::from(file);
        let memory = SharedMemory::map(&file, capacity)?;
        let token = random()?;
        for (part, bytes) in memory.header().token.iter().zip(token.chunks_exact(8)) {
            part.store(super::wire::u64_at(bytes, 0), Ordering::Relaxed);
        }
        Ok(Self { memory, file })
    }

    pub(super) fn offer(&self) -> MemoryOffer {
        let token = self.memory.header().token.each_ref().map(|part| part.load(Ordering::Relaxed));
        MemoryOffer { process: std::process::id(), file: self.file.as_raw_fd(), token }
    }

    /// The peer has opened it.
    pub(super) fn accepted(self) -> SharedRings {
        SharedRings::new(self.memory, 0)
    }
}

/// A ring to write into, and one to read from.
#[derive(Debug)]
pub(super) struct SharedRings {
    memory: SharedMemory,
    /// Which of the two this side writes into.
    outgoing: usize,
    written: u64,
    read: u64,
}

impl SharedRings {
    fn new(memory: SharedMemory, outgoing: usize) -> Self {
        Self { memory, outgoing, written: 0, read: 0 }
    }

    /// Opens the memory that a peer offers.
    pub(super) fn open(offer: MemoryOffer, capacity: usize) -> io::Result<Self> {
        if offer == MemoryOffer::default() {
            return Err(io::Error::other("the other rank has no memory for it"));
        }
        let path = format!("/proc/{}/fd/{}", offer.process, offer.file);
        // Before it is opened, which a device might notice.
        let name = fs::read_link(&path)?;
        if !name.to_string_lossy().starts_with(&format!("/memfd:{MEMORY_NAME}")) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is another file"));
        }
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path)?;
        let memory = SharedMemory::map(&file, capacity)?;
        let token = memory.header().token.each_ref().map(|part| part.load(Ordering::Relaxed));
        if token != offer.token {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is another file"));
        }
        Ok(Self::new(memory, 1))
    }

    fn outgoing(&self) -> &RingState {
        &self.memory.header().rings[self.outgoing]
    }

    fn incoming(&self) -> &RingState {
        &self.memory.header().rings[1 - self.outgoing]
    }

    /// Number of bytes between two positions, of which the other side has written one.
    fn between(&self, read: u64, written: u64) -> io::Result<usize> {
        let count = usize::try_from(written.wrapping_sub(read)).unwrap_or(usize::MAX);
        if count <= self.memory.capacity {
            return Ok(count);
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the positions in shared memory are damaged",
        ))
    }

    fn free(&self) -> io::Result<usize> {
        let read = self.outgoing().reader.position.load(Ordering::Acquire);
        Ok(self.memory.capacity - self.between(read, self.written)?)
    }

    fn available(&self) -> io::Result<usize> {
        let written = self.incoming().writer.position.load(Ordering::Acquire);
        self.between(self.read, written)
    }

    /// Writes as much as there is room for, and calls `wake` if the peer sleeps.
    pub(super) fn write(&mut self, bytes: &[u8], wake: impl Fn()) -> io::Result<usize> {
        let mut done = 0;
        loop {
            let count = self.free()?.min(bytes.len() - done).min(CHUNK);
            if count == 0 {
                return Ok(done);
            }
            for RingPiece { address, range } in self.pieces(self.outgoing, self.written, count) {
                let from = &bytes[done..][range];
                // SAFETY: the piece is in the ring, and the reader does not touch it before it sees the new position.
                unsafe { address.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
            }
            done += count;
            self.written += count as u64;
            let ring = self.outgoing();
            ring.writer.position.store(self.written, Ordering::Release);
            wake_sleeper(&ring.reader, &wake);
        }
    }

    /// Reads as much as there is, and calls `wake` if the peer sleeps.
    pub(super) fn read(&mut self, bytes: &mut [u8], wake: impl Fn()) -> io::Result<usize> {
        let mut done = 0;
        loop {
            let count = self.available()?.min(bytes.len() - done).min(CHUNK);
            if count == 0 {
                return Ok(done);
            }
            for RingPiece { address, range } in self.pieces(1 - self.outgoing, self.read, count) {
                let to = &mut bytes[done..][range];
                // SAFETY: the piece is in the ring, and the writer does not touch it before it sees the new position.
                unsafe { address.copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
            }
            done += count;
            self.read += count as u64;
            let ring = self.incoming();
            ring.reader.position.store(self.read, Ordering::Release);
            wake_sleeper(&ring.writer, &wake);
        }
    }

    /// The parts of a ring in which `count` bytes from `position` on are: two, if they go beyond its end.
    fn pieces(&self, ring: usize, position: u64, count: usize) -> [RingPiece; 2] {
        let (address, until_end) = self.memory.at(ring, position);
        let first = count.min(until_end);
        let (start, _) = self.memory.at(ring, 0);
        [RingPiece { address, range: 0..first }, RingPiece { address: start, range: first..count }]
    }

    /// Tells the peer that this side sleeps until it can write (`sends`) or read (`receives`). False if it can already.
    pub(super) fn may_sleep(&self, sends: bool, receives: bool) -> io::Result<bool> {
        if sends {
            self.outgoing().writer.sleeps.store(1, Ordering::Relaxed);
        }
        if receives {
            self.incoming().reader.sleeps.store(1, Ordering::Relaxed);
        }
        // Either the peer sees this, or this side sees what the peer did before it looked.
        fence(Ordering::SeqCst);
        let can_write = sends && self.free()? > 0;
        let can_read = receives && self.available()? > 0;
        Ok(!can_write && !can_read)
    }
}

/// A part of a ring, and which bytes of a slice belong there.
struct RingPiece {
    address: *mut u8,
    range: Range<usize>,
}

/// Wakes the other side if it sleeps. Called after a position was changed.
fn wake_sleeper(side: &SideState, wake: impl Fn()) {
    fence(Ordering::SeqCst);
    if side.sleeps.load(Ordering::Relaxed) != 0 && side.sleeps.swap(0, Ordering::Relaxed) != 0 {
        wake();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn pair(capacity: usize) -> (SharedRings, SharedRings) {
        let made = OfferedMemory::create(capacity).unwrap();
        let opened = SharedRings::open(made.offer(), capacity).unwrap();
        (made.accepted(), opened)
    }

    fn refused(offer: MemoryOffer, capacity: usize) -> String {
        SharedRings::open(offer, capacity).unwrap_err().to_string()
    }

    #[test]
    fn bytes_arrive_in_order_however_they_are_cut() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut from, mut to) = pair(MIN_CAPACITY);
        for _ in 0..2 {
            let sent: Vec<u8> = (0..5 * MIN_CAPACITY + 3).map(|_| rng.u8(..)).collect();
            let mut received = vec![0; sent.len()];
            let (mut written, mut read) = (0, 0);
            while read < sent.len() {
                let end = (written + rng.usize(0..=MIN_CAPACITY + 9)).min(sent.len());
                written += from.write(&sent[written..end], || {}).unwrap();
                let end = (read + rng.usize(0..=MIN_CAPACITY + 9)).min(sent.len());
                read += to.read(&mut received[read..end], || {}).unwrap();
            }
            assert_eq!(received, sent, "seed {seed}");
            assert_eq!(to.read(&mut [0], || {}).unwrap(), 0, "seed {seed}");
            std::mem::swap(&mut from, &mut to);
        }
    }

    #[test]
    fn who_sleeps_is_woken_once_by_what_it_waits_for() {
        let (mut left, mut right) = pair(MIN_CAPACITY);
        let woken = Cell::new(0);
        let wake = || woken.set(woken.get() + 1);

        assert!(right.may_sleep(false, true).unwrap());
        left.write(&[1], wake).unwrap();
        left.write(&[2], wake).unwrap();
        assert_eq!(woken.take(), 1);
        assert!(!right.may_sleep(false, true).unwrap(), "there is something to read");
        right.read(&mut [0; 2], || {}).unwrap();

        let full = vec![0; MIN_CAPACITY];
        assert_eq!(left.write(&full, || {}).unwrap(), full.len());
        assert!(left.may_sleep(true, true).unwrap());
        right.read(&mut [0], wake).unwrap();
        assert_eq!(woken.take(), 1);
        assert!(!left.may_sleep(true, true).unwrap(), "there is room");
    }

    #[test]
    fn only_the_offered_memory_is_opened() {
        let made = OfferedMemory::create(MIN_CAPACITY).unwrap();
        let offer = made.offer();
        let another = OfferedMemory::create(MIN_CAPACITY).unwrap().offer();
        let unnamed = File::open("/dev/null").unwrap();
        let file = unnamed.as_raw_fd();
        let other_token = MemoryOffer { token: another.token, ..offer };

        assert_eq!(MemoryOffer::decode(&offer.encode()), offer);
        assert_eq!(refused(other_token, MIN_CAPACITY), "it is another file");
        assert_eq!(refused(MemoryOffer { file, ..offer }, MIN_CAPACITY), "it is another file");
        assert_eq!(refused(offer, 2 * MIN_CAPACITY), "it is another file", "of another size");
        let nobody = MemoryOffer { process: u32::MAX, ..offer };
        assert!(refused(nobody, MIN_CAPACITY).contains("No such file"));
        assert!(refused(MemoryOffer::default(), MIN_CAPACITY).contains("no memory"));
        SharedRings::open(offer, MIN_CAPACITY).unwrap();
    }

    #[test]
    fn damaged_positions_are_an_error() {
        let (mut left, right) = pair(MIN_CAPACITY);
        right.incoming().reader.position.store(u64::MAX / 2, Ordering::Relaxed);
        let error = left.write(&[1], || {}).unwrap_err();
        assert!(error.to_string().contains("positions in shared memory are damaged"), "{error}");
    }

    #[test]
    fn many_ranks_on_a_machine_share_smaller_rings() {
        assert_eq!(
            [1, 7, 8, 15, 63, 1023].map(capacity),
            [1 << 20, 1 << 20, 1 << 20, 1 << 19, 1 << 17, 1 << 16]
        );
    }
}
