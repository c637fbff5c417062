//! Texts as token ids, written by `baton data tokenize`: of any length, with a label for each token.

use super::Source;
use crate::{
    Beton, Error, SampleFault,
    beton::{BytesColumn, IntColumn},
};

/// Name of the Bytes field with the tokens of a text: ids as u32, little-endian.
pub const TOKENS_FIELD: &str = "tokens";
/// Name of the Bytes field with the labels of a text: i32, little-endian, one per token: the token where the loss
/// counts, [`NO_LABEL`] elsewhere. Labels are not shifted: label i is to be predicted from the tokens before i.
pub const LABELS_FIELD: &str = "labels";
/// Name of the Int field with the number of labels that are predicted: those at position 1 and later that are not
/// [`NO_LABEL`].
pub const PREDICTED_FIELD: &str = "predicted";
/// Name of the Int field with the largest token of a text.
pub const LARGEST_FIELD: &str = "largest";

/// The label of a token without loss; torch's `ignore_index`.
pub const NO_LABEL: i32 = -100;

/// The fields of a text.
#[derive(Debug)]
pub struct TextColumn {
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

impl TextColumn {
    /// Finds the fields of a text.
    ///
    /// # Errors
    /// One of them is missing, or has another type.
    pub fn find(beton: &Beton) -> Result<Self, Error> {
        Ok(Self {
            tokens: beton.bytes_column(TOKENS_FIELD)?,
            labels: beton.bytes_column(LABELS_FIELD)?,
            predicted: beton.int_column(PREDICTED_FIELD)?,
            largest: beton.int_column(LARGEST_FIELD)?,
        })
    }

    /// Checks the rows: lengths, and that all token ids are below the size of the vocabulary.
    pub(super) fn check(&self, beton: &Beton, source: &Source) -> Result<(), Error> {
        for name in [TOKENS_FIELD, LABELS_FIELD] {
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
    ///
    /// # Errors
    /// There is no such sample, it cannot be read, or its fields contradict each other.
    pub fn read(
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
        let is_label = |label: &i64| *label == i64::from(NO_LABEL) || (0..=largest).contains(label);
        let predicted =
            labels.iter().skip(1).filter(|label| **label != i64::from(NO_LABEL)).count();
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
