//! Reads files of tokens, and shows them as text.

use std::path::Path;

use baton_data::{
    Beton,
    beton::{BytesColumn, IntColumn},
};

use crate::{
    Error, LABELS_FIELD, LARGEST_FIELD, NO_LOSS, PREDICTED_FIELD, TOKENS_FIELD, Tokenizer,
};

/// An open file of tokens.
#[derive(Debug)]
pub struct TokenFile {
    beton: Beton,
    tokens: BytesColumn,
    labels: BytesColumn,
    predicted: IntColumn,
    largest: IntColumn,
}

/// A sample of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSample {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// One label per token: see [`LABELS_FIELD`].
    pub labels: Vec<i32>,
    /// See [`PREDICTED_FIELD`].
    pub predicted: i64,
    /// See [`LARGEST_FIELD`].
    pub largest: i64,
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
        Ok(Self {
            tokens: beton.bytes_column(TOKENS_FIELD)?,
            labels: beton.bytes_column(LABELS_FIELD)?,
            predicted: beton.int_column(PREDICTED_FIELD)?,
            largest: beton.int_column(LARGEST_FIELD)?,
            beton,
        })
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
        self.beton.bytes(&self.tokens, sample, &mut tokens)?;
        self.beton.bytes(&self.labels, sample, &mut labels)?;
        let ((token_words, rest), (label_words, _)) =
            (tokens.as_chunks::<4>(), labels.as_chunks::<4>());
        if tokens.len() != labels.len() || !rest.is_empty() {
            let reason = format!(
                "sample {sample} has {} bytes of tokens and {} of labels, but both must have 4 per token: write the file \
                 again with `baton data tokenize`",
                tokens.len(),
                labels.len()
            );
            return Err(Error::file(self.beton.path(), reason));
        }
        Ok(TokenSample {
            tokens: token_words.iter().map(|word| u32::from_le_bytes(*word)).collect(),
            labels: label_words.iter().map(|word| i32::from_le_bytes(*word)).collect(),
            predicted: self.beton.int(&self.predicted, sample)?,
            largest: self.beton.int(&self.largest, sample)?,
        })
    }
}

impl TokenSample {
    /// The sample as text: runs of tokens with and without loss take turns.
    ///
    /// # Errors
    /// The tokenizer cannot decode the tokens.
    pub fn parts(&self, tokenizer: &Tokenizer) -> Result<Vec<TextPart>, Error> {
        let runs = self.labels.chunk_by(|a, b| (*a == NO_LOSS) == (*b == NO_LOSS));
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
            parts.push(TextPart { text, counts: run.first() != Some(&NO_LOSS) });
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
        let labels = vec![NO_LOSS, tokens[1] as i32, tokens[2] as i32, NO_LOSS];
        let sample = TokenSample { tokens, labels, predicted: 2, largest: 300 };
        let parts = sample.parts(&tokenizer).unwrap();
        let parts: Vec<(&str, bool)> =
            parts.iter().map(|part| (part.text.as_str(), part.counts)).collect();
        assert_eq!(parts, [("hi", false), (" you", true), ("</s>", false)]);
    }
}
