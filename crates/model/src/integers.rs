//! Types of constants that are not floating-point numbers.

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// The type that a constant has in PyTorch. In training and in checkpoints its values are f32, which has them exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Integers {
    /// Signed, 64 bits.
    I64,
    /// Signed, 32 bits.
    I32,
    /// One byte, 0 or 1.
    Bool,
}

impl Integers {
    /// The type in a safetensors file.
    #[must_use]
    pub fn dtype(self) -> Dtype {
        match self {
            Self::I64 => Dtype::I64,
            Self::I32 => Dtype::I32,
            Self::Bool => Dtype::BOOL,
        }
    }

    /// Size of a value, bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::I32 => 4,
            Self::Bool => 1,
        }
    }

    /// The values in little-endian order.
    #[must_use]
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let values = values.iter();
        match self {
            Self::I64 => values.flat_map(|value| (*value as i64).to_le_bytes()).collect(),
            Self::I32 => values.flat_map(|value| (*value as i32).to_le_bytes()).collect(),
            Self::Bool => values.map(|value| u8::from(*value != 0.0)).collect(),
        }
    }
}
