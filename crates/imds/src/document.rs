//! Parser of the metadata service's documents.

use std::time::SystemTime;

use serde_json::Value;

use crate::NoticeSource;

impl NoticeSource {
    /// Path of the document.
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Interruption => "/latest/meta-data/spot/instance-action",
            Self::Rebalance => "/latest/meta-data/events/recommendations/rebalance",
            Self::Lifecycle => "/latest/meta-data/autoscaling/target-lifecycle-state",
        }
    }
}

/// A parsed document, and what is wrong with it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) meaning: Meaning,
    pub(crate) problem: Option<String>,
}

/// What a document announces.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// No end of the instance is announced.
    NotAnnounced,
    /// The document says nothing either way: the last announcement remains valid.
    Unknown,
    /// The end of the instance is announced.
    Announced(Announcement),
}

/// An announced end of the instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    /// What AWS will do, if the document names it. A different action is a new notice.
    pub(crate) action: Option<String>,
    /// Time given by AWS, which may be in the past.
    pub(crate) end: Option<SystemTime>,
    /// One line for people: the source, the action and the time.
    pub(crate) reason: String,
}

/// Parses a document; `body` is `None` after status 404.
pub(crate) fn read(source: NoticeSource, body: Option<&[u8]>) -> Document {
    let (meaning, problem) = match (source, body.map(String::from_utf8_lossy)) {
        // The instance belongs to no group, or it lost the document because its host was replaced (live migration).
        (NoticeSource::Lifecycle, None) => (Meaning::Unknown, None),
        (_, None) => (Meaning::NotAnnounced, None),
        (NoticeSource::Interruption, Some(text)) => interruption(&text),
        (NoticeSource::Rebalance, Some(text)) => rebalance(&text),
        (NoticeSource::Lifecycle, Some(text)) => lifecycle(text.trim()),
    };
    Document { meaning, problem: problem.map(|problem| format!("{}: {problem}", source.path())) }
}

/// Any document counts as a notice, even an unreadable one: leaving needlessly costs a restart from a checkpoint, but
/// staying by mistake costs all steps since the last checkpoint.
fn interruption(text: &str) -> (Meaning, Option<String>) {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let action = value.get("action").and_then(Value::as_str).filter(|action| is_word(action));
    let time = value.get("time").and_then(Value::as_str);
    let end = time.and_then(|time| humantime::parse_rfc3339(time).ok());
    let does = action.unwrap_or("an unreadable action");
    let (at, problem) = match (time, end) {
        (Some(time), Some(_)) if action.is_some() => (time, None),
        (Some(time), Some(_)) => (time, Some(format!("no action in {}", quoted(text)))),
        _ => ("an unknown time", Some(format!("no time in {}", quoted(text)))),
    };
    let reason = format!("AWS spot instance-action: {does} at {at}");
    (Meaning::Announced(Announcement { action: action.map(str::to_owned), end, reason }), problem)
}

/// An unreadable recommendation is ignored, but reported as a problem.
fn rebalance(text: &str) -> (Meaning, Option<String>) {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let time = value.get("noticeTime").and_then(Value::as_str);
    let Some(time) = time.filter(|time| humantime::parse_rfc3339(time).is_ok()) else {
        return (Meaning::Unknown, Some(format!("no noticeTime in {}", quoted(text))));
    };
    let reason = format!("AWS recommends to rebalance: elevated risk of interruption since {time}");
    (Meaning::Announced(Announcement { action: None, end: None, reason }), None)
}

/// The document holds the lifecycle state into which the Auto Scaling group moves the instance. The stopped and
/// hibernated states of a warm pool count like termination, because they stop all processes on the instance.
fn lifecycle(state: &str) -> (Meaning, Option<String>) {
    match state {
        "Terminated" | "Warmed:Terminated" | "Warmed:Stopped" | "Warmed:Hibernated" => {
            let reason = format!("AWS Auto Scaling target-lifecycle-state: {state}");
            (
                Meaning::Announced(Announcement {
                    action: Some(state.to_owned()),
                    end: None,
                    reason,
                }),
                None,
            )
        }
        "InService" | "Standby" | "Detached" | "Warmed:Running" => (Meaning::NotAnnounced, None),
        _ => (Meaning::Unknown, Some(format!("no state known here: {}", quoted(state)))),
    }
}

/// Whether the text is a short plain word that is safe to print in a message.
fn is_word(text: &str) -> bool {
    (1..=32).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphabetic())
}

/// The first characters, quoted, on one line.
fn quoted(text: &str) -> String {
    let beginning: String = text.chars().take(60).collect();
    format!("{beginning:?}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn announced(source: NoticeSource, text: &str) -> (Announcement, Option<String>) {
        let document = read(source, Some(text.as_bytes()));
        let Meaning::Announced(announcement) = document.meaning else { panic!("{document:?}") };
        (announcement, document.problem)
    }

    #[test]
    fn interruption_has_action_and_time() {
        let text = r#"{"action": "terminate", "time": "2017-09-18T08:22:00Z"}"#;
        let (announcement, problem) = announced(NoticeSource::Interruption, text);
        assert_eq!(problem, None);
        assert_eq!(announcement.action.as_deref(), Some("terminate"));
        assert_eq!(
            announcement.end,
            Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_505_722_920))
        );
        assert_eq!(
            announcement.reason,
            "AWS spot instance-action: terminate at 2017-09-18T08:22:00Z"
        );
    }

    #[test]
    fn unreadable_interruption_counts_as_an_interruption() {
        for text in [
            "",
            "null",
            "{",
            "<html>\n<body>",
            "{}",
            r#"["terminate"]"#,
            r#"{"action":7,"time":7}"#,
            r#"{"action":"","time":"soon"}"#,
            r#"{"action":"a\nb","time":"2017-13-18T08:22:00Z"}"#,
        ] {
            let (announcement, problem) = announced(NoticeSource::Interruption, text);
            assert_eq!((announcement.action, announcement.end), (None, None), "{text}");
            let reason = "AWS spot instance-action: an unreadable action at an unknown time";
            assert_eq!(announcement.reason, reason);
            let problem = problem.expect(text);
            assert!(
                problem.contains("spot/instance-action: no time in") && !problem.contains('\n')
            );
        }
    }

    #[test]
    fn interruption_keeps_the_readable_part() {
        let (half, problem) =
            announced(NoticeSource::Interruption, r#"{"action":"stop","time":"08:22"}"#);
        assert_eq!((half.action.as_deref(), half.end), (Some("stop"), None));
        assert_eq!(half.reason, "AWS spot instance-action: stop at an unknown time");
        assert!(problem.is_some());

        let (half, problem) =
            announced(NoticeSource::Interruption, r#"{"time":"2017-09-18T08:22:00Z"}"#);
        assert!(half.action.is_none() && half.end.is_some());
        assert!(problem.is_some_and(|problem| problem.contains("no action in")));
    }

    #[test]
    fn rebalance_recommendation_has_no_end() {
        let (advice, problem) =
            announced(NoticeSource::Rebalance, r#"{"noticeTime":"2020-10-27T08:22:00Z"}"#);
        assert_eq!((advice.end, problem), (None, None));
        assert!(advice.reason.ends_with("since 2020-10-27T08:22:00Z"), "{}", advice.reason);
        for text in ["", "{}", "<html>", r#"{"noticeTime":"now"}"#] {
            let document = read(NoticeSource::Rebalance, Some(text.as_bytes()));
            assert!(document.meaning == Meaning::Unknown && document.problem.is_some(), "{text}");
        }
    }

    #[test]
    fn stopped_state_of_a_warm_pool_counts_as_termination() {
        for state in ["Terminated", "Terminated\n", "Warmed:Terminated", "Warmed:Stopped"] {
            let (away, problem) = announced(NoticeSource::Lifecycle, state);
            assert_eq!((away.action.as_deref(), problem), (Some(state.trim()), None));
        }
        for state in ["InService", "Standby", "Detached", "Warmed:Running"] {
            let document = read(NoticeSource::Lifecycle, Some(state.as_bytes()));
            assert_eq!(document, Document { meaning: Meaning::NotAnnounced, problem: None });
        }
        let document = read(NoticeSource::Lifecycle, Some(b"Retired"));
        assert!(document.meaning == Meaning::Unknown && document.problem.is_some());
    }

    #[test]
    fn no_document_is_no_notice() {
        for (source, meaning) in [
            (NoticeSource::Interruption, Meaning::NotAnnounced),
            (NoticeSource::Rebalance, Meaning::NotAnnounced),
            (NoticeSource::Lifecycle, Meaning::Unknown),
        ] {
            assert_eq!(read(source, None), Document { meaning, problem: None });
        }
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes: Vec<u8>, action: String, time: String) {
            let json = serde_json::json!({ "action": action, "time": time, "noticeTime": time });
            for body in [bytes, json.to_string().into_bytes()] {
                for source in [NoticeSource::Interruption, NoticeSource::Rebalance, NoticeSource::Lifecycle] {
                    let document = read(source, Some(&body));
                    if let Meaning::Announced(announcement) = &document.meaning {
                        prop_assert!(!announcement.reason.contains(char::is_control));
                    }
                    if source == NoticeSource::Interruption {
                        prop_assert!(matches!(document.meaning, Meaning::Announced(_)));
                    }
                }
            }
        }
    }
}
