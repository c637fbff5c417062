//! The version and git revision that a Baton program was built from.
//!
//! Only the programs use it, so a new commit recompiles them but no library. A build outside a git
//! checkout takes the revision from the environment variable `BATON_REVISION`, or is `unknown`.

/// Git revision of the build, 12 hexadecimal digits. Uncommitted changes are not shown.
pub const REVISION: &str = env!("BATON_REVISION");

/// Version and revision: `0.2.0 (1a2b3c4d5e6f)`.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BATON_REVISION"), ")");
