//! Whether there is a metadata service, and what to say when it is silent.

use std::time::{Duration, Instant};

/// Knows when the service last answered.
#[derive(Debug, Default)]
pub(crate) struct Contact {
    /// `None` as long as nothing suggests that this is EC2.
    last: Option<Instant>,
    /// The present silence was mentioned.
    was_told: bool,
}

/// How a poll went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Every document was read, or is not there.
    Complete,
    /// There is a service, but something could not be read.
    Partial,
    /// No sign of a service.
    Nothing,
}

/// What is worth a line in the log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Mention {
    Found,
    NotFound,
    /// For how long notices may have been missed.
    Silent(Duration),
    /// After how long.
    Back(Duration),
}

impl Contact {
    pub(crate) fn is_made(&self) -> bool {
        self.last.is_some()
    }

    pub(crate) fn after(
        &mut self,
        outcome: Outcome,
        now: Instant,
        patience: Duration,
    ) -> Option<Mention> {
        let silence = self.last.map(|last| now.saturating_duration_since(last));
        match (outcome, silence) {
            (Outcome::Nothing, None) => self.tell(Mention::NotFound),
            (Outcome::Complete | Outcome::Partial, None) => {
                *self = Self { last: Some(now), was_told: false };
                Some(Mention::Found)
            }
            (Outcome::Complete, Some(silence)) => {
                let was_told = self.was_told;
                *self = Self { last: Some(now), was_told: false };
                was_told.then_some(Mention::Back(silence))
            }
            (Outcome::Partial | Outcome::Nothing, Some(silence)) if silence >= patience => {
                self.tell(Mention::Silent(silence))
            }
            (Outcome::Partial | Outcome::Nothing, Some(_)) => None,
        }
    }

    fn tell(&mut self, mention: Mention) -> Option<Mention> {
        let was_told = std::mem::replace(&mut self.was_told, true);
        (!was_told).then_some(mention)
    }
}

#[cfg(test)]
mod tests {
    use super::{Mention::*, Outcome::*, *};

    /// What is mentioned after outcomes at those seconds, with a patience of 10 s.
    fn mentions(outcomes: &[(u64, Outcome)]) -> Vec<Option<Mention>> {
        let start = Instant::now();
        let mut contact = Contact::default();
        let patience = Duration::from_secs(10);
        let after = |&(second, outcome): &(u64, Outcome)| {
            contact.after(outcome, start + Duration::from_secs(second), patience)
        };
        outcomes.iter().map(after).collect()
    }

    #[test]
    fn machine_without_a_service_is_mentioned_once() {
        assert_eq!(
            mentions(&[(0, Nothing), (60, Nothing), (120, Nothing), (180, Complete)]),
            [Some(NotFound), None, None, Some(Found)]
        );
    }

    #[test]
    fn lost_poll_is_not_worth_a_line() {
        assert_eq!(
            mentions(&[(0, Complete), (2, Nothing), (4, Partial), (6, Complete), (14, Nothing)]),
            [Some(Found), None, None, None, None]
        );
    }

    #[test]
    fn each_outage_is_mentioned_once_with_its_length() {
        let seconds = Duration::from_secs;
        assert_eq!(
            mentions(&[
                (0, Complete),
                (9, Nothing),
                (10, Nothing),
                (12, Partial),
                (20, Complete),
                (22, Complete),
                (40, Partial),
            ]),
            [
                Some(Found),
                None,
                Some(Silent(seconds(10))),
                None,
                Some(Back(seconds(20))),
                None,
                Some(Silent(seconds(18))),
            ]
        );
    }

    #[test]
    fn document_that_was_never_read_is_an_outage_too() {
        assert_eq!(
            mentions(&[(0, Partial), (10, Partial)]),
            [Some(Found), Some(Silent(Duration::from_secs(10)))]
        );
    }
}
