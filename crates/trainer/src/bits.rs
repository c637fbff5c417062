//! Numbers in JSON by their bits: JSON has no infinity and no NaN, which sums of losses may be.

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

    /// Writes them.
    pub(crate) fn serialize<S: Serializer>(
        values: &[f32],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(|value| value.to_bits()))
    }

    /// Reads them.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<f32>, D::Error> {
        let bits = Vec::<u32>::deserialize(deserializer)?;
        Ok(bits.into_iter().map(f32::from_bits).collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::learner::{Judged, Sums};

    #[test]
    fn no_number_gets_lost() {
        let sums = Sums { loss: f64::NEG_INFINITY, others: vec![0.1], count: 1 };
        let judged = Judged {
            sums,
            predictions: vec![f32::MIN_POSITIVE, f32::INFINITY],
            targets: vec![0.1],
        };
        let text = serde_json::to_string(&judged).unwrap();
        assert_eq!(serde_json::from_str::<Judged>(&text).unwrap(), judged);
    }
}
