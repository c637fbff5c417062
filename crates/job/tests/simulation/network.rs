//! Connections between agents and the coordinator: slow, breaking, and at times out of order.
//!
//! Both ends learn of a break later, each at its own time, and what was on its way may still arrive:
//! so messages of an old connection come after the new one stands.

use baton_job::{
    engine,
    ids::Attachment,
    message::{Directive, Report},
    session,
    time::Time,
};

use crate::{
    agent::{Agent, AgentId},
    cluster::{Cluster, Happening},
    plan::Temper,
};

/// A connection of the whole history.
pub(crate) type ConnectionId = usize;

/// One try of an agent to reach the coordinator, and the stream if it did.
pub(crate) struct Connection {
    agent: AgentId,
    /// Which life of the agent opened it.
    agent_life: u64,
    /// Which life of the coordinator it leads to.
    coordinator_life: u64,
    /// Given with the hello.
    attachment: Option<Attachment>,
    stands: bool,
    opened_at: Time,
    /// Streams keep order: when the last message each way arrives.
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
            stands: true,
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
            self.schedule(at, Happening::Connected(id));
        }
    }

    pub(crate) fn connected(&mut self, id: ConnectionId) {
        if self.connections[id].stands && self.is_present(id) {
            self.drive(self.connections[id].agent, session::Event::Connected);
        }
    }

    /// Whether the agent that opened a connection still uses it.
    fn is_present(&self, id: ConnectionId) -> bool {
        let agent = &self.agents[self.connections[id].agent];
        agent.life == self.connections[id].agent_life && agent.connection == Some(id)
    }

    pub(crate) fn break_connection(&mut self, id: ConnectionId) {
        if !std::mem::replace(&mut self.connections[id].stands, false) {
            return;
        }
        for notice in [Happening::AgentNotices(id), Happening::CoordinatorNotices(id)] {
            let at = if self.rng.u8(0..4) == 0 { self.soon(0..=2_000) } else { self.soon(0..=20) };
            self.schedule(at, notice);
        }
    }

    pub(crate) fn agent_notices(&mut self, id: ConnectionId) {
        if self.is_present(id) {
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

    pub(crate) fn send_up(&mut self, agent: AgentId, report: Report) {
        let Some(id) = self.agents[agent].connection else { return };
        let arrives = self.travel(self.connections[id].up_until);
        for (at, keeps_order) in arrives {
            if keeps_order {
                self.connections[id].up_until = at;
            }
            self.schedule(at, Happening::Up(id, report.clone()));
        }
    }

    pub(crate) fn send_down(&mut self, attachment: Attachment, directive: Directive) {
        let Some(id) = self.stream_of(attachment) else { return };
        let arrives = self.travel(self.connections[id].down_until);
        for (at, keeps_order) in arrives {
            if keeps_order {
                self.connections[id].down_until = at;
            }
            self.schedule(at, Happening::Down(id, directive.clone()));
        }
    }

    /// The coordinator closes a stream.
    pub(crate) fn refuse(&mut self, attachment: Attachment) {
        if let Some(id) = self.stream_of(attachment) {
            self.break_connection(id);
        }
    }

    /// Since when an agent's present stream stands.
    pub(crate) fn in_touch_since(&self, agent: &Agent) -> Option<Time> {
        let connection = &self.connections[agent.connection?];
        connection.stands.then_some(connection.opened_at)
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

    /// When the copies of a message arrive, and whether later ones queue behind them.
    fn travel(&mut self, last: Time) -> Vec<(Time, bool)> {
        let temper = if self.is_calm() { Temper::HONEST } else { self.plan.temper };
        if self.rng.f64() < temper.loss {
            return Vec::new();
        }
        let slow = self.rng.u8(0..40) == 0;
        let usual = if slow { self.soon(1..=500) } else { self.soon(1..=10) };
        let mut arrives = vec![(usual.max(last), true)];
        if self.rng.f64() < temper.reordering {
            arrives = vec![(self.soon(1..=1_000), false)];
        }
        if self.rng.f64() < temper.duplication {
            arrives.push((self.soon(1..=1_000), false));
        }
        arrives
    }

    /// What was on its way when the connection broke arrives or does not.
    fn arrives(&mut self, id: ConnectionId) -> bool {
        self.connections[id].stands || self.rng.bool()
    }

    pub(crate) fn up(&mut self, id: ConnectionId, report: Report) {
        if self.connections[id].coordinator_life != self.coordinator.life || !self.arrives(id) {
            return;
        }
        let connection = &mut self.connections[id];
        let node = self.agents[connection.agent].node.clone();
        match (report, connection.attachment) {
            (Report::Hello(hello), None) if connection.stands => {
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
        if self.connections[id].agent_life == self.agents[agent].life && self.arrives(id) {
            self.directed(agent, directive);
        }
    }

    /// Everything starts anew: both ends of every stream are told.
    pub(crate) fn reset_all_connections(&mut self) {
        for id in 0..self.connections.len() {
            self.break_connection(id);
        }
    }
}
