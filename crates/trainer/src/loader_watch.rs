//! What a rank tells of its loaders.

use std::time::{Duration, Instant};

use baton_data::Stats;
use baton_job::message::LoaderNews;

/// Time between two reports.
const EVERY: Duration = Duration::from_secs(1);

/// Sums over all loaders that a rank process has had.
#[derive(Debug, Default)]
pub(crate) struct LoaderWatch {
    /// Of loaders that have ended.
    skipped: u64,
    last_skipped: Option<String>,
    /// When was told, and how long the loader had been waited for by then.
    told: Option<(Instant, Duration)>,
}

impl LoaderWatch {
    /// A new training loader takes over: its waits count from 0.
    pub(crate) fn begin(&mut self) {
        self.told = None;
    }

    /// A loader has ended.
    pub(crate) fn end(&mut self, stats: Stats) {
        self.skipped += stats.skipped;
        self.last_skipped = stats.last_skipped.or(self.last_skipped.take());
    }

    /// What is to be told of the present training loader, if it is time to.
    pub(crate) fn news(&mut self, now: Instant, stats: &Stats) -> Option<LoaderNews> {
        let wait = match self.told {
            Some((told, _)) if now - told < EVERY => return None,
            Some((told, waited)) => {
                let seconds = (now - told).as_secs_f64();
                (stats.waited.saturating_sub(waited).as_secs_f64() / seconds).min(1.0)
            }
            None => 0.0,
        };
        self.told = Some((now, stats.waited));
        Some(LoaderNews {
            wait,
            ready: u32::try_from(stats.ready).unwrap_or(u32::MAX),
            room: u32::try_from(stats.room).unwrap_or(u32::MAX),
            skipped: self.skipped + stats.skipped,
            last_skipped: stats.last_skipped.clone().or_else(|| self.last_skipped.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(waited_ms: u64, skipped: u64, last: Option<&str>) -> Stats {
        Stats {
            waited: Duration::from_millis(waited_ms),
            ready: 2,
            room: 3,
            skipped,
            last_skipped: last.map(str::to_owned),
            ..Stats::default()
        }
    }

    #[test]
    fn the_wait_is_the_share_of_the_time_since_the_last_report() {
        let (mut watch, start) = (LoaderWatch::default(), Instant::now());
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let first = watch.news(at(0.0), &stats(400, 0, None)).unwrap();
        assert_eq!((first.wait, first.ready, first.room), (0.0, 2, 3));
        assert_eq!(watch.news(at(0.9), &stats(500, 0, None)), None);
        let second = watch.news(at(2.0), &stats(900, 0, None)).unwrap();
        assert!((second.wait - 0.25).abs() < 1e-9, "{}", second.wait);
    }

    #[test]
    fn skipped_samples_add_up_over_loaders_and_the_last_reason_stays() {
        let (mut watch, now) = (LoaderWatch::default(), Instant::now());
        watch.end(stats(0, 2, Some("a.beton: sample 7")));
        watch.end(stats(0, 0, None));
        watch.begin();
        let news = watch.news(now, &stats(0, 1, None)).unwrap();
        assert_eq!((news.skipped, news.last_skipped.as_deref()), (3, Some("a.beton: sample 7")));
    }
}
