//! The loop that owns the job's state machine: it takes inputs from one queue, performs the actions, and publishes a
//! snapshot for readers.
//!
//! It has its own thread, because the journal blocks on a disk, and gRPC must never block. The store is claimed on another
//! one: a bucket may take minutes to answer. All inputs that wait in the queue are taken in one round: the state machine
//! handles them, then the journal is committed once, and only then directives are sent; answers follow the snapshot.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use baton_checkpoint::{Claimant, ResumePoint, Store};
use baton_job::{
    Generation, Time,
    engine::{Action, AgentRetry, Engine, Event, Record, Status},
    exit::Failure,
    ids::Attachment,
    message::{Directive, Hello, Restore},
};
use tokio::sync::{broadcast, oneshot, watch};
use tracing::{debug, info, warn};

use crate::{
    claim::{claim, replaced},
    clock::{Clock, unix_millis},
    diagnosis,
    journal::{Journal, LoggedEvent},
    journal_copy::JournalCopy,
    lease::HeldLease,
    mesh_secret::CurrentMeshSecret,
    metrics::JobMetrics,
    traces::Traces,
};

/// An input of the loop.
pub(crate) enum JobInput {
    /// An event for the state machine.
    Event(Box<Event>),
    /// An agent's stream opened with this hello; its directives go to `outbox`. `accepted` is answered before the first
    /// directive, or dropped if the loop ends: an agent that was welcomed waits for a restart of its coordinator, so a
    /// coordinator that has done its last round must welcome nobody.
    Attached {
        attachment: Attachment,
        hello: Box<Hello>,
        outbox: Outbox,
        accepted: oneshot::Sender<()>,
    },
    /// A user's request; `answer` gets the result after the journal is committed and the status is published, so that a
    /// crash undoes nothing that was answered, and the caller reads its effect.
    Request { request: UserRequest, answer: Answer },
    /// A user asks for a profile; `answer` gets the receiver of its result, or why none can be recorded.
    Profile {
        name: String,
        steps: u32,
        answer: oneshot::Sender<Result<oneshot::Receiver<ProfileResult>, String>>,
    },
    /// A watcher asks for the events after an id, and for all that follow.
    Watch { after: u64, answer: oneshot::Sender<Result<EventSubscription, WatchError>> },
    /// Another coordinator has taken over this job, and its agents find that one.
    Replaced(Failure),
    /// The process was asked to quit. Training continues without it.
    Quit,
}

impl From<Event> for JobInput {
    fn from(event: Event) -> Self {
        Self::Event(Box::new(event))
    }
}

/// For the answer to a user: why the request is not possible, if it is not.
pub(crate) type Answer = oneshot::Sender<Result<(), String>>;

/// Number of ranks that have written a profile, or why there is none.
type ProfileResult = Result<u32, String>;

/// What a user asks of the job; drain and stop are always possible.
#[derive(Clone, Debug)]
pub(crate) enum UserRequest {
    Drain { reason: String },
    Stop,
    Checkpoint,
    Pause { reason: String },
    Resume,
}

/// Directives to one agent; an error closes its stream.
pub(crate) type Outbox = tokio::sync::mpsc::UnboundedSender<Result<Directive, AgentRefusal>>;

/// Why an agent is refused.
#[derive(Debug)]
pub(crate) struct AgentRefusal {
    /// One line: what, and what to do.
    pub(crate) reason: String,
    /// Whether the agent may attach again.
    pub(crate) retry: AgentRetry,
}

/// Past events, and the feed of the following ones, without a gap between them.
pub(crate) struct EventSubscription {
    pub(crate) past: Vec<LoggedEvent>,
    pub(crate) live: broadcast::Receiver<LoggedEvent>,
}

/// Why events cannot be watched.
#[derive(Debug)]
pub(crate) enum WatchError {
    /// The requested id is larger than `newest`, the id of the newest event.
    OutOfRange { newest: u64 },
    /// The journal cannot be read.
    Unreadable(String),
}

/// The newest published state of the state machine, for readers.
#[derive(Clone, Debug)]
pub(crate) struct StatusSnapshot {
    pub(crate) status: Status,
    pub(crate) now: Time,
    pub(crate) taken: Instant,
    /// When the last checkpoint was committed, since this coordinator started.
    pub(crate) saved: Option<Instant>,
    /// Agents with an open stream.
    pub(crate) attached: usize,
}

/// Sends inputs to the loop and reads its snapshots; cheap to clone.
#[derive(Clone)]
pub(crate) struct JobHandle {
    inputs: mpsc::Sender<JobInput>,
    snapshots: watch::Receiver<Arc<StatusSnapshot>>,
}

impl JobHandle {
    /// Queues an input; false once the loop has ended.
    pub(crate) fn send(&self, input: JobInput) -> bool {
        self.inputs.send(input).is_ok()
    }

    /// The newest snapshot.
    pub(crate) fn snapshot(&self) -> Arc<StatusSnapshot> {
        self.snapshots.borrow().clone()
    }

    /// A receiver that wakes on every new snapshot.
    pub(crate) fn snapshots(&self) -> watch::Receiver<Arc<StatusSnapshot>> {
        self.snapshots.clone()
    }
}

/// The job loop; [`run`](Self::run) runs it on the calling thread.
pub(crate) struct JobLoop {
    engine: Engine,
    journal: Journal,
    /// If the store is not in the run folder.
    apart: Option<Apart>,
    store: Arc<Store>,
    run_dir: PathBuf,
    clock: Clock,
    metrics: Arc<JobMetrics>,
    traces: Option<Traces>,
    inputs: mpsc::Receiver<JobInput>,
    /// For the answers of the store.
    own_inputs: mpsc::Sender<JobInput>,
    outboxes: HashMap<Attachment, Outbox>,
    snapshots: watch::Sender<Arc<StatusSnapshot>>,
    events: broadcast::Sender<LoggedEvent>,
    saved: Option<Instant>,
    last_reason: String,
    /// Written with the fence of the generations that this loop opens.
    claimant: Claimant,
    /// Set once another coordinator serves the job.
    replaced: Option<Failure>,
    mesh_secret: CurrentMeshSecret,
    /// Messages to agents, to send once the journal is committed.
    outgoing: Vec<OutgoingMessage>,
    /// Answers to users, to send once the status is published too: whose pause is answered finds it in the status.
    answers: Vec<(Answer, Result<(), String>)>,
    /// Who waits for the profile that is being recorded.
    profile: Option<oneshot::Sender<ProfileResult>>,
    /// Job events of this round, not sent to watchers yet.
    new_events: Vec<LoggedEvent>,
    /// When the state first changed after the last published snapshot.
    unpublished_since: Option<Instant>,
}

/// What a store has that survives the run folder.
pub(crate) struct Apart {
    /// The journal's copy.
    pub(crate) copy: JournalCopy,
    pub(crate) lease: HeldLease,
    /// Whether this coordinator has taken over from a lost one. It ends with its node; then another one should take over
    /// at once.
    pub(crate) is_standby: bool,
}

/// A message to an agent.
enum OutgoingMessage {
    Accepted(oneshot::Sender<()>),
    Directive(Attachment, Directive),
    Refusal(Attachment, AgentRefusal),
}

/// Events that a slow watcher may fall behind before it has to watch again.
const WATCH_BUFFER: usize = 1024;
/// Most inputs in one round; they arrive while the loop waits for the disk.
const MAX_INPUTS_PER_ROUND: usize = 4_096;
/// Longest delay until readers see a change, if there are only heartbeats. With ten thousand ranks, taking a snapshot
/// needs milliseconds, and there are ten thousand heartbeats per second.
const MAX_SNAPSHOT_AGE: Duration = Duration::from_millis(100);

/// Longest wait for the copy of the journal before a generation opens.
const COPY_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for the copy of the journal when the process ends.
const LAST_COPY_TIMEOUT: Duration = Duration::from_secs(5);

impl JobLoop {
    /// The loop of `engine`, with the time of `clock`; diagnoses are written to `run_dir`.
    pub(crate) fn new(
        engine: Engine,
        (journal, apart): (Journal, Option<Apart>),
        (store, claimant): (Store, Claimant),
        run_dir: PathBuf,
        clock: Clock,
        metrics: Arc<JobMetrics>,
        traces: Option<Traces>,
    ) -> (Self, JobHandle) {
        let (sender, inputs) = mpsc::channel();
        let snapshot = StatusSnapshot {
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
            apart,
            store: Arc::new(store),
            run_dir,
            clock,
            metrics,
            traces,
            inputs,
            own_inputs: sender.clone(),
            outboxes: HashMap::new(),
            snapshots,
            events,
            saved: None,
            last_reason: String::new(),
            claimant,
            replaced: None,
            mesh_secret: CurrentMeshSecret::default(),
            outgoing: Vec::new(),
            answers: Vec::new(),
            profile: None,
            new_events: Vec::new(),
            unpublished_since: None,
        };
        (this, JobHandle { inputs: sender, snapshots: receiver })
    }

    /// Runs until [`JobInput::Quit`]. Returns a failure if another coordinator has taken over the job.
    ///
    /// # Errors
    /// The journal failed.
    pub(crate) fn run(mut self) -> Result<Option<Failure>> {
        let renewal = self.apart.as_ref().map(|apart| {
            let (inputs, job) = (self.own_inputs.clone(), self.claimant.job);
            // The loop may have ended.
            apart.lease.keep(move |error| drop(inputs.send(replaced(&error, job))))
        });
        let renewal = renewal.transpose().context("cannot start a thread")?;
        // A new engine persists its origin before anything else.
        let mut next = Some(JobInput::from(Event::Tick));
        while self.round(next.take())? {
            next = self.next();
        }
        drop(renewal);
        if let Some(Apart { copy, lease, is_standby, .. }) = &self.apart
            && self.replaced.is_none()
        {
            if !copy.flush(LAST_COPY_TIMEOUT) {
                warn!("the newest entries of the journal are only in the run folder");
            }
            let job_is_over = self.engine.outcome().is_some();
            if *is_standby || job_is_over {
                lease.end(job_is_over);
            }
        }
        Ok(self.replaced)
    }

    /// The next input, or `None` when a deadline has passed.
    fn next(&self) -> Option<JobInput> {
        let deadline = self.engine.deadline().map(|at| at.since(self.clock.now()));
        let snapshot_due =
            self.unpublished_since.map(|since| MAX_SNAPSHOT_AGE.saturating_sub(since.elapsed()));
        // The queue stays open, as this loop can send to it.
        match deadline.into_iter().chain(snapshot_due).min() {
            Some(wait) => self.inputs.recv_timeout(wait).ok(),
            None => self.inputs.recv().ok(),
        }
    }

    /// Handles the first input and all that wait behind it; false after [`JobInput::Quit`].
    fn round(&mut self, first: Option<JobInput>) -> Result<bool> {
        let problems = self.apart.as_ref().map(|apart| apart.copy.take_problems());
        for problem in problems.into_iter().flatten() {
            self.handle_event(Event::JournalCopyFailed { problem })?;
        }
        let mut continues = match first {
            Some(input) => self.handle_input(input)?,
            None => {
                if self.engine.deadline().is_some_and(|at| at <= self.clock.now()) {
                    self.handle_event(Event::Tick)?;
                }
                true
            }
        };
        for _ in 1..MAX_INPUTS_PER_ROUND {
            let Ok(input) = self.inputs.try_recv() else { break };
            continues = continues && self.handle_input(input)?;
        }
        self.commit()?;
        self.publish();
        Ok(continues)
    }

    fn handle_input(&mut self, input: JobInput) -> Result<bool> {
        match input {
            JobInput::Event(event) => self.handle_event(*event)?,
            JobInput::Attached { attachment, hello, outbox, accepted } => {
                self.outboxes.insert(attachment, outbox);
                self.outgoing.push(OutgoingMessage::Accepted(accepted));
                self.handle_event(Event::Attached { attachment, hello: *hello })?;
            }
            JobInput::Request { request, answer } => {
                let (possible, event) = match request {
                    UserRequest::Drain { reason } => (Ok(()), Event::Drain { reason }),
                    UserRequest::Stop => (Ok(()), Event::Stop),
                    UserRequest::Checkpoint => (self.engine.can_checkpoint(), Event::Checkpoint),
                    UserRequest::Pause { reason } => {
                        (self.engine.can_pause(), Event::Pause { reason })
                    }
                    UserRequest::Resume => (self.engine.can_resume(), Event::Resume),
                };
                if possible.is_ok() {
                    self.handle_event(event)?;
                }
                self.answers.push((answer, possible));
            }
            JobInput::Profile { name, steps, answer } => {
                let possible = self.engine.can_profile(steps);
                let begun = possible.map(|()| {
                    let (done, recorded) = oneshot::channel();
                    self.profile = Some(done);
                    recorded
                });
                if begun.is_ok() {
                    self.handle_event(Event::Profile { name, steps })?;
                }
                // The caller may have disconnected.
                drop(answer.send(begun));
            }
            JobInput::Watch { after, answer } => {
                // The watcher gets the events so far as past events; publish them, so that they are not sent twice.
                self.commit()?;
                self.publish();
                // The caller may have disconnected.
                let _ = answer.send(self.watch(after));
            }
            JobInput::Replaced(failure) => {
                self.replaced = Some(failure);
                return Ok(false);
            }
            JobInput::Quit => return Ok(false),
        }
        Ok(true)
    }

    fn handle_event(&mut self, event: Event) -> Result<()> {
        debug!(?event, "event");
        if let Event::Detached { attachment, .. } = &event {
            self.outboxes.remove(attachment);
        }
        for action in self.engine.handle(self.clock.now(), event) {
            debug!(?action, "action");
            self.perform(action)?;
        }
        self.unpublished_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Performs an action, or queues it until the journal is committed.
    fn perform(&mut self, action: Action) -> Result<()> {
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
                self.claim(generation)?;
            }
            Action::FindCheckpoint(restore) => self.find_checkpoint(*restore)?,
            Action::Send { attachment, mut directive, .. } => {
                if let Directive::Begin { generation, secret, .. } = &mut directive {
                    *secret = self.mesh_secret.of(*generation)?;
                }
                self.outgoing.push(OutgoingMessage::Directive(attachment, directive));
            }
            Action::Refuse { node, attachment, reason, retry } => {
                warn!(%node, reason, ?retry, "agent refused");
                let refusal = AgentRefusal { reason, retry };
                self.outgoing.push(OutgoingMessage::Refusal(attachment, refusal));
            }
            Action::AddPoint(measured) => {
                let (job, generation) = (self.engine.origin().job, self.engine.generation());
                self.metrics.add(unix_millis(), job, generation, measured);
            }
            Action::WriteDiagnosis(written) => {
                // Best effort: training must not end because a file for people cannot be written.
                if let Err(error) = diagnosis::write(&self.run_dir, &written) {
                    warn!("{error:#}");
                }
            }
            Action::ProfileEnded(result) => {
                if let Some(user) = self.profile.take() {
                    // The user may have disconnected.
                    drop(user.send(result));
                }
            }
            Action::Publish(event) => {
                info!(kind = ?event.kind, generation = %event.generation, "{}", event.message);
                let event = self.journal.log(unix_millis(), event)?;
                if let Some(traces) = &mut self.traces {
                    traces.event(&event);
                }
                self.new_events.push(event);
            }
        }
        Ok(())
    }

    /// Claims a generation on a thread of its own; the answer becomes an input.
    fn claim(&self, generation: Generation) -> Result<()> {
        let (store, claimant) = (self.store.clone(), self.claimant.clone());
        let inputs = self.own_inputs.clone();
        let apart = self.apart.as_ref().map(|apart| (apart.copy.clone(), apart.lease.clone()));
        let claims = move || {
            let answer =
                claim(&store, generation, &claimant, apart.as_ref().map(|(_, lease)| lease));
            let is_open = matches!(&answer, JobInput::Event(event) if **event == Event::Fenced);
            if let Some((copy, _)) = apart.filter(|_| is_open) {
                // Who takes over should know every generation that ranks have seen, and the rollbacks before it.
                copy.flush(COPY_TIMEOUT);
            }
            // The loop may have ended.
            let _ = inputs.send(answer);
        };
        in_background("fence", claims)
    }

    /// Looks for a checkpoint on a thread of its own; the answer becomes an input.
    fn find_checkpoint(&self, restore: Restore) -> Result<()> {
        let (store, job) = (self.store.clone(), self.claimant.job);
        let inputs = self.own_inputs.clone();
        let finds = move || {
            let found = store.find(&restore, &mut |_, _| Ok(())).unwrap_or_else(|error| {
                warn!(%error, "the last checkpoint cannot be read");
                None
            });
            let ours = found.map(|ResumePoint { manifest, .. }| manifest);
            let ours = ours.filter(|manifest| manifest.job == job);
            let ours = ours.map(|manifest| Box::new((manifest.to_commit(), manifest.progress)));
            // The loop may have ended.
            let _ = inputs.send(Event::CheckpointFound(ours).into());
        };
        in_background("last-checkpoint", finds)
    }

    /// Commits the journal, then sends the messages that depend on it.
    fn commit(&mut self) -> Result<()> {
        let committed = self.journal.commit()?;
        if let Some(apart) = &self.apart {
            apart.copy.add(committed);
        }
        for outgoing in self.outgoing.drain(..) {
            match outgoing {
                // The agent may have disconnected.
                OutgoingMessage::Accepted(agent) => drop(agent.send(())),
                OutgoingMessage::Directive(attachment, directive) => {
                    // A stream that just closed reports itself as detached.
                    if let Some(outbox) = self.outboxes.get(&attachment) {
                        let _ = outbox.send(Ok(directive));
                    }
                }
                OutgoingMessage::Refusal(attachment, refusal) => {
                    if let Some(outbox) = self.outboxes.remove(&attachment) {
                        let _ = outbox.send(Err(refusal));
                    }
                }
            }
        }
        Ok(())
    }

    fn watch(&self, after: u64) -> Result<EventSubscription, WatchError> {
        let newest = self.journal.last_event();
        if after > newest {
            return Err(WatchError::OutOfRange { newest });
        }
        // Subscribing in the loop that writes the log leaves no gap.
        let live = self.events.subscribe();
        let past = self.journal.events_after(after);
        let past = past.map_err(|error| WatchError::Unreadable(format!("{error:#}")))?;
        Ok(EventSubscription { past, live })
    }

    /// Publishes the newest state, then answers the users' requests.
    fn publish(&mut self) {
        self.publish_status();
        for (caller, answer) in self.answers.drain(..) {
            // The caller may have disconnected.
            drop(caller.send(answer));
        }
    }

    /// Publishes the newest state: at once after a request, a job event or a change of the reason, else after
    /// [`MAX_SNAPSHOT_AGE`].
    fn publish_status(&mut self) {
        let reason = self.engine.status_reason();
        let has_changed =
            !self.new_events.is_empty() || !self.answers.is_empty() || reason != self.last_reason;
        let is_old =
            self.unpublished_since.is_some_and(|since| since.elapsed() >= MAX_SNAPSHOT_AGE);
        let attached = self.outboxes.len();
        if let Some(apart) = self.apart.as_ref().filter(|_| self.engine.can_be_replaced()) {
            apart.lease.start_renewals();
        }
        if !has_changed && !is_old && self.snapshots.borrow().attached == attached {
            return;
        }
        let status = self.engine.status();
        if reason != self.last_reason {
            info!(phase = ?status.phase, "{reason}");
            self.last_reason = reason;
        }
        self.snapshots.send_replace(Arc::new(StatusSnapshot {
            status,
            now: self.clock.now(),
            taken: Instant::now(),
            saved: self.saved,
            attached,
        }));
        self.unpublished_since = None;
        self.send_new_events();
    }

    /// Sends new events to watchers. Called after the status is published, so that a watcher of an event finds its
    /// effect in the status.
    fn send_new_events(&mut self) {
        for event in self.new_events.drain(..) {
            // It is not an error if there is no watcher.
            let _ = self.events.send(event);
        }
    }
}

/// Does what waits for the store on a thread of its own.
fn in_background(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map(drop).context("cannot start a thread")
}

#[cfg(test)]
mod tests {
    use baton_job::engine::JobOrigin;
    use baton_recipe::JobSpec;

    use super::*;
    use crate::journal_copy::kit;

    #[test]
    fn a_request_is_answered_once_its_effect_is_in_the_status() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = std::fs::read_to_string("../recipes/digits_cpu.toml").unwrap();
        let origin = JobOrigin {
            job: kit::JOB,
            recipe: None,
            first_generation: Generation(1),
            restore: Restore::default(),
        };
        let clock = Clock::start();
        let spec = JobSpec::from_toml(&recipe, &[]).unwrap();
        let engine = Engine::new(&spec, origin, clock.now());
        let (journal, _) = Journal::open(&folder.path().join("journal.redb")).unwrap();
        let claim = (kit::folder_store(&folder), kit::claimant());
        let metrics = Arc::new(JobMetrics::open(folder.path()).unwrap());
        let run_dir = folder.path().to_owned();
        let (mut job_loop, job) =
            JobLoop::new(engine, (journal, None), claim, run_dir, clock, metrics, None);
        let (answer, mut answered) = oneshot::channel();
        let request = UserRequest::Pause { reason: "lunch".to_owned() };

        job_loop.handle_input(JobInput::Request { request, answer }).unwrap();
        job_loop.commit().unwrap();
        assert_eq!(job.snapshot().status.pause, None);
        assert!(answered.try_recv().is_err(), "answered before the status is published");
        job_loop.publish();
        assert_eq!(job.snapshot().status.pause.as_ref().unwrap().reason, "lunch");
        assert_eq!(answered.try_recv().unwrap(), Ok(()));
    }
}
