//! Lines for files and pipes: every event, and progress at intervals.

use std::time::Duration;

use baton_job::Time;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};

use super::Display;
use crate::{
    output,
    render::{self, Day, Paint},
};

#[derive(Default)]
pub(super) struct PlainDisplay {
    limiter: ProgressLimiter,
}

impl Display for PlainDisplay {
    fn event(&mut self, event: &WatchEventsResponse) {
        output::job_line(render::event(event, Day::Hidden, Paint::Plain));
    }

    fn status(&mut self, now: Time, status: &GetStatusResponse) {
        if self.limiter.is_due(now, status)
            && let Some(line) = render::progress_line(status)
        {
            output::job_line(line);
        }
    }

    fn note(&mut self, text: &str) {
        output::job_line(format_args!("baton: {text}"));
    }

    fn end(&mut self, _exit_code: u8, _status: Option<&GetStatusResponse>, text: &str) {
        output::job_line(text);
    }
}

/// Decides when to print progress: at the start of every epoch, and every ten seconds while there are new steps.
#[derive(Clone, Debug, Default)]
pub(super) struct ProgressLimiter {
    /// Time, step and epoch of the last line.
    last: Option<(Time, u64, u32)>,
}

impl ProgressLimiter {
    const INTERVAL: Duration = Duration::from_secs(10);

    pub(super) fn is_due(&mut self, now: Time, status: &GetStatusResponse) -> bool {
        // After the job's end there is no progress.
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
    fn progress_is_printed_each_epoch_and_every_ten_seconds_of_steps() {
        let mut limiter = ProgressLimiter::default();
        let mut is_due = |millis, epoch, step| {
            let latest = Some(v1::Step { step, epoch, ..v1::Step::default() });
            limiter.is_due(Time(millis), &GetStatusResponse { latest, ..Default::default() })
        };
        assert!(is_due(0, 0, 1), "the first");
        assert!(!is_due(500, 0, 2), "a moment later");
        assert!(is_due(1_000, 1, 10), "a new epoch");
        assert!(!is_due(10_999, 1, 11), "not yet ten seconds");
        assert!(is_due(11_000, 1, 12), "ten seconds");
        assert!(!is_due(60_000, 1, 12), "no step was made");
    }

    #[test]
    fn nothing_is_printed_before_the_first_step() {
        assert!(!ProgressLimiter::default().is_due(Time(0), &GetStatusResponse::default()));
    }
}
