//! The watch: polls the documents and tells what is new.

use std::{
    convert::Infallible,
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
        let poll = watch.poll().await;
        let outcome = match &poll {
            Ok(()) => Outcome::Complete,
            Err(failure) if failure.is_from_service() => Outcome::Partial,
            Err(_) => Outcome::Nothing,
        };
        if let Some(mention) = contact.after(outcome, Instant::now(), watch.settings.patience) {
            log(&mention, poll.err());
        }
        let pause = if contact.is_made() { watch.settings.period } else { watch.settings.rest };
        sleep(pause.saturating_sub(begin.elapsed())).await;
    }
}

struct Watch<Tell> {
    settings: Settings,
    tell: Tell,
    seen: [Seen; 3],
    token: Option<Token>,
}

impl<Tell: Fn(Notice)> Watch<Tell> {
    /// Reads every document, and once more if the service no longer takes the token.
    async fn poll(&mut self) -> Result<(), Failure> {
        let mut outcomes = self.read_all().await?;
        if outcomes.iter().flatten().any(Failure::is_unauthorized) {
            self.token = None;
            outcomes = self.read_all().await?;
        }
        outcomes.into_iter().flatten().next().map_or(Ok(()), Err)
    }

    /// Fails if there is no token to read with.
    async fn read_all(&mut self) -> Result<[Option<Failure>; 3], Failure> {
        let token = match self.token.take() {
            Some(token) if token.is_good(Instant::now()) => token,
            old => match (client::token(&self.settings).await, old) {
                (Ok(token), _) => token,
                // It has a little time left.
                (Err(_), Some(old)) => old,
                (Err(failure), None) => return Err(failure),
            },
        };
        let token = self.token.insert(token);
        let (settings, tell) = (&self.settings, &self.tell);
        // Each tells for itself, so that none waits for another that hangs.
        let reads = self.seen.each_mut().map(|seen| read(settings, token, seen, tell));
        let [interruption, rebalance, lifecycle] = reads;
        let (interruption, rebalance, lifecycle) = join!(interruption, rebalance, lifecycle);
        Ok([interruption, rebalance, lifecycle].map(Result::err))
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

fn log(mention: &Mention, failure: Option<Failure>) {
    let failure = failure.map(|failure| failure.to_string()).unwrap_or_default();
    match mention {
        Mention::Found => info!("watching instance metadata for the end of this machine"),
        Mention::NotFound => debug!(
            failure,
            "no instance metadata: not on EC2, turned off, or in a container with a hop limit of 1"
        ),
        Mention::Silent(silence) => warn!(
            failure,
            "instance metadata has not answered for {} s: spot notices cannot be seen",
            silence.as_secs()
        ),
        Mention::Back(silence) => {
            info!("instance metadata answers again after {} s", silence.as_secs());
        }
    }
}
