//! Time as an argument: state machines receive the current time and return the deadline of their next timeout.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// Milliseconds since a fixed origin, which the program that runs the state machine chooses.
///
/// Time never goes backwards. An agent counts from the start of its process. A coordinator counts from the Unix
/// epoch, according to its machine's clock when the process started, because its journal is used again after a restart.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Time(pub u64);

impl Time {
    /// This time plus `wait`, saturating at the maximum.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Time passed since `earlier`; zero if `earlier` is in the future.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// Most seconds that a flag may have: a day.
const MAX_FLAG_SECONDS: f64 = 86_400.0;

/// The value of a flag in seconds, such as `0.5`.
///
/// # Errors
/// It is not a number, or not in the range that the text says.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=MAX_FLAG_SECONDS).contains(seconds));
    let seconds = seconds.ok_or_else(|| format!("must be 0..{MAX_FLAG_SECONDS} seconds"))?;
    Ok(Duration::from_secs_f64(seconds))
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} s", self.0 as f64 / 1_000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_of_a_flag_are_a_number_in_range() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["nan", "inf", "1e300", "-1", "soon", ""] {
            assert_eq!(parse_seconds(text), Err("must be 0..86400 seconds".to_owned()), "{text}");
        }
    }
}
