//! The functions of libnccl that Baton calls; NVIDIA's "NCCL User Guide" specifies them.
//!
//! Stricter than the real library: using a communicator before it is ready is an error.
#![allow(non_snake_case)]

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};

use crate::driver::current_device;
use crate::groups::{Call, CallKind, UniqueId};
use crate::machine::{self, FakeMachine, StreamId};
use crate::work::Work;

/// `ncclResult_t`.
type ReturnCode = u32;
const SUCCESS: ReturnCode = 0;
const INVALID_ARGUMENT: ReturnCode = 4;
const INVALID_USAGE: ReturnCode = 5;
const IN_PROGRESS: ReturnCode = 7;

const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// 2.28.9, the version in the libtorch wheel.
const NCCL_VERSION: c_int = 22_809;

/// The first fields of `ncclConfig_t`.
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

/// Records the text of an error and returns `status`.
fn fail(machine: &mut FakeMachine, status: ReturnCode, text: &'static CStr) -> ReturnCode {
    machine.last_error = text;
    status
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> ReturnCode {
    // SAFETY: as NCCL documents it.
    unsafe { version.write(NCCL_VERSION) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_communicator: usize) -> *const c_char {
    machine::with(|machine| machine.last_error.as_ptr())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> ReturnCode {
    let mut new = [0; 128];
    new[..8].copy_from_slice(&machine::with(FakeMachine::new_handle).to_le_bytes());
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
) -> ReturnCode {
    // SAFETY: as NCCL documents it.
    let config = unsafe { &*config };
    machine::with(|machine| {
        let is_known = config.size >= size_of::<Config>() && config.magic == 0xcafe_beef;
        if !is_known || config.version == 0 || !(0..world_size).contains(&rank) {
            return fail(machine, INVALID_ARGUMENT, c"no such configuration or rank");
        }
        if config.blocking != 0 {
            return fail(machine, INVALID_USAGE, c"a blocking communicator is not supported");
        }
        let Some(device) = current_device() else {
            return fail(machine, INVALID_USAGE, c"no current device");
        };
        let handle = machine.new_handle();
        machine.groups.join((handle, device), id.0, rank as usize, world_size as usize);
        // SAFETY: as NCCL documents it.
        unsafe { communicator.write(handle) };
        IN_PROGRESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(handle: usize, state: *mut ReturnCode) -> ReturnCode {
    machine::with(|machine| {
        machine.pass_time();
        let is_late = machine.random.below(2) == 0;
        let is_complete = machine.groups.is_complete(handle);
        let Some(communicator) = machine.groups.communicator(handle) else {
            return fail(machine, INVALID_ARGUMENT, c"the communicator was aborted");
        };
        let mut now = if is_complete { SUCCESS } else { IN_PROGRESS };
        if communicator.held_back.is_some() && is_late {
            now = IN_PROGRESS;
        } else if let Some((stream, exchange)) = communicator.held_back.take() {
            machine.queue(stream, Work::Exchange(exchange));
        }
        // SAFETY: as NCCL documents it.
        unsafe { state.write(now) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(handle: usize) -> ReturnCode {
    while machine::with(|machine| machine.aborts_hang) {
        std::thread::park();
    }
    machine::with(|machine| machine.groups.abort(handle));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> ReturnCode {
    GROUPED.with_borrow_mut(|grouped| grouped.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> ReturnCode {
    let calls = GROUPED.with_borrow_mut(|grouped| {
        grouped.depth = grouped.depth.saturating_sub(1);
        if grouped.depth == 0 { std::mem::take(&mut grouped.calls) } else { Vec::new() }
    });
    submit(calls)
}

/// Queues the calls of one group on their stream, now or at a later status query of the communicator.
fn submit(calls: Vec<(usize, StreamId, Call)>) -> ReturnCode {
    let Some(&(handle, stream, _)) = calls.first() else { return SUCCESS };
    machine::with(|machine| {
        if calls.iter().any(|(other, on, _)| (*other, *on) != (handle, stream)) {
            return fail(machine, INVALID_USAGE, c"a group on several streams");
        }
        let is_late = machine.random.below(2) == 0;
        let calls = calls.into_iter().map(|(_, _, call)| call).collect();
        let Some(exchange) = machine.groups.exchange(handle, calls) else {
            return fail(machine, INVALID_ARGUMENT, c"the communicator was aborted");
        };
        if !is_late {
            machine.queue(stream, Work::Exchange(exchange));
            return SUCCESS;
        }
        if let Some(communicator) = machine.groups.communicator(handle) {
            communicator.held_back = Some((stream, exchange));
        }
        IN_PROGRESS
    })
}

/// Number of values that are read and written.
fn sizes(call: &Call) -> (usize, usize) {
    match call.kind {
        CallKind::Send { .. } => (call.values, 0),
        CallKind::Receive { .. } => (0, call.values),
        CallKind::AllReduce | CallKind::Broadcast { .. } => (call.values, call.values),
    }
}

fn request(call: Call, data_type: c_int, handle: usize, stream: usize) -> ReturnCode {
    let checked = machine::with(|machine| {
        if data_type != FLOAT32 {
            return Err(fail(machine, INVALID_ARGUMENT, c"only sums of f32 are supported"));
        }
        let is_complete = machine.groups.is_complete(handle);
        let Some(communicator) = machine.groups.communicator(handle) else {
            return Err(fail(machine, INVALID_ARGUMENT, c"the communicator was aborted"));
        };
        let device = communicator.device;
        if !is_complete || communicator.held_back.is_some() {
            return Err(fail(machine, INVALID_USAGE, c"the communicator is not ready"));
        }
        let Some(stream) = machine.stream(device, stream) else {
            return Err(fail(machine, INVALID_ARGUMENT, c"no such stream"));
        };
        let owns = |address, values| values == 0 || machine.owns(device, address, 4 * values);
        let (read, written) = sizes(&call);
        if stream.device != device || !owns(call.from, read) || !owns(call.to, written) {
            return Err(fail(machine, INVALID_ARGUMENT, c"invalid memory or stream"));
        }
        Ok((handle, stream, call))
    });
    let checked = match checked {
        Ok(checked) => checked,
        Err(status) => return status,
    };
    let is_grouped = GROUPED.with_borrow_mut(|grouped| {
        if grouped.depth > 0 {
            grouped.calls.push(checked);
        }
        grouped.depth > 0
    });
    if is_grouped { SUCCESS } else { submit(vec![checked]) }
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    values: usize,
    data_type: c_int,
    operation: c_int,
    communicator: usize,
    stream: usize,
) -> ReturnCode {
    let call = Call { kind: CallKind::AllReduce, from, to, values };
    request(call, if operation == SUM { data_type } else { -1 }, communicator, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    from: u64,
    to: u64,
    values: usize,
    data_type: c_int,
    root: c_int,
    communicator: usize,
    stream: usize,
) -> ReturnCode {
    let call = Call { kind: CallKind::Broadcast { root: root as usize }, from, to, values };
    request(call, data_type, communicator, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    from: u64,
    values: usize,
    data_type: c_int,
    peer: c_int,
    communicator: usize,
    stream: usize,
) -> ReturnCode {
    let call = Call { kind: CallKind::Send { peer: peer as usize }, from, to: 0, values };
    request(call, data_type, communicator, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    to: u64,
    values: usize,
    data_type: c_int,
    peer: c_int,
    communicator: usize,
    stream: usize,
) -> ReturnCode {
    let call = Call { kind: CallKind::Receive { peer: peer as usize }, from: 0, to, values };
    request(call, data_type, communicator, stream)
}
