//! A copy of the journal in the checkpoint store: when the run folder is lost, a coordinator elsewhere continues the job
//! with its budget, history and events.
//!
//! The file in the run folder comes first. Only a new generation waits for the copy, for two seconds at most, and nothing
//! that happens to the copy ends the job. A coordinator writes it while it has the lease, which it takes with its first
//! generation, so one that merely starts changes nothing. A store that is out of reach gets the entries later, and a copy
//! that is damaged or has entries of another coordinator is made anew.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use baton_checkpoint::{Claimant, EntryState, Error, JournalPart, Store};
use baton_job::{
    Generation, JobId,
    engine::{JobEventKind, RanksOfLostJob, Record},
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    journal::{EntryKind, JournalEntry, LoggedEvent},
    lease::HeldLease,
};

/// The format that this build writes, and the newest that it reads.
const FORMAT: u64 = 1;
/// Number of parts that are joined to one, and of such parts to a larger one.
const JOINED: u64 = 100;
/// Attempts to read all parts while another coordinator joins some.
const READ_ATTEMPTS: u32 = 3;
/// Pauses between attempts while the store is out of reach.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Content of a part: JSON, and its BLAKE3 digest in the line below.
#[derive(Debug, Serialize, Deserialize)]
struct PartContent {
    format: u64,
    /// Makes every part another one: of two coordinators that add the same entries, one is refused.
    id: Uuid,
    /// The end of the journal after this part.
    end: JournalEnd,
    entries: Vec<JournalEntry>,
}

impl PartContent {
    fn new(end: JournalEnd, entries: Vec<JournalEntry>) -> Self {
        Self { format: FORMAT, id: Uuid::new_v4(), end, entries }
    }

    fn has_more_than(&self, here: &[JournalEntry]) -> bool {
        let here: HashSet<&JournalEntry> = here.iter().collect();
        !self.entries.iter().all(|entry| here.contains(entry))
    }
}

/// Keys of the next entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JournalEnd {
    record: u64,
    event: u64,
}

impl JournalEnd {
    pub(crate) const EMPTY: Self = Self { record: 0, event: 1 };

    /// The end of a journal with these entries.
    pub(crate) fn of(entries: &[JournalEntry]) -> Self {
        entries.iter().fold(Self::EMPTY, Self::after)
    }

    fn after(self, entry: &JournalEntry) -> Self {
        match entry.kind {
            EntryKind::Record => Self { record: entry.key + 1, ..self },
            EntryKind::Event => Self { event: entry.key + 1, ..self },
        }
    }

    /// Key of the next entry of this kind.
    fn next(self, kind: EntryKind) -> u64 {
        match kind {
            EntryKind::Record => self.record,
            EntryKind::Event => self.event,
        }
    }
}

/// Whether the copy has entries that the journal `here` lacks: another coordinator has continued the job.
pub(crate) fn is_continued(
    store: &Store,
    job: JobId,
    here: &[JournalEntry],
) -> Result<bool, Error> {
    let parts = store.journal_parts(job)?;
    let newest = newest(store, job, &parts)?;
    Ok(newest.is_some_and(|content| content.has_more_than(here)))
}

/// The content of the newest part that has one.
fn newest(store: &Store, job: JobId, parts: &[JournalPart]) -> Result<Option<PartContent>, Error> {
    let mut contents = parts.iter().rev().map(|part| read_part(store, job, *part));
    contents.find_map(Result::transpose).transpose()
}

fn next_number(parts: &[JournalPart]) -> u64 {
    parts.last().map_or(1, |part| part.last + 1)
}

/// All entries of the parts.
fn read(store: &Store, job: JobId, parts: &[JournalPart]) -> Result<Vec<JournalEntry>, Error> {
    let (mut all, mut end) = (Vec::new(), JournalEnd::EMPTY);
    for part in parts {
        let content = read_part(store, job, *part)?;
        for entry in content.into_iter().flat_map(|content| content.entries) {
            // Two coordinators may both have made the copy anew.
            if entry.key != end.next(entry.kind) {
                let problem = format!("part {part} does not follow the one before");
                return Err(store.damaged_journal(job, &problem));
            }
            end = end.after(&entry);
            all.push(entry);
        }
    }
    Ok(all)
}

/// Whether the copy ends with the end of the job; no if it cannot be read.
pub(crate) fn has_ended(store: &Store, job: JobId) -> bool {
    let all = store.journal_parts(job).and_then(|parts| read(store, job, &parts));
    let records = all.ok().and_then(|all| records(&all).ok()).unwrap_or_default();
    Record::outcome(&records).is_some()
}

/// The journal of the job that used the store last: all its entries, with those added that continue it. Empty if there is no
/// job that can continue, except that `known`, which a run folder has had before, is returned also if it is over. A job whose
/// `--resume` was refused does not count.
///
/// # Errors
/// [`Error::DamagedJournal`], also if the job has saved checkpoints and there is no journal, and for a job with a budget if
/// the copy lacks much; the store cannot be read.
pub(crate) fn of_last_job(
    store: &Store,
    ranks: RanksOfLostJob,
    has_budget: bool,
    known: Option<JobId>,
) -> Result<Vec<JournalEntry>, Error> {
    let fence = store.fence()?;
    let Some(job) = last_job(store)? else { return Ok(Vec::new()) };
    let (mut all, records) = read_again(store, job)?;
    let damaged = |error: serde_json::Error| store.damaged_journal(job, &error.to_string());
    if records.is_empty() {
        // The journal is copied at the first generation, long before the first save.
        return match job_of_newest_checkpoint(store)? == Some(job) {
            true => Err(store.damaged_journal(
                job,
                "it is not there; a job whose checkpoints are in its run folder has it in that folder",
            )),
            false => Ok(all),
        };
    }
    // Ranks that may run have saved since their coordinator was lost, which is not metered.
    if has_budget && ranks == RanksOfLostJob::Lost {
        refuse_stale(store, job, &records, &all)?;
    }
    let Some(added) = Record::after_loss(&records, fence, ranks) else {
        return Ok(if known == Some(job) { all } else { Vec::new() });
    };
    for (key, record) in (records.len() as u64..).zip(added) {
        let json = serde_json::to_string(&record).map_err(damaged)?;
        all.push(JournalEntry { kind: EntryKind::Record, key, json });
    }
    Ok(all)
}

/// All entries of a job's journal, and its records.
fn read_again(store: &Store, job: JobId) -> Result<(Vec<JournalEntry>, Vec<Record>), Error> {
    let mut attempt = 1;
    let all = loop {
        match store.journal_parts(job).and_then(|parts| read(store, job, &parts)) {
            // Another coordinator may just have joined the parts that are being read.
            Err(Error::DamagedJournal { .. }) if attempt < READ_ATTEMPTS => attempt += 1,
            found => break found?,
        }
    };
    let records = records(&all).map_err(|error| store.damaged_journal(job, &error.to_string()))?;
    Ok((all, records))
}

/// Who used the store last, if that is known. A job whose `--resume` was refused does not count.
pub(crate) fn last_claimant(store: &Store) -> Result<Option<Claimant>, Error> {
    let fence = store.fence()?;
    let Some(mut last) = store.claimant(fence)? else { return Ok(None) };
    loop {
        let has_restored_nothing = match read_again(store, last.job) {
            Ok((all, records)) => has_restored_nothing(&records, || Ok(events(&all)))?,
            // Then it counts.
            Err(Error::DamagedJournal { .. }) => false,
            Err(error) => return Err(error),
        };
        match claimant_before(store, fence, last.job)?.filter(|_| has_restored_nothing) {
            Some(before) => last = before,
            None => return Ok(Some(last)),
        }
    }
}

/// Whether the job of these records began with `--resume` and failed before any rank trained, by the events of its journal.
pub(crate) fn has_restored_nothing<E>(
    records: &[Record],
    events: impl FnOnce() -> Result<Vec<LoggedEvent>, E>,
) -> Result<bool, E> {
    let has_trained = |events: Vec<LoggedEvent>| {
        events.iter().any(|logged| logged.event.kind == JobEventKind::TrainingStarted)
    };
    Ok(Record::has_failed_from_checkpoint(records) && !has_trained(events()?))
}

/// Who used the store before this job.
fn claimant_before(
    store: &Store,
    fence: Generation,
    job: JobId,
) -> Result<Option<Claimant>, Error> {
    for generation in (1..fence.0).rev() {
        match store.claimant(Generation(generation))? {
            Some(claimant) if claimant.job == job => {}
            before => return Ok(before),
        }
    }
    Ok(None)
}

/// The events among these entries.
fn events(all: &[JournalEntry]) -> Vec<LoggedEvent> {
    let events = all.iter().filter(|entry| entry.kind == EntryKind::Event);
    events.filter_map(|entry| serde_json::from_str(&entry.json).ok()).collect()
}

/// The job that used the store last: by its fences, or, where the newest is damaged or gone, by the lease or a checkpoint.
/// An unknown job would hide what it has used of its budget.
pub(crate) fn last_job(store: &Store) -> Result<Option<JobId>, Error> {
    if let Some(claimant) = last_claimant(store)? {
        return Ok(Some(claimant.job));
    }
    match store.lease()?.map(|lease| lease.job).filter(is_known) {
        Some(job) => Ok(Some(job)),
        None => job_of_newest_checkpoint(store),
    }
}

fn job_of_newest_checkpoint(store: &Store) -> Result<Option<JobId>, Error> {
    Ok(store.newest()?.map(|newest| newest.job).filter(is_known))
}

/// Imported weights, and a lease that was never written, are of no job.
fn is_known(job: &JobId) -> bool {
    *job != JobId::default()
}

/// Refuses a copy that lacks much of the job.
fn refuse_stale(
    store: &Store,
    job: JobId,
    records: &[Record],
    all: &[JournalEntry],
) -> Result<(), Error> {
    let checkpoints = store.list()?.into_iter().filter_map(|entry| match entry.state {
        EntryState::Complete(manifest) if manifest.job == job => {
            Some((manifest.name(), manifest.created_unix_seconds))
        }
        _ => None,
    });
    let checkpoints: Vec<(String, u64)> = checkpoints.collect();
    let mut events = all.iter().rev().filter(|entry| entry.kind == EntryKind::Event);
    let last = events.find_map(|entry| serde_json::from_str(&entry.json).ok());
    let last = last.map_or(0, |LoggedEvent { unix_millis, .. }| unix_millis / 1_000);
    match Record::lag(records, last, &checkpoints) {
        Some((name, seconds)) => {
            let problem = format!("it ends {seconds} s before checkpoint {name} was saved");
            Err(store.damaged_journal(job, &problem))
        }
        None => Ok(()),
    }
}

/// The records among the entries.
fn records(entries: &[JournalEntry]) -> Result<Vec<Record>, serde_json::Error> {
    let records = entries.iter().filter(|entry| entry.kind == EntryKind::Record);
    records.map(|entry| serde_json::from_str(&entry.json)).collect()
}

/// The content of a part; `None` if it is empty: without hard links, a crash may leave a name without content.
fn read_part(store: &Store, job: JobId, part: JournalPart) -> Result<Option<PartContent>, Error> {
    let bytes = store.read_journal(job, part)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let content = decode(&bytes).map(Some);
    content.map_err(|problem| store.damaged_journal(job, &format!("part {part} {problem}")))
}

fn encode(content: &PartContent) -> Result<Vec<u8>, serde_json::Error> {
    let json = serde_json::to_string(content)?;
    let digest = blake3::hash(json.as_bytes()).to_hex();
    Ok(format!("{json}\n{digest}\n").into_bytes())
}

fn decode(bytes: &[u8]) -> Result<PartContent, String> {
    let text = str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let lines = text.strip_suffix('\n').and_then(|text| text.rsplit_once('\n'));
    let (json, digest) = lines.ok_or("is cut short")?;
    if blake3::hash(json.as_bytes()).to_hex().as_str() != digest {
        return Err("does not match its digest".to_owned());
    }
    let content: PartContent = serde_json::from_str(json).map_err(|error| error.to_string())?;
    match content.format {
        ..=FORMAT => Ok(content),
        newer => {
            Err(format!("was written by a newer Baton (format {newer}, this one reads {FORMAT})"))
        }
    }
}

/// Sends entries to the thread that copies them.
#[derive(Clone)]
pub(crate) struct JournalCopy {
    tasks: Sender<CopyTask>,
    problems: Arc<Mutex<Vec<String>>>,
}

enum CopyTask {
    Add(Vec<JournalEntry>),
    /// Copy everything so far, and answer.
    Flush(Sender<bool>),
}

impl JournalCopy {
    /// Copies what the store lacks of `committed`, and all that is added later, while this coordinator has the lease.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn start(
        store: Store,
        (job, lease): (JobId, HeldLease),
        committed: Vec<JournalEntry>,
    ) -> std::io::Result<Self> {
        let (tasks, receiver) = mpsc::channel();
        let problems = Arc::new(Mutex::new(Vec::new()));
        let copier = Copier {
            store,
            job,
            lease,
            problems: Arc::clone(&problems),
            lease_number: 0,
            next: None,
            waiting: committed.clone(),
            all: committed,
            unanswered: None,
        };
        thread::Builder::new()
            .name("journal-copy".to_owned())
            .spawn(move || copier.run(&receiver))?;
        Ok(Self { tasks, problems })
    }

    /// Problems since the last call, for people.
    pub(crate) fn take_problems(&self) -> Vec<String> {
        std::mem::take(&mut *self.problems.lock())
    }

    /// Adds committed entries.
    pub(crate) fn add(&self, committed: Vec<JournalEntry>) {
        if !committed.is_empty() {
            // An error means that the thread has panicked, which must not end the job.
            let _ = self.tasks.send(CopyTask::Add(committed));
        }
    }

    /// Waits until everything is copied, at most for `timeout`, before this process ends. Returns false if the copy lacks
    /// something.
    pub(crate) fn flush(&self, timeout: Duration) -> bool {
        let (answer, answered) = mpsc::channel();
        let _ = self.tasks.send(CopyTask::Flush(answer));
        matches!(answered.recv_timeout(timeout), Ok(true))
    }
}

/// The thread's state.
struct Copier {
    store: Store,
    job: JobId,
    lease: HeldLease,
    problems: Arc<Mutex<Vec<String>>>,
    /// Number of the lease under which this one writes; 0 before it has one.
    lease_number: u64,
    /// Number of the next part, and the end of those in the store; `None` before the store has been read.
    next: Option<(u64, JournalEnd)>,
    /// The whole journal; about 1,500 entries a day.
    all: Vec<JournalEntry>,
    /// Entries that are in no part yet.
    waiting: Vec<JournalEntry>,
    /// A part that may be in the store: the answer may have been lost, so its bytes must stay the same.
    unanswered: Option<(Vec<u8>, JournalEnd)>,
}

impl Copier {
    fn run(mut self, tasks: &Receiver<CopyTask>) {
        let mut retry: Option<Instant> = None;
        let mut reported: Option<Instant> = None;
        let mut pause = FIRST_PAUSE;
        let mut has_stopped = false;
        loop {
            let received = match retry {
                Some(at) => tasks.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => tasks.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let flush = match received {
                Ok(CopyTask::Add(entries)) => {
                    self.all.extend(entries.iter().cloned());
                    if !has_stopped {
                        self.waiting.extend(entries);
                    }
                    if retry.is_some() {
                        continue;
                    }
                    None
                }
                Ok(CopyTask::Flush(answer)) => Some(answer),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let copied = match has_stopped || self.lease.is_free() {
                true => Ok(!has_stopped),
                false => self.copy().map(|()| true),
            };
            match &copied {
                Ok(_) => {
                    if retry.take().is_some() {
                        tracing::info!("the journal is copied into the checkpoint store again");
                    }
                    pause = FIRST_PAUSE;
                }
                Err(Error::Replaced { .. }) => {
                    // The renewals of the lease end the job.
                    (has_stopped, retry) = (true, None);
                    self.waiting.clear();
                }
                Err(error) => {
                    // A store that fails and recovers all the time is one problem.
                    if retry.is_none() && reported.is_none_or(|at| at.elapsed() > LONGEST_PAUSE) {
                        reported = Some(Instant::now());
                        self.problems.lock().push(format!(
                            "the journal cannot be copied into the checkpoint store, and is tried again until it can: {error}"
                        ));
                    }
                    retry = Some(Instant::now() + pause);
                    pause = LONGEST_PAUSE.min(pause * 2);
                }
            }
            if let Some(answer) = flush {
                let _ = answer.send(copied.unwrap_or(false));
            }
        }
    }

    /// Adds all waiting entries to the copy, of which another coordinator may have been the last writer.
    fn copy(&mut self) -> Result<(), Error> {
        if self.waiting.is_empty() && self.unanswered.is_none() && self.next.is_some() {
            return Ok(());
        }
        if !self.lease.secure()? {
            // Another folder may be in place of the store, whose disk may not be mounted.
            return Err(self.store.damaged_journal(self.job, "the coordinator's lease is gone"));
        }
        let number = self.lease.number().unwrap_or_default();
        if std::mem::replace(&mut self.lease_number, number) != number {
            (self.next, self.unanswered) = (None, None);
            self.waiting.clone_from(&self.all);
        }
        match self.add_waiting() {
            Err(error @ (Error::JournalContinued { .. } | Error::DamagedJournal { .. })) => {
                tracing::warn!("{error}; the journal is copied anew");
                self.copy_anew()
            }
            added => added,
        }
    }

    fn add_waiting(&mut self) -> Result<(), Error> {
        let (mut number, mut end) = match self.next {
            Some(next) => next,
            None => match self.find_end()? {
                Some(next) => next,
                None => return self.copy_anew(),
            },
        };
        loop {
            let (bytes, end_after) = match self.unanswered.take() {
                Some(unanswered) => unanswered,
                None if self.waiting.is_empty() => return Ok(()),
                None => {
                    let entries = std::mem::take(&mut self.waiting);
                    let end = entries.iter().fold(end, JournalEnd::after);
                    (self.encoded(&PartContent::new(end, entries))?, end)
                }
            };
            let part = self.part(number, number);
            let added = self
                .check_before(number)
                .and_then(|()| self.store.add_to_journal(self.job, part, &bytes));
            if let Err(error) = added {
                self.unanswered = Some((bytes, end_after));
                return Err(error);
            }
            for joined in [JOINED, JOINED * JOINED] {
                if number.is_multiple_of(joined) {
                    let part = self.part(number - joined + 1, number);
                    // Best effort: without it, only reading takes longer.
                    let _ = self.join(part);
                }
            }
            (number, end) = (number + 1, end_after);
            self.next = Some((number, end));
        }
    }

    /// Finds the number of the next part, and drops the waiting entries that are in the store; `None` if the parts there are
    /// of another lease: those of an older one will not be read once there is one of this lease.
    ///
    /// # Errors
    /// [`Error::JournalContinued`] if the newest part has entries that are not here: this run folder is an older copy, or
    /// another coordinator has continued the job.
    fn find_end(&mut self) -> Result<Option<(u64, JournalEnd)>, Error> {
        let parts = self.store.journal_parts(self.job)?;
        if parts.first().is_some_and(|part| part.lease != self.lease_number) {
            return Ok(None);
        }
        let number = next_number(&parts);
        let mut end = JournalEnd::EMPTY;
        if let Some(content) = newest(&self.store, self.job, &parts)? {
            if content.has_more_than(&self.all) {
                return Err(self.store.continued_journal(self.job));
            }
            self.waiting.retain(|entry| entry.key >= content.end.next(entry.kind));
            end = content.end;
        }
        self.next = Some((number, end));
        Ok(self.next)
    }

    /// Adds one part that covers all others and has everything that the run folder has.
    fn copy_anew(&mut self) -> Result<(), Error> {
        let newest = self.store.newest_journal_lease(self.job)?;
        if newest > self.lease_number {
            let problem = format!(
                "its parts are of lease {newest}, and the newest in leases/ is {}: move the parts away",
                self.lease_number
            );
            return Err(self.store.damaged_journal(self.job, &problem));
        }
        let last = self.store.last_journal_number(self.job, self.lease_number)? + 1;
        let end = JournalEnd::of(&self.all);
        let bytes = self.encoded(&PartContent::new(end, self.all.clone()))?;
        let covering = self.part(1, last);
        self.store.add_to_journal(self.job, covering, &bytes)?;
        self.store.remove_joined(self.job, covering)?;
        self.waiting.clear();
        self.unanswered = None;
        self.next = Some((last + 1, end));
        Ok(())
    }

    /// Checks that the parts before this one are in the store: where a disk is not mounted, an empty folder takes its place,
    /// and the part would be missing when the disk is back.
    fn check_before(&self, number: u64) -> Result<(), Error> {
        let next = next_number(&self.store.journal_parts(self.job)?);
        // The part itself may be there, if its answer was lost.
        if next >= number {
            return Ok(());
        }
        Err(self.store.damaged_journal(self.job, &format!("commit {next} is missing")))
    }

    /// Replaces parts by one that has all their entries.
    fn join(&self, joined: JournalPart) -> Result<(), Error> {
        let parts = self.store.journal_parts(self.job)?.into_iter();
        let inside = parts.filter(|part| part.first >= joined.first && part.last <= joined.last);
        let inside: Vec<JournalPart> = inside.collect();
        if inside.first().is_none_or(|part| part.first != joined.first) {
            // A larger part has the first ones.
            return Ok(());
        }
        let contents = inside.into_iter().map(|part| read_part(&self.store, self.job, part));
        let contents: Vec<PartContent> =
            contents.filter_map(Result::transpose).collect::<Result<_, _>>()?;
        let Some(end) = contents.last().map(|content| content.end) else { return Ok(()) };
        let entries = contents.into_iter().flat_map(|content| content.entries).collect();
        let bytes = self.encoded(&PartContent::new(end, entries))?;
        self.store.add_to_journal(self.job, joined, &bytes)?;
        self.store.remove_joined(self.job, joined)
    }

    fn part(&self, first: u64, last: u64) -> JournalPart {
        JournalPart { lease: self.lease_number, first, last }
    }

    fn encoded(&self, content: &PartContent) -> Result<Vec<u8>, Error> {
        encode(content).map_err(|error| self.store.damaged_journal(self.job, &error.to_string()))
    }
}

#[cfg(test)]
pub(crate) mod kit {
    use baton_checkpoint::{Claimant, CoordinatorLease};

    use super::*;

    pub(crate) const JOB: JobId = JobId(Uuid::nil());
    pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

    pub(super) fn entry(kind: EntryKind, key: u64) -> JournalEntry {
        JournalEntry { kind, key, json: format!("{{\"number\":{key}}}") }
    }

    pub(crate) fn records_of(keys: std::ops::Range<u64>) -> Vec<JournalEntry> {
        keys.map(|key| entry(EntryKind::Record, key)).collect()
    }

    pub(crate) fn claimant() -> Claimant {
        Claimant {
            owner: String::new(),
            job: JOB,
            name: String::new(),
            recipe: String::new(),
            host: String::new(),
            run_dir: String::new(),
            not_before: None,
        }
    }

    pub(crate) fn folder_store(folder: &tempfile::TempDir) -> Store {
        Store::open(folder.path().to_str().unwrap()).unwrap()
    }

    /// The copy of the coordinator that has the newest lease.
    pub(crate) fn start(folder: &tempfile::TempDir, committed: Vec<JournalEntry>) -> JournalCopy {
        let newest = folder_store(folder).lease().unwrap().map_or(0, |lease| lease.number);
        start_after(folder, newest, committed)
    }

    /// The copy of a coordinator that started when `newest` was the newest lease.
    pub(super) fn start_after(
        folder: &tempfile::TempDir,
        newest: u64,
        committed: Vec<JournalEntry>,
    ) -> JournalCopy {
        let lease = lease_after(folder, newest);
        // Refused where another coordinator was faster.
        let _ = lease.secure();
        JournalCopy::start(folder_store(folder), (JOB, lease), committed).unwrap()
    }

    /// The copy of a coordinator that has no generation yet.
    pub(super) fn idle(
        folder: &tempfile::TempDir,
        newest: u64,
        committed: Vec<JournalEntry>,
    ) -> JournalCopy {
        let lease = lease_after(folder, newest);
        JournalCopy::start(folder_store(folder), (JOB, lease), committed).unwrap()
    }

    fn lease_after(folder: &tempfile::TempDir, newest: u64) -> HeldLease {
        let identity = Uuid::new_v4().to_string();
        let lease = CoordinatorLease { job: JOB, folder: identity, ..CoordinatorLease::default() };
        HeldLease::free(folder_store(folder), lease, Some(newest))
    }
}

#[cfg(test)]
mod tests {
    use baton_checkpoint::{Claimant, CoordinatorLease};
    use baton_job::{
        engine::JobOrigin,
        exit::{Outcome, bad_input},
        message::Restore,
    };

    use super::{kit::*, *};

    fn read(store: &Store) -> Result<Vec<JournalEntry>, Error> {
        super::read(store, JOB, &store.journal_parts(JOB)?)
    }

    #[test]
    fn a_copy_has_every_entry_once_through_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let mut all = records_of(0..2);
        all.push(entry(EntryKind::Event, 1));
        for lives in 0..3 {
            // A coordinator that starts again offers all that its run folder has.
            let copy = start(&folder, all.clone());
            assert!(copy.flush(TIMEOUT));
            let added =
                vec![entry(EntryKind::Record, 2 + lives), entry(EntryKind::Event, 2 + lives)];
            copy.add(added.clone());
            assert!(copy.flush(TIMEOUT));
            all.extend(added);
            let store = folder_store(&folder);
            assert_eq!(read(&store).unwrap(), all);
            assert!(!is_continued(&store, JOB, &all).unwrap());
        }
    }

    #[test]
    fn many_parts_are_joined() {
        let folder = tempfile::tempdir().unwrap();
        let copy = start(&folder, Vec::new());
        for key in 0..JOINED + 3 {
            copy.add(records_of(key..key + 1));
            assert!(copy.flush(TIMEOUT));
        }
        let store = folder_store(&folder);
        assert_eq!(store.journal_parts(JOB).unwrap().len(), 4);
        assert_eq!(read(&store).unwrap(), records_of(0..JOINED + 3));
    }

    #[test]
    fn a_coordinator_without_a_generation_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let first = start(&folder, records_of(0..1));
        assert!(first.flush(TIMEOUT));
        let idle = idle(&folder, 1, records_of(0..1));
        idle.add(vec![entry(EntryKind::Event, 1)]);
        assert!(idle.flush(TIMEOUT));
        assert_eq!(read(&folder_store(&folder)).unwrap(), records_of(0..1));
        first.add(records_of(1..2));
        assert!(first.flush(TIMEOUT));
        assert_eq!(read(&folder_store(&folder)).unwrap(), records_of(0..2));
    }

    #[test]
    fn the_coordinator_of_the_newest_lease_writes_the_copy() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder_store(&folder);
        let older = start(&folder, records_of(0..2));
        assert!(older.flush(TIMEOUT));
        // The journal of the newer one does not have what the older one added meanwhile.
        let newer = start(&folder, records_of(0..1));
        newer.add(vec![entry(EntryKind::Event, 1)]);
        assert!(newer.flush(TIMEOUT));
        let mut expected = [records_of(0..1), vec![entry(EntryKind::Event, 1)]].concat();
        assert_eq!(read(&store).unwrap(), expected);

        older.add(records_of(2..3));
        assert!(!older.flush(TIMEOUT), "it has learned that it is replaced");
        newer.add(records_of(1..2));
        assert!(newer.flush(TIMEOUT));
        expected.extend(records_of(1..2));
        older.add(records_of(3..4));
        assert!(!older.flush(TIMEOUT));
        assert_eq!(read(&store).unwrap(), expected);
    }

    #[test]
    fn what_an_older_coordinator_adds_a_moment_too_late_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder_store(&folder);
        let newer = start(&folder, records_of(0..2));
        assert!(newer.flush(TIMEOUT));
        let late = PartContent::new(JournalEnd::of(&records_of(0..3)), records_of(2..3));
        let part = JournalPart { lease: 1, first: 2, last: 2 };
        store.add_to_journal(JOB, part, &encode(&late).unwrap()).unwrap();
        newer.add(vec![entry(EntryKind::Event, 1)]);
        assert!(newer.flush(TIMEOUT));
        let expected = [records_of(0..2), vec![entry(EntryKind::Event, 1)]].concat();
        assert_eq!(read(&store).unwrap(), expected);
    }

    fn of_records(records: &[Record]) -> Vec<JournalEntry> {
        let entry = |(key, record)| JournalEntry {
            kind: EntryKind::Record,
            key,
            json: serde_json::to_string(record).unwrap(),
        };
        (0..).zip(records).map(entry).collect()
    }

    #[test]
    fn the_journal_of_the_last_job_is_read_with_what_continues_it() {
        let origin = JobOrigin {
            job: JOB,
            recipe: None,
            first_generation: Generation(1),
            restore: Restore::default(),
        };
        let opened = Record::Opened { generation: Generation(1), placements: Vec::new() };
        let course = of_records(&[Record::Created(origin), opened.clone()]);
        let folder = tempfile::tempdir().unwrap();
        let store = folder_store(&folder);
        let found = || of_last_job(&store, RanksOfLostJob::Lost, true, None).unwrap();
        assert_eq!(found(), []);
        store.claim(Generation(1), &claimant()).unwrap();
        assert_eq!(found(), []);
        assert!(start(&folder, course.clone()).flush(TIMEOUT));

        let found = found();

        assert_eq!((&found[..2], found.len()), (&course[..], 3));
        assert_eq!(read(&store).unwrap(), course, "it is only read");
        assert!(!is_continued(&store, JOB, &found).unwrap());
        assert!(is_continued(&store, JOB, &course[..1]).unwrap());
        // What was added ends the run of the lost coordinator, not the job.
        assert!(start(&folder, found.clone()).flush(TIMEOUT));
        assert!(!has_ended(&store, JOB));
        let json = serde_json::to_string(&Record::Ended(Outcome::Stopped)).unwrap();
        let end = JournalEntry { kind: EntryKind::Record, key: 3, json };
        assert!(start(&folder, [found, vec![end]].concat()).flush(TIMEOUT));
        assert!(has_ended(&store, JOB));
        std::fs::remove_dir_all(folder.path().join("journal")).unwrap();
        assert!(!has_ended(&store, JOB));
    }

    #[test]
    fn the_journal_of_a_job_that_is_over_is_read_only_for_a_folder_that_had_it() {
        let origin = JobOrigin {
            job: JOB,
            recipe: None,
            first_generation: Generation(1),
            restore: Restore::default(),
        };
        let over = of_records(&[
            Record::Created(origin),
            Record::Opened { generation: Generation(1), placements: Vec::new() },
            Record::Ended(Outcome::Completed),
        ]);
        let folder = tempfile::tempdir().unwrap();
        let store = folder_store(&folder);
        store.claim(Generation(1), &claimant()).unwrap();
        assert!(start(&folder, over.clone()).flush(TIMEOUT));
        let found = |known| of_last_job(&store, RanksOfLostJob::Lost, true, known).unwrap();
        assert_eq!(found(None), []);
        assert_eq!(found(Some(JOB)), over);
    }

    #[test]
    fn a_job_whose_resume_was_refused_does_not_hide_the_one_before_it() {
        let origin = |job, path| JobOrigin {
            job,
            recipe: None,
            first_generation: Generation(1),
            restore: Restore { path, ..Restore::default() },
        };
        let opened =
            |generation| Record::Opened { generation: Generation(generation), placements: vec![] };
        let course = of_records(&[Record::Created(origin(JOB, None)), opened(1)]);
        let folder = tempfile::tempdir().unwrap();
        let store = folder_store(&folder);
        store.claim(Generation(1), &claimant()).unwrap();
        assert!(start(&folder, course.clone()).flush(TIMEOUT));

        let later = JobId(Uuid::from_u128(7));
        store.claim(Generation(2), &Claimant { job: later, ..claimant() }).unwrap();
        let failure = bad_input("damaged".to_owned());
        for (path, is_last) in [(Some("step-1".to_owned()), false), (None, true)] {
            let entries = of_records(&[
                Record::Created(origin(later, path)),
                opened(2),
                Record::Ended(Outcome::Failed { failure: failure.clone() }),
            ]);
            let content = PartContent::new(JournalEnd::of(&entries), entries);
            let part = JournalPart { lease: 1, first: 1, last: 1 };
            let _ = std::fs::remove_dir_all(folder.path().join(format!("journal/{later}")));
            store.add_to_journal(later, part, &encode(&content).unwrap()).unwrap();
            let found = of_last_job(&store, RanksOfLostJob::Lost, false, None).unwrap();
            assert_eq!(found.starts_with(&course), !is_last, "{found:?}");
            let last = if is_last { later } else { JOB };
            assert_eq!(last_claimant(&store).unwrap().map(|last| last.job), Some(last));
        }
    }

    #[test]
    fn entries_that_do_not_follow_each_other_are_damage() {
        let folder = tempfile::tempdir().unwrap();
        assert!(start(&folder, records_of(0..1)).flush(TIMEOUT));
        let entries = records_of(2..3);
        let content = PartContent::new(JournalEnd::of(&entries), entries);
        let store = folder_store(&folder);
        let part = JournalPart { lease: 1, first: 2, last: 2 };
        store.add_to_journal(JOB, part, &encode(&content).unwrap()).unwrap();
        let error = read(&store).unwrap_err().to_string();
        assert!(error.contains("part 000001-00000002-00000002 does not follow"), "{error}");
    }

    #[test]
    fn a_coordinator_that_began_before_another_one_took_the_lease_adds_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(start(&folder, records_of(0..3)).flush(TIMEOUT));
        let other = JournalEntry { json: "{}".to_owned(), ..entry(EntryKind::Record, 2) };
        let of_another_course = [records_of(0..2), vec![other], records_of(3..5)].concat();
        for committed in [records_of(0..2), of_another_course] {
            let older = start_after(&folder, 0, committed);
            older.add(records_of(5..6));
            assert!(older.flush(TIMEOUT), "it has no lease and nothing to do");
        }
        assert_eq!(read(&folder_store(&folder)).unwrap(), records_of(0..3));
    }

    #[test]
    fn a_damaged_copy_is_made_anew_from_the_run_folder() {
        let folder = tempfile::tempdir().unwrap();
        let copy = start(&folder, Vec::new());
        for key in 0..3 {
            copy.add(records_of(key..key + 1));
            assert!(copy.flush(TIMEOUT));
        }
        drop(copy);
        let store = folder_store(&folder);
        let remove = |part| {
            let file = folder.path().join(format!("journal/{JOB}/{part}.json"));
            std::fs::remove_file(file).unwrap();
        };
        remove("000001-00000002-00000002");
        assert!(read(&store).is_err());
        let copy = start(&folder, records_of(0..4));
        assert!(copy.flush(TIMEOUT));
        copy.add(records_of(4..5));
        assert!(copy.flush(TIMEOUT));
        assert_eq!(read(&store).unwrap(), records_of(0..5));

        // Also while it is written.
        remove("000002-00000001-00000001");
        copy.add(records_of(5..6));
        assert!(copy.flush(TIMEOUT));
        assert_eq!(read(&store).unwrap(), records_of(0..6));
    }

    #[test]
    fn a_copy_that_an_older_version_has_written_is_continued() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder_store(&folder);
        for key in 0..3 {
            let part = JournalPart { lease: 0, first: key + 1, last: key + 1 };
            let records = records_of(key..key + 1);
            let content = PartContent::new(JournalEnd::of(&records), records);
            store.add_to_journal(JOB, part, &encode(&content).unwrap()).unwrap();
        }
        assert_eq!(read(&store).unwrap(), records_of(0..3));
        let copy = start(&folder, records_of(0..3));
        copy.add(records_of(3..4));
        assert!(copy.flush(TIMEOUT));
        assert_eq!(read(&store).unwrap(), records_of(0..4));
        assert!(store.journal_parts(JOB).unwrap().iter().all(|part| part.lease == 1));
    }

    #[test]
    fn a_copy_of_a_lease_that_is_gone_from_the_store_is_a_problem_until_it_is_moved_away() {
        let folder = tempfile::tempdir().unwrap();
        for lease in 0..2 {
            assert!(start_after(&folder, lease, records_of(0..2)).flush(TIMEOUT));
        }
        std::fs::remove_dir_all(folder.path().join("leases")).unwrap();
        let copy = start(&folder, records_of(0..3));
        assert!(!copy.flush(TIMEOUT));
        let problems = copy.take_problems();
        assert!(problems[0].contains("its parts are of lease 2, and the newest in leases/ is 1"));
        std::fs::remove_dir_all(folder.path().join("journal")).unwrap();
        assert!(copy.flush(TIMEOUT));
        assert_eq!(read(&folder_store(&folder)).unwrap(), records_of(0..3));
    }

    #[test]
    fn parts_are_joined_after_a_copy_was_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let parts = JOINED + JOINED / 2;
        let copy = start(&folder, Vec::new());
        for key in 0..parts {
            copy.add(records_of(key..key + 1));
            assert!(copy.flush(TIMEOUT));
        }
        drop(copy);
        let last = folder.path().join(format!("journal/{JOB}/000001-{parts:08}-{parts:08}.json"));
        std::fs::write(last, "damage").unwrap();
        let copy = start(&folder, records_of(0..parts));
        for key in parts..2 * JOINED + 5 {
            copy.add(records_of(key..key + 1));
            assert!(copy.flush(TIMEOUT));
        }
        assert_eq!(read(&folder_store(&folder)).unwrap(), records_of(0..2 * JOINED + 5));
    }

    #[test]
    fn nothing_is_added_while_another_folder_is_in_place_of_the_store() {
        let folder = tempfile::tempdir().unwrap();
        let copy = start(&folder, records_of(0..1));
        assert!(copy.flush(TIMEOUT));
        let away = folder.path().with_extension("away");
        std::fs::rename(folder.path(), &away).unwrap();
        std::fs::create_dir(folder.path()).unwrap();
        copy.add(records_of(1..2));
        assert!(!copy.flush(TIMEOUT));
        std::fs::remove_dir_all(folder.path()).unwrap();
        std::fs::rename(&away, folder.path()).unwrap();
        assert!(copy.flush(TIMEOUT));
        assert_eq!(read(&folder_store(&folder)).unwrap(), records_of(0..2));
    }

    #[test]
    fn a_store_that_is_out_of_reach_gets_the_entries_later() {
        let folder = tempfile::tempdir().unwrap();
        let copy = start(&folder, records_of(0..1));
        assert!(copy.flush(TIMEOUT));
        let away = folder.path().with_extension("away");
        std::fs::rename(folder.path(), &away).unwrap();
        // A file in its place: not even root can create a folder below it.
        std::fs::write(folder.path(), "").unwrap();
        copy.add(records_of(1..2));
        assert!(!copy.flush(TIMEOUT));
        let problems = copy.take_problems();
        assert!(problems.len() == 1 && problems[0].contains("is tried again"), "{problems:?}");
        copy.add(records_of(2..3));
        std::fs::remove_file(folder.path()).unwrap();
        std::fs::rename(&away, folder.path()).unwrap();
        assert!(copy.flush(TIMEOUT));
        assert_eq!(read(&folder_store(&folder)).unwrap(), records_of(0..3));
    }

    #[test]
    fn a_damaged_part_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(start(&folder, records_of(0..1)).flush(TIMEOUT));
        let part = folder.path().join(format!("journal/{JOB}/000001-00000001-00000001.json"));
        let whole = std::fs::read(&part).unwrap();
        for (damaged, problem) in [
            (whole[..whole.len() - 2].to_vec(), "is cut short"),
            ([b"x", &whole[..]].concat(), "does not match its digest"),
        ] {
            std::fs::write(&part, damaged).unwrap();
            let error = read(&folder_store(&folder)).unwrap_err().to_string();
            assert!(
                error.contains("part 000001-00000001-00000001") && error.contains(problem),
                "{error}"
            );
        }
    }

    #[test]
    fn a_name_without_content_that_a_crash_has_left_is_no_damage() {
        let folder = tempfile::tempdir().unwrap();
        let start = |newest, committed| {
            let lease = CoordinatorLease { folder: "a".to_owned(), ..CoordinatorLease::default() };
            let lease = HeldLease::free(folder_store(&folder), lease, newest);
            lease.secure().unwrap();
            JournalCopy::start(folder_store(&folder), (JOB, lease), committed).unwrap()
        };
        assert!(start(Some(0), records_of(0..1)).flush(TIMEOUT));
        let name = format!("journal/{JOB}/000001-00000002-00000002.json");
        std::fs::write(folder.path().join(name), "").unwrap();
        let store = folder_store(&folder);
        assert!(!is_continued(&store, JOB, &records_of(0..1)).unwrap());
        // It starts again, with its lease.
        assert!(start(None, records_of(0..2)).flush(TIMEOUT));
        assert_eq!(read(&store).unwrap(), records_of(0..2));
        assert_eq!(store.journal_parts(JOB).unwrap().len(), 3);
    }

    #[test]
    fn a_part_of_a_newer_version_is_refused() {
        let end = JournalEnd::EMPTY;
        let newer = PartContent { format: FORMAT + 1, ..PartContent::new(end, Vec::new()) };
        let error = decode(&encode(&newer).unwrap()).unwrap_err();
        assert!(error.contains("newer Baton (format 2, this one reads 1)"), "{error}");
    }
}
