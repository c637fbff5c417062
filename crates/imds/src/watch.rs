//! The watch: polls the documents and tells what is new.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Instant, SystemTime},
};

use tokio::{join, time::sleep};
use tracing::{debug, info, warn};

use crate::{
    Kind, Notice, Settings,
    client::{self, Failure, Token},
    contact::{Contact, Mention, Outcome},
    document,
    seen::Seen,
};

/// Tells each notice once, within about a [`period`](Settings::period) of its appearance, and never ends:
/// drop the future, or abort its task, to stop it. `tell` must not block.
///
/// Where nothing answers from the start this is no EC2 instance, and after one line in the debug log the
/// watch only tries again every [`rest`](Settings::rest). Once the service has answered, failures cost the
/// polls they hit; an outage longer than the [`patience`](Settings::patience) is warned of once.
///
/// Needs a Tokio runtime with time and IO; one thread is enough.
pub async fn watch(settings: Settings, tell: impl Fn(Notice)) -> Infallible {
    let mut watch = Watch {
        tell,
        seen: [Kind::Interruption, Kind::Rebalance, Kind::Lifecycle].map(Seen::new),
        token: None,
        settings,
    };
    let mut contact = Contact::default();
    loop {
        let begin = Instant::now();
        let failures = watch.poll().await;
        let kinds = watch.seen.each_ref().map(|seen| seen.kind);
        let outcomes = std::array::from_fn(|number| (kinds[number], outcome(&failures[number])));
        let failure = failures.into_iter().flatten().next();
        for mention in contact.after(outcomes, Instant::now(), watch.settings.patience) {
            log(&mention, failure.as_deref());
        }
        let pause = if contact.is_made() { watch.settings.period } else { watch.settings.rest };
        sleep(pause.saturating_sub(begin.elapsed())).await;
    }
}

fn outcome(failure: &Option<Arc<Failure>>) -> Outcome {
    match failure {
        None => Outcome::Read,
        Some(failure) if failure.is_from_service() => Outcome::Refused,
        Some(_) => Outcome::Nothing,
    }
}

struct Watch<Tell> {
    settings: Settings,
    tell: Tell,
    seen: [Seen; 3],
    token: Option<Token>,
}

/// For each document why it was not read, if it was not.
type Failures = [Option<Arc<Failure>>; 3];

impl<Tell: Fn(Notice)> Watch<Tell> {
    /// Reads every document, and once more if the service no longer takes the token.
    async fn poll(&mut self) -> Failures {
        let mut failures = self.read_all().await;
        if failures.iter().flatten().any(|failure| failure.is_unauthorized()) {
            self.token = None;
            failures = self.read_all().await;
        }
        failures
    }

    /// Nothing is read without a token.
    async fn read_all(&mut self) -> Failures {
        let token = match self.token.take() {
            Some(token) if token.is_good(Instant::now()) => token,
            old => match (client::token(&self.settings).await, old) {
                (Ok(token), _) => token,
                // It has a little time left.
                (Err(_), Some(old)) => old,
                (Err(failure), None) => {
                    let failure = Arc::new(failure);
                    return std::array::from_fn(|_| Some(failure.clone()));
                }
            },
        };
        let token = self.token.insert(token);
        let (settings, tell) = (&self.settings, &self.tell);
        // Each tells for itself, so that none waits for another that hangs.
        let reads = self.seen.each_mut().map(|seen| read(settings, token, seen, tell));
        let [interruption, rebalance, lifecycle] = reads;
        let (interruption, rebalance, lifecycle) = join!(interruption, rebalance, lifecycle);
        [interruption, rebalance, lifecycle].map(|read| read.err().map(Arc::new))
    }
}

async fn read(
    settings: &Settings,
    token: &Token,
    seen: &mut Seen,
    tell: &impl Fn(Notice),
) -> Result<(), Failure> {
    let body = client::get(settings, seen.kind.path(), token).await?;
    let news = seen.take(document::read(seen.kind, body.as_deref()), SystemTime::now());
    if let Some(problem) = news.warning {
        warn!(%problem, "odd instance metadata");
    }
    if let Some(notice) = news.notice {
        tell(notice);
    }
    Ok(())
}

fn log(mention: &Mention, failure: Option<&Failure>) {
    let failure = failure.map(ToString::to_string).unwrap_or_default();
    match mention {
        Mention::Found => info!("watching instance metadata for the end of this machine"),
        Mention::NotFound => debug!(
            failure,
            "no instance metadata: not on EC2, turned off, or in a container with a hop limit of 1"
        ),
        Mention::Silent(kinds, silence) => warn!(
            failure,
            "instance metadata gave nothing for {} s: {} cannot be seen; look whether this machine still may \
             ask for it (firewall, metadata options of the instance, AWS_EC2_METADATA_SERVICE_ENDPOINT)",
            silence.as_secs(),
            named(kinds)
        ),
        Mention::Back(kinds, silence) => {
            info!("instance metadata tells {} again after {} s", named(kinds), silence.as_secs());
        }
    }
}

fn named(kinds: &[Kind]) -> String {
    let names = kinds.iter().map(|kind| match kind {
        Kind::Interruption => "spot notices",
        Kind::Rebalance => "rebalance recommendations",
        Kind::Lifecycle => "the Auto Scaling lifecycle",
    });
    names.collect::<Vec<_>>().join(", ")
}
