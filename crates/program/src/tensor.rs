//! Tensors in the file.

use crate::schema::{JsonSize, PayloadEntry, TensorMeta};

/// Type of the elements; the discriminants are the file's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Dtype {
    /// Unsigned, 8 bits.
    U8 = 1,
    /// Signed, 8 bits.
    I8 = 2,
    /// Signed, 16 bits.
    I16 = 3,
    /// Signed, 32 bits.
    I32 = 4,
    /// Signed, 64 bits.
    I64 = 5,
    /// IEEE half.
    F16 = 6,
    /// IEEE single.
    F32 = 7,
    /// IEEE double.
    F64 = 8,
    /// Boolean, one byte.
    Bool = 12,
    /// bfloat16.
    Bf16 = 13,
}

impl Dtype {
    /// The type with this number in the file.
    #[must_use]
    pub fn of(number: u8) -> Option<Self> {
        use Dtype::{Bf16, Bool, F16, F32, F64, I8, I16, I32, I64, U8};
        let all = [U8, I8, I16, I32, I64, F16, F32, F64, Bool, Bf16];
        all.into_iter().find(|dtype| *dtype as u8 == number)
    }

    /// Size of an element, bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Name in PyTorch.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::Bool => "bool",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// A tensor whose values are in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name in the module's state dict.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Distance between neighbours along each axis, in elements.
    pub strides: Vec<u64>,
    /// Position of the first element in the storage.
    pub offset: u64,
    /// Entry of the archive that holds the storage. Tensors that are tied share it.
    pub(crate) entry: String,
    /// Length of the storage, bytes.
    pub(crate) bytes: u64,
}

impl StoredTensor {
    /// The part of its `storage` from its first element to its last one, in elements of `N` bytes.
    pub(crate) fn span<'a, const N: usize>(&self, storage: &'a [u8]) -> &'a [[u8; N]] {
        let end = self.end().unwrap_or(0) / self.dtype.bytes();
        let place = |element: u64| usize::try_from(element).unwrap_or(usize::MAX);
        storage.as_chunks().0.get(place(self.offset)..place(end)).unwrap_or_default()
    }

    /// `bytes` is the length of the entry.
    pub(crate) fn new(
        name: &str,
        entry: String,
        meta: &TensorMeta,
        bytes: u64,
    ) -> Result<Self, String> {
        let dtype = Dtype::of(meta.dtype)
            .ok_or_else(|| format!("{name} has a type that is not supported ({})", meta.dtype))?;
        let number = |size: &JsonSize| match size {
            JsonSize::AsInt(size) => u64::try_from(*size).ok(),
            JsonSize::AsExpr(_) => None,
        };
        let numbers = |sizes: &[JsonSize]| sizes.iter().map(number).collect::<Option<Vec<u64>>>();
        let parsed = (|| {
            let (shape, strides) = (numbers(&meta.sizes)?, numbers(&meta.strides)?);
            let offset = number(&meta.storage_offset)?;
            (shape.len() == strides.len()).then_some((shape, strides, offset))
        })();
        let (shape, strides, offset) =
            parsed.ok_or_else(|| format!("{name} has an invalid shape: the file is damaged"))?;
        let tensor = Self { name: name.to_owned(), dtype, shape, strides, offset, entry, bytes };
        match tensor.end() {
            Some(end) if end <= bytes => Ok(tensor),
            _ => Err(format!("{name} is longer than its values in the file, which is damaged")),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether both are the same elements of the same storage. Files keep one storage for all tensors without elements.
    #[must_use]
    pub fn is_tied_to(&self, other: &Self) -> bool {
        let place = |tensor: &Self| (tensor.dtype, tensor.offset, tensor.bytes);
        !self.is_empty()
            && self.entry == other.entry
            && place(self) == place(other)
            && self.shape == other.shape
            && self.strides == other.strides
    }

    /// End of the last element in the storage, bytes; `None` if it overflows.
    fn end(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |len, side| len.checked_mul(*side))?;
        if self.is_empty() {
            return Some(0);
        }
        let along = self.shape.iter().zip(&self.strides);
        let last = along.map(|(side, stride)| (side - 1).checked_mul(*stride));
        let last = last.into_iter().try_fold(self.offset, |sum, step| sum.checked_add(step?))?;
        last.checked_add(1)?.checked_mul(self.dtype.bytes())
    }
}

/// Reads an entry of the lists of weights and constants.
pub(crate) fn stored(
    name: &str,
    entry: &PayloadEntry,
    folder: &str,
    size: impl FnOnce(&str) -> Option<u64>,
) -> Result<StoredTensor, String> {
    let path = format!("{folder}/{}", entry.path_name);
    let (false, Some(meta)) = (entry.use_pickle, &entry.tensor_meta) else {
        return Err(format!("{name} is stored as a Python object: make it a plain tensor"));
    };
    let bytes = size(&path).ok_or_else(|| format!("has no {path}, the values of {name}"))?;
    StoredTensor::new(name, path, meta, bytes)
}
