//! A generation is not opened without a node that is the only one with the newest step, even if there are more nodes
//! than the job may use, and, if the node is disconnected, as long as its grace period lasts. Such a node is not sent
//! away.

use std::collections::BTreeMap;

use baton_job::{
    NodeId, Time,
    engine::{PhaseName, Record},
    message::Directive,
    plan::Placement,
};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct NoNodeIsLeftBehind {
    /// Nodes of the running generation that are away, with the time since when.
    away: BTreeMap<NodeId, Time>,
    /// The last step that was saved.
    saved: u64,
}

impl Invariant for NoNodeIsLeftBehind {
    fn sentence(&self) -> &'static str {
        "no node that alone has the newest step is left behind within its grace period, or sent away"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::CoordinatorReplayed => {
                let ranks = &cluster.coordinator.status.ranks;
                self.away = ranks.iter().map(|rank| (rank.node.clone(), cluster.now)).collect();
                Ok(())
            }
            Fact::EngineMoved => {
                let attached = cluster.coordinator.status.nodes.iter().filter(|node| node.attached);
                for node in attached {
                    self.away.remove(&node.node);
                }
                let waits = cluster.coordinator.status.nodes.iter().filter(|node| !node.attached);
                for node in waits {
                    self.away.entry(node.node.clone()).or_insert(cluster.now);
                }
                Ok(())
            }
            Fact::Persisted(Record::Opened { placements, .. }) => self.opened(cluster, placements),
            Fact::Committed { step, .. } => {
                self.saved = *step;
                Ok(())
            }
            // Its processes end, although it has run ranks until now. Other launches go to nodes that came too late.
            Fact::DirectiveSent(node, Directive::Launch(launch))
                if launch.ranks.is_empty()
                    && cluster.coordinator.status_before.generation < launch.generation
                    && had_ranks(cluster, node) =>
            {
                let (step, ranks) =
                    (newest_step_on(cluster, node), &cluster.coordinator.status.ranks);
                let newest =
                    ranks.iter().filter_map(|rank| newest_step_on(cluster, &rank.node)).max();
                // Ranks are at most one step apart, and the last one may not have been reported.
                match step.is_some_and(|step| step > newest.unwrap_or_default().max(self.saved) + 1)
                {
                    true => Err(format!("{node} has step {step:?}, others {newest:?}")),
                    false => Ok(()),
                }
            }
            Fact::DirectiveSent(node, Directive::Dismiss { .. })
                if cluster.coordinator.status.outcome.is_none() =>
            {
                let steps = newest_step_on(cluster, node);
                let others = cluster.agents.iter().filter(|agent| agent.node != *node);
                match steps > others.filter_map(|agent| newest_step_on(cluster, &agent.node)).max()
                {
                    true => Err(format!("{node} is sent away with step {steps:?}")),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

impl NoNodeIsLeftBehind {
    fn opened(&self, cluster: &Cluster, placements: &[Placement]) -> Result<(), String> {
        let before = cluster.coordinator.status_before.phase;
        if matches!(before, PhaseName::Gathering | PhaseName::Backoff) {
            return Ok(());
        }
        let newest = placements
            .iter()
            .filter_map(|placement| newest_step_on(cluster, &placement.node))
            .max();
        for (node, since) in &self.away {
            let grace = cluster.plan.spec.cluster.node_grace_seconds;
            let in_grace = cluster.now.since(*since).as_secs_f64() < grace;
            let steps = newest_step_on(cluster, node);
            if in_grace
                && steps > newest
                && placements.iter().all(|placement| placement.node != *node)
            {
                return Err(format!("{node} is away since {since} with step {steps:?}"));
            }
        }
        Ok(())
    }
}

/// Whether the last generation, if there was one, had ranks on a node.
fn had_ranks(cluster: &Cluster, node: &NodeId) -> bool {
    cluster.coordinator.status_before.ranks.iter().any(|rank| rank.node == *node)
}

/// The newest step of healthy ranks on a node whose agent runs.
fn newest_step_on(cluster: &Cluster, node: &NodeId) -> Option<u64> {
    let healthy = cluster.processes.iter().filter(|process| process.is_healthy());
    healthy
        .filter(|process| {
            let agent = &cluster.agents[process.agent];
            agent.node == *node && agent.session.is_some() && agent.life == process.life
        })
        .filter_map(|process| cluster.good_step(process))
        .max()
}
