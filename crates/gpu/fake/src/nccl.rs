//! The functions of libnccl that Baton calls, and what tests ask of this library; see NVIDIA's "NCCL User
//! Guide" for what they promise.
//!
//! Stricter than the real one: a communicator that is used before it has settled is an error here.
#![allow(non_snake_case)]

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};

use crate::driver::current_device;
use crate::groups::{Call, Kind, UniqueId};
use crate::work::Work;
use crate::world::{self, StreamId, World};

/// `ncclResult_t`.
type Status = u32;
const SUCCESS: Status = 0;
const INVALID_ARGUMENT: Status = 4;
const INVALID_USAGE: Status = 5;
const IN_PROGRESS: Status = 7;

const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// 2.28.9, as the libtorch wheel brings it.
const VERSION: c_int = 22_809;

/// What `ncclConfig_t` begins with.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

#[repr(C)]
struct Id(UniqueId);

#[derive(Default)]
struct Grouped {
    depth: u32,
    calls: Vec<(usize, StreamId, Call)>,
}

thread_local! {
    static GROUPED: RefCell<Grouped> = RefCell::default();
}

/// What a stranger to NCCL's rules gets to read.
fn complain(world: &mut World, status: Status, text: &'static CStr) -> Status {
    world.complaint = text;
    status
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Status {
    // SAFETY: as NCCL documents it.
    unsafe { version.write(VERSION) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_communicator: usize) -> *const c_char {
    world::with(|world| world.complaint.as_ptr())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> Status {
    let mut new = [0; 128];
    new[..8].copy_from_slice(&world::with(World::new_handle).to_le_bytes());
    // SAFETY: as NCCL documents it.
    unsafe { id.write(new) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    communicator: *mut usize,
    world_size: c_int,
    id: Id,
    rank: c_int,
    config: *const Config,
) -> Status {
    // SAFETY: as NCCL documents it.
    let config = unsafe { &*config };
    world::with(|world| {
        let is_known = config.size >= size_of::<Config>() && config.magic == 0xcafe_beef;
        if !is_known || config.version == 0 || !(0..world_size).contains(&rank) {
            return complain(world, INVALID_ARGUMENT, c"no such configuration or rank");
        }
        if config.blocking != 0 {
            return complain(world, INVALID_USAGE, c"it would block");
        }
        let Some(device) = current_device() else {
            return complain(world, INVALID_USAGE, c"no current device");
        };
        let handle = world.new_handle();
        world.groups.join((handle, device), id.0, rank as usize, world_size as usize);
        // SAFETY: as NCCL documents it.
        unsafe { communicator.write(handle) };
        IN_PROGRESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(handle: usize, state: *mut Status) -> Status {
    world::with(|world| {
        world.pass_time();
        let is_late = world.random.below(2) == 0;
        let is_complete = world.groups.is_complete(handle);
        let Some(communicator) = world.groups.communicator(handle) else {
            return complain(world, INVALID_ARGUMENT, c"the communicator was aborted");
        };
        let mut now = if is_complete { SUCCESS } else { IN_PROGRESS };
        if communicator.held_back.is_some() && is_late {
            now = IN_PROGRESS;
        } else if let Some((stream, exchange)) = communicator.held_back.take() {
            world.queue(stream, Work::Exchange(exchange));
        }
        // SAFETY: as NCCL documents it.
        unsafe { state.write(now) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(handle: usize) -> Status {
    while world::with(|world| world.aborts_hang) {
        std::thread::park();
    }
    world::with(|world| world.groups.abort(handle));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> Status {
    GROUPED.with_borrow_mut(|grouped| grouped.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> Status {
    let calls = GROUPED.with_borrow_mut(|grouped| {
        grouped.depth = grouped.depth.saturating_sub(1);
        if grouped.depth == 0 { std::mem::take(&mut grouped.calls) } else { Vec::new() }
    });
    submit(calls)
}

/// Takes calls of one group to their stream, now or when the communicator is asked about.
fn submit(calls: Vec<(usize, StreamId, Call)>) -> Status {
    let Some(&(handle, stream, _)) = calls.first() else { return SUCCESS };
    world::with(|world| {
        if calls.iter().any(|(other, on, _)| (*other, *on) != (handle, stream)) {
            return complain(world, INVALID_USAGE, c"a group on several streams");
        }
        let is_late = world.random.below(2) == 0;
        let calls = calls.into_iter().map(|(_, _, call)| call).collect();
        let Some(exchange) = world.groups.exchange(handle, calls) else {
            return complain(world, INVALID_ARGUMENT, c"the communicator was aborted");
        };
        if !is_late {
            world.queue(stream, Work::Exchange(exchange));
            return SUCCESS;
        }
        if let Some(communicator) = world.groups.communicator(handle) {
            communicator.held_back = Some((stream, exchange));
        }
        IN_PROGRESS
    })
}

/// Sizes of the memory that is read and written, in values.
fn sizes(call: &Call) -> (usize, usize) {
    match call.kind {
        Kind::Send { .. } => (call.values, 0),
        Kind::Receive { .. } => (0, call.values),
        Kind::AllReduce | Kind::Broadcast { .. } => (call.values, call.values),
    }
}

fn ask(call: Call, kind_of_value: c_int, handle: usize, stream: usize) -> Status {
    let asked = world::with(|world| {
        if kind_of_value != FLOAT32 {
            return Err(complain(world, INVALID_ARGUMENT, c"only sums of f32 are known"));
        }
        let is_complete = world.groups.is_complete(handle);
        let Some(communicator) = world.groups.communicator(handle) else {
            return Err(complain(world, INVALID_ARGUMENT, c"the communicator was aborted"));
        };
        let device = communicator.device;
        if !is_complete || communicator.held_back.is_some() {
            return Err(complain(world, INVALID_USAGE, c"the communicator has not settled"));
        }
        let Some(stream) = world.stream(device, stream) else {
            return Err(complain(world, INVALID_ARGUMENT, c"no such stream"));
        };
        let owns = |address, values| values == 0 || world.owns(device, address, 4 * values);
        let (read, written) = sizes(&call);
        if stream.device != device || !owns(call.from, read) || !owns(call.to, written) {
            return Err(complain(world, INVALID_ARGUMENT, c"memory or stream of no use"));
        }
        Ok((handle, stream, call))
    });
    let asked = match asked {
        Ok(asked) => asked,
        Err(status) => return status,
    };
    let is_grouped = GROUPED.with_borrow_mut(|grouped| {
        if grouped.depth > 0 {
            grouped.calls.push(asked);
        }
        grouped.depth > 0
    });
    if is_grouped { SUCCESS } else { submit(vec![asked]) }
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    values: usize,
    kind_of_value: c_int,
    operation: c_int,
    communicator: usize,
    stream: usize,
) -> Status {
    let call = Call { kind: Kind::AllReduce, from, to, values };
    ask(call, if operation == SUM { kind_of_value } else { -1 }, communicator, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    from: u64,
    to: u64,
    values: usize,
    kind_of_value: c_int,
    root: c_int,
    communicator: usize,
    stream: usize,
) -> Status {
    let call = Call { kind: Kind::Broadcast { root: root as usize }, from, to, values };
    ask(call, kind_of_value, communicator, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    from: u64,
    values: usize,
    kind_of_value: c_int,
    peer: c_int,
    communicator: usize,
    stream: usize,
) -> Status {
    let call = Call { kind: Kind::Send { peer: peer as usize }, from, to: 0, values };
    ask(call, kind_of_value, communicator, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    to: u64,
    values: usize,
    kind_of_value: c_int,
    peer: c_int,
    communicator: usize,
    stream: usize,
) -> Status {
    let call = Call { kind: Kind::Receive { peer: peer as usize }, from: 0, to, values };
    ask(call, kind_of_value, communicator, stream)
}
