//! The operations of libtorch, for a profile.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

use tch::Device;

use super::{error_text::ErrorText, failure::During};
use crate::{
    learner::Error,
    profile::{DeviceSpan, SpanPlace},
};

/// An operation that took place; profiler.cpp has the same declaration.
#[repr(C)]
struct Operation {
    name: *const c_char,
    start_unix_nanos: u64,
    nanos: u64,
    device: i32,
    place: u64,
}

// SAFETY: profiler.cpp declares the same.
unsafe extern "C" {
    fn baton_profiler_start(has_gpu: bool, message: ErrorText) -> bool;
    fn baton_profiler_stop(
        context: *mut c_void,
        add: unsafe extern "C" fn(*mut c_void, *const Operation),
        message: ErrorText,
    ) -> bool;
}

/// Begins to record the operations that this thread starts on `device`.
pub(super) fn start(device: Device) -> Result<(), Error> {
    // SAFETY: `message` is writable.
    let started = |message| unsafe { baton_profiler_start(device != Device::Cpu, message) };
    ErrorText::captured(|message| started(message).then_some(())).during("start the profiler")
}

/// Ends the recording of this thread.
pub(super) fn stop() -> Result<Vec<DeviceSpan>, Error> {
    let mut spans: Vec<DeviceSpan> = Vec::new();
    let context: *mut Vec<DeviceSpan> = &raw mut spans;
    // SAFETY: `add` is called with `context`, the address of `spans`, only before this returns; `message` is writable.
    let stopped = |message| unsafe { baton_profiler_stop(context.cast(), add, message) };
    ErrorText::captured(|message| stopped(message).then_some(())).during("end the profiler")?;
    Ok(spans)
}

/// # Safety
/// `spans` is the address of a vector that nothing else uses, and `operation` is valid.
unsafe extern "C" fn add(spans: *mut c_void, operation: *const Operation) {
    // SAFETY: guaranteed by the caller.
    let (spans, operation) = unsafe { (&mut *spans.cast::<Vec<DeviceSpan>>(), &*operation) };
    // SAFETY: profiler.cpp passes the text of a string that lives during this call.
    let name = unsafe { CStr::from_ptr(operation.name) };
    let Operation { start_unix_nanos, nanos, place, .. } = *operation;
    let place = match u32::try_from(operation.device) {
        Ok(device) => SpanPlace::Stream { device, stream: place },
        Err(_) => SpanPlace::Thread(place),
    };
    spans.push(DeviceSpan {
        name: name.to_string_lossy().into_owned(),
        start_unix_nanos,
        nanos,
        place,
    });
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use tch::{Kind, Tensor};

    use super::*;

    fn unix_nanos() -> u64 {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        u64::try_from(since_epoch.as_nanos()).unwrap()
    }

    #[test]
    fn operations_of_a_forward_and_a_backward_pass_are_recorded_at_their_time() {
        let before = unix_nanos();
        start(Device::Cpu).unwrap();
        let weight = Tensor::ones([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        weight.matmul(&weight).sum(Kind::Float).backward();
        let spans = stop().unwrap();
        let after = unix_nanos();
        for name in ["aten::matmul", "autograd::engine::evaluate_function: MmBackward0"] {
            let found = spans.iter().find(|span| span.name == name);
            let found = found.unwrap_or_else(|| panic!("no {name} in {spans:?}"));
            assert!(matches!(found.place, SpanPlace::Thread(thread) if thread > 0), "{found:?}");
            // The profiler measures with the processor's counter and converts: allow a millisecond.
            let end = found.start_unix_nanos + found.nanos;
            assert!(found.start_unix_nanos + 1_000_000 > before, "{before} {found:?}");
            assert!(end < after + 1_000_000, "{after} {found:?}");
        }
        // It records again, and nothing of before.
        start(Device::Cpu).unwrap();
        assert_eq!(stop().unwrap(), []);
    }
}
