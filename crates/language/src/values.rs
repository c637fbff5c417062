//! Bytes of tensors ↔ f32 values.

use half::{bf16, f16};

use crate::StoredKind;

impl StoredKind {
    /// Name in a safetensors file, e.g. `BF16`.
    pub(crate) fn safetensors_name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }

    /// Name in `config.json`, e.g. `bfloat16`.
    pub(crate) fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// The values of little-endian bytes, exactly.
    #[must_use]
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let halves = || bytes.as_chunks::<2>().0.iter();
        match self {
            Self::F32 => {
                let words = bytes.as_chunks::<4>().0.iter();
                words.map(|word| f32::from_le_bytes(*word)).collect()
            }
            Self::F16 => halves().map(|half| f16::from_le_bytes(*half).to_f32()).collect(),
            Self::Bf16 => halves().map(|half| bf16::from_le_bytes(*half).to_f32()).collect(),
        }
    }

    /// Little-endian bytes of values, rounded to nearest, ties to even.
    ///
    /// # Errors
    /// The first finite value that would become infinite.
    pub fn encode(self, values: &[f32]) -> Result<Vec<u8>, f32> {
        let overflow = |value: f32, is_finite: bool| value.is_finite() && !is_finite;
        let mut bytes = Vec::with_capacity(values.len() * self.bytes() as usize);
        for &value in values {
            match self {
                Self::F32 => bytes.extend(value.to_le_bytes()),
                Self::F16 => {
                    let half = f16::from_f32(value);
                    if overflow(value, half.is_finite()) {
                        return Err(value);
                    }
                    bytes.extend(half.to_le_bytes());
                }
                Self::Bf16 => {
                    let half = bf16::from_f32(value);
                    if overflow(value, half.is_finite()) {
                        return Err(value);
                    }
                    bytes.extend(half.to_le_bytes());
                }
            }
        }
        Ok(bytes)
    }
}
