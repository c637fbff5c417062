//! The container: named values, then named tensors.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little-endian.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufReader, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use super::blocks::{self, TensorFormat};
use crate::{Error, source::open_file};

/// Largest part before the tensors: vocabularies of 256,000 tokens need about 10 MB.
const MAX_DESCRIPTION_BYTES: u64 = 64 << 20;
/// Most sizes of a tensor's shape.
const MAX_TENSOR_DIMENSIONS: u32 = 4;
/// Alignment of tensors if `general.alignment` is absent, bytes.
const DEFAULT_ALIGNMENT: i64 = 32;

/// A GGUF file that was opened and checked.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: File,
    values: BTreeMap<String, GgufValue>,
    tensors: BTreeMap<String, GgufTensor>,
}

/// A value of the description.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum GgufValue {
    Integer(i64),
    /// The shortest decimal number that is this f32 or f64.
    Float(f64),
    Flag(bool),
    Text(String),
    Texts(Vec<String>),
    Integers(Vec<i64>),
    /// A list that nothing needs.
    Other,
}

/// A tensor in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GgufTensor {
    /// Shape in the order of PyTorch: the last size is that of a row.
    pub(super) shape: Vec<u64>,
    format: TensorFormat,
    /// Position in the file.
    start: u64,
    bytes: u64,
}

impl GgufFile {
    /// Opens a file and checks that all its tensors are in it and in a supported format.
    ///
    /// # Errors
    /// It cannot be opened, is not GGUF, is damaged, or has a format that is not supported.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let (file, bytes) = open_file(path, "give the path of a GGUF file")?;
        let mut header = GgufHeader::new(&file, bytes);
        let (values, tensors) = header.read().map_err(|problem| Error::new(path, problem))?;
        Ok(Self { path: path.to_owned(), file, values, tensors })
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn value(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    /// All keys and values.
    pub(super) fn values(&self) -> impl Iterator<Item = (&str, &GgufValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.get(name)
    }

    /// Names of all tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A text of the description, e.g. `tokenizer.ggml.model`.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.values.get(key)? {
            GgufValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A list of texts of the description; empty if absent.
    #[must_use]
    pub fn texts(&self, key: &str) -> &[String] {
        match self.values.get(key) {
            Some(GgufValue::Texts(texts)) => texts,
            _ => &[],
        }
    }

    /// A whole number of the description.
    #[must_use]
    pub fn integer(&self, key: &str) -> Option<i64> {
        match self.values.get(key)? {
            GgufValue::Integer(number) => Some(*number),
            _ => None,
        }
    }

    /// A list of whole numbers of the description; empty if absent.
    #[must_use]
    pub fn integers(&self, key: &str) -> &[i64] {
        match self.values.get(key) {
            Some(GgufValue::Integers(numbers)) => numbers,
            _ => &[],
        }
    }

    /// A yes or no of the description.
    #[must_use]
    pub fn flag(&self, key: &str) -> Option<bool> {
        match self.values.get(key)? {
            GgufValue::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    /// The values of a tensor.
    pub(super) fn read(&self, tensor: &GgufTensor) -> Result<Vec<f32>, Error> {
        let mut bytes = vec![0; tensor.bytes as usize];
        self.file
            .read_exact_at(&mut bytes, tensor.start)
            .map_err(|error| Error::new(&self.path, format!("cannot be read: {error}")))?;
        Ok(tensor.format.decode(&bytes))
    }
}

/// Values and tensors by their names.
type Contents = (BTreeMap<String, GgufValue>, BTreeMap<String, GgufTensor>);

/// Reads the part before the tensors. No length in it is believed before it is compared with the file's size.
struct GgufHeader<'a> {
    reader: BufReader<&'a File>,
    position: u64,
    file_bytes: u64,
}

impl<'a> GgufHeader<'a> {
    fn new(file: &'a File, file_bytes: u64) -> Self {
        Self { reader: BufReader::new(file), position: 0, file_bytes }
    }

    fn read(&mut self) -> Result<Contents, String> {
        if self.array::<4>().ok() != Some(*b"GGUF") {
            return Err(
                "is not a GGUF file: it does not begin with GGUF; download it again".to_owned()
            );
        }
        match self.u32()? {
            2 | 3 => {}
            version @ 0..0x1_0000 => {
                return Err(format!(
                    "has version {version} of GGUF: only 2 and 3 are supported, convert the model again"
                ));
            }
            _ => return Err("is big-endian, which is not supported".to_owned()),
        }
        let (tensors, values) = (self.u64()?, self.u64()?);
        let values = self.values(values)?;
        if let Some(GgufValue::Integer(parts @ 2..)) = values.get("split.count") {
            return Err(format!(
                "is one of {parts} parts of a model: join them with llama.cpp's llama-gguf-split --merge"
            ));
        }
        let alignment = match values.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(GgufValue::Integer(alignment @ 1..=0x1_0000)) if alignment.count_ones() == 1 => {
                *alignment
            }
            Some(_) => return Err("has a general.alignment that is no power of two".to_owned()),
        };
        let tensors = self.tensors(tensors, alignment.unsigned_abs())?;
        Ok((values, tensors))
    }

    fn values(&mut self, count: u64) -> Result<BTreeMap<String, GgufValue>, String> {
        // Key, type and value.
        self.check_count(count, 8 + 4 + 1)?;
        let mut values = BTreeMap::new();
        for _ in 0..count {
            let key = self.text()?;
            let kind = self.u32()?;
            let value =
                self.value(kind).map_err(|problem| format!("{problem} (at key {key:?})"))?;
            if values.insert(key.clone(), value).is_some() {
                return Err(format!("has the key {key:?} twice: it is damaged"));
            }
        }
        Ok(values)
    }

    fn value(&mut self, kind: u32) -> Result<GgufValue, String> {
        Ok(match kind {
            0..=5 | 10 | 11 => GgufValue::Integer(self.integer(kind)?),
            6 => {
                let value = f32::from_le_bytes(self.array()?);
                // 1e-5 as f32 is 1e-5, not 9.99999974737875e-6.
                GgufValue::Float(value.to_string().parse().unwrap_or_else(|_| value.into()))
            }
            7 => GgufValue::Flag(self.array::<1>()? != [0]),
            8 => GgufValue::Text(self.text()?),
            9 => self.list()?,
            12 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(format!("has a value of the unknown type {kind}: it is damaged")),
        })
    }

    fn list(&mut self) -> Result<GgufValue, String> {
        let (kind, count) = (self.u32()?, self.u64()?);
        let bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err("has a list of lists, which is not supported".to_owned()),
            _ => return Err(format!("has a list of the unknown type {kind}: it is damaged")),
        };
        self.check_count(count, bytes)?;
        Ok(match kind {
            8 => GgufValue::Texts((0..count).map(|_| self.text()).collect::<Result<_, _>>()?),
            6 | 7 | 12 => {
                self.skip(count * bytes)?;
                GgufValue::Other
            }
            _ => {
                let integers = (0..count).map(|_| self.integer(kind));
                GgufValue::Integers(integers.collect::<Result<_, _>>()?)
            }
        })
    }

    fn integer(&mut self, kind: u32) -> Result<i64, String> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.array()?).into(),
            1 => i8::from_le_bytes(self.array()?).into(),
            2 => u16::from_le_bytes(self.array()?).into(),
            3 => i16::from_le_bytes(self.array()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.array()?).into(),
            10 => i64::try_from(self.u64()?).map_err(|_| "has a number that is too large")?,
            _ => i64::from_le_bytes(self.array()?),
        })
    }

    fn tensors(
        &mut self,
        count: u64,
        alignment: u64,
    ) -> Result<BTreeMap<String, GgufTensor>, String> {
        // Name, number of dimensions, one dimension, type, offset.
        self.check_count(count, 8 + 4 + 8 + 4 + 8)?;
        let mut tensors = BTreeMap::new();
        for _ in 0..count {
            let name = self.text()?;
            let tensor = self.tensor(&name, alignment)?;
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(format!("has the tensor {name:?} twice: it is damaged"));
            }
        }
        let data = self.position.next_multiple_of(alignment);
        for (name, tensor) in &mut tensors {
            let start = tensor.start.checked_add(data);
            let end = start.and_then(|start| start.checked_add(tensor.bytes));
            match (start, end) {
                (Some(start), Some(end)) if end <= self.file_bytes => tensor.start = start,
                _ => {
                    return Err(format!(
                        "ends before tensor {name} does: download it again, it is not complete"
                    ));
                }
            }
        }
        Ok(tensors)
    }

    fn tensor(&mut self, name: &str, alignment: u64) -> Result<GgufTensor, String> {
        let damaged = |what: &str| format!("has {name} with {what}: it is damaged");
        let dimensions = self.u32()?;
        if !(1..=MAX_TENSOR_DIMENSIONS).contains(&dimensions) {
            return Err(damaged("no shape that is possible"));
        }
        let mut shape = (0..dimensions).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        let (row, kind, start) = (shape[0], self.u32()?, self.u64()?);
        shape.reverse();
        let format = TensorFormat::new(kind).ok_or_else(|| {
            format!(
                "has {name} as {}: only {} are supported, choose another quantization of the model, such as Q8_0",
                blocks::type_name(kind),
                blocks::SUPPORTED
            )
        })?;
        if !start.is_multiple_of(alignment) {
            return Err(damaged("a position that is not aligned"));
        }
        let (values, bytes) = format.block();
        if !row.is_multiple_of(values) {
            return Err(damaged("rows that are no whole blocks"));
        }
        let all = shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size));
        let all = all.and_then(|all| (all / values).checked_mul(bytes));
        let bytes = all.ok_or_else(|| damaged("a size that is too large"))?;
        Ok(GgufTensor { shape, format, start, bytes })
    }

    /// Checks that `count` items of at least `bytes` can follow.
    fn check_count(&self, count: u64, bytes: u64) -> Result<(), String> {
        let rest = self.file_bytes.min(MAX_DESCRIPTION_BYTES).saturating_sub(self.position);
        if count.checked_mul(bytes).is_none_or(|all| all > rest) {
            return Err(format!(
                "says that {count} items follow, which cannot be: it is damaged, or not complete"
            ));
        }
        Ok(())
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        self.check_count(length, 1)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes)
            .map_err(|_| "has a text that is not UTF-8: it is damaged".to_owned())
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn skip(&mut self, bytes: u64) -> Result<(), String> {
        let mut rest = bytes;
        let mut buffer = [0; 4096];
        while rest > 0 {
            let part = rest.min(buffer.len() as u64);
            self.fill(&mut buffer[..part as usize])?;
            rest -= part;
        }
        Ok(())
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        self.check_count(bytes.len() as u64, 1)?;
        self.reader.read_exact(bytes).map_err(|error| format!("cannot be read: {error}"))?;
        self.position += bytes.len() as u64;
        Ok(())
    }
}
