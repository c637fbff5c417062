//! Time and money: how long nodes have been attached, and the limits on it.

use std::time::Duration;

use super::{Action, Record};
use crate::{exit::Outcome, time::Time};
use baton_recipe::spec::Limits;

/// While ranks train, the meter is written to the journal at least this often.
const METER_PERSIST_INTERVAL: Duration = Duration::from_secs(60);

/// Used shares of a budget at which an alert is published, early enough to raise the limit.
const ALERT_SHARES: [f64; 3] = [0.5, 0.8, 0.95];

/// Meter of the time during which at least one node was attached, for which machines are paid. It does not run while
/// no coordinator is running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meter {
    sum: Duration,
    /// When the first node attached; absent while no node is attached.
    running_since: Option<Time>,
}

impl Meter {
    /// The reading at `now`.
    #[must_use]
    pub fn read(&self, now: Time) -> Duration {
        self.sum + self.running_since.map_or(Duration::ZERO, |since| now.since(since))
    }

    fn switch(&mut self, now: Time, on: bool) {
        self.sum = self.read(now);
        self.running_since = on.then_some(now);
    }

    /// When the reading will be `target`, if the meter runs.
    fn shows_at(&self, target: Duration) -> Option<Time> {
        Some(self.running_since?.after(target.saturating_sub(self.sum)))
    }
}

/// A part of the metered time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeterShare {
    /// Sum of the periods that have ended.
    pub(super) before: Duration,
    /// Meter reading at the start of the current period, if there is one.
    pub(super) since: Option<Duration>,
}

impl MeterShare {
    /// The total once the meter reading is `spent`.
    #[must_use]
    pub fn read(&self, spent: Duration) -> Duration {
        let current = self.since.map(|since| spent.saturating_sub(since));
        self.before + current.unwrap_or_default()
    }
}

/// What attached time costs, and the recipe's limits on it. A new price applies to the time after it: what was paid before
/// is not counted again at another price.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Budget {
    /// Price of all nodes together, in dollars per hour.
    pub dollars_per_hour: Option<f64>,
    max_hours: Option<f64>,
    max_dollars: Option<f64>,
    /// Attached time of which the journal has the cost.
    paid: Duration,
    /// That cost, in dollars.
    paid_dollars: f64,
}

impl Budget {
    /// The budget that these limits set; nothing is paid yet.
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        Self {
            dollars_per_hour: limits.dollars_per_hour,
            max_hours: limits.max_hours,
            max_dollars: limits.max_dollars,
            paid: Duration::ZERO,
            paid_dollars: 0.0,
        }
    }

    /// Cost in dollars of `time` at the current price, if one is set.
    #[must_use]
    pub fn dollars_for(&self, time: Duration) -> Option<f64> {
        self.dollars_per_hour.map(|price| price * hours(time))
    }

    /// Cost in dollars of the whole attached time `spent`, if a price is set.
    #[must_use]
    pub fn dollars_at(&self, spent: Duration) -> Option<f64> {
        let since = self.dollars_for(spent.saturating_sub(self.paid))?;
        // JSON, and so the journal, has no infinity.
        Some((self.paid_dollars + since).min(f64::MAX))
    }

    /// Cost in dollars of `part` of the attached time `spent`, if a price is set: at the mean price, because it is not known
    /// which of several prices applied to that part.
    #[must_use]
    pub fn dollars_of_part(&self, part: Duration, spent: Duration) -> Option<f64> {
        let dollars = self.dollars_at(spent)?;
        match spent.is_zero() {
            true => Some(0.0),
            false => Some(dollars * (part.as_secs_f64() / spent.as_secs_f64())),
        }
    }

    /// Used share of the limit of which the most is used, after `spent` attached time; absent without a limit.
    #[must_use]
    pub fn used(&self, spent: Duration) -> Option<f64> {
        let of_hours = self.max_hours.map(|most| hours(spent) / most);
        let of_dollars =
            self.max_dollars.zip(self.dollars_at(spent)).map(|(most, dollars)| dollars / most);
        of_hours.into_iter().chain(of_dollars).reduce(f64::max)
    }

    /// Attached time at which the first of the limits is reached.
    #[must_use]
    pub fn limit(&self) -> Option<Duration> {
        self.used_up_at(1.0)
    }

    /// Attached time at which this share of one of the limits is used up.
    fn used_up_at(&self, share: f64) -> Option<Duration> {
        let (by_hours, by_dollars) = self.hours_at(share);
        let hours = by_hours.into_iter().chain(by_dollars).reduce(f64::min)?;
        // In whole milliseconds, like `Time`, so that a timeout set for this time finds it reached.
        Some(Duration::from_millis((hours * 3_600_000.0).round() as u64))
    }

    /// Attached hours at which this share of `max_hours`, and of `max_dollars`, is used up.
    fn hours_at(&self, share: f64) -> (Option<f64>, Option<f64>) {
        let by_dollars = self.max_dollars.zip(self.dollars_per_hour).map(|(most, price)| {
            let left = (share * most - self.paid_dollars).max(0.0);
            hours(self.paid) + left / price
        });
        (self.max_hours.map(|most| share * most), by_dollars)
    }

    /// Which limit is reached first, and what to do: always the same text.
    fn reason(&self) -> Option<String> {
        let (by_hours, by_dollars) = self.hours_at(1.0);
        let is_by_dollars = by_dollars
            .is_some_and(|by_dollars| by_hours.is_none_or(|by_hours| by_dollars < by_hours));
        let reached = if is_by_dollars {
            let (most, price) = self.max_dollars.zip(self.dollars_per_hour)?;
            format!("limits.max_dollars = {most} is reached, at {price} dollars per hour")
        } else {
            format!("limits.max_hours = {} is reached", self.max_hours?)
        };
        Some(format!("{reached}; raise it to resume"))
    }

    /// Number of [`ALERT_SHARES`] that are used up after `spent` attached time.
    fn alerts(&self, spent: Duration) -> usize {
        let is_used_up = |share: f64| self.used_up_at(share).is_some_and(|at| spent >= at);
        ALERT_SHARES.iter().take_while(|share| is_used_up(**share)).count()
    }
}

fn hours(time: Duration) -> f64 {
    time.as_secs_f64() / 3_600.0
}

/// Metered time and cost of the job, and its budget.
#[derive(Clone, Debug)]
pub(super) struct Accounting {
    pub(super) budget: Budget,
    pub(super) meter: Meter,
    /// Meter reading that was last written to the journal.
    persisted: Duration,
    /// Number of [`ALERT_SHARES`] for which an alert was published.
    alerts: usize,
}

impl Accounting {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            budget: Budget::new(limits),
            meter: Meter::default(),
            persisted: Duration::ZERO,
            alerts: 0,
        }
    }

    /// Attached time so far.
    pub(super) fn spent(&self, now: Time) -> Duration {
        self.meter.read(now)
    }

    /// When the next alert is due, or the budget ends.
    pub(super) fn wakes_at(&self) -> Option<Time> {
        let share = ALERT_SHARES.get(self.alerts).copied().unwrap_or(1.0);
        self.meter.shows_at(self.budget.used_up_at(share)?)
    }

    /// Text of an alert to publish, once for each of [`ALERT_SHARES`].
    pub(super) fn alert(&mut self, now: Time) -> Option<String> {
        let (budget, spent) = (self.budget, self.spent(now));
        let limit = budget.limit()?;
        let published = self.alerts;
        self.alerts = budget.alerts(spent).max(published);
        if self.alerts == published {
            return None;
        }
        let percent = 100.0 * ALERT_SHARES[self.alerts - 1];
        let dollars = budget.dollars_at(spent).zip(budget.dollars_at(limit));
        let dollars = dollars.map(|(spent, limit)| format!(" ({spent:.2} of {limit:.2} dollars)"));
        Some(format!(
            "{percent} % of the budget is used up: {:.2} of {:.2} hours{}",
            hours(spent),
            hours(limit),
            dollars.unwrap_or_default()
        ))
    }

    /// Why the budget is used up, if it is.
    pub(super) fn used_up(&self, now: Time) -> Option<String> {
        let limit = self.budget.limit()?;
        (self.spent(now) >= limit).then(|| self.budget.reason()).flatten()
    }

    /// Turns the outcome of a drained job into `LimitReached` if its budget is used up: another start would end at
    /// once.
    pub(super) fn limited(&self, now: Time, outcome: Outcome) -> Outcome {
        match (outcome, self.used_up(now)) {
            (Outcome::Drained { reason }, Some(limit)) => {
                // The drain's reason may contain more than the limit's text, or be a different one.
                let names_limit = reason.starts_with(&limit);
                let reason = if names_limit { reason } else { format!("{limit} ({reason})") };
                Outcome::LimitReached { reason }
            }
            (outcome, _) => outcome,
        }
    }

    /// Starts or stops the meter, which runs while a node is attached and the job is not over.
    pub(super) fn set_meter_running(&mut self, now: Time, on: bool) {
        if on != self.meter.running_since.is_some() {
            self.meter.switch(now, on);
        }
    }

    /// Action that persists the meter reading, if it has changed.
    pub(super) fn persist(&mut self, now: Time) -> Option<Action> {
        let spent = self.spent(now);
        if spent <= self.persisted {
            return None;
        }
        self.persisted = spent;
        Some(Action::Persist(match self.budget.dollars_at(spent) {
            Some(dollars) => Record::Paid { time: spent, dollars },
            None => Record::Metered(spent),
        }))
    }

    /// Like [`persist`](Self::persist), but only once per [`METER_PERSIST_INTERVAL`].
    pub(super) fn persist_if_due(&mut self, now: Time) -> Option<Action> {
        let is_due = self.spent(now) >= self.persisted + METER_PERSIST_INTERVAL;
        is_due.then(|| self.persist(now)).flatten()
    }

    /// Sets the meter to a reading from the journal. Where that has no cost, the time since the last reading that has one
    /// costs the current price.
    pub(super) fn replay(&mut self, spent: Duration, dollars: Option<f64>) {
        self.meter = Meter { sum: spent, running_since: None };
        self.persisted = spent;
        if let Some(dollars) = dollars {
            (self.budget.paid, self.budget.paid_dollars) = (spent, dollars);
        }
        self.alerts = self.budget.alerts(spent);
    }

    /// Goes on from the time and the cost of `before`; returns the actions that persist them.
    pub(super) fn carry_over(&mut self, before: &Self, now: Time) -> Vec<Action> {
        let Budget { paid, paid_dollars, .. } = before.budget;
        let spent = before.spent(now);
        self.replay(paid, Some(paid_dollars));
        self.replay(spent, None);
        let known = Record::Paid { time: paid, dollars: paid_dollars };
        let known = (!paid.is_zero()).then_some(known);
        known.into_iter().chain([Record::Metered(spent)]).map(Action::Persist).collect()
    }
}
