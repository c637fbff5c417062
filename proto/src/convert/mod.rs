//! Converts types of `baton-job` to the messages of [`v1`](crate::v1) that users receive, and some messages back, for
//! `baton`.
//!
//! Names and numbers of the messages are a promise to clients (`tests/compatibility`). Rust names in `baton-job` may
//! change freely: this module keeps the messages as they are.

mod divergence;
mod status;
#[cfg(test)]
mod tests;
mod values;

pub use self::status::{JobInfo, status};

/// Converts an enum to the protobuf enum with the same variants; the protobuf enum also has `Unspecified`.
macro_rules! same_variants {
    ($job:ty, $wire:ty, [$($variant:ident),+ $(,)?]) => {
        impl From<$job> for $wire {
            fn from(job: $job) -> Self {
                match job {
                    $(<$job>::$variant => Self::$variant,)+
                }
            }
        }
    };
}
use same_variants;
