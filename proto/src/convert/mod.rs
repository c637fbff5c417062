//! Conversions between the types of `baton-job` and the messages of [`v1`].
//!
//! Job → wire is `From`; nothing can be wrong. Wire → job is `TryFrom` with [`Malformed`], or `From`
//! where every value has a meaning.

mod directive;
mod divergence;
mod report;
mod status;
#[cfg(test)]
mod tests;
mod values;
mod vitals;

pub use self::{
    report::check_version,
    status::{Job, status},
};
use crate::refusal;
#[cfg(doc)]
use crate::v1;

/// A message that came over the wire and makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {message}: {field} {problem}")]
pub struct Malformed {
    /// Name of the message in `baton.v1`.
    pub message: &'static str,
    /// Name of its field.
    pub field: &'static str,
    /// What is wrong, as the end of a sentence that begins with the field's name.
    pub problem: String,
}

impl Malformed {
    fn new(message: &'static str, field: &'static str, problem: impl Into<String>) -> Self {
        Self { message, field, problem: problem.into() }
    }
}

impl From<Malformed> for tonic::Status {
    fn from(malformed: Malformed) -> Self {
        let field = format!("{}.{}", malformed.message, malformed.field);
        refusal::invalid(malformed.to_string(), [(field, malformed.problem)])
    }
}

/// The value of a field that must be there.
fn required<T>(
    message: &'static str,
    field: &'static str,
    value: Option<T>,
) -> Result<T, Malformed> {
    value.ok_or_else(|| Malformed::new(message, field, "is missing"))
}

/// Converts all of `items`, stopping at the first that is malformed.
fn all<T, U: TryFrom<T>>(items: Vec<T>) -> Result<Vec<U>, U::Error> {
    items.into_iter().map(U::try_from).collect()
}

/// An enum that has the same variants on both sides, but for the wire's `Unspecified`; on the wire
/// it stands in one field of one message.
macro_rules! same_variants {
    ($job:ty, $wire:ty, $message:literal, $field:literal, [$($variant:ident),+ $(,)?]) => {
        impl From<$job> for $wire {
            fn from(job: $job) -> Self {
                match job {
                    $(<$job>::$variant => Self::$variant,)+
                }
            }
        }

        impl TryFrom<$wire> for $job {
            type Error = crate::Malformed;

            fn try_from(wire: $wire) -> Result<Self, Self::Error> {
                match wire {
                    $(<$wire>::$variant => Ok(Self::$variant),)+
                    <$wire>::Unspecified => {
                        Err(crate::Malformed::new($message, $field, "is missing"))
                    }
                }
            }
        }
    };
}
use same_variants;

/// The wire carries enums as numbers.
fn known<E: TryFrom<i32>>(
    message: &'static str,
    field: &'static str,
    number: i32,
) -> Result<E, Malformed> {
    E::try_from(number).map_err(|_| {
        let problem = format!("has the unknown value {number}; is the peer of another version?");
        Malformed::new(message, field, problem)
    })
}
