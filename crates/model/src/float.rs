//! Floating-point formats of 32 and 16 bits.

use half::{bf16, f16};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// The floating-point type of stored values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Float {
    /// 32-bit IEEE float, the type used in training.
    #[default]
    F32,
    /// Rounded to the nearest IEEE half, ties to even.
    F16,
    /// Rounded to the nearest bfloat16, ties to even.
    Bf16,
}

impl Float {
    /// The type in a safetensors file.
    #[must_use]
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
        }
    }

    /// The type of values in a safetensors file; `None` for all others.
    #[must_use]
    pub fn of_dtype(dtype: Dtype) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16].into_iter().find(|float| float.dtype() == dtype)
    }

    /// Size of a value, bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Little-endian bytes of values.
    ///
    /// # Errors
    /// The first finite value that would become infinite.
    pub fn encode(self, values: &[f32]) -> Result<Vec<u8>, f32> {
        let mut bytes = Vec::with_capacity(values.len() * self.bytes());
        for &value in values {
            let is_finite = match self {
                Self::F32 => {
                    bytes.extend(value.to_le_bytes());
                    value.is_finite()
                }
                Self::F16 => {
                    let rounded = f16::from_f32(value);
                    bytes.extend(rounded.to_le_bytes());
                    rounded.is_finite()
                }
                Self::Bf16 => {
                    let rounded = bf16::from_f32(value);
                    bytes.extend(rounded.to_le_bytes());
                    rounded.is_finite()
                }
            };
            if value.is_finite() && !is_finite {
                return Err(value);
            }
        }
        Ok(bytes)
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
}
