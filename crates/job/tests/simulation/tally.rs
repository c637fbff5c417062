//! Counts of events, to detect a simulation that no longer tests something.

use std::{collections::BTreeMap, ops::AddAssign};

use baton_job::{
    engine::{Incident, PhaseName, Record, Recovery, Status},
    exit::{Class, Outcome},
    message::Directive,
};

use crate::{cluster::Cluster, fact::Fact};

/// Count of each kind of event.
#[derive(Default)]
pub(crate) struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    pub(crate) fn count(&mut self, name: &'static str) {
        *self.0.entry(name).or_default() += 1;
    }

    fn of(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// The events in `minimums` that happened less often than required.
    pub(crate) fn too_rare<'a>(&self, minimums: &[(u64, &'a str)]) -> Vec<&'a str> {
        let rare = minimums.iter().filter(|(least, name)| self.of(name) < *least);
        rare.map(|(_, name)| *name).collect()
    }

    pub(crate) fn observe(&mut self, cluster: &Cluster, fact: &Fact) {
        match fact {
            Fact::Persisted(Record::Opened { .. }) => self.count("generations"),
            Fact::Persisted(Record::Ended(outcome)) => self.count(match outcome {
                Outcome::Completed => "ended completed",
                Outcome::Drained { .. } => "ended drained",
                Outcome::LimitReached { .. } => "ended by a limit",
                Outcome::Stopped => "ended stopped",
                Outcome::Failed { failure } if failure.class == Class::Diverged => "ended diverged",
                Outcome::Failed { failure } if failure.class.is_retriable() => {
                    "ended after too many failures"
                }
                Outcome::Failed { .. } => "ended by bad input",
            }),
            Fact::Persisted(Record::Diverged(Incident {
                rollback: Some(rollback),
                diagnosis,
                ..
            })) => {
                self.count("rollbacks");
                if rollback.before == diagnosis.step {
                    self.count("rollbacks to before the starting state");
                }
            }
            Fact::EngineMoved => self.compare(cluster),
            Fact::CoordinatorReplayed => self.count("coordinator restarts"),
            Fact::FenceRefused => self.count("fences refused by the store"),
            Fact::AgentCrashed => self.count("agent crashes"),
            Fact::AgentLeft(..) => self.count("agents left"),
            Fact::Ended { replaced: true, .. } => self.count("hanging ranks replaced"),
            Fact::Met(meeting) => {
                let world = meeting.slots.len();
                self.count(match meeting.steps.len() {
                    0 if meeting.state_of.is_some() => "meetings from a commit",
                    0 => "meetings from fresh weights",
                    steps if steps < world => "meetings of survivors with newcomers",
                    _ => "meetings of survivors",
                });
                if meeting.steps.iter().any(|step| *step < meeting.start) {
                    self.count("meetings of survivors at different steps");
                }
            }
            Fact::Stepped { .. } => self.count("steps"),
            Fact::Committed { .. } => self.count("commits"),
            Fact::CommitRefused => self.count("commits refused by the fence"),
            Fact::CheckpointFound { is_complete: true } => self.count("ends of training found"),
            Fact::DirectiveSent(_, Directive::Drain { .. }) => self.count("drains sent"),
            Fact::DirectiveSent(_, Directive::Dismiss { .. })
                if cluster.coordinator.status.outcome.is_none() =>
            {
                self.count("nodes sent away");
            }
            Fact::Fault(name) => self.count(name),
            _ => {}
        }
    }

    fn compare(&mut self, cluster: &Cluster) {
        let (before, after) = (&cluster.coordinator.status_before, &cluster.coordinator.status);
        let trains = matches!(after.phase, PhaseName::Training | PhaseName::Draining);
        if before.phase == PhaseName::Reattaching && trains {
            self.count("coordinator restarts that ranks did not notice");
        }
        if after.skipped_samples > before.skipped_samples {
            self.count("reports of skipped samples");
        }
        if let Some(recovered) = newly_recovered(before, after) {
            self.count("recoveries");
            if recovered.met_at.is_some() {
                self.count("recoveries in which all ranks reported that they met");
            }
            if recovered.planned {
                self.count("recoveries of planned changes");
            }
            if recovered.lost_steps > 0 {
                self.count("recoveries that lost steps");
            }
        }
        if after.stale_messages > before.stale_messages {
            self.count("stale messages");
        }
    }

    pub(crate) fn report(&self) -> String {
        self.0.iter().map(|(name, count)| format!("{count:>10} {name}\n")).collect()
    }
}

/// The recovery that has just reached its first step.
fn newly_recovered<'a>(before: &Status, after: &'a Status) -> Option<&'a Recovery> {
    let last = after.recoveries.back()?;
    let is_new = before.recoveries.back().is_some_and(|one| one.stepped_at.is_none());
    Some(last).filter(|last| is_new && last.stepped_at.is_some())
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        for (name, count) in other.0 {
            *self.0.entry(name).or_default() += count;
        }
    }
}
