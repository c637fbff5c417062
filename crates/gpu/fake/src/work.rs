//! The kinds of work in a stream, and how they are done.

use std::ptr;
use std::slice;

use crate::groups::Exchange;
use crate::machine::FakeMachine;

/// One piece of work in a stream.
pub(crate) enum Work {
    /// Copy of bytes.
    Copy { to: u64, from: u64, bytes: usize },
    /// `left += right`, of f32.
    Add { left: u64, right: u64, values: usize },
    /// Reaches the mark of an event.
    Mark(u64),
    /// Blocks later work until this mark is reached.
    Wait(u64),
    /// Calls that ranks make together.
    Exchange(Exchange),
}

impl Work {
    pub(crate) fn is_ready(&self, machine: &FakeMachine) -> bool {
        match self {
            Self::Copy { .. } | Self::Add { .. } | Self::Mark(_) => true,
            Self::Wait(mark) => machine.is_reached(Some(*mark)),
            Self::Exchange(exchange) => machine.groups.is_ready(exchange),
        }
    }

    /// Does a part of the work; returns the rest.
    pub(crate) fn advance(self, machine: &mut FakeMachine) -> Option<Self> {
        match self {
            Self::Copy { to, from, bytes } => {
                let done = piece(machine, bytes);
                // SAFETY: the code that queued it must guarantee that both ranges are valid and not in use. Tests check
                // this guarantee, so it may be violated: then values are wrong.
                unsafe { ptr::copy(from as *const u8, to as *mut u8, done) };
                let (to, from, bytes) = (to + done as u64, from + done as u64, bytes - done);
                (bytes > 0).then_some(Self::Copy { to, from, bytes })
            }
            Self::Add { left, right, values } => {
                let done = piece(machine, values);
                // SAFETY: as above.
                let (sum, other) = unsafe { (floats_mut(left, done), floats(right, done)) };
                sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
                let end = 4 * done as u64;
                let (left, right, values) = (left + end, right + end, values - done);
                (values > 0).then_some(Self::Add { left, right, values })
            }
            Self::Mark(mark) => {
                machine.reach(mark);
                None
            }
            Self::Wait(_) => None,
            Self::Exchange(exchange) => machine.groups.advance(exchange).map(Self::Exchange),
        }
    }
}

/// Number of items to do now: mostly all, sometimes fewer, so that copies and sums can be seen half done.
fn piece(machine: &mut FakeMachine, len: usize) -> usize {
    if len > 1 && machine.random.below(4) == 0 { 1 + machine.random.below(len - 1) } else { len }
}

/// # Safety
/// `len` initialised values must be valid there and must not change.
pub(crate) unsafe fn floats<'a>(address: u64, len: usize) -> &'a [f32] {
    if len == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller; allocations are aligned for f32.
    unsafe { slice::from_raw_parts(address as *const f32, len) }
}

/// # Safety
/// `len` initialised values must be valid there and not used by other code.
pub(crate) unsafe fn floats_mut<'a>(address: u64, len: usize) -> &'a mut [f32] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: as above.
    unsafe { slice::from_raw_parts_mut(address as *mut f32, len) }
}
