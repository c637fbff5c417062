//! The newest updates, which the coordinator may have missed.

use std::collections::VecDeque;

use crate::message::StepReport;

/// Most updates that are kept while the coordinator listens: those of the time in which a broken connection is
/// noticed, and those that a killed coordinator had not written yet.
const MAX_RECENT: usize = 1_024;
/// Most updates that are kept while it does not; the coordinator itself shows no more in a curve.
const MAX_AWAY: usize = 4_096;

/// Updates of one generation, oldest first. The coordinator ignores those that it has.
#[derive(Clone, Debug, Default)]
pub(super) struct KeptSteps(VecDeque<StepReport>);

impl KeptSteps {
    /// Adds an update. With too many, the oldest is dropped if the coordinator is known to listen, and otherwise every
    /// second one.
    pub(super) fn add(&mut self, report: StepReport, is_answered: bool) {
        let Self(steps) = self;
        steps.push_back(report);
        if is_answered {
            steps.drain(..steps.len().saturating_sub(MAX_RECENT));
        } else if steps.len() > MAX_AWAY {
            // From the newest backwards, so that it is kept.
            let mut later = steps.len();
            steps.retain(|_| {
                later -= 1;
                later.is_multiple_of(2)
            });
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn to_vec(&self) -> Vec<StepReport> {
        self.0.iter().cloned().collect()
    }
}
