//! The loop that owns the machine: one queue in, actions out, a snapshot for readers.
//!
//! It has a thread of its own, because journal and store make it wait for disks; gRPC never does. Whatever waits in
//! the queue is taken in one round: the machine handles all of it, then the journal is committed once, and only then
//! others are told.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
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
    clock::{Clock, unix_millis},
    diagnosis,
    journal::{Journal, LoggedEvent},
    metrics::Metrics,
    traces::Traces,
};

/// What reaches the loop.
pub(crate) enum Input {
    /// For the machine.
    Event(Box<Event>),
    /// An agent's stream opened: where its directives go.
    Opened { attachment: Attachment, outbox: Outbox },
    /// A user wants something that is not always possible, and an answer.
    Wish { wish: Wish, answer: oneshot::Sender<Result<(), String>> },
    /// A watcher wants what is logged after an id, and all that follows.
    Watch { after: u64, answer: oneshot::Sender<Result<Watch, WatchError>> },
    /// The process was told to end. Training goes on without it.
    Quit,
}

impl From<Event> for Input {
    fn from(event: Event) -> Self {
        Self::Event(Box::new(event))
    }
}

/// What a user may want.
#[derive(Clone, Debug)]
pub(crate) enum Wish {
    Checkpoint,
    Pause { reason: String },
    Resume,
}

/// Directives to one agent; an error closes its stream.
pub(crate) type Outbox = tokio::sync::mpsc::UnboundedSender<Result<Directive, String>>;

/// Past events and the feed of coming ones, without a gap between.
pub(crate) struct Watch {
    pub(crate) past: Vec<LoggedEvent>,
    pub(crate) coming: broadcast::Receiver<LoggedEvent>,
}

/// Why there is nothing to watch.
#[derive(Debug)]
pub(crate) enum WatchError {
    /// No event has got so far; the newest.
    OutOfRange { newest: u64 },
    /// The journal cannot be read.
    Unreadable(String),
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
    metrics: Arc<Metrics>,
    traces: Option<Traces>,
    inputs: mpsc::Receiver<Input>,
    outboxes: HashMap<Attachment, Outbox>,
    snapshots: watch::Sender<Arc<Snapshot>>,
    events: broadcast::Sender<LoggedEvent>,
    saved: Option<Instant>,
    last_reason: String,
    /// Whose the generations are that it opens. The job's identity would not do: its run folder may have been
    /// copied, and then two are the same job.
    incarnation: String,
    /// What to tell once the journal is committed.
    outgoing: Vec<Outgoing>,
    /// What happened in this round.
    news: Vec<LoggedEvent>,
    /// Since when readers see a state that is no longer the newest.
    unseen_since: Option<Instant>,
}

/// What others are told.
enum Outgoing {
    Directive(Attachment, Directive),
    Refusal(Attachment, String),
    Answer(oneshot::Sender<Result<(), String>>, Result<(), String>),
}

/// Events a slow watcher may fall behind before it has to ask again.
const WATCH_BUFFER: usize = 1024;
/// Inputs of a round: what comes while the disk is waited for.
const MOST_INPUTS: usize = 4_096;
/// How old a state may be that readers see, if nothing happened but that everybody lives. With ten thousand ranks
/// a snapshot takes milliseconds, and there are as many signs of life a second.
const FRESH: Duration = Duration::from_millis(100);

impl Loop {
    /// The loop of `engine`, which lives by `clock`; diagnoses are written to `run_dir`.
    pub(crate) fn new(
        engine: Engine,
        journal: Journal,
        store: Store,
        run_dir: PathBuf,
        clock: Clock,
        metrics: Arc<Metrics>,
        traces: Option<Traces>,
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
            metrics,
            traces,
            inputs,
            outboxes: HashMap::new(),
            snapshots,
            events,
            saved: None,
            last_reason: String::new(),
            incarnation: uuid::Uuid::new_v4().to_string(),
            outgoing: Vec::new(),
            news: Vec::new(),
            unseen_since: None,
        };
        (this, Handle { inputs: sender, snapshots: receiver })
    }

    /// Runs until told to quit or broken.
    pub(crate) fn run(mut self) -> End {
        // A new machine has its origin to persist before anything else.
        let mut next = Some(Input::from(Event::Tick));
        loop {
            match self.round(next.take()) {
                Ok(true) => next = self.next(),
                Ok(false) => return End::Quit,
                Err(error) => return End::Broken(error),
            }
        }
    }

    /// The next input, or `None` when it is time for something.
    fn next(&self) -> Option<Input> {
        let deadline = self.engine.deadline().map(|at| at.since(self.clock.now()));
        let fresh = self.unseen_since.map(|since| FRESH.saturating_sub(since.elapsed()));
        let received = match deadline.into_iter().chain(fresh).min() {
            Some(wait) => self.inputs.recv_timeout(wait),
            None => self.inputs.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(input) => Some(input),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => Some(Input::Quit),
        }
    }

    /// Takes what came first and all that waits behind it; false if it was told to quit.
    fn round(&mut self, first: Option<Input>) -> Result<bool> {
        let mut goes_on = match first {
            Some(input) => self.take(input)?,
            None => {
                if self.engine.deadline().is_some_and(|at| at <= self.clock.now()) {
                    self.handle(Event::Tick)?;
                }
                true
            }
        };
        for _ in 1..MOST_INPUTS {
            let Ok(input) = self.inputs.try_recv() else { break };
            goes_on = goes_on && self.take(input)?;
        }
        self.commit()?;
        self.publish();
        Ok(goes_on)
    }

    fn take(&mut self, input: Input) -> Result<bool> {
        match input {
            Input::Event(event) => self.handle(*event)?,
            Input::Opened { attachment, outbox } => {
                self.outboxes.insert(attachment, outbox);
            }
            Input::Wish { wish, answer } => {
                let (possible, event) = match wish {
                    Wish::Checkpoint => (self.engine.can_checkpoint(), Event::Checkpoint),
                    Wish::Pause { reason } => (self.engine.can_pause(), Event::Pause { reason }),
                    Wish::Resume => (self.engine.can_resume(), Event::Resume),
                };
                if possible.is_ok() {
                    self.handle(event)?;
                }
                self.outgoing.push(Outgoing::Answer(answer, possible));
            }
            Input::Watch { after, answer } => {
                // What was noted before is seen by it as past, and not once more as news.
                self.commit()?;
                self.publish();
                // The asker may have hung up.
                let _ = answer.send(self.watch(after));
            }
            Input::Quit => return Ok(false),
        }
        Ok(true)
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        debug!(?event, "event");
        if let Event::Detached { attachment, .. } = &event {
            self.outboxes.remove(attachment);
        }
        let mut next = Some(event);
        while let Some(event) = next.take() {
            for action in self.engine.handle(self.clock.now(), event) {
                debug!(?action, "action");
                next = self.perform(action)?;
                if next.is_some() {
                    break;
                }
            }
        }
        self.unseen_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Does it, or notes it to be done once the journal is committed. With an event to answer, the actions that were
    /// to follow must not be done.
    fn perform(&mut self, action: Action) -> Result<Option<Event>> {
        match action {
            Action::Persist(record) => {
                if matches!(record, Record::Saved(_)) {
                    self.saved = Some(Instant::now());
                }
                self.journal.append(&record)?;
                if let Some(traces) = &mut self.traces {
                    traces.record(self.clock.now(), &record);
                }
            }
            Action::Fence(generation) => {
                self.commit()?;
                match self.store.claim(generation, &self.incarnation) {
                    Ok(()) => {}
                    Err(error @ baton_checkpoint::Error::TakenOver { .. }) => {
                        return Ok(Some(Event::TakenOver { message: error.to_string() }));
                    }
                    Err(error) => {
                        return Err(error).context("the checkpoint store cannot be fenced");
                    }
                }
            }
            Action::Send { attachment, directive, .. } => {
                self.outgoing.push(Outgoing::Directive(attachment, directive));
            }
            Action::Refuse { node, attachment, reason } => {
                warn!(%node, reason, "agent refused");
                self.outgoing.push(Outgoing::Refusal(attachment, reason));
            }
            Action::Measured(measured) => {
                self.metrics.add(unix_millis(), self.engine.generation(), measured);
            }
            Action::Write(written) => {
                // For people alone: training must not end for want of a file.
                if let Err(error) = diagnosis::write(&self.run_dir, &written) {
                    warn!("{error:#}");
                }
            }
            Action::Announce(notice) => {
                info!(kind = ?notice.kind, generation = %notice.generation, "{}", notice.message);
                let event = self.journal.log(unix_millis(), notice)?;
                if let Some(traces) = &mut self.traces {
                    traces.event(&event);
                }
                self.news.push(event);
            }
        }
        Ok(None)
    }

    /// Makes durable what was noted, then tells others what follows from it.
    fn commit(&mut self) -> Result<()> {
        self.journal.commit()?;
        for outgoing in self.outgoing.drain(..) {
            match outgoing {
                Outgoing::Directive(attachment, directive) => {
                    // A stream that just closed reports itself as detached.
                    if let Some(outbox) = self.outboxes.get(&attachment) {
                        let _ = outbox.send(Ok(directive));
                    }
                }
                Outgoing::Refusal(attachment, reason) => {
                    if let Some(outbox) = self.outboxes.remove(&attachment) {
                        let _ = outbox.send(Err(reason));
                    }
                }
                // The asker may have hung up.
                Outgoing::Answer(asker, answer) => drop(asker.send(answer)),
            }
        }
        Ok(())
    }

    fn watch(&self, after: u64) -> Result<Watch, WatchError> {
        let newest = self.journal.last_event();
        if after > newest {
            return Err(WatchError::OutOfRange { newest });
        }
        // Subscribed in the loop that writes the log: nothing falls between.
        let coming = self.events.subscribe();
        let past = self.journal.events_after(after);
        let past = past.map_err(|error| WatchError::Unreadable(format!("{error:#}")))?;
        Ok(Watch { past, coming })
    }

    /// Lets readers see the newest state: at once if something happened, else after a moment.
    fn publish(&mut self) {
        let reason = self.engine.status_reason();
        let is_news = !self.news.is_empty() || reason != self.last_reason;
        let is_old = self.unseen_since.is_some_and(|since| since.elapsed() >= FRESH);
        let attached = self.outboxes.len();
        if !is_news && !is_old && self.snapshots.borrow().attached == attached {
            return;
        }
        let status = self.engine.status();
        if reason != self.last_reason {
            info!(phase = ?status.phase, "{reason}");
            self.last_reason = reason;
        }
        self.snapshots.send_replace(Arc::new(Snapshot {
            status,
            now: self.clock.now(),
            taken: Instant::now(),
            saved: self.saved,
            attached,
        }));
        self.unseen_since = None;
        self.tell_news();
    }

    /// After the status, so that whoever hears of an event finds it there.
    fn tell_news(&mut self) {
        for event in self.news.drain(..) {
            // No watcher is no error.
            let _ = self.events.send(event);
        }
    }
}
