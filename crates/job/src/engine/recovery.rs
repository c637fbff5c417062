//! How training went on after a failure or a planned change of nodes, and how long each part of that took.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Action, Record, Share};
use crate::{ids::Generation, time::Time};
use baton_recipe::Step;

/// Recoveries that are kept; all are counted.
const KEPT: usize = 1_000;

/// Characters of a cause that are kept, as every status tells all of them. The event of a failure has it whole.
const LONGEST_CAUSE: usize = 500;

/// A failure or a planned change of nodes, and how training went on; times are filled in as they pass.
///
/// If the generation that takes over fails before its first update, its recovery stays as far as it has come, and
/// the next one is another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// The generation that failed, then the one that took over.
    pub generation: Generation,
    /// What failed, or which nodes came or went.
    pub cause: String,
    /// Nodes came or went; nothing failed.
    pub planned: bool,
    /// When the first word of it came.
    pub lost_at: Time,
    /// When the next generation was opened.
    pub launched_at: Option<Time>,
    /// When the last rank that holds state was ready again; when the generation was opened if none does.
    /// Known once all ranks are ready.
    pub torn_down_at: Option<Time>,
    /// When all ranks were ready.
    pub ready_at: Option<Time>,
    /// When all ranks had met; absent for good if the word of one was lost.
    pub met_at: Option<Time>,
    /// When all ranks had the state.
    pub started_at: Option<Time>,
    /// When the first update was done.
    pub stepped_at: Option<Time>,
    /// The step that training had reached; work beyond the restored step is done again.
    pub step_before: Step,
    /// Updates that had to be made again; known once all ranks have the state.
    pub lost_steps: u64,
    /// What the meter showed at the first word of it.
    #[serde(default)]
    pub metered_from: Duration,
    /// Attached time that it took until its first update, or until the next recovery or the end of the job.
    #[serde(default)]
    pub metered: Option<Duration>,
    /// About how long it takes to make the lost updates again.
    #[serde(default)]
    pub redo: Duration,
}

/// The parts of a recovery, each from the end of the one before it; one that has not ended is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// From the first word until the next generation was opened: to hear who died, and a pause before a restart.
    pub settle: Option<Duration>,
    /// Until the ranks that hold state had left the old generation and were ready again.
    pub tear_down: Option<Duration>,
    /// Until the ranks that had to be started were ready too; zero if there were none.
    pub respawn: Option<Duration>,
    /// Until all ranks had met. If that was not told it stays absent and counts to the next part.
    pub rendezvous: Option<Duration>,
    /// Until all ranks had the state.
    pub restore: Option<Duration>,
    /// Until the first update was done.
    pub first_step: Option<Duration>,
}

impl Parts {
    /// All with their names, in order.
    #[must_use]
    pub fn named(&self) -> [(&'static str, Option<Duration>); 6] {
        [
            ("settle", self.settle),
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
            cause: cut(cause),
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
    pub fn parts(&self) -> Parts {
        let part = |from: Option<Time>, to: Option<Time>| Some(to?.since(from?));
        Parts {
            settle: part(Some(self.lost_at), self.launched_at),
            tear_down: part(self.launched_at, self.torn_down_at),
            respawn: part(self.torn_down_at, self.ready_at),
            rendezvous: part(self.ready_at, self.met_at),
            restore: part(self.met_at.or(self.ready_at), self.started_at),
            first_step: part(self.started_at, self.stepped_at),
        }
    }

    /// From the first word until the first update; absent while there is none.
    #[must_use]
    pub fn total(&self) -> Option<Duration> {
        Some(self.stepped_at?.since(self.lost_at))
    }
}

fn cut(cause: &str) -> String {
    match cause.char_indices().nth(LONGEST_CAUSE) {
        Some((end, _)) => format!("{}…", &cause[..end]),
        None => cause.to_owned(),
    }
}

/// The newest recoveries, oldest first, and the number of all.
#[derive(Clone, Debug, Default)]
pub(super) struct Recoveries {
    /// Shared with every status: it changes far less often than it is looked at.
    newest: Arc<VecDeque<Recovery>>,
    total: u64,
    /// Attached time that all of them brought nothing, but for one that is under way.
    wasted: Duration,
}

impl Recoveries {
    pub(super) fn newest(&self) -> Arc<VecDeque<Recovery>> {
        self.newest.clone()
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Attached time that brought nothing because of failures and planned changes of nodes.
    pub(super) fn interrupted(&self) -> Share {
        let last = self.newest.back().filter(|last| last.metered.is_none());
        Share { before: self.wasted, since: last.map(|last| last.metered_from) }
    }

    /// The last one will not come to its end: what to write down, so that it is not lost with the coordinator.
    /// `spent` is attached time.
    pub(super) fn abandon(&mut self, spent: Duration) -> Option<Action> {
        let recovery = self.last_if(|last| last.metered.is_none())?;
        recovery.metered = Some(spent.saturating_sub(recovery.metered_from));
        let recovery = recovery.clone();
        self.count_waste(&recovery);
        Some(Action::Persist(Record::Recovery(recovery)))
    }

    /// The first update of `generation` after a recovery: it has come to its end. `seconds_per_step` is from before
    /// it.
    pub(super) fn finish(
        &mut self,
        now: Time,
        generation: Generation,
        spent: Duration,
        seconds_per_step: Option<f64>,
    ) -> Option<Recovery> {
        let recovery = self.under_way(generation)?;
        recovery.started_at?;
        recovery.stepped_at = Some(now);
        recovery.metered = Some(spent.saturating_sub(recovery.metered_from));
        let redo = seconds_per_step.unwrap_or_default() * recovery.lost_steps as f64;
        recovery.redo = Duration::try_from_secs_f64(redo).unwrap_or_default();
        let recovery = recovery.clone();
        self.count_waste(&recovery);
        Some(recovery)
    }

    pub(super) fn begin(&mut self, recovery: Recovery) {
        let newest = Arc::make_mut(&mut self.newest);
        newest.push_back(recovery);
        if newest.len() > KEPT {
            newest.pop_front();
        }
        self.total += 1;
    }

    /// One that was under way in the life of an earlier coordinator.
    pub(super) fn replay(&mut self, recovery: &Recovery) {
        self.begin(recovery.clone());
        self.count_waste(recovery);
    }

    fn count_waste(&mut self, recovery: &Recovery) {
        self.wasted += recovery.metered.unwrap_or_default() + recovery.redo;
    }

    /// The last one, if it waits for a generation.
    pub(super) fn waiting(&mut self) -> Option<&mut Recovery> {
        self.last_if(|recovery| recovery.launched_at.is_none())
    }

    /// The last one, if it is under way in this generation.
    pub(super) fn under_way(&mut self, generation: Generation) -> Option<&mut Recovery> {
        self.last_if(|last| {
            last.generation == generation && last.launched_at.is_some() && last.stepped_at.is_none()
        })
    }

    fn last_if(&mut self, is_meant: impl Fn(&Recovery) -> bool) -> Option<&mut Recovery> {
        // Looked at before: whatever may change is copied if a reader has it.
        self.newest.back().filter(|last| is_meant(last))?;
        Arc::make_mut(&mut self.newest).back_mut()
    }
}
