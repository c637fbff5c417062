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

/// The budget that the recipe's limits set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Budget {
    /// Attached time at which the first of the limits is reached.
    pub(super) limit: Duration,
    /// Which limit it is, and what to do: always the same text.
    pub(super) reason: String,
}

impl Budget {
    pub(super) fn new(limits: &Limits) -> Option<Self> {
        let hours = limits.max_hours.map(|hours| {
            let reason = format!("limits.max_hours = {hours} is reached; raise it to resume");
            (hours, reason)
        });
        let dollars = limits.max_dollars.zip(limits.dollars_per_hour).map(|(dollars, price)| {
            let reason = format!(
                "limits.max_dollars = {dollars} is reached, at {price} dollars per hour; raise it to \
                 resume"
            );
            (dollars / price, reason)
        });
        let earlier = |one: (f64, String), other: (f64, String)| match one.0 <= other.0 {
            true => one,
            false => other,
        };
        let (hours, reason) = hours.into_iter().chain(dollars).reduce(earlier)?;
        // In whole milliseconds, like `Time`, so that a timeout set for the limit finds it reached.
        let limit = Duration::from_millis((hours * 3_600_000.0) as u64);
        Some(Self { limit, reason })
    }

    /// Number of [`ALERT_SHARES`] that are used up after `spent` attached time.
    fn alerts(&self, spent: Duration) -> usize {
        ALERT_SHARES.iter().take_while(|share| spent >= self.share(**share)).count()
    }

    fn share(&self, share: f64) -> Duration {
        whole_millis(self.limit.mul_f64(share))
    }
}

/// Metered time and cost of the job, and its budget.
#[derive(Clone, Debug)]
pub(super) struct Accounting {
    pub(super) budget: Option<Budget>,
    pub(super) dollars_per_hour: Option<f64>,
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
            dollars_per_hour: limits.dollars_per_hour,
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
        let budget = self.budget.as_ref()?;
        let alert = ALERT_SHARES.get(self.alerts).map(|share| budget.share(*share));
        self.meter.shows_at(alert.unwrap_or(budget.limit))
    }

    /// Text of an alert to publish, once for each of [`ALERT_SHARES`].
    pub(super) fn alert(&mut self, now: Time) -> Option<String> {
        let budget = self.budget.as_ref()?;
        let spent = self.spent(now);
        let published = self.alerts;
        self.alerts = budget.alerts(spent).max(published);
        if self.alerts == published {
            return None;
        }
        let hours = |time: Duration| time.as_secs_f64() / 3_600.0;
        let percent = 100.0 * ALERT_SHARES[self.alerts - 1];
        let dollars = self.dollars_per_hour.map(|price| {
            format!(" ({:.2} of {:.2} dollars)", price * hours(spent), price * hours(budget.limit))
        });
        Some(format!(
            "{percent} % of the budget is used up: {:.2} of {:.2} hours{}",
            hours(spent),
            hours(budget.limit),
            dollars.unwrap_or_default()
        ))
    }

    /// Why the budget is used up, if it is.
    pub(super) fn used_up(&self, now: Time) -> Option<String> {
        let budget = self.budget.as_ref()?;
        (self.spent(now) >= budget.limit).then(|| budget.reason.clone())
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
        Some(Action::Persist(Record::Metered(spent)))
    }

    /// Like [`persist`](Self::persist), but only once per [`METER_PERSIST_INTERVAL`].
    pub(super) fn persist_if_due(&mut self, now: Time) -> Option<Action> {
        let is_due = self.spent(now) >= self.persisted + METER_PERSIST_INTERVAL;
        is_due.then(|| self.persist(now)).flatten()
    }

    pub(super) fn replay(&mut self, spent: Duration) {
        self.meter = Meter { sum: spent, running_since: None };
        self.persisted = spent;
        if let Some(budget) = &self.budget {
            self.alerts = budget.alerts(spent);
        }
    }
}

/// Rounds down to whole milliseconds, like `Time`, so that a timeout set for this time finds it reached.
fn whole_millis(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
