//! Reads files of tokens, and shows them as text.

use std::path::Path;

use baton_data::{Beton, NO_LABEL, TextColumn};

use crate::{Error, Tokenizer};

/// An open file of tokens.
#[derive(Debug)]
pub struct TokenFile {
    beton: Beton,
    column: TextColumn,
}

/// A sample of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSample {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// One label per token: see [`LABELS_FIELD`](baton_data::LABELS_FIELD).
    pub labels: Vec<i32>,
}

/// A part of a sample, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextPart {
    /// The text; special tokens are included.
    pub text: String,
    /// Whether the loss counts its tokens.
    pub counts: bool,
}

impl TokenFile {
    /// Opens a file and finds its fields.
    ///
    /// # Errors
    /// The file cannot be read, or has no such fields.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let beton = Beton::open(path)?;
        Ok(Self { column: TextColumn::find(&beton)?, beton })
    }

    /// The file itself.
    #[must_use]
    pub fn beton(&self) -> &Beton {
        &self.beton
    }

    /// Reads a sample.
    ///
    /// # Errors
    /// There is no such sample, it cannot be read, or its tokens and labels do not belong together.
    pub fn sample(&self, sample: u64) -> Result<TokenSample, Error> {
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        self.column.read(&self.beton, sample, &mut Vec::new(), (&mut tokens, &mut labels))?;
        // Both came from 32 bits.
        let tokens = tokens.into_iter().map(|token| token as u32).collect();
        Ok(TokenSample { tokens, labels: labels.into_iter().map(|label| label as i32).collect() })
    }
}

impl TokenSample {
    /// Number of labels that are predicted: see [`PREDICTED_FIELD`](baton_data::PREDICTED_FIELD).
    #[must_use]
    pub fn predicted(&self) -> u64 {
        self.labels.iter().skip(1).filter(|label| **label != NO_LABEL).count() as u64
    }

    /// The sample as text: runs of tokens with and without loss take turns.
    ///
    /// # Errors
    /// The tokenizer cannot decode the tokens.
    pub fn parts(&self, tokenizer: &Tokenizer) -> Result<Vec<TextPart>, Error> {
        let runs = self.labels.chunk_by(|a, b| (*a == NO_LABEL) == (*b == NO_LABEL));
        let mut parts = Vec::new();
        let (mut end, mut before) = (0, String::new());
        for run in runs {
            let start = end;
            end += run.len();
            // Decoders treat the beginning of a text in another way, so a run is what it adds to the text before it.
            let whole = tokenizer.decode(self.tokens.get(..end).unwrap_or_default())?;
            let text = match whole.strip_prefix(&before) {
                Some(text) => text.to_owned(),
                None => tokenizer.decode(self.tokens.get(start..end).unwrap_or_default())?,
            };
            parts.push(TextPart { text, counts: run.first() != Some(&NO_LABEL) });
            before = whole;
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Model;

    #[test]
    fn runs_with_and_without_loss_take_turns() {
        let model = Model::new();
        let tokenizer = model.load();
        let tokens = tokenizer.encode("hi you</s>").unwrap();
        assert_eq!(tokens.len(), 4);
        let labels = vec![NO_LABEL, tokens[1] as i32, tokens[2] as i32, NO_LABEL];
        let sample = TokenSample { tokens, labels };
        let parts = sample.parts(&tokenizer).unwrap();
        let parts: Vec<(&str, bool)> =
            parts.iter().map(|part| (part.text.as_str(), part.counts)).collect();
        assert_eq!(parts, [("hi", false), (" you", true), ("</s>", false)]);
    }
}
