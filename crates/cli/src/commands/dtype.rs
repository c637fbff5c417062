//! Number formats of weights in the flags of commands.

use baton_checkpoint::Float;
use clap::ValueEnum;

/// The type of written weights.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub(super) fn float(self) -> Float {
        match self {
            Self::F32 => Float::F32,
            Self::F16 => Float::F16,
            Self::Bf16 => Float::Bf16,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}
