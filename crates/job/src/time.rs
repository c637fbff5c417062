//! Time as an argument: the machines are told what time it is and say when they want to be woken.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// Milliseconds since an origin of the shell's choosing.
///
/// It never goes backwards. An agent's begins with its process. A coordinator's begins with the UNIX epoch as its
/// machine had it when the process started, for its journal outlives it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Time(pub u64);

impl Time {
    /// This time plus `wait`, saturating.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)))
    }

    /// How long ago `earlier` was; zero if it lies ahead.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} s", self.0 as f64 / 1_000.0)
    }
}
