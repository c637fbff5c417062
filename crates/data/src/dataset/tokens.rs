//! Texts as token ids, written by `baton data tokenize`: of any length, with a label for each token.

use super::Source;
use crate::{
    Beton, Error, SampleFault,
    beton::{BytesColumn, IntColumn},
};

/// Names of the fields of a text.
pub const TEXT_FIELDS: [&str; 4] = ["tokens", "labels", "predicted", "largest"];

/// The label of a token that is not predicted; torch's `ignore_index`.
pub const NO_LABEL: i64 = -100;

/// The fields of a text.
pub(crate) struct TokenColumn {
    /// u32, little-endian.
    tokens: BytesColumn,
    /// i32, little-endian, one for each token.
    labels: BytesColumn,
    predicted: IntColumn,
    largest: IntColumn,
}

/// Sizes of a text, known without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSize {
    /// Number of tokens.
    pub tokens: u32,
    /// Number of tokens after the first that have a label.
    pub predicted: u32,
}

impl TokenColumn {
    pub(super) fn find(beton: &Beton) -> Result<Self, Error> {
        let [tokens, labels, predicted, largest] = TEXT_FIELDS;
        Ok(Self {
            tokens: beton.bytes_column(tokens)?,
            labels: beton.bytes_column(labels)?,
            predicted: beton.int_column(predicted)?,
            largest: beton.int_column(largest)?,
        })
    }

    /// Checks the rows: lengths, and that all token ids are below the size of the vocabulary.
    pub(super) fn check(&self, beton: &Beton, source: &Source) -> Result<(), Error> {
        for name in &TEXT_FIELDS[..2] {
            beton.check_values(beton.field(name, &[crate::beton::FieldType::Bytes])?)?;
        }
        for sample in 0..beton.len() {
            self.size(beton, sample)?;
            let largest = beton.int(&self.largest, sample)?;
            if let Some(vocabulary) = source.vocabulary
                && !(0..vocabulary as i64).contains(&largest)
            {
                let fault = SampleFault::Vocabulary { token: largest, vocabulary };
                return Err(beton.sample_error(sample, 0, fault));
            }
        }
        Ok(())
    }

    /// Sizes of a text, from its row.
    pub(super) fn size(&self, beton: &Beton, sample: u64) -> Result<TextSize, Error> {
        let bytes = beton.bytes_len(&self.tokens, sample)?;
        let label_bytes = beton.bytes_len(&self.labels, sample)?;
        let predicted = beton.int(&self.predicted, sample)?;
        let tokens = bytes / 4;
        let predictable = 1..=i64::try_from(tokens.saturating_sub(1)).unwrap_or(i64::MAX);
        let is_valid =
            bytes.is_multiple_of(4) && label_bytes == bytes && tokens <= u64::from(u32::MAX);
        if !is_valid || !predictable.contains(&predicted) {
            return Err(damaged(
                beton,
                sample,
                format!(
                    "{bytes} bytes of tokens, {label_bytes} of labels and {predicted} predicted tokens"
                ),
            ));
        }
        Ok(TextSize { tokens: tokens as u32, predicted: predicted as u32 })
    }

    /// Reads tokens and labels of a text. `buffer` is scratch memory.
    pub(crate) fn read(
        &self,
        beton: &Beton,
        sample: u64,
        buffer: &mut Vec<u8>,
        (tokens, labels): (&mut Vec<i64>, &mut Vec<i64>),
    ) -> Result<(), Error> {
        let size = self.size(beton, sample)?;
        let words = beton.bytes(&self.tokens, sample, buffer)?.as_chunks().0;
        tokens.clear();
        tokens.extend(words.iter().map(|word| i64::from(u32::from_le_bytes(*word))));
        let words = beton.bytes(&self.labels, sample, buffer)?.as_chunks().0;
        labels.clear();
        labels.extend(words.iter().map(|word| i64::from(i32::from_le_bytes(*word))));
        let largest = beton.int(&self.largest, sample)?;
        let is_label = |label: &i64| *label == NO_LABEL || (0..=largest).contains(label);
        let predicted = labels.iter().skip(1).filter(|label| **label != NO_LABEL).count();
        if !tokens.iter().all(|token| *token <= largest)
            || !labels.iter().all(is_label)
            || predicted != size.predicted as usize
        {
            return Err(damaged(beton, sample, "values that do not fit its row".to_owned()));
        }
        Ok(())
    }
}

fn damaged(beton: &Beton, sample: u64, what: String) -> Error {
    beton.sample_error(sample, 0, SampleFault::Text { what })
}
