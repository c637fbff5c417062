//! How long an agent waits.

use std::time::Duration;

use baton_recipe::JobSpec;

/// Waits of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Between that and SIGKILL.
    pub kill_after: Duration,
    /// Between the request to go and asking ranks to end.
    pub drain: Duration,
    /// First pause between two tries to connect; it doubles up to 16 times.
    pub reconnect: Duration,
    /// How long a rank that trains may be silent, or at one thing. Zero: for ever.
    pub hang: Duration,
    /// Whether to keep a process more than there are places.
    pub warm_spare: bool,
    /// Without a coordinator: how long after all ranks are done the agent still tries to tell.
    pub farewell: Duration,
}

impl Policy {
    /// The waits of a job.
    #[must_use]
    pub fn new(spec: &JobSpec) -> Self {
        Self {
            drain: Duration::from_secs_f64(spec.cluster.drain_seconds),
            hang: Duration::from_secs_f64(spec.cluster.hang_seconds),
            warm_spare: spec.cluster.warm_spare,
            ..Self::default()
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            kill_after: Duration::from_secs(5),
            drain: Duration::from_secs(100),
            reconnect: Duration::from_millis(100),
            hang: Duration::ZERO,
            warm_spare: false,
            farewell: Duration::from_secs(10),
        }
    }
}
