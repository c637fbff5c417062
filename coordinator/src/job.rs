//! The loop that owns the machine: one queue in, actions out, a snapshot for readers.
//!
//! It has a thread of its own, because journal and store make it wait for disks; gRPC never does.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use baton_checkpoint::Store;
use baton_job::{
    Time,
    engine::{Action, Engine, Event, Record, Status},
    ids::Attachment,
    message::Directive,
};
use tokio::sync::{broadcast, oneshot, watch};
use tracing::{debug, info, warn};

use crate::{
    clock::Clock,
    diagnosis,
    journal::{Journal, LoggedEvent},
};

/// What reaches the loop.
pub(crate) enum Input {
    /// For the machine.
    Event(Box<Event>),
    /// An agent's stream opened: where its directives go.
    Opened { attachment: Attachment, outbox: Outbox },
    /// A user wants a checkpoint and an answer.
    Checkpoint { answer: oneshot::Sender<Result<(), String>> },
    /// A watcher wants what is logged after an id, and all that follows.
    Watch { after: u64, answer: oneshot::Sender<Result<Watch, String>> },
    /// The process was told to end. Training goes on without it.
    Quit,
}

impl From<Event> for Input {
    fn from(event: Event) -> Self {
        Self::Event(Box::new(event))
    }
}

/// Directives to one agent; an error closes its stream.
pub(crate) type Outbox = tokio::sync::mpsc::UnboundedSender<Result<Directive, String>>;

/// Past events and the feed of coming ones, without a gap between.
pub(crate) struct Watch {
    pub(crate) past: Vec<LoggedEvent>,
    pub(crate) coming: broadcast::Receiver<LoggedEvent>,
}

/// What readers see, newest state of the machine.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) status: Status,
    pub(crate) now: Time,
    pub(crate) taken: Instant,
    /// When the last checkpoint was reported, in this coordinator's life.
    pub(crate) saved: Option<Instant>,
    /// Agents with an open stream.
    pub(crate) attached: usize,
}

/// A cheap way to the loop.
#[derive(Clone)]
pub(crate) struct Handle {
    inputs: mpsc::Sender<Input>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
}

impl Handle {
    /// Queues an input; false once the loop has ended.
    pub(crate) fn send(&self, input: Input) -> bool {
        self.inputs.send(input).is_ok()
    }

    /// The newest snapshot.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshots.borrow().clone()
    }

    /// A receiver that wakes on every new snapshot.
    pub(crate) fn snapshots(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.clone()
    }
}

/// Why the loop ended.
#[derive(Debug)]
pub(crate) enum End {
    /// Told to quit; the job goes on.
    Quit,
    /// The journal or the store failed.
    Broken(anyhow::Error),
}

/// The loop before it runs.
pub(crate) struct Loop {
    engine: Engine,
    journal: Journal,
    store: Store,
    run_dir: PathBuf,
    clock: Clock,
    inputs: mpsc::Receiver<Input>,
    outboxes: HashMap<Attachment, Outbox>,
    snapshots: watch::Sender<Arc<Snapshot>>,
    events: broadcast::Sender<LoggedEvent>,
    saved: Option<Instant>,
    last_reason: String,
    /// Whose the generations are that it opens. The job's identity would not do: its run folder may have been
    /// copied, and then two are the same job.
    incarnation: String,
}

/// Events a slow watcher may fall behind before it has to ask again.
const WATCH_BUFFER: usize = 1024;

impl Loop {
    /// The loop of `engine`, which lives by `clock`; diagnoses are written to `run_dir`.
    pub(crate) fn new(
        engine: Engine,
        journal: Journal,
        store: Store,
        run_dir: PathBuf,
        clock: Clock,
    ) -> (Self, Handle) {
        let (sender, inputs) = mpsc::channel();
        let snapshot = Snapshot {
            status: engine.status(),
            now: clock.now(),
            taken: Instant::now(),
            saved: None,
            attached: 0,
        };
        let (snapshots, receiver) = watch::channel(Arc::new(snapshot));
        let (events, _) = broadcast::channel(WATCH_BUFFER);
        let this = Self {
            engine,
            journal,
            store,
            run_dir,
            clock,
            inputs,
            outboxes: HashMap::new(),
            snapshots,
            events,
            saved: None,
            last_reason: String::new(),
            incarnation: uuid::Uuid::new_v4().to_string(),
        };
        (this, Handle { inputs: sender, snapshots: receiver })
    }

    /// Runs until told to quit or broken.
    pub(crate) fn run(mut self) -> End {
        // A new machine has its origin to persist before anything else.
        let mut event = Some(Event::Tick);
        loop {
            if let Some(event) = event.take()
                && let Err(error) = self.step(event)
            {
                return End::Broken(error);
            }
            match self.next() {
                Some(Input::Event(next)) => event = Some(*next),
                Some(Input::Opened { attachment, outbox }) => {
                    self.outboxes.insert(attachment, outbox);
                }
                Some(Input::Checkpoint { answer }) => {
                    let possible = self.engine.can_checkpoint();
                    event = possible.is_ok().then_some(Event::Checkpoint);
                    // The asker may have hung up.
                    let _ = answer.send(possible);
                }
                Some(Input::Watch { after, answer }) => {
                    let _ = answer.send(self.watch(after));
                }
                Some(Input::Quit) => return End::Quit,
                None => event = Some(Event::Tick),
            }
        }
    }

    /// The next input, or `None` when the machine's deadline has come.
    fn next(&self) -> Option<Input> {
        let received = match self.engine.deadline() {
            Some(deadline) => self.inputs.recv_timeout(deadline.since(self.clock.now())),
            None => self.inputs.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(input) => Some(input),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => Some(Input::Quit),
        }
    }

    fn step(&mut self, event: Event) -> Result<()> {
        debug!(?event, "event");
        if let Event::Detached { attachment, .. } = &event {
            self.outboxes.remove(attachment);
        }
        let mut news = Vec::new();
        let mut next = Some(event);
        while let Some(event) = next.take() {
            for action in self.engine.handle(self.clock.now(), event) {
                debug!(?action, "action");
                next = self.perform(action, &mut news)?;
                if next.is_some() {
                    break;
                }
            }
        }
        self.publish();
        // After the status, so that whoever hears of an event finds it there.
        for event in news {
            // No watcher is no error.
            let _ = self.events.send(event);
        }
        Ok(())
    }

    /// Does it. With an event to answer, the actions that were to follow must not be done.
    fn perform(&mut self, action: Action, news: &mut Vec<LoggedEvent>) -> Result<Option<Event>> {
        match action {
            Action::Persist(record) => {
                if matches!(record, Record::Saved(_)) {
                    self.saved = Some(Instant::now());
                }
                self.journal.append(&record)?;
            }
            Action::Fence(generation) => match self.store.claim(generation, &self.incarnation) {
                Ok(()) => {}
                Err(error @ baton_checkpoint::Error::TakenOver { .. }) => {
                    return Ok(Some(Event::TakenOver { message: error.to_string() }));
                }
                Err(error) => {
                    return Err(error).context("the checkpoint store cannot be fenced");
                }
            },
            Action::Send { attachment, directive, .. } => {
                // A stream that just closed reports itself as detached.
                if let Some(outbox) = self.outboxes.get(&attachment) {
                    let _ = outbox.send(Ok(directive));
                }
            }
            Action::Refuse { node, attachment, reason } => {
                warn!(%node, reason, "agent refused");
                if let Some(outbox) = self.outboxes.remove(&attachment) {
                    let _ = outbox.send(Err(reason));
                }
            }
            Action::Write(written) => {
                // For people alone: training must not end for want of a file.
                if let Err(error) = diagnosis::write(&self.run_dir, &written) {
                    warn!("{error:#}");
                }
            }
            Action::Announce(notice) => {
                info!(kind = ?notice.kind, generation = %notice.generation, "{}", notice.message);
                let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let millis = u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX);
                news.push(self.journal.log(millis, notice)?);
            }
        }
        Ok(None)
    }

    fn watch(&self, after: u64) -> Result<Watch, String> {
        // Subscribed before the log is read, in the loop that writes both: nothing falls between.
        let coming = self.events.subscribe();
        let past = self.journal.events_after(after).map_err(|error| format!("{error:#}"))?;
        Ok(Watch { past, coming })
    }

    fn publish(&mut self) {
        let status = self.engine.status();
        if status.reason != self.last_reason {
            info!(phase = ?status.phase, "{}", status.reason);
            self.last_reason.clone_from(&status.reason);
        }
        self.snapshots.send_replace(Arc::new(Snapshot {
            status,
            now: self.clock.now(),
            taken: Instant::now(),
            saved: self.saved,
            attached: self.outboxes.len(),
        }));
    }
}
