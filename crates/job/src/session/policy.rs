//! An agent's timeouts, and what else it knows of the recipe.

use std::time::Duration;

use baton_recipe::JobSpec;

/// Timeouts of an agent, and what else it knows of the recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Time between asking a rank process to exit and killing it.
    pub kill_after: Duration,
    /// Time in which ranks must save and stop when the node leaves; then they are asked to exit.
    pub drain_timeout: Duration,
    /// First delay between two attempts to connect; it doubles up to 16 times this value.
    pub first_retry_delay: Duration,
    /// Longest time without a message from a training rank, or in the same activity. Zero: no limit.
    pub hang_timeout: Duration,
    /// Whether to keep a spare process.
    pub warm_spare: bool,
    /// `train.log_every` of the recipe.
    pub log_every: u32,
    /// Time for which the agent tries to report that all ranks are done, if it cannot reach the coordinator.
    pub final_report_timeout: Duration,
}

impl Policy {
    /// The timeouts of a job.
    #[must_use]
    pub fn new(spec: &JobSpec) -> Self {
        Self {
            drain_timeout: Duration::from_secs_f64(spec.cluster.drain_seconds),
            hang_timeout: Duration::from_secs_f64(spec.cluster.hang_seconds),
            warm_spare: spec.cluster.warm_spare,
            log_every: spec.train.log_every,
            ..Self::default()
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            kill_after: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(100),
            first_retry_delay: Duration::from_millis(100),
            hang_timeout: Duration::ZERO,
            warm_spare: false,
            log_every: 0,
            final_report_timeout: Duration::from_secs(10),
        }
    }
}
