//! Lines out of bytes, and no more of them than others can take.

use std::time::{Duration, Instant};

/// Lines a second that go through, over a while.
const RATE: f64 = 500.0;
/// Lines at once that go through after a quiet time.
const BURST: f64 = 1_000.0;
/// Bytes of a line that go through.
const LONGEST: usize = 4_096;

/// A line that goes through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// Without its end; cut if it is very long.
    pub(super) text: String,
    /// Lines left out before it.
    pub(super) left_out: u64,
}

/// What one source writes, made into lines.
#[derive(Debug)]
pub(super) struct Sieve {
    /// The beginning of a line whose end has not been seen.
    begun: Vec<u8>,
    /// Bytes of it that are not kept.
    cut: bool,
    /// What was read does not begin at the beginning of a line.
    torn: bool,
    left_out: u64,
    /// Lines that may go through now, and when that was counted.
    credit: f64,
    counted_at: Instant,
}

impl Sieve {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            begun: Vec::new(),
            cut: false,
            torn: false,
            left_out: 0,
            credit: BURST,
            counted_at: now,
        }
    }

    /// The lines that end in what comes next.
    pub(super) fn take(&mut self, now: Instant, text: &[u8]) -> Vec<Line> {
        let since = now.saturating_duration_since(self.counted_at);
        self.credit = (self.credit + RATE * Duration::as_secs_f64(&since)).min(BURST);
        self.counted_at = now;
        let mut lines = Vec::new();
        let mut pieces = text.split(|byte| *byte == b'\n');
        // The last piece has no end as yet.
        let rest = pieces.next_back().unwrap_or_default();
        for piece in pieces {
            self.add(piece);
            lines.extend(self.end());
        }
        self.add(rest);
        lines
    }

    /// A part of what was written is not read: at least one line.
    pub(super) fn skip_a_part(&mut self) {
        self.begun.clear();
        (self.cut, self.torn) = (false, true);
    }

    /// These went through, and then there was no room for them.
    pub(super) fn leave_out(&mut self, lines: Vec<Line>) {
        self.left_out += lines.iter().map(|line| 1 + line.left_out).sum::<u64>();
    }

    fn add(&mut self, piece: &[u8]) {
        let room = LONGEST - self.begun.len().min(LONGEST);
        self.cut |= piece.len() > room;
        self.begun.extend_from_slice(&piece[..piece.len().min(room)]);
    }

    fn end(&mut self) -> Option<Line> {
        let bytes = std::mem::take(&mut self.begun);
        let cut = std::mem::take(&mut self.cut);
        if std::mem::take(&mut self.torn) || self.credit < 1.0 {
            self.left_out += 1;
            return None;
        }
        self.credit -= 1.0;
        let mut text = String::from_utf8_lossy(&bytes).trim_end_matches('\r').to_owned();
        if cut {
            text.push('…');
        }
        Some(Line { text, left_out: std::mem::take(&mut self.left_out) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line {
        Line { text: text.to_owned(), left_out: 0 }
    }

    #[test]
    fn lines_end_where_they_end_however_they_come() {
        let now = Instant::now();
        let mut sieve = Sieve::new(now);
        assert_eq!(sieve.take(now, b"a\nb"), [line("a")]);
        assert_eq!(sieve.take(now, b"c"), []);
        assert_eq!(sieve.take(now, b"\r\n\nd\n"), [line("bc"), line(""), line("d")]);
        assert_eq!(sieve.take(now, b"\xff\n"), [line("\u{fffd}")]);
    }

    #[test]
    fn a_flood_goes_through_at_its_rate_and_the_rest_is_counted() {
        let start = Instant::now();
        let mut sieve = Sieve::new(start);
        let flood = "x\n".repeat(10_000);
        let mut through = 0;
        let mut left_out = 0;
        for second in 0..5 {
            let lines = sieve.take(start + Duration::from_secs(second), flood.as_bytes());
            through += lines.len();
            left_out += lines.iter().map(|line| line.left_out).sum::<u64>();
        }
        assert_eq!(through, 1_000 + 4 * 500);
        assert_eq!(left_out, 9_000 + 3 * 9_500, "those before the last that went through");
    }

    #[test]
    fn a_line_without_an_end_costs_no_more_than_a_long_one() {
        let now = Instant::now();
        let mut sieve = Sieve::new(now);
        for _ in 0..100 {
            assert_eq!(sieve.take(now, &[b'x'; 60_000]), []);
        }
        let long = sieve.take(now, b"y\nz\n");
        assert_eq!(long[0].text, "x".repeat(LONGEST) + "…");
        assert_eq!(long[1], line("z"));
    }

    #[test]
    fn the_rest_of_a_line_whose_beginning_was_not_read_is_no_line() {
        let now = Instant::now();
        let mut sieve = Sieve::new(now);
        sieve.take(now, b"begun");
        sieve.skip_a_part();
        assert_eq!(
            sieve.take(now, b"rest\nwhole\n"),
            [Line { text: "whole".to_owned(), left_out: 1 }]
        );
    }
}
