//! A job with a budget ends when the budget is used up: not before, and not later than a drain takes. A restarted
//! coordinator begins the drain again.

use std::time::Duration;

use baton_job::{engine::Record, exit::Outcome};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct ABudgetEndsTheJob {
    /// Reading of the meter when the coordinator started.
    at_start: Duration,
}

impl Invariant for ABudgetEndsTheJob {
    fn sentence(&self) -> &'static str {
        "a job with a budget ends when it is used up, not before"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let spending = &cluster.coordinator.status.spending;
        let spent = spending.meter.read(cluster.now);
        match fact {
            Fact::CoordinatorReplayed => {
                self.at_start = spent;
                Ok(())
            }
            Fact::EngineMoved if !cluster.coordinator.job_is_over() => {
                let drain = cluster.plan.spec.cluster.drain_seconds;
                let most = spending
                    .budget
                    .limit()
                    .map(|most| most.max(self.at_start) + Duration::from_secs_f64(drain));
                match most.filter(|most| spent > *most && cluster.coordinator.engine.is_some()) {
                    Some(most) => {
                        Err(format!("{spent:?} are spent, {most:?} with a drain allowed"))
                    }
                    None => Ok(()),
                }
            }
            Fact::Persisted(Record::Ended(Outcome::LimitReached { reason })) => {
                match spending.budget.limit() {
                    Some(most) if spent >= most => Ok(()),
                    most => Err(format!("{reason}, but {spent:?} of {most:?} are spent")),
                }
            }
            _ => Ok(()),
        }
    }
}
