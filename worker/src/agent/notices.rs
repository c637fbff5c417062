//! What says that this node must go: signals, a file, the metadata service of an EC2 instance.

use std::{
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

use baton_imds::{Kind, Notice, Settings};
use baton_job::{
    Time,
    exit::{Failure, bad_input, crash},
    session::Event,
};
use tokio::signal::unix::{self, SignalKind};
use tracing::{info, warn};

use super::{Input, Queue};
use crate::signals::MUST_GO;

/// How often the drain file is looked for.
const LOOK: Duration = Duration::from_millis(500);

/// Every signal that asks a process to end means the same: this node must go. Ranks leave them to the agent.
pub(super) fn forward_signals(queue: Queue) -> Result<(), Failure> {
    for (signal, name) in MUST_GO {
        let mut signals = unix::signal(SignalKind::from_raw(signal))
            .map_err(|error| crash(format!("cannot listen to {name}: {error}")))?;
        let queue = queue.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                let reason = format!("the agent received {name}");
                if queue.send(Input::Event(Event::MustGo { reason })).is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// A file that somebody without a way to the coordinator can make, such as a container's hook.
pub(super) fn watch_file(file: Option<PathBuf>, queue: Queue) {
    let Some(file) = file else { return };
    tokio::spawn(async move {
        while tokio::fs::metadata(&file).await.is_err() {
            tokio::time::sleep(LOOK).await;
        }
        // It asked once: the agent that is started next is not meant.
        if let Err(error) = tokio::fs::remove_file(&file).await {
            warn!("the drain file {} cannot be removed: {error}", file.display());
        }
        let reason = format!("the file {} asks for it", file.display());
        let _ = queue.send(Input::Event(Event::Noticed { reason, end: None }));
    });
}

/// On EC2 the instance's own metadata tell of its end. The machine's clock begins at `start`.
pub(super) fn watch_metadata(start: Instant, queue: Queue) -> Result<(), Failure> {
    let settings = Settings::from_environment().map_err(bad_input)?;
    let Some(settings) = settings else { return Ok(()) };
    tokio::spawn(baton_imds::watch(settings, move |Notice { kind, reason, end }| {
        info!("{reason}");
        let event = match kind {
            Kind::Rebalance => Event::Advised { reason },
            Kind::Interruption | Kind::Lifecycle => {
                let end = end.map(|end| {
                    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
                    Time(0).after(start.elapsed() + left)
                });
                Event::Noticed { reason, end }
            }
        };
        let _ = queue.send(Input::Event(event));
    }));
    Ok(())
}
