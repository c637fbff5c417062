//! Tables (CSV, TSV, Parquet) as data sets: columns become fields.
//!
//! The table is read twice: first to check every value, to find the classes and to count the samples of each set, and then to
//! write them. So a table with a bad value leaves no file, and memory does not grow with it, except by the hashes of a
//! stratified split, for which it is read once more. Files that a table names are read in the last pass, by several threads.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use super::{
    CHANGED_WHILE_READ, DEFAULT_PAGE_BYTES, Encoding, Error, FinishedFile, KeySplit, TableField,
    Value, Writer,
    column::{BadValue, ColumnKind, OwnedValue, WriteContext},
    draft::{Draft, publish_all},
    encoding::ImageEncoder,
    named_columns::{Cell, NamedColumns, OtherColumns, RowPlace},
    pipeline::in_order,
};
use crate::with_suffix;

/// Most rows that are listed as left out.
const MAX_LISTED: usize = 10;
/// Rows that are read before their files are.
const ROWS_AT_ONCE: usize = 1_024;
/// The same where they hold images or arrays, bytes.
const BYTES_AT_ONCE: usize = 64 << 20;

/// What to write.
#[derive(Clone, Debug)]
pub struct TableOptions {
    /// The table: a Parquet file, or one whose first line has the names of the columns. Tabs separate the columns of a file
    /// whose name ends with `.tsv`, commas those of others.
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
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while rows.len() < ROWS_AT_ONCE
            && bytes < BYTES_AT_ONCE
            && let Some(row) = table.next()?
        {
            bytes += row.bytes();
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
            && row.key.is_none()
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
                hashes.entry(class).or_default().extend(row.key);
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
        by_class.unwrap_or(&self.by_key).set_of_hash(row.key.unwrap_or_default())
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
        let error = row.place.error(&options.from, reason);
        if !options.skips_bad_rows {
            return Err(error);
        }
        self.first_bad.push(error.to_string());
        Ok(())
    }

    fn check(&self, options: &TableOptions) -> Result<(), Error> {
        if self.read == self.bad {
            let reason = match self.first_bad.first() {
                None => "has no rows, only names of columns".to_owned(),
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

/// A table that is being read.
struct OpenTable<'a> {
    options: &'a TableOptions,
    table: NamedColumns,
    row: u64,
}

/// A row of the table.
struct Row {
    /// Its position, counted from 1.
    number: u64,
    place: RowPlace,
    /// The cells of each field.
    cells: Vec<Vec<Cell>>,
    /// Hash of what decides in which file it is; `None` if that is empty.
    key: Option<u64>,
}

impl Row {
    /// The text of a class field that has a value.
    fn class(&self, field: usize) -> &str {
        self.cells[field][0].text().unwrap_or_default()
    }

    fn bytes(&self) -> usize {
        self.cells.iter().flatten().map(Cell::bytes).sum()
    }
}

impl<'a> OpenTable<'a> {
    fn open(options: &'a TableOptions) -> Result<Self, Error> {
        let names = options.fields.iter().flat_map(|field| &field.columns).chain(&options.by);
        let names: Vec<&str> = names.map(String::as_str).collect();
        // One file gets all rows, whatever is in them.
        let others = match options.by.is_none() && !options.others.is_empty() {
            true => OtherColumns::Read,
            false => OtherColumns::Skip,
        };
        let table = NamedColumns::open(&options.from, &names, others)?;
        Ok(Self { options, table, row: 0 })
    }

    fn next(&mut self) -> Result<Option<Row>, Error> {
        if !self.table.next()? {
            return Ok(None);
        }
        self.row += 1;
        let mut cells = Vec::with_capacity(self.options.fields.len());
        let mut column = 0;
        for field in &self.options.fields {
            let columns = column..column + field.columns.len();
            column = columns.end;
            cells.push(columns.map(|column| self.table.cell(column)).collect());
        }
        let place = self.table.place();
        let key = match &self.options.by {
            None if self.options.others.is_empty() => Some(0),
            None => Some(KeySplit::hash(&self.table.row_text())),
            Some(name) => match self.table.cell(column).text() {
                Ok("") => None,
                Ok(text) => Some(KeySplit::hash(text)),
                Err(problem) => {
                    return Err(self.options.refused(format!("column {name:?} {problem}")));
                }
            },
        };
        Ok(Some(Row { number: self.row, place, cells, key }))
    }
}
