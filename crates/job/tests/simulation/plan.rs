//! Settings of one history, all derived from the seed: the cluster, the job, and the rate of faults.

use std::{sync::OnceLock, time::Duration};

use baton_job::{Generation, JobId, engine::JobOrigin, message::Restore, session::Policy};
use baton_recipe::{JobSpec, spec::GuardRemedy};
use fastrand::Rng;

use crate::common::{self, store::Store};

/// Faults of messages between coordinator and agents, in addition to delays and broken connections: probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct NetworkFaults {
    pub(crate) loss: f64,
    pub(crate) duplication: f64,
    pub(crate) reordering: f64,
}

impl NetworkFaults {
    /// In order and exactly once, as gRPC guarantees while a connection is open.
    pub(crate) const NONE: Self = Self { loss: 0.0, duplication: 0.0, reordering: 0.0 };
    const HARSH: Self = Self { loss: 0.01, duplication: 0.03, reordering: 0.05 };

    pub(crate) fn is_reliable(self) -> bool {
        self == Self::NONE
    }
}

/// A planned divergence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PlannedDivergence {
    /// Updates before the divergence is detected.
    pub(crate) step: u64,
    /// Updates after which the state is corrupted, if that is before the divergence is detected.
    pub(crate) corrupts_after: Option<u64>,
    /// Number of rollbacks after which it does not happen again.
    pub(crate) cured_by: usize,
}

/// The fixed settings of one history.
pub(crate) struct Plan {
    pub(crate) spec: JobSpec,
    pub(crate) origin: JobOrigin,
    pub(crate) policy: Policy,
    /// Number of ranks that each node can run.
    pub(crate) slots: Vec<u32>,
    pub(crate) total_steps: u64,
    pub(crate) step_ms: u64,
    /// Steps between periodic saves; 0: none.
    pub(crate) save_every: u64,
    pub(crate) divergence: Option<PlannedDivergence>,
    /// Whether ranks keep their state when training diverges.
    pub(crate) keeps_state: bool,
    pub(crate) network_faults: NetworkFaults,
    /// Time in which faults happen.
    pub(crate) chaos: Duration,
    /// Mean time between two faults.
    pub(crate) fault_every_ms: u64,
}

impl Plan {
    pub(crate) fn new(rng: &mut Rng, store: &mut Store) -> Self {
        let slots: Vec<u32> = (0..rng.usize(1..=4)).map(|_| rng.u32(1..=3)).collect();
        let all = slots.iter().sum();
        let mut spec = recipe().clone();
        spec.cluster.min_ranks = rng.u32(1..=all);
        spec.cluster.max_ranks = rng.u32(spec.cluster.min_ranks..=all);
        spec.cluster.node_grace_seconds = rng.u32(1..=10).into();
        spec.cluster.rendezvous_seconds = rng.u32(3..=8).into();
        spec.cluster.hang_seconds = rng.u32(2..=6).into();
        spec.cluster.drain_seconds = rng.u32(4..=20).into();
        spec.cluster.restart_limit = rng.u32(3..=10);
        let long = rng.u8(0..8) == 0;
        let total_steps = if long { rng.u64(100..=150) } else { rng.u64(10..=60) };
        spec.guard.enabled = rng.u8(0..10) > 0;
        spec.guard.max_rollbacks = rng.u32(0..=4);
        spec.guard.remedy = if rng.bool() { GuardRemedy::LowerLr } else { GuardRemedy::SkipBatch };
        if rng.u8(0..10) == 0 {
            spec.limits.max_hours = Some(rng.f64() * 30.0 / 3_600.0);
        }
        Self {
            origin: origin(rng, store, total_steps),
            policy: Policy::new(&spec),
            spec,
            slots,
            total_steps,
            step_ms: rng.u64(20..=100),
            save_every: rng.u64(0..=12),
            divergence: divergence(rng, total_steps),
            keeps_state: rng.bool(),
            network_faults: if rng.u8(0..10) < 7 {
                NetworkFaults::NONE
            } else {
                NetworkFaults::HARSH
            },
            chaos: Duration::from_millis(rng.u64(500..=15_000)),
            fault_every_ms: rng.u64(100..=3_000),
        }
    }

    pub(crate) fn rendezvous(&self) -> Duration {
        Duration::from_secs_f64(self.spec.cluster.rendezvous_seconds)
    }
}

/// In some histories training diverges.
fn divergence(rng: &mut Rng, total_steps: u64) -> Option<PlannedDivergence> {
    if rng.u8(0..5) > 0 {
        return None;
    }
    let step = rng.u64(0..total_steps);
    let corrupts_after =
        (step > 0 && rng.bool()).then(|| rng.u64(step.saturating_sub(9)..step) + 1);
    Some(PlannedDivergence { step, corrupts_after, cured_by: rng.usize(1..=4) })
}

/// A new job. In some stores an earlier run has left commits, which the job may have to ignore.
fn origin(rng: &mut Rng, store: &mut Store, total_steps: u64) -> JobOrigin {
    let mut generation = Generation(0);
    if rng.u8(0..4) == 0 {
        for _ in 0..rng.u64(1..=3) {
            generation = generation.next();
            store.put(generation, rng.u64(1..total_steps), false);
        }
    }
    let first_generation = generation.next();
    let not_before = if rng.bool() { Generation(0) } else { first_generation };
    JobOrigin {
        job: JobId(uuid::Uuid::nil()),
        recipe: None,
        first_generation,
        restore: Restore { not_before, ..Restore::default() },
    }
}

fn recipe() -> &'static JobSpec {
    static RECIPE_READ: OnceLock<JobSpec> = OnceLock::new();
    RECIPE_READ.get_or_init(common::recipe::recipe)
}
