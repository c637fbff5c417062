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

/// Lists of numbers.
pub(crate) mod of_each {
    use super::{Deserialize, Deserializer, Serializer};

    /// Writes a list.
    pub(crate) fn serialize<S: Serializer>(
        values: &[f32],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(|value| value.to_bits()))
    }

    /// Reads a list.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<f32>, D::Error> {
        let bits = Vec::<u32>::deserialize(deserializer)?;
        Ok(bits.into_iter().map(f32::from_bits).collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::learner::{BatchEvaluation, Sums};

    #[test]
    fn json_keeps_every_bit_of_a_number() {
        let sums = Sums { loss: f64::NEG_INFINITY, others: vec![0.1], count: 1 };
        let evaluation = BatchEvaluation {
            sums,
            predictions: vec![f32::MIN_POSITIVE, f32::INFINITY],
            targets: vec![0.1],
        };
        let text = serde_json::to_string(&evaluation).unwrap();
        assert_eq!(serde_json::from_str::<BatchEvaluation>(&text).unwrap(), evaluation);
    }
}
