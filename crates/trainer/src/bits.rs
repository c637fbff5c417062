//! Writes floating-point numbers to JSON as integers with the same bits, because sums of losses can be infinite or NaN,
//! which JSON cannot express.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Writes a number.
pub(crate) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    value.to_bits().serialize(serializer)
}

/// Reads a number.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    u64::deserialize(deserializer).map(f64::from_bits)
}

/// A number and the integer with its bits.
pub(crate) trait HasBits: Copy {
    /// The integer.
    type Bits: Serialize + for<'de> Deserialize<'de>;
    fn bits(self) -> Self::Bits;
    fn of_bits(bits: Self::Bits) -> Self;
}

impl HasBits for f32 {
    type Bits = u32;

    fn bits(self) -> u32 {
        self.to_bits()
    }

    fn of_bits(bits: u32) -> Self {
        Self::from_bits(bits)
    }
}

impl HasBits for f64 {
    type Bits = u64;

    fn bits(self) -> u64 {
        self.to_bits()
    }

    fn of_bits(bits: u64) -> Self {
        Self::from_bits(bits)
    }
}

/// Lists of numbers.
pub(crate) mod of_each {
    use super::{Deserialize, Deserializer, HasBits, Serializer};

    /// Writes a list.
    pub(crate) fn serialize<T: HasBits, S: Serializer>(
        values: &[T],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(|value| value.bits()))
    }

    /// Reads a list.
    pub(crate) fn deserialize<'de, T: HasBits, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<T>, D::Error> {
        let bits = Vec::<T::Bits>::deserialize(deserializer)?;
        Ok(bits.into_iter().map(T::of_bits).collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::learner::{BatchEvaluation, Sums};

    #[test]
    fn json_keeps_every_bit_of_a_number() {
        let sums = Sums { loss: f64::NEG_INFINITY, others: vec![0.1, f64::INFINITY], count: 1 };
        let evaluation = BatchEvaluation {
            sums,
            predictions: vec![f32::MIN_POSITIVE, f32::INFINITY],
            targets: vec![0.1],
        };
        let text = serde_json::to_string(&evaluation).unwrap();
        assert_eq!(serde_json::from_str::<BatchEvaluation>(&text).unwrap(), evaluation);
    }
}
