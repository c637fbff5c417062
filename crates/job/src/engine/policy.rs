//! How long the machine waits, and how many ranks it wants.

use std::time::Duration;

use crate::ids::{Generation, JobId};
use baton_recipe::JobSpec;

/// Limits of the recipe's `cluster` section, and one wait of our own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    pub(super) min_ranks: u32,
    pub(super) max_ranks: u32,
    pub(super) node_grace: Duration,
    pub(super) rendezvous: Duration,
    pub(super) drain: Duration,
    pub(super) restart_limit: u32,
    /// How long to wait for news of a death after ranks lost touch. Agents see a death within
    /// milliseconds, so this only has to cover a message's way.
    pub(super) settle: Duration,
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
            settle: Duration::from_millis(500),
        }
    }

    /// The first failure is answered at once; each further one without a step between waits twice as long. Up to a
    /// quarter more or less, so that jobs that failed together do not try again together.
    pub(super) fn backoff(&self, failures: u32, job: JobId, generation: Generation) -> Duration {
        let pause = match failures {
            0 | 1 => Duration::ZERO,
            n => Duration::from_secs(1 << (n - 2).min(5)),
        };
        let (job, _) = job.0.as_u64_pair();
        let mixed = (job ^ generation.0).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        pause.mul_f64(0.75 + 0.5 * mixed as f64 / 1_024.0)
    }
}
