//! Connections between agents and the coordinator: with delays, breaks, and sometimes out of order.
//!
//! Each end detects a broken connection at a different time, and messages in flight may still arrive. So messages of an
//! old connection can arrive after a new one was opened.

use std::time::Duration;

use baton_job::{
    engine,
    ids::Attachment,
    message::{AgentReport, Directive},
    session,
    time::Time,
};

use crate::{
    agent::{Agent, AgentId},
    cluster::{Cluster, SimEvent},
    plan::NetworkFaults,
};

/// Time of an agent's first heartbeat over a connection.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Index of a connection.
pub(crate) type ConnectionId = usize;

/// One attempt of an agent to connect to the coordinator, and the stream if it succeeded.
pub(crate) struct Connection {
    agent: AgentId,
    /// Start number of the agent that opened it.
    agent_life: u64,
    /// Start number of the coordinator it connects to.
    coordinator_life: u64,
    /// Assigned when the hello is received.
    attachment: Option<Attachment>,
    is_open: bool,
    opened_at: Time,
    /// When the last message in each direction arrives, because streams keep order.
    up_until: Time,
    down_until: Time,
}

impl Cluster {
    pub(crate) fn connect(&mut self, agent: AgentId) {
        let id = self.connections.len();
        self.connections.push(Connection {
            agent,
            agent_life: self.agents[agent].life,
            coordinator_life: self.coordinator.life,
            attachment: None,
            is_open: true,
            opened_at: self.now,
            up_until: self.now,
            down_until: self.now,
        });
        self.agents[agent].connection = Some(id);
        if self.coordinator.engine.is_none() || self.agents[agent].cut_off_until > self.now {
            self.break_connection(id);
        } else {
            let at = self.soon(1..=20);
            self.connections[id].up_until = at;
            self.schedule(at, SimEvent::Connected(id));
        }
    }

    pub(crate) fn connected(&mut self, id: ConnectionId) {
        if self.connections[id].is_open && self.is_current(id) {
            self.drive(self.connections[id].agent, session::Event::Connected);
            self.schedule(self.now.after(HEARTBEAT_INTERVAL), SimEvent::AgentHeartbeat(id));
        }
    }

    /// The first heartbeat over a connection; its answer shows that somebody reads what the agent sends.
    pub(crate) fn agent_heartbeat(&mut self, id: ConnectionId) {
        if self.connections[id].is_open && self.is_current(id) {
            self.drive(self.connections[id].agent, session::Event::MachineStats(None));
        }
    }

    /// Whether the agent that opened a connection still uses it.
    fn is_current(&self, id: ConnectionId) -> bool {
        let agent = &self.agents[self.connections[id].agent];
        agent.life == self.connections[id].agent_life && agent.connection == Some(id)
    }

    pub(crate) fn break_connection(&mut self, id: ConnectionId) {
        if !std::mem::replace(&mut self.connections[id].is_open, false) {
            return;
        }
        for notice in [SimEvent::AgentNotices(id), SimEvent::CoordinatorNotices(id)] {
            let at = if self.rng.u8(0..4) == 0 { self.soon(0..=2_000) } else { self.soon(0..=20) };
            self.schedule(at, notice);
        }
    }

    pub(crate) fn agent_notices(&mut self, id: ConnectionId) {
        if self.is_current(id) {
            self.agents[self.connections[id].agent].connection = None;
            self.drive(self.connections[id].agent, session::Event::Disconnected);
        }
    }

    pub(crate) fn coordinator_notices(&mut self, id: ConnectionId) {
        let connection = &self.connections[id];
        if let Some(attachment) = connection.attachment
            && connection.coordinator_life == self.coordinator.life
        {
            let node = self.agents[connection.agent].node.clone();
            self.coordinate(engine::Event::Detached { node, attachment });
        }
    }

    pub(crate) fn send_up(&mut self, agent: AgentId, report: AgentReport) {
        let Some(id) = self.agents[agent].connection else { return };
        let deliveries = self.delivery_times(self.connections[id].up_until);
        for (at, keeps_order) in deliveries {
            if keeps_order {
                self.connections[id].up_until = at;
            }
            self.schedule(at, SimEvent::Up(id, report.clone()));
        }
    }

    pub(crate) fn send_down(&mut self, attachment: Attachment, directive: Directive) {
        let Some(id) = self.stream_of(attachment) else { return };
        let deliveries = self.delivery_times(self.connections[id].down_until);
        for (at, keeps_order) in deliveries {
            if keeps_order {
                self.connections[id].down_until = at;
            }
            self.schedule(at, SimEvent::Down(id, directive.clone()));
        }
    }

    /// The coordinator closes a stream.
    pub(crate) fn refuse(&mut self, attachment: Attachment) {
        if let Some(id) = self.stream_of(attachment) {
            self.break_connection(id);
        }
    }

    /// When an agent's present stream was opened.
    pub(crate) fn connected_since(&self, agent: &Agent) -> Option<Time> {
        let connection = &self.connections[agent.connection?];
        connection.is_open.then_some(connection.opened_at)
    }

    /// The attachment of an agent's present stream.
    pub(crate) fn attachment_of(&self, agent: &Agent) -> Option<Attachment> {
        let connection = &self.connections[agent.connection?];
        connection.attachment.filter(|_| connection.coordinator_life == self.coordinator.life)
    }

    fn stream_of(&self, attachment: Attachment) -> Option<ConnectionId> {
        self.connections.iter().rposition(|connection| {
            connection.attachment == Some(attachment)
                && connection.coordinator_life == self.coordinator.life
        })
    }

    /// When the copies of a message arrive, and whether later messages must wait for them.
    fn delivery_times(&mut self, last: Time) -> Vec<(Time, bool)> {
        let network_faults =
            if self.is_calm() { NetworkFaults::NONE } else { self.plan.network_faults };
        if self.rng.f64() < network_faults.loss {
            return Vec::new();
        }
        let slow = self.rng.u8(0..40) == 0;
        let usual = if slow { self.soon(1..=500) } else { self.soon(1..=10) };
        let mut deliveries = vec![(usual.max(last), true)];
        if self.rng.f64() < network_faults.reordering {
            deliveries = vec![(self.soon(1..=1_000), false)];
        }
        if self.rng.f64() < network_faults.duplication {
            deliveries.push((self.soon(1..=1_000), false));
        }
        deliveries
    }

    /// Whether a message arrives: random for messages in flight on a broken connection.
    fn is_delivered(&mut self, id: ConnectionId) -> bool {
        self.connections[id].is_open || self.rng.bool()
    }

    pub(crate) fn up(&mut self, id: ConnectionId, report: AgentReport) {
        if self.connections[id].coordinator_life != self.coordinator.life || !self.is_delivered(id)
        {
            return;
        }
        let connection = &mut self.connections[id];
        let node = self.agents[connection.agent].node.clone();
        match (report, connection.attachment) {
            (AgentReport::Hello(hello), None) if connection.is_open => {
                let attachment = self.coordinator.next_attachment();
                connection.attachment = Some(attachment);
                self.coordinate(engine::Event::Attached { attachment, hello });
            }
            // The first message must be hello.
            (_, None) => {}
            (report, Some(attachment)) => {
                self.coordinate(engine::Event::Reported { node, attachment, report });
            }
        }
    }

    pub(crate) fn down(&mut self, id: ConnectionId, directive: Directive) {
        let agent = self.connections[id].agent;
        if self.connections[id].agent_life == self.agents[agent].life && self.is_delivered(id) {
            self.receive_directive(agent, directive);
        }
    }

    /// Breaks every connection.
    pub(crate) fn reset_all_connections(&mut self) {
        for id in 0..self.connections.len() {
            self.break_connection(id);
        }
    }
}
