//! The durable state, which survives `kill -9`: the engine's records and the event log, in one redb file.
//!
//! redb does not verify what it reads, so every entry has a checksum: a journal in which one bit changed could otherwise
//! be valid, and lead to another training without anyone noticing.

use std::{
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt,
    panic,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Result, anyhow};
use baton_job::engine::{JobEvent, Record};
use redb::{
    Database, ReadOnlyDatabase, ReadableDatabase, TableDefinition, TableError, TableHandle,
    WriteTransaction,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The format that this build writes, and the newest that it reads. Raise it when an entry is added or changed in a way
/// that older programs cannot read.
///
/// 1: no version is written; `Created` has a hash of the recipe; a logged event is in `notice`. 2: `Created` has the
/// recipe; a logged event is in `event`. 3: a checksum before the JSON of every entry; both tables always exist.
const FORMAT: u64 = 3;
/// The first format with checksums.
const CHECKSUM_FORMAT: u64 = 3;
/// Length of an entry's checksum, bytes.
const CHECKSUM_LEN: usize = 8;

/// Table of properties of the whole file: its [`FORMAT`].
const METADATA: TableDefinition<'static, &str, u64> = TableDefinition::new("about");
const RECORDS: JournalTable = TableDefinition::new("records");
const EVENTS: JournalTable = TableDefinition::new("events");

/// A job event with its id and time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoggedEvent {
    pub(crate) id: u64,
    /// Milliseconds since 1970-01-01 UTC.
    pub(crate) unix_millis: u64,
    #[serde(alias = "notice")]
    pub(crate) event: JobEvent,
}

type JournalTable = TableDefinition<'static, u64, &'static [u8]>;

/// An entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct JournalEntry {
    pub(crate) kind: EntryKind,
    /// Number among the entries of its kind, without gaps.
    pub(crate) key: u64,
    pub(crate) json: String,
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EntryKind {
    /// A [`Record`]; the first has key 0.
    Record,
    /// A [`LoggedEvent`]; the first has key 1.
    Event,
}

impl EntryKind {
    fn table(self) -> JournalTable {
        match self {
            Self::Record => RECORDS,
            Self::Event => EVENTS,
        }
    }
}

/// Pauses before a commit that failed is tried again. The ranks train meanwhile, but the coordinator answers nobody, so
/// this must be short: without a coordinator, an agent whose machine is taken away saves by itself.
const PAUSES: &[Duration] = &[
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
];

/// The journal of one job. Entries are durable once they are committed.
pub(crate) struct Journal {
    path: PathBuf,
    /// `None` after a commit that failed: redb must open the file again then.
    database: Option<Database>,
    pauses: &'static [Duration],
    next_record: u64,
    next_event: u64,
    /// Entries to commit.
    pending: Vec<JournalEntry>,
}

impl Journal {
    /// Opens or creates the file and returns its records. A file of an older format gets this build's format.
    ///
    /// # Errors
    /// One line. Another process has it open; a newer Baton wrote it (then the file is unchanged); it is damaged; or
    /// the system cannot read or write it.
    pub(crate) fn open(path: &Path) -> Result<(Self, Vec<Record>)> {
        let opened = without_panic(|| Self::read(path));
        opened.map_err(|problem| anyhow!(problem.describe(path)))
    }

    fn read(path: &Path) -> Result<(Self, Vec<Record>), Problem> {
        match path.metadata() {
            // `create` leaves no such file, and redb would begin a new journal in it: what was spent and decided would be
            // forgotten.
            Ok(found) if found.len() == 0 => {
                return Err(Problem::Damaged("the file is empty".to_owned()));
            }
            Ok(_) => {}
            Err(_) => create(path)?,
        }
        // Opening for writing changes the file, so check the format first. If this open fails, the one below reports
        // why.
        if let Ok(database) = ReadOnlyDatabase::open(path) {
            format_of(&database)?;
        }
        let mut database = Database::create(path).map_err(unusable)?;
        let format = format_of(&database)?;
        let records = entries(&database, RECORDS, 0, format)?;
        let events = entries(&database, EVENTS, 0, format)?;
        if let Some((first @ 1.., _)) = records.first() {
            return Err(Problem::Damaged(format!("there is no record before record {first}")));
        }
        let next_record = records.last().map_or(0, |(key, _)| key + 1);
        let next_event = events.last().map_or(1, |(key, _)| key + 1);
        let parsed = records.iter().map(|(key, json)| parse(RECORDS, *key, json));
        let parsed = parsed.collect::<Result<Vec<Record>, Problem>>()?;
        for (key, json) in &events {
            parse::<LoggedEvent>(EVENTS, *key, json)?;
        }
        // Finds damage to what redb needs for writing, on which a later commit would panic.
        if !database.check_integrity().map_err(unusable)? {
            return Err(Problem::Damaged("its pages do not fit together".to_owned()));
        }
        if format != Some(FORMAT) {
            upgrade(&database, &records, &events)?;
        }
        let (path, pauses, pending) = (path.to_owned(), PAUSES, Vec::new());
        let database = Some(database);
        Ok((Self { path, database, pauses, next_record, next_event, pending }, parsed))
    }

    /// Adds a record to the pending entries.
    pub(crate) fn append(&mut self, record: &Record) -> Result<()> {
        let json = serde_json::to_string(record)?;
        self.pending.push(JournalEntry { kind: EntryKind::Record, key: self.next_record, json });
        self.next_record += 1;
        Ok(())
    }

    /// Adds an event, with the next id, to the pending entries.
    pub(crate) fn log(&mut self, unix_millis: u64, event: JobEvent) -> Result<LoggedEvent> {
        let logged = LoggedEvent { id: self.next_event, unix_millis, event };
        let json = serde_json::to_string(&logged)?;
        self.pending.push(JournalEntry { kind: EntryKind::Event, key: logged.id, json });
        self.next_event += 1;
        Ok(logged)
    }

    /// Makes all pending entries durable in one transaction, so with one wait for the disk, and returns them. If it
    /// fails, for example because the disk is full, waits and tries again for some seconds.
    pub(crate) fn commit(&mut self) -> Result<Vec<JournalEntry>> {
        if self.pending.is_empty() {
            return Ok(Vec::new());
        }
        let mut pauses = self.pauses.iter();
        loop {
            let error = match self.try_commit() {
                Ok(committed) => return Ok(committed),
                Err(error) => error,
            };
            let problem = format!(
                "the journal cannot be written ({error}); free space on the disk of the run folder, or check that disk"
            );
            let Some(pause) = pauses.next() else { return Err(anyhow!(problem)) };
            tracing::error!("{problem}; training goes on, next attempt in {} s", pause.as_secs());
            thread::sleep(*pause);
        }
    }

    fn try_commit(&mut self) -> Result<Vec<JournalEntry>, redb::Error> {
        let database = match self.database.take() {
            Some(database) => database,
            None => Database::create(&self.path)?,
        };
        write(&database, &self.pending)?;
        self.database = Some(database);
        Ok(std::mem::take(&mut self.pending))
    }

    /// Commits the entries of a copy into an empty journal.
    pub(crate) fn fill(&mut self, copied: Vec<JournalEntry>) -> Result<()> {
        for entry in &copied {
            match entry.kind {
                EntryKind::Record => self.next_record = entry.key + 1,
                EntryKind::Event => self.next_event = entry.key + 1,
            }
        }
        self.pending = copied;
        self.commit().map(drop)
    }

    /// All committed records.
    pub(crate) fn records(&self) -> Result<Vec<Record>> {
        let read = self.read_committed(RECORDS, 0)?.into_iter();
        read.map(|(key, json)| parse(RECORDS, key, &json).map_err(unreadable)).collect()
    }

    /// All committed entries, records first.
    pub(crate) fn entries(&self) -> Result<Vec<JournalEntry>> {
        let mut all = Vec::new();
        for kind in [EntryKind::Record, EntryKind::Event] {
            for (key, json) in self.read_committed(kind.table(), 0)? {
                all.push(JournalEntry { kind, key, json: String::from_utf8(json)? });
            }
        }
        Ok(all)
    }

    fn read_committed(&self, table: JournalTable, first: u64) -> Result<Vec<(u64, Vec<u8>)>> {
        let database = self.database.as_ref().ok_or_else(|| anyhow!("the journal is closed"))?;
        entries(database, table, first, Some(FORMAT)).map_err(unreadable)
    }

    /// Committed events with an id above `after`, oldest first.
    pub(crate) fn events_after(&self, after: u64) -> Result<Vec<LoggedEvent>> {
        let read = self.read_committed(EVENTS, after.saturating_add(1))?.into_iter();
        read.map(|(key, json)| parse(EVENTS, key, &json).map_err(unreadable)).collect()
    }

    /// The id of the newest event; 0 before the first.
    pub(crate) fn last_event(&self) -> u64 {
        self.next_event - 1
    }
}

/// Why a journal cannot be used.
#[derive(Debug)]
enum Problem {
    /// Another process has it open.
    InUse,
    /// A newer Baton wrote it, in this format.
    Newer(u64),
    /// What is wrong with its content.
    Damaged(String),
    /// The system cannot read or write it.
    System(redb::Error),
}

impl Problem {
    /// One line: what, where, what to do.
    fn describe(&self, path: &Path) -> String {
        let journal = format!("journal {}", path.display());
        match self {
            Self::InUse => format!(
                "{journal} is in use: another coordinator is running on this run folder; stop it, or give another \
                 --run-dir"
            ),
            Self::Newer(found) => format!(
                "{journal} was written by a newer Baton (format {found}, this one reads {FORMAT}): use that version, \
                 or move it away: training resumes from the newest checkpoint"
            ),
            // The journal is the only place of the job's origin, rollbacks and budget. Only the user can decide to
            // continue without them.
            Self::Damaged(detail) => format!(
                "{journal} is damaged; move it away: training resumes from the newest checkpoint ({detail})"
            ),
            Self::System(error) => format!("{journal} cannot be used: {error}; check the disk"),
        }
    }
}

/// The error about the journal while the job runs.
fn unreadable(problem: Problem) -> anyhow::Error {
    anyhow!(problem.describe(Path::new("of this job")))
}

/// Sorts an error of redb.
fn unusable(error: impl Into<redb::Error>) -> Problem {
    match error.into() {
        redb::Error::DatabaseAlreadyOpen => Problem::InUse,
        // Errors of redb itself, such as a file that is too short, have no number of the system.
        redb::Error::Io(error) if error.raw_os_error().is_none() => {
            Problem::Damaged(error.to_string())
        }
        error @ (redb::Error::Io(_) | redb::Error::PreviousIo) => Problem::System(error),
        error => Problem::Damaged(error.to_string()),
    }
}

/// Runs `work` and converts a panic to damage: redb trusts the file that it reads, and panics on some damaged files.
fn without_panic<T>(
    work: impl FnOnce() -> Result<T, Problem> + panic::UnwindSafe,
) -> Result<T, Problem> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let result = panic::catch_unwind(work);
    panic::set_hook(hook);
    result.unwrap_or_else(|_| Err(Problem::Damaged("its pages cannot be read".to_owned())))
}

/// The file's format; `None` if the file is empty.
fn format_of(database: &impl ReadableDatabase) -> Result<Option<u64>, Problem> {
    let read = database.begin_read().map_err(unusable)?;
    let found = match read.open_table(METADATA) {
        Ok(about) => about.get("format").map_err(unusable)?.map_or(1, |format| format.value()),
        Err(TableError::TableDoesNotExist(_)) => {
            let is_empty = read.list_tables().map_err(unusable)?.next().is_none();
            return Ok((!is_empty).then_some(1));
        }
        Err(error) => return Err(unusable(error)),
    };
    if found > FORMAT { Err(Problem::Newer(found)) } else { Ok(Some(found)) }
}

/// Keys and JSON of a table's entries from `first` on.
fn entries(
    database: &Database,
    table: JournalTable,
    first: u64,
    format: Option<u64>,
) -> Result<Vec<(u64, Vec<u8>)>, Problem> {
    let has_checksums = format.is_some_and(|format| format >= CHECKSUM_FORMAT);
    let mut entries: Vec<(u64, Vec<u8>)> = Vec::new();
    let read = database.begin_read().map_err(unusable)?;
    let opened = match read.open_table(table) {
        Err(TableError::TableDoesNotExist(_)) if !has_checksums => return Ok(entries),
        opened => opened.map_err(unusable)?,
    };
    for entry in opened.range(first..).map_err(unusable)? {
        let (key, bytes) = entry.map_err(unusable)?;
        let (key, bytes) = (key.value(), bytes.value());
        if !has_checksums {
            entries.push((key, bytes.to_vec()));
            continue;
        }
        let damaged = |what| Problem::Damaged(format!("entry {key} of {} {what}", table.name()));
        if entries.last().is_some_and(|(before, _)| before.checked_add(1) != Some(key)) {
            return Err(damaged("does not follow the one before"));
        }
        match bytes.split_at_checked(CHECKSUM_LEN) {
            Some((found, json)) if found == checksum(table, key, json) => {
                entries.push((key, json.to_vec()));
            }
            _ => return Err(damaged("has a wrong checksum")),
        }
    }
    Ok(entries)
}

fn parse<T: DeserializeOwned>(table: JournalTable, key: u64, json: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(json)
        .map_err(|error| Problem::Damaged(format!("entry {key} of {}: {error}", table.name())))
}

/// The first bytes of the BLAKE3 hash of an entry and its place, so that an entry at another place is found, too.
fn checksum(table: JournalTable, key: u64, json: &[u8]) -> [u8; CHECKSUM_LEN] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(table.name().as_bytes()).update(&key.to_le_bytes()).update(json);
    let mut checksum = [0; CHECKSUM_LEN];
    hasher.finalize_xof().fill(&mut checksum);
    checksum
}

/// Creates the file, under another name first: a process that is killed meanwhile must not leave one that is damaged.
fn create(path: &Path) -> Result<(), Problem> {
    let system = |error: io::Error| Problem::System(redb::Error::Io(error));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut builder = tempfile::Builder::new();
    builder.prefix("journal-").suffix(".new").permissions(Permissions::from_mode(0o666));
    let file = builder.tempfile_in(folder.unwrap_or(Path::new("."))).map_err(system)?;
    let database = Database::create(file.path()).map_err(unusable)?;
    upgrade(&database, &[], &[])?;
    drop(database);
    match file.persist_noclobber(path) {
        // Another coordinator was faster; it has it open.
        Err(failed) if failed.error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // Some file systems can only replace.
        Err(failed) => failed.file.persist(path).map(drop).map_err(|failed| system(failed.error)),
        Ok(_) => Ok(()),
    }
}

/// Writes a new file's format, or all entries of an older file with their checksums.
fn upgrade(
    database: &Database,
    records: &[(u64, Vec<u8>)],
    events: &[(u64, Vec<u8>)],
) -> Result<(), Problem> {
    let write = database.begin_write().map_err(unusable)?;
    write.open_table(METADATA).map_err(unusable)?.insert("format", FORMAT).map_err(unusable)?;
    for (table, entries) in [(RECORDS, records), (EVENTS, events)] {
        write.open_table(table).map_err(unusable)?;
        for (key, json) in entries {
            insert(&write, table, *key, json).map_err(unusable)?;
        }
    }
    write.commit().map_err(unusable)
}

fn write(database: &Database, pending: &[JournalEntry]) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    for entry in pending {
        insert(&write, entry.kind.table(), entry.key, entry.json.as_bytes())?;
    }
    Ok(write.commit()?)
}

fn insert(
    write: &WriteTransaction,
    table: JournalTable,
    key: u64,
    json: &[u8],
) -> Result<(), redb::Error> {
    let entry = [&checksum(table, key, json), json].concat();
    write.open_table(table)?.insert(key, entry.as_slice())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use baton_job::{
        Generation, JobId,
        engine::{JobEventKind, JobOrigin},
        exit::Outcome,
        message::Restore,
    };

    use rustix::fs::{CWD, RenameFlags, renameat_with};

    use super::*;

    fn job_event(message: &str) -> JobEvent {
        let kind = JobEventKind::NodeJoined;
        JobEvent { kind, generation: Generation(1), step: None, message: message.to_owned() }
    }

    #[test]
    fn a_commit_waits_until_the_disk_has_space_again() {
        const PAUSES: &[Duration] = &[Duration::from_millis(1); 200];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        let (mut journal, _) = Journal::open(&path).unwrap();
        journal.pauses = PAUSES;
        // As after a failed commit; and a folder where the file should be, until somebody removes it.
        journal.database = None;
        let moved = folder.path().join("moved");
        std::fs::rename(&path, &moved).unwrap();
        std::fs::create_dir(&path).unwrap();
        journal.append(&Record::Ended(Outcome::Stopped)).unwrap();
        let user = thread::spawn({
            let path = path.clone();
            move || {
                // At once: without a file in its place, a commit would make a new journal.
                renameat_with(CWD, &path, CWD, &moved, RenameFlags::EXCHANGE).unwrap();
            }
        });
        journal.commit().unwrap();
        user.join().unwrap();
        drop(journal);
        assert_eq!(Journal::open(&path).unwrap().1, [Record::Ended(Outcome::Stopped)]);

        let (mut journal, _) = Journal::open(&path).unwrap();
        journal.pauses = &[];
        journal.database = None;
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        journal.append(&Record::Ended(Outcome::Stopped)).unwrap();
        let error = journal.commit().unwrap_err().to_string();
        assert!(error.contains("free space on the disk of the run folder"), "{error}");
    }

    #[test]
    fn reopened_journal_holds_what_was_appended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        let (mut journal, records) = Journal::open(&path).unwrap();
        assert_eq!(records, []);
        journal.append(&Record::Ended(Outcome::Stopped)).unwrap();
        journal.log(7, job_event("first")).unwrap();
        journal.commit().unwrap();
        journal.log(8, job_event("never committed")).unwrap();
        drop(journal);

        let (mut journal, records) = Journal::open(&path).unwrap();

        assert_eq!(records, [Record::Ended(Outcome::Stopped)]);
        assert_eq!(journal.log(8, job_event("second")).unwrap().id, 2);
        journal.commit().unwrap();
        assert_eq!(journal.last_event(), 2);
        assert_eq!(journal.events_after(0).unwrap().len(), 2);
        assert_eq!(journal.events_after(1).unwrap()[0].event.message, "second");
        assert_eq!(journal.events_after(u64::MAX).unwrap(), []);
    }

    #[test]
    fn an_event_under_its_name_of_format_1_is_read() {
        let logged = LoggedEvent { id: 1, unix_millis: 7, event: job_event("first") };
        let old = serde_json::to_string(&logged).unwrap().replace("\"event\":", "\"notice\":");
        assert_eq!(serde_json::from_str::<LoggedEvent>(&old).unwrap(), logged);
    }

    /// A journal with the origin of a job and an event.
    fn written(path: &Path) -> Vec<Record> {
        let (mut journal, _) = Journal::open(path).unwrap();
        let records = vec![
            Record::Created(JobOrigin {
                job: JobId::default(),
                recipe: Some("the recipe".to_owned()),
                first_generation: Generation(1),
                restore: Restore::default(),
            }),
            Record::Ended(Outcome::Stopped),
        ];
        for record in &records {
            journal.append(record).unwrap();
        }
        journal.log(7, job_event("first")).unwrap();
        journal.commit().unwrap();
        records
    }

    fn damage(path: &Path) -> String {
        let error = format!("{:#}", Journal::open(path).err().unwrap());
        let line = format!(
            "journal {} is damaged; move it away: training resumes from the newest checkpoint",
            path.display()
        );
        assert!(error.starts_with(&line), "{error}");
        error
    }

    #[test]
    fn a_flipped_bit_in_an_entry_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        written(&path);
        let whole = std::fs::read(&path).unwrap();
        // Without a checksum, this would be valid: no checkpoint before generation 8 may be used.
        let origin = br#"{"created":"#;
        let starts = whole.windows(origin.len()).enumerate().filter(|(_, bytes)| bytes == origin);
        let starts: Vec<usize> = starts.map(|(at, _)| at).collect();
        assert!(!starts.is_empty());
        let field = br#""not_before":0"#;
        let mut flipped = whole.clone();
        for start in starts {
            let found = whole[start..].windows(field.len()).position(|bytes| bytes == field);
            flipped[start + found.unwrap() + field.len() - 1] ^= 8;
        }
        assert!(flipped.windows(field.len()).any(|bytes| bytes == br#""not_before":8"#));
        std::fs::write(&path, flipped).unwrap();

        assert!(damage(&path).contains("entry 0 of records has a wrong checksum"));
    }

    #[test]
    fn a_flipped_bit_anywhere_gives_the_same_records_or_a_clear_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        let records = written(&path);
        let whole = std::fs::read(&path).unwrap();
        let used: Vec<usize> = (0..whole.len()).filter(|at| whole[*at] != 0).collect();
        for at in used.iter().step_by(used.len() / 200) {
            let mut flipped = whole.clone();
            flipped[*at] ^= 1 << (at % 8);
            std::fs::write(&path, flipped).unwrap();
            match Journal::open(&path) {
                // The bit is one that nothing reads, or redb has restored the state before the last transaction.
                Ok((_, read)) => assert!(records.starts_with(&read), "byte {at}: {read:?}"),
                Err(error) => {
                    let error = format!("{error:#}");
                    assert!(error.contains("move it away"), "byte {at}: {error}");
                }
            }
        }
    }

    #[test]
    fn a_journal_that_lacks_an_entry_or_a_table_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let first = folder.path().join("first");
        written(&first);
        let database = Database::open(&first).unwrap();
        let write = database.begin_write().unwrap();
        assert!(write.open_table(RECORDS).unwrap().remove(0).unwrap().is_some());
        write.commit().unwrap();
        drop(database);
        assert!(damage(&first).contains("there is no record before record 1"));
        for (name, table) in [("entry", None), ("a", Some(RECORDS)), ("b", Some(EVENTS))] {
            let path = folder.path().join(name);
            written(&path);
            let (mut journal, _) = Journal::open(&path).unwrap();
            journal.next_record += 1;
            journal.append(&Record::Ended(Outcome::Stopped)).unwrap();
            journal.commit().unwrap();
            if let Some(table) = table {
                let write = journal.database.as_ref().unwrap().begin_write().unwrap();
                assert!(write.delete_table(table).unwrap());
                write.commit().unwrap();
            }
            drop(journal);
            damage(&path);
        }
    }

    fn open_error(path: &Path) -> String {
        let before = std::fs::read(path).unwrap();
        let error = format!("{:#}", Journal::open(path).err().unwrap());
        assert!(std::fs::read(path).unwrap() == before, "the file was changed: {error}");
        error
    }

    /// What others see of a journal that is being created would stay if its process were killed.
    #[test]
    fn a_new_journal_has_its_name_only_once_it_can_be_read() {
        for _ in 0..20 {
            let folder = tempfile::tempdir().unwrap();
            let (path, copy) =
                (folder.path().join("journal.redb"), folder.path().join("copy.redb"));
            thread::scope(|scope| {
                let look = scope.spawn(|| {
                    while !path.exists() {
                        thread::yield_now();
                    }
                    std::fs::read(&path).unwrap()
                });
                create(&path).unwrap();
                std::fs::write(&copy, look.join().unwrap()).unwrap();
            });
            let database = ReadOnlyDatabase::open(&copy).unwrap();
            assert_eq!(format_of(&database).ok(), Some(Some(FORMAT)));
            drop(database);
            std::fs::remove_file(copy).unwrap();

            create(&path).unwrap();
            let names = std::fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(names, 1, "no other file is left");
        }
    }

    #[test]
    fn journal_of_a_newer_version_is_refused_with_a_remedy_and_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        let (journal, _) = Journal::open(&path).unwrap();
        let write = journal.database.as_ref().unwrap().begin_write().unwrap();
        write.open_table(METADATA).unwrap().insert("format", FORMAT + 1).unwrap();
        write.commit().unwrap();
        drop(journal);

        let error = open_error(&path);

        assert!(
            error.contains("newer Baton (format 4, this one reads 3): use that version"),
            "{error}"
        );
        assert!(error.contains("journal.redb"), "{error}");
    }

    #[test]
    fn journals_of_older_formats_are_read_and_get_checksums() {
        let folder = tempfile::tempdir().unwrap();
        let json = |event: &LoggedEvent| serde_json::to_string(event).unwrap();
        for format in [1, 2] {
            let path = folder.path().join(format!("{format}.redb"));
            let logged = LoggedEvent { id: 1, unix_millis: 7, event: job_event("first") };
            let database = Database::create(&path).unwrap();
            let write = database.begin_write().unwrap();
            let ended = br#"{"ended":{"kind":"stopped"}}"#;
            write.open_table(RECORDS).unwrap().insert(0, ended.as_slice()).unwrap();
            write.open_table(EVENTS).unwrap().insert(1, json(&logged).as_bytes()).unwrap();
            if format > 1 {
                write.open_table(METADATA).unwrap().insert("format", format).unwrap();
            }
            write.commit().unwrap();
            drop(database);

            for _ in 0..2 {
                let (mut journal, records) = Journal::open(&path).unwrap();

                assert_eq!(records, [Record::Ended(Outcome::Stopped)]);
                assert_eq!(journal.events_after(0).unwrap()[0], logged);
                assert_eq!(format_of(journal.database.as_ref().unwrap()).unwrap(), Some(FORMAT));
                journal.log(8, job_event("next")).unwrap();
                journal.commit().unwrap();
            }
        }
    }

    #[test]
    fn damaged_journal_is_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        drop(Journal::open(&path).unwrap());
        let whole = std::fs::read(&path).unwrap();
        for end in [0, 100, 5_000, whole.len() - 4_096] {
            std::fs::write(&path, &whole[..end]).unwrap();
            damage(&path);
        }
    }

    #[test]
    fn journal_in_use_is_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        let _held = Journal::open(&path).unwrap();

        let error = format!("{:#}", Journal::open(&path).err().unwrap());

        assert!(error.contains("another coordinator"), "{error}");
    }
}
