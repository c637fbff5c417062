//! Timeouts, and the number of ranks required.

use std::time::Duration;

use crate::ids::{Generation, JobId};
use baton_recipe::JobSpec;

/// Limits of the recipe's `cluster` section, and one constant timeout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    pub(super) min_ranks: u32,
    pub(super) max_ranks: u32,
    pub(super) node_grace: Duration,
    pub(super) rendezvous: Duration,
    pub(super) drain: Duration,
    pub(super) restart_limit: u32,
    /// How long to wait for the report of a rank's death after other ranks lost their connection. Agents notice a death
    /// within milliseconds, so this only has to cover the time to send a message.
    pub(super) loss_window: Duration,
}

impl Policy {
    pub(super) fn new(spec: &JobSpec) -> Self {
        let cluster = &spec.cluster;
        Self {
            min_ranks: cluster.min_ranks,
            max_ranks: spec.max_ranks(),
            node_grace: Duration::from_secs_f64(cluster.node_grace_seconds),
            rendezvous: Duration::from_secs_f64(cluster.rendezvous_seconds),
            drain: Duration::from_secs_f64(cluster.drain_seconds),
            restart_limit: cluster.restart_limit,
            loss_window: Duration::from_millis(500),
        }
    }

    /// Pause before the checkpoint store is tried again after this many refusals in a row.
    pub(super) fn store_retry(refusals: u32) -> Duration {
        Duration::from_secs(1 << refusals.saturating_sub(1).min(3))
    }

    /// Time to wait before a restart: zero after the first failure, then doubled with each further failure without a
    /// step in between. Varied by up to a quarter, so that jobs that failed together do not restart together.
    pub(super) fn backoff(&self, failures: u32, job: JobId, generation: Generation) -> Duration {
        let wait = match failures {
            0 | 1 => Duration::ZERO,
            n => Duration::from_secs(1 << (n - 2).min(5)),
        };
        let (job, _) = job.0.as_u64_pair();
        let mixed = (job ^ generation.0).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        wait.mul_f64(0.75 + 0.5 * mixed as f64 / 1_024.0)
    }
}
