//! How fast training goes, and how often rank 0 reports it.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use baton_job::message::StepNews;

/// Samples per second over the last seconds, and the share of them spent waiting for the loader.
pub(crate) struct Throughput {
    /// When each of the last updates ended, its samples, and the loader wait so far.
    marks: VecDeque<(Instant, u64, Duration)>,
    reported_at: Option<Instant>,
}

impl Throughput {
    const WINDOW: Duration = Duration::from_secs(10);
    const REPORT_EVERY: Duration = Duration::from_millis(100);

    /// Measures from now on; `waited` is the loader wait so far.
    pub(crate) fn start(waited: Duration) -> Self {
        Self { marks: VecDeque::from([(Instant::now(), 0, waited)]), reported_at: None }
    }

    /// An update has ended.
    pub(crate) fn count(&mut self, samples: u64, waited: Duration) {
        let now = Instant::now();
        self.marks.push_back((now, samples, waited));
        while self.marks.len() > 2
            && self.marks.get(1).is_some_and(|(at, ..)| now - *at > Self::WINDOW)
        {
            self.marks.pop_front();
        }
    }

    /// What to report of an update: the first one, and then now and again.
    pub(crate) fn report(&mut self, news: StepNews) -> Option<StepNews> {
        if self.reported_at.is_some_and(|at| at.elapsed() < Self::REPORT_EVERY) {
            return None;
        }
        self.reported_at = Some(Instant::now());
        let (Some((first, _, waited_then)), Some((last, _, waited_now))) =
            (self.marks.front(), self.marks.back())
        else {
            return Some(news);
        };
        let seconds = (*last - *first).as_secs_f64().max(1e-9);
        let samples: u64 = self.marks.iter().skip(1).map(|(_, samples, _)| samples).sum();
        Some(StepNews {
            samples_per_second: samples as f64 / seconds,
            loader_wait: (waited_now.saturating_sub(*waited_then).as_secs_f64() / seconds).min(1.0),
            ..news
        })
    }
}
