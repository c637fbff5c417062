//! The position of a client in the stream.

use std::fmt;

/// Position of a client in the stream: what it has received. Written as `EVENT.MILLIS.COUNT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// Id of the last received event.
    pub(crate) event: u64,
    /// All points before this time are received, Unix milliseconds.
    millis: u64,
    /// Number of received points of exactly this time: a step and its evaluation may have the same time.
    count: u64,
}

impl Cursor {
    /// The position after all events up to `event` and all points up to `millis`.
    pub(super) fn after(event: u64, millis: u64) -> Self {
        // The client has received no point of the next millisecond yet.
        let millis = if millis == 0 { 0 } else { millis.saturating_add(1) };
        Self { event, millis, count: 0 }
    }

    pub(super) fn parse(id: &str) -> Option<Self> {
        let mut numbers = id.split('.').map(|number| number.parse().ok());
        let cursor =
            Self { event: numbers.next()??, millis: numbers.next()??, count: numbers.next()?? };
        numbers.next().is_none().then_some(cursor)
    }

    /// The time after which points must be requested, Unix milliseconds.
    pub(super) fn request_points_after(&self) -> u64 {
        self.millis.saturating_sub(1)
    }

    /// Advances the position past a point of this time.
    pub(crate) fn advance_past_point(&mut self, millis: u64) {
        if millis > self.millis {
            (self.millis, self.count) = (millis, 0);
        }
        // If the clock was set back, the position must not go back, or old points would be sent again.
        if millis == self.millis {
            self.count += 1;
        }
    }

    /// A filter for points that the client has already received.
    pub(super) fn received(&self) -> ReceivedPoints {
        ReceivedPoints { millis: self.millis, remaining: self.count }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.event, self.millis, self.count)
    }
}

/// The points of the cursor's millisecond that the client has already received.
#[derive(Debug)]
pub(super) struct ReceivedPoints {
    millis: u64,
    remaining: u64,
}

impl ReceivedPoints {
    /// Whether the client has the next point, which has this time. Must be called for all points in order.
    pub(super) fn contains(&mut self, millis: u64) -> bool {
        let contains = self.remaining > 0 && millis == self.millis;
        self.remaining -= u64::from(contains);
        contains
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_can_be_written_and_parsed() {
        let mut cursor = Cursor::after(7, 0);
        [90, 100, 100].into_iter().for_each(|millis| cursor.advance_past_point(millis));
        assert_eq!(cursor.to_string(), "7.100.2");
        assert_eq!(Cursor::parse("7.100.2"), Some(cursor));
    }

    #[test]
    fn a_text_that_is_not_a_cursor_is_refused() {
        for id in ["", "1", "1.2", "1.2.3.4", "a.2.3", "-1.2.3", "1.2.", "99999999999999999999.1.1"]
        {
            assert_eq!(Cursor::parse(id), None, "{id:?}");
        }
    }

    #[test]
    fn of_points_of_one_millisecond_only_the_new_ones_are_sent() {
        let cursor = Cursor::parse("7.100.2").unwrap();
        assert_eq!(cursor.request_points_after(), 99);
        let mut received = cursor.received();
        let again = [100, 100, 100, 101].map(|millis| received.contains(millis));
        assert_eq!(again, [true, true, false, false]);
    }

    #[test]
    fn a_client_that_gives_a_time_gets_later_points() {
        assert_eq!(Cursor::after(0, 0).request_points_after(), 0);
        assert_eq!(Cursor::after(0, 100).request_points_after(), 100);
        assert!(!Cursor::after(0, 100).received().contains(101));
    }

    #[test]
    fn no_point_is_sent_again_after_the_clock_was_set_back() {
        let mut cursor = Cursor::parse("7.100.2").unwrap();
        cursor.advance_past_point(50);
        assert_eq!(cursor.to_string(), "7.100.2");
    }
}
