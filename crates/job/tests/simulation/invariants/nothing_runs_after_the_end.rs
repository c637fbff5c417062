//! No rank process runs after its agent has exited.

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct NothingRunsAfterTheEnd;

impl Invariant for NothingRunsAfterTheEnd {
    fn sentence(&self) -> &'static str {
        "nothing runs after the end"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let Fact::AgentLeft(id, outcome) = fact else { return Ok(()) };
        let life = cluster.agents[*id].life;
        let left = |pid: &usize| {
            let process = &cluster.processes[*pid];
            process.alive && (process.agent, process.life) == (*id, life)
        };
        match (0..cluster.processes.len()).find(left) {
            Some(pid) => {
                Err(format!("agent {id} exited ({outcome}), but its process {pid} still runs"))
            }
            None => Ok(()),
        }
    }
}
