//! Streams, events, memory, and the choice of the next work.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::CStr;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::groups::Groups;
use crate::work::Work;

/// Number of GPUs.
pub(crate) const DEVICES: i32 = 16;

/// Initial value of memory: as f32, about -7.5e-14.
const UNWRITTEN: u64 = 0xa9a9_a9a9_a9a9_a9a9;

/// A queue: the legacy default stream of a device has the handle 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamId {
    pub(crate) device: i32,
    pub(crate) handle: usize,
}

pub(crate) struct FakeEvent {
    pub(crate) device: i32,
    /// The newest mark.
    pub(crate) mark: Option<u64>,
}

struct MemoryBlock {
    /// `None`: host memory.
    device: Option<i32>,
    bytes: usize,
    _memory: Box<[u64]>,
}

/// State of the whole fake machine.
#[derive(Default)]
pub(crate) struct FakeMachine {
    pub(crate) random: Random,
    pub(crate) events: BTreeMap<usize, FakeEvent>,
    pub(crate) groups: Groups,
    /// Number of times that a host has waited until a device had done its work.
    pub(crate) host_waits: u64,
    /// Whether an abort never returns.
    pub(crate) aborts_hang: bool,
    /// The last error of NCCL.
    pub(crate) last_error: &'static CStr,
    streams: BTreeMap<StreamId, VecDeque<Work>>,
    /// Existing streams, except the legacy ones, which always exist.
    created: BTreeSet<StreamId>,
    allocations: BTreeMap<u64, MemoryBlock>,
    /// Marks that are queued but not reached.
    unreached: BTreeSet<u64>,
    handles: usize,
    marks: u64,
    /// The stream whose work was done last.
    busy: StreamId,
}

static MACHINE: LazyLock<Mutex<FakeMachine>> = LazyLock::new(Mutex::default);
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, FakeMachine> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `act` with the machine, which it may change.
pub(crate) fn with<R>(act: impl FnOnce(&mut FakeMachine) -> R) -> R {
    let result = act(&mut lock());
    CHANGED.notify_all();
    result
}

/// Blocks the calling host until `done` is true. It does work of the devices meanwhile; if there is none, it waits for
/// other threads.
pub(crate) fn wait_until(done: impl Fn(&FakeMachine) -> bool) {
    const DEADLOCK_TIMEOUT: Duration = Duration::from_secs(60);
    let mut machine = lock();
    if !done(&machine) {
        machine.host_waits += 1;
    }
    while !done(&machine) {
        if machine.work() {
            CHANGED.notify_all();
            continue;
        }
        let (next, waited) =
            CHANGED.wait_timeout(machine, DEADLOCK_TIMEOUT).unwrap_or_else(PoisonError::into_inner);
        machine = next;
        if waited.timed_out() {
            eprintln!("fake GPU: deadlock: a host waits for work that can never be done");
            std::process::abort();
        }
    }
}

impl FakeMachine {
    /// A new handle, different from all addresses.
    pub(crate) fn new_handle(&mut self) -> usize {
        self.handles += 1;
        self.handles << 4
    }

    pub(crate) fn new_stream(&mut self, device: i32) -> usize {
        let handle = self.new_handle();
        self.created.insert(StreamId { device, handle });
        handle
    }

    /// The stream with this handle; handle 0 is the legacy stream of `device`.
    pub(crate) fn stream(&self, device: i32, handle: usize) -> Option<StreamId> {
        if handle == 0 {
            return Some(StreamId { device, handle });
        }
        self.created.iter().find(|stream| stream.handle == handle).copied()
    }

    /// Removes the stream; work in its queue is still done.
    pub(crate) fn destroy_stream(&mut self, stream: StreamId) {
        self.created.remove(&stream);
    }

    pub(crate) fn queue(&mut self, stream: StreamId, work: Work) {
        self.streams.entry(stream).or_default().push_back(work);
    }

    pub(crate) fn is_idle(&self, stream: StreamId) -> bool {
        !self.streams.contains_key(&stream)
    }

    pub(crate) fn is_device_idle(&self, device: i32) -> bool {
        self.streams.keys().all(|stream| stream.device != device)
    }

    /// A new mark, to be queued as work.
    pub(crate) fn new_mark(&mut self) -> u64 {
        self.marks += 1;
        self.unreached.insert(self.marks);
        self.marks
    }

    pub(crate) fn reach(&mut self, mark: u64) {
        self.unreached.remove(&mark);
    }

    pub(crate) fn is_reached(&self, mark: Option<u64>) -> bool {
        mark.is_none_or(|mark| !self.unreached.contains(&mark))
    }

    pub(crate) fn allocate(&mut self, device: Option<i32>, bytes: usize) -> u64 {
        let mut memory = vec![UNWRITTEN; bytes.div_ceil(8)].into_boxed_slice();
        let address = memory.as_mut_ptr() as u64;
        self.allocations.insert(address, MemoryBlock { device, bytes, _memory: memory });
        address
    }

    pub(crate) fn free(&mut self, address: u64) -> bool {
        self.allocations.remove(&address).is_some()
    }

    /// Whether these bytes are memory of the device.
    pub(crate) fn owns(&self, device: i32, address: u64, bytes: usize) -> bool {
        let before = self.allocations.range(..=address).next_back();
        before.is_some_and(|(start, allocation)| {
            let end = start + allocation.bytes as u64;
            allocation.device == Some(device) && address + bytes as u64 <= end
        })
    }

    /// Does a random amount of work while the host makes a query.
    pub(crate) fn pass_time(&mut self) {
        for _ in 0..self.random.below(6) {
            self.work();
        }
    }

    /// Does one piece of work that is ready; false if there is none.
    fn work(&mut self) -> bool {
        let ready = |(stream, queue): (&StreamId, &VecDeque<Work>)| {
            queue.front().is_some_and(|first| first.is_ready(self)).then_some(*stream)
        };
        let ready: Vec<StreamId> = self.streams.iter().filter_map(ready).collect();
        if ready.is_empty() {
            return false;
        }
        // Mostly the same stream again: with a uniform choice no stream would get far ahead of the others.
        if self.random.below(8) == 0 || !ready.contains(&self.busy) {
            self.busy = ready[self.random.below(ready.len())];
        }
        let stream = self.busy;
        let first = self.streams.get_mut(&stream).and_then(VecDeque::pop_front);
        let rest = first.and_then(|work| work.advance(self));
        if let Some(queue) = self.streams.get_mut(&stream) {
            if let Some(rest) = rest {
                queue.push_front(rest);
            }
            if queue.is_empty() {
                self.streams.remove(&stream);
            }
        }
        true
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Default)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A random number from 0 to `end` - 1.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as usize % end
    }
}
