//! Whether there is a metadata service, and what to say when it is silent.

use std::time::{Duration, Instant};

use crate::Kind;

/// Knows when each document was last read.
#[derive(Debug, Default)]
pub(crate) struct Contact {
    /// `None` as long as nothing suggests that this is EC2.
    silences: Option<[Silence; 3]>,
    /// That there is none was mentioned.
    was_told: bool,
}

/// Since a document was last read.
#[derive(Clone, Copy, Debug)]
struct Silence {
    kind: Kind,
    since: Instant,
    was_told: bool,
}

/// How reading a document went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was read, or is not there.
    Read,
    /// There is a service, but it did not give it.
    Refused,
    /// No sign of a service.
    Nothing,
}

/// What is worth a line in the log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Mention {
    Found,
    NotFound,
    /// For how long notices of these kinds may have been missed.
    Silent(Vec<Kind>, Duration),
    /// After how long.
    Back(Vec<Kind>, Duration),
}

impl Contact {
    pub(crate) fn is_made(&self) -> bool {
        self.silences.is_some()
    }

    /// After a poll of all documents.
    pub(crate) fn after(
        &mut self,
        outcomes: [(Kind, Outcome); 3],
        now: Instant,
        patience: Duration,
    ) -> Vec<Mention> {
        let Some(silences) = &mut self.silences else {
            if outcomes.iter().all(|(_, outcome)| *outcome == Outcome::Nothing) {
                let was_told = std::mem::replace(&mut self.was_told, true);
                return if was_told { Vec::new() } else { vec![Mention::NotFound] };
            }
            let silence = |(kind, _)| Silence { kind, since: now, was_told: false };
            self.silences = Some(outcomes.map(silence));
            return vec![Mention::Found];
        };
        let (mut silent, mut back) = (Vec::new(), Vec::new());
        let mut longest = [Duration::ZERO; 2];
        for (silence, (_, outcome)) in silences.iter_mut().zip(outcomes) {
            let length = now.saturating_duration_since(silence.since);
            match outcome {
                Outcome::Read => {
                    if silence.was_told {
                        back.push(silence.kind);
                        longest[1] = longest[1].max(length);
                    }
                    (silence.since, silence.was_told) = (now, false);
                }
                Outcome::Refused | Outcome::Nothing => {
                    if length >= patience && !silence.was_told {
                        silent.push(silence.kind);
                        longest[0] = longest[0].max(length);
                        silence.was_told = true;
                    }
                }
            }
        }
        let mentions = [
            (!silent.is_empty()).then_some(Mention::Silent(silent, longest[0])),
            (!back.is_empty()).then_some(Mention::Back(back, longest[1])),
        ];
        mentions.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Mention::*, Outcome::*, *};

    const KINDS: [Kind; 3] = [Kind::Interruption, Kind::Rebalance, Kind::Lifecycle];

    /// What is mentioned after outcomes at those seconds, with a patience of 10 s.
    fn mentions(outcomes: &[(u64, [Outcome; 3])]) -> Vec<Vec<Mention>> {
        let start = Instant::now();
        let mut contact = Contact::default();
        let patience = Duration::from_secs(10);
        let after = |&(second, [first, second_document, third]): &(u64, [Outcome; 3])| {
            let [interruption, rebalance, lifecycle] = KINDS;
            let read = [(interruption, first), (rebalance, second_document), (lifecycle, third)];
            contact.after(read, start + Duration::from_secs(second), patience)
        };
        outcomes.iter().map(after).collect()
    }

    fn all(outcomes: &[(u64, Outcome)]) -> Vec<Vec<Mention>> {
        let each: Vec<_> =
            outcomes.iter().map(|&(second, outcome)| (second, [outcome; 3])).collect();
        mentions(&each)
    }

    #[test]
    fn machine_without_a_service_is_mentioned_once() {
        assert_eq!(
            all(&[(0, Nothing), (60, Nothing), (120, Nothing), (180, Read)]),
            [vec![NotFound], vec![], vec![], vec![Found]]
        );
    }

    #[test]
    fn lost_poll_is_not_worth_a_line() {
        assert_eq!(
            all(&[(0, Read), (2, Nothing), (4, Refused), (6, Read), (14, Nothing)]),
            [vec![Found], vec![], vec![], vec![], vec![]]
        );
    }

    #[test]
    fn each_outage_is_mentioned_once_with_its_length() {
        let seconds = Duration::from_secs;
        assert_eq!(
            all(&[
                (0, Read),
                (9, Nothing),
                (10, Nothing),
                (12, Refused),
                (20, Read),
                (22, Read),
                (40, Refused),
            ]),
            [
                vec![Found],
                vec![],
                vec![Silent(KINDS.to_vec(), seconds(10))],
                vec![],
                vec![Back(KINDS.to_vec(), seconds(20))],
                vec![],
                vec![Silent(KINDS.to_vec(), seconds(18))],
            ]
        );
    }

    #[test]
    fn a_document_that_is_silent_hides_no_outage_of_another() {
        let seconds = Duration::from_secs;
        assert_eq!(
            mentions(&[
                (0, [Read, Refused, Read]),
                (10, [Read, Refused, Read]),
                (20, [Nothing, Nothing, Read]),
                (21, [Read, Refused, Read]),
            ]),
            [
                vec![Found],
                vec![Silent(vec![Kind::Rebalance], seconds(10))],
                vec![Silent(vec![Kind::Interruption], seconds(10))],
                vec![Back(vec![Kind::Interruption], seconds(11))],
            ]
        );
    }
}
