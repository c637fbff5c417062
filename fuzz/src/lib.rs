//! What the fuzz targets share. A target is a file in `fuzz_targets/`: one function that is given
//! bytes and must neither panic, nor hang, nor ask for more memory than they justify.
//!
//! | module | what it does |
//! |---|---|
//! | [`file`] | lets bytes be opened as a file, without a disk |
//! | [`memory`] | an allocator that counts, and that looks for writes behind a buffer's end |
//! | [`coverage`] | tells libFuzzer about the C code that gcc compiled, and about outcomes |
//! | [`damage`] | mutations that know where the numbers of a file or of a JPEG stand |
//!
//! `README.md` says how to run them.

pub mod coverage;
pub mod damage;
pub mod file;
pub mod memory;

/// A manifest whose first shard has 15 values: 8 of `weights`, 5 of `momentum` and 2 of `bn_running`.
pub const SHARD_MANIFEST: &str = include_str!("../seeds/manifest/two_ranks");

/// An outcome is not asked for: that there is one is all that counts. It does steer the search.
pub fn tell<T>(outcome: Result<T, impl std::fmt::Display>) -> Option<T> {
    outcome.map_err(|error| coverage::saw(&error.to_string())).ok()
}
