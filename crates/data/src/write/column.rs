//! The columns of a table that become a field, and the values in them.

use std::{fs, path::Path};

use super::{
    Array, BadImage, DEFAULT_PAGE_BYTES, Error, Field, FieldKind, Value,
    encoding::{ImageEncoder, StoredImage},
    mel::MelSettings,
    named_columns::Cell,
    recording::{RECORDING_FILES, SignalRecording},
};

/// A field and the columns that it is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableField {
    pub(super) name: String,
    pub(super) kind: ColumnKind,
    pub(super) columns: Vec<String>,
}

/// How the cells of a column become values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ColumnKind {
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
    /// The image in the file that the text names, or in the bytes of a Parquet file.
    Image,
    /// The numbers in the `.npy`, `.wav` or `.flac` file that the text names, or of a list in a Parquet file, f32 of shape
    /// (channels, length).
    Array { channels: usize, length: usize },
    /// The log-mel spectrogram of the `.wav`, `.flac` or `.npy` file that the text names, f32 of shape (bands, frames).
    Mel(MelSettings),
}

const KINDS: &str = "int, float, class, text, image, floats, letters(ALPHABET,LENGTH), onehot(ALPHABET,LENGTH), array(CHANNELS,LENGTH) or mel(RATE,TRANSFORM,HOP,BANDS,FRAMES)";

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

impl ColumnKind {
    pub(super) fn names_a_file(&self) -> bool {
        matches!(self, Self::Image | Self::Array { .. } | Self::Mel(_))
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
            "image" => return Ok(Self::Image),
            _ => {}
        }
        let unknown = || format!("{text:?} is no kind: take {KINDS}");
        let (word, inside) =
            text.strip_suffix(')').and_then(|text| text.split_once('(')).ok_or_else(unknown)?;
        if word == "mel" {
            return inside.parse().map(Self::Mel);
        }
        let (letters, length) = inside.rsplit_once(',').ok_or_else(unknown)?;
        let length = length.trim().parse().ok().filter(|length| *length > 0);
        let length: usize =
            length.ok_or_else(|| format!("{text}: LENGTH is a whole number, at least 1"))?;
        if word == "array" {
            let channels = letters.trim().parse().ok().filter(|channels: &usize| *channels > 0);
            let channels = channels
                .ok_or_else(|| format!("{text}: CHANNELS is a whole number, at least 1"))?;
            return Ok(Self::Array { channels, length });
        }
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

/// A value of a field.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum OwnedValue {
    Int(i64),
    Float(f64),
    Bytes(Vec<u8>),
    Array(Vec<u8>),
    Image(StoredImage),
}

/// Why a field has no value in a row.
#[derive(Debug)]
pub(super) enum BadValue {
    /// Its text is wrong, or names no file.
    Text(String),
    /// The file it names, or the image in it, cannot be used, which is known once it is read.
    File(String),
    /// Not because of the row.
    Machine(Error),
}

impl From<String> for BadValue {
    fn from(reason: String) -> Self {
        Self::Text(reason)
    }
}

/// What values need to be written, and not only to be checked.
pub(super) struct WriteContext<'a> {
    /// The sorted texts of the column.
    pub(super) classes: &'a [String],
    pub(super) encoder: &'a mut ImageEncoder,
    /// Position of the row.
    pub(super) row: u64,
}

impl OwnedValue {
    pub(super) fn borrowed(&self) -> Value<'_> {
        match self {
            Self::Int(value) => Value::Int(*value),
            Self::Float(value) => Value::Float(*value),
            Self::Bytes(bytes) => Value::Bytes(bytes),
            Self::Array(bytes) => Value::Array(bytes),
            Self::Image(StoredImage { mode, width, height, bytes, .. }) => {
                Value::Image { mode: *mode, width: *width, height: *height, bytes }
            }
        }
    }
}

impl TableField {
    /// Bytes of its values, if it has arrays.
    pub(super) fn array_bytes(&self) -> u64 {
        let f32s = |rows: usize, columns: usize| rows.saturating_mul(columns).saturating_mul(4);
        let bytes = match &self.kind {
            ColumnKind::Floats => f32s(1, self.columns.len()),
            ColumnKind::Letters { length, .. } => *length,
            ColumnKind::OneHot { alphabet, length } => f32s(alphabet.len(), *length),
            ColumnKind::Array { channels, length } => f32s(*channels, *length),
            ColumnKind::Mel(mel) => f32s(mel.bands, mel.frames),
            ColumnKind::Int
            | ColumnKind::Float
            | ColumnKind::Class
            | ColumnKind::Text
            | ColumnKind::Image => 0,
        };
        bytes as u64
    }

    pub(super) fn field(&self) -> Field {
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
            ColumnKind::Image => FieldKind::RgbImage,
            ColumnKind::Array { channels, length } => array(&[*channels, *length], "<f4"),
            ColumnKind::Mel(mel) => array(&[mel.bands, mel.frames], "<f4"),
        };
        Field::new(self.name.clone(), kind)
    }

    /// The text of its only column.
    fn text<'a>(&self, cells: &'a [Cell]) -> Result<&'a str, String> {
        match cells[0].text() {
            Ok("") => Err(format!("column {:?} is empty", self.columns[0])),
            Ok(text) => Ok(text),
            Err(problem) => Err(format!("column {:?} {problem}", self.columns[0])),
        }
    }

    /// The value of a row, or an empty one if it is only checked: without reading the file that its text names, below
    /// `folder`, and without knowing all classes.
    pub(super) fn value(
        &self,
        cells: &[Cell],
        folder: &Path,
        writing: Option<WriteContext<'_>>,
    ) -> Result<OwnedValue, BadValue> {
        Ok(match &self.kind {
            ColumnKind::Int => {
                let text = self.text(cells)?;
                OwnedValue::Int(text.parse().map_err(|_| self.wrong(0, text, "a whole number"))?)
            }
            ColumnKind::Float => OwnedValue::Float(self.number(cells, 0)?),
            ColumnKind::Class => {
                let text = self.text(cells)?;
                if text.contains(['\n', '\r']) {
                    let reason = format!("column {:?}: a class has a line break", self.columns[0]);
                    return Err(reason.into());
                }
                let known = writing.map_or(Ok(0), |writing| {
                    writing.classes.binary_search_by(|class| class.as_str().cmp(text))
                });
                OwnedValue::Int(known.map_err(|_| format!("{text:?} is a new class"))? as i64)
            }
            ColumnKind::Text => OwnedValue::Bytes(match &cells[0] {
                Cell::Text(text) => text.clone().into_bytes(),
                Cell::Bytes(bytes) => bytes.clone(),
                Cell::Numbers { .. } => self.text(cells)?.to_owned().into_bytes(),
            }),
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
                OwnedValue::Array(bytes(&array))
            }
            ColumnKind::Image if let Cell::Bytes(source) = &cells[0] => {
                let Some(writing) = writing else { return Ok(OwnedValue::Bytes(Vec::new())) };
                let read = prepared_image(source, writing.encoder, writing.row)?;
                read.map_err(|reason| {
                    BadValue::File(format!("column {:?}: the image {reason}", self.columns[0]))
                })?
            }
            ColumnKind::Array { channels, length }
                if let Cell::Numbers { lists, is_nested } = &cells[0] =>
            {
                let rows = if *is_nested { *channels } else { 1 };
                OwnedValue::Array(bytes(&self.array(lists, (rows, channels * length / rows))?))
            }
            ColumnKind::Image | ColumnKind::Array { .. } | ColumnKind::Mel(_) => {
                let path = folder.join(self.text(cells)?);
                let unusable = |reason: String| {
                    format!("column {:?}: {} {reason}", self.columns[0], path.display())
                };
                if !path.is_file() {
                    return Err(unusable("is not a file".to_owned()).into());
                }
                let Some(writing) = writing else { return Ok(OwnedValue::Bytes(Vec::new())) };
                let read = match self.kind {
                    ColumnKind::Array { channels, length } => read_array(&path, channels, length),
                    ColumnKind::Mel(mel) => read_spectrogram(&path, mel),
                    _ => read_image(&path, writing.encoder, writing.row)?,
                };
                read.map_err(|reason| BadValue::File(unusable(reason)))?
            }
        })
    }

    fn number(&self, cells: &[Cell], column: usize) -> Result<f64, String> {
        let name = &self.columns[column];
        let text = cells[column].text().map_err(|problem| format!("column {name:?} {problem}"))?;
        if text.is_empty() {
            return Err(format!("column {name:?} is empty"));
        }
        let number = text.parse::<f64>().ok().filter(|number| match self.kind {
            ColumnKind::Floats => (*number as f32).is_finite(),
            _ => number.is_finite(),
        });
        number.ok_or_else(|| self.wrong(column, text, "a finite number"))
    }

    /// The numbers of so many lists of this length.
    fn array(
        &self,
        lists: &[Vec<f64>],
        (rows, length): (usize, usize),
    ) -> Result<Vec<f32>, String> {
        let column = &self.columns[0];
        if lists.len() != rows {
            return Err(format!("column {column:?} has {} lists in place of {rows}", lists.len()));
        }
        if let Some(list) = lists.iter().find(|list| list.len() != length) {
            let there = list.len();
            return Err(format!(
                "column {column:?} has a list of {there} numbers in place of {length}"
            ));
        }
        let numbers = || lists.iter().flatten();
        match numbers().position(|number| !(*number as f32).is_finite()) {
            Some(at) => {
                let number = numbers().nth(at).copied().unwrap_or_default();
                Err(format!("column {column:?} has {number} at position {at}"))
            }
            None => Ok(numbers().map(|number| *number as f32).collect()),
        }
    }

    /// Positions in the alphabet.
    fn letters(
        &self,
        cells: &[Cell],
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

/// The image in a file; the inner error is about the file.
fn read_image(
    path: &Path,
    encoder: &mut ImageEncoder,
    row: u64,
) -> Result<Result<OwnedValue, String>, BadValue> {
    match fs::read(path) {
        Ok(source) => prepared_image(&source, encoder, row),
        Err(error) => Ok(Err(BadImage::Read(error.to_string()).to_string())),
    }
}

/// The image in the bytes of a file; the inner error is about these.
fn prepared_image(
    source: &[u8],
    encoder: &mut ImageEncoder,
    row: u64,
) -> Result<Result<OwnedValue, String>, BadValue> {
    let prepared = encoder.prepare(source, row).map_err(BadValue::Machine)?;
    Ok(match prepared {
        Ok(image) if image.bytes.len() > DEFAULT_PAGE_BYTES as usize => Err(format!(
            "needs {} bytes, and a page has {DEFAULT_PAGE_BYTES}: set a maximal resolution, or store it as JPEG",
            image.bytes.len()
        )),
        Ok(image) => Ok(OwnedValue::Image(image)),
        Err(bad) => Err(bad.to_string()),
    })
}

/// Channels, length and rate of a file.
fn shape(path: &Path) -> Result<(usize, usize, Option<u32>), String> {
    if !SignalRecording::is_named_by(path) {
        return Err(format!("is no {RECORDING_FILES} file"));
    }
    SignalRecording::shape_of(path).map_err(reason)
}

/// The finite numbers of a file.
fn read_signal(path: &Path) -> Result<SignalRecording, String> {
    let signal = SignalRecording::read(path).map_err(reason)?;
    match signal.values.iter().position(|value| !value.is_finite()) {
        Some(at) => Err(format!("has {} at position {at}", signal.values[at])),
        None => Ok(signal),
    }
}

/// What is wrong with a file, without its name.
fn reason(error: Error) -> String {
    match error {
        Error::Source { reason, .. } => reason,
        Error::Io { source, .. } => format!("cannot be read: {source}"),
        other => other.to_string(),
    }
}

fn read_array(path: &Path, channels: usize, length: usize) -> Result<OwnedValue, String> {
    let (channels_there, length_there, _) = shape(path)?;
    if (channels_there, length_there) != (channels, length) {
        return Err(format!(
            "has the shape ({channels_there}, {length_there}) in place of ({channels}, {length})"
        ));
    }
    Ok(OwnedValue::Array(bytes(&read_signal(path)?.values)))
}

fn read_spectrogram(path: &Path, mel: MelSettings) -> Result<OwnedValue, String> {
    let (_, len, rate) = shape(path)?;
    if let Some(rate) = rate.filter(|rate| *rate != mel.rate) {
        return Err(format!("has {rate} samples per second in place of {}: convert it", mel.rate));
    }
    let longest = mel.longest();
    if len > longest {
        return Err(format!(
            "has {len} samples, and the field at most {longest}: cut it, or give more frames"
        ));
    }
    let signal = read_signal(path)?;
    let mean = |at: usize| {
        let sum: f32 = (0..signal.channels).map(|channel| signal.channel(channel)[at]).sum();
        sum / signal.channels as f32
    };
    let mono: Vec<f32> = (0..signal.len).map(mean).collect();
    Ok(OwnedValue::Array(bytes(&mel.spectrogram(&mono))))
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
