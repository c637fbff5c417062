//! Sources of the input queue of `baton up`.

use std::time::Duration;

use baton_console::signals::is_ignored;
use baton_job::exit::Failure;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc::UnboundedSender,
};

use crate::{
    connect::{Coordinator, follow::EventFeed},
    failure::failed,
    supervise::Exit,
};

/// An input of the supervision loop.
#[derive(Debug)]
pub(super) enum Input {
    /// A child ended.
    Ended(ChildKind, Exit),
    /// The pause before a restart has ended.
    Restart(ChildKind),
    /// The job's status.
    Status(Box<GetStatusResponse>),
    /// Another coordinator serves the job now.
    Moved(Box<Coordinator>),
    /// An event of the job.
    Event(WatchEventsResponse),
    /// A signal that asks `baton up` to end.
    Signal(&'static str),
    /// The coordinator and this command do not accept each other.
    Refused(Failure),
    /// Whether the coordinator answers is to be checked.
    SilenceCheck,
    /// The coordinator had time to accept the drain.
    AnswerTimeout,
    /// The time for the processes to end has expired.
    ExitTimeout,
}

/// One of the two children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChildKind {
    Coordinator,
    Agent,
}

impl ChildKind {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Coordinator => Self::Agent,
            Self::Agent => Self::Coordinator,
        }
    }
}

pub(super) type Queue = UnboundedSender<Input>;

/// Poll interval of the job's status, and retry interval of calls.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Sends the job's status to the queue until the queue is closed.
pub(super) async fn statuses(mut coordinator: Coordinator, queue: Queue) {
    while !queue.is_closed() {
        // A coordinator that does not answer is being restarted or soon will be.
        let before = coordinator.address().clone();
        let input = match coordinator.status().await {
            Ok(status) => Some(Input::Status(Box::new(status))),
            Err(_) if *coordinator.address() != before => {
                Some(Input::Moved(Box::new(coordinator.clone())))
            }
            // Its certificate has expired, or it has other tokens: that does not pass by itself.
            Err(failure) if !failure.class.is_retriable() => Some(Input::Refused(failure)),
            Err(_) => None,
        };
        if let Some(input) = input {
            let _ = queue.send(input);
        }
        tokio::time::sleep(STATUS_POLL_INTERVAL).await;
    }
}

/// Sends the job's events after those of `known` to the queue until the queue is closed.
pub(super) async fn events(coordinator: Coordinator, known: EventFeed, queue: Queue) {
    let mut events = coordinator.events_after(known);
    while !queue.is_closed() {
        match events.next(Duration::ZERO).await {
            Ok(event) => drop(queue.send(Input::Event(event))),
            Err(_) => tokio::time::sleep(STATUS_POLL_INTERVAL).await,
        }
    }
}

/// Requests a drain, and retries until the coordinator has accepted it.
pub(super) async fn drain(mut coordinator: Coordinator, reason: String, queue: Queue) {
    while !queue.is_closed() && coordinator.drain(reason.clone()).await.is_err() {
        tokio::time::sleep(STATUS_POLL_INTERVAL).await;
    }
}

/// Sends an input to the queue after a pause.
pub(super) fn send_later(pause: Duration, input: Input, queue: &Queue) {
    let queue = queue.clone();
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        let _ = queue.send(input);
    });
}

/// Sends every signal that asks a process to end to the queue, as the `input` with its name.
pub(crate) fn signals<T: Send + 'static>(
    queue: &UnboundedSender<T>,
    input: fn(&'static str) -> T,
) -> Result<(), Failure> {
    let kinds = [
        (SignalKind::interrupt(), "Ctrl-C"),
        (SignalKind::terminate(), "SIGTERM"),
        (SignalKind::hangup(), "SIGHUP"),
    ];
    // `nohup baton up` outlives its terminal.
    let kinds = kinds.into_iter().filter(|(kind, _)| !is_ignored(kind.as_raw_value()));
    for (kind, name) in kinds {
        let mut signals =
            signal(kind).map_err(|error| failed(format!("cannot handle {name}: {error}")))?;
        let queue = queue.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                let _ = queue.send(input(name));
            }
        });
    }
    Ok(())
}
