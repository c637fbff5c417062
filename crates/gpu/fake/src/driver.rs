//! The functions of libcuda that Baton calls; see NVIDIA's "CUDA Driver API" for what they promise.
#![allow(non_snake_case)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::work::Work;
use crate::world::{self, DEVICES, Event, StreamId, World};

/// `CUresult`.
type Status = u32;
const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const INVALID_DEVICE: Status = 101;
const INVALID_CONTEXT: Status = 201;
const INVALID_HANDLE: Status = 400;
const NOT_FOUND: Status = 500;
const NOT_READY: Status = 600;
const NOT_SUPPORTED: Status = 801;

const STREAM_NON_BLOCKING: c_uint = 1;

/// The one kernel, `left[i] += right[i]`.
const ADD: &CStr = c"baton_add";

thread_local! {
    static CURRENT: Cell<Option<i32>> = const { Cell::new(None) };
}

/// The calling thread's device.
pub(crate) fn current_device() -> Option<i32> {
    CURRENT.get()
}

/// Does what needs a current device.
fn on_device(act: impl FnOnce(&mut World, i32) -> Result<(), Status>) -> Status {
    let Some(device) = current_device() else { return INVALID_CONTEXT };
    world::with(|world| act(world, device)).err().unwrap_or(SUCCESS)
}

/// Gives an answer through a pointer.
///
/// # Safety
/// The pointer is null, or a place for it.
unsafe fn answer<T>(to: *mut T, value: T) -> Result<(), Status> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

fn check(condition: bool, otherwise: Status) -> Result<(), Status> {
    if condition { Ok(()) } else { Err(otherwise) }
}

fn stream_of(world: &World, device: i32, handle: usize) -> Result<StreamId, Status> {
    world.stream(device, handle).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(status: Status, name: *mut *const c_char) -> Status {
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
    unsafe { answer(name, text.as_ptr()) }.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    // SAFETY: as the driver documents it.
    unsafe { answer(count, DEVICES) }.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    if !(0..DEVICES).contains(&ordinal) {
        return INVALID_DEVICE;
    }
    // SAFETY: as the driver documents it.
    unsafe { answer(device, ordinal) }.err().unwrap_or(SUCCESS)
}

/// A context is its device's number and one.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> Status {
    // SAFETY: as the driver documents it.
    unsafe { answer(context, device as usize + 1) }.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> Status {
    if context > DEVICES as usize {
        return INVALID_CONTEXT;
    }
    CURRENT.set((context as i32).checked_sub(1).filter(|device| *device >= 0));
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Status {
    on_device(|world, device| {
        check(bytes > 0, INVALID_VALUE)?;
        // SAFETY: as the driver documents it.
        unsafe { answer(address, world.allocate(Some(device), bytes)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(address: *mut u64, bytes: usize, _flags: c_uint) -> Status {
    on_device(|world, _| {
        check(bytes > 0, INVALID_VALUE)?;
        // SAFETY: as the driver documents it.
        unsafe { answer(address, world.allocate(None, bytes)) }
    })
}

/// Waits for all that the device does, as the real one does though nobody promises it.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> Status {
    if let Some(device) = current_device() {
        world::wait_until(|world| world.is_device_idle(device));
    }
    on_device(|world, _| check(world.free(address), INVALID_VALUE))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: u64) -> Status {
    cuMemFree_v2(address)
}

fn copy(to: u64, from: u64, bytes: usize, on: &[u64], stream: usize) -> Status {
    on_device(|world, device| {
        let stream = stream_of(world, device, stream)?;
        let is_ours = |address: &u64| world.owns(stream.device, *address, bytes);
        check(on.iter().all(is_ours), INVALID_VALUE)?;
        world.queue(stream, Work::Copy { to, from, bytes });
        Ok(())
    })
}

/// From pageable memory, too, it is late here, where the real one takes it before it returns.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> Status {
    copy(to, from, bytes, &[to], stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> Status {
    copy(to, from, bytes, &[from], stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> Status {
    copy(to, from, bytes, &[to, from], stream)
}

/// Streams that synchronise with the legacy one are not needed.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut usize, flags: c_uint) -> Status {
    on_device(|world, device| {
        check(flags == STREAM_NON_BLOCKING, NOT_SUPPORTED)?;
        // SAFETY: as the driver documents it.
        unsafe { answer(stream, world.new_stream(device)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> Status {
    on_device(|world, device| {
        let stream = stream_of(world, device, stream)?;
        world.destroy_stream(stream);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: usize) -> Status {
    on_device(|world, device| {
        let stream = stream_of(world, device, stream)?;
        world.pass_time();
        check(world.is_idle(stream), NOT_READY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: usize) -> Status {
    let mut found = None;
    let status = on_device(|world, device| {
        found = Some(stream_of(world, device, stream)?);
        Ok(())
    });
    if let Some(stream) = found {
        world::wait_until(|world| world.is_idle(stream));
    }
    status
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) -> Status {
    on_device(|world, device| {
        let stream = stream_of(world, device, stream)?;
        let event = world.events.get(&event).ok_or(INVALID_HANDLE)?;
        if let Some(mark) = event.mark {
            world.queue(stream, Work::Wait(mark));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> Status {
    on_device(|world, device| {
        let handle = world.new_handle();
        world.events.insert(handle, Event { device, mark: None });
        // SAFETY: as the driver documents it.
        unsafe { answer(event, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: usize, stream: usize) -> Status {
    on_device(|world, device| {
        let stream = stream_of(world, device, stream)?;
        let mark = world.new_mark();
        let event = world.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        check(event.device == stream.device, INVALID_HANDLE)?;
        event.mark = Some(mark);
        world.queue(stream, Work::Mark(mark));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: usize) -> Status {
    on_device(|world, _| {
        world.pass_time();
        let mark = world.events.get(&event).ok_or(INVALID_HANDLE)?.mark;
        check(world.is_reached(mark), NOT_READY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: usize) -> Status {
    let mut found = None;
    let status = on_device(|world, _| {
        found = Some(world.events.get(&event).ok_or(INVALID_HANDLE)?.mark);
        Ok(())
    });
    if let Some(mark) = found {
        world::wait_until(|world| world.is_reached(mark));
    }
    status
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: usize) -> Status {
    on_device(|world, _| check(world.events.remove(&event).is_some(), INVALID_HANDLE))
}

/// Knows a kernel by its name, and does not read the rest.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut usize, image: *const c_char) -> Status {
    on_device(|_, _| {
        // SAFETY: PTX is text that ends with a zero.
        let image = unsafe { CStr::from_ptr(image) }.to_string_lossy();
        let has_it = image.contains(&format!(".entry {}(", ADD.to_string_lossy()));
        check(has_it, INVALID_VALUE)?;
        // SAFETY: as the driver documents it.
        unsafe { answer(module, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut usize,
    _module: usize,
    name: *const c_char,
) -> Status {
    on_device(|_, _| {
        // SAFETY: as the driver documents it.
        check(unsafe { CStr::from_ptr(name) } == ADD, NOT_FOUND)?;
        // SAFETY: as the driver documents it.
        unsafe { answer(function, 1) }
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
) -> Status {
    // SAFETY: the kernel has these three, and all are 64 bits wide.
    let [left, right, values] =
        [0, 1, 2].map(|number| unsafe { parameters.add(number).read().read() });
    on_device(|world, device| {
        check(blocks > 0 && (1..=1024).contains(&threads), INVALID_VALUE)?;
        let stream = stream_of(world, device, stream)?;
        let bytes = 4 * values as usize;
        let is_ours = |address| bytes == 0 || world.owns(stream.device, address, bytes);
        check(is_ours(left) && is_ours(right), INVALID_VALUE)?;
        world.queue(stream, Work::Add { left, right, values: values as usize });
        Ok(())
    })
}
