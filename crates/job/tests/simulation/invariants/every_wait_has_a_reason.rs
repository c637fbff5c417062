//! Every wait has a reason, and an end: a deadline, or something outside that the reason names. A state machine that
//! was woken at its deadline does not return the same deadline again.

use baton_job::{Time, engine::PhaseName};

use super::Invariant;
use crate::{
    cluster::Cluster,
    fact::{Fact, StateMachine},
};

/// Most times that a state machine may be woken at the same time: each wake may cause another immediate one.
const MAX_WAKES: u32 = 3;

#[derive(Default)]
pub(super) struct EveryWaitHasAReason {
    woken: Option<(StateMachine, Time)>,
    times: u32,
}

impl Invariant for EveryWaitHasAReason {
    fn sentence(&self) -> &'static str {
        "every wait has a reason and an end"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::EngineMoved => waits_for_something(cluster),
            Fact::SessionMoved(id) => match &cluster.agents[*id].session {
                Some(session) if session.reason().is_empty() => {
                    Err("an agent gives no reason".to_owned())
                }
                _ => Ok(()),
            },
            Fact::Woke(state_machine) => self.woke(*state_machine, cluster.now),
            _ => Ok(()),
        }
    }
}

impl EveryWaitHasAReason {
    fn woke(&mut self, state_machine: StateMachine, now: Time) -> Result<(), String> {
        let again = self.woken.replace((state_machine, now)) == Some((state_machine, now));
        self.times = if again { self.times + 1 } else { 1 };
        if self.times <= MAX_WAKES {
            return Ok(());
        }
        Err("a state machine returns the same deadline again and again".to_owned())
    }
}

fn waits_for_something(cluster: &Cluster) -> Result<(), String> {
    if cluster.coordinator.engine.is_none() {
        return Ok(());
    }
    let status = &cluster.coordinator.status;
    let named = match status.phase {
        _ if cluster.coordinator.waits_for_store => "",
        PhaseName::Gathering => "agents",
        PhaseName::Training => "train",
        PhaseName::Paused => "baton resume",
        PhaseName::Ended => "",
        _ if cluster.coordinator.deadline().is_some() => "",
        phase => return Err(format!("{phase:?} has no deadline: {}", status.reason)),
    };
    if !status.reason.is_empty() && status.reason.contains(named) {
        return Ok(());
    }
    Err(format!("{:?} gives the reason \"{}\"", status.phase, status.reason))
}
