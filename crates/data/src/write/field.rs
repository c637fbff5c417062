//! Fields and values to be written: descriptors, rows, and validation.

use super::Error;
use crate::beton::{DESCRIPTOR_BYTES, FieldType, Mode};

const NAME_BYTES: usize = 16;
/// Offset of the text of an array's dtype in a descriptor's arguments: after 32 dimensions and the length of the
/// text.
const DTYPE_AT: usize = 33 * 8;
const MAX_AXES: usize = 32;

/// One column to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// 1 to 16 bytes of ASCII; ffcv would cut longer names.
    pub name: String,
    /// Type of the values.
    pub kind: FieldKind,
}

/// Type of the values of a column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldKind {
    /// f64.
    Float,
    /// i64.
    Int,
    /// u8 RGB images, each JPEG or raw.
    RgbImage,
    /// Bytes of any length.
    Bytes,
    /// JSON texts.
    Json,
    /// Arrays of one shape and type.
    NdArray(Array),
    /// Like [`NdArray`](Self::NdArray), but ffcv returns them as tensors.
    TorchTensor(Array),
}

/// Shape and type of arrays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Length of each axis: 1 to 32 axes. The last axis must not be empty, because the format cannot represent that.
    pub shape: Vec<u64>,
    /// numpy's name of the type, e.g. `<f4`, `|u1`, `<i8`.
    pub dtype: String,
}

/// One value of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// For [`FieldKind::Float`].
    Float(f64),
    /// For [`FieldKind::Int`].
    Int(i64),
    /// For [`FieldKind::RgbImage`].
    Image {
        /// Format of `bytes`.
        mode: Mode,
        /// Width in pixels, 1 to 65535.
        width: u32,
        /// Height in pixels, 1 to 65535.
        height: u32,
        /// A JPEG stream of that size, or `3 * width * height` bytes.
        bytes: &'a [u8],
    },
    /// For [`FieldKind::Bytes`].
    Bytes(&'a [u8]),
    /// For [`FieldKind::Json`]: a JSON text.
    Json(&'a str),
    /// For [`FieldKind::NdArray`] and [`FieldKind::TorchTensor`]: elements in C order, little-endian.
    Array(&'a [u8]),
}

impl Field {
    /// A column.
    #[must_use]
    pub fn new(name: impl Into<String>, kind: FieldKind) -> Self {
        Self { name: name.into(), kind }
    }

    /// The field's descriptor.
    ///
    /// # Errors
    /// Name or array type cannot be stored in a descriptor.
    pub(super) fn descriptor(&self) -> Result<[u8; DESCRIPTOR_BYTES], Error> {
        let name = self.name.as_bytes();
        if name.is_empty() || name.len() > NAME_BYTES || !name.iter().all(u8::is_ascii_graphic) {
            return Err(self.refused("a name is 1 to 16 visible ASCII characters"));
        }
        let mut descriptor = [0; DESCRIPTOR_BYTES];
        descriptor[0] = self.kind.field_type().id();
        descriptor[1..][..name.len()].copy_from_slice(name);
        if let FieldKind::NdArray(array) | FieldKind::TorchTensor(array) = &self.kind {
            array
                .describe(&mut descriptor[1 + NAME_BYTES..])
                .map_err(|reason| self.refused(reason))?;
        }
        Ok(descriptor)
    }

    fn refused(&self, reason: impl Into<String>) -> Error {
        Error::Field { name: self.name.clone(), reason: reason.into() }
    }
}

impl FieldKind {
    /// The type of the field in the file.
    #[must_use]
    pub fn field_type(&self) -> FieldType {
        match self {
            Self::Float => FieldType::Float,
            Self::Int => FieldType::Int,
            Self::RgbImage => FieldType::RgbImage,
            Self::Bytes => FieldType::Bytes,
            Self::Json => FieldType::Json,
            Self::NdArray(_) => FieldType::NdArray,
            Self::TorchTensor(_) => FieldType::TorchTensor,
        }
    }
}

impl Array {
    /// Size of one array, bytes; `None` for an unknown dtype.
    fn bytes(&self) -> Option<u64> {
        let item = item_bytes(&self.dtype)?;
        self.shape.iter().try_fold(item, |bytes, axis| bytes.checked_mul(*axis))
    }

    fn describe(&self, arguments: &mut [u8]) -> Result<(), String> {
        let axes = self.shape.len();
        if axes == 0 || axes > MAX_AXES || self.shape.last() == Some(&0) {
            return Err(format!(
                "shape {:?}: arrays have 1 to {MAX_AXES} axes, and the last one is not empty",
                self.shape
            ));
        }
        if self.bytes().is_none() {
            return Err(format!(
                "dtype {:?} of shape {:?}: give numpy's name of a plain type, e.g. \"<f4\" or \
                 \"|u1\"",
                self.dtype, self.shape
            ));
        }
        for (word, axis) in arguments.chunks_exact_mut(8).zip(&self.shape) {
            word.copy_from_slice(&axis.to_le_bytes());
        }
        let text = format!("[[\"\", \"{}\"]]", self.dtype);
        arguments[DTYPE_AT - 8..DTYPE_AT].copy_from_slice(&(text.len() as u64).to_le_bytes());
        arguments[DTYPE_AT..][..text.len()].copy_from_slice(text.as_bytes());
        Ok(())
    }
}

/// Size of an element by numpy's name of the dtype (byte order, kind, size), bytes.
fn item_bytes(dtype: &str) -> Option<u64> {
    let (order_and_kind, size) = dtype.split_at_checked(2)?;
    let size: u64 = size.parse().ok()?;
    let is_supported = match order_and_kind {
        "|b" => size == 1,
        "|u" | "|i" => size == 1,
        "<u" | "<i" => matches!(size, 2 | 4 | 8),
        "<f" => matches!(size, 2 | 4 | 8),
        "<c" => matches!(size, 8 | 16),
        _ => false,
    };
    is_supported.then_some(size)
}

/// A value ready to be written: the content of its cell, except the pointer, and the bytes for a page.
pub(super) enum Prepared<'a> {
    /// The cell's eight bytes are the value.
    InRow([u8; 8]),
    /// Mode, width and height, and the bytes.
    Image([u8; 5], &'a [u8]),
    /// Bytes whose length is stored in the cell.
    Sized(&'a [u8]),
    /// JSON with its final NUL.
    Text(Vec<u8>),
    /// Bytes whose length follows from the field.
    Unsized(&'a [u8]),
}

impl Prepared<'_> {
    /// The bytes to be stored in a page.
    pub(super) fn paged(&self) -> Option<&[u8]> {
        match self {
            Self::InRow(_) => None,
            Self::Image(_, bytes) | Self::Sized(bytes) | Self::Unsized(bytes) => Some(bytes),
            Self::Text(text) => Some(text),
        }
    }

    /// Writes the cell; `pointer` is the start of the value in the file.
    pub(super) fn put_cell(&self, cell: &mut [u8], pointer: u64) {
        let pointer = pointer.to_le_bytes();
        match self {
            Self::InRow(value) => cell[..8].copy_from_slice(value),
            Self::Image(head, _) => {
                cell[..5].copy_from_slice(head);
                cell[5..13].copy_from_slice(&pointer);
            }
            Self::Unsized(_) => cell[..8].copy_from_slice(&pointer),
            Self::Sized(_) | Self::Text(_) => {
                let len = self.paged().map_or(0, <[u8]>::len) as u64;
                cell[..8].copy_from_slice(&pointer);
                cell[8..16].copy_from_slice(&len.to_le_bytes());
            }
        }
    }
}

/// Checks a value against its field.
///
/// # Errors
/// A description of the problem: another type, another size, or invalid JSON.
pub(super) fn prepare<'a>(field: &Field, value: &Value<'a>) -> Result<Prepared<'a>, String> {
    match (&field.kind, *value) {
        (FieldKind::Float, Value::Float(value)) => Ok(Prepared::InRow(value.to_le_bytes())),
        (FieldKind::Int, Value::Int(value)) => Ok(Prepared::InRow(value.to_le_bytes())),
        (FieldKind::RgbImage, Value::Image { mode, width, height, bytes }) => {
            let head = image_head(mode, width, height, bytes)?;
            Ok(Prepared::Image(head, bytes))
        }
        (FieldKind::Bytes, Value::Bytes(bytes)) => Ok(Prepared::Sized(bytes)),
        (FieldKind::Json, Value::Json(text)) => json(text).map(Prepared::Text),
        (FieldKind::NdArray(array) | FieldKind::TorchTensor(array), Value::Array(bytes)) => {
            let needed = array.bytes();
            if needed != Some(bytes.len() as u64) {
                return Err(format!(
                    "{} bytes for {} of shape {:?}",
                    bytes.len(),
                    array.dtype,
                    array.shape
                ));
            }
            Ok(Prepared::Unsized(bytes))
        }
        (kind, _) => Err(format!("the value is of another type than {:?}", kind.field_type())),
    }
}

fn image_head(mode: Mode, width: u32, height: u32, bytes: &[u8]) -> Result<[u8; 5], String> {
    let (Ok(short_width @ 1..), Ok(short_height @ 1..)) =
        (u16::try_from(width), u16::try_from(height))
    else {
        return Err(format!("{width}x{height} pixels, but a side has 1 to 65535"));
    };
    let mode = match mode {
        Mode::Jpeg if bytes.starts_with(&[0xFF, 0xD8]) => 0,
        Mode::Jpeg => return Err("a JPEG that does not start with FF D8".to_owned()),
        Mode::Raw if bytes.len() as u64 == 3 * u64::from(width) * u64::from(height) => 1,
        Mode::Raw => return Err(format!("{} bytes for {width}x{height} pixels", bytes.len())),
    };
    let ([w0, w1], [h0, h1]) = (short_width.to_le_bytes(), short_height.to_le_bytes());
    Ok([mode, w0, w1, h0, h1])
}

/// Converts JSON to pure ASCII, like Python's `json.dumps`, and appends a NUL.
fn json(text: &str) -> Result<Vec<u8>, String> {
    serde_json::from_str::<serde::de::IgnoredAny>(text)
        .map_err(|error| format!("JSON: {error}"))?;
    let mut ascii = String::with_capacity(text.len() + 1);
    for character in text.chars() {
        if character.is_ascii() {
            ascii.push(character);
        } else {
            // In JSON these occur in strings only, where an escape means the same.
            for unit in character.encode_utf16(&mut [0; 2]) {
                ascii.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    ascii.push('\0');
    Ok(ascii.into_bytes())
}
