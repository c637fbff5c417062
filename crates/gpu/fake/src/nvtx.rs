//! The functions of NVTX: they record the ranges that have ended.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int},
    sync::{Mutex, PoisonError},
};

thread_local! {
    /// Names of the ranges that this thread has begun and not ended.
    static OPEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// The ended ranges, each with the ranges around it, one in a line.
static ENDED: Mutex<String> = Mutex::new(String::new());

#[unsafe(no_mangle)]
unsafe extern "C" fn nvtxRangePushA(message: *const c_char) -> c_int {
    // SAFETY: the caller passes a text that ends with 0.
    let name = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    OPEN.with_borrow_mut(|open| open.push(name));
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvtxRangePop() -> c_int {
    OPEN.with_borrow_mut(|open| {
        if !open.is_empty() {
            let mut ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
            ended.push_str(&open.join("/"));
            ended.push('\n');
        }
        open.pop();
    });
    0
}

/// The ended ranges so far. The text is never freed.
#[unsafe(no_mangle)]
extern "C" fn baton_fake_gpu_ended_ranges() -> *const c_char {
    let text = ENDED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    CString::new(text).unwrap_or_default().into_raw()
}
