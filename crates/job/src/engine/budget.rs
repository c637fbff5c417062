//! Time and money: how long nodes have been attached, and when that is enough.

use std::time::Duration;

use super::{Action, Engine, Record};
use crate::{exit::Outcome, spec::Limits, time::Time};

/// While ranks train, at least so often the journal learns what the meter shows.
const METERED_EVERY: Duration = Duration::from_secs(60);

/// Measures for how long at least one node was attached: the time that machines are paid for. While
/// no coordinator lives it stands still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meter {
    sum: Duration,
    /// When a node came where none was.
    running_since: Option<Time>,
}

impl Meter {
    /// What it shows.
    #[must_use]
    pub fn read(&self, now: Time) -> Duration {
        self.sum + self.running_since.map_or(Duration::ZERO, |since| now.since(since))
    }

    fn switch(&mut self, now: Time, on: bool) {
        self.sum = self.read(now);
        self.running_since = on.then_some(now);
    }

    /// When it will show `target`, if it runs.
    fn shows_at(&self, target: Duration) -> Option<Time> {
        Some(self.running_since?.after(target.saturating_sub(self.sum)))
    }
}

/// The end that the recipe's limits set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Budget {
    /// The earlier of the limits, as attached time.
    pub(super) most: Duration,
    /// Which limit, and what to do: always the same words.
    pub(super) reason: String,
}

impl Budget {
    pub(super) fn new(limits: &Limits) -> Option<Self> {
        let hours = limits.max_hours.map(|hours| {
            let reason = format!("limits.max_hours = {hours} is reached; raise it to go on");
            (hours, reason)
        });
        let dollars = limits.max_dollars.zip(limits.dollars_per_hour).map(|(dollars, price)| {
            let reason = format!(
                "limits.max_dollars = {dollars} is reached, at {price} dollars per hour; raise it to \
                 go on"
            );
            (dollars / price, reason)
        });
        let earlier = |one: (f64, String), other: (f64, String)| match one.0 <= other.0 {
            true => one,
            false => other,
        };
        let (hours, reason) = hours.into_iter().chain(dollars).reduce(earlier)?;
        // In whole milliseconds, as the machine's clock goes: a wake at the end finds it reached.
        let most = Duration::from_millis((hours * 3_600_000.0) as u64);
        Some(Self { most, reason })
    }
}

impl Engine {
    /// When the budget ends, while that is something to wait for.
    pub(super) fn budget_ends_at(&self) -> Option<Time> {
        let budget = self.budget.as_ref().filter(|_| self.drain.is_none())?;
        self.meter.shows_at(budget.most)
    }

    /// Drains the job once its budget is used up.
    pub(super) fn mind_the_budget(&mut self, now: Time) {
        let idle = self.drain.is_none() && self.outcome().is_none();
        if let Some(reason) = self.used_up(now).filter(|_| idle) {
            self.persist_meter(now);
            self.drain(now, reason, None);
        }
    }

    /// Why the budget is used up, if it is.
    fn used_up(&self, now: Time) -> Option<String> {
        let budget = self.budget.as_ref()?;
        (self.meter.read(now) >= budget.most).then(|| budget.reason.clone())
    }

    /// A drained job that could not go on is not merely drained: another start would end at once.
    pub(super) fn limited(&self, now: Time, outcome: Outcome) -> Outcome {
        match (outcome, self.used_up(now)) {
            (Outcome::Drained { reason }, Some(limit)) => {
                // The drain may have had to say more, or have begun for another reason.
                let tells_limit = reason.starts_with(&limit);
                let reason = if tells_limit { reason } else { format!("{limit} ({reason})") };
                Outcome::LimitReached { reason }
            }
            (outcome, _) => outcome,
        }
    }

    /// Follows the nodes: the meter runs while one is attached and the job is not over.
    pub(super) fn run_meter(&mut self, now: Time) {
        let attached = self.nodes.values().any(|node| node.given_up_at.is_none());
        let on = attached && self.outcome().is_none();
        if on != self.meter.running_since.is_some() {
            self.meter.switch(now, on);
        }
    }

    /// Writes down what the meter shows, if that is news.
    pub(super) fn persist_meter(&mut self, now: Time) {
        let spent = self.meter.read(now);
        if spent > self.metered {
            self.metered = spent;
            self.actions.push(Action::Persist(Record::Metered(spent)));
        }
    }

    /// The same, while nothing else makes an entry.
    pub(super) fn persist_meter_now_and_then(&mut self, now: Time) {
        if self.meter.read(now) >= self.metered + METERED_EVERY {
            self.persist_meter(now);
        }
    }

    pub(super) fn replay_meter(&mut self, spent: Duration) {
        self.meter = Meter { sum: spent, running_since: None };
        self.metered = spent;
    }
}
