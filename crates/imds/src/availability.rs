//! Whether the metadata service can be reached, and what to log when that changes.
//!
//! Every poll reports the documents in the same order.

use std::time::{Duration, Instant};

use crate::NoticeSource;

/// Availability of the metadata service and of each of its documents.
#[derive(Debug, Default)]
pub(crate) struct Availability {
    /// `None` until a service has been found.
    last_reads: Option<[LastRead; 3]>,
    /// Whether it was logged that there is no service.
    is_absence_logged: bool,
}

/// When a document was last read.
#[derive(Clone, Copy, Debug)]
struct LastRead {
    source: NoticeSource,
    at: Instant,
    /// Whether the current outage was logged.
    is_outage_logged: bool,
}

/// Result of polling one document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PollResult {
    /// The service answered with the document, or that it does not exist.
    Read,
    /// The service answered with an error.
    Refused,
    /// No service answered.
    NoService,
}

/// A line for the log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LogMessage {
    /// The service was found.
    Found,
    /// No service was found at the first poll.
    NotFound,
    /// Documents that could not be read, and for how long.
    Outage(Vec<NoticeSource>, Duration),
    /// Documents that can be read again, and the length of the outage.
    Recovered(Vec<NoticeSource>, Duration),
}

impl Availability {
    pub(crate) fn is_found(&self) -> bool {
        self.last_reads.is_some()
    }

    /// Records a poll of all documents and returns what to log. An outage is logged once it has lasted `warn_after`.
    pub(crate) fn record(
        &mut self,
        results: [(NoticeSource, PollResult); 3],
        now: Instant,
        warn_after: Duration,
    ) -> Vec<LogMessage> {
        let Some(last_reads) = &mut self.last_reads else {
            if results.iter().all(|(_, result)| *result == PollResult::NoService) {
                let was_logged = std::mem::replace(&mut self.is_absence_logged, true);
                return if was_logged { Vec::new() } else { vec![LogMessage::NotFound] };
            }
            let last_read = |(source, _)| LastRead { source, at: now, is_outage_logged: false };
            self.last_reads = Some(results.map(last_read));
            return vec![LogMessage::Found];
        };
        let (mut lost, mut recovered) = (Vec::new(), Vec::new());
        let mut longest = [Duration::ZERO; 2];
        for (last_read, (_, result)) in last_reads.iter_mut().zip(results) {
            let length = now.saturating_duration_since(last_read.at);
            match result {
                PollResult::Read => {
                    if last_read.is_outage_logged {
                        recovered.push(last_read.source);
                        longest[1] = longest[1].max(length);
                    }
                    (last_read.at, last_read.is_outage_logged) = (now, false);
                }
                PollResult::Refused | PollResult::NoService => {
                    if length >= warn_after && !last_read.is_outage_logged {
                        lost.push(last_read.source);
                        longest[0] = longest[0].max(length);
                        last_read.is_outage_logged = true;
                    }
                }
            }
        }
        let messages = [
            (!lost.is_empty()).then_some(LogMessage::Outage(lost, longest[0])),
            (!recovered.is_empty()).then_some(LogMessage::Recovered(recovered, longest[1])),
        ];
        messages.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{LogMessage::*, PollResult::*, *};

    const SOURCES: [NoticeSource; 3] =
        [NoticeSource::Interruption, NoticeSource::Rebalance, NoticeSource::Lifecycle];

    /// What is logged after results at the given seconds; outages are logged after 10 s.
    fn messages(results: &[(u64, [PollResult; 3])]) -> Vec<Vec<LogMessage>> {
        let start = Instant::now();
        let mut availability = Availability::default();
        let warn_after = Duration::from_secs(10);
        let record = |&(second, [first, second_document, third]): &(u64, [PollResult; 3])| {
            let [interruption, rebalance, lifecycle] = SOURCES;
            let read = [(interruption, first), (rebalance, second_document), (lifecycle, third)];
            availability.record(read, start + Duration::from_secs(second), warn_after)
        };
        results.iter().map(record).collect()
    }

    fn all(results: &[(u64, PollResult)]) -> Vec<Vec<LogMessage>> {
        let each: Vec<_> = results.iter().map(|&(second, result)| (second, [result; 3])).collect();
        messages(&each)
    }

    #[test]
    fn missing_service_is_logged_once() {
        assert_eq!(
            all(&[(0, NoService), (60, NoService), (120, NoService), (180, Read)]),
            [vec![NotFound], vec![], vec![], vec![Found]]
        );
    }

    #[test]
    fn short_outage_is_not_logged() {
        assert_eq!(
            all(&[(0, Read), (2, NoService), (4, Refused), (6, Read), (14, NoService)]),
            [vec![Found], vec![], vec![], vec![], vec![]]
        );
    }

    #[test]
    fn each_outage_is_logged_once_with_its_length() {
        let seconds = Duration::from_secs;
        assert_eq!(
            all(&[
                (0, Read),
                (9, NoService),
                (10, NoService),
                (12, Refused),
                (20, Read),
                (22, Read),
                (40, Refused),
            ]),
            [
                vec![Found],
                vec![],
                vec![Outage(SOURCES.to_vec(), seconds(10))],
                vec![],
                vec![Recovered(SOURCES.to_vec(), seconds(20))],
                vec![],
                vec![Outage(SOURCES.to_vec(), seconds(18))],
            ]
        );
    }

    #[test]
    fn outage_of_one_document_does_not_hide_that_of_another() {
        let seconds = Duration::from_secs;
        assert_eq!(
            messages(&[
                (0, [Read, Refused, Read]),
                (10, [Read, Refused, Read]),
                (20, [NoService, NoService, Read]),
                (21, [Read, Refused, Read]),
            ]),
            [
                vec![Found],
                vec![Outage(vec![NoticeSource::Rebalance], seconds(10))],
                vec![Outage(vec![NoticeSource::Interruption], seconds(10))],
                vec![Recovered(vec![NoticeSource::Interruption], seconds(11))],
            ]
        );
    }
}
