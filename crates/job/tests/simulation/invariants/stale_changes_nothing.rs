//! A message of an older generation, connection or process changes nothing but the count of such
//! messages.
//!
//! Now and then a copy of a machine is fed one, as the history itself brings them about too rarely.

use baton_job::{
    Generation, Rank, Time,
    engine::{self, Engine},
    exit::{Class, Failure, Outcome},
    ids::{Attachment, Incarnation, LocalRank},
    message::{
        Directive, Hold, Launch, LoaderNews, RankNews, RankSays, Report, Restore, StateSource,
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

/// Events of a machine between two probes.
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

/// News that would matter if they were fresh.
fn news() -> Vec<RankNews> {
    vec![
        RankNews::Ready { address: "0/0".to_owned(), step: None },
        RankNews::Started { source: StateSource::Fresh, progress: Progress::default() },
        RankNews::Loader(LoaderNews { skipped: 1, ..LoaderNews::default() }),
        RankNews::Lost { detail: "stale".to_owned() },
        RankNews::Diverged(diagnosis()),
        RankNews::Done { outcome: Outcome::Completed, digest: "stale".to_owned() },
        RankNews::Exited(failure()),
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
    for agent in &cluster.agents {
        let present = cluster.attachment_of(agent).unwrap_or(Attachment(0));
        for news in news() {
            for (attachment, generation) in
                [(Attachment(0), coordinator.status.generation), (present, older)]
            {
                let news = news.clone();
                let report = Report::Rank { generation, rank: Rank(0), news };
                let node = agent.node.clone();
                probe(engine, now, engine::Event::Reported { node, attachment, report }, 1)?;
            }
        }
        let node = agent.node.clone();
        probe(engine, now, engine::Event::Detached { node, attachment: Attachment(0) }, 0)?;
    }
    Ok(())
}

fn probe(engine: &Engine, now: Time, event: engine::Event, counted: u64) -> Result<(), String> {
    let mut copy = engine.clone();
    let told = format!("{event:?}");
    let actions = copy.handle(now, event);
    let mut expected = engine.status();
    expected.stale_messages += counted;
    if actions.is_empty() && copy.status() == expected && copy.deadline() == engine.deadline() {
        return Ok(());
    }
    Err(format!("{told} led the coordinator to {actions:?}, {:?}", copy.status()))
}

fn probe_session(cluster: &Cluster, id: AgentId) -> Result<(), String> {
    let agent = &cluster.agents[id];
    let now = agent.clock(cluster.now);
    let Some(session) = &agent.session else { return Ok(()) };
    if session.deadline().is_some_and(|deadline| deadline <= now) {
        return Ok(());
    }
    let mut events = directives(agent);
    for local_rank in 0..agent.places.len() as u32 {
        let local_rank = LocalRank(local_rank);
        for news in news() {
            let says = RankSays { generation: generation_of(agent), news };
            let incarnation = Incarnation(u64::MAX);
            events.push(session::Event::RankSaid { local_rank, incarnation, says });
        }
        let (incarnation, failure) = (Incarnation(u64::MAX), failure());
        events.push(session::Event::RankExited { local_rank, incarnation, failure });
        let Some(pid) = agent.places[local_rank.0 as usize] else { continue };
        let incarnation = cluster.processes[pid].incarnation;
        for news in news() {
            let says = RankSays { generation: older(agent), news };
            events.push(session::Event::RankSaid { local_rank, incarnation, says });
        }
    }
    events.into_iter().try_for_each(|event| probe_one_session(session, now, event))
}

fn generation_of(agent: &Agent) -> Generation {
    agent.launch.as_ref().map(|launch| launch.generation).unwrap_or_default()
}

/// A generation before the agent's; if it knows none yet, one that will never be.
fn older(agent: &Agent) -> Generation {
    Generation(generation_of(agent).0.wrapping_sub(1))
}

fn directives(agent: &Agent) -> Vec<session::Event> {
    if agent.leaves || generation_of(agent) == Generation(0) {
        return Vec::new();
    }
    let generation = older(agent);
    let launch = Launch {
        generation,
        world_size: 1,
        ranks: vec![(Rank(0), LocalRank(0))],
        replace: vec![LocalRank(0)],
        restore: Restore::default(),
        hold: Hold::default(),
    };
    let stale = [
        Directive::Launch(launch),
        Directive::Begin { generation, peers: ["0/0".to_owned()].into() },
        Directive::Checkpoint { generation },
        Directive::Hold(Hold { number: 0, paused: true }),
        Directive::Drain { generation, reason: "stale".to_owned() },
    ];
    stale.into_iter().map(session::Event::Directed).collect()
}

fn probe_one_session(session: &Session, now: Time, event: session::Event) -> Result<(), String> {
    let mut copy = session.clone();
    let told = format!("{event:?}");
    let actions = copy.handle(now, event);
    let unchanged = copy.reason() == session.reason() && copy.deadline() == session.deadline();
    let counted = copy.stale_messages() == session.stale_messages() + 1;
    if actions.is_empty() && unchanged && counted {
        return Ok(());
    }
    Err(format!("{told} led an agent to {actions:?}, {}", copy.reason()))
}
