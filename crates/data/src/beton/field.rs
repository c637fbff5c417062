//! Field descriptors and the row layout that results from them.

use half::f16;

use crate::FileFault;

/// Bytes of one descriptor: type, name, arguments.
pub(crate) const DESCRIPTOR_BYTES: usize = 1 + 16 + 1024;
/// Maximum number of dimensions of an array.
const MAX_DIMENSIONS: usize = 32;

/// Types of fields that ffcv 1.x writes, with ffcv's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldType {
    /// f64 in the row.
    Float = 0,
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
    /// Like [`NdArray`](Self::NdArray), but from a tensor.
    TorchTensor,
}

impl FieldType {
    /// Name of the type in ffcv.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float => "FloatField",
            Self::Int => "IntField",
            Self::RgbImage => "RGBImageField",
            Self::Bytes => "BytesField",
            Self::NdArray => "NDArrayField",
            Self::Json => "JSONField",
            Self::TorchTensor => "TorchTensorField",
        }
    }

    /// All types; the index is the type's number in the file.
    const ALL: [Self; 7] = [
        Self::Float,
        Self::Int,
        Self::RgbImage,
        Self::Bytes,
        Self::NdArray,
        Self::Json,
        Self::TorchTensor,
    ];

    fn from_id(id: u8) -> Option<Self> {
        Self::ALL.get(usize::from(id)).copied()
    }

    /// Number of the type in the file.
    pub(crate) fn id(self) -> u8 {
        self as u8
    }

    /// Size and alignment of the type's cell in a row, in bytes.
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
    /// Name; the writer truncates names to 16 bytes.
    pub name: String,
    /// Type.
    pub kind: FieldType,
    /// Position of the cell in a row, in bytes.
    pub offset: u64,
    /// Shape and dtype of the values; `None` unless they are arrays or tensors.
    array: Option<Result<ArrayType, FileFault>>,
}

impl Field {
    /// Shape and dtype of the values of an array or tensor field.
    ///
    /// # Errors
    /// The descriptor cannot be read, or the field has another type.
    pub fn array_type(&self) -> Result<ArrayType, FileFault> {
        self.array.clone().unwrap_or_else(|| {
            Err(FileFault::ArrayType {
                name: self.name.clone(),
                what: "it is not an array".to_owned(),
            })
        })
    }

    /// Treats a shape as damaged if its values are larger than `max_bytes`, the size of all pages, so that no memory
    /// is allocated for it.
    pub(super) fn refuse_arrays_above(&mut self, max_bytes: u64) {
        if let Some(Ok(array)) = &self.array
            && array.value_bytes() > max_bytes
        {
            let ArrayType { shape, .. } = array;
            let what = format!("its shape is {shape:?}, too large for the pages of this file");
            self.array = Some(Err(FileFault::ArrayType { name: self.name.clone(), what }));
        }
    }
}

/// Shape and dtype of every value of an array field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayType {
    /// Sizes of the dimensions; never empty, none is 0.
    pub shape: Vec<u64>,
    /// Type of the elements.
    pub dtype: Dtype,
}

impl ArrayType {
    /// Number of elements of a value.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Size of a value in bytes.
    #[must_use]
    pub fn value_bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes() as u64
    }

    /// Parses the arguments of a descriptor: u64\[32\] shape, u64 n, then n bytes of JSON with numpy's `descr` of the
    /// dtype.
    fn read(arguments: &[u8]) -> Result<Self, String> {
        let (words, _) = arguments.as_chunks::<8>();
        let shape: Vec<u64> =
            words[..MAX_DIMENSIONS].iter().map(|w| u64::from_le_bytes(*w)).collect();
        let rank = shape.iter().rposition(|size| *size != 0).map_or(0, |last| last + 1);
        let shape = shape[..rank].to_vec();
        let text_bytes = u64::from_le_bytes(words[MAX_DIMENSIONS]);
        let text = &arguments[8 * (MAX_DIMENSIONS + 1)..];
        let Some(text) = usize::try_from(text_bytes).ok().and_then(|len| text.get(..len)) else {
            return Err(format!("the text of its dtype has {text_bytes} bytes, which is too long"));
        };
        let shown = String::from_utf8_lossy(text);
        let descr: Vec<(String, String)> = serde_json::from_slice(text)
            .map_err(|_| format!("its dtype is {shown}, but only plain ones are supported"))?;
        let dtype = match descr.as_slice() {
            [(_, code)] => Dtype::from_code(code),
            _ => None,
        };
        let Some(dtype) = dtype else {
            return Err(format!(
                "its dtype is {shown}, but only plain little-endian ones are supported"
            ));
        };
        if shape.is_empty() || shape.contains(&0) {
            return Err(format!("its shape is {shape:?}, so its values are empty"));
        }
        let bytes = shape.iter().try_fold(dtype.bytes() as u64, |all, size| all.checked_mul(*size));
        // A value fits into a page, and a page is below 4 GiB.
        if bytes.is_none_or(|bytes| bytes > u64::from(u32::MAX)) {
            return Err(format!("its shape is {shape:?}, too large for a page"));
        }
        Ok(Self { shape, dtype })
    }
}

/// Types of array elements, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned 8 bits.
    U8,
    /// Signed 8 bits.
    I8,
    /// Unsigned 16 bits.
    U16,
    /// Signed 16 bits.
    I16,
    /// Unsigned 32 bits.
    U32,
    /// Signed 32 bits.
    I32,
    /// Unsigned 64 bits.
    U64,
    /// Signed 64 bits.
    I64,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// IEEE double.
    F64,
}

impl Dtype {
    /// All dtypes, each with numpy's code.
    const CODES: [(Self, &'static str); 12] = [
        (Self::Bool, "|b1"),
        (Self::U8, "|u1"),
        (Self::I8, "|i1"),
        (Self::U16, "<u2"),
        (Self::I16, "<i2"),
        (Self::U32, "<u4"),
        (Self::I32, "<i4"),
        (Self::U64, "<u8"),
        (Self::I64, "<i8"),
        (Self::F16, "<f2"),
        (Self::F32, "<f4"),
        (Self::F64, "<f8"),
    ];

    fn from_code(code: &str) -> Option<Self> {
        Self::CODES.iter().find(|(_, known)| *known == code).map(|(dtype, _)| *dtype)
    }

    /// Numpy's code, such as `<f4`.
    #[must_use]
    pub fn code(self) -> &'static str {
        // Every dtype is in the table; a test checks this.
        Self::CODES.iter().find(|(dtype, _)| *dtype == self).map_or("", |(_, code)| *code)
    }

    /// Size of an element in bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Converts the elements in `bytes` to f32 and writes them to `out`.
    pub(crate) fn to_f32(self, bytes: &[u8], out: &mut [f32]) {
        fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
                *out = value(*bytes);
            }
        }
        match self {
            Self::Bool | Self::U8 => each(bytes, out, |b: [u8; 1]| f32::from(b[0])),
            Self::I8 => each(bytes, out, |b| f32::from(i8::from_le_bytes(b))),
            Self::U16 => each(bytes, out, |b| f32::from(u16::from_le_bytes(b))),
            Self::I16 => each(bytes, out, |b| f32::from(i16::from_le_bytes(b))),
            Self::U32 => each(bytes, out, |b| u32::from_le_bytes(b) as f32),
            Self::I32 => each(bytes, out, |b| i32::from_le_bytes(b) as f32),
            Self::U64 => each(bytes, out, |b| u64::from_le_bytes(b) as f32),
            Self::I64 => each(bytes, out, |b| i64::from_le_bytes(b) as f32),
            Self::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            Self::F32 => each(bytes, out, f32::from_le_bytes),
            Self::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
        }
    }
}

/// Parses the descriptors and computes the layout of a row, a C struct of the fields' cells.
///
/// Returns the fields and the size of a row in bytes.
pub(super) fn layout(descriptors: &[u8]) -> Result<(Vec<Field>, u64), FileFault> {
    let (descriptors, _) = descriptors.as_chunks::<DESCRIPTOR_BYTES>();
    let mut kinds = Vec::with_capacity(descriptors.len());
    for descriptor in descriptors {
        let type_id = descriptor[0];
        let name = name(&descriptor[1..17]);
        let Some(kind) = FieldType::from_id(type_id) else {
            return Err(FileFault::UnknownType { name, type_id });
        };
        kinds.push(kind);
    }
    let (offsets, row_bytes) = row_layout(&kinds);
    let mut fields = Vec::with_capacity(descriptors.len());
    for ((descriptor, kind), offset) in descriptors.iter().zip(kinds).zip(offsets) {
        let name = name(&descriptor[1..17]);
        let is_array = matches!(kind, FieldType::NdArray | FieldType::TorchTensor);
        // If a dtype cannot be read, the other fields of the file can still be used.
        let array = is_array.then(|| {
            ArrayType::read(&descriptor[17..])
                .map_err(|what| FileFault::ArrayType { name: name.clone(), what })
        });
        fields.push(Field { name, kind, offset, array });
    }
    Ok((fields, row_bytes))
}

/// Offsets of the cells in a row and the row's size, in bytes: a C struct of the cells.
pub(crate) fn row_layout(kinds: &[FieldType]) -> (Vec<u64>, u64) {
    let (mut end, mut row_alignment) = (0_u64, 1);
    let mut offsets = Vec::with_capacity(kinds.len());
    for kind in kinds {
        let (size, alignment) = kind.cell();
        let offset = end.next_multiple_of(alignment);
        offsets.push(offset);
        end = offset + size;
        row_alignment = row_alignment.max(alignment);
    }
    (offsets, end.next_multiple_of(row_alignment))
}

/// Parses a name: ASCII, padded with NUL; a name of the full 16 bytes has no NUL.
fn name(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}
