//! Saving and stopping before a deadline.

use crate::time::Time;
use baton_recipe::Step;

/// A request to save and stop, and how far that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainStatus {
    /// Why, in words.
    pub reason: String,
    /// When it was asked for.
    pub since: Time,
    /// When nobody waits for it any more.
    pub until: Time,
    /// The update after which all ranks stop, once they have agreed on it.
    pub stop_step: Option<Step>,
    /// When they had.
    pub agreed_at: Option<Time>,
    /// When the state was copied and nothing was left but to write it.
    pub copied_at: Option<Time>,
    /// When it was durable and committed.
    pub durable_at: Option<Time>,
}

/// How far rank 0 reports to have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainStage {
    Agreed,
    Copied,
    Durable,
}

impl DrainStatus {
    pub(super) fn new(reason: String, since: Time, until: Time) -> Self {
        Self {
            reason,
            since,
            until,
            stop_step: None,
            agreed_at: None,
            copied_at: None,
            durable_at: None,
        }
    }

    /// Notes how far saving and stopping has come; what to announce if that is news.
    pub(super) fn advance(&mut self, now: Time, step: Step, stage: DrainStage) -> Option<String> {
        let (at, what) = match stage {
            DrainStage::Agreed => {
                self.stop_step = Some(step);
                (&mut self.agreed_at, format!("all ranks stop after step {step}"))
            }
            DrainStage::Copied => {
                (&mut self.copied_at, format!("the state after step {step} is copied"))
            }
            DrainStage::Durable if self.stop_step == Some(step) => {
                (&mut self.durable_at, format!("the state after step {step} is durable"))
            }
            DrainStage::Durable => return None,
        };
        if at.is_some() {
            return None;
        }
        *at = Some(now);
        let (took, left) = (now.since(self.since).as_secs_f64(), self.until.since(now).as_secs());
        Some(format!("{what}, {took:.1} s after the wish; {left} s are left"))
    }
}
