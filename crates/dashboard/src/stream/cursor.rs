//! How far a client has got.

use std::fmt;

/// How far a client has got. Written `EVENT.MILLIS.COUNT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    /// Events up to this one.
    pub(super) event: u64,
    /// Points told before this time,
    millis: u64,
    /// and so many of those told in that very millisecond: an update and its evaluation may share one.
    count: u64,
}

impl Cursor {
    /// All events up to `event`, and all points told up to `millis`.
    pub(super) fn after(event: u64, millis: u64) -> Self {
        // No point is told in the next millisecond as yet, as far as this client knows.
        let millis = if millis == 0 { 0 } else { millis.saturating_add(1) };
        Self { event, millis, count: 0 }
    }

    pub(super) fn parse(id: &str) -> Option<Self> {
        let mut numbers = id.split('.').map(|number| number.parse().ok());
        let cursor =
            Self { event: numbers.next()??, millis: numbers.next()??, count: numbers.next()?? };
        numbers.next().is_none().then_some(cursor)
    }

    /// The time after which points are to be asked for.
    pub(super) fn ask_points_after(&self) -> u64 {
        self.millis.saturating_sub(1)
    }

    /// Takes in a point told at this time.
    pub(super) fn pass_point(&mut self, millis: u64) {
        if millis > self.millis {
            (self.millis, self.count) = (millis, 0);
        }
        // A clock that was set back must not bring old points again.
        if millis == self.millis {
            self.count += 1;
        }
    }

    /// Tells points that the client has from those that are new, in the order in which they come.
    pub(super) fn had(&self) -> Had {
        Had { millis: self.millis, left: self.count }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.event, self.millis, self.count)
    }
}

/// Points that a client has already, of the one millisecond where it was cut off.
#[derive(Debug)]
pub(super) struct Had {
    millis: u64,
    left: u64,
}

impl Had {
    /// Whether the client has this point, told at this time.
    pub(super) fn has(&mut self, millis: u64) -> bool {
        let has = self.left > 0 && millis == self.millis;
        self.left -= u64::from(has);
        has
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_is_written() {
        let mut cursor = Cursor::after(7, 0);
        [90, 100, 100].into_iter().for_each(|millis| cursor.pass_point(millis));
        assert_eq!(cursor.to_string(), "7.100.2");
        assert_eq!(Cursor::parse("7.100.2"), Some(cursor));
    }

    #[test]
    fn what_is_no_cursor_is_refused() {
        for id in ["", "1", "1.2", "1.2.3.4", "a.2.3", "-1.2.3", "1.2.", "99999999999999999999.1.1"]
        {
            assert_eq!(Cursor::parse(id), None, "{id:?}");
        }
    }

    #[test]
    fn of_points_told_in_one_millisecond_only_the_new_ones_come_again() {
        let cursor = Cursor::parse("7.100.2").unwrap();
        assert_eq!(cursor.ask_points_after(), 99);
        let mut had = cursor.had();
        let again = [100, 100, 100, 101].map(|millis| had.has(millis));
        assert_eq!(again, [true, true, false, false]);
    }

    #[test]
    fn who_names_a_time_gets_what_was_told_later() {
        assert_eq!(Cursor::after(0, 0).ask_points_after(), 0);
        assert_eq!(Cursor::after(0, 100).ask_points_after(), 100);
        assert!(!Cursor::after(0, 100).had().has(101));
    }

    #[test]
    fn a_clock_that_was_set_back_brings_nothing_again() {
        let mut cursor = Cursor::parse("7.100.2").unwrap();
        cursor.pass_point(50);
        assert_eq!(cursor.to_string(), "7.100.2");
    }
}
