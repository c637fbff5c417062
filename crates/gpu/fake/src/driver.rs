//! The functions of libcuda that Baton calls; NVIDIA's "CUDA Driver API" specifies them.
#![allow(non_snake_case)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::machine::{self, DEVICES, FakeEvent, FakeMachine, StreamId};
use crate::work::Work;

/// `CUresult`.
type ReturnCode = u32;
const SUCCESS: ReturnCode = 0;
const INVALID_VALUE: ReturnCode = 1;
const INVALID_DEVICE: ReturnCode = 101;
const INVALID_CONTEXT: ReturnCode = 201;
const INVALID_HANDLE: ReturnCode = 400;
const NOT_FOUND: ReturnCode = 500;
const NOT_READY: ReturnCode = 600;
const NOT_SUPPORTED: ReturnCode = 801;

const STREAM_NON_BLOCKING: c_uint = 1;

/// The only kernel: `left[i] += right[i]`.
const ADD: &CStr = c"baton_add";

thread_local! {
    static CURRENT: Cell<Option<i32>> = const { Cell::new(None) };
}

/// The current device of the calling thread.
pub(crate) fn current_device() -> Option<i32> {
    CURRENT.get()
}

/// Runs `act` with the current device; an error if there is none.
fn on_device(act: impl FnOnce(&mut FakeMachine, i32) -> Result<(), ReturnCode>) -> ReturnCode {
    let Some(device) = current_device() else { return INVALID_CONTEXT };
    machine::with(|machine| act(machine, device)).err().unwrap_or(SUCCESS)
}

/// Writes a result through a pointer.
///
/// # Safety
/// The pointer must be null or valid for the write.
unsafe fn write_result<T>(to: *mut T, value: T) -> Result<(), ReturnCode> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
    Ok(())
}

fn check(condition: bool, otherwise: ReturnCode) -> Result<(), ReturnCode> {
    if condition { Ok(()) } else { Err(otherwise) }
}

fn stream_of(machine: &FakeMachine, device: i32, handle: usize) -> Result<StreamId, ReturnCode> {
    machine.stream(device, handle).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> ReturnCode {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(status: ReturnCode, name: *mut *const c_char) -> ReturnCode {
    let text = match status {
        SUCCESS => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        NOT_READY => c"CUDA_ERROR_NOT_READY",
        NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
        _ => return INVALID_VALUE,
    };
    // SAFETY: as the driver documents it.
    unsafe { write_result(name, text.as_ptr()) }.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> ReturnCode {
    // SAFETY: as the driver documents it.
    unsafe { write_result(count, DEVICES) }.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> ReturnCode {
    if !(0..DEVICES).contains(&ordinal) {
        return INVALID_DEVICE;
    }
    // SAFETY: as the driver documents it.
    unsafe { write_result(device, ordinal) }.err().unwrap_or(SUCCESS)
}

/// A context is the number of its device plus one.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> ReturnCode {
    // SAFETY: as the driver documents it.
    unsafe { write_result(context, device as usize + 1) }.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> ReturnCode {
    if context > DEVICES as usize {
        return INVALID_CONTEXT;
    }
    CURRENT.set((context as i32).checked_sub(1).filter(|device| *device >= 0));
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> ReturnCode {
    on_device(|machine, device| {
        check(bytes > 0, INVALID_VALUE)?;
        // SAFETY: as the driver documents it.
        unsafe { write_result(address, machine.allocate(Some(device), bytes)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(address: *mut u64, bytes: usize, _flags: c_uint) -> ReturnCode {
    on_device(|machine, _| {
        check(bytes > 0, INVALID_VALUE)?;
        // SAFETY: as the driver documents it.
        unsafe { write_result(address, machine.allocate(None, bytes)) }
    })
}

/// Waits for all work of the device, as the real function does in practice.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> ReturnCode {
    if let Some(device) = current_device() {
        machine::wait_until(|machine| machine.is_device_idle(device));
    }
    on_device(|machine, _| check(machine.free(address), INVALID_VALUE))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: u64) -> ReturnCode {
    cuMemFree_v2(address)
}

fn copy(to: u64, from: u64, bytes: usize, on: &[u64], stream: usize) -> ReturnCode {
    on_device(|machine, device| {
        let stream = stream_of(machine, device, stream)?;
        let is_ours = |address: &u64| machine.owns(stream.device, *address, bytes);
        check(on.iter().all(is_ours), INVALID_VALUE)?;
        machine.queue(stream, Work::Copy { to, from, bytes });
        Ok(())
    })
}

/// Reads pageable host memory late, whereas the real function reads it before it returns.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> ReturnCode {
    copy(to, from, bytes, &[to], stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> ReturnCode {
    copy(to, from, bytes, &[from], stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> ReturnCode {
    copy(to, from, bytes, &[to, from], stream)
}

/// Only streams that do not synchronise with the legacy stream are supported.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut usize, flags: c_uint) -> ReturnCode {
    on_device(|machine, device| {
        check(flags == STREAM_NON_BLOCKING, NOT_SUPPORTED)?;
        // SAFETY: as the driver documents it.
        unsafe { write_result(stream, machine.new_stream(device)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> ReturnCode {
    on_device(|machine, device| {
        let stream = stream_of(machine, device, stream)?;
        machine.destroy_stream(stream);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: usize) -> ReturnCode {
    on_device(|machine, device| {
        let stream = stream_of(machine, device, stream)?;
        machine.pass_time();
        check(machine.is_idle(stream), NOT_READY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: usize) -> ReturnCode {
    let mut found = None;
    let status = on_device(|machine, device| {
        found = Some(stream_of(machine, device, stream)?);
        Ok(())
    });
    if let Some(stream) = found {
        machine::wait_until(|machine| machine.is_idle(stream));
    }
    status
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) -> ReturnCode {
    on_device(|machine, device| {
        let stream = stream_of(machine, device, stream)?;
        let event = machine.events.get(&event).ok_or(INVALID_HANDLE)?;
        if let Some(mark) = event.mark {
            machine.queue(stream, Work::Wait(mark));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> ReturnCode {
    on_device(|machine, device| {
        let handle = machine.new_handle();
        machine.events.insert(handle, FakeEvent { device, mark: None });
        // SAFETY: as the driver documents it.
        unsafe { write_result(event, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: usize, stream: usize) -> ReturnCode {
    on_device(|machine, device| {
        let stream = stream_of(machine, device, stream)?;
        let mark = machine.new_mark();
        let event = machine.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        check(event.device == stream.device, INVALID_HANDLE)?;
        event.mark = Some(mark);
        machine.queue(stream, Work::Mark(mark));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: usize) -> ReturnCode {
    on_device(|machine, _| {
        machine.pass_time();
        let mark = machine.events.get(&event).ok_or(INVALID_HANDLE)?.mark;
        check(machine.is_reached(mark), NOT_READY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: usize) -> ReturnCode {
    let mut found = None;
    let status = on_device(|machine, _| {
        found = Some(machine.events.get(&event).ok_or(INVALID_HANDLE)?.mark);
        Ok(())
    });
    if let Some(mark) = found {
        machine::wait_until(|machine| machine.is_reached(mark));
    }
    status
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: usize) -> ReturnCode {
    on_device(|machine, _| check(machine.events.remove(&event).is_some(), INVALID_HANDLE))
}

/// Recognises the kernel by its name and does not read the rest.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut usize, image: *const c_char) -> ReturnCode {
    on_device(|_, _| {
        // SAFETY: PTX is text that ends with a zero.
        let image = unsafe { CStr::from_ptr(image) }.to_string_lossy();
        let has_it = image.contains(&format!(".entry {}(", ADD.to_string_lossy()));
        check(has_it, INVALID_VALUE)?;
        // SAFETY: as the driver documents it.
        unsafe { write_result(module, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut usize,
    _module: usize,
    name: *const c_char,
) -> ReturnCode {
    on_device(|_, _| {
        // SAFETY: as the driver documents it.
        check(unsafe { CStr::from_ptr(name) } == ADD, NOT_FOUND)?;
        // SAFETY: as the driver documents it.
        unsafe { write_result(function, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    _function: usize,
    blocks: c_uint,
    _blocks_y: c_uint,
    _blocks_z: c_uint,
    threads: c_uint,
    _threads_y: c_uint,
    _threads_z: c_uint,
    _shared_bytes: c_uint,
    stream: usize,
    parameters: *const *const u64,
    _extra: *mut *mut c_void,
) -> ReturnCode {
    // SAFETY: the kernel has these three parameters, and all are 64 bits wide.
    let [left, right, values] =
        [0, 1, 2].map(|number| unsafe { parameters.add(number).read().read() });
    on_device(|machine, device| {
        check(blocks > 0 && (1..=1024).contains(&threads), INVALID_VALUE)?;
        let stream = stream_of(machine, device, stream)?;
        let bytes = 4 * values as usize;
        let is_ours = |address| bytes == 0 || machine.owns(stream.device, address, bytes);
        check(is_ours(left) && is_ours(right), INVALID_VALUE)?;
        machine.queue(stream, Work::Add { left, right, values: values as usize });
        Ok(())
    })
}
