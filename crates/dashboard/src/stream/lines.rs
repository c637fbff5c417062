//! Limits log lines to a number that a browser can show.

use std::{collections::VecDeque, mem};

use baton_proto::v1::StreamLogsResponse as LogLine;

/// Most lines per second.
pub(super) const MAX_STREAM_LINES_PER_SECOND: usize = 100;

/// The newest lines since the last [`take`](Self::take); dropped lines are counted.
#[derive(Default)]
pub(super) struct LineBuffer(VecDeque<LogLine>);

impl LineBuffer {
    pub(super) fn push(&mut self, line: LogLine) {
        self.0.push_back(line);
        if self.0.len() > MAX_STREAM_LINES_PER_SECOND {
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
    fn with_too_many_lines_the_newest_are_kept_and_the_others_counted() {
        let mut lines = LineBuffer::default();
        lines.push(line(0, 5));
        (1..250).for_each(|number| lines.push(line(number, 0)));

        let kept = lines.take();
        assert_eq!(kept.len(), MAX_STREAM_LINES_PER_SECOND);
        assert_eq!((kept[0].line.as_str(), kept[0].left_out), ("150", 155));
        assert_eq!((kept[99].line.as_str(), kept[99].left_out), ("249", 0));
        assert!(lines.take().is_empty());
    }
}
