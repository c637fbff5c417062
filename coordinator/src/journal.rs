//! The durable state, which survives `kill -9`: the engine's records and the event log, in one redb file.

use std::{panic, path::Path};

use anyhow::{Context, Result, anyhow, bail};
use baton_job::engine::{JobEvent, Record};
use redb::{
    Database, DatabaseError, ReadOnlyDatabase, ReadableDatabase, TableDefinition, TableError,
};
use serde::{Deserialize, Serialize};

/// The format that this build writes, and the newest that it reads. Raise it when an entry is added or changed in a way
/// that older programs cannot read.
///
/// 1: no version is written; `Created` has a hash of the recipe; a logged event is in `notice`. 2: `Created` has the
/// recipe; a logged event is in `event`.
const FORMAT: u64 = 2;

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

/// An entry that is not committed yet: its table, its key and its JSON.
type PendingEntry = (JournalTable, u64, Vec<u8>);

/// The journal of one job. Entries are durable once they are committed.
pub(crate) struct Journal {
    database: Database,
    next_record: u64,
    next_event: u64,
    /// Entries to commit.
    pending: Vec<PendingEntry>,
}

impl Journal {
    /// Opens or creates the file and returns its records.
    ///
    /// # Errors
    /// Another process has it open; a newer Baton wrote it (then the file is unchanged); or it is damaged.
    pub(crate) fn open(path: &Path) -> Result<(Self, Vec<Record>)> {
        without_panic(|| Self::read(path)).with_context(|| format!("journal {}", path.display()))
    }

    fn read(path: &Path) -> Result<(Self, Vec<Record>)> {
        // Opening for writing changes the file, so check the format first. If this open fails, the one below reports
        // why.
        if let Ok(database) = ReadOnlyDatabase::open(path) {
            check_format(&database)?;
        }
        let database = Database::create(path).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => {
                anyhow!("another coordinator is running on this run folder; stop it, or give another --run-dir")
            }
            error => anyhow!(error).context(UNUSABLE_HINT),
        })?;
        check_format(&database)?;
        let records: Vec<(u64, Record)> =
            read_from(&database, RECORDS, 0).context(UNUSABLE_HINT)?;
        let events: Vec<(u64, LoggedEvent)> =
            read_from(&database, EVENTS, 0).context(UNUSABLE_HINT)?;
        let write = database.begin_write()?;
        write.open_table(METADATA)?.insert("format", FORMAT)?;
        write.commit()?;
        let next_record = records.last().map_or(0, |(key, _)| key + 1);
        let next_event = events.last().map_or(1, |(key, _)| key + 1);
        let records = records.into_iter().map(|(_, record)| record).collect();
        Ok((Self { database, next_record, next_event, pending: Vec::new() }, records))
    }

    /// Adds a record to the pending entries.
    pub(crate) fn append(&mut self, record: &Record) -> Result<()> {
        self.pending.push((RECORDS, self.next_record, serde_json::to_vec(record)?));
        self.next_record += 1;
        Ok(())
    }

    /// Adds an event, with the next id, to the pending entries.
    pub(crate) fn log(&mut self, unix_millis: u64, event: JobEvent) -> Result<LoggedEvent> {
        let logged = LoggedEvent { id: self.next_event, unix_millis, event };
        self.pending.push((EVENTS, logged.id, serde_json::to_vec(&logged)?));
        self.next_event += 1;
        Ok(logged)
    }

    /// Makes all pending entries durable in one transaction, so with one wait for the disk.
    pub(crate) fn commit(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let write = self.database.begin_write()?;
        for (table, key, bytes) in self.pending.drain(..) {
            write.open_table(table)?.insert(key, bytes.as_slice())?;
        }
        write.commit().context("the journal cannot be written; is the disk full?")
    }

    /// Committed events with an id above `after`, oldest first.
    pub(crate) fn events_after(&self, after: u64) -> Result<Vec<LoggedEvent>> {
        let events = read_from(&self.database, EVENTS, after.saturating_add(1))?;
        Ok(events.into_iter().map(|(_, event)| event).collect())
    }

    /// The id of the newest event; 0 before the first.
    pub(crate) fn last_event(&self) -> u64 {
        self.next_event - 1
    }
}

/// Problem and remedy for any other error of the file.
const UNUSABLE_HINT: &str = "cannot be used; if it is damaged or from another version of Baton, move it away, and the \
                             job resumes from its newest checkpoint";

/// Runs `work` and converts a panic to an error, because redb panics on some damaged files.
fn without_panic<T>(work: impl FnOnce() -> Result<T> + panic::UnwindSafe) -> Result<T> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let result = panic::catch_unwind(work);
    panic::set_hook(hook);
    result.unwrap_or_else(|_| Err(anyhow!(UNUSABLE_HINT)))
}

fn check_format(database: &impl ReadableDatabase) -> Result<()> {
    let found = match database.begin_read()?.open_table(METADATA) {
        Ok(about) => about.get("format")?.map_or(1, |format| format.value()),
        Err(TableError::TableDoesNotExist(_)) => 1,
        Err(error) => return Err(error).context(UNUSABLE_HINT),
    };
    if found > FORMAT {
        bail!(
            "was written by a newer Baton (format {found}, this one reads {FORMAT}): use that version, or move \
             the file away, and the job resumes from its newest checkpoint"
        );
    }
    Ok(())
}

fn read_from<T: for<'de> Deserialize<'de>>(
    database: &Database,
    table: TableDefinition<'_, u64, &[u8]>,
    first: u64,
) -> Result<Vec<(u64, T)>> {
    let mut values = Vec::new();
    let table = match database.begin_read()?.open_table(table) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(values),
        table => table?,
    };
    for entry in table.range(first..)? {
        let (key, bytes) = entry?;
        let value = serde_json::from_slice(bytes.value())
            .with_context(|| format!("entry {}", key.value()))?;
        values.push((key.value(), value));
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use baton_job::{Generation, engine::JobEventKind, exit::Outcome};

    use super::*;

    fn job_event(message: &str) -> JobEvent {
        let kind = JobEventKind::NodeJoined;
        JobEvent { kind, generation: Generation(1), step: None, message: message.to_owned() }
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

    fn open_error(path: &Path) -> String {
        let before = std::fs::read(path).unwrap();
        let error = format!("{:#}", Journal::open(path).err().unwrap());
        assert!(std::fs::read(path).unwrap() == before, "the file was changed: {error}");
        error
    }

    #[test]
    fn journal_of_a_newer_version_is_refused_with_a_remedy_and_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        let (journal, _) = Journal::open(&path).unwrap();
        let write = journal.database.begin_write().unwrap();
        write.open_table(METADATA).unwrap().insert("format", FORMAT + 1).unwrap();
        write.commit().unwrap();
        drop(journal);

        let error = open_error(&path);

        assert!(
            error.contains("newer Baton (format 3, this one reads 2): use that version"),
            "{error}"
        );
        assert!(error.contains("journal.redb"), "{error}");
    }

    #[test]
    fn journal_without_a_format_is_read_as_format_1() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        let database = Database::create(&path).unwrap();
        let write = database.begin_write().unwrap();
        let ended = br#"{"ended":{"kind":"stopped"}}"#;
        write.open_table(RECORDS).unwrap().insert(0, ended.as_slice()).unwrap();
        write.commit().unwrap();
        drop(database);

        let (journal, records) = Journal::open(&path).unwrap();

        assert_eq!(records, [Record::Ended(Outcome::Stopped)]);
        let about = journal.database.begin_read().unwrap().open_table(METADATA).unwrap();
        assert_eq!(about.get("format").unwrap().unwrap().value(), FORMAT);
    }

    #[test]
    fn damaged_journal_is_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        drop(Journal::open(&path).unwrap());
        let whole = std::fs::read(&path).unwrap();
        for end in [100, 5_000, whole.len() - 4_096] {
            std::fs::write(&path, &whole[..end]).unwrap();
            let error = format!("{:#}", Journal::open(&path).err().unwrap());
            assert!(error.contains("move it away"), "{end} bytes: {error}");
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
