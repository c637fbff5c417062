//! A message of an older generation, connection or process changes nothing but the count of such
//! messages.
//!
//! Copies of the state machines are given such messages regularly, because they are too rare in the histories.

use baton_job::{
    Generation, MeshSecret, Rank, Time,
    engine::{self, Engine, Status},
    exit::{Class, Failure, Outcome},
    ids::{Attachment, Incarnation, LocalRank},
    message::{
        AgentReport, Directive, Launch, LoaderReport, PauseState, RankMessage, RankReport, Restore,
        StateSource,
    },
    session::{self, Session},
};
use baton_recipe::{
    Step,
    guard::{BatchMark, Diagnosis, Divergence},
    progress::Progress,
};

use super::Invariant;
use crate::{
    agent::{Agent, AgentId},
    cluster::Cluster,
    fact::Fact,
};

/// Number of events between two probes.
const PROBE_EVERY: u64 = 24;

#[derive(Default)]
pub(super) struct StaleChangesNothing {
    events: u64,
}

impl Invariant for StaleChangesNothing {
    fn sentence(&self) -> &'static str {
        "a stale message changes nothing"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        if !matches!(fact, Fact::EngineMoved | Fact::SessionMoved(_)) {
            return Ok(());
        }
        self.events += 1;
        if !self.events.is_multiple_of(PROBE_EVERY) {
            return Ok(());
        }
        match fact {
            Fact::SessionMoved(id) => probe_session(cluster, *id),
            _ => probe_engine(cluster),
        }
    }
}

/// Reports that would change something if they were not stale.
fn report() -> Vec<RankReport> {
    vec![
        RankReport::Ready { address: "0/0".to_owned(), step: None },
        RankReport::Started { source: StateSource::fresh(), progress: Progress::default() },
        RankReport::Loader(LoaderReport { skipped: 1, ..LoaderReport::default() }),
        RankReport::Lost { detail: "stale".to_owned(), unreached: vec![Rank(1), Rank(7)] },
        RankReport::Diverged(diagnosis()),
        RankReport::Done { outcome: Outcome::Completed, digest: "stale".to_owned() },
        RankReport::Exited(failure()),
    ]
}

fn diagnosis() -> Diagnosis {
    Diagnosis {
        divergence: Divergence::LossNotFinite,
        step: Step(1),
        batch: BatchMark::default(),
        lr: 0.1,
        loss: None,
        gradient_norm: None,
        samples: Vec::new(),
        evaluated: None,
    }
}

fn failure() -> Failure {
    Failure { class: Class::BadInput, message: "stale".to_owned() }
}

fn probe_engine(cluster: &Cluster) -> Result<(), String> {
    let coordinator = &cluster.coordinator;
    let Some(engine) = &coordinator.engine else { return Ok(()) };
    let now = cluster.now;
    if engine.deadline().is_some_and(|deadline| deadline <= now) {
        return Ok(());
    }
    let older = Generation(coordinator.status.generation.0.saturating_sub(1));
    let status = engine.status();
    let probe = |event, counted| probe(engine, &status, now, event, counted);
    for agent in &cluster.agents {
        let present = cluster.attachment_of(agent).unwrap_or(Attachment(0));
        for report in report() {
            for (attachment, generation) in
                [(Attachment(0), coordinator.status.generation), (present, older)]
            {
                let report = report.clone();
                let report = AgentReport::Rank { generation, rank: Rank(0), report };
                let node = agent.node.clone();
                probe(engine::Event::Reported { node, attachment, report }, 1)?;
            }
        }
        let node = agent.node.clone();
        probe(engine::Event::Detached { node, attachment: Attachment(0) }, 0)?;
    }
    Ok(())
}

fn probe(
    engine: &Engine,
    status: &Status,
    now: Time,
    event: engine::Event,
    counted: u64,
) -> Result<(), String> {
    let mut copy = engine.clone();
    let actions = copy.handle(now, event.clone());
    let mut found = copy.status();
    let is_counted = found.stale_messages == status.stale_messages + counted;
    found.stale_messages = status.stale_messages;
    let unchanged = found == *status && copy.deadline() == engine.deadline();
    if actions.is_empty() && unchanged && is_counted {
        return Ok(());
    }
    Err(format!("{event:?} made the coordinator return {actions:?}, {:?}", copy.status()))
}

fn probe_session(cluster: &Cluster, id: AgentId) -> Result<(), String> {
    let agent = &cluster.agents[id];
    let now = agent.clock(cluster.now);
    let Some(session) = &agent.session else { return Ok(()) };
    if session.deadline().is_some_and(|deadline| deadline <= now) {
        return Ok(());
    }
    let mut events = directives(agent);
    for local_rank in 0..agent.slots.len() as u32 {
        let local_rank = LocalRank(local_rank);
        for report in report() {
            let message = RankMessage { generation: generation_of(agent), report };
            let incarnation = Incarnation(u64::MAX);
            events.push(session::Event::RankReported { local_rank, incarnation, message });
        }
        let (incarnation, failure) = (Incarnation(u64::MAX), failure());
        events.push(session::Event::RankExited { local_rank, incarnation, failure });
        let Some(pid) = agent.slots[local_rank.0 as usize] else { continue };
        let incarnation = cluster.processes[pid].incarnation;
        for report in report() {
            let message = RankMessage { generation: older(agent), report };
            events.push(session::Event::RankReported { local_rank, incarnation, message });
        }
    }
    events.into_iter().try_for_each(|event| probe_one_session(session, now, event))
}

fn generation_of(agent: &Agent) -> Generation {
    agent.launch.as_ref().map(|launch| launch.generation).unwrap_or_default()
}

/// A generation before the agent's; if the agent has none yet, one that never exists.
fn older(agent: &Agent) -> Generation {
    Generation(generation_of(agent).0.wrapping_sub(1))
}

fn directives(agent: &Agent) -> Vec<session::Event> {
    if agent.is_leaving || generation_of(agent) == Generation(0) {
        return Vec::new();
    }
    let generation = older(agent);
    let launch = Launch {
        generation,
        world_size: 1,
        ranks: vec![(Rank(0), LocalRank(0))],
        replace: vec![LocalRank(0)],
        restore: Restore::default(),
        pause: PauseState::default(),
    };
    let stale = [
        Directive::Launch(launch),
        Directive::Begin {
            generation,
            peers: ["0/0".to_owned()].into(),
            secret: MeshSecret::default(),
        },
        Directive::Checkpoint { generation },
        Directive::Pause(PauseState { number: 0, paused: true }),
        Directive::Drain { generation, reason: "stale".to_owned() },
    ];
    stale.into_iter().map(session::Event::Directive).collect()
}

fn probe_one_session(session: &Session, now: Time, event: session::Event) -> Result<(), String> {
    let mut copy = session.clone();
    let actions = copy.handle(now, event.clone());
    let unchanged = copy.reason() == session.reason() && copy.deadline() == session.deadline();
    let counted = copy.stale_messages() == session.stale_messages() + 1;
    if actions.is_empty() && unchanged && counted {
        return Ok(());
    }
    Err(format!("{event:?} made an agent return {actions:?}, {}", copy.reason()))
}
