//! Tables (CSV, TSV) as data sets: columns become fields.
//!
//! The table is read twice: first to check every value, to find the classes and to count the samples of each set, and then to
//! write them. So a table with a bad value leaves no file, and memory does not grow with it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use csv::{Reader, ReaderBuilder, StringRecord};

use super::{
    Array, DEFAULT_PAGE_BYTES, Error, Field, FieldKind, FinishedFile, KeySplit, Value, Writer,
    draft::{Draft, failed},
};
use crate::with_suffix;

/// Most rows that are listed as left out, and most columns in a message.
const MAX_LISTED: usize = 10;
/// Most letters of the name of a column in a message.
const MAX_LISTED_CHARS: usize = 40;

/// A field and the columns that it is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableField {
    name: String,
    kind: ColumnKind,
    columns: Vec<String>,
}

/// How the text of a column becomes a value.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ColumnKind {
    /// A whole number.
    Int,
    /// A number that is finite.
    Float,
    /// The position of the text among the sorted texts of the column.
    Class,
    /// The bytes of the text.
    Text,
    /// Finite numbers of several columns, f32 of shape (columns).
    Floats,
    /// Positions in the alphabet, from 1 on, u8 of shape (length); 0 behind the end of the text.
    Letters { alphabet: Vec<char>, length: usize },
    /// f32 of shape (letters of the alphabet, length): 1 where the text has this letter.
    OneHot { alphabet: Vec<char>, length: usize },
}

const KINDS: &str =
    "int, float, class, text, floats, letters(ALPHABET,LENGTH) or onehot(ALPHABET,LENGTH)";

/// `NAME=KIND`, or `NAME=KIND:COLUMN,COLUMN` if the columns have other names.
impl std::str::FromStr for TableField {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((name, rest)) = text.split_once('=') else {
            return Err(format!("write NAME=KIND or NAME=KIND:COLUMN; KIND is {KINDS}"));
        };
        let (kind, columns) = match rest.split_once(':') {
            Some((kind, columns)) => {
                (kind, columns.split(',').map(|name| name.trim().to_owned()).collect())
            }
            None => (rest, vec![name.to_owned()]),
        };
        let kind = kind.trim().parse::<ColumnKind>()?;
        if columns.len() != 1 && kind != ColumnKind::Floats {
            return Err("only floats takes several columns".to_owned());
        }
        if kind == ColumnKind::Class && name.contains('/') {
            return Err(
                "the name of a class field is part of a file's name, so it has no /".to_owned()
            );
        }
        Ok(Self { name: name.to_owned(), kind, columns })
    }
}

impl std::str::FromStr for ColumnKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "int" => return Ok(Self::Int),
            "float" => return Ok(Self::Float),
            "class" => return Ok(Self::Class),
            "text" => return Ok(Self::Text),
            "floats" => return Ok(Self::Floats),
            _ => {}
        }
        let unknown = || format!("{text:?} is no kind: take {KINDS}");
        let (word, inside) =
            text.strip_suffix(')').and_then(|text| text.split_once('(')).ok_or_else(unknown)?;
        let (letters, length) = inside.rsplit_once(',').ok_or_else(unknown)?;
        let length = length.trim().parse().ok().filter(|length| *length > 0);
        let length: usize =
            length.ok_or_else(|| format!("{text}: LENGTH is a whole number, at least 1"))?;
        let alphabet: Vec<char> = letters.trim().chars().collect();
        let again = (1..alphabet.len())
            .find(|position| alphabet[..*position].contains(&alphabet[*position]));
        if let Some(again) = again {
            return Err(format!("{text}: {:?} is there twice", alphabet[again]));
        }
        if alphabet.is_empty() || alphabet.len() > 255 {
            return Err(format!("{text}: an alphabet has 1 to 255 letters"));
        }
        match word {
            "letters" => Ok(Self::Letters { alphabet, length }),
            "onehot" => Ok(Self::OneHot { alphabet, length }),
            _ => Err(unknown()),
        }
    }
}

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
/// one, a class has no row, or a file cannot be written.
pub fn write_table(
    options: &TableOptions,
    mut progress: impl FnMut(u64, Option<u64>),
) -> Result<WrittenTable, Error> {
    let lists: Vec<(String, PathBuf)> = options.class_lists();
    let list_paths: Vec<PathBuf> = lists.iter().map(|(_, path)| path.clone()).collect();
    super::check_targets(&options.to, &options.others, &list_paths, &options.from)?;
    let split = KeySplit::new(options.others.iter().map(|(_, share)| *share));
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
    let mut good = 0;
    let changed =
        || options.refused("has changed while it was read: is it still being written?".to_owned());
    while let Some(row) = table.next()? {
        if row.number > found.read {
            return Err(changed());
        }
        progress(found.read + row.number, Some(2 * found.read));
        // Bad rows were counted before.
        if let Ok(values) = options.values(&row, Some(&names)) {
            good += 1;
            let values: Vec<Value<'_>> = values.iter().map(OwnedValue::borrowed).collect();
            writers[split.set(&row.key)].push(&values)?;
        }
    }
    if good != found.read - found.bad {
        return Err(changed());
    }
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
    complete.into_iter().try_for_each(Draft::publish)?;
    written.classes = lists;
    Ok(written)
}

impl TableOptions {
    /// The class fields, and the files with the names of their classes.
    fn class_lists(&self) -> Vec<(String, PathBuf)> {
        let classes = self.fields.iter().filter(|field| field.kind == ColumnKind::Class);
        let list = |field: &TableField| {
            let path = with_suffix(&self.to, &format!(".{}.classes.txt", field.name));
            (field.name.clone(), path)
        };
        classes.map(list).collect()
    }

    fn paths(&self) -> Vec<PathBuf> {
        let others = self.others.iter().map(|(path, _)| path.clone());
        std::iter::once(self.to.clone()).chain(others).collect()
    }

    /// The values of a row, or what is wrong with it. Without the names of the classes, which are known once all rows were
    /// read, all classes are 0.
    fn values(
        &self,
        row: &Row,
        classes: Option<&[Vec<String>]>,
    ) -> Result<Vec<OwnedValue>, String> {
        if let Some(by) = &self.by
            && row.key.is_empty()
        {
            return Err(format!("column {by:?} is empty"));
        }
        let fields = self.fields.iter().zip(&row.cells).enumerate();
        let value = |(number, (field, cells)): (usize, (&TableField, &Vec<String>))| {
            field.value(cells, classes.map(|classes| classes[number].as_slice()))
        };
        fields.map(value).collect()
    }

    fn refused(&self, reason: String) -> Error {
        Error::Source { path: self.from.clone(), reason }
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

    fn add(&mut self, options: &TableOptions, split: &KeySplit, row: &Row) -> Result<(), Error> {
        self.read += 1;
        if let Err(reason) = options.values(row, None) {
            let line = row.line as usize;
            let error = Error::Line { path: options.from.clone(), line, reason };
            if !options.skips_bad_rows {
                return Err(error);
            }
            self.bad += 1;
            if self.first_bad.len() < MAX_LISTED {
                self.first_bad.push(error.to_string());
            }
            return Ok(());
        }
        let set = split.set(&row.key);
        self.rows[set] += 1;
        let sets = self.rows.len();
        let fields = options.fields.iter().zip(&row.cells).zip(&mut self.classes);
        for ((field, cells), classes) in fields {
            if field.kind == ColumnKind::Class {
                let name = cells[0].trim().to_owned();
                let rows = classes.entry(name).or_insert_with(|| vec![0; sets]);
                rows[set] += 1;
            }
        }
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
                "no row is for {}: give another share, or another --by if there are only a few values",
                paths[empty].display()
            )));
        }
        for (field, classes) in options.fields.iter().zip(&self.classes) {
            if let Some((class, _)) = classes.iter().find(|(_, rows)| rows[0] == 0) {
                return Err(options.refused(format!(
                    "class {class:?} of field {:?} has no row in {}: give smaller shares, or another --by",
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
        Ok(Self { path: path.to_owned(), reader, width: headers.len(), positions })
    }

    /// Reads the next row; false after the last one.
    pub(super) fn next(&mut self, record: &mut StringRecord) -> Result<bool, Error> {
        let read = self.reader.read_record(record);
        read.map_err(|error| unreadable(&self.path, &error))?;
        if record.len() == 1 && &record[0] == END_MARK {
            return Ok(false);
        }
        let line = record.position().map_or(0, csv::Position::line);
        let refused = |reason: String| Error::Source { path: self.path.clone(), reason };
        if record.iter().any(|cell| cell.contains(END_MARK)) {
            return Err(refused(unclosed_quote(line)));
        }
        if record.len() != self.width {
            let quote = match record.iter().any(|cell| cell.contains('\n')) {
                true => "; a cell of it has several lines: is each of its quotes closed?",
                false => "",
            };
            return Err(refused(format!(
                "line {line} has {} columns, and the first line {}{quote}",
                record.len(),
                self.width
            )));
        }
        Ok(true)
    }
}

fn unclosed_quote(line: u64) -> String {
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
    /// The line of the file on which it begins, counted from 1.
    line: u64,
    /// The texts of each field.
    cells: Vec<Vec<String>>,
    /// What decides in which file it is.
    key: String,
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
            line: self.record.position().map_or(0, csv::Position::line),
            cells: self.columns.iter().map(|columns| columns.iter().map(cell).collect()).collect(),
            key,
        }))
    }
}

fn unreadable(path: &Path, error: &csv::Error) -> Error {
    let reason = match error.kind() {
        csv::ErrorKind::Utf8 { pos, .. } => {
            let line = pos.as_ref().map_or(0, csv::Position::line);
            format!("line {line} is not UTF-8")
        }
        _ => error.to_string(),
    };
    Error::Source { path: path.to_owned(), reason }
}

/// A value of a field.
#[derive(Clone, Debug, PartialEq)]
enum OwnedValue {
    Int(i64),
    Float(f64),
    Bytes(Vec<u8>),
    Array(Vec<u8>),
}

impl OwnedValue {
    fn borrowed(&self) -> Value<'_> {
        match self {
            Self::Int(value) => Value::Int(*value),
            Self::Float(value) => Value::Float(*value),
            Self::Bytes(bytes) => Value::Bytes(bytes),
            Self::Array(bytes) => Value::Array(bytes),
        }
    }
}

impl TableField {
    fn field(&self) -> Field {
        let array = |shape: &[usize], dtype: &str| {
            let shape = shape.iter().map(|axis| *axis as u64).collect();
            FieldKind::NdArray(Array { shape, dtype: dtype.to_owned() })
        };
        let kind = match &self.kind {
            ColumnKind::Int | ColumnKind::Class => FieldKind::Int,
            ColumnKind::Float => FieldKind::Float,
            ColumnKind::Text => FieldKind::Bytes,
            ColumnKind::Floats => array(&[self.columns.len()], "<f4"),
            ColumnKind::Letters { length, .. } => array(&[*length], "|u1"),
            ColumnKind::OneHot { alphabet, length } => array(&[alphabet.len(), *length], "<f4"),
        };
        Field::new(self.name.clone(), kind)
    }

    /// The text of its only column.
    fn text<'a>(&self, cells: &'a [String]) -> Result<&'a str, String> {
        match cells[0].trim() {
            "" => Err(format!("column {:?} is empty", self.columns[0])),
            text => Ok(text),
        }
    }

    /// The value of a row. `classes` are the sorted texts of the column, once they are known.
    fn value(&self, cells: &[String], classes: Option<&[String]>) -> Result<OwnedValue, String> {
        Ok(match &self.kind {
            ColumnKind::Int => {
                let text = self.text(cells)?;
                OwnedValue::Int(text.parse().map_err(|_| self.wrong(0, text, "a whole number"))?)
            }
            ColumnKind::Float => OwnedValue::Float(self.number(cells, 0)?),
            ColumnKind::Class => {
                let text = self.text(cells)?;
                if text.contains(['\n', '\r']) {
                    return Err(format!("column {:?}: a class has a line break", self.columns[0]));
                }
                let known = classes.map_or(Ok(0), |classes| {
                    classes.binary_search_by(|class| class.as_str().cmp(text))
                });
                OwnedValue::Int(known.map_err(|_| format!("{text:?} is a new class"))? as i64)
            }
            ColumnKind::Text => OwnedValue::Bytes(cells[0].clone().into_bytes()),
            ColumnKind::Floats => {
                let numbers = (0..cells.len()).map(|column| self.number(cells, column));
                let numbers: Vec<f64> = numbers.collect::<Result<_, _>>()?;
                OwnedValue::Array(
                    numbers.iter().flat_map(|number| (*number as f32).to_le_bytes()).collect(),
                )
            }
            ColumnKind::Letters { alphabet, length } => {
                let mut array = vec![0_u8; *length];
                for (place, letter) in array.iter_mut().zip(self.letters(cells, alphabet, *length)?)
                {
                    *place = letter as u8 + 1;
                }
                OwnedValue::Array(array)
            }
            ColumnKind::OneHot { alphabet, length } => {
                let mut array = vec![0_f32; alphabet.len() * length];
                for (place, letter) in
                    self.letters(cells, alphabet, *length)?.into_iter().enumerate()
                {
                    array[letter * length + place] = 1.0;
                }
                OwnedValue::Array(array.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
        })
    }

    fn number(&self, cells: &[String], column: usize) -> Result<f64, String> {
        let text = cells[column].trim();
        if text.is_empty() {
            return Err(format!("column {:?} is empty", self.columns[column]));
        }
        let number = text.parse::<f64>().ok().filter(|number| match self.kind {
            ColumnKind::Floats => (*number as f32).is_finite(),
            _ => number.is_finite(),
        });
        number.ok_or_else(|| self.wrong(column, text, "a finite number"))
    }

    /// Positions in the alphabet.
    fn letters(
        &self,
        cells: &[String],
        alphabet: &[char],
        length: usize,
    ) -> Result<Vec<usize>, String> {
        let text = self.text(cells)?;
        let positions = text.chars().map(|letter| {
            let position = alphabet.iter().position(|other| *other == letter);
            position.ok_or_else(|| {
                format!("column {:?} has {letter:?}, which is not in the alphabet", self.columns[0])
            })
        });
        let positions: Vec<usize> = positions.collect::<Result<_, _>>()?;
        match positions.len() {
            count if count > length => Err(format!(
                "column {:?} has {count} letters, and the field {length}",
                self.columns[0]
            )),
            _ => Ok(positions),
        }
    }

    fn wrong(&self, column: usize, text: &str, expected: &str) -> String {
        let start: String = text.chars().take(40).collect();
        format!("column {:?}: {start:?} is not {expected}", self.columns[column])
    }
}
