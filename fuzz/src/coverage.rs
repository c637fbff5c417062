//! What libFuzzer does not see by itself: C code and error messages.
//!
//! cargo-fuzz instruments Rust code. libjpeg-turbo is compiled by `cc`, and gcc has no instrumentation
//! that libFuzzer understands; but with `-fsanitize-coverage=trace-pc` (see `scripts/fuzz.sh`) it calls
//! a function in every block of code, and libFuzzer takes any counters that lie in a section of a
//! certain name.
#![allow(unsafe_code)] // A section and a symbol by name, and a function in assembler.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

const COUNTERS: usize = 1 << 15;

/// The first half is for messages, the second for places in C code.
// SAFETY: the section is libFuzzer's for arrays of bytes, and this is one.
#[unsafe(link_section = "__libfuzzer_extra_counters")]
static SEEN: [AtomicU8; COUNTERS] = [const { AtomicU8::new(0) }; COUNTERS];

/// Makes inputs with this message interesting. Numbers in it count as one.
pub fn saw(message: &str) {
    // FNV-1a.
    let hash = message
        .bytes()
        .filter(|byte| !byte.is_ascii_digit())
        .fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
        });
    SEEN[(hash >> 32) as usize % (COUNTERS / 2)].store(1, Relaxed);
}

// Called by gcc's code as a C function without arguments, so these registers are free to use. The
// caller's address, counted from the start of our own code, so that it is the same in every process,
// picks a counter; two places that share one is no harm.
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
    seen = sym SEEN,
);
