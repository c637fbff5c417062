//! Field descriptors and the row layout that follows from them.

use crate::FileFault;

/// Bytes of one descriptor: type, name, arguments.
pub(super) const DESCRIPTOR_BYTES: usize = 1 + 16 + 1024;

/// Types of fields that ffcv 1.x writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldType {
    /// f64 in the row.
    Float,
    /// i64 in the row.
    Int,
    /// u8 RGB image, JPEG or raw.
    RgbImage,
    /// Bytes of any length.
    Bytes,
    /// Array of a fixed shape and dtype.
    NdArray,
    /// JSON text.
    Json,
    /// As [`NdArray`](Self::NdArray), from a tensor.
    TorchTensor,
}

impl FieldType {
    fn from_id(id: u8) -> Option<Self> {
        Some(match id {
            0 => Self::Float,
            1 => Self::Int,
            2 => Self::RgbImage,
            3 => Self::Bytes,
            4 => Self::NdArray,
            5 => Self::Json,
            6 => Self::TorchTensor,
            _ => return None,
        })
    }

    /// Size and alignment of its cell in a row, in bytes.
    fn cell(self) -> (u64, u64) {
        match self {
            Self::Float | Self::Int | Self::NdArray | Self::TorchTensor => (8, 8),
            // u8 mode, u16 width, u16 height, u64 pointer: packed.
            Self::RgbImage => (13, 1),
            // u64 pointer, u64 size: packed.
            Self::Bytes | Self::Json => (16, 1),
        }
    }
}

/// One column of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name; the writer cuts names to 16 bytes.
    pub name: String,
    /// Its type.
    pub kind: FieldType,
    /// Where its cell starts in a row, in bytes.
    pub offset: u64,
}

/// Reads the descriptors and lays out a row as a C struct of their cells.
///
/// Returns the fields and the size of a row in bytes.
pub(super) fn layout(descriptors: &[u8]) -> Result<(Vec<Field>, u64), FileFault> {
    let (descriptors, _) = descriptors.as_chunks::<DESCRIPTOR_BYTES>();
    let mut fields = Vec::with_capacity(descriptors.len());
    let (mut end, mut row_alignment) = (0_u64, 1);
    for descriptor in descriptors {
        let type_id = descriptor[0];
        let name = name(&descriptor[1..17]);
        let Some(kind) = FieldType::from_id(type_id) else {
            return Err(FileFault::UnknownType { name, type_id });
        };
        let (size, alignment) = kind.cell();
        let offset = end.next_multiple_of(alignment);
        end = offset + size;
        row_alignment = row_alignment.max(alignment);
        fields.push(Field { name, kind, offset });
    }
    Ok((fields, end.next_multiple_of(row_alignment)))
}

/// ASCII, padded with NUL; a name of the full 16 bytes has none.
fn name(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}
