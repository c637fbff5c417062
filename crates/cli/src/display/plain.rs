//! Lines for files and pipes: every event, and progress now and then.

use std::time::Duration;

use baton_job::Time;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};

use super::Display;
use crate::{
    output,
    render::{self, Day, Paint},
};

#[derive(Default)]
pub(super) struct Plain {
    pace: Pace,
}

impl Display for Plain {
    fn event(&mut self, event: &WatchEventsResponse) {
        output::tell(render::event(event, Day::Hidden, Paint::Plain));
    }

    fn status(&mut self, now: Time, status: &GetStatusResponse) {
        if self.pace.is_due(now, status)
            && let Some(line) = render::progress_line(status)
        {
            output::tell(line);
        }
    }

    fn note(&mut self, text: &str) {
        output::tell(format_args!("baton: {text}"));
    }

    fn end(&mut self, _exit_code: u8, _status: Option<&GetStatusResponse>, words: &str) {
        output::tell(words);
    }
}

/// Says when progress is worth a line: at the end of every epoch, and every ten seconds while steps
/// are made.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// When the last line was written; its step and epoch.
    last: Option<(Time, u64, u32)>,
}

impl Pace {
    const INTERVAL: Duration = Duration::from_secs(10);

    pub(super) fn is_due(&mut self, now: Time, status: &GetStatusResponse) -> bool {
        // Once the job is over there is no progress, only its end.
        let Some(step) = status.latest.as_ref().filter(|_| status.outcome.is_none()) else {
            return false;
        };
        let due = match self.last {
            None => true,
            Some((_, last, _)) if last == step.step => false,
            Some((_, _, epoch)) if epoch != step.epoch => true,
            Some((at, _, _)) => now.since(at) >= Self::INTERVAL,
        };
        if due {
            self.last = Some((now, step.step, step.epoch));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use baton_proto::v1;

    use super::*;

    #[test]
    fn progress_is_told_each_epoch_and_every_ten_seconds_of_steps() {
        let mut pace = Pace::default();
        let mut is_due = |millis, epoch, step| {
            let latest = Some(v1::Step { step, epoch, ..v1::Step::default() });
            pace.is_due(Time(millis), &GetStatusResponse { latest, ..Default::default() })
        };
        assert!(is_due(0, 0, 1), "the first");
        assert!(!is_due(500, 0, 2), "a moment later");
        assert!(is_due(1_000, 1, 10), "a new epoch");
        assert!(!is_due(10_999, 1, 11), "not yet ten seconds");
        assert!(is_due(11_000, 1, 12), "ten seconds");
        assert!(!is_due(60_000, 1, 12), "no step was made");
    }

    #[test]
    fn nothing_is_told_before_the_first_update() {
        assert!(!Pace::default().is_due(Time(0), &GetStatusResponse::default()));
    }
}
