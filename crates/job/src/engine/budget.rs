//! Time and money: how long nodes have been attached, and when that is enough.

use std::time::Duration;

use super::{Action, Record};
use crate::{exit::Outcome, time::Time};
use baton_recipe::spec::Limits;

/// While ranks train, at least so often the journal learns what the meter shows.
const METERED_EVERY: Duration = Duration::from_secs(60);

/// The shares of a budget whose use is announced: time to think, and to raise it.
const ALERTS: [f64; 3] = [0.5, 0.8, 0.95];

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

/// A part of what the meter shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// What has ended.
    pub(super) before: Duration,
    /// What the meter showed when the present piece began.
    pub(super) since: Option<Duration>,
}

impl Share {
    /// How much it is once the meter shows `spent`.
    #[must_use]
    pub fn read(&self, spent: Duration) -> Duration {
        let present = self.since.map(|since| spent.saturating_sub(since));
        self.before + present.unwrap_or_default()
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

    /// How many of [`ALERTS`] are used up after so much attached time.
    fn alerts(&self, spent: Duration) -> usize {
        ALERTS.iter().take_while(|share| spent >= self.share(**share)).count()
    }

    fn share(&self, share: f64) -> Duration {
        whole_millis(self.most.mul_f64(share))
    }
}

/// What the job costs, and when that is enough.
#[derive(Clone, Debug)]
pub(super) struct Accounting {
    pub(super) budget: Option<Budget>,
    pub(super) dollars_per_hour: Option<f64>,
    pub(super) meter: Meter,
    /// What the journal knows of the meter.
    persisted: Duration,
    /// How many of [`ALERTS`] were announced.
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
        let alert = ALERTS.get(self.alerts).map(|share| budget.share(*share));
        self.meter.shows_at(alert.unwrap_or(budget.most))
    }

    /// What to announce, once for each share of the budget whose use is worth knowing.
    pub(super) fn alert(&mut self, now: Time) -> Option<String> {
        let budget = self.budget.as_ref()?;
        let spent = self.spent(now);
        let announced = self.alerts;
        self.alerts = budget.alerts(spent).max(announced);
        if self.alerts == announced {
            return None;
        }
        let hours = |time: Duration| time.as_secs_f64() / 3_600.0;
        let percent = 100.0 * ALERTS[self.alerts - 1];
        let dollars = self.dollars_per_hour.map(|price| {
            format!(" ({:.2} of {:.2} dollars)", price * hours(spent), price * hours(budget.most))
        });
        Some(format!(
            "{percent} % of the budget is used up: {:.2} of {:.2} hours{}",
            hours(spent),
            hours(budget.most),
            dollars.unwrap_or_default()
        ))
    }

    /// Why the budget is used up, if it is.
    pub(super) fn used_up(&self, now: Time) -> Option<String> {
        let budget = self.budget.as_ref()?;
        (self.spent(now) >= budget.most).then(|| budget.reason.clone())
    }

    /// A drained job that could not go on is not merely drained: another start would end at once.
    pub(super) fn limited(&self, now: Time, outcome: Outcome) -> Outcome {
        match (outcome, self.used_up(now)) {
            (Outcome::Drained { reason }, Some(limit)) => {
                // The drain may have had to say more, or have begun for another reason.
                let names_limit = reason.starts_with(&limit);
                let reason = if names_limit { reason } else { format!("{limit} ({reason})") };
                Outcome::LimitReached { reason }
            }
            (outcome, _) => outcome,
        }
    }

    /// The meter runs while a node is attached and the job is not over.
    pub(super) fn run_meter(&mut self, now: Time, on: bool) {
        if on != self.meter.running_since.is_some() {
            self.meter.switch(now, on);
        }
    }

    /// What to write down of the meter, if that is news.
    pub(super) fn persist(&mut self, now: Time) -> Option<Action> {
        let spent = self.spent(now);
        if spent <= self.persisted {
            return None;
        }
        self.persisted = spent;
        Some(Action::Persist(Record::Metered(spent)))
    }

    /// The same, while nothing else makes an entry.
    pub(super) fn persist_now_and_then(&mut self, now: Time) -> Option<Action> {
        let is_due = self.spent(now) >= self.persisted + METERED_EVERY;
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

/// As the machine's clock goes: a wake at that time finds it reached.
fn whole_millis(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
