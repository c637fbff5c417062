//! What can go wrong with a request, whether it is worth another, and when.
//!
//! This is the only place that retries: the store's own retries are switched off, so that a fault
//! is waited for once, not once per layer.

use std::{
    error::Error as StdError,
    fmt,
    time::{Duration, Instant},
};

/// How patient requests are.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// No byte for this long: the connection is dropped, and another made.
    pub stall: Duration,
    /// One request may take this long; the next goes on where it stopped. Against connections that
    /// trickle.
    pub request: Duration,
    /// Most attempts in a row that make no progress, while training.
    pub attempts: u32,
    /// As `attempts`, while a data set is opened: somebody sits there and waits for the message
    /// that the bucket's name is wrong.
    pub attempts_at_open: u32,
    /// Pause after the first attempt; each pause is twice the one before, less a random part of up
    /// to a half, so that many ranks do not come back at the same moment.
    pub first_pause: Duration,
    /// No pause is longer.
    pub longest_pause: Duration,
}

impl Default for Patience {
    /// Two to three minutes of a store that answers nothing but errors: longer than S3 needs to
    /// scale a busy prefix.
    fn default() -> Self {
        Self {
            stall: Duration::from_secs(20),
            request: Duration::from_secs(60),
            attempts: 16,
            attempts_at_open: 5,
            first_pause: Duration::from_millis(200),
            longest_pause: Duration::from_secs(15),
        }
    }
}

/// What went wrong with one request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The store, or the way to it, says no.
    #[error("{}", brief(.0))]
    Store(#[from] object_store::Error),
    /// Nothing came.
    #[error("no byte came for {0:.1?}")]
    Stalled(Duration),
    /// Something came, but not all in time.
    #[error("the request was not finished after {0:.1?}")]
    Slow(Duration),
    /// The answer ended early.
    #[error("the answer ended {missing} bytes early")]
    CutOff {
        /// Bytes that should have come.
        missing: u64,
    },
    /// The object is another one than when the data set was opened.
    #[error("the object was replaced after the data set was opened")]
    Changed,
}

/// What to do about a [`Fault`]; prints as a clause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Credentials are missing, wrong, or not enough.
    Credentials,
    /// There is no such bucket or object.
    Place,
    /// The bucket lives in another region.
    Region,
    /// Data sets must not change under a running job.
    Restart,
    /// The store or the network is in trouble.
    Network,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Credentials => {
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN or the \
                 machine's role, and that they may list and read this bucket"
            }
            Self::Place => "check the bucket and path, AWS_REGION and AWS_ENDPOINT_URL",
            Self::Region => "set AWS_REGION to the region of the bucket",
            Self::Restart => {
                "start the job again to take the new version, and do not replace shards in use"
            }
            Self::Network => "check AWS_ENDPOINT_URL, the network, and the store's health",
        })
    }
}

impl Fault {
    /// Whether the same request may succeed later.
    fn is_transient(&self) -> bool {
        match self {
            Self::Stalled(_) | Self::Slow(_) | Self::CutOff { .. } => true,
            Self::Changed => false,
            Self::Store(error) => match status(error) {
                // Too slow a request, too many of them.
                Some(408 | 429) => true,
                Some(status) => status >= 500,
                None => {
                    matches!(error, object_store::Error::Generic { .. })
                        && !error.to_string().contains(REDIRECT)
                }
            },
        }
    }

    pub(super) fn remedy(&self) -> Remedy {
        let error = match self {
            Self::Stalled(_) | Self::Slow(_) | Self::CutOff { .. } => return Remedy::Network,
            Self::Changed => return Remedy::Restart,
            Self::Store(error) => error,
        };
        let words = error.to_string();
        let has = |needles: &[&str]| needles.iter().any(|needle| words.contains(needle));
        match status(error) {
            _ if has(&[REDIRECT, "AuthorizationHeaderMalformed"]) => Remedy::Region,
            _ if has(&[ROLE, "ExpiredToken"]) => Remedy::Credentials,
            Some(401 | 403) => Remedy::Credentials,
            Some(404) => Remedy::Place,
            Some(412) => Remedy::Restart,
            _ => Remedy::Network,
        }
    }
}

/// What `object_store` says of an answer that sends elsewhere without saying where.
const REDIRECT: &str = "Received redirect";

/// Part of every address at which a machine asks for the credentials of its role.
const ROLE: &str = "/latest/";

/// The status of the store's answer, if there was one.
///
/// `object_store` has variants for some operations and some answers, and keeps the code to itself
/// otherwise, so its words must do. Were they to change, hopeless requests would be repeated in
/// vain, and no more.
fn status(error: &object_store::Error) -> Option<u16> {
    use object_store::Error as E;
    match error {
        E::Unauthenticated { .. } => Some(401),
        E::PermissionDenied { .. } => Some(403),
        E::NotFound { .. } => Some(404),
        E::Precondition { .. } => Some(412),
        error => {
            let words = error.to_string();
            let (_, rest) = words.split_once("status code: ")?;
            rest.get(..3)?.parse().ok()
        }
    }
}

/// The innermost reason, and of S3's XML only code and message: every layer above repeats it.
fn brief(error: &object_store::Error) -> String {
    let mut innermost: &dyn StdError = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let words = innermost.to_string();
    let tag = |name: &str| {
        let (_, rest) = words.split_once(&format!("<{name}>"))?;
        rest.split_once(&format!("</{name}>")).map(|(text, _)| text)
    };
    match (tag("Code"), tag("Message")) {
        (Some(code), Some(message)) => format!("the store answers {code}: {message}"),
        (Some(code), None) => format!("the store answers {code}"),
        _ if error.to_string().contains(ROLE) => {
            format!("no credentials are set, and the machine's role cannot be asked for ({words})")
        }
        _ => words.trim_end_matches([':', ' ']).to_owned(),
    }
}

/// The attempts at one request, or at one piece of a longer one.
#[derive(Debug)]
pub(super) struct Tries {
    patience: Patience,
    most: u32,
    made: u32,
    since: Instant,
}

impl Tries {
    pub(super) fn new(patience: Patience, most: u32, now: Instant) -> Self {
        Self { patience, most, made: 0, since: now }
    }

    /// Counting starts anew: what moves, however slowly, is not given up.
    pub(super) fn progress(&mut self, now: Instant) {
        (self.made, self.since) = (0, now);
    }

    /// After a failed attempt: the pause until the next, or `None` if there shall be none.
    pub(super) fn pause(&mut self, fault: &Fault) -> Option<Duration> {
        self.made += 1;
        if !fault.is_transient() || self.made >= self.most {
            return None;
        }
        let doublings = (self.made - 1).min(16);
        let pause = self.patience.first_pause.saturating_mul(1 << doublings);
        let pause = pause.min(self.patience.longest_pause);
        Some(pause.mul_f64(1.0 - fastrand::f64() / 2.0))
    }

    pub(super) fn give_up(
        &self,
        operation: &'static str,
        url: &str,
        fault: Fault,
        now: Instant,
    ) -> super::Error {
        super::Error::Store {
            operation,
            url: url.to_owned(),
            remedy: fault.remedy(),
            fault: Box::new(fault),
            attempts: self.made,
            elapsed: now.saturating_duration_since(self.since),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(words: &str) -> Fault {
        Fault::Store(object_store::Error::Generic { store: "S3", source: words.into() })
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_then_end() {
        let patience = Patience {
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_millis(400),
            ..Patience::default()
        };
        let mut tries = Tries::new(patience, 6, Instant::now());

        for most in [100, 200, 400, 400, 400] {
            let pause = tries.pause(&Fault::Stalled(Duration::ZERO)).unwrap().as_millis();
            assert!((most / 2..=most).contains(&pause), "{pause} of {most} ms");
        }
        assert_eq!(tries.pause(&Fault::Stalled(Duration::ZERO)), None);
    }

    #[test]
    fn progress_starts_the_count_anew() {
        let mut tries = Tries::new(Patience::default(), 2, Instant::now());
        let cut_off = Fault::CutOff { missing: 1 };

        assert!(tries.pause(&cut_off).is_some());
        tries.progress(Instant::now());
        assert!(tries.pause(&cut_off).is_some());
        assert_eq!(tries.pause(&cut_off), None);
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let status = |status: &str| generic(&format!("non-2xx status code: {status}: <Error/>"));
        for fault in [status("503 Slow Down"), status("429 Too Many"), generic("reset by peer")] {
            assert!(fault.is_transient(), "{fault}");
        }
        let redirect = generic("Received redirect without LOCATION, incorrectly configured region");
        assert_eq!(redirect.remedy(), Remedy::Region);
        for fault in [status("400 Bad Request"), redirect, Fault::Changed] {
            assert!(!fault.is_transient(), "{fault}");
        }
    }

    #[test]
    fn an_answer_in_xml_is_told_in_one_line() {
        let xml = "status code: 403: <Error><Code>InvalidAccessKeyId</Code>\
                   <Message>No such key.</Message></Error>";
        assert_eq!(generic(xml).to_string(), "the store answers InvalidAccessKeyId: No such key.");
    }
}
