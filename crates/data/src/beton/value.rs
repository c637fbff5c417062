//! Fields other than images: numbers in the rows, bytes and arrays in the pages.

use super::{ArrayType, Beton, FieldType};
use crate::{Error, SampleFault};

/// A field of integers.
#[derive(Clone, Debug)]
pub struct IntColumn {
    offset: u64,
}

/// A field of floating-point numbers.
#[derive(Clone, Debug)]
pub struct FloatColumn {
    name: String,
    offset: u64,
}

/// A field of bytes or of JSON texts, of any length.
#[derive(Clone, Debug)]
pub struct BytesColumn {
    offset: u64,
    is_json: bool,
}

/// A field of arrays with the same shape and dtype.
#[derive(Clone, Debug)]
pub struct ArrayColumn {
    name: String,
    offset: u64,
    array: ArrayType,
    value_bytes: u64,
}

impl ArrayColumn {
    /// Shape and dtype of every value.
    #[must_use]
    pub fn array_type(&self) -> &ArrayType {
        &self.array
    }

    /// Size of every value in bytes.
    #[must_use]
    pub fn value_bytes(&self) -> u64 {
        self.value_bytes
    }
}

impl Beton {
    /// Finds a field of integers.
    ///
    /// # Errors
    /// There is no field of that name, or it has another type.
    pub fn int_column(&self, name: &str) -> Result<IntColumn, Error> {
        Ok(IntColumn { offset: self.field(name, &[FieldType::Int])?.offset })
    }

    /// The integer of a sample.
    ///
    /// # Errors
    /// There is no such sample.
    pub fn int(&self, column: &IntColumn, sample: u64) -> Result<i64, Error> {
        self.cell(sample, column.offset).map(i64::from_le_bytes)
    }

    /// Finds a field of floating-point numbers.
    ///
    /// # Errors
    /// There is no field of that name, or it has another type.
    pub fn float_column(&self, name: &str) -> Result<FloatColumn, Error> {
        let offset = self.field(name, &[FieldType::Float])?.offset;
        Ok(FloatColumn { name: name.to_owned(), offset })
    }

    /// The floating-point number of a sample.
    ///
    /// # Errors
    /// There is no such sample.
    pub fn float(&self, column: &FloatColumn, sample: u64) -> Result<f64, Error> {
        self.cell(sample, column.offset).map(f64::from_le_bytes)
    }

    /// The floating-point number of a sample, rounded to f32.
    ///
    /// # Errors
    /// There is no such sample, or the number is not finite.
    pub(crate) fn float_as_f32(&self, column: &FloatColumn, sample: u64) -> Result<f32, Error> {
        let value = self.float(column, sample)? as f32;
        check_finite(&column.name, &[value]).map_err(|fault| {
            self.sample_error(sample, self.cell_start(sample, column.offset), fault)
        })?;
        Ok(value)
    }

    /// Finds a field of bytes or JSON.
    ///
    /// # Errors
    /// There is no field of that name, or it has another type.
    pub fn bytes_column(&self, name: &str) -> Result<BytesColumn, Error> {
        let field = self.field(name, &[FieldType::Bytes, FieldType::Json])?;
        Ok(BytesColumn { offset: field.offset, is_json: field.kind == FieldType::Json })
    }

    /// Reads one value of a field of bytes or JSON into `buffer`. For JSON, the zero byte that ffcv appends is
    /// removed.
    ///
    /// # Errors
    /// There is no such sample, its value is outside the pages, or the file cannot be read.
    pub fn bytes<'a>(
        &self,
        column: &BytesColumn,
        sample: u64,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], Error> {
        let start = self.pointer(sample, column.offset)?;
        let size = self.pointer(sample, column.offset + 8)?;
        buffer.clear();
        if size > 0 {
            self.check_paged(start, size)
                .map_err(|fault| self.sample_error(sample, start, fault))?;
            buffer.resize(size as usize, 0);
            self.read(sample, start, buffer)?;
        }
        let text_end = buffer.iter().position(|byte| *byte == 0).filter(|_| column.is_json);
        Ok(&buffer[..text_end.unwrap_or(buffer.len())])
    }

    /// Length of one value of a field of bytes or JSON, including ffcv's zero byte.
    pub(crate) fn bytes_len(&self, column: &BytesColumn, sample: u64) -> Result<u64, Error> {
        self.pointer(sample, column.offset + 8)
    }

    /// Finds a field of arrays or tensors.
    ///
    /// # Errors
    /// There is no field of that name, or it has another type; its shape or dtype cannot be read.
    pub fn array_column(&self, name: &str) -> Result<ArrayColumn, Error> {
        let field = self.field(name, &[FieldType::NdArray, FieldType::TorchTensor])?;
        let offset = field.offset;
        let array = field.array_type().map_err(|fault| self.file_error(fault))?;
        let value_bytes = array.value_bytes();
        Ok(ArrayColumn { name: name.to_owned(), offset, array, value_bytes })
    }

    /// Reads one array into `out`, which must have [`value_bytes`](ArrayColumn::value_bytes) bytes: C-contiguous
    /// elements, little-endian.
    ///
    /// # Errors
    /// There is no such sample, its value is outside the pages, `out` has another length, or the file cannot be read.
    pub fn array(&self, column: &ArrayColumn, sample: u64, out: &mut [u8]) -> Result<(), Error> {
        let start = self.pointer(sample, column.offset)?;
        let refused = |fault| self.sample_error(sample, start, fault);
        let (stored, size) = (column.value_bytes, out.len() as u64);
        if stored != size {
            return Err(refused(SampleFault::ValueSize { stored, size }));
        }
        self.check_paged(start, size).map_err(refused)?;
        self.read(sample, start, out)
    }

    /// Reads one array into `out`, each element converted to f32. `buffer` is scratch memory.
    ///
    /// # Errors
    /// As [`array`](Self::array), or an element is not finite.
    pub(crate) fn array_as_f32(
        &self,
        column: &ArrayColumn,
        sample: u64,
        buffer: &mut Vec<u8>,
        out: &mut Vec<f32>,
    ) -> Result<(), Error> {
        buffer.resize(column.value_bytes as usize, 0);
        self.array(column, sample, buffer)?;
        out.resize(column.array.elements() as usize, 0.0);
        column.array.dtype.to_f32(buffer, out);
        check_finite(&column.name, out).map_err(|fault| match self.array_location(column, sample) {
            Ok((start, _)) => self.sample_error(sample, start, fault),
            Err(error) => error,
        })
    }

    /// Position of the first byte of one array in the file, and its length in bytes.
    pub(crate) fn array_location(
        &self,
        column: &ArrayColumn,
        sample: u64,
    ) -> Result<(u64, u64), Error> {
        Ok((self.pointer(sample, column.offset)?, column.value_bytes))
    }
}

/// Checks that all values of a field are finite, which training requires.
fn check_finite(field: &str, values: &[f32]) -> Result<(), SampleFault> {
    let invalid = values.iter().find(|value| !value.is_finite());
    invalid.map_or(Ok(()), |value| {
        Err(SampleFault::NotFinite { field: field.to_owned(), value: value.to_string() })
    })
}
