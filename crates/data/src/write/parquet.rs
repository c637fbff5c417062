//! Parquet files as tables.
//!
//! Columns are read one by one, a few rows at a time. A column of a group has a name with dots, such as `image.bytes`. A list
//! of numbers is one cell; the groups that mark a list and its elements are no part of its name.

use std::{
    fs::File,
    mem,
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
    schema::types::{ColumnDescriptor, Type},
};

use super::{
    Error,
    named_columns::{Cell, ColumnNames, OtherColumns},
};

/// Rows that are read from all columns before they are used. An image may have some megabytes.
const ROWS_AT_ONCE: usize = 32;
const TIME: &str = "has dates or times: convert it to numbers or to texts";

/// The columns of a Parquet file that were asked for.
pub(super) struct ParquetTable {
    file: SerializedFileReader<File>,
    /// The columns that are read, in the file's order.
    columns: Vec<Column>,
    /// Which of them were asked for.
    pub(super) asked: Vec<usize>,
    next_group: usize,
    /// Readers of the current group of rows.
    readers: Vec<ColumnReader>,
    left_in_group: u64,
    /// The rows that were read, in reverse order.
    rows: Vec<Vec<Cell>>,
}

/// A column that is read.
struct Column {
    name: String,
    /// Its number in the file.
    number: usize,
    kind: ValueKind,
    levels: Levels,
}

/// How a column says which values are there (<https://parquet.apache.org/docs/file-format/nestedencoding/>).
#[derive(Clone, Copy, Debug)]
struct Levels {
    /// The definition level of a value that is there.
    present: i16,
    /// The least one of an element of a list, which may be null.
    element: i16,
    /// How deep lists are nested: 0 for single values, 1 for lists, 2 for lists of lists.
    depth: i16,
}

/// What the values of a column are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Opens a file to read the columns with these names.
    pub(super) fn open(
        path: &Path,
        file: File,
        names: &[&str],
        others: OtherColumns,
    ) -> Result<Self, Error> {
        let refused = |reason: String| Error::Source { path: path.to_owned(), reason };
        let file = guarded(|| SerializedFileReader::new(file).map_err(|error| unreadable(&error)));
        let file = file.map_err(refused)?;
        check_rows(&file).map_err(refused)?;
        let schema = file.metadata().file_metadata().schema_descr();
        let mut found = Vec::new();
        let fields = schema.root_schema().get_fields().iter();
        fields.for_each(|field| column_names(field, field.name().to_owned(), &mut found));
        let found = ColumnNames(found);
        let asked = names.iter().map(|name| found.position(name)).collect::<Result<Vec<_>, _>>();
        let asked = asked.map_err(refused)?;
        let mut columns = Vec::new();
        for (number, (name, column)) in found.0.into_iter().zip(schema.columns()).enumerate() {
            let is_asked = asked.contains(&number);
            let read = match ValueKind::of(column) {
                // Bytes tell rows apart too.
                Ok(ValueKind::Text) if !is_asked => Ok(ValueKind::Bytes),
                kind => kind,
            };
            match read {
                Ok(kind) if is_asked || others == OtherColumns::Read => {
                    columns.push(Column { name, number, kind, levels: Levels::of(column) });
                }
                Err(reason) if is_asked => {
                    return Err(refused(format!("column {name:?} {reason}")));
                }
                Ok(_) | Err(_) => {}
            }
        }
        let place = |number: &usize| columns.iter().position(|column| column.number == *number);
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
            } else {
                self.read_rows()?;
            }
        }
        Ok(self.rows.pop())
    }

    /// Opens the next group of rows; false after the last one.
    fn open_group(&mut self) -> Result<bool, ParquetError> {
        if self.next_group == self.file.num_row_groups() {
            return Ok(false);
        }
        let group = self.file.get_row_group(self.next_group)?;
        let readers = self.columns.iter().map(|column| group.get_column_reader(column.number));
        self.readers = readers.collect::<Result<_, _>>()?;
        self.left_in_group = u64::try_from(group.metadata().num_rows()).unwrap_or_default();
        self.next_group += 1;
        Ok(true)
    }

    fn read_rows(&mut self) -> Result<(), String> {
        let count = self.left_in_group.min(ROWS_AT_ONCE as u64) as usize;
        self.left_in_group -= count as u64;
        let is_end = self.left_in_group == 0;
        let mut rows: Vec<Vec<Cell>> = (0..count).map(|_| Vec::new()).collect();
        for (reader, column) in self.readers.iter_mut().zip(&self.columns) {
            let read = guarded(|| {
                let cells = column.read(reader, count)?;
                let is_over = !is_end || column.read(reader, 1)?.is_empty();
                let is_whole = cells.len() == count && is_over;
                let problem = "has another number of rows than the file: write it again";
                is_whole.then_some(cells).ok_or_else(|| problem.to_owned())
            });
            let cells = read.map_err(|problem| format!("column {:?} {problem}", column.name))?;
            for (row, cell) in rows.iter_mut().zip(cells) {
                row.push(cell);
            }
        }
        rows.reverse();
        self.rows = rows;
        Ok(())
    }
}

/// Checks that the groups of rows are those of the whole file.
fn check_rows(file: &SerializedFileReader<File>) -> Result<(), String> {
    let metadata = file.metadata();
    let counts = metadata.row_groups().iter().map(|group| u64::try_from(group.num_rows()).ok());
    let sum = counts.sum::<Option<u64>>();
    match sum.is_some() && sum == u64::try_from(metadata.file_metadata().num_rows()).ok() {
        true => Ok(()),
        false => {
            Err("is damaged, as its groups have other rows than the file: write it again"
                .to_owned())
        }
    }
}

/// Adds the names of a field's columns, in their order.
fn column_names(field: &Type, name: String, names: &mut Vec<String>) {
    if field.is_primitive() {
        names.push(name);
        return;
    }
    let info = field.get_basic_info();
    let is_list = info.logical_type_ref() == Some(&LogicalType::List)
        || info.converted_type() == ConvertedType::LIST;
    let [repeated] = field.get_fields() else {
        return names_in(field, &name, names);
    };
    match (is_list, repeated.is_group().then(|| repeated.get_fields())) {
        // The group `list` with an `element`.
        (true, Some([element])) => column_names(element, name, names),
        (true, Some(_)) => names_in(repeated, &name, names),
        (true, None) => names.push(name),
        (false, _) => names_in(field, &name, names),
    }
}

fn names_in(group: &Type, name: &str, names: &mut Vec<String>) {
    for field in group.get_fields() {
        column_names(field, format!("{name}.{}", field.name()), names);
    }
}

fn unreadable(error: &ParquetError) -> String {
    format!(
        "cannot be read as Parquet: {error}: write it again, compressed with zstd or not at all"
    )
}

/// The crate panics at some damaged files.
fn guarded<T>(read: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err("is damaged, see the message on stderr: write it again".to_owned()))
}

impl Levels {
    fn of(column: &ColumnDescriptor) -> Self {
        Self {
            present: column.max_def_level(),
            element: column.repeated_ancestor_def_level(),
            depth: column.max_rep_level(),
        }
    }
}

impl ValueKind {
    /// What a column has, or why it cannot be used.
    fn of(column: &ColumnDescriptor) -> Result<Self, &'static str> {
        let logical = column.logical_type_ref();
        if matches!(
            logical,
            Some(LogicalType::Date | LogicalType::Time { .. } | LogicalType::Timestamp { .. })
        ) {
            return Err(TIME);
        }
        let kind = match (column.physical_type(), column.converted_type()) {
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
            (Physical::BOOLEAN, _) => Self::Bool,
            (
                Physical::INT32 | Physical::INT64,
                ConvertedType::UINT_8
                | ConvertedType::UINT_16
                | ConvertedType::UINT_32
                | ConvertedType::UINT_64,
            ) => Self::Unsigned,
            (Physical::INT32 | Physical::INT64, _) => Self::Signed,
            (Physical::FLOAT | Physical::DOUBLE, _) => Self::Float,
            (
                Physical::BYTE_ARRAY,
                ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON,
            ) => Self::Text,
            (Physical::FIXED_LEN_BYTE_ARRAY, _) if logical == Some(&LogicalType::Float16) => {
                Self::Float16
            }
            (Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY, _) => Self::Bytes,
        };
        match column.max_rep_level() {
            0 => Ok(kind),
            1 | 2 if !matches!(kind, Self::Bool | Self::Text | Self::Bytes) => Ok(kind),
            _ => Err("has lists, and only lists of numbers, and lists of these, can be used"),
        }
    }
}

/// A value, as a list has it and as a cell of its own.
trait ColumnValue {
    /// NaN if it is none.
    fn number(&self, kind: ValueKind) -> f64;

    /// The cell, or why it has none. The text of a number as f64 is exact, except for integers of 64 bits.
    fn cell(&self, kind: ValueKind) -> Result<Cell, String> {
        Ok(Cell::Text(self.number(kind).to_string()))
    }
}

impl ColumnValue for bool {
    fn number(&self, _kind: ValueKind) -> f64 {
        f64::from(u8::from(*self))
    }

    fn cell(&self, _kind: ValueKind) -> Result<Cell, String> {
        Ok(Cell::Text(self.to_string()))
    }
}

impl ColumnValue for f32 {
    fn number(&self, _kind: ValueKind) -> f64 {
        (*self).into()
    }
}

impl ColumnValue for f64 {
    fn number(&self, _kind: ValueKind) -> f64 {
        *self
    }
}

/// Unsigned ones are stored as the signed ones with the same bits.
impl ColumnValue for i32 {
    fn number(&self, kind: ValueKind) -> f64 {
        match kind {
            ValueKind::Unsigned => self.cast_unsigned().into(),
            _ => (*self).into(),
        }
    }
}

impl ColumnValue for i64 {
    fn number(&self, kind: ValueKind) -> f64 {
        match kind {
            ValueKind::Unsigned => self.cast_unsigned() as f64,
            _ => *self as f64,
        }
    }

    fn cell(&self, kind: ValueKind) -> Result<Cell, String> {
        Ok(Cell::Text(match kind {
            ValueKind::Unsigned => self.cast_unsigned().to_string(),
            _ => self.to_string(),
        }))
    }
}

impl ColumnValue for ByteArray {
    fn number(&self, _kind: ValueKind) -> f64 {
        f64::NAN
    }

    fn cell(&self, kind: ValueKind) -> Result<Cell, String> {
        match (kind, str::from_utf8(self.data())) {
            (ValueKind::Text, Ok(text)) => Ok(Cell::Text(text.to_owned())),
            (ValueKind::Text, Err(_)) => {
                Err("has a text that is not UTF-8: write it again".to_owned())
            }
            _ => Ok(Cell::Bytes(self.data().to_owned())),
        }
    }
}

impl ColumnValue for FixedLenByteArray {
    fn number(&self, kind: ValueKind) -> f64 {
        match (kind, self.data()) {
            (ValueKind::Float16, [low, high]) => f16::from_le_bytes([*low, *high]).to_f64(),
            _ => f64::NAN,
        }
    }

    fn cell(&self, kind: ValueKind) -> Result<Cell, String> {
        Ok(match kind {
            ValueKind::Float16 => Cell::Text(self.number(kind).to_string()),
            _ => Cell::Bytes(self.data().to_owned()),
        })
    }
}

impl Column {
    /// The next cells, fewer at the end.
    fn read(&self, reader: &mut ColumnReader, count: usize) -> Result<Vec<Cell>, String> {
        match reader {
            ColumnReader::BoolColumnReader(reader) => self.cells(reader, count),
            ColumnReader::Int32ColumnReader(reader) => self.cells(reader, count),
            ColumnReader::Int64ColumnReader(reader) => self.cells(reader, count),
            ColumnReader::Int96ColumnReader(_) => Err(TIME.to_owned()),
            ColumnReader::FloatColumnReader(reader) => self.cells(reader, count),
            ColumnReader::DoubleColumnReader(reader) => self.cells(reader, count),
            ColumnReader::ByteArrayColumnReader(reader) => self.cells(reader, count),
            ColumnReader::FixedLenByteArrayColumnReader(reader) => self.cells(reader, count),
        }
    }

    fn cells<T: DataType<T: ColumnValue>>(
        &self,
        reader: &mut ColumnReaderImpl<T>,
        count: usize,
    ) -> Result<Vec<Cell>, String> {
        let (mut values, mut defined, mut repeated) = (Vec::new(), Vec::new(), Vec::new());
        let mut read = 0;
        while read < count {
            // It may stop at the end of a page, also in the middle of a record.
            let (records, _, levels) = reader
                .read_records(count - read, Some(&mut defined), Some(&mut repeated), &mut values)
                .map_err(|error| unreadable(&error))?;
            if (records, levels) == (0, 0) {
                break;
            }
            read += records;
        }
        let Levels { present, element, depth } = self.levels;
        // A column whose values are all there has no levels.
        if present == 0 {
            return values.iter().map(|value| value.cell(self.kind)).collect();
        }
        let mut values = values.iter();
        let mut value = |level: i16| if level == present { values.next() } else { None };
        if depth == 0 {
            let cell = |level: &i16| match value(*level) {
                Some(value) => value.cell(self.kind),
                None => Ok(Cell::Text(String::new())),
            };
            return defined.iter().map(cell).collect();
        }
        let mut cells: Vec<Cell> = Vec::with_capacity(count);
        let mut lists: Vec<Vec<f64>> = Vec::new();
        let cell = |lists: &mut Vec<Vec<f64>>| Cell::Numbers {
            lists: mem::take(lists),
            is_nested: depth > 1,
        };
        for (level, repetition) in defined.into_iter().zip(repeated) {
            if repetition == 0 && !lists.is_empty() {
                cells.push(cell(&mut lists));
            }
            // An empty list, and one that is not there, have a level too.
            if repetition < depth {
                lists.push(Vec::new());
            }
            if level >= element
                && let Some(list) = lists.last_mut()
            {
                list.push(value(level).map_or(f64::NAN, |value| value.number(self.kind)));
            }
        }
        if !lists.is_empty() {
            cells.push(cell(&mut lists));
        }
        Ok(cells)
    }
}
