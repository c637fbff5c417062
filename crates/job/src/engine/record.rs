//! What the coordinator's journal holds, and the machine rebuilt from it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Engine, Evaluation, Incident, Phase, Recovery, World};
use crate::{
    JobSpec,
    exit::Outcome,
    ids::{Generation, JobId},
    message::{Commit, Restore},
    plan::Placement,
    time::Time,
};

/// What a job began with; it never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The job's identity.
    pub job: JobId,
    /// [`JobSpec::recipe_hash`] of its recipe.
    pub recipe_hash: String,
    /// Above every generation found in the checkpoint store, so that this job's commits are the
    /// newest there.
    pub first_generation: Generation,
    /// Where state comes from when no rank holds any.
    pub restore: Restore,
}

/// One entry of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// The job was created.
    Created(Origin),
    /// A generation was opened.
    Opened {
        /// Its number.
        generation: Generation,
        /// Its ranks.
        placements: Vec<Placement>,
    },
    /// A checkpoint was committed.
    Saved(Commit),
    /// An evaluation was told of.
    Evaluated {
        /// In which generation.
        generation: Generation,
        /// What it found.
        evaluation: Evaluation,
    },
    /// A recovery came to its end, or to that of its generation.
    Recovery(Recovery),
    /// Training went wrong, and what is done about it.
    Diverged(Incident),
    /// For how long nodes have been attached so far.
    Metered(Duration),
    /// A user let training stand still.
    Paused {
        /// Why, in words.
        reason: String,
        /// What the meter showed.
        at: Duration,
    },
    /// A user let training go on.
    Resumed {
        /// What the meter showed.
        at: Duration,
    },
    /// The job ended; if it [can go on](Outcome::is_resumable), a restart takes it up again.
    Ended(Outcome),
}

impl Engine {
    /// Rebuilds the machine from the journal of a dead coordinator; `None` if it holds no job.
    #[must_use]
    pub fn replay(spec: &JobSpec, records: &[Record], now: Time) -> Option<Self> {
        let mut engine = None;
        let mut open_world = None;
        for record in records {
            match (record, &mut engine) {
                (Record::Created(origin), _) => {
                    engine = Some(Self::blank(spec, origin.clone(), now));
                    open_world = None;
                }
                (_, None) => {}
                (Record::Opened { generation, placements }, Some(engine)) => {
                    engine.generation = *generation;
                    open_world = Some(placements.clone());
                }
                (Record::Saved(commit), Some(engine)) => engine.replay_commit(commit),
                (Record::Evaluated { generation, evaluation }, Some(engine)) => {
                    engine.take_evaluation(*generation, *evaluation);
                }
                (Record::Recovery(recovery), Some(engine)) => {
                    engine.recoveries.replay(recovery);
                }
                (Record::Diverged(incident), Some(engine)) => engine.remember(incident),
                (Record::Metered(spent), Some(engine)) => engine.replay_meter(*spent),
                (Record::Paused { reason, at }, Some(engine)) => {
                    engine.replay_pause(now, reason, *at);
                }
                (Record::Resumed { at }, Some(engine)) => {
                    engine.replay_resume(*at);
                }
                (Record::Ended(outcome), Some(engine)) => {
                    open_world = None;
                    (engine.phase, engine.reason) = match outcome.is_resumable() {
                        true => (Phase::Gathering, "waiting for agents".to_owned()),
                        false => (Phase::Ended { outcome: outcome.clone() }, outcome.to_string()),
                    };
                }
            }
        }
        let mut engine = engine?;
        if let Some(placements) = open_world {
            let world = World::unheard(placements);
            let until = now.after(engine.policy.node_grace);
            engine.reason = "the coordinator restarted and waits for its agents".to_owned();
            engine.phase = Phase::Reattaching { world, until, lost_at: None };
        }
        engine.set_wake();
        Some(engine)
    }

    fn replay_commit(&mut self, commit: &Commit) {
        self.high_water = self.high_water.max(commit.step);
        self.reached = commit.step;
        self.commit = Some(commit.clone());
    }
}
