//! The documents of the metadata service, and what they mean.

use std::time::SystemTime;

use serde_json::Value;

use crate::Kind;

impl Kind {
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Interruption => "/latest/meta-data/spot/instance-action",
            Self::Rebalance => "/latest/meta-data/events/recommendations/rebalance",
            Self::Lifecycle => "/latest/meta-data/autoscaling/target-lifecycle-state",
        }
    }
}

/// What was read, and what is odd about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) meaning: Meaning,
    pub(crate) problem: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// Nothing is to come.
    Staying,
    /// Nothing was said either way: what was told before still holds.
    Unsaid,
    Going(Going),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Going {
    /// What tells this notice from another of its kind, if the document says.
    pub(crate) action: Option<String>,
    /// As AWS says, which may be in the past.
    pub(crate) end: Option<SystemTime>,
    pub(crate) reason: String,
}

/// Reads a document; `None` stands for 404.
pub(crate) fn read(kind: Kind, body: Option<&[u8]>) -> Document {
    let (meaning, problem) = match (kind, body.map(String::from_utf8_lossy)) {
        // Besides standing outside of any group, an instance can lose the document when its host is
        // replaced under it (live migration).
        (Kind::Lifecycle, None) => (Meaning::Unsaid, None),
        (_, None) => (Meaning::Staying, None),
        (Kind::Interruption, Some(text)) => interruption(&text),
        (Kind::Rebalance, Some(text)) => rebalance(&text),
        (Kind::Lifecycle, Some(text)) => lifecycle(text.trim()),
    };
    Document { meaning, problem: problem.map(|problem| format!("{}: {problem}", kind.path())) }
}

/// That there is a document is the notice. To go for nothing costs a restart from a checkpoint, to stay
/// for nothing costs what was done since the last one, so what cannot be read is believed.
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
    (Meaning::Going(Going { action: action.map(str::to_owned), end, reason }), problem)
}

/// Advice that cannot be read is no advice.
fn rebalance(text: &str) -> (Meaning, Option<String>) {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let time = value.get("noticeTime").and_then(Value::as_str);
    let Some(time) = time.filter(|time| humantime::parse_rfc3339(time).is_ok()) else {
        return (Meaning::Unsaid, Some(format!("no noticeTime in {}", quoted(text))));
    };
    let reason = format!("AWS recommends to rebalance: elevated risk of interruption since {time}");
    (Meaning::Going(Going { action: None, end: None, reason }), None)
}

/// The target is where the group is taking the instance. The warm pool's resting states end it as much as
/// termination does: what runs on it stops.
fn lifecycle(state: &str) -> (Meaning, Option<String>) {
    match state {
        "Terminated" | "Warmed:Terminated" | "Warmed:Stopped" | "Warmed:Hibernated" => {
            let reason = format!("AWS Auto Scaling target-lifecycle-state: {state}");
            (Meaning::Going(Going { action: Some(state.to_owned()), end: None, reason }), None)
        }
        "InService" | "Standby" | "Detached" | "Warmed:Running" => (Meaning::Staying, None),
        _ => (Meaning::Unsaid, Some(format!("no state known here: {}", quoted(state)))),
    }
}

/// Whether it may stand in a line for people.
fn is_word(text: &str) -> bool {
    (1..=32).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphabetic())
}

/// The beginning, on one line.
fn quoted(text: &str) -> String {
    let beginning: String = text.chars().take(60).collect();
    format!("{beginning:?}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn going(kind: Kind, text: &str) -> (Going, Option<String>) {
        let document = read(kind, Some(text.as_bytes()));
        let Meaning::Going(going) = document.meaning else { panic!("{document:?}") };
        (going, document.problem)
    }

    #[test]
    fn interruption_says_action_and_time() {
        let text = r#"{"action": "terminate", "time": "2017-09-18T08:22:00Z"}"#;
        let (going, problem) = going(Kind::Interruption, text);
        assert_eq!(problem, None);
        assert_eq!(going.action.as_deref(), Some("terminate"));
        assert_eq!(going.end, Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_505_722_920)));
        assert_eq!(going.reason, "AWS spot instance-action: terminate at 2017-09-18T08:22:00Z");
    }

    #[test]
    fn interruption_that_cannot_be_read_is_one_all_the_same() {
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
            let (going, problem) = going(Kind::Interruption, text);
            assert_eq!((going.action, going.end), (None, None), "{text}");
            let reason = "AWS spot instance-action: an unreadable action at an unknown time";
            assert_eq!(going.reason, reason);
            let problem = problem.expect(text);
            assert!(
                problem.contains("spot/instance-action: no time in") && !problem.contains('\n')
            );
        }
    }

    #[test]
    fn interruption_keeps_the_half_that_can_be_read() {
        let (half, problem) = going(Kind::Interruption, r#"{"action":"stop","time":"08:22"}"#);
        assert_eq!((half.action.as_deref(), half.end), (Some("stop"), None));
        assert_eq!(half.reason, "AWS spot instance-action: stop at an unknown time");
        assert!(problem.is_some());

        let (half, problem) = going(Kind::Interruption, r#"{"time":"2017-09-18T08:22:00Z"}"#);
        assert!(half.action.is_none() && half.end.is_some());
        assert!(problem.is_some_and(|problem| problem.contains("no action in")));
    }

    #[test]
    fn rebalance_has_no_end() {
        let (advice, problem) = going(Kind::Rebalance, r#"{"noticeTime":"2020-10-27T08:22:00Z"}"#);
        assert_eq!((advice.end, problem), (None, None));
        assert!(advice.reason.ends_with("since 2020-10-27T08:22:00Z"), "{}", advice.reason);
        for text in ["", "{}", "<html>", r#"{"noticeTime":"now"}"#] {
            let document = read(Kind::Rebalance, Some(text.as_bytes()));
            assert!(document.meaning == Meaning::Unsaid && document.problem.is_some(), "{text}");
        }
    }

    #[test]
    fn group_takes_the_instance_away_by_stopping_it_too() {
        for state in ["Terminated", "Terminated\n", "Warmed:Terminated", "Warmed:Stopped"] {
            let (away, problem) = going(Kind::Lifecycle, state);
            assert_eq!((away.action.as_deref(), problem), (Some(state.trim()), None));
        }
        for state in ["InService", "Standby", "Detached", "Warmed:Running"] {
            let document = read(Kind::Lifecycle, Some(state.as_bytes()));
            assert_eq!(document, Document { meaning: Meaning::Staying, problem: None });
        }
        let document = read(Kind::Lifecycle, Some(b"Retired"));
        assert!(document.meaning == Meaning::Unsaid && document.problem.is_some());
    }

    #[test]
    fn no_document_is_no_notice() {
        for (kind, meaning) in [
            (Kind::Interruption, Meaning::Staying),
            (Kind::Rebalance, Meaning::Staying),
            (Kind::Lifecycle, Meaning::Unsaid),
        ] {
            assert_eq!(read(kind, None), Document { meaning, problem: None });
        }
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes: Vec<u8>, action: String, time: String) {
            let json = serde_json::json!({ "action": action, "time": time, "noticeTime": time });
            for body in [bytes, json.to_string().into_bytes()] {
                for kind in [Kind::Interruption, Kind::Rebalance, Kind::Lifecycle] {
                    let document = read(kind, Some(&body));
                    if let Meaning::Going(going) = &document.meaning {
                        prop_assert!(!going.reason.contains(char::is_control));
                    }
                    if kind == Kind::Interruption {
                        prop_assert!(matches!(document.meaning, Meaning::Going(_)));
                    }
                }
            }
        }
    }
}
