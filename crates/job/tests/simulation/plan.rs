//! What one history is about: the cluster, the job and how unkind the world is, all from the seed.

use std::{sync::OnceLock, time::Duration};

use baton_job::{Generation, JobId, engine::Origin, message::Restore, session::Policy};
use baton_recipe::{JobSpec, spec::Remedy};
use fastrand::Rng;

use crate::common::{self, store::Store};

/// What messages between coordinator and agents suffer besides delay and broken connections.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Temper {
    pub(crate) loss: f64,
    pub(crate) duplication: f64,
    pub(crate) reordering: f64,
}

impl Temper {
    /// In order and once, as gRPC keeps it while a connection stands.
    pub(crate) const HONEST: Self = Self { loss: 0.0, duplication: 0.0, reordering: 0.0 };
    const HARSH: Self = Self { loss: 0.01, duplication: 0.03, reordering: 0.05 };

    pub(crate) fn is_honest(self) -> bool {
        self == Self::HONEST
    }
}

/// An update at which training goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trap {
    /// Updates made before it.
    pub(crate) step: u64,
    /// The state is spoiled after so many updates already, though it does not show before `step`.
    pub(crate) spoils_after: Option<u64>,
    /// So many rollbacks cure it.
    pub(crate) cured_by: usize,
}

/// The fixed facts of one history.
pub(crate) struct Plan {
    pub(crate) spec: JobSpec,
    pub(crate) origin: Origin,
    pub(crate) policy: Policy,
    /// Ranks each node can run.
    pub(crate) slots: Vec<u32>,
    pub(crate) total_steps: u64,
    pub(crate) step_ms: u64,
    /// Steps between periodic saves; 0 is off.
    pub(crate) save_every: u64,
    pub(crate) trap: Option<Trap>,
    /// Whether ranks keep the state before the update at which training goes wrong.
    pub(crate) keeps_state: bool,
    pub(crate) temper: Temper,
    /// How long faults happen.
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
        spec.guard.remedy = if rng.bool() { Remedy::LowerLr } else { Remedy::SkipBatch };
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
            trap: trap(rng, total_steps),
            keeps_state: rng.bool(),
            temper: if rng.u8(0..10) < 7 { Temper::HONEST } else { Temper::HARSH },
            chaos: Duration::from_millis(rng.u64(500..=15_000)),
            fault_every_ms: rng.u64(100..=3_000),
        }
    }

    pub(crate) fn rendezvous(&self) -> Duration {
        Duration::from_secs_f64(self.spec.cluster.rendezvous_seconds)
    }
}

/// In some histories training goes wrong.
fn trap(rng: &mut Rng, total_steps: u64) -> Option<Trap> {
    if rng.u8(0..5) > 0 {
        return None;
    }
    let step = rng.u64(0..total_steps);
    let spoils_after = (step > 0 && rng.bool()).then(|| rng.u64(step.saturating_sub(9)..step) + 1);
    Some(Trap { step, spoils_after, cured_by: rng.usize(1..=4) })
}

/// A new job; in some stores an earlier run has left commits, which it may be told to leave alone.
fn origin(rng: &mut Rng, store: &mut Store, total_steps: u64) -> Origin {
    let mut generation = Generation(0);
    if rng.u8(0..4) == 0 {
        for _ in 0..rng.u64(1..=3) {
            generation = generation.next();
            store.put(generation, rng.u64(1..total_steps), false);
        }
    }
    let first_generation = generation.next();
    let not_before = if rng.bool() { Generation(0) } else { first_generation };
    Origin {
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
