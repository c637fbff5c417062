//! Log lines, no more than a browser can show.

use std::{collections::VecDeque, mem};

use baton_proto::v1::StreamLogsResponse as LogLine;

/// So many lines a second.
pub(super) const MOST_LINES: usize = 100;

/// The newest lines since they were last taken; the others are counted.
#[derive(Default)]
pub(super) struct Lines(VecDeque<LogLine>);

impl Lines {
    pub(super) fn push(&mut self, line: LogLine) {
        self.0.push_back(line);
        if self.0.len() > MOST_LINES {
            let dropped = self.0.pop_front().map_or(0, |line| line.left_out.saturating_add(1));
            if let Some(oldest) = self.0.front_mut() {
                oldest.left_out = oldest.left_out.saturating_add(dropped);
            }
        }
    }

    pub(super) fn take(&mut self) -> VecDeque<LogLine> {
        mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: usize, left_out: u64) -> LogLine {
        LogLine { line: number.to_string(), left_out, ..LogLine::default() }
    }

    #[test]
    fn of_a_flood_the_newest_lines_stay_and_the_others_are_counted() {
        let mut lines = Lines::default();
        lines.push(line(0, 5));
        (1..250).for_each(|number| lines.push(line(number, 0)));

        let kept = lines.take();
        assert_eq!(kept.len(), MOST_LINES);
        assert_eq!((kept[0].line.as_str(), kept[0].left_out), ("150", 155));
        assert_eq!((kept[99].line.as_str(), kept[99].left_out), ("249", 0));
        assert!(lines.take().is_empty());
    }
}
