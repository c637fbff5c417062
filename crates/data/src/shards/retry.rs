//! Faults of requests, and retries with backoff.
//!
//! Only this module retries: the retries of `object_store` are disabled, so that the waiting times of two layers do
//! not multiply.

use std::{
    fmt,
    time::{Duration, Instant},
};

use baton_s3::{BucketRefusal, CLOCK_REMEDY, ROLE, brief, refusal};

/// Timeouts and retries of requests.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// If no byte arrives for this long, the connection is replaced.
    pub stall_timeout: Duration,
    /// Maximum time of one request; the next one continues where it stopped. This replaces slow connections.
    pub request_timeout: Duration,
    /// Maximum number of consecutive attempts without progress, during training. One that stalls counts twice: a store that
    /// is silent must be named before the rank is killed for loading too long.
    pub max_attempts: u32,
    /// Like `max_attempts`, while a data set is opened. It is smaller, because a user waits for errors such as a
    /// wrong bucket name.
    pub max_attempts_at_open: u32,
    /// Pause after the first attempt. Each pause is twice the previous one, minus a random part of up to one half, so
    /// that many ranks do not retry at the same time.
    pub first_backoff: Duration,
    /// Maximum pause.
    pub max_backoff: Duration,
}

impl Default for RetryPolicy {
    /// Tolerates two to three minutes of errors or of silence, which is longer than S3 needs to scale a busy prefix; one minute
    /// of silence while a data set is opened.
    fn default() -> Self {
        Self {
            stall_timeout: Duration::from_secs(20),
            request_timeout: Duration::from_secs(60),
            max_attempts: 16,
            max_attempts_at_open: 5,
            first_backoff: Duration::from_millis(200),
            max_backoff: Duration::from_secs(15),
        }
    }
}

/// Why one request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestFault {
    /// The store returned an error, or could not be reached.
    #[error("{}", brief(.0))]
    Store(#[from] object_store::Error),
    /// No data arrived before the stall timeout.
    #[error("no data arrived for {0:.1?}")]
    Stalled(Duration),
    /// The response did not end before the request timeout.
    #[error("the request was not finished after {0:.1?}")]
    Slow(Duration),
    /// The response was truncated.
    #[error("the response ended {missing} bytes early")]
    CutOff {
        /// Number of missing bytes.
        missing: u64,
    },
    /// The object was replaced after the data set was opened.
    #[error("the object was replaced after the data set was opened")]
    Changed,
}

/// What to do about a [`RequestFault`]; printed at the end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Credentials are missing, wrong, or insufficient.
    Credentials,
    /// The clock of this machine is wrong.
    Clock,
    /// There is no such bucket or object.
    Path,
    /// The bucket is in another region.
    Region,
    /// The data set was changed while a job uses it.
    Restart,
    /// The store or the network has a problem.
    Network,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Credentials => {
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN or the \
                 machine's role, and that they allow listing and reading this bucket"
            }
            Self::Clock => CLOCK_REMEDY,
            Self::Path => "check the bucket and path, AWS_REGION and AWS_ENDPOINT_URL",
            Self::Region => "set AWS_REGION to the region of the bucket",
            Self::Restart => {
                "put the old version back, or continue with the new one with --allow-recipe-change; do not replace \
                 shards in use"
            }
            Self::Network => "check AWS_ENDPOINT_URL, the network, and the status of the store",
        })
    }
}

impl RequestFault {
    /// Whether the same request may succeed later.
    fn is_transient(&self) -> bool {
        match self {
            Self::Stalled(_) | Self::Slow(_) | Self::CutOff { .. } => true,
            Self::Changed => false,
            Self::Store(error) => match status(error) {
                // Request timeout, or too many requests.
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
            _ if refusal(error) == Some(BucketRefusal::Clock) => Remedy::Clock,
            _ if has(&[REDIRECT, "AuthorizationHeaderMalformed"]) => Remedy::Region,
            _ if has(&[ROLE, "ExpiredToken"]) => Remedy::Credentials,
            Some(401 | 403) => Remedy::Credentials,
            Some(404) => Remedy::Path,
            Some(412) => Remedy::Restart,
            _ => Remedy::Network,
        }
    }
}

/// Part of the message of `object_store` for a redirect without a location.
const REDIRECT: &str = "Received redirect";

/// The HTTP status of the store's response, if there was one.
///
/// `object_store` has error variants for some statuses only, and otherwise only a message, which is parsed here. If
/// the message changed, permanent faults would be retried in vain, but nothing worse would happen.
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

/// The attempts of one request, or of one part of a longer one.
#[derive(Debug)]
pub(super) struct Attempts {
    retry: RetryPolicy,
    max_attempts: u32,
    /// Number of attempts since the last progress.
    made: u32,
    /// How much of `max_attempts` these have used up.
    used: u32,
    /// Time of the last progress.
    since: Instant,
}

impl Attempts {
    pub(super) fn new(retry: RetryPolicy, max_attempts: u32, now: Instant) -> Self {
        Self { retry, max_attempts, made: 0, used: 0, since: now }
    }

    /// Resets the count: a request that makes progress, however slowly, is continued.
    pub(super) fn progress(&mut self, now: Instant) {
        (self.made, self.used, self.since) = (0, 0, now);
    }

    /// Counts a failed attempt. Returns the pause until the next one, or `None` if there must be none.
    pub(super) fn pause(&mut self, fault: &RequestFault) -> Option<Duration> {
        self.made += 1;
        self.used += if matches!(fault, RequestFault::Stalled(_)) { 2 } else { 1 };
        if !fault.is_transient() || self.used >= self.max_attempts {
            return None;
        }
        let doublings = (self.made - 1).min(16);
        let pause = self.retry.first_backoff.saturating_mul(1 << doublings);
        let pause = pause.min(self.retry.max_backoff);
        Some(pause.mul_f64(1.0 - fastrand::f64() / 2.0))
    }

    pub(super) fn give_up(
        &self,
        operation: &'static str,
        url: &str,
        fault: RequestFault,
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

    #[test]
    fn a_silent_store_is_given_up_before_a_loading_rank_is_killed_or_missed_by_the_others() {
        let retry = RetryPolicy::default();
        let silence = |max_attempts| {
            let mut attempts = Attempts::new(retry, max_attempts, Instant::now());
            let mut total = retry.stall_timeout;
            while let Some(pause) = attempts.pause(&RequestFault::Stalled(retry.stall_timeout)) {
                total += pause + retry.stall_timeout;
            }
            total.as_secs_f64()
        };
        // The defaults: four times cluster.hang_seconds, and cluster.rendezvous_seconds.
        assert!(silence(retry.max_attempts) < 4.0 * 60.0);
        assert!(silence(retry.max_attempts_at_open) < 120.0);
    }

    fn generic(words: &str) -> RequestFault {
        RequestFault::Store(object_store::Error::Generic { store: "S3", source: words.into() })
    }

    #[test]
    fn pauses_double_up_to_the_maximum_and_then_end() {
        let retry = RetryPolicy {
            first_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_millis(400),
            ..RetryPolicy::default()
        };
        let mut attempts = Attempts::new(retry, 6, Instant::now());
        let cut_off = RequestFault::CutOff { missing: 1 };

        for max_ms in [100, 200, 400, 400, 400] {
            let pause = attempts.pause(&cut_off).unwrap().as_millis();
            assert!((max_ms / 2..=max_ms).contains(&pause), "{pause} of {max_ms} ms");
        }
        assert_eq!(attempts.pause(&cut_off), None);
    }

    #[test]
    fn a_wrong_clock_is_not_blamed_on_the_credentials() {
        let skewed = "<Error><Code>RequestTimeTooSkewed</Code></Error>";
        assert_eq!(generic(skewed).remedy(), Remedy::Clock);
        assert_eq!(
            generic("<Error><Code>ExpiredToken</Code></Error>").remedy(),
            Remedy::Credentials
        );
    }

    #[test]
    fn progress_resets_the_count() {
        let mut attempts = Attempts::new(RetryPolicy::default(), 2, Instant::now());
        let cut_off = RequestFault::CutOff { missing: 1 };

        assert!(attempts.pause(&cut_off).is_some());
        attempts.progress(Instant::now());
        assert!(attempts.pause(&cut_off).is_some());
        assert_eq!(attempts.pause(&cut_off), None);
    }

    #[test]
    fn only_transient_faults_are_retried() {
        let status = |status: &str| generic(&format!("non-2xx status code: {status}: <Error/>"));
        for fault in [status("503 Slow Down"), status("429 Too Many"), generic("reset by peer")] {
            assert!(fault.is_transient(), "{fault}");
        }
        let redirect = generic("Received redirect without LOCATION, incorrectly configured region");
        assert_eq!(redirect.remedy(), Remedy::Region);
        for fault in [status("400 Bad Request"), redirect, RequestFault::Changed] {
            assert!(!fault.is_transient(), "{fault}");
        }
    }
}
