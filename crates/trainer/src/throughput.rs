//! Training speed, and how often rank 0 reports it.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use baton_job::message::StepReport;

/// Samples per second over the last seconds, and the share of that time spent waiting for the loader.
pub(crate) struct Throughput {
    /// End of each recent update, its samples, and the loader wait until then.
    marks: VecDeque<(Instant, u64, Duration)>,
    reported_at: Option<Instant>,
}

impl Throughput {
    const WINDOW: Duration = Duration::from_secs(10);
    const REPORT_INTERVAL: Duration = Duration::from_millis(100);

    /// Measures from now on; `waited` is the total loader wait so far.
    pub(crate) fn start(waited: Duration) -> Self {
        Self { marks: VecDeque::from([(Instant::now(), 0, waited)]), reported_at: None }
    }

    /// Records the end of an update.
    pub(crate) fn count(&mut self, samples: u64, waited: Duration) {
        let now = Instant::now();
        self.marks.push_back((now, samples, waited));
        while self.marks.len() > 2
            && self.marks.get(1).is_some_and(|(at, ..)| now - *at > Self::WINDOW)
        {
            self.marks.pop_front();
        }
    }

    /// `step` completed with the measured speed, or `None` if the last report was sent too recently, unless it `is_due`.
    pub(crate) fn report(&mut self, step: StepReport, is_due: bool) -> Option<StepReport> {
        if !is_due && self.reported_at.is_some_and(|at| at.elapsed() < Self::REPORT_INTERVAL) {
            return None;
        }
        self.reported_at = Some(Instant::now());
        let (Some((first, _, waited_then)), Some((last, _, waited_now))) =
            (self.marks.front(), self.marks.back())
        else {
            return Some(step);
        };
        let seconds = (*last - *first).as_secs_f64().max(1e-9);
        let samples: u64 = self.marks.iter().skip(1).map(|(_, samples, _)| samples).sum();
        Some(StepReport {
            samples_per_second: samples as f64 / seconds,
            loader_wait: (waited_now.saturating_sub(*waited_then).as_secs_f64() / seconds).min(1.0),
            ..step
        })
    }
}
