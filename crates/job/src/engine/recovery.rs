//! Recoveries: how training continued after a failure or a planned change of nodes, and how long each part took.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Action, MeterShare, Record};
use crate::{ids::Generation, shortened, time::Time};
use baton_recipe::Step;

/// Maximum number of recoveries that are kept; all are counted.
const MAX_KEPT_RECOVERIES: usize = 1_000;

/// Maximum length of a stored cause in characters, because every status contains all causes. The job event of a
/// failure contains the full text.
const MAX_CAUSE_CHARS: usize = 500;

/// A failure or a planned change of nodes, and how training continued. Times are filled in as they are reached.
///
/// If the new generation fails before its first update, its recovery stays incomplete, and a new recovery begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// The generation that failed; once the next generation is opened, that one.
    pub generation: Generation,
    /// What failed, or which nodes joined or left.
    pub cause: String,
    /// Whether it is a planned change of nodes and not a failure.
    pub planned: bool,
    /// When it was first reported.
    pub lost_at: Time,
    /// When the next generation was opened.
    pub launched_at: Option<Time>,
    /// When the last rank that holds state was ready again; if none holds state, when the generation was opened. Set
    /// once all ranks are ready.
    pub torn_down_at: Option<Time>,
    /// When all ranks were ready.
    pub ready_at: Option<Time>,
    /// When all ranks were connected; stays absent if the report of one was lost.
    pub met_at: Option<Time>,
    /// When all ranks had the state.
    pub started_at: Option<Time>,
    /// When the first update was done.
    pub stepped_at: Option<Time>,
    /// The step that training had reached; updates after the restored step are made again.
    pub step_before: Step,
    /// Number of updates that had to be made again; known once all ranks have the state.
    pub lost_steps: u64,
    /// Meter reading when it was first reported.
    #[serde(default)]
    pub metered_from: Duration,
    /// Attached time until its first update, until the next recovery or until the end of the job.
    #[serde(default)]
    pub metered: Option<Duration>,
    /// Estimated time to make the lost updates again.
    #[serde(default)]
    pub redo: Duration,
}

/// The parts of a recovery. Each begins at the end of the previous part; a part that has not ended is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryParts {
    /// From the first report until the next generation was opened: learning which ranks were lost, and the backoff
    /// before a restart.
    pub detect: Option<Duration>,
    /// Until the ranks that hold state had left the old generation and were ready again.
    pub tear_down: Option<Duration>,
    /// Until the ranks that had to be started were also ready; zero if there were none.
    pub respawn: Option<Duration>,
    /// Until all ranks were connected. If a rank did not report that, this part stays absent, and its time is included
    /// in the next part.
    pub rendezvous: Option<Duration>,
    /// Until all ranks had the state.
    pub restore: Option<Duration>,
    /// Until the first update was done.
    pub first_step: Option<Duration>,
}

impl RecoveryParts {
    /// All parts with their names, in order.
    #[must_use]
    pub fn named(&self) -> [(&'static str, Option<Duration>); 6] {
        [
            ("detect", self.detect),
            ("tear down", self.tear_down),
            ("respawn", self.respawn),
            ("rendezvous", self.rendezvous),
            ("restore", self.restore),
            ("first step", self.first_step),
        ]
    }
}

impl Recovery {
    pub(super) fn new(generation: Generation, cause: &str, lost_at: Time, step: Step) -> Self {
        Self {
            generation,
            cause: shortened(cause, MAX_CAUSE_CHARS),
            planned: false,
            lost_at,
            launched_at: None,
            torn_down_at: None,
            ready_at: None,
            met_at: None,
            started_at: None,
            stepped_at: None,
            step_before: step,
            lost_steps: 0,
            metered_from: Duration::ZERO,
            metered: None,
            redo: Duration::ZERO,
        }
    }

    /// How long each part took.
    #[must_use]
    pub fn parts(&self) -> RecoveryParts {
        let part = |from: Option<Time>, to: Option<Time>| Some(to?.since(from?));
        RecoveryParts {
            detect: part(Some(self.lost_at), self.launched_at),
            tear_down: part(self.launched_at, self.torn_down_at),
            respawn: part(self.torn_down_at, self.ready_at),
            rendezvous: part(self.ready_at, self.met_at),
            restore: part(self.met_at.or(self.ready_at), self.started_at),
            first_step: part(self.started_at, self.stepped_at),
        }
    }

    /// Time from the first report until the first update; absent until that update is done.
    #[must_use]
    pub fn total(&self) -> Option<Duration> {
        Some(self.stepped_at?.since(self.lost_at))
    }
}

/// The newest recoveries, oldest first, and the number of all.
#[derive(Clone, Debug, Default)]
pub(super) struct RecoveryHistory {
    /// Shared with every status, because it is read far more often than it changes.
    newest: Arc<VecDeque<Recovery>>,
    total: u64,
    /// Attached time lost by all recoveries except one in progress.
    lost_time: Duration,
}

impl RecoveryHistory {
    pub(super) fn newest(&self) -> Arc<VecDeque<Recovery>> {
        self.newest.clone()
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Attached time lost by failures and planned changes of nodes.
    pub(super) fn interrupted(&self) -> MeterShare {
        let last = self.newest.back().filter(|last| last.metered.is_none());
        MeterShare { before: self.lost_time, since: last.map(|last| last.metered_from) }
    }

    /// Ends the last recovery if it is incomplete; returns the action that persists it. `spent` is attached time.
    pub(super) fn abandon(&mut self, spent: Duration) -> Option<Action> {
        let recovery = self.last_if(|last| last.metered.is_none())?;
        recovery.metered = Some(spent.saturating_sub(recovery.metered_from));
        let recovery = recovery.clone();
        self.add_lost_time(&recovery);
        Some(Action::Persist(Record::Recovery(recovery)))
    }

    /// Completes the recovery at the first update of `generation`, and returns it. `seconds_per_step` was measured
    /// before the recovery.
    pub(super) fn finish(
        &mut self,
        now: Time,
        generation: Generation,
        spent: Duration,
        seconds_per_step: Option<f64>,
    ) -> Option<Recovery> {
        let recovery = self.in_progress(generation)?;
        recovery.started_at?;
        recovery.stepped_at = Some(now);
        recovery.metered = Some(spent.saturating_sub(recovery.metered_from));
        let redo = seconds_per_step.unwrap_or_default() * recovery.lost_steps as f64;
        recovery.redo = Duration::try_from_secs_f64(redo).unwrap_or_default();
        let recovery = recovery.clone();
        self.add_lost_time(&recovery);
        Some(recovery)
    }

    pub(super) fn begin(&mut self, recovery: Recovery) {
        let newest = Arc::make_mut(&mut self.newest);
        newest.push_back(recovery);
        if newest.len() > MAX_KEPT_RECOVERIES {
            newest.pop_front();
        }
        self.total += 1;
    }

    /// Adds a recovery from the journal.
    pub(super) fn replay(&mut self, recovery: &Recovery) {
        self.begin(recovery.clone());
        self.add_lost_time(recovery);
    }

    fn add_lost_time(&mut self, recovery: &Recovery) {
        self.lost_time += recovery.metered.unwrap_or_default() + recovery.redo;
    }

    /// The last recovery, if no generation has been opened for it yet.
    pub(super) fn waiting(&mut self) -> Option<&mut Recovery> {
        self.last_if(|recovery| recovery.launched_at.is_none())
    }

    /// The last recovery, if it is in progress in this generation.
    pub(super) fn in_progress(&mut self, generation: Generation) -> Option<&mut Recovery> {
        self.last_if(|last| {
            last.generation == generation && last.launched_at.is_some() && last.stepped_at.is_none()
        })
    }

    fn last_if(&mut self, condition: impl Fn(&Recovery) -> bool) -> Option<&mut Recovery> {
        // Checked first: `make_mut` copies the list if a reader holds it.
        self.newest.back().filter(|last| condition(last))?;
        Arc::make_mut(&mut self.newest).back_mut()
    }
}
