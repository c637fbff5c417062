//! Agent → coordinator.

use baton_job::{
    Generation, NodeId, Rank,
    exit::Outcome,
    ids::LocalRank,
    message::{Hello, Holding, RankNews, RankPhase, Report, Restored, SaveProblem, StateSource},
};
use baton_recipe::{Epoch, Step};

use super::{Malformed, all, known, required};
use crate::v1::{
    self, agent_message::Message, held_rank::Phase, rank_report::News, rank_started::Source,
};

/// The version told in `Hello`: all packages of the workspace share it.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Whether an agent is of this build's version. It says so on the wire alone: to the coordinator's
/// rules all agents are alike.
///
/// # Errors
/// The agent is of another version.
pub fn check_version(hello: &v1::Hello) -> Result<(), Malformed> {
    if hello.version == VERSION {
        return Ok(());
    }
    let problem =
        format!("is {:?} but the coordinator's is {VERSION:?}: install the same", hello.version);
    Err(Malformed::new("Hello", "version", problem))
}

impl From<Report> for v1::AgentMessage {
    fn from(report: Report) -> Self {
        let message = match report {
            Report::Hello(hello) => Message::Hello(hello.into()),
            Report::Rank { generation, rank, news } => Message::Rank(v1::RankReport {
                generation: generation.0,
                rank: rank.0,
                news: Some(news.into()),
            }),
            Report::DrainRequested { reason, seconds_left } => {
                Message::DrainRequested(v1::DrainRequested { reason, seconds_left })
            }
            Report::Warm { local_rank } => Message::Warm(local_rank.0),
            Report::WarmFailed { local_rank, failure } => Message::WarmFailed(v1::WarmFailed {
                local_rank: local_rank.0,
                failure: Some(failure.into()),
            }),
            Report::Advised { reason } => Message::Advised(v1::Advised { reason }),
            Report::GpuWarning { message } => Message::GpuWarning(v1::GpuWarning { message }),
            Report::Beat(beat) => Message::Beat(beat.into()),
        };
        Self { message: Some(message) }
    }
}

impl TryFrom<v1::AgentMessage> for Report {
    type Error = Malformed;

    fn try_from(wire: v1::AgentMessage) -> Result<Self, Malformed> {
        Ok(match required("AgentMessage", "message", wire.message)? {
            Message::Hello(hello) => Self::Hello(hello.try_into()?),
            Message::Rank(v1::RankReport { generation, rank, news }) => Self::Rank {
                generation: Generation(generation),
                rank: Rank(rank),
                news: required("RankReport", "news", news)?.try_into()?,
            },
            Message::DrainRequested(v1::DrainRequested { reason, seconds_left }) => {
                Self::DrainRequested { reason, seconds_left }
            }
            Message::Warm(local_rank) => Self::Warm { local_rank: LocalRank(local_rank) },
            Message::WarmFailed(v1::WarmFailed { local_rank, failure }) => Self::WarmFailed {
                local_rank: LocalRank(local_rank),
                failure: required("WarmFailed", "failure", failure)?.try_into()?,
            },
            Message::Advised(v1::Advised { reason }) => Self::Advised { reason },
            Message::GpuWarning(v1::GpuWarning { message }) => Self::GpuWarning { message },
            Message::Beat(beat) => Self::Beat(beat.try_into()?),
        })
    }
}

impl From<Hello> for v1::Hello {
    fn from(Hello { node, slots, holding }: Hello) -> Self {
        let holding = holding.map(Into::into);
        Self { node_id: node.0, slots, holding, version: VERSION.to_owned() }
    }
}

impl TryFrom<v1::Hello> for Hello {
    type Error = Malformed;

    fn try_from(wire: v1::Hello) -> Result<Self, Malformed> {
        let v1::Hello { node_id, slots, holding, version: _ } = wire;
        if node_id.is_empty() {
            return Err(Malformed::new("Hello", "node_id", "is missing"));
        }
        let holding = holding.map(TryInto::try_into).transpose()?;
        Ok(Self { node: NodeId(node_id), slots, holding })
    }
}

impl From<Holding> for v1::Holding {
    fn from(Holding { generation, ranks, commit }: Holding) -> Self {
        let ranks = ranks.into_iter().map(Into::into).collect();
        Self { generation: generation.0, ranks, commit: commit.map(Into::into) }
    }
}

impl TryFrom<v1::Holding> for Holding {
    type Error = Malformed;

    fn try_from(v1::Holding { generation, ranks, commit }: v1::Holding) -> Result<Self, Malformed> {
        let commit = commit.map(TryInto::try_into).transpose()?;
        Ok(Self { generation: Generation(generation), ranks: all(ranks)?, commit })
    }
}

impl From<(Rank, RankPhase)> for v1::HeldRank {
    fn from((rank, phase): (Rank, RankPhase)) -> Self {
        let phase = match phase {
            RankPhase::Joining => Phase::Joining(v1::Empty {}),
            RankPhase::Ready { address, step } => Phase::Ready(ready(address, step)),
            RankPhase::Meeting => Phase::Meeting(v1::Empty {}),
            RankPhase::Training => Phase::Training(v1::Empty {}),
            RankPhase::Waiting => Phase::Waiting(v1::Empty {}),
            RankPhase::Diverged(diagnosis) => Phase::Diverged(diagnosis.into()),
            RankPhase::Done { outcome, digest } => Phase::Done(done(outcome, digest)),
        };
        Self { rank: rank.0, phase: Some(phase) }
    }
}

impl TryFrom<v1::HeldRank> for (Rank, RankPhase) {
    type Error = Malformed;

    fn try_from(v1::HeldRank { rank, phase }: v1::HeldRank) -> Result<Self, Malformed> {
        let phase = match required("HeldRank", "phase", phase)? {
            Phase::Joining(v1::Empty {}) => RankPhase::Joining,
            Phase::Ready(v1::RankReady { address, step }) => {
                RankPhase::Ready { address, step: step.map(Step) }
            }
            Phase::Meeting(v1::Empty {}) => RankPhase::Meeting,
            Phase::Training(v1::Empty {}) => RankPhase::Training,
            Phase::Waiting(v1::Empty {}) => RankPhase::Waiting,
            Phase::Diverged(diagnosis) => RankPhase::Diverged(diagnosis.try_into()?),
            Phase::Done(v1::RankDone { outcome, digest }) => {
                RankPhase::Done { outcome: outcome_of_rank(outcome)?, digest }
            }
        };
        Ok((Rank(rank), phase))
    }
}

impl From<RankNews> for News {
    fn from(news: RankNews) -> Self {
        match news {
            RankNews::Ready { address, step } => Self::Ready(ready(address, step)),
            RankNews::Met => Self::Met(v1::Empty {}),
            RankNews::Started { source, progress } => Self::Started(v1::RankStarted {
                source: Some(source.into()),
                progress: Some(progress.into()),
            }),
            RankNews::Stepped(step) => Self::Stepped(step.into()),
            RankNews::Evaluated { step, epoch, accuracy, ema, extent } => {
                Self::Evaluated(v1::Evaluated {
                    step: step.0,
                    epoch: epoch.0,
                    accuracy: Some(accuracy.into()),
                    ema: ema.map(Into::into),
                    extent: v1::Extent::from(extent).into(),
                })
            }
            RankNews::Diverged(diagnosis) => Self::Diverged(diagnosis.into()),
            RankNews::EndsEarly { reason } => Self::EndsEarly(reason),
            RankNews::Loader(news) => Self::Loader(news.into()),
            RankNews::Pulse(pulse) => Self::Pulse(pulse.into()),
            RankNews::Saved(commit) => Self::Saved(commit.into()),
            RankNews::SaveWaits { step, behind, seconds } => {
                Self::SaveWaits(v1::SaveWaits { step: step.0, behind: behind.0, seconds })
            }
            RankNews::Stopping { step } => Self::Stopping(step.0),
            RankNews::Copied { step } => Self::Copied(step.0),
            RankNews::SaveFailed(SaveProblem { message, fence }) => {
                Self::SaveFailed(v1::SaveProblem { message, fence: fence.map(|fence| fence.0) })
            }
            RankNews::Lost { detail } => Self::Lost(detail),
            RankNews::Done { outcome, digest } => Self::Done(done(outcome, digest)),
            RankNews::Exited(failure) => Self::Exited(failure.into()),
        }
    }
}

impl TryFrom<News> for RankNews {
    type Error = Malformed;

    fn try_from(news: News) -> Result<Self, Malformed> {
        Ok(match news {
            News::Ready(v1::RankReady { address, step }) => {
                Self::Ready { address, step: step.map(Step) }
            }
            News::Met(v1::Empty {}) => Self::Met,
            News::Started(v1::RankStarted { source, progress }) => Self::Started {
                source: required("RankStarted", "source", source)?.into(),
                progress: required("RankStarted", "progress", progress)?.try_into()?,
            },
            News::Stepped(step) => Self::Stepped(step.into()),
            News::Evaluated(wire) => Self::Evaluated {
                step: Step(wire.step),
                epoch: Epoch(wire.epoch),
                accuracy: required("Evaluated", "accuracy", wire.accuracy)?.into(),
                ema: wire.ema.map(Into::into),
                extent: known::<v1::Extent>("Evaluated", "extent", wire.extent)?.try_into()?,
            },
            News::Diverged(diagnosis) => Self::Diverged(diagnosis.try_into()?),
            News::EndsEarly(reason) => Self::EndsEarly { reason },
            News::Loader(news) => Self::Loader(news.into()),
            News::Pulse(pulse) => Self::Pulse(pulse.try_into()?),
            News::Saved(checkpoint) => Self::Saved(checkpoint.try_into()?),
            News::SaveWaits(v1::SaveWaits { step, behind, seconds }) => {
                Self::SaveWaits { step: Step(step), behind: Step(behind), seconds }
            }
            News::Stopping(step) => Self::Stopping { step: Step(step) },
            News::Copied(step) => Self::Copied { step: Step(step) },
            News::SaveFailed(v1::SaveProblem { message, fence }) => {
                Self::SaveFailed(SaveProblem { message, fence: fence.map(Generation) })
            }
            News::Lost(detail) => Self::Lost { detail },
            News::Done(v1::RankDone { outcome, digest }) => {
                Self::Done { outcome: outcome_of_rank(outcome)?, digest }
            }
            News::Exited(failure) => Self::Exited(failure.try_into()?),
        })
    }
}

impl From<StateSource> for Source {
    fn from(source: StateSource) -> Self {
        match source {
            StateSource::Fresh => Self::Fresh(v1::Empty {}),
            StateSource::Survivor { rank } => Self::SurvivorRank(rank.0),
            StateSource::Checkpoint(restored) => {
                let Restored { name, skipped, changes, world_size, age_seconds, lr, seconds } =
                    restored;
                Self::Checkpoint(v1::RestoredCheckpoint {
                    name,
                    skipped,
                    changes,
                    world_size,
                    age_seconds,
                    lr,
                    seconds,
                })
            }
        }
    }
}

impl From<Source> for StateSource {
    fn from(source: Source) -> Self {
        match source {
            Source::Fresh(v1::Empty {}) => Self::Fresh,
            Source::SurvivorRank(rank) => Self::Survivor { rank: Rank(rank) },
            Source::Checkpoint(wire) => Self::Checkpoint(Restored {
                name: wire.name,
                skipped: wire.skipped,
                changes: wire.changes,
                world_size: wire.world_size,
                age_seconds: wire.age_seconds,
                lr: wire.lr,
                seconds: wire.seconds,
            }),
        }
    }
}

fn ready(address: String, step: Option<Step>) -> v1::RankReady {
    v1::RankReady { address, step: step.map(|step| step.0) }
}

fn done(outcome: Outcome, digest: String) -> v1::RankDone {
    v1::RankDone { outcome: Some(outcome.into()), digest }
}

fn outcome_of_rank(outcome: Option<v1::Outcome>) -> Result<Outcome, Malformed> {
    required("RankDone", "outcome", outcome)?.try_into()
}
