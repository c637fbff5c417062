//! Drops notices that were already reported.

use std::time::{Duration, SystemTime};

use crate::{
    InterruptionNotice, NoticeSource,
    document::{Announcement, Document, Meaning},
};

/// A notice is reported again if its end became earlier by more than this.
const MIN_CHANGE: Duration = Duration::from_secs(10);

/// Remembers the last notice of one source, so that each notice is reported once.
#[derive(Debug)]
pub(crate) struct NoticeFilter {
    pub(crate) source: NoticeSource,
    reported: Option<ReportedNotice>,
    /// Whether the last document was malformed.
    is_malformed: bool,
}

/// The last notice that was reported.
#[derive(Debug)]
struct ReportedNotice {
    action: Option<String>,
    end: Option<SystemTime>,
    /// Whether the document has disappeared since.
    is_withdrawn: bool,
}

/// What to report after one document was read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FilterResult {
    pub(crate) notice: Option<InterruptionNotice>,
    /// Problem of the document; only for the first of several malformed documents in a row.
    pub(crate) warning: Option<String>,
}

impl NoticeFilter {
    pub(crate) fn new(source: NoticeSource) -> Self {
        Self { source, reported: None, is_malformed: false }
    }

    /// Returns what to report about a document that was read at `now`.
    pub(crate) fn update(&mut self, document: Document, now: SystemTime) -> FilterResult {
        let was_malformed = std::mem::replace(&mut self.is_malformed, document.problem.is_some());
        let warning = document.problem.filter(|_| !was_malformed);
        let notice = match document.meaning {
            Meaning::Announced(announcement) => self.announce(announcement, now),
            Meaning::Unknown => None,
            Meaning::NotAnnounced => {
                if let Some(reported) = &mut self.reported {
                    reported.is_withdrawn = true;
                }
                None
            }
        };
        FilterResult { notice, warning }
    }

    fn announce(
        &mut self,
        announcement: Announcement,
        now: SystemTime,
    ) -> Option<InterruptionNotice> {
        let end = announcement.end.map(|end| end.max(now));
        if let Some(reported) = &mut self.reported
            && !reported.is_over(now)
            && !reported.is_other(&announcement)
            && !reported.ends_much_later_than(end)
        {
            reported.is_withdrawn = false;
            return None;
        }
        let before = self.reported.take().and_then(|reported| reported.action);
        self.reported = Some(ReportedNotice {
            action: announcement.action.or(before),
            end,
            is_withdrawn: false,
        });
        Some(InterruptionNotice { source: self.source, reason: announcement.reason, end })
    }
}

impl ReportedNotice {
    /// Whether the next announcement is a new notice. A notice that disappears and comes back is the same one, unless
    /// its time has passed in the meantime: an instance can wake from hibernation or return from standby, and be
    /// interrupted again.
    fn is_over(&self, now: SystemTime) -> bool {
        self.is_withdrawn && self.end.is_none_or(|end| end <= now)
    }

    fn is_other(&self, announcement: &Announcement) -> bool {
        announcement.action.is_some() && announcement.action != self.action
    }

    /// Whether the reported end is much later than `end`, or was unknown. An `end` that is later than the reported one
    /// is ignored, because in AWS's mock service the end moves later with every poll.
    fn ends_much_later_than(&self, end: Option<SystemTime>) -> bool {
        match (self.end, end) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(reported), Some(end)) => {
                reported.duration_since(end).is_ok_and(|by| by > MIN_CHANGE)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOT_ANNOUNCED: Document = Document { meaning: Meaning::NotAnnounced, problem: None };
    const UNREADABLE: &[u8] = b"{";

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds)
    }

    fn announcement(action: Option<&str>, end: Option<u64>) -> Document {
        let action = action.map(str::to_owned);
        let announcement = Announcement { action, end: end.map(at), reason: "a reason".into() };
        Document { meaning: Meaning::Announced(announcement), problem: None }
    }

    fn to_terminate(end: u64) -> Document {
        announcement(Some("terminate"), Some(end))
    }

    fn interruption(end: Option<u64>) -> Option<InterruptionNotice> {
        let source = NoticeSource::Interruption;
        Some(InterruptionNotice { source, reason: "a reason".into(), end: end.map(at) })
    }

    /// Passes the documents to a filter, two seconds apart, and returns the notice after each.
    fn notices(documents: impl IntoIterator<Item = Document>) -> Vec<Option<InterruptionNotice>> {
        let mut filter = NoticeFilter::new(NoticeSource::Interruption);
        let times = (0..).step_by(2).map(at);
        documents
            .into_iter()
            .zip(times)
            .map(|(next, now)| filter.update(next, now).notice)
            .collect()
    }

    #[test]
    fn notice_is_reported_once() {
        let reported = notices([to_terminate(120), to_terminate(120), to_terminate(120)]);
        assert_eq!(reported, [interruption(Some(120)), None, None]);
    }

    #[test]
    fn much_earlier_end_is_reported_again() {
        let reported = notices([to_terminate(120), to_terminate(110), to_terminate(109)]);
        assert_eq!(reported, [interruption(Some(120)), None, interruption(Some(109))]);
    }

    #[test]
    fn slowly_approaching_end_is_reported_again_after_ten_seconds() {
        let reported = notices((0..12).map(|index| to_terminate(120 - index)));
        let times: Vec<_> = reported.into_iter().flatten().map(|notice| notice.end).collect();
        assert_eq!(times, [Some(at(120)), Some(at(109))]);
    }

    #[test]
    fn another_action_is_another_notice() {
        let to_stop = || announcement(Some("stop"), Some(120));
        let reported = notices([to_stop(), to_terminate(130), to_terminate(130)]);
        assert_eq!(reported, [interruption(Some(120)), interruption(Some(130)), None]);
    }

    #[test]
    fn end_in_the_past_becomes_now() {
        let mut filter = NoticeFilter::new(NoticeSource::Interruption);
        assert_eq!(filter.update(to_terminate(1), at(60)).notice, interruption(Some(60)));
        assert_eq!(filter.update(to_terminate(1), at(62)).notice, None);
    }

    #[test]
    fn notice_without_an_end_is_reported_again_once_the_end_is_known() {
        let unknown = || announcement(None, None);
        let reported =
            notices([unknown(), unknown(), to_terminate(120), unknown(), to_terminate(122)]);
        let terminate = interruption(Some(120));
        assert_eq!(reported, [interruption(None), None, terminate, None, None]);
    }

    #[test]
    fn earlier_end_without_an_action_belongs_to_the_reported_action() {
        let reported =
            notices([to_terminate(300), announcement(None, Some(100)), to_terminate(100)]);
        assert_eq!(reported, [interruption(Some(300)), interruption(Some(100)), None]);
    }

    #[test]
    fn notice_that_returns_before_its_end_is_the_same() {
        // The last two documents are read after the end.
        let reported = notices([to_terminate(5), NOT_ANNOUNCED, to_terminate(5), to_terminate(5)]);
        assert_eq!(reported, [interruption(Some(5)), None, None, None]);
    }

    #[test]
    fn notice_after_the_end_of_the_last_one_is_reported() {
        let mut filter = NoticeFilter::new(NoticeSource::Interruption);
        let hibernate = |end| announcement(Some("hibernate"), Some(end));
        assert!(filter.update(hibernate(0), at(0)).notice.is_some());
        assert_eq!(filter.update(NOT_ANNOUNCED, at(900)).notice, None);
        assert_eq!(filter.update(hibernate(1_000), at(1_000)).notice, interruption(Some(1_000)));
    }

    #[test]
    fn malformed_documents_in_a_row_are_one_warning() {
        let mut filter = NoticeFilter::new(NoticeSource::Interruption);
        let malformed = || crate::document::read(NoticeSource::Interruption, Some(UNREADABLE));
        let first = filter.update(malformed(), at(0));
        assert!(first.notice.is_some_and(|notice| notice.end.is_none()));
        assert!(first.warning.is_some());
        assert_eq!(filter.update(malformed(), at(2)), FilterResult::default());
    }

    proptest! {
        #[test]
        fn end_that_moves_later_is_one_notice(steps in prop::collection::vec(0_u64..100, 1..50)) {
            let ends = steps.iter().scan(120, |end, step| { *end += step; Some(*end) });
            let reported = notices(ends.map(to_terminate));
            prop_assert_eq!(reported.into_iter().flatten().count(), 1);
        }

        /// An agent that obeys the last notice leaves in time, whatever the service answers in between.
        #[test]
        fn reported_end_is_never_much_later_than_the_real_one(
            // `None` means that there is no document.
            answers in prop::collection::vec(
                prop::option::of((0..3_usize, prop::option::of(0_u64..1_000))),
                1..50,
            ),
        ) {
            let mut filter = NoticeFilter::new(NoticeSource::Interruption);
            let mut last: Option<InterruptionNotice> = None;
            for (now, answer) in (0..).step_by(2).map(at).zip(answers) {
                let document = match answer {
                    None => NOT_ANNOUNCED,
                    Some((action, end)) => {
                        announcement([None, Some("stop"), Some("terminate")][action], end)
                    }
                };
                last = filter.update(document, now).notice.or(last);
                if let Some((_, end)) = answer {
                    let reported = last.as_ref().expect("an existing document was reported").end;
                    if let Some(end) = end.map(at) {
                        let reported = reported.expect("the end is known");
                        prop_assert!(reported <= end.max(now) + MIN_CHANGE);
                    }
                }
            }
        }
    }
}
