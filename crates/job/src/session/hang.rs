//! Detects hanging rank processes: those that send no heartbeats, or continue one activity for too long.

use std::time::Duration;

use crate::{
    exit::{Class, Failure},
    message::{Activity, RankHeartbeat},
    time::Time,
};

/// Time between two heartbeats of a rank.
pub const RANK_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// When the last message of a rank process was received, and its last heartbeat.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LastReport {
    pub(super) at: Time,
    pub(super) heartbeat: RankHeartbeat,
}

impl LastReport {
    /// When the process counts as hanging if no further message is received.
    pub(super) fn stale_at(&self, hang_timeout: Duration) -> Time {
        self.at.after(hang_timeout)
    }

    /// Why the process counts as hanging, if it does.
    pub(super) fn hang_failure(&self, now: Time, hang_timeout: Duration) -> Option<Failure> {
        let RankHeartbeat { activity, seconds, step, .. } = self.heartbeat;
        let position = format!("after step {step}");
        let message = if self.stale_at(hang_timeout) <= now {
            let seconds = hang_timeout.as_secs_f64();
            format!(
                "its process did not answer for {seconds} s {position}; its last activity was {}",
                activity.name()
            )
        } else if max_activity_seconds(activity, hang_timeout).is_some_and(|limit| seconds >= limit)
        {
            format!("its process has been {} for {seconds:.1} s {position}", activity.name())
        } else {
            return None;
        };
        let message = format!("{message}; it was killed (cluster.hang_seconds)");
        Some(Failure { class: Class::Crash, message })
    }
}

/// Longest time for one activity, seconds; `None` if there is no limit.
fn max_activity_seconds(activity: Activity, hang_timeout: Duration) -> Option<f64> {
    let hang_timeout = hang_timeout.as_secs_f64();
    match activity {
        Activity::Computing | Activity::Evaluating => Some(hang_timeout),
        // Disks and buckets have their own timeouts, of minutes.
        Activity::Loading | Activity::Saving => Some(4.0 * hang_timeout),
        // The rank waits for others; collectives and rendezvous have their own timeouts.
        Activity::Exchanging | Activity::Restoring => None,
        // A pause may last any time, but the rank often checks whether it is over, and each check restarts this time.
        Activity::Paused => Some(4.0 * hang_timeout),
    }
}
