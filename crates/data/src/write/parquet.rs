//! Parquet files as tables.
//!
//! Columns are read one by one, a few rows at a time. A column of a group has a name with dots, such as `image.bytes`. A list
//! of numbers is one cell, however deep it is nested.

use std::{
    fs::File,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use half::f16;
use parquet::{
    basic::{ConvertedType, LogicalType, Type as Physical},
    column::reader::{ColumnReader, ColumnReaderImpl},
    data_type::{ByteArray, DataType, FixedLenByteArray},
    errors::ParquetError,
    file::reader::{FileReader, SerializedFileReader},
    schema::types::ColumnDescriptor,
};

use super::{
    Error,
    named_columns::{Cell, ColumnNames},
};

/// Rows that are read from all columns before they are used. An image may have some megabytes.
const ROWS_AT_ONCE: usize = 32;
/// Names of the groups by which writers mark a list and its elements.
const LIST_PARTS: [&str; 5] = ["list", "element", "item", "array", "bag"];

/// The columns of a Parquet file that were asked for.
pub(super) struct ParquetTable {
    file: SerializedFileReader<File>,
    /// The columns that are read, in the file's order.
    columns: Vec<(usize, CellKind)>,
    /// Which of them were asked for.
    pub(super) asked: Vec<usize>,
    next_group: usize,
    /// Readers of the current group of rows.
    readers: Vec<ColumnReader>,
    left_in_group: u64,
    /// The rows that were read, in reverse order.
    rows: Vec<Vec<Cell>>,
}

/// What a column has in a row.
#[derive(Clone, Copy, Debug)]
struct CellKind {
    value: ValueKind,
    is_list: bool,
    /// The definition level of a value that is there.
    present: i16,
}

#[derive(Clone, Copy, Debug)]
enum ValueKind {
    Bool,
    Signed,
    Unsigned,
    Float,
    Float16,
    Text,
    Bytes,
}

impl ParquetTable {
    /// Opens a file to read the columns with these names, and with `all` also the others, except those of other kinds.
    pub(super) fn open(path: &Path, file: File, names: &[&str], all: bool) -> Result<Self, Error> {
        let refused = |reason: String| Error::Source { path: path.to_owned(), reason };
        let file = guarded(|| SerializedFileReader::new(file).map_err(|error| unreadable(&error)));
        let file = file.map_err(refused)?;
        let schema = file.metadata().file_metadata().schema_descr();
        let found = schema.columns().iter().map(|column| name_of(column)).collect();
        let found = ColumnNames(found);
        let asked = names.iter().map(|name| found.position(name)).collect::<Result<Vec<_>, _>>();
        let asked = asked.map_err(refused)?;
        let mut columns = Vec::new();
        for (position, name) in found.0.iter().enumerate() {
            let is_asked = asked.contains(&position);
            match CellKind::of(&schema.column(position)) {
                Ok(kind) if is_asked || all => columns.push((position, kind)),
                Err(reason) if is_asked => {
                    return Err(refused(format!("column {name:?} {reason}")));
                }
                Ok(_) | Err(_) => {}
            }
        }
        let place = |position: &usize| columns.iter().position(|(column, _)| column == position);
        let asked = asked.iter().filter_map(place).collect();
        let (readers, rows) = (Vec::new(), Vec::new());
        Ok(Self { file, columns, asked, next_group: 0, readers, left_in_group: 0, rows })
    }

    /// The cells of the next row, or `None` after the last one.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub(super) fn next(&mut self) -> Result<Option<Vec<Cell>>, String> {
        while self.rows.is_empty() {
            if self.left_in_group == 0 {
                let is_open = guarded(|| self.open_group().map_err(|error| unreadable(&error)));
                if !is_open? {
                    return Ok(None);
                }
            }
            guarded(|| self.read_rows())?;
        }
        Ok(self.rows.pop())
    }

    /// Goes on with the next group of rows; false after the last one.
    fn open_group(&mut self) -> Result<bool, ParquetError> {
        if self.next_group == self.file.num_row_groups() {
            return Ok(false);
        }
        let group = self.file.get_row_group(self.next_group)?;
        let readers = self.columns.iter().map(|(column, _)| group.get_column_reader(*column));
        self.readers = readers.collect::<Result<_, _>>()?;
        self.left_in_group = u64::try_from(group.metadata().num_rows()).unwrap_or_default();
        self.next_group += 1;
        Ok(true)
    }

    fn read_rows(&mut self) -> Result<(), String> {
        let count = self.left_in_group.min(ROWS_AT_ONCE as u64) as usize;
        let mut rows: Vec<Vec<Cell>> = (0..count).map(|_| Vec::new()).collect();
        for (reader, (_, kind)) in self.readers.iter_mut().zip(&self.columns) {
            let cells = kind.read(reader, count)?;
            if cells.len() != count {
                return Err("has columns of different lengths: write it again".to_owned());
            }
            for (row, cell) in rows.iter_mut().zip(cells) {
                row.push(cell);
            }
        }
        rows.reverse();
        self.rows = rows;
        self.left_in_group -= count as u64;
        Ok(())
    }
}

/// The name of a column without the parts that mark lists.
fn name_of(column: &ColumnDescriptor) -> String {
    let parts = column.path().parts();
    let is_list = column.max_rep_level() > 0;
    let keep = |(number, part): &(usize, &String)| {
        *number == 0 || !is_list || !LIST_PARTS.contains(&part.as_str())
    };
    let parts = parts.iter().enumerate().filter(keep).map(|(_, part)| part.as_str());
    parts.collect::<Vec<_>>().join(".")
}

fn unreadable(error: &ParquetError) -> String {
    format!("cannot be read as Parquet: {error}")
}

/// The crate panics at some damaged files.
fn guarded<T>(read: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err("is damaged: write it again".to_owned()))
}

impl CellKind {
    /// What a column has, or why it cannot be used.
    fn of(column: &ColumnDescriptor) -> Result<Self, &'static str> {
        let logical = column.logical_type_ref();
        if let Some(LogicalType::Date | LogicalType::Time { .. } | LogicalType::Timestamp { .. }) =
            logical
        {
            return Err(TIME);
        }
        let value = match (column.physical_type(), column.converted_type()) {
            (_, ConvertedType::DECIMAL) => {
                return Err("has decimals: convert it to floats");
            }
            (
                _,
                ConvertedType::DATE
                | ConvertedType::TIME_MILLIS
                | ConvertedType::TIME_MICROS
                | ConvertedType::TIMESTAMP_MILLIS
                | ConvertedType::TIMESTAMP_MICROS
                | ConvertedType::INTERVAL,
            )
            | (Physical::INT96, _) => return Err(TIME),
            (Physical::BOOLEAN, _) => ValueKind::Bool,
            (
                Physical::INT32 | Physical::INT64,
                ConvertedType::UINT_8
                | ConvertedType::UINT_16
                | ConvertedType::UINT_32
                | ConvertedType::UINT_64,
            ) => ValueKind::Unsigned,
            (Physical::INT32 | Physical::INT64, _) => ValueKind::Signed,
            (Physical::FLOAT | Physical::DOUBLE, _) => ValueKind::Float,
            (
                Physical::BYTE_ARRAY,
                ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON,
            ) => ValueKind::Text,
            (Physical::FIXED_LEN_BYTE_ARRAY, _) if logical == Some(&LogicalType::Float16) => {
                ValueKind::Float16
            }
            (Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY, _) => ValueKind::Bytes,
        };
        let is_list = column.max_rep_level() > 0;
        if is_list && matches!(value, ValueKind::Bool | ValueKind::Text | ValueKind::Bytes) {
            return Err("has lists, and only lists of numbers can be used");
        }
        Ok(Self { value, is_list, present: column.max_def_level() })
    }

    /// The next cells of a column.
    fn read(self, reader: &mut ColumnReader, count: usize) -> Result<Vec<Cell>, String> {
        let bytes = |value: &[u8]| self.of_bytes(value);
        match reader {
            ColumnReader::BoolColumnReader(reader) => {
                self.cells(reader, count, |value| Ok(Cell::Text(value.to_string())))
            }
            ColumnReader::Int32ColumnReader(reader) => self.cells(reader, count, |value| {
                Ok(Cell::Text(match self.value {
                    ValueKind::Unsigned => value.cast_unsigned().to_string(),
                    _ => value.to_string(),
                }))
            }),
            ColumnReader::Int64ColumnReader(reader) => self.cells(reader, count, |value| {
                Ok(Cell::Text(match self.value {
                    ValueKind::Unsigned => value.cast_unsigned().to_string(),
                    _ => value.to_string(),
                }))
            }),
            ColumnReader::Int96ColumnReader(_) => Err(TIME.to_owned()),
            ColumnReader::FloatColumnReader(reader) => self.cells(reader, count, |value| {
                // The same number as in Python, not its shortest text.
                Ok(Cell::Text(f64::from(*value).to_string()))
            }),
            ColumnReader::DoubleColumnReader(reader) => {
                self.cells(reader, count, |value| Ok(Cell::Text(value.to_string())))
            }
            ColumnReader::ByteArrayColumnReader(reader) => {
                self.cells(reader, count, |value: &ByteArray| bytes(value.data()))
            }
            ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                self.cells(reader, count, |value: &FixedLenByteArray| bytes(value.data()))
            }
        }
    }

    fn of_bytes(self, value: &[u8]) -> Result<Cell, String> {
        match (self.value, value) {
            (ValueKind::Text, _) => match str::from_utf8(value) {
                Ok(text) => Ok(Cell::Text(text.to_owned())),
                Err(_) => Err("has a text that is not UTF-8: write it again".to_owned()),
            },
            (ValueKind::Float16, [low, high]) => {
                Ok(Cell::Text(f16::from_le_bytes([*low, *high]).to_f64().to_string()))
            }
            (ValueKind::Float16, _) => Err("has a float16 without two bytes".to_owned()),
            _ => Ok(Cell::Bytes(value.to_owned())),
        }
    }

    fn cells<T: DataType>(
        self,
        reader: &mut ColumnReaderImpl<T>,
        count: usize,
        convert: impl Fn(&T::T) -> Result<Cell, String>,
    ) -> Result<Vec<Cell>, String> {
        let (mut values, mut defined, mut repeated) = (Vec::new(), Vec::new(), Vec::new());
        let mut read = 0;
        while read < count {
            let records = reader
                .read_records(count - read, Some(&mut defined), Some(&mut repeated), &mut values)
                .map_err(|error| unreadable(&error))?
                .0;
            if records == 0 {
                break;
            }
            read += records;
        }
        // A column whose values are all there has no levels.
        if self.present == 0 {
            return values.iter().map(convert).collect();
        }
        let mut values = values.iter();
        let mut cells: Vec<Cell> = Vec::with_capacity(count);
        for (place, level) in defined.iter().enumerate() {
            let value = match *level == self.present {
                true => values.next().map(&convert).transpose()?,
                false => None,
            };
            if !self.is_list {
                cells.push(value.unwrap_or(Cell::Text(String::new())));
                continue;
            }
            // An empty list has a level too.
            let continues = repeated.get(place).is_some_and(|level| *level > 0);
            if !continues {
                cells.push(Cell::Numbers(Vec::new()));
            }
            if let Some(Cell::Numbers(numbers)) = cells.last_mut()
                && (continues || value.is_some())
            {
                let number = value.and_then(|value| value.text().ok()?.parse().ok());
                numbers.push(number.unwrap_or(f64::NAN));
            }
        }
        Ok(cells)
    }
}

const TIME: &str = "has dates or times: convert it to numbers or to texts";
