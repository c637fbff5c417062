//! An allocator that aborts the process if Rust code allocates more than the limit for an input, or if code wrote after
//! the end of a buffer, as C code may do with a buffer that is too short.
//!
//! libFuzzer's own `-malloc_limit_mb` needs hooks of a sanitizer. Allocations by C code are limited by `-rss_limit_mb`.
#![allow(unsafe_code)] // An allocator needs unsafe code.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    backtrace::Backtrace,
    panic,
    sync::Once,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Bytes allocated for the current input and not freed yet.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Largest value of [`LIVE`] for the current input.
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Value of [`LIVE`] above which the process is aborted, bytes.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Largest peak of all inputs so far, bytes.
static RECORD: AtomicUsize = AtomicUsize::new(0);

/// Bytes after every allocation.
const FENCE: [u8; 16] = *b"-end-of-buffer-\n";

struct Fenced;

#[global_allocator]
static ALLOCATOR: Fenced = Fenced;

/// Runs `work`, during which at most `limit` bytes may be in use, in addition to those allocated before. Prints a new
/// maximum on stderr.
pub fn within<T>(limit: usize, work: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(remove_limit_on_panic);
    LIVE.store(0, Relaxed);
    PEAK.store(0, Relaxed);
    LIMIT.store(limit, Relaxed);
    let result = work();
    LIMIT.store(usize::MAX, Relaxed);
    let peak = PEAK.load(Relaxed);
    if RECORD.fetch_max(peak, Relaxed) < peak {
        eprintln!("memory: {peak} bytes of {limit} allowed");
    }
    result
}

/// Removes the limit on a panic, because the backtrace takes more memory than any input.
fn remove_limit_on_panic() {
    let next = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        LIMIT.store(usize::MAX, Relaxed);
        next(info);
    }));
}

fn count(size: usize) {
    // It wraps below zero if an older allocation is freed; this cannot be a peak.
    let live = LIVE.fetch_add(size, Relaxed).wrapping_add(size);
    if live.cast_signed() < 0 {
        return;
    }
    PEAK.fetch_max(live, Relaxed);
    let limit = LIMIT.load(Relaxed);
    if live > limit {
        LIMIT.store(usize::MAX, Relaxed);
        abort(&format!("{live} bytes in use, the last {size} of them by one call; limit {limit}"));
    }
}

fn uncount(size: usize) {
    LIVE.fetch_sub(size, Relaxed);
}

fn abort(what: &str) -> ! {
    eprintln!("memory: {what}\n{}", Backtrace::force_capture());
    std::process::abort()
}

fn fenced(layout: Layout) -> Layout {
    let size = layout.size().checked_add(FENCE.len()).expect("no allocation is that large");
    Layout::from_size_align(size, layout.align()).expect("no allocation is that large")
}

/// # Safety
/// `start` is null or the start of `size` bytes and room for the fence.
unsafe fn set_fence(start: *mut u8, size: usize) -> *mut u8 {
    if !start.is_null() {
        // SAFETY: see above.
        unsafe { start.add(size).cast::<[u8; FENCE.len()]>().write_unaligned(FENCE) };
    }
    start
}

/// # Safety
/// `start` came from [`set_fence`] with this size.
unsafe fn check_fence(start: *mut u8, size: usize) {
    // SAFETY: see above.
    let fence = unsafe { start.add(size).cast::<[u8; FENCE.len()]>().read_unaligned() };
    if fence != FENCE {
        LIMIT.store(usize::MAX, Relaxed);
        abort(&format!("a write after the end of a buffer of {size} bytes"));
    }
}

// SAFETY: the system's allocator does the work, with layouts that have room for the fence; the pointers come from it,
// so they are aligned and are returned to it with the same layout.
unsafe impl GlobalAlloc for Fenced {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the size is not 0, and there is room for the fence.
        unsafe { set_fence(System.alloc(fenced(layout)), layout.size()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { set_fence(System.alloc_zeroed(fenced(layout)), layout.size()) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // In the worst case, both allocations exist for a while.
        count(size);
        uncount(layout.size());
        // SAFETY: the caller keeps the contract: `start` came from here with this layout.
        unsafe {
            check_fence(start, layout.size());
            set_fence(System.realloc(start, fenced(layout), size + FENCE.len()), size)
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        uncount(layout.size());
        // SAFETY: as above.
        unsafe {
            check_fence(start, layout.size());
            System.dealloc(start, fenced(layout));
        }
    }
}
