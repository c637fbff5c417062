//! What can be queued, and doing it.

use std::ptr;
use std::slice;

use crate::groups::Exchange;
use crate::world::World;

/// One piece of work in a stream.
pub(crate) enum Work {
    /// Of bytes.
    Copy { to: u64, from: u64, bytes: usize },
    /// `left += right`, of f32.
    Add { left: u64, right: u64, values: usize },
    /// The place of an event.
    Mark(u64),
    /// Nothing further before that mark is reached.
    Wait(u64),
    /// What ranks do together.
    Exchange(Exchange),
}

impl Work {
    pub(crate) fn can_go_on(&self, world: &World) -> bool {
        match self {
            Self::Copy { .. } | Self::Add { .. } | Self::Mark(_) => true,
            Self::Wait(mark) => world.is_reached(Some(*mark)),
            Self::Exchange(exchange) => world.groups.can_go_on(exchange),
        }
    }

    /// Does some of it; what remains is to be done later.
    pub(crate) fn go_on(self, world: &mut World) -> Option<Self> {
        match self {
            Self::Copy { to, from, bytes } => {
                let done = piece(world, bytes);
                // SAFETY: whoever queued it promised that both are so long and used by nobody else. That
                // promise is what tests are about, so that it may be broken: then values are wrong.
                unsafe { ptr::copy(from as *const u8, to as *mut u8, done) };
                let (to, from, bytes) = (to + done as u64, from + done as u64, bytes - done);
                (bytes > 0).then_some(Self::Copy { to, from, bytes })
            }
            Self::Add { left, right, values } => {
                let done = piece(world, values);
                // SAFETY: as above.
                let (sum, other) = unsafe { (floats_mut(left, done), floats(right, done)) };
                sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
                let end = 4 * done as u64;
                let (left, right, values) = (left + end, right + end, values - done);
                (values > 0).then_some(Self::Add { left, right, values })
            }
            Self::Mark(mark) => {
                world.reach(mark);
                None
            }
            Self::Wait(_) => None,
            Self::Exchange(exchange) => world.groups.go_on(exchange).map(Self::Exchange),
        }
    }
}

/// Mostly all of it: what copies and kernels do can be seen half done.
fn piece(world: &mut World, len: usize) -> usize {
    if len > 1 && world.random.below(4) == 0 { 1 + world.random.below(len - 1) } else { len }
}

/// # Safety
/// So many initialised values lie there, and nobody changes them.
pub(crate) unsafe fn floats<'a>(address: u64, len: usize) -> &'a [f32] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise; allocations are aligned for f32.
    unsafe { slice::from_raw_parts(address as *const f32, len) }
}

/// # Safety
/// So many initialised values lie there, and nobody else uses them.
pub(crate) unsafe fn floats_mut<'a>(address: u64, len: usize) -> &'a mut [f32] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: as above.
    unsafe { slice::from_raw_parts_mut(address as *mut f32, len) }
}
