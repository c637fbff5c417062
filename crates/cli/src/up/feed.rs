//! Everything that `baton up` reacts to comes through one queue; these are its sources.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_job::exit::Failure;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc::UnboundedSender,
};

use crate::{connect::Coordinator, failure::failed, supervise::Exit};

/// What reaches the loop.
#[derive(Debug)]
pub(super) enum Input {
    /// A child ended.
    Ended(Who, Exit),
    /// The pause before a restart is over.
    Restart(Who),
    /// The job's status.
    Status(Box<GetStatusResponse>),
    /// Something happened in the job.
    Event(WatchEventsResponse),
    /// The user, the terminal or the system wants this to end.
    Signal(&'static str),
    /// The job is over and its processes had time enough to leave.
    Overdue,
}

/// One of the two children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    Coordinator,
    Agent,
}

pub(super) type Queue = UnboundedSender<Input>;

/// Between two looks at the status.
const LOOK: Duration = Duration::from_millis(300);

/// Follows the status until nobody listens any more.
pub(super) async fn statuses(mut coordinator: Coordinator, queue: Queue) {
    while !queue.is_closed() {
        // One that does not answer is being started again, or soon will be.
        if let Ok(status) = coordinator.status().await {
            let _ = queue.send(Input::Status(Box::new(status)));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Follows what happens from now on until nobody listens any more. The journal's older events, of
/// earlier lives of the job, are passed over.
pub(super) async fn events(coordinator: Coordinator, since: SystemTime, queue: Queue) {
    let since = since.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let mut events = coordinator.events(0);
    while !queue.is_closed() {
        if let Ok(event) = events.next(Duration::ZERO).await {
            if u128::from(event.unix_millis) >= since {
                let _ = queue.send(Input::Event(event));
            }
        } else {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Asks for a drain until the coordinator has heard it.
pub(super) async fn drain(mut coordinator: Coordinator, reason: String, queue: Queue) {
    while !queue.is_closed() && coordinator.drain(reason.clone()).await.is_err() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Sends what is due after a pause.
pub(super) fn later(pause: Duration, input: Input, queue: &Queue) {
    let queue = queue.clone();
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        let _ = queue.send(input);
    });
}

/// Every signal that asks a process to end means the same here.
pub(super) fn signals(queue: &Queue) -> Result<(), Failure> {
    let kinds = [
        (SignalKind::interrupt(), "Ctrl-C"),
        (SignalKind::terminate(), "SIGTERM"),
        (SignalKind::hangup(), "SIGHUP"),
    ];
    for (kind, name) in kinds {
        let mut signals =
            signal(kind).map_err(|error| failed(format!("cannot listen to {name}: {error}")))?;
        let queue = queue.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                let _ = queue.send(Input::Signal(name));
            }
        });
    }
    Ok(())
}
