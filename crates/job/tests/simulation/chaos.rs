//! Faults, until the calm phase.

use std::time::Duration;

use baton_job::{engine, session, time::Time};

use crate::{
    agent::AgentId,
    cluster::{Cluster, SimEvent},
    fact::Fact,
    process::{Pid, bad_input, killed},
};

type Fault = fn(&mut Cluster);

/// Faults, each with weight and name.
const FAULTS: &[(u32, &str, Fault)] = &[
    (60, "a rank is killed", |cluster| {
        cluster.with_process(|cluster, pid| cluster.end_process(pid, killed()));
    }),
    (20, "a rank hangs", |cluster| cluster.with_process(Cluster::hang)),
    (1, "a rank finds bad input", |cluster| {
        cluster.with_process(|cluster, pid| cluster.end_process(pid, bad_input()));
    }),
    (4, "a newcomer may find bad input", |cluster| {
        cluster.with_process(|cluster, pid| {
            if cluster.processes[pid].step.is_none() {
                cluster.end_process(pid, bad_input());
            }
        });
    }),
    (40, "a connection breaks", |cluster| {
        cluster.with_agent(|cluster, id| {
            if let Some(connection) = cluster.agents[id].connection {
                cluster.break_connection(connection);
            }
        });
    }),
    (20, "a node is cut off", |cluster| {
        cluster.with_agent(|cluster, id| {
            cluster.agents[id].cut_off_until = cluster.soon(500..=8_000);
            if let Some(connection) = cluster.agents[id].connection {
                cluster.break_connection(connection);
            }
        });
    }),
    (20, "the coordinator crashes", Cluster::coordinator_crashes),
    (10, "the coordinator's machine is lost", Cluster::coordinator_is_lost),
    (20, "the coordinator crashes between two actions", |cluster| {
        cluster.coordinator.crashes_after = Some(cluster.rng.usize(0..6));
    }),
    (6, "the store refuses to be written", |cluster| {
        cluster.coordinator.store_refuses_until = cluster.soon(500..=30_000);
    }),
    (20, "an agent crashes", |cluster| {
        cluster.with_agent(|cluster, id| {
            cluster.agent_crashes(id);
            cluster.restart_agent_after(id, 50..=10_000);
        });
    }),
    (6, "every agent crashes", |cluster| {
        for id in cluster.running_agents() {
            cluster.agent_crashes(id);
            cluster.restart_agent_after(id, 50..=3_000);
        }
    }),
    (3, "a node receives a shutdown signal", |cluster| {
        cluster.with_agent(Cluster::shutdown_signal)
    }),
    (1, "a node receives two shutdown signals", |cluster| {
        cluster.with_agent(|cluster, id| {
            cluster.shutdown_signal(id);
            cluster.drive(
                id,
                session::Event::ShutdownSignal { reason: "now".to_owned(), is_orphan: false },
            );
        });
    }),
    (20, "a checkpoint is requested", |cluster| cluster.coordinate(engine::Event::Checkpoint)),
    (6, "a pause is requested", |cluster| {
        cluster.coordinate(engine::Event::Pause { reason: "a user".to_owned() });
    }),
    (12, "a resume is requested", |cluster| cluster.coordinate(engine::Event::Resume)),
    (4, "a drain is requested", |cluster| {
        cluster.coordinate(engine::Event::Drain { reason: "a user".to_owned() });
    }),
    (2, "a drain is requested while no agent is connected", |cluster| {
        for id in cluster.running_agents() {
            if let Some(connection) = cluster.agents[id].connection {
                cluster.break_connection(connection);
                cluster.coordinator_notices(connection);
            }
        }
        cluster.coordinate(engine::Event::Drain { reason: "a user".to_owned() });
    }),
    (1, "a stop is requested", |cluster| cluster.coordinate(engine::Event::Stop)),
];

impl Cluster {
    pub(crate) fn schedule_fault(&mut self) {
        let every = self.plan.fault_every_ms;
        let at = self.soon(1..=2 * every);
        self.schedule(at, SimEvent::Fault);
    }

    pub(crate) fn fault(&mut self) {
        if self.is_calm() {
            return;
        }
        self.schedule_fault();
        if self.coordinator.job_is_over() {
            // The user runs the same command again: a job that did not complete continues.
            if self.rng.u8(0..3) == 0 {
                self.coordinator_crashes();
            }
            return;
        }
        let sum: u32 = FAULTS.iter().map(|(weight, ..)| weight).sum();
        let mut at = self.rng.u32(0..sum);
        for (weight, name, fault) in FAULTS {
            if at < *weight {
                self.log(|| format!("FAULT: {name}"));
                self.facts.push(Fact::Fault(name));
                return fault(self);
            }
            at -= weight;
        }
    }

    /// Faults stop; whatever is down is started, and every connection is opened again.
    pub(crate) fn calm_down(&mut self) {
        self.log(|| "CALM".to_owned());
        self.calm_since = Some(self.now);
        self.coordinator.crashes_after = None;
        self.coordinator.store_refuses_until = self.now;
        self.reset_all_connections();
        self.coordinator_restarts();
        // A paused job would never end. A new coordinator may learn of the pause only from its agents.
        for at in [self.now, self.now.after(Duration::from_secs(10))] {
            self.schedule(at, SimEvent::Resumed);
        }
        for id in 0..self.agents.len() {
            self.agents[id].cut_off_until = Time(0);
            self.restart_agent_after(id, 0..=500);
        }
        // A hanging rank is detected by others of its generation that still need it; without such ranks it is ended
        // here.
        for pid in 0..self.processes.len() {
            let generation = self.processes[pid].generation();
            let is_needed = self.processes.iter().any(|other| {
                let is_there = other.is_healthy() && other.generation() == generation;
                is_there && !self.has_finished(other)
            });
            if self.processes[pid].hangs && !is_needed {
                self.end_process(pid, killed());
            }
        }
    }

    fn with_process(&mut self, fault: impl FnOnce(&mut Self, Pid)) {
        let alive: Vec<Pid> =
            (0..self.processes.len()).filter(|pid| self.processes[*pid].is_healthy()).collect();
        if let Some(pid) = self.rng.choice(alive) {
            fault(self, pid);
        }
    }

    fn with_agent(&mut self, fault: impl FnOnce(&mut Self, AgentId)) {
        if let Some(id) = self.rng.choice(self.running_agents()) {
            fault(self, id);
        }
    }

    fn running_agents(&self) -> Vec<AgentId> {
        (0..self.agents.len()).filter(|id| self.agents[*id].session.is_some()).collect()
    }
}
