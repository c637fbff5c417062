//! What was told already, and what is news.

use std::time::{Duration, SystemTime};

use crate::{
    Kind, Notice,
    document::{Document, Going, Meaning},
};

/// An end that comes closer by more than this is told again.
const SLACK: Duration = Duration::from_secs(10);

/// Remembers what one source said.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) kind: Kind,
    told: Option<Told>,
    is_odd: bool,
}

#[derive(Debug)]
struct Told {
    action: Option<String>,
    end: Option<SystemTime>,
    /// The source has said since that nothing is to come.
    is_withdrawn: bool,
}

/// What is to be passed on after a reading.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct News {
    pub(crate) notice: Option<Notice>,
    /// The first odd document of a row.
    pub(crate) warning: Option<String>,
}

impl Seen {
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, told: None, is_odd: false }
    }

    pub(crate) fn take(&mut self, document: Document, now: SystemTime) -> News {
        let was_odd = std::mem::replace(&mut self.is_odd, document.problem.is_some());
        let warning = document.problem.filter(|_| !was_odd);
        let notice = match document.meaning {
            Meaning::Going(going) => self.hear(going, now),
            Meaning::Unsaid => None,
            Meaning::Staying => {
                if let Some(told) = &mut self.told {
                    told.is_withdrawn = true;
                }
                None
            }
        };
        News { notice, warning }
    }

    fn hear(&mut self, going: Going, now: SystemTime) -> Option<Notice> {
        let end = going.end.map(|end| end.max(now));
        if let Some(told) = &mut self.told
            && !told.is_over(now)
            && !told.is_other(&going)
            && !told.is_later_than(end)
        {
            told.is_withdrawn = false;
            return None;
        }
        let before = self.told.take().and_then(|told| told.action);
        self.told = Some(Told { action: going.action.or(before), end, is_withdrawn: false });
        Some(Notice { kind: self.kind, reason: going.reason, end })
    }
}

impl Told {
    /// A notice that vanishes and comes back is the same one, unless its time has passed meanwhile: an
    /// instance can wake from hibernation, or come back from standby, and be taken again.
    fn is_over(&self, now: SystemTime) -> bool {
        self.is_withdrawn && self.end.is_none_or(|end| end <= now)
    }

    fn is_other(&self, going: &Going) -> bool {
        going.action.is_some() && going.action != self.action
    }

    /// The time that AWS's mock gives slides away from poll to poll, so a later one is no news.
    fn is_later_than(&self, end: Option<SystemTime>) -> bool {
        match (self.end, end) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(told), Some(end)) => told.duration_since(end).is_ok_and(|by| by > SLACK),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAYING: Document = Document { meaning: Meaning::Staying, problem: None };
    const UNREADABLE: &[u8] = b"{";

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds)
    }

    fn going(action: Option<&str>, end: Option<u64>) -> Document {
        let action = action.map(str::to_owned);
        let going = Going { action, end: end.map(at), reason: "a reason".into() };
        Document { meaning: Meaning::Going(going), problem: None }
    }

    fn to_terminate(end: u64) -> Document {
        going(Some("terminate"), Some(end))
    }

    fn interruption(end: Option<u64>) -> Option<Notice> {
        let kind = Kind::Interruption;
        Some(Notice { kind, reason: "a reason".into(), end: end.map(at) })
    }

    /// Reads one document after the other, two seconds apart, and says what each was worth.
    fn notices(documents: impl IntoIterator<Item = Document>) -> Vec<Option<Notice>> {
        let mut seen = Seen::new(Kind::Interruption);
        let times = (0..).step_by(2).map(at);
        documents.into_iter().zip(times).map(|(next, now)| seen.take(next, now).notice).collect()
    }

    #[test]
    fn notice_is_told_once() {
        let told = notices([to_terminate(120), to_terminate(120), to_terminate(120)]);
        assert_eq!(told, [interruption(Some(120)), None, None]);
    }

    #[test]
    fn earlier_end_is_told_again_if_it_is_much_earlier() {
        let told = notices([to_terminate(120), to_terminate(110), to_terminate(109)]);
        assert_eq!(told, [interruption(Some(120)), None, interruption(Some(109))]);
    }

    #[test]
    fn end_that_creeps_closer_is_told_when_it_has_come_far() {
        let told = notices((0..12).map(|index| to_terminate(120 - index)));
        let times: Vec<_> = told.into_iter().flatten().map(|notice| notice.end).collect();
        assert_eq!(times, [Some(at(120)), Some(at(109))]);
    }

    #[test]
    fn another_action_is_another_notice() {
        let to_stop = || going(Some("stop"), Some(120));
        let told = notices([to_stop(), to_terminate(130), to_terminate(130)]);
        assert_eq!(told, [interruption(Some(120)), interruption(Some(130)), None]);
    }

    #[test]
    fn end_in_the_past_is_now() {
        let mut seen = Seen::new(Kind::Interruption);
        assert_eq!(seen.take(to_terminate(1), at(60)).notice, interruption(Some(60)));
        assert_eq!(seen.take(to_terminate(1), at(62)).notice, None);
    }

    #[test]
    fn unknown_end_is_told_and_told_again_once_it_is_known() {
        let unknown = || going(None, None);
        let told = notices([unknown(), unknown(), to_terminate(120), unknown(), to_terminate(122)]);
        let terminate = interruption(Some(120));
        assert_eq!(told, [interruption(None), None, terminate, None, None]);
    }

    #[test]
    fn earlier_end_without_an_action_belongs_to_the_action_that_was_told() {
        let told = notices([to_terminate(300), going(None, Some(100)), to_terminate(100)]);
        assert_eq!(told, [interruption(Some(300)), interruption(Some(100)), None]);
    }

    #[test]
    fn notice_that_comes_back_before_its_end_is_the_same() {
        // The last two are read after it.
        let told = notices([to_terminate(5), STAYING, to_terminate(5), to_terminate(5)]);
        assert_eq!(told, [interruption(Some(5)), None, None, None]);
    }

    #[test]
    fn instance_that_outlived_a_notice_is_told_of_the_next() {
        let mut seen = Seen::new(Kind::Interruption);
        let hibernate = |end| going(Some("hibernate"), Some(end));
        assert!(seen.take(hibernate(0), at(0)).notice.is_some());
        assert_eq!(seen.take(STAYING, at(900)).notice, None);
        assert_eq!(seen.take(hibernate(1_000), at(1_000)).notice, interruption(Some(1_000)));
    }

    #[test]
    fn odd_documents_in_a_row_are_one_warning() {
        let mut seen = Seen::new(Kind::Interruption);
        let odd = || crate::document::read(Kind::Interruption, Some(UNREADABLE));
        let first = seen.take(odd(), at(0));
        assert!(first.notice.is_some_and(|notice| notice.end.is_none()));
        assert!(first.warning.is_some());
        assert_eq!(seen.take(odd(), at(2)), News::default());
    }

    proptest! {
        #[test]
        fn time_that_slides_away_is_one_notice(steps in prop::collection::vec(0_u64..100, 1..50)) {
            let ends = steps.iter().scan(120, |end, step| { *end += step; Some(*end) });
            let told = notices(ends.map(to_terminate));
            prop_assert_eq!(told.into_iter().flatten().count(), 1);
        }

        /// Whoever heeds the last notice is gone in time, whatever the service says in between.
        #[test]
        fn end_that_was_told_is_never_much_later_than_the_one_that_holds(
            // None of it stands for no document.
            said in prop::collection::vec(
                prop::option::of((0..3_usize, prop::option::of(0_u64..1_000))),
                1..50,
            ),
        ) {
            let mut seen = Seen::new(Kind::Interruption);
            let mut last: Option<Notice> = None;
            for (now, said) in (0..).step_by(2).map(at).zip(said) {
                let document = match said {
                    None => STAYING,
                    Some((action, end)) => {
                        going([None, Some("stop"), Some("terminate")][action], end)
                    }
                };
                last = seen.take(document, now).notice.or(last);
                if let Some((_, end)) = said {
                    let told = last.as_ref().expect("a document that is there was told").end;
                    if let Some(end) = end.map(at) {
                        let told = told.expect("the end is known");
                        prop_assert!(told <= end.max(now) + SLACK);
                    }
                }
            }
        }
    }
}
