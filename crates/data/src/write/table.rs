//! Tables (CSV, TSV) as data sets: columns become fields.
//!
//! The table is read twice: first to check every value, to find the classes and to count the samples of each set, and then to
//! write them. So a table with a bad value leaves no file, and memory does not grow with it, except by the hashes of a
//! stratified split, for which it is read once more. Files that a table names are read in the last pass, by several threads.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use csv::{Reader, ReaderBuilder, StringRecord};

use super::{
    CHANGED_WHILE_READ, DEFAULT_PAGE_BYTES, Encoding, Error, FinishedFile, KeySplit, TableField,
    Value, Writer,
    column::{BadValue, ColumnKind, OwnedValue, WriteContext},
    draft::{Draft, failed, publish_all},
    encoding::ImageEncoder,
    pipeline::in_order,
};
use crate::with_suffix;

/// Most rows that are listed as left out, and most columns in a message.
const MAX_LISTED: usize = 10;
/// Most letters of the name of a column in a message.
const MAX_LISTED_CHARS: usize = 40;
/// Rows that are read before their files are.
const ROWS_AT_ONCE: usize = 1_024;

/// What to write.
#[derive(Clone, Debug)]
pub struct TableOptions {
    /// The table: its first line has the names of the columns. Tabs separate the columns of a file whose name ends with
    /// `.tsv`, commas those of others.
    pub from: PathBuf,
    /// The fields of a sample.
    pub fields: Vec<TableField>,
    /// The file for training.
    pub to: PathBuf,
    /// Further files with a share of the samples each, which are then not in the others.
    pub others: Vec<(PathBuf, f64)>,
    /// The column whose value decides in which file a row is; without one, the whole row does.
    pub by: Option<String>,
    /// The class field of which each file gets its share of every class, to within one row.
    pub stratify: Option<String>,
    /// How images are stored.
    pub encoding: Encoding,
    /// Number of threads that read images and arrays.
    pub threads: NonZeroUsize,
    /// Whether rows with a bad value are left out.
    pub skips_bad_rows: bool,
}

/// What was written.
#[derive(Clone, Debug, Default)]
pub struct WrittenTable {
    /// The files, with the numbers of their samples and bytes.
    pub files: Vec<(PathBuf, FinishedFile)>,
    /// Files with the names of classes, by field.
    pub classes: Vec<(String, PathBuf)>,
    /// Such files beside the result that are not of this table, whose fields are no classes.
    pub other_classes: Vec<PathBuf>,
    /// Number of rows that were left out.
    pub skipped: u64,
    /// Why the first of them were.
    pub first_skipped: Vec<String>,
}

/// Writes a table as data sets.
///
/// `progress` gets the number of rows that are done, of both passes together, and their total once it is known.
///
/// # Errors
/// The table cannot be read, a column is missing, a value is bad and bad rows are not to be skipped, a set or, in the first
/// one, a class has no row, an option is invalid, or a file cannot be written.
pub fn write_table(
    options: &TableOptions,
    mut progress: impl FnMut(u64, Option<u64>),
) -> Result<WrittenTable, Error> {
    let lists: Vec<(String, PathBuf)> = options.class_lists();
    let list_paths: Vec<PathBuf> = lists.iter().map(|(_, path)| path.clone()).collect();
    super::check_targets(&options.to, &options.others, &list_paths, &options.from)?;
    options.encoding.check()?;
    options.check_size()?;
    let split = options.split(&mut progress)?;
    let mut found = Found::new(options);
    let mut table = OpenTable::open(options)?;
    while let Some(row) = table.next()? {
        progress(row.number, None);
        found.add(options, &split, &row)?;
    }
    found.check(options)?;

    let sets = options.paths();
    // Before any other file is replaced.
    let drafts =
        list_paths.iter().map(|path| Draft::create(path)).collect::<Result<Vec<_>, _>>()?;
    let mut writers = Vec::new();
    for (path, rows) in sets.iter().zip(&found.rows) {
        let fields = options.fields.iter().map(TableField::field).collect();
        writers.push(Writer::create(path, fields, *rows, DEFAULT_PAGE_BYTES)?);
    }
    let names = found.class_names();
    let mut table = OpenTable::open(options)?;
    let (read, bad) = (found.read, found.bad);
    let (mut done, mut bad_again) = (0, 0);
    // Threads are for files.
    let reads_files = options.reads_files();
    let threads = if reads_files { options.threads } else { NonZeroUsize::MIN };
    let changed = || options.refused(CHANGED_WHILE_READ.to_owned());
    loop {
        let mut rows = Vec::new();
        while rows.len() < ROWS_AT_ONCE
            && let Some(row) = table.next()?
        {
            rows.push(row);
        }
        if rows.is_empty() {
            break;
        }
        done += rows.len() as u64;
        if done > read {
            return Err(changed());
        }
        let take = |number: usize, values: Result<Vec<OwnedValue>, BadValue>| {
            let row: &Row = &rows[number];
            match values {
                Ok(values) => {
                    let values: Vec<Value<'_>> = values.iter().map(OwnedValue::borrowed).collect();
                    writers[split.set(row)].push(&values)?;
                }
                Err(BadValue::Text(_)) => bad_again += 1,
                Err(BadValue::File(reason)) => found.remove(options, &split, row, reason)?,
                Err(BadValue::Machine(error)) => return Err(error),
            }
            Ok(())
        };
        let start = || ImageEncoder::new(options.encoding);
        let values = |encoder: &mut ImageEncoder, number: usize| {
            // A row that was bad before is bad for the same reason, whatever its files are.
            if reads_files && let Err(bad) = options.values(&rows[number], None) {
                return Ok(Err(bad));
            }
            Ok(options.values(&rows[number], Some((&names, encoder))))
        };
        in_order(rows.len(), threads, start, values, take)?;
        progress(read + done, Some(2 * read));
    }
    if (done, bad_again) != (read, bad) {
        return Err(changed());
    }
    found.check(options)?;
    let mut written = WrittenTable {
        skipped: found.bad,
        first_skipped: found.first_bad,
        ..WrittenTable::default()
    };
    let mut complete = Vec::new();
    for (path, writer) in sets.iter().zip(writers) {
        let (draft, file) = writer.complete()?;
        written.files.push((path.clone(), file));
        complete.push(draft);
    }
    let fields = options.fields.iter().zip(&names);
    let class_fields = fields.filter(|(field, _)| field.kind == ColumnKind::Class);
    for ((_, names), mut draft) in class_fields.zip(drafts) {
        draft.write_lines(names)?;
        draft.sync()?;
        complete.push(draft);
    }
    // They belong together.
    publish_all(complete)?;
    written.classes = lists;
    let others = options.fields.iter().filter(|field| field.kind != ColumnKind::Class);
    let others = others.map(|field| options.class_list(field)).filter(|path| path.exists());
    written.other_classes = others.collect();
    Ok(written)
}

impl TableOptions {
    /// The class fields, and the files with the names of their classes.
    fn class_lists(&self) -> Vec<(String, PathBuf)> {
        let classes = self.fields.iter().filter(|field| field.kind == ColumnKind::Class);
        classes.map(|field| (field.name.clone(), self.class_list(field))).collect()
    }

    fn class_list(&self, field: &TableField) -> PathBuf {
        with_suffix(&self.to, &format!(".{}.classes.txt", field.name))
    }

    fn paths(&self) -> Vec<PathBuf> {
        let others = self.others.iter().map(|(path, _)| path.clone());
        std::iter::once(self.to.clone()).chain(others).collect()
    }

    /// The values of a row, or what is wrong with it. Without the names of the classes, which are known once all rows were
    /// read, they are only checked.
    fn values(
        &self,
        row: &Row,
        writing: Option<(&[Vec<String>], &mut ImageEncoder)>,
    ) -> Result<Vec<OwnedValue>, BadValue> {
        if let Some(by) = &self.by
            && row.key.is_empty()
        {
            return Err(format!("column {by:?} is empty").into());
        }
        let folder = self.from.parent().unwrap_or(Path::new(""));
        let mut values = Vec::with_capacity(self.fields.len());
        let (classes, mut encoder) = writing.unzip();
        for (number, (field, cells)) in self.fields.iter().zip(&row.cells).enumerate() {
            let writing = classes.zip(encoder.as_deref_mut()).map(|(classes, encoder)| {
                WriteContext { classes: &classes[number], encoder, row: row.number - 1 }
            });
            values.push(field.value(cells, folder, writing)?);
        }
        Ok(values)
    }

    fn reads_files(&self) -> bool {
        self.fields.iter().any(|field| field.kind.names_a_file())
    }

    /// Refuses fields that do not fit into a page together, whatever their values are.
    fn check_size(&self) -> Result<(), Error> {
        let arrays = self.fields.iter().map(TableField::array_bytes);
        let needed = arrays.fold(0, u64::saturating_add);
        match needed <= u64::from(DEFAULT_PAGE_BYTES) {
            true => Ok(()),
            false => Err(Error::Option(format!(
                "the arrays of a row need {needed} bytes, and a page has {DEFAULT_PAGE_BYTES}: take fewer or shorter ones"
            ))),
        }
    }

    /// Which rows are written to which file.
    fn split(&self, progress: &mut impl FnMut(u64, Option<u64>)) -> Result<RowSplit, Error> {
        let shares = || self.others.iter().map(|(_, share)| *share);
        let by_key = KeySplit::new(shares());
        let Some(name) = &self.stratify else { return Ok(RowSplit { by_key, by_class: None }) };
        let field = self.fields.iter().position(|field| field.name == *name);
        let field = field.filter(|field| self.fields[*field].kind == ColumnKind::Class);
        let Some(field) = field else {
            return Err(Error::Option(format!(
                "{name:?} is no class field: a split is stratified by one"
            )));
        };
        if self.by.is_some() {
            return Err(Error::Option(
                "rows that belong together cannot be divided by their classes too".to_owned(),
            ));
        }
        if self.others.is_empty() {
            return Err(Error::Option("a stratified split needs a second file".to_owned()));
        }
        let mut hashes: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        let mut table = OpenTable::open(self)?;
        while let Some(row) = table.next()? {
            progress(row.number, None);
            if self.values(&row, None).is_ok() {
                let class = row.class(field).to_owned();
                hashes.entry(class).or_default().push(KeySplit::hash(&row.key));
            }
        }
        let split = |(class, mut hashes): (String, Vec<u64>)| {
            (class, KeySplit::exact(&mut hashes, shares()))
        };
        let by_class = Some((field, hashes.into_iter().map(split).collect()));
        Ok(RowSplit { by_key, by_class })
    }

    fn refused(&self, reason: String) -> Error {
        Error::Source { path: self.from.clone(), reason }
    }
}

/// Which file a row is written to.
struct RowSplit {
    by_key: KeySplit,
    /// The number of a class field, and the splits of its classes.
    by_class: Option<(usize, BTreeMap<String, KeySplit>)>,
}

impl RowSplit {
    fn set(&self, row: &Row) -> usize {
        let by_class =
            self.by_class.as_ref().and_then(|(field, splits)| splits.get(row.class(*field)));
        by_class.unwrap_or(&self.by_key).set(&row.key)
    }
}

/// What the first pass finds.
struct Found {
    /// Rows of the table.
    read: u64,
    /// Good rows of each set.
    rows: Vec<u64>,
    /// For each field, the texts of a class and how many rows of each set have them.
    classes: Vec<BTreeMap<String, Vec<u64>>>,
    bad: u64,
    first_bad: Vec<String>,
}

impl Found {
    fn new(options: &TableOptions) -> Self {
        Self {
            read: 0,
            rows: vec![0; options.others.len() + 1],
            classes: vec![BTreeMap::new(); options.fields.len()],
            bad: 0,
            first_bad: Vec::new(),
        }
    }

    fn add(&mut self, options: &TableOptions, split: &RowSplit, row: &Row) -> Result<(), Error> {
        self.read += 1;
        match options.values(row, None) {
            Ok(_) => {
                let (sets, set) = (self.rows.len(), split.set(row));
                for (field, classes) in self.class_counts(options) {
                    let class = row.class(field).to_owned();
                    let rows = classes.entry(class).or_insert_with(|| vec![0; sets]);
                    rows[set] += 1;
                }
                self.rows[set] += 1;
                Ok(())
            }
            Err(BadValue::Text(reason) | BadValue::File(reason)) => self.skip(options, row, reason),
            Err(BadValue::Machine(error)) => Err(error),
        }
    }

    /// Leaves out a row that was good until its files were read.
    fn remove(
        &mut self,
        options: &TableOptions,
        split: &RowSplit,
        row: &Row,
        reason: String,
    ) -> Result<(), Error> {
        let set = split.set(row);
        self.rows[set] -= 1;
        for (field, classes) in self.class_counts(options) {
            if let Some(rows) = classes.get_mut(row.class(field)) {
                rows[set] -= 1;
            }
        }
        self.skip(options, row, reason)
    }

    /// The numbers of the class fields, and their counts.
    fn class_counts(
        &mut self,
        options: &TableOptions,
    ) -> impl Iterator<Item = (usize, &mut BTreeMap<String, Vec<u64>>)> {
        let is_class = |number: &usize| options.fields[*number].kind == ColumnKind::Class;
        self.classes.iter_mut().enumerate().filter(move |(number, _)| is_class(number))
    }

    fn skip(&mut self, options: &TableOptions, row: &Row, reason: String) -> Result<(), Error> {
        self.bad += 1;
        if options.skips_bad_rows && self.first_bad.len() >= MAX_LISTED {
            return Ok(());
        }
        let line = line_of_row(&options.from, row.start)?;
        let error = Error::Line { path: options.from.clone(), line, reason };
        if !options.skips_bad_rows {
            return Err(error);
        }
        self.first_bad.push(error.to_string());
        Ok(())
    }

    fn check(&self, options: &TableOptions) -> Result<(), Error> {
        if self.read == self.bad {
            let reason = match self.first_bad.first() {
                None => "has no rows below its first line".to_owned(),
                Some(first) => format!("all rows are bad, the first: {first}"),
            };
            return Err(options.refused(reason));
        }
        let paths = options.paths();
        if let Some(empty) = self.rows.iter().position(|rows| *rows == 0) {
            return Err(options.refused(format!(
                "no row is for {}: give another share, or, with few values in --by, another column",
                paths[empty].display()
            )));
        }
        for (field, classes) in options.fields.iter().zip(&self.classes) {
            if let Some((class, _)) =
                classes.iter().find(|(_, rows)| rows.iter().all(|rows| *rows == 0))
            {
                return Err(options.refused(format!(
                    "all rows of class {class:?} of field {:?} are bad: fix or remove them",
                    field.name
                )));
            }
            if let Some((class, _)) = classes.iter().find(|(_, rows)| rows[0] == 0) {
                return Err(options.refused(format!(
                    "class {class:?} of field {:?} has no row in {}: give smaller shares",
                    field.name,
                    paths[0].display()
                )));
            }
        }
        Ok(())
    }

    /// The names of each field's classes, in order.
    fn class_names(&self) -> Vec<Vec<String>> {
        self.classes.iter().map(|classes| classes.keys().cloned().collect()).collect()
    }
}

/// Follows the table. If it is part of a cell, that cell has a quote which is never closed; the CSV format would let such a
/// cell reach to the end of the file.
const END_MARK: &str = "\u{1}end of the table\u{1}";

/// A CSV or TSV file whose first line is read.
pub(super) struct NamedColumns {
    path: PathBuf,
    reader: Reader<Box<dyn Read>>,
    /// Number of columns of the first line.
    width: usize,
    /// The positions of the columns that were asked for.
    pub(super) positions: Vec<usize>,
}

impl NamedColumns {
    pub(super) fn open(path: &Path, columns: &[&str]) -> Result<Self, Error> {
        let refused = |reason: String| Error::Source { path: path.to_owned(), reason };
        // Opening a pipe would wait for a writer.
        if fs::metadata(path).is_ok_and(|file| !file.is_file()) {
            return Err(refused("is not a regular file; it is read more than once".to_owned()));
        }
        let file = File::open(path).map_err(failed("open", path))?;
        let end = io::Cursor::new(format!("\n{END_MARK}\n"));
        let file: Box<dyn Read> = Box::new(file.chain(end));
        let is_tsv = path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("tsv"));
        let delimiter = if is_tsv { b'\t' } else { b',' };
        let mut reader = ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(file);
        let headers = reader.headers().map_err(|error| unreadable(path, &error))?.clone();
        if headers.iter().any(|name| name.contains(END_MARK) && name != END_MARK) {
            return Err(refused(unclosed_quote(1)));
        }
        // Spreadsheets write a byte order mark.
        let headers: Vec<&str> = headers
            .iter()
            .filter(|name| *name != END_MARK)
            .map(|name| name.trim_start_matches('\u{feff}').trim())
            .collect();
        let find = |column: &&str| {
            let found: Vec<usize> =
                (0..headers.len()).filter(|number| headers[*number] == *column).collect();
            match found[..] {
                [number] => Ok(number),
                [] => {
                    let more = if headers.len() > MAX_LISTED { ", …" } else { "" };
                    let names = headers.iter().take(MAX_LISTED);
                    let names: Vec<String> =
                        names.map(|name| name.chars().take(MAX_LISTED_CHARS).collect()).collect();
                    let names = names.join(", ");
                    Err(refused(format!("has no column {column:?}; its columns: {names}{more}")))
                }
                _ => Err(refused(format!("has several columns {column:?}"))),
            }
        };
        let positions = columns.iter().map(find).collect::<Result<_, Error>>()?;
        let width = headers.len();
        Ok(Self { path: path.to_owned(), reader, width, positions })
    }

    /// Reads the next row; false after the last one.
    pub(super) fn next(&mut self, record: &mut StringRecord) -> Result<bool, Error> {
        let read = self.reader.read_record(record);
        if !read.map_err(|error| unreadable(&self.path, &error))? {
            return Ok(false);
        }
        if record.len() == 1 && &record[0] == END_MARK {
            return Ok(false);
        }
        let line = || line_of_row(&self.path, start_of(record));
        let refused = |reason: String| Error::Source { path: self.path.clone(), reason };
        if record.iter().any(|cell| cell.contains(END_MARK)) {
            return Err(refused(unclosed_quote(line()?)));
        }
        if record.len() != self.width {
            let quote = match record.iter().any(|cell| cell.contains('\n')) {
                true => "; a cell of it has several lines: is each of its quotes closed?",
                false => "",
            };
            return Err(refused(format!(
                "line {} has {} columns, and the first line {}{quote}",
                line()?,
                record.len(),
                self.width
            )));
        }
        Ok(true)
    }
}

/// Position of a row in the file.
pub(super) fn start_of(record: &StringRecord) -> u64 {
    record.position().map_or(0, csv::Position::byte)
}

/// The line on which the row begins that starts at this position, counted from 1. Lines may end with LF, CR LF or CR; empty ones
/// before the row do not belong to it.
pub(super) fn line_of_row(path: &Path, start: u64) -> Result<usize, Error> {
    let read = || -> io::Result<usize> {
        let (mut line, mut after_cr) = (1, false);
        for (position, byte) in io::BufReader::new(File::open(path)?).bytes().enumerate() {
            let byte = byte?;
            match byte {
                b'\n' if after_cr => {}
                b'\n' | b'\r' => line += 1,
                _ if position as u64 >= start => break,
                _ => {}
            }
            after_cr = byte == b'\r';
        }
        Ok(line)
    };
    read().map_err(failed("read", path))
}

fn unclosed_quote(line: usize) -> String {
    format!(
        "line {line} opens a quote that is never closed: close it, or write \"\" for a quote inside of a quoted cell"
    )
}

/// A table that is being read.
struct OpenTable {
    table: NamedColumns,
    /// The columns of each field.
    columns: Vec<Vec<usize>>,
    /// The column that decides in which file a row is.
    by: Option<usize>,
    record: StringRecord,
    row: u64,
}

/// A row of the table.
struct Row {
    /// Its position, counted from 1.
    number: u64,
    /// Its position in the file.
    start: u64,
    /// The texts of each field.
    cells: Vec<Vec<String>>,
    /// What decides in which file it is.
    key: String,
}

impl Row {
    /// The text of a class field.
    fn class(&self, field: usize) -> &str {
        self.cells[field][0].trim()
    }
}

impl OpenTable {
    fn open(options: &TableOptions) -> Result<Self, Error> {
        let names = options.fields.iter().flat_map(|field| &field.columns).chain(&options.by);
        let names: Vec<&str> = names.map(String::as_str).collect();
        let table = NamedColumns::open(&options.from, &names)?;
        let mut positions = table.positions.iter().copied();
        let fields = options.fields.iter();
        let columns =
            fields.map(|field| positions.by_ref().take(field.columns.len()).collect()).collect();
        let by = positions.next();
        Ok(Self { table, columns, by, record: StringRecord::new(), row: 0 })
    }

    fn next(&mut self) -> Result<Option<Row>, Error> {
        if !self.table.next(&mut self.record)? {
            return Ok(None);
        }
        self.row += 1;
        let cell = |column: &usize| self.record.get(*column).unwrap_or_default().to_owned();
        let key = match &self.by {
            Some(column) => cell(column).trim().to_owned(),
            None => self.record.iter().collect::<Vec<_>>().join("\u{1f}"),
        };
        Ok(Some(Row {
            number: self.row,
            start: start_of(&self.record),
            cells: self.columns.iter().map(|columns| columns.iter().map(cell).collect()).collect(),
            key,
        }))
    }
}

fn unreadable(path: &Path, error: &csv::Error) -> Error {
    let reason = match error.kind() {
        csv::ErrorKind::Utf8 { pos, .. } => {
            let start = pos.as_ref().map_or(0, csv::Position::byte);
            match line_of_row(path, start) {
                Ok(line) => format!("line {line} is not UTF-8"),
                Err(error) => return error,
            }
        }
        _ => error.to_string(),
    };
    Error::Source { path: path.to_owned(), reason }
}
