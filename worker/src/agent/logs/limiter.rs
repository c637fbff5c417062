//! Splits text into lines, and limits their rate and length.

use std::time::{Duration, Instant};

/// Sustained limit, in lines a second.
const MAX_LINES_PER_SECOND: f64 = 500.0;
/// Limit for a burst after a quiet period, in lines.
const MAX_BURST_LINES: f64 = 1_000.0;
/// Longest line, in bytes; the rest is cut off.
const MAX_LINE_BYTES: usize = 4_096;

/// A line within the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// Without the line break; cut if it is very long.
    pub(super) text: String,
    /// Number of lines left out before it.
    pub(super) left_out: u64,
}

/// Splits the text of one source into lines and drops lines above the rate limit.
#[derive(Debug)]
pub(super) struct LineLimiter {
    /// Beginning of a line whose end has not been read yet.
    unfinished: Vec<u8>,
    /// Whether bytes of this line were cut off.
    is_cut: bool,
    /// Whether the beginning of this line was not read.
    is_partial: bool,
    left_out: u64,
    /// Lines that may pass now, and when that was computed.
    credit: f64,
    counted_at: Instant,
}

impl LineLimiter {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            unfinished: Vec::new(),
            is_cut: false,
            is_partial: false,
            left_out: 0,
            credit: MAX_BURST_LINES,
            counted_at: now,
        }
    }

    /// Adds `text` and returns the lines that it completes.
    pub(super) fn add_text(&mut self, now: Instant, text: &[u8]) -> Vec<Line> {
        let since = now.saturating_duration_since(self.counted_at);
        self.credit = (self.credit + MAX_LINES_PER_SECOND * Duration::as_secs_f64(&since))
            .min(MAX_BURST_LINES);
        self.counted_at = now;
        let mut lines = Vec::new();
        let mut pieces = text.split(|byte| *byte == b'\n');
        // The last piece is not complete yet.
        let rest = pieces.next_back().unwrap_or_default();
        for piece in pieces {
            self.add(piece);
            lines.extend(self.finish_line());
        }
        self.add(rest);
        lines
    }

    /// Records that a part of the text, at least one line, was not read.
    pub(super) fn mark_skipped(&mut self) {
        self.unfinished.clear();
        (self.is_cut, self.is_partial) = (false, true);
    }

    /// Counts lines that this limiter returned but that could not be sent.
    pub(super) fn count_dropped(&mut self, lines: Vec<Line>) {
        self.left_out += lines.iter().map(|line| 1 + line.left_out).sum::<u64>();
    }

    fn add(&mut self, piece: &[u8]) {
        let room = MAX_LINE_BYTES - self.unfinished.len().min(MAX_LINE_BYTES);
        self.is_cut |= piece.len() > room;
        self.unfinished.extend_from_slice(&piece[..piece.len().min(room)]);
    }

    fn finish_line(&mut self) -> Option<Line> {
        let bytes = std::mem::take(&mut self.unfinished);
        let is_cut = std::mem::take(&mut self.is_cut);
        if std::mem::take(&mut self.is_partial) || self.credit < 1.0 {
            self.left_out += 1;
            return None;
        }
        self.credit -= 1.0;
        let mut text = String::from_utf8_lossy(&bytes).trim_end_matches('\r').to_owned();
        if is_cut {
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
    fn lines_are_split_correctly_however_the_text_arrives() {
        let now = Instant::now();
        let mut limiter = LineLimiter::new(now);
        assert_eq!(limiter.add_text(now, b"a\nb"), [line("a")]);
        assert_eq!(limiter.add_text(now, b"c"), []);
        assert_eq!(limiter.add_text(now, b"\r\n\nd\n"), [line("bc"), line(""), line("d")]);
        assert_eq!(limiter.add_text(now, b"\xff\n"), [line("\u{fffd}")]);
    }

    #[test]
    fn flood_is_limited_and_dropped_lines_are_counted() {
        let start = Instant::now();
        let mut limiter = LineLimiter::new(start);
        let flood = "x\n".repeat(10_000);
        let mut through = 0;
        let mut left_out = 0;
        for second in 0..5 {
            let lines = limiter.add_text(start + Duration::from_secs(second), flood.as_bytes());
            through += lines.len();
            left_out += lines.iter().map(|line| line.left_out).sum::<u64>();
        }
        assert_eq!(through, 1_000 + 4 * 500);
        assert_eq!(left_out, 9_000 + 3 * 9_500, "lines dropped before the last one that passed");
    }

    #[test]
    fn endless_line_is_cut() {
        let now = Instant::now();
        let mut limiter = LineLimiter::new(now);
        for _ in 0..100 {
            assert_eq!(limiter.add_text(now, &[b'x'; 60_000]), []);
        }
        let long = limiter.add_text(now, b"y\nz\n");
        assert_eq!(long[0].text, "x".repeat(MAX_LINE_BYTES) + "…");
        assert_eq!(long[1], line("z"));
    }

    #[test]
    fn partial_line_is_dropped() {
        let now = Instant::now();
        let mut limiter = LineLimiter::new(now);
        limiter.add_text(now, b"unfinished");
        limiter.mark_skipped();
        assert_eq!(
            limiter.add_text(now, b"rest\nwhole\n"),
            [Line { text: "whole".to_owned(), left_out: 1 }]
        );
    }
}
