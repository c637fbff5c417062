//! An allocator that ends the process when an input makes Rust code ask for more than it may, and when
//! somebody has written behind the end of a buffer, as C code might that is given one too short.
//!
//! libFuzzer's own `-malloc_limit_mb` needs a sanitizer's hooks. What C code allocates for itself is
//! bounded by `-rss_limit_mb`.
#![allow(unsafe_code)] // An allocator is unsafe by its nature.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    backtrace::Backtrace,
    panic,
    sync::Once,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Bytes that an input has asked for and not yet given back.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Most of those.
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Where the process ends.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The largest peak of all inputs so far.
static RECORD: AtomicUsize = AtomicUsize::new(0);

/// What stands behind every allocation.
const FENCE: [u8; 16] = *b"-end-of-buffer-\n";

struct Fenced;

#[global_allocator]
static ALLOCATOR: Fenced = Fenced;

/// Runs `work`, during which at most `limit` bytes may be in use at a time beside those of before.
/// Says on stderr when that is more than ever before.
pub fn within<T>(limit: usize, work: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(lift_when_panicking);
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

/// A panic prints a backtrace, which takes more memory than any input.
fn lift_when_panicking() {
    let next = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        LIMIT.store(usize::MAX, Relaxed);
        next(info);
    }));
}

fn count(size: usize) {
    // Wraps below zero when something from before is freed; that is no peak.
    let live = LIVE.fetch_add(size, Relaxed).wrapping_add(size);
    if live.cast_signed() < 0 {
        return;
    }
    PEAK.fetch_max(live, Relaxed);
    let limit = LIMIT.load(Relaxed);
    if live > limit {
        LIMIT.store(usize::MAX, Relaxed);
        give_up(&format!(
            "{live} bytes in use, the last {size} of them by one call; limit {limit}"
        ));
    }
}

fn forget(size: usize) {
    LIVE.fetch_sub(size, Relaxed);
}

fn give_up(what: &str) -> ! {
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
        give_up(&format!("something was written behind the end of a buffer of {size} bytes"));
    }
}

// SAFETY: the system's allocator does the work, on layouts with room for the fence; the pointers are
// its own, so they are aligned and go back to it with the layout they came with.
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
        // Both for a while, as in the worst case.
        count(size);
        forget(layout.size());
        // SAFETY: the caller keeps the contract: `start` came from here with this layout.
        unsafe {
            check_fence(start, layout.size());
            set_fence(System.realloc(start, fenced(layout), size + FENCE.len()), size)
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        forget(layout.size());
        // SAFETY: as above.
        unsafe {
            check_fence(start, layout.size());
            System.dealloc(start, fenced(layout));
        }
    }
}
