//! Tracks memory allocations, so that tests can detect large allocations caused by damaged files.
#![allow(unsafe_code)] // An allocator needs unsafe code; this one only forwards calls.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

struct Watched;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        watch(layout.size());
        // SAFETY: the caller satisfies the contract of the same method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        watch(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        watch(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
    }
}

fn watch(size: usize) {
    LARGEST.set(LARGEST.get().max(size));
}

/// Size of the largest single allocation of this thread while `work` runs, bytes.
pub(crate) fn largest_during<T>(work: impl FnOnce() -> T) -> (usize, T) {
    LARGEST.set(0);
    let result = work();
    (LARGEST.get(), result)
}
