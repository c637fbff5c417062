//! Which rank processes hang: they do not answer, or are at one thing for too long.

use std::time::Duration;

use crate::{
    exit::{Class, Failure},
    message::{Activity, Pulse},
    time::Time,
};

/// How often a rank tells what it does.
pub const PULSE: Duration = Duration::from_secs(1);

/// When a process was last heard of, and what it did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Heard {
    pub(super) at: Time,
    pub(super) pulse: Pulse,
}

impl Heard {
    /// When it counts as hanging if nothing more is heard.
    pub(super) fn silent_at(&self, patience: Duration) -> Time {
        self.at.after(patience)
    }

    /// Why its process has to go, if it has.
    pub(super) fn verdict(&self, now: Time, patience: Duration) -> Option<Failure> {
        let Pulse { activity, seconds, step, .. } = self.pulse;
        let place = format!("after step {step}");
        let message = if self.silent_at(patience) <= now {
            let seconds = patience.as_secs_f64();
            format!(
                "its process did not answer for {seconds} s {place}; the last it did was {}",
                activity.name()
            )
        } else if longest(activity, patience).is_some_and(|longest| seconds >= longest) {
            format!("its process has been {} for {seconds:.1} s {place}", activity.name())
        } else {
            return None;
        };
        let message = format!("{message}; it was killed (cluster.hang_seconds)");
        Some(Failure { class: Class::Crash, message })
    }
}

/// For how many seconds a rank may be at one thing.
fn longest(activity: Activity, patience: Duration) -> Option<f64> {
    let patience = patience.as_secs_f64();
    match activity {
        Activity::Computing | Activity::Evaluating => Some(patience),
        // Disks and buckets have patience of their own, of minutes.
        Activity::Loading | Activity::Saving => Some(4.0 * patience),
        // Not its own fault; collectives and meetings have a deadline of their own.
        Activity::Exchanging | Activity::Restoring => None,
        // For as long as its user likes, but it looks up every moment.
        Activity::Paused => Some(4.0 * patience),
    }
}
