//! What survives `kill -9`: the machine's records and the event log, in one redb file.

use std::path::Path;

use anyhow::{Context, Result};
use baton_job::engine::{Notice, Record};
use redb::{Database, ReadableDatabase, TableDefinition};
use serde::{Deserialize, Serialize};

const RECORDS: Table = TableDefinition::new("records");
const EVENTS: Table = TableDefinition::new("events");

/// One event as watchers see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoggedEvent {
    pub(crate) id: u64,
    /// Milliseconds since 1970-01-01 UTC.
    pub(crate) unix_millis: u64,
    pub(crate) notice: Notice,
}

type Table = TableDefinition<'static, u64, &'static [u8]>;

/// Where an entry goes, and the entry as JSON.
type Noted = (Table, u64, Vec<u8>);

/// The journal of one job. What is noted is durable once it is committed.
pub(crate) struct Journal {
    database: Database,
    next_record: u64,
    next_event: u64,
    /// Not yet durable.
    noted: Vec<Noted>,
}

impl Journal {
    /// Opens or creates the file and returns what it holds.
    pub(crate) fn open(path: &Path) -> Result<(Self, Vec<Record>)> {
        let context = || {
            format!(
                "journal {}: cannot be opened; is another coordinator running on this run folder? \
                 If not, move the file away: the job then resumes from its newest checkpoint",
                path.display()
            )
        };
        let database = Database::create(path).with_context(context)?;
        let write = database.begin_write().with_context(context)?;
        write.open_table(RECORDS).with_context(context)?;
        write.open_table(EVENTS).with_context(context)?;
        write.commit().with_context(context)?;
        let records: Vec<(u64, Record)> = read_from(&database, RECORDS, 0).with_context(context)?;
        let events: Vec<(u64, LoggedEvent)> =
            read_from(&database, EVENTS, 0).with_context(context)?;
        let next_record = records.last().map_or(0, |(key, _)| key + 1);
        let next_event = events.last().map_or(1, |(key, _)| key + 1);
        let records = records.into_iter().map(|(_, record)| record).collect();
        Ok((Self { database, next_record, next_event, noted: Vec::new() }, records))
    }

    /// Notes a record.
    pub(crate) fn append(&mut self, record: &Record) -> Result<()> {
        self.noted.push((RECORDS, self.next_record, serde_json::to_vec(record)?));
        self.next_record += 1;
        Ok(())
    }

    /// Notes an event, which gets the next number.
    pub(crate) fn log(&mut self, unix_millis: u64, notice: Notice) -> Result<LoggedEvent> {
        let event = LoggedEvent { id: self.next_event, unix_millis, notice };
        self.noted.push((EVENTS, event.id, serde_json::to_vec(&event)?));
        self.next_event += 1;
        Ok(event)
    }

    /// Makes durable what was noted, all or nothing: one wait for the disk, however much it is.
    pub(crate) fn commit(&mut self) -> Result<()> {
        if self.noted.is_empty() {
            return Ok(());
        }
        let write = self.database.begin_write()?;
        for (table, key, bytes) in self.noted.drain(..) {
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

fn read_from<T: for<'de> Deserialize<'de>>(
    database: &Database,
    table: TableDefinition<'_, u64, &[u8]>,
    first: u64,
) -> Result<Vec<(u64, T)>> {
    let read = database.begin_read()?;
    let table = read.open_table(table)?;
    let mut values = Vec::new();
    for entry in table.range(first..)? {
        let (key, bytes) = entry?;
        let value = serde_json::from_slice(bytes.value()).with_context(|| {
            format!("entry {} was written by another version of Baton", key.value())
        })?;
        values.push((key.value(), value));
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use baton_job::{Generation, engine::NoticeKind, exit::Outcome};

    use super::*;

    fn notice(message: &str) -> Notice {
        let kind = NoticeKind::NodeJoined;
        Notice { kind, generation: Generation(1), step: None, message: message.to_owned() }
    }

    #[test]
    fn reopened_journal_holds_what_was_appended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.redb");
        let (mut journal, records) = Journal::open(&path).unwrap();
        assert_eq!(records, []);
        journal.append(&Record::Ended(Outcome::Stopped)).unwrap();
        journal.log(7, notice("first")).unwrap();
        journal.commit().unwrap();
        journal.log(8, notice("never committed")).unwrap();
        drop(journal);

        let (mut journal, records) = Journal::open(&path).unwrap();

        assert_eq!(records, [Record::Ended(Outcome::Stopped)]);
        assert_eq!(journal.log(8, notice("second")).unwrap().id, 2);
        journal.commit().unwrap();
        assert_eq!(journal.last_event(), 2);
        assert_eq!(journal.events_after(0).unwrap().len(), 2);
        assert_eq!(journal.events_after(1).unwrap()[0].notice.message, "second");
        assert_eq!(journal.events_after(u64::MAX).unwrap(), []);
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
