//! A limit on the events that agents cause as often as they like: events stay in the journal, in reports and on pages.

use std::time::Duration;

use crate::time::Time;

/// Events that may follow each other at once. Of a large job, every node may send one.
const BURST: u32 = 1_000;
/// Time until one more event is allowed.
const REFILL: Duration = Duration::from_secs(10);

/// How many of these events are allowed now.
#[derive(Clone, Debug)]
pub(super) struct EventLimit {
    left: u32,
    refilled_at: Time,
}

impl EventLimit {
    pub(super) fn new(now: Time) -> Self {
        Self { left: BURST, refilled_at: now }
    }

    /// Whether one more event is allowed, which then counts.
    pub(super) fn allows(&mut self, now: Time) -> bool {
        let earned = now.since(self.refilled_at).as_secs() / REFILL.as_secs();
        let earned = u32::try_from(earned).unwrap_or(u32::MAX);
        if earned > 0 {
            self.left = self.left.saturating_add(earned).min(BURST);
            self.refilled_at = now;
        }
        let allowed = self.left > 0;
        self.left = self.left.saturating_sub(1);
        allowed
    }

    /// Whether the next event is not allowed at once.
    pub(super) fn is_used_up(&self) -> bool {
        self.left == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_every_ten_seconds_is_allowed() {
        let at = |seconds: u64| Time(1_000 * seconds);
        let mut limit = EventLimit::new(at(5));
        let allowed = (0..2 * BURST).filter(|_| limit.allows(at(6))).count();
        assert_eq!(allowed, BURST as usize);
        assert!(!limit.allows(at(14)) && limit.allows(at(15)) && !limit.allows(at(16)));
        let later = at(1_000_000);
        assert_eq!((0..2 * BURST).filter(|_| limit.allows(later)).count(), BURST as usize);
    }
}
