//! Coordinator → agent.

use baton_job::{
    Generation, Rank,
    ids::LocalRank,
    message::{Directive, Hold, Launch, Restore},
};

use super::{Malformed, required};
use crate::v1::{self, coordinator_message::Message};

impl From<Directive> for v1::CoordinatorMessage {
    fn from(directive: Directive) -> Self {
        let message = match directive {
            Directive::Launch(launch) => Message::Launch(launch.into()),
            Directive::Begin { generation, peers } => {
                Message::Begin(v1::Begin { generation: generation.0, peers: peers.to_vec() })
            }
            Directive::Checkpoint { generation } => {
                Message::SaveNow(v1::SaveNow { generation: generation.0 })
            }
            Directive::Drain { generation, reason } => {
                Message::DrainNow(v1::DrainNow { generation: generation.0, reason })
            }
            Directive::Hold(hold) => Message::Hold(hold.into()),
            Directive::Heard { number } => Message::Heard(number),
            Directive::Warm { local_ranks } => {
                let local_ranks = local_ranks.into_iter().map(|local| local.0).collect();
                Message::Warm(v1::Warm { local_ranks })
            }
            Directive::Release { reason } => Message::Release(v1::Release { reason }),
            Directive::Dismiss { outcome } => {
                Message::Dismiss(v1::Dismiss { outcome: Some(outcome.into()) })
            }
        };
        Self { message: Some(message) }
    }
}

impl TryFrom<v1::CoordinatorMessage> for Directive {
    type Error = Malformed;

    /// `Welcome` is no directive: it answers `Hello`, and the agent's shell takes it first.
    fn try_from(wire: v1::CoordinatorMessage) -> Result<Self, Malformed> {
        Ok(match required("CoordinatorMessage", "message", wire.message)? {
            Message::Welcome(_) => {
                let problem = "is a second welcome; it is only the first answer on a stream";
                return Err(Malformed::new("CoordinatorMessage", "message", problem));
            }
            Message::Launch(launch) => Self::Launch(launch.into()),
            Message::Begin(v1::Begin { generation, peers }) => {
                Self::Begin { generation: Generation(generation), peers: peers.into() }
            }
            Message::SaveNow(v1::SaveNow { generation }) => {
                Self::Checkpoint { generation: Generation(generation) }
            }
            Message::DrainNow(v1::DrainNow { generation, reason }) => {
                Self::Drain { generation: Generation(generation), reason }
            }
            Message::Hold(hold) => Self::Hold(hold.into()),
            Message::Heard(number) => Self::Heard { number },
            Message::Warm(v1::Warm { local_ranks }) => {
                Self::Warm { local_ranks: local_ranks.into_iter().map(LocalRank).collect() }
            }
            Message::Release(v1::Release { reason }) => Self::Release { reason },
            Message::Dismiss(v1::Dismiss { outcome }) => {
                Self::Dismiss { outcome: required("Dismiss", "outcome", outcome)?.try_into()? }
            }
        })
    }
}

impl From<Hold> for v1::Hold {
    fn from(Hold { number, paused }: Hold) -> Self {
        Self { number, paused }
    }
}

impl From<v1::Hold> for Hold {
    fn from(v1::Hold { number, paused }: v1::Hold) -> Self {
        Self { number, paused }
    }
}

impl From<Launch> for v1::Launch {
    fn from(launch: Launch) -> Self {
        let Launch { generation, world_size, ranks, replace, restore, hold } = launch;
        let place =
            |(rank, local): (Rank, LocalRank)| v1::RankPlace { rank: rank.0, local_rank: local.0 };
        Self {
            generation: generation.0,
            world_size,
            ranks: ranks.into_iter().map(place).collect(),
            replace_local_ranks: replace.into_iter().map(|local| local.0).collect(),
            restore_not_before: restore.not_before.0,
            restore_path: restore.path,
            allow_recipe_change: restore.allow_recipe_change,
            hold: Some(hold.into()),
            rollbacks: restore.rollbacks.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<v1::Launch> for Launch {
    fn from(wire: v1::Launch) -> Self {
        let place = |place: v1::RankPlace| (Rank(place.rank), LocalRank(place.local_rank));
        Self {
            generation: Generation(wire.generation),
            world_size: wire.world_size,
            ranks: wire.ranks.into_iter().map(place).collect(),
            replace: wire.replace_local_ranks.into_iter().map(LocalRank).collect(),
            restore: Restore {
                not_before: Generation(wire.restore_not_before),
                path: wire.restore_path,
                allow_recipe_change: wire.allow_recipe_change,
                rollbacks: wire.rollbacks.into_iter().map(Into::into).collect(),
            },
            hold: wire.hold.unwrap_or_default().into(),
        }
    }
}
