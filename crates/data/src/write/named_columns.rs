//! Columns of a table by name: of CSV, TSV and Parquet files.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use csv::{Reader, ReaderBuilder, StringRecord};

use super::{Error, draft::failed, parquet::ParquetTable};

/// Most columns in a message.
const MAX_LISTED: usize = 10;
/// Most letters of the name of a column in a message.
const MAX_LISTED_CHARS: usize = 40;
/// How a Parquet file begins.
const PARQUET_MAGIC: &[u8; 4] = b"PAR1";
/// Between the cells of a row that are one text.
const CELL_END: &str = "\u{1f}";
/// Follows the table. If it is part of a cell, that cell has a quote which is never closed; the CSV format would let such a
/// cell reach to the end of the file.
const END_MARK: &str = "\u{1}end of the table\u{1}";

/// A cell of a table.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    /// Text, also of a number.
    Text(String),
    /// Bytes of a Parquet file that are not marked as text.
    Bytes(Vec<u8>),
    /// A list of numbers of a Parquet file, or a list of such lists; NaN where a number is missing.
    Numbers {
        /// The lists; a single one if they are not nested.
        lists: Vec<Vec<f64>>,
        /// Whether they are.
        is_nested: bool,
    },
}

/// Whether the columns that were not asked for are read too, for [`NamedColumns::row_text`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OtherColumns {
    /// They are, as far as they can be.
    Read,
    /// They are not, except by formats that always read whole rows.
    Skip,
}

impl Cell {
    /// Its text without spaces around it, or what it is instead.
    pub(super) fn text(&self) -> Result<&str, &'static str> {
        match self {
            Self::Text(text) => Ok(text.trim()),
            Self::Bytes(bytes) => {
                str::from_utf8(bytes).map(str::trim).map_err(|_| "has bytes that are no text")
            }
            Self::Numbers { .. } => Err("has lists of numbers, which only array takes"),
        }
    }

    /// Bytes in memory, about.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            Self::Numbers { lists, .. } => lists.iter().map(|list| 8 * list.len() + 24).sum(),
        }
    }
}

/// Where a row is.
#[derive(Clone, Copy, Debug)]
pub(super) enum RowPlace {
    /// It starts at this byte of a text.
    Byte(u64),
    /// It is this row, counted from 1.
    Row(u64),
}

impl RowPlace {
    /// An error about this row.
    pub(super) fn error(self, path: &Path, reason: String) -> Error {
        let path = path.to_owned();
        match self {
            Self::Row(row) => Error::Row { path, row, reason },
            Self::Byte(start) => match line_of_row(&path, start) {
                Ok(line) => Error::Line { path, line, reason },
                Err(error) => error,
            },
        }
    }
}

/// A table whose columns are known.
pub(super) struct NamedColumns {
    path: PathBuf,
    table: Table,
}

enum Table {
    Text(TextTable),
    Parquet { table: Box<ParquetTable>, row: u64, cells: Vec<Cell> },
}

/// A CSV or TSV file whose first line is read.
struct TextTable {
    reader: Reader<Box<dyn Read>>,
    /// Number of columns of the first line.
    width: usize,
    /// The positions of the columns that were asked for.
    positions: Vec<usize>,
    record: StringRecord,
}

/// Names of columns, in their order.
pub(super) struct ColumnNames(pub(super) Vec<String>);

impl NamedColumns {
    /// Opens a table to read these columns.
    pub(super) fn open(path: &Path, columns: &[&str], others: OtherColumns) -> Result<Self, Error> {
        let refused = |reason: String| Error::Source { path: path.to_owned(), reason };
        // Opening a pipe would wait for a writer.
        if fs::metadata(path).is_ok_and(|file| !file.is_file()) {
            return Err(refused("is not a regular file; it is read more than once".to_owned()));
        }
        let mut file = File::open(path).map_err(failed("open", path))?;
        let table = match is_parquet(&mut file, path).map_err(failed("read", path))? {
            true => {
                let table = Box::new(ParquetTable::open(path, file, columns, others)?);
                Table::Parquet { table, row: 0, cells: Vec::new() }
            }
            false => Table::Text(TextTable::open(path, file, columns)?),
        };
        Ok(Self { path: path.to_owned(), table })
    }

    /// Reads the next row; false after the last one.
    pub(super) fn next(&mut self) -> Result<bool, Error> {
        match &mut self.table {
            Table::Text(table) => table.next(&self.path),
            Table::Parquet { table, row, cells } => {
                let refused = |reason: String| Error::Source { path: self.path.clone(), reason };
                let Some(next) = table.next().map_err(refused)? else { return Ok(false) };
                (*row, *cells) = (*row + 1, next);
                Ok(true)
            }
        }
    }

    /// The row's cell in a column that was asked for, by its number.
    pub(super) fn cell(&self, column: usize) -> Cell {
        match &self.table {
            Table::Text(table) => {
                let position = table.positions[column];
                Cell::Text(table.record.get(position).unwrap_or_default().to_owned())
            }
            Table::Parquet { table, cells, .. } => cells[table.asked[column]].clone(),
        }
    }

    /// The row as one text: all cells that were read.
    pub(super) fn row_text(&self) -> String {
        match &self.table {
            Table::Text(table) => table.record.iter().collect::<Vec<_>>().join(CELL_END),
            Table::Parquet { cells, .. } => {
                let text = |cell: &Cell| match cell {
                    Cell::Text(text) => text.clone(),
                    Cell::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                    Cell::Numbers { lists, .. } => format!("{lists:?}"),
                };
                cells.iter().map(text).collect::<Vec<_>>().join(CELL_END)
            }
        }
    }

    /// Where the row is.
    pub(super) fn place(&self) -> RowPlace {
        match &self.table {
            Table::Text(table) => RowPlace::Byte(start_of(&table.record)),
            Table::Parquet { row, .. } => RowPlace::Row(*row),
        }
    }
}

/// Whether a file is Parquet; leaves it at its start. A name is a hint where the end is cut off: a text could begin so too.
fn is_parquet(file: &mut File, path: &Path) -> io::Result<bool> {
    let is_named = path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("parquet"));
    let (mut start, mut end) = ([0; PARQUET_MAGIC.len()], [0; PARQUET_MAGIC.len()]);
    if file.metadata()?.len() >= 2 * start.len() as u64 {
        file.read_exact(&mut start)?;
        file.seek(SeekFrom::End(-(end.len() as i64)))?;
        file.read_exact(&mut end)?;
        file.rewind()?;
    }
    Ok(is_named || start == *PARQUET_MAGIC && end == *PARQUET_MAGIC)
}

impl TextTable {
    fn open(path: &Path, file: File, columns: &[&str]) -> Result<Self, Error> {
        let refused = |reason: String| Error::Source { path: path.to_owned(), reason };
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
        let headers = headers.iter().filter(|name| *name != END_MARK);
        let headers = headers.map(|name| name.trim_start_matches('\u{feff}').trim().to_owned());
        let headers = ColumnNames(headers.collect());
        let positions = columns.iter().map(|column| headers.position(column));
        let positions = positions.collect::<Result<_, _>>().map_err(refused)?;
        Ok(Self { reader, width: headers.0.len(), positions, record: StringRecord::new() })
    }

    fn next(&mut self, path: &Path) -> Result<bool, Error> {
        let Self { reader, width, record, .. } = self;
        if !reader.read_record(record).map_err(|error| unreadable(path, &error))? {
            return Ok(false);
        }
        if record.len() == 1 && &record[0] == END_MARK {
            return Ok(false);
        }
        let line = || line_of_row(path, start_of(record));
        let refused = |reason: String| Error::Source { path: path.to_owned(), reason };
        if record.iter().any(|cell| cell.contains(END_MARK)) {
            return Err(refused(unclosed_quote(line()?)));
        }
        if record.len() != *width {
            let quote = match record.iter().any(|cell| cell.contains('\n')) {
                true => "; a cell of it has several lines: is each of its quotes closed?",
                false => "",
            };
            return Err(refused(format!(
                "line {} has {} columns, and the first line {width}{quote}",
                line()?,
                record.len(),
            )));
        }
        Ok(true)
    }
}

impl ColumnNames {
    /// The position of a column.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub(super) fn position(&self, column: &str) -> Result<usize, String> {
        let found: Vec<usize> =
            (0..self.0.len()).filter(|number| self.0[*number] == column).collect();
        match found[..] {
            [number] => Ok(number),
            [] => {
                let more = if self.0.len() > MAX_LISTED { ", …" } else { "" };
                let names = self.0.iter().take(MAX_LISTED);
                let names: Vec<String> =
                    names.map(|name| name.chars().take(MAX_LISTED_CHARS).collect()).collect();
                let names = names.join(", ");
                Err(format!("has no column {column:?}; its columns: {names}{more}"))
            }
            _ => Err(format!("has several columns {column:?}")),
        }
    }
}

/// Position of a row in the file.
fn start_of(record: &StringRecord) -> u64 {
    record.position().map_or(0, csv::Position::byte)
}

/// The line on which the row begins that starts at this position, counted from 1. Lines may end with LF, CR LF or CR; empty ones
/// before the row do not belong to it.
fn line_of_row(path: &Path, start: u64) -> Result<usize, Error> {
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
