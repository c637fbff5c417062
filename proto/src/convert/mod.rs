//! From the types of `baton-job` to the messages of [`v1`](crate::v1) that users read, and back what
//! `baton` needs of them.

mod divergence;
mod status;
#[cfg(test)]
mod tests;
mod values;

pub use self::status::{Job, status};

/// An enum that has the same variants on both sides, but for the wire's `Unspecified`.
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
