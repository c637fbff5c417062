//! Records of the coordinator's journal, and replay of the state machine from them.
//!
//! Journals of every earlier version must stay readable: a new field needs `#[serde(default)]`, and no field or variant
//! is renamed or removed.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    DrainStatus, Engine, EvaluationResult, Incident, Recovery, lifecycle::Phase, membership::World,
};
use crate::{
    exit::Outcome,
    ids::{Generation, JobId},
    message::{Commit, Restore},
    plan::Placement,
    time::Time,
};
use baton_recipe::{JobSpec, Step, progress::Accuracy};

/// Values with which a job began; they never change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobOrigin {
    /// The job's identity.
    pub job: JobId,
    /// Its recipe as JSON; absent in journals of format 1.
    pub recipe: Option<String>,
    /// Higher than every generation found in the checkpoint store, so that this job's commits are the newest there.
    pub first_generation: Generation,
    /// Where state comes from if no rank holds state.
    pub restore: Restore,
}

/// One entry of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// The job was created.
    Created(JobOrigin),
    /// A generation was opened.
    Opened {
        /// Its number.
        generation: Generation,
        /// Its ranks.
        #[serde(with = "by_node")]
        placements: Vec<Placement>,
    },
    /// A checkpoint was committed.
    Saved(Commit),
    /// An evaluation was reported.
    Evaluated {
        /// The generation that reported it.
        generation: Generation,
        /// Its result.
        evaluation: EvaluationResult,
    },
    /// The state with which training started knows a better evaluation than all that are recorded: one of the run that it
    /// continues.
    Best {
        /// Updates made before it.
        step: Step,
        /// Its result.
        accuracy: Accuracy,
    },
    /// A recovery ended, or its generation did.
    Recovery(Recovery),
    /// Training diverged, and what is done about it.
    Diverged(Incident),
    /// Meter reading: time so far during which nodes were attached.
    Metered(Duration),
    /// Meter reading of a job with a price. Earlier versions wrote `Metered`, without the cost.
    Paid {
        /// Time so far during which nodes were attached.
        time: Duration,
        /// Cost of that time, dollars, each hour at the price it had.
        dollars: f64,
    },
    /// A user paused training.
    Paused {
        /// Why, as text.
        reason: String,
        /// Meter reading.
        at: Duration,
    },
    /// A user resumed training.
    Resumed {
        /// Meter reading.
        at: Duration,
    },
    /// A user wants the job to save and stop.
    Draining {
        /// Why, as text.
        reason: String,
    },
    /// The job ended; if its outcome is [resumable](Outcome::is_resumable), a restart continues it.
    Ended(Outcome),
}

/// How long a copy of a journal may lack entries: a store that is out of reach is tried again within a minute.
const LONGEST_LAG_SECONDS: u64 = 120;

/// Why a run has ended that another coordinator continues.
const COORDINATOR_LOST: &str = "the coordinator's run folder was lost";

fn is_loss_of_coordinator(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Drained { reason } if reason == COORDINATOR_LOST)
}

/// What is known of the ranks of a job whose coordinator is lost with its run folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RanksOfLostJob {
    /// They may run, and their agents find the new coordinator: it waits for them.
    MayRun,
    /// Their agents do not know the new coordinator, or are lost too.
    Lost,
}

impl Record {
    /// The newest record of the job's course: it was created, opened a generation, or ended.
    #[must_use]
    pub fn last_turn(records: &[Self]) -> Option<&Self> {
        records.iter().rev().find(|record| {
            matches!(record, Self::Created(_) | Self::Opened { .. } | Self::Ended(_))
        })
    }

    /// How the job has ended; `None` also after the end of a run whose coordinator was lost, as another one continues it.
    #[must_use]
    pub fn outcome(records: &[Self]) -> Option<&Outcome> {
        match Self::last_turn(records)? {
            Self::Ended(outcome) => {
                Some(outcome).filter(|outcome| !is_loss_of_coordinator(outcome))
            }
            _ => None,
        }
    }

    /// The values with which the job began.
    #[must_use]
    pub fn origin(records: &[Self]) -> Option<&JobOrigin> {
        records.iter().rev().find_map(|record| match record {
            Self::Created(origin) => Some(origin),
            _ => None,
        })
    }

    /// Whether a job that should have begun with a certain checkpoint has failed. If no rank has trained, it has restored
    /// nothing, and the job before it may go on.
    #[must_use]
    pub fn has_failed_from_checkpoint(records: &[Self]) -> bool {
        let begins_with = Self::origin(records).and_then(|origin| origin.restore.path.as_ref());
        let has_failed = matches!(Self::outcome(records), Some(Outcome::Failed { .. }));
        begins_with.is_some() && has_failed
    }

    /// Whether the job has saved a checkpoint.
    #[must_use]
    pub fn has_saved(records: &[Self]) -> bool {
        records.iter().any(|record| matches!(record, Self::Saved(_)))
    }

    /// How much a copy of a journal lacks: of several checkpoints, the newest first with the times of their commits, that
    /// are not among its records, the name of the newest and the seconds from the copy's last event to it, if these are
    /// many. The newest alone may have been saved a moment before the coordinator was lost.
    #[must_use]
    pub fn lag<'a>(
        records: &[Self],
        last_event_unix_seconds: u64,
        checkpoints: &'a [(String, u64)],
    ) -> Option<(&'a str, u64)> {
        let is_known = |name: &str| {
            records
                .iter()
                .any(|record| matches!(record, Self::Saved(commit) if commit.name == name))
        };
        let mut missing = checkpoints.iter().filter(|(name, _)| !is_known(name));
        let (name, created_unix_seconds) = missing.next()?;
        missing.next()?;
        let seconds = created_unix_seconds.saturating_sub(last_event_unix_seconds);
        (seconds > LONGEST_LAG_SECONDS).then_some((name, seconds))
    }

    /// The records to add where another coordinator continues the job of one whose run folder is lost, from a copy of
    /// its journal that may lack the newest records. `fence` is the newest generation that ranks can have seen. `None` if
    /// there is no job that can continue.
    #[must_use]
    pub fn after_loss(
        records: &[Self],
        fence: Generation,
        ranks: RanksOfLostJob,
    ) -> Option<Vec<Self>> {
        let last_turn = Self::last_turn(records)?;
        match Self::outcome(records) {
            Some(outcome) if !outcome.is_resumable() || ranks == RanksOfLostJob::MayRun => {
                return None;
            }
            _ => {}
        }
        let opened = records.iter().rev().find_map(|record| match record {
            Self::Opened { generation, .. } => Some(*generation),
            _ => None,
        });
        let is_missing = opened.is_none_or(|opened| opened < fence);
        let has_ended = matches!(last_turn, Self::Ended(_));
        if !is_missing && (has_ended || ranks == RanksOfLostJob::MayRun) {
            return Some(Vec::new());
        }
        let missing =
            is_missing.then_some(Self::Opened { generation: fence, placements: Vec::new() });
        // Nobody waits for the agents of the lost coordinator: those that come keep their state.
        let reason = COORDINATOR_LOST.to_owned();
        Some(missing.into_iter().chain([Self::Ended(Outcome::Drained { reason })]).collect())
    }
}

/// Serialization of placements in the journal: consecutive ranks on a node are one entry. A generation of a thousand
/// nodes with eight ranks each takes 60 kB this way, and 400 kB with one entry per rank.
mod by_node {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    use crate::{
        ids::{LocalRank, NodeId, Rank},
        plan::Placement,
    };

    /// The first of some consecutive ranks, and their number; one if absent, as in older journals.
    #[derive(Serialize, Deserialize)]
    struct Run {
        rank: Rank,
        node: NodeId,
        local_rank: LocalRank,
        #[serde(default = "one", skip_serializing_if = "is_one")]
        count: u32,
    }

    fn one() -> u32 {
        1
    }

    fn is_one(count: &u32) -> bool {
        *count == 1
    }

    fn follows(last: &Placement, next: &Placement) -> bool {
        (&last.node, last.rank.0.checked_add(1), last.local_rank.0.checked_add(1))
            == (&next.node, Some(next.rank.0), Some(next.local_rank.0))
    }

    pub(super) fn serialize<S: Serializer>(
        placements: &[Placement],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(placements.chunk_by(follows).filter_map(|run| {
            let Placement { rank, node, local_rank } = run.first()?.clone();
            Some(Run { rank, node, local_rank, count: u32::try_from(run.len()).ok()? })
        }))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Placement>, D::Error> {
        let mut placements = Vec::new();
        for Run { rank, node, local_rank, count } in Vec::<Run>::deserialize(deserializer)? {
            if rank.0.checked_add(count).and(local_rank.0.checked_add(count)).is_none() {
                return Err(D::Error::custom(format!("{count} ranks from rank {rank} on")));
            }
            placements.extend((0..count).map(|i| Placement {
                rank: Rank(rank.0 + i),
                node: node.clone(),
                local_rank: LocalRank(local_rank.0 + i),
            }));
        }
        Ok(placements)
    }
}

impl Engine {
    /// Rebuilds the state machine from the journal of an earlier coordinator process; `None` if the journal contains no
    /// job.
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
                    engine.lifecycle.generation = *generation;
                    engine.lifecycle.is_fenced = false;
                    open_world = Some(placements.clone());
                }
                (Record::Saved(commit), Some(engine)) => engine.results.replay_commit(commit),
                (Record::Evaluated { generation, evaluation }, Some(engine)) => {
                    engine.results.record_evaluation(*generation, evaluation.clone());
                }
                (Record::Best { step, accuracy }, Some(engine)) => {
                    engine.results.best = Some((*step, accuracy.clone()));
                }
                (Record::Recovery(recovery), Some(engine)) => {
                    engine.recoveries.replay(recovery);
                }
                (Record::Diverged(incident), Some(engine)) => engine.record_incident(incident),
                (Record::Metered(spent), Some(engine)) => engine.accounting.replay(*spent, None),
                (Record::Paid { time, dollars }, Some(engine)) => {
                    engine.accounting.replay(*time, Some(*dollars));
                }
                (Record::Paused { reason, at }, Some(engine)) => {
                    engine.pauses.begin(now, reason, *at);
                }
                (Record::Resumed { at }, Some(engine)) => {
                    engine.pauses.end(*at);
                }
                (Record::Draining { reason }, Some(engine)) => {
                    let until = now.after(engine.policy.drain);
                    let drain = DrainStatus::new(reason.clone(), now, until);
                    engine.drain = Some(DrainStatus { by_user: true, is_replayed: true, ..drain });
                }
                (Record::Ended(outcome), Some(engine)) => {
                    open_world = None;
                    // The ranks of a lost coordinator may run, and have still to hear of it.
                    engine.drain.take_if(|_| !is_loss_of_coordinator(outcome));
                    (engine.lifecycle.phase, engine.lifecycle.reason) = match outcome.is_resumable()
                    {
                        true => (Phase::Gathering, "waiting for agents".to_owned()),
                        false => (Phase::Ended { outcome: outcome.clone() }, outcome.to_string()),
                    };
                }
            }
        }
        let mut engine = engine?;
        if let Some(placements) = open_world {
            let world = World::unknown(placements);
            let until = now.after(engine.policy.node_grace);
            engine.lifecycle.reason =
                "the coordinator restarted and waits for its agents".to_owned();
            engine.lifecycle.is_reattached = true;
            engine.lifecycle.may_have_ranks = true;
            engine.lifecycle.phase = Phase::Reattaching { world, until, lost_at: None };
        }
        engine.set_wake();
        Some(engine)
    }

    /// After the crash of a coordinator that began after generation `began`: a job that has ended since, maybe because a
    /// user wanted it, does not begin again.
    #[must_use]
    pub fn after_crash(mut self, began: Generation, records: &[Record]) -> Self {
        if let Some(Record::Ended(outcome)) = Record::last_turn(records)
            && self.generation() > began
        {
            self.lifecycle.reason = outcome.to_string();
            self.lifecycle.phase = Phase::Ended { outcome: outcome.clone() };
            self.set_wake();
        }
        self
    }

    /// After the loss of a coordinator whose ranks may run: its metrics say that training had reached `step`, maybe later
    /// than any record. If the ranks are lost too, the steps since the last save count as lost.
    #[must_use]
    pub fn after_step(mut self, step: Step) -> Self {
        if matches!(self.lifecycle.phase, Phase::Reattaching { .. }) {
            self.results.reached = self.results.reached.max(step);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::{LocalRank, NodeId, Rank};

    fn placement(rank: u32, node: &str, local_rank: u32) -> Placement {
        Placement {
            rank: Rank(rank),
            node: NodeId(node.to_owned()),
            local_rank: LocalRank(local_rank),
        }
    }

    fn opened(placements: Vec<Placement>) -> Record {
        Record::Opened { generation: Generation(1), placements }
    }

    /// The records of a job with one generation.
    fn begun() -> Vec<Record> {
        let origin = JobOrigin {
            job: JobId::default(),
            recipe: None,
            first_generation: Generation(1),
            restore: Restore::default(),
        };
        vec![Record::Created(origin), opened(vec![placement(0, "a", 0)])]
    }

    #[test]
    fn a_job_whose_run_folder_is_lost_continues_above_every_generation_that_ranks_have_seen() {
        let (spec, begun) = (crate::kit::recipe(&[], &[]), begun());
        let lost = |records: &[Record], fence| {
            Record::after_loss(records, Generation(fence), RanksOfLostJob::Lost)
        };
        for (copied, fence) in [(1, 1), (2, 1), (2, 3)] {
            let mut records = begun[..copied].to_vec();
            records.extend(lost(&records, fence).unwrap());
            let engine = Engine::replay(&spec, &records, Time(0)).unwrap();
            assert_eq!(engine.generation(), Generation(fence));
            assert!(matches!(engine.lifecycle.phase, Phase::Gathering), "nobody is waited for");
        }
        let ended = |outcome| [begun.clone(), vec![Record::Ended(outcome)]].concat();
        assert_eq!(lost(&ended(Outcome::Stopped), 1).unwrap(), [], "it keeps its own end");
        assert!(!lost(&ended(Outcome::Stopped), 3).unwrap().is_empty());
        assert_eq!(lost(&ended(Outcome::Completed), 1), None);
        assert_eq!(lost(&[], 1), None);
    }

    #[test]
    fn a_job_that_has_ended_does_not_begin_again_after_a_crash_but_at_the_next_start() {
        let spec = crate::kit::recipe(&[], &[]);
        let ended = [begun(), vec![Record::Ended(Outcome::Stopped)]].concat();
        let outcome = |records: &[Record], began| {
            let engine = Engine::replay(&spec, records, Time(0)).unwrap();
            engine.after_crash(Generation(began), records).outcome().cloned()
        };
        assert_eq!(outcome(&ended, 0), Some(Outcome::Stopped));
        assert_eq!(outcome(&ended, 1), None, "this end came before the start");
        assert_eq!(outcome(&begun(), 0), None);
    }

    #[test]
    fn a_copy_that_lacks_several_checkpoints_of_minutes_is_behind() {
        let checkpoint = |step: u64, created| (format!("step-{step}"), created);
        let saved = |step: u64| {
            let json = serde_json::json!({"saved": {"name": format!("step-{step}"), "generation": 1,
                "step": step, "accuracy": null, "bytes": 1}});
            serde_json::from_value::<Record>(json).unwrap()
        };
        let records = [saved(1), saved(2)];
        let newest_first = [checkpoint(4, 1_000), checkpoint(3, 900), checkpoint(2, 800)];
        assert_eq!(Record::lag(&records, 879, &newest_first), Some(("step-4", 121)));
        assert_eq!(
            Record::lag(&records, 880, &newest_first),
            None,
            "the store may be out of reach"
        );
        let all_but_the_newest = [records.to_vec(), vec![saved(3)]].concat();
        assert_eq!(Record::lag(&all_but_the_newest, 0, &newest_first), None);
        assert_eq!(Record::lag(&records, 0, &[]), None);
    }

    #[test]
    fn who_takes_over_from_a_lost_coordinator_waits_for_the_ranks_of_the_generation_it_knows() {
        let (spec, begun) = (crate::kit::recipe(&[], &[]), begun());
        for (fence, waits) in [(1, true), (2, false)] {
            let mut records = begun.clone();
            let added = Record::after_loss(&records, Generation(fence), RanksOfLostJob::MayRun);
            records.extend(added.unwrap());
            let engine = Engine::replay(&spec, &records, Time(0)).unwrap();
            assert_eq!(engine.generation(), Generation(fence));
            assert_eq!(matches!(engine.lifecycle.phase, Phase::Reattaching { .. }), waits);

            // Its coordinator may be lost too, before it has opened a generation.
            assert_eq!(Record::outcome(&records), None);
            let again = Record::after_loss(&records, Generation(fence), RanksOfLostJob::MayRun);
            assert_eq!(again, Some(Vec::new()));
        }
        let stopped = [begun, vec![Record::Ended(Outcome::Stopped)]].concat();
        let added = Record::after_loss(&stopped, Generation(1), RanksOfLostJob::MayRun);
        assert_eq!(added, None, "a user stopped the job");
    }

    #[test]
    fn the_ranks_of_a_node_are_one_entry_of_the_journal() {
        let record = opened(vec![placement(0, "a", 0), placement(1, "a", 1), placement(2, "b", 0)]);
        let text = serde_json::to_string(&record).unwrap();
        let expected = r#"{"opened":{"generation":1,"placements":[{"rank":0,"node":"a","local_rank":0,"count":2},{"rank":2,"node":"b","local_rank":0}]}}"#;
        assert_eq!(text, expected);
    }

    #[test]
    fn a_journal_with_an_entry_for_each_rank_is_read() {
        let text = r#"{"opened":{"generation":1,"placements":[{"rank":0,"node":"a","local_rank":0},{"rank":1,"node":"a","local_rank":1}]}}"#;
        let record: Record = serde_json::from_str(text).unwrap();
        assert_eq!(record, opened(vec![placement(0, "a", 0), placement(1, "a", 1)]));
    }

    #[test]
    fn rank_numbers_beyond_the_integer_range_are_rejected() {
        let text = r#"{"opened":{"generation":1,"placements":[{"rank":1,"node":"a","local_rank":0,"count":4294967295}]}}"#;
        assert!(serde_json::from_str::<Record>(text).is_err());
    }

    proptest! {
        #[test]
        fn opened_generations_are_read_back_unchanged(
            entries in prop::collection::vec((0u32..4, "[ab]", 0u32..4), 0..12),
        ) {
            let placements = entries.iter().map(|(rank, node, local)| placement(*rank, node, *local));
            let record = opened(placements.collect());
            let text = serde_json::to_string(&record).unwrap();
            prop_assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
        }
    }
}
