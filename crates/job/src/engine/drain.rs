//! A drain: save and stop before a deadline.

use crate::time::Time;
use baton_recipe::Step;

/// A request to save and stop, and its progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainStatus {
    /// Why, as text.
    pub reason: String,
    /// When it was requested.
    pub since: Time,
    /// Deadline: the job ends then, even if ranks have not stopped.
    pub until: Time,
    /// The update after which all ranks stop, once they have agreed on it.
    pub stop_step: Option<Step>,
    /// When they agreed.
    pub agreed_at: Option<Time>,
    /// When the state was copied and had yet to be written.
    pub copied_at: Option<Time>,
    /// When a machine had the state in a local checkpoint.
    pub locally_at: Option<Time>,
    /// When the state was durable and committed.
    pub durable_at: Option<Time>,
    /// Whether a user has requested it: then it is in the journal.
    pub by_user: bool,
    /// Whether it was requested from a coordinator that is lost.
    pub is_replayed: bool,
}

/// Stage of a drain that ranks report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainStage {
    Agreed,
    Copied,
    /// A local checkpoint is complete.
    SavedLocally,
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
            locally_at: None,
            durable_at: None,
            by_user: false,
            is_replayed: false,
        }
    }

    /// Records a stage; returns the text to publish if the stage is new.
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
            DrainStage::SavedLocally if self.stop_step == Some(step) => (
                &mut self.locally_at,
                format!("the state after step {step} is in a local checkpoint"),
            ),
            DrainStage::SavedLocally | DrainStage::Durable => return None,
        };
        if at.is_some() {
            return None;
        }
        *at = Some(now);
        let (took, left) = (now.since(self.since).as_secs_f64(), self.until.since(now).as_secs());
        Some(format!("{what}, {took:.1} s after the request; {left} s are left"))
    }
}
