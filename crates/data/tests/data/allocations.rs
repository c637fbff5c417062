//! Counts memory, so that tests can tell whether a damaged file makes the reader ask for much.
#![allow(unsafe_code)] // An allocator is unsafe by its nature; this one only forwards.

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

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        watch(layout.size());
        // SAFETY: the caller keeps the contract of the same method.
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

/// Bytes of the largest single allocation of this thread while `work` runs.
pub(crate) fn largest_during<T>(work: impl FnOnce() -> T) -> (usize, T) {
    LARGEST.set(0);
    let result = work();
    (LARGEST.get(), result)
}
