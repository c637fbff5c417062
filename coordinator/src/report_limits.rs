//! Limits on the texts that agents send. Some are stored in the journal, and all are shown to people.

use baton_job::{NodeId, message::AgentReport, plan::MAX_LOCAL_RANKS};
use baton_proto::v1::Frame;
use serde_json::{Map, Value};

/// Longest name of a node, bytes: that of a host in the DNS.
const MAX_NODE_ID_LEN: usize = 253;
/// Longest text in a report, bytes. Longer ones are shortened.
const MAX_TEXT_LEN: usize = 4_096;

/// The report in a frame, with all its texts shortened.
pub(crate) fn read(frame: &Frame) -> serde_json::Result<AgentReport> {
    // No text is longer than its frame; almost every frame is short.
    if frame.json.len() <= MAX_TEXT_LEN {
        return frame.read();
    }
    let mut report = frame.read()?;
    shorten_all(&mut report);
    serde_json::from_value(report)
}

/// Checks the name of a node; the error is the rest of a sentence about the message.
pub(crate) fn check_node_id(NodeId(name): &NodeId) -> Result<(), String> {
    match name.len() {
        0 => Err("names no node".to_owned()),
        1..=MAX_NODE_ID_LEN => Ok(()),
        len => Err(format!(
            "names a node with {len} bytes, and at most {MAX_NODE_ID_LEN} are allowed: give a shorter --node-id"
        )),
    }
}

/// Checks the number of ranks that an agent offers; the error is the rest of a sentence about the hello.
pub(crate) fn check_slots(slots: u32) -> Result<(), String> {
    match slots {
        0 => Err("offers no ranks".to_owned()),
        1..=MAX_LOCAL_RANKS => Ok(()),
        _ => Err(format!(
            "offers {slots} ranks, and at most {MAX_LOCAL_RANKS} are allowed: lower --ranks"
        )),
    }
}

fn shorten_all(value: &mut Value) {
    match value {
        Value::String(text) => shorten(text),
        Value::Array(values) => values.iter_mut().for_each(shorten_all),
        Value::Object(fields) => {
            *fields = std::mem::take(fields)
                .into_iter()
                .map(|(mut name, mut value)| {
                    shorten(&mut name);
                    shorten_all(&mut value);
                    (name, value)
                })
                .collect::<Map<_, _>>();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn shorten(text: &mut String) {
    const MARK: char = '…';
    if text.len() > MAX_TEXT_LEN {
        let mut end = MAX_TEXT_LEN - MARK.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push(MARK);
    }
}

#[cfg(test)]
mod tests {
    use baton_job::{
        Generation, Rank,
        exit::crash,
        message::{LoaderReport, RankReport, StepReport},
    };

    use super::*;

    fn read_back(report: &AgentReport) -> AgentReport {
        read(&Frame::report(report, "").unwrap()).unwrap()
    }

    fn of_rank(report: RankReport) -> AgentReport {
        AgentReport::Rank { generation: Generation(1), rank: Rank(0), report }
    }

    #[test]
    fn long_texts_of_agents_are_shortened() {
        // An odd length, so that the limit is within a character.
        let long = format!("-{}", "é".repeat(50_000));
        let short = format!("-{}…", "é".repeat(MAX_TEXT_LEN / 2 - 2));
        assert!(short.len() <= MAX_TEXT_LEN);

        let warning = |message: &str| AgentReport::GpuWarning { message: message.to_owned() };
        assert_eq!(read_back(&warning(&long)), warning(&short));
        let exited = |message: &str| of_rank(RankReport::Exited(crash(message)));
        assert_eq!(read_back(&exited(&long)), exited(&short));
        let skipped = |text: &str| {
            let last_skipped = Some(text.to_owned());
            of_rank(RankReport::Loader(LoaderReport { last_skipped, ..LoaderReport::default() }))
        };
        assert_eq!(read_back(&skipped(&long)), skipped(&short));
        let metric = |name: &str| {
            let metrics = [(name.to_owned(), 0.1 + 0.2)].into();
            of_rank(RankReport::Stepped(StepReport { metrics, ..StepReport::default() }))
        };
        assert_eq!(read_back(&metric(&long)), metric(&short));
    }

    #[test]
    fn a_long_report_with_short_texts_is_unchanged() {
        let metrics =
            (0..1_000).map(|number| (format!("metric {number}"), 0.1 * f64::from(number)));
        let metrics = metrics.collect();
        let report = of_rank(RankReport::Stepped(StepReport { metrics, ..StepReport::default() }));
        assert_eq!(read_back(&report), report);
    }

    #[test]
    fn an_agent_may_offer_as_many_ranks_as_its_flag_allows() {
        assert_eq!((check_slots(1), check_slots(MAX_LOCAL_RANKS)), (Ok(()), Ok(())));
        assert_eq!(check_slots(0), Err("offers no ranks".to_owned()));
        assert!(check_slots(u32::MAX).unwrap_err().contains("at most 1024"));
    }

    #[test]
    fn a_node_id_may_be_as_long_as_a_host_name() {
        let checked = |len| check_node_id(&NodeId("n".repeat(len)));
        assert_eq!(checked(0), Err("names no node".to_owned()));
        assert_eq!(checked(253), Ok(()));
        let refused = checked(100_000).unwrap_err();
        assert!(refused.contains("100000 bytes") && refused.contains("--node-id"), "{refused}");
    }
}
