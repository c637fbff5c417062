//! Requests that this node leave: signals, the drain file and EC2's instance metadata.

use std::{
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

use baton_console::{parent::Parent, signals::is_ignored};
use baton_imds::{InterruptionNotice, NoticeSource, Settings};
use baton_job::{
    Time,
    exit::{Failure, bad_input, crash},
    session::Event,
};
use tokio::signal::unix::{self, SignalKind};
use tracing::{info, warn};

use super::{AgentInput, InputQueue};
use crate::signals::SHUTDOWN_SIGNALS;

/// Time between two checks for the drain file.
const DRAIN_FILE_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Forwards each shutdown signal to the agent's loop: this node must leave. Ranks ignore these signals. The kernel sends one
/// when `parent` has ended.
pub(super) fn forward_signals(queue: InputQueue, parent: Option<Parent>) -> Result<(), Failure> {
    // `nohup baton-worker agent` outlives its terminal.
    for (signal, name) in SHUTDOWN_SIGNALS.into_iter().filter(|(signal, _)| !is_ignored(*signal)) {
        let mut signals = unix::signal(SignalKind::from_raw(signal))
            .map_err(|error| crash(format!("cannot listen for {name}: {error}")))?;
        let queue = queue.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                let is_orphan = parent.is_some_and(Parent::has_ended);
                let reason = match is_orphan {
                    true => "the process that started the agent has ended".to_owned(),
                    false => format!("the agent received {name}"),
                };
                let event = Event::ShutdownSignal { reason, is_orphan };
                if queue.send(AgentInput::Event(event)).is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// Watches for the drain file, with which a script that cannot reach the coordinator, such as a container's stop
/// hook, drains this node.
pub(super) fn watch_file(file: Option<PathBuf>, queue: InputQueue) {
    let Some(file) = file else { return };
    tokio::spawn(async move {
        while tokio::fs::metadata(&file).await.is_err() {
            tokio::time::sleep(DRAIN_FILE_POLL_INTERVAL).await;
        }
        // Removed, so that the next agent on this machine is not drained too.
        if let Err(error) = tokio::fs::remove_file(&file).await {
            warn!(
                "the drain file {} cannot be removed: {error}; remove it before another agent starts",
                file.display()
            );
        }
        let reason = format!("the drain file {} was created", file.display());
        let _ = queue.send(AgentInput::Event(Event::InterruptionNotice { reason, end: None }));
    });
}

/// Forwards interruption notices from EC2's instance metadata. `start` is time zero of the session's clock.
pub(super) fn watch_metadata(start: Instant, queue: InputQueue) -> Result<(), Failure> {
    let settings = Settings::from_environment().map_err(bad_input)?;
    let Some(settings) = settings else { return Ok(()) };
    tokio::spawn(baton_imds::watch(settings, move |InterruptionNotice { source, reason, end }| {
        info!("{reason}");
        let event = match source {
            NoticeSource::Rebalance => Event::CheckpointAdvised { reason },
            NoticeSource::Interruption | NoticeSource::Lifecycle => {
                let end = end.map(|end| {
                    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
                    Time(0).after(start.elapsed() + left)
                });
                Event::InterruptionNotice { reason, end }
            }
        };
        let _ = queue.send(AgentInput::Event(event));
    }));
    Ok(())
}
