//! Polls the documents and reports new notices.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Instant, SystemTime},
};

use tokio::{join, time::sleep};
use tracing::{debug, info, warn};

use crate::{
    InterruptionNotice, NoticeSource, Settings,
    availability::{Availability, LogMessage, PollResult},
    client::{self, MetadataToken, RequestError},
    document,
    filter::NoticeFilter,
};

/// Passes each notice to `notify` once, within about one [`poll_interval`](Settings::poll_interval) of its appearance.
///
/// It never ends: drop the future, or abort its task, to stop it. `notify` must not block.
///
/// If no service answers at first, this is probably not an EC2 instance: after one line in the debug log it is tried
/// again every [`discovery_interval`](Settings::discovery_interval). Once the service has answered, a failed request
/// costs only that poll; an outage longer than [`warn_after`](Settings::warn_after) is logged once as a warning.
///
/// Needs a Tokio runtime with time and IO; one thread is enough.
pub async fn watch(settings: Settings, notify: impl Fn(InterruptionNotice)) -> Infallible {
    let mut watch = Watch {
        notify,
        filters: [NoticeSource::Interruption, NoticeSource::Rebalance, NoticeSource::Lifecycle]
            .map(NoticeFilter::new),
        token: None,
        settings,
    };
    let mut availability = Availability::default();
    loop {
        let begin = Instant::now();
        let errors = watch.poll().await;
        let sources = watch.filters.each_ref().map(|filter| filter.source);
        let results = std::array::from_fn(|number| (sources[number], result(&errors[number])));
        let error = errors.into_iter().flatten().next();
        for message in availability.record(results, Instant::now(), watch.settings.warn_after) {
            log(&message, error.as_deref());
        }
        let pause = if availability.is_found() {
            watch.settings.poll_interval
        } else {
            watch.settings.discovery_interval
        };
        sleep(pause.saturating_sub(begin.elapsed())).await;
    }
}

fn result(error: &Option<Arc<RequestError>>) -> PollResult {
    match error {
        None => PollResult::Read,
        Some(error) if error.is_from_service() => PollResult::Refused,
        Some(_) => PollResult::NoService,
    }
}

struct Watch<Notify> {
    settings: Settings,
    notify: Notify,
    filters: [NoticeFilter; 3],
    token: Option<MetadataToken>,
}

/// For each document, why it could not be read.
type Errors = [Option<Arc<RequestError>>; 3];

impl<Notify: Fn(InterruptionNotice)> Watch<Notify> {
    /// Reads every document, and once more with a new token if the service refuses the current one.
    async fn poll(&mut self) -> Errors {
        let mut errors = self.read_all().await;
        if errors.iter().flatten().any(|error| error.is_unauthorized()) {
            self.token = None;
            errors = self.read_all().await;
        }
        errors
    }

    /// Reads every document; without a token, all fail with the error of the token request.
    async fn read_all(&mut self) -> Errors {
        let token = match self.token.take() {
            Some(token) if token.is_valid(Instant::now()) => token,
            old => match (client::token(&self.settings).await, old) {
                (Ok(token), _) => token,
                // The old token is valid for a little longer.
                (Err(_), Some(old)) => old,
                (Err(error), None) => {
                    let error = Arc::new(error);
                    return std::array::from_fn(|_| Some(error.clone()));
                }
            },
        };
        let token = self.token.insert(token);
        let (settings, notify) = (&self.settings, &self.notify);
        // Each read calls `notify` itself, so that none has to wait for one that hangs.
        let reads = self.filters.each_mut().map(|filter| read(settings, token, filter, notify));
        let [interruption, rebalance, lifecycle] = reads;
        let (interruption, rebalance, lifecycle) = join!(interruption, rebalance, lifecycle);
        [interruption, rebalance, lifecycle].map(|read| read.err().map(Arc::new))
    }
}

async fn read(
    settings: &Settings,
    token: &MetadataToken,
    filter: &mut NoticeFilter,
    notify: &impl Fn(InterruptionNotice),
) -> Result<(), RequestError> {
    let body = client::get(settings, filter.source.path(), token).await?;
    let update = filter.update(document::read(filter.source, body.as_deref()), SystemTime::now());
    if let Some(problem) = update.warning {
        warn!(%problem, "unexpected content in the instance metadata");
    }
    if let Some(notice) = update.notice {
        notify(notice);
    }
    Ok(())
}

fn log(message: &LogMessage, error: Option<&RequestError>) {
    let error = error.map(ToString::to_string).unwrap_or_default();
    match message {
        LogMessage::Found => info!("watching instance metadata for interruption notices"),
        LogMessage::NotFound => debug!(
            error,
            "no instance metadata service: not on EC2, turned off, or in a container with a hop limit of 1"
        ),
        LogMessage::Outage(sources, duration) => warn!(
            error,
            "instance metadata could not be read for {} s: {} may be missed; check that this machine may still \
             read it (firewall, metadata options of the instance, AWS_EC2_METADATA_SERVICE_ENDPOINT)",
            duration.as_secs(),
            names(sources)
        ),
        LogMessage::Recovered(sources, duration) => {
            info!(
                "instance metadata can be read again: {} after {} s",
                names(sources),
                duration.as_secs()
            );
        }
    }
}

fn names(sources: &[NoticeSource]) -> String {
    let names = sources.iter().map(|source| match source {
        NoticeSource::Interruption => "spot notices",
        NoticeSource::Rebalance => "rebalance recommendations",
        NoticeSource::Lifecycle => "Auto Scaling lifecycle states",
    });
    names.collect::<Vec<_>>().join(", ")
}
