//! Code shared by the fuzz targets. A target is a file in `fuzz_targets/`: one function with bytes as input that must
//! not panic, hang, or use more memory than the input justifies.
//!
//! | module | content |
//! |---|---|
//! | [`file`] | a file in memory for the input |
//! | [`memory`] | an allocator that counts memory, and detects writes after the end of a buffer |
//! | [`coverage`] | coverage of C code and of error messages, for libFuzzer |
//! | [`damage`] | mutations of the numbers in a file or a JPEG |
//!
//! `README.md` describes how to run the targets.

pub mod coverage;
#[cfg(feature = "libfuzzer")]
pub mod damage;
pub mod file;
pub mod memory;

/// A manifest without its digest, whose first shard has 15 values: 8 of `weights`, 5 of `momentum` and 2 of `bn_running`.
pub const SHARD_MANIFEST: &str = include_str!("../seeds/manifest/two_ranks");

/// The value of a result; an error only counts as coverage.
pub fn observe<T>(result: Result<T, impl std::fmt::Display>) -> Option<T> {
    result.map_err(|error| coverage::count_message(&error.to_string())).ok()
}
