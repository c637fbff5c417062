//! Coverage that libFuzzer does not see by itself: C code and error messages.
//!
//! cargo-fuzz instruments Rust code. libjpeg-turbo is compiled by `cc`, and gcc has no instrumentation that libFuzzer
//! supports. But with `-fsanitize-coverage=trace-pc` (see `scripts/fuzz.sh`), gcc calls a function in every basic
//! block, and libFuzzer uses all counters in a section with a certain name.
#![allow(unsafe_code)] // A section and a symbol by name, and a function in assembler.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

const COUNTERS: usize = 1 << 15;

/// The first half is for messages, the second half for locations in C code.
// SAFETY: libFuzzer expects arrays of bytes in this section, and this is one.
#[unsafe(link_section = "__libfuzzer_extra_counters")]
static COVERAGE: [AtomicU8; COUNTERS] = [const { AtomicU8::new(0) }; COUNTERS];

/// Counts an error message as coverage, so that inputs with a new message are kept. Digits in it are ignored.
pub fn count_message(message: &str) {
    // FNV-1a.
    let hash = message
        .bytes()
        .filter(|byte| !byte.is_ascii_digit())
        .fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
        });
    COVERAGE[(hash >> 32) as usize % (COUNTERS / 2)].store(1, Relaxed);
}

// Called by gcc's code as a C function without arguments, so these registers may be changed. The caller's address
// selects a counter; it is taken relative to this function, so that it is the same in every process. It does not matter
// if two locations share a counter.
std::arch::global_asm!(
    ".globl __sanitizer_cov_trace_pc",
    "__sanitizer_cov_trace_pc:",
    "mov rax, [rsp]",
    "lea rcx, [rip + __sanitizer_cov_trace_pc]",
    "sub rax, rcx",
    "imul rax, rax, 0x61C88647",
    "shr rax, 8",
    "and eax, {mask}",
    "lea rcx, [rip + {seen}]",
    "inc byte ptr [rcx + rax + {half}]",
    "ret",
    mask = const COUNTERS / 2 - 1,
    half = const COUNTERS / 2,
    seen = sym COVERAGE,
);
