//! Reports on the data loaders of a rank.

use std::time::{Duration, Instant};

use baton_data::LoaderStats;
use baton_job::message::LoaderReport;

/// Time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Totals over all loaders of a rank process.
#[derive(Debug, Default)]
pub(crate) struct LoaderWatch {
    /// Samples skipped by loaders that have ended.
    skipped: u64,
    last_skipped: Option<String>,
    /// Time of the last report, and the loader's total waiting time up to then.
    last_report: Option<(Instant, Duration)>,
}

impl LoaderWatch {
    /// Starts watching a new training loader, whose waiting time starts at 0.
    pub(crate) fn begin(&mut self) {
        self.last_report = None;
    }

    /// Adds the totals of a loader that has ended.
    pub(crate) fn end(&mut self, stats: LoaderStats) {
        self.skipped += stats.skipped;
        self.last_skipped = stats.last_skipped.or(self.last_skipped.take());
    }

    /// The report on the current training loader, if one is due.
    pub(crate) fn report(&mut self, now: Instant, stats: &LoaderStats) -> Option<LoaderReport> {
        let wait = match self.last_report {
            Some((at, _)) if now - at < REPORT_INTERVAL => return None,
            Some((at, waited)) => {
                let seconds = (now - at).as_secs_f64();
                (stats.waited.saturating_sub(waited).as_secs_f64() / seconds).min(1.0)
            }
            None => 0.0,
        };
        self.last_report = Some((now, stats.waited));
        Some(LoaderReport {
            wait,
            ready: u32::try_from(stats.ready).unwrap_or(u32::MAX),
            capacity: u32::try_from(stats.capacity).unwrap_or(u32::MAX),
            skipped: self.skipped + stats.skipped,
            last_skipped: stats.last_skipped.clone().or_else(|| self.last_skipped.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(waited_ms: u64, skipped: u64, last: Option<&str>) -> LoaderStats {
        LoaderStats {
            waited: Duration::from_millis(waited_ms),
            ready: 2,
            capacity: 3,
            skipped,
            last_skipped: last.map(str::to_owned),
            ..LoaderStats::default()
        }
    }

    #[test]
    fn the_wait_is_the_share_of_the_time_since_the_last_report() {
        let (mut watch, start) = (LoaderWatch::default(), Instant::now());
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let first = watch.report(at(0.0), &stats(400, 0, None)).unwrap();
        assert_eq!((first.wait, first.ready, first.capacity), (0.0, 2, 3));
        assert_eq!(watch.report(at(0.9), &stats(500, 0, None)), None);
        let second = watch.report(at(2.0), &stats(900, 0, None)).unwrap();
        assert!((second.wait - 0.25).abs() < 1e-9, "{}", second.wait);
    }

    #[test]
    fn skipped_samples_add_up_over_loaders_and_the_last_reason_is_kept() {
        let (mut watch, now) = (LoaderWatch::default(), Instant::now());
        watch.end(stats(0, 2, Some("a.beton: sample 7")));
        watch.end(stats(0, 0, None));
        watch.begin();
        let report = watch.report(now, &stats(0, 1, None)).unwrap();
        assert_eq!(
            (report.skipped, report.last_skipped.as_deref()),
            (3, Some("a.beton: sample 7"))
        );
    }
}
