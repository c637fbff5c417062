//! Texts as token ids, each token with a label.

use std::path::Path;

use super::{
    Error, FFCV_MIN_PAGE_BYTES, Field, FieldKind, FinishedFile, Value, Writer, draft::publish_all,
};
use crate::{LABELS_FIELD, LARGEST_FIELD, NO_LABEL, PREDICTED_FIELD, TOKENS_FIELD};

/// Most tokens of a text: its tokens and labels fit into a page.
pub const MAX_TEXT_TOKENS: u32 = FFCV_MIN_PAGE_BYTES / 8;

/// Writes texts, one sample each.
pub struct TextWriter {
    writer: Writer,
    texts: u64,
}

impl TextWriter {
    /// A file for this many texts; it gets its name when it is finished.
    ///
    /// # Errors
    /// As [`Writer::create`].
    pub fn create(path: &Path, texts: u64) -> Result<Self, Error> {
        let fields = vec![
            Field::new(TOKENS_FIELD, FieldKind::Bytes),
            Field::new(LABELS_FIELD, FieldKind::Bytes),
            Field::new(PREDICTED_FIELD, FieldKind::Int),
            Field::new(LARGEST_FIELD, FieldKind::Int),
        ];
        let writer = Writer::create(path, fields, texts, FFCV_MIN_PAGE_BYTES)?;
        Ok(Self { writer, texts: 0 })
    }

    /// Appends a text: token ids and, for each, the token itself where it is to be predicted, or
    /// [`NO_LABEL`]. Labels are not shifted; the first one has no effect.
    ///
    /// # Errors
    /// Fewer labels than tokens or none that can be predicted, which training could not use; or as [`Writer::push`].
    pub fn push(&mut self, tokens: &[u32], labels: &[i32]) -> Result<(), Error> {
        let predicted = labels.iter().skip(1).filter(|label| **label != NO_LABEL).count();
        if tokens.len() != labels.len() || predicted == 0 {
            let reason = format!(
                "text {} has {} tokens and {} labels, {predicted} of them to be predicted",
                self.texts,
                tokens.len(),
                labels.len()
            );
            return Err(Error::Field { name: LABELS_FIELD.to_owned(), reason });
        }
        let largest = tokens.iter().max().copied().unwrap_or_default();
        let token_bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let label_bytes: Vec<u8> = labels.iter().flat_map(|label| label.to_le_bytes()).collect();
        self.texts += 1;
        self.writer.push(&[
            Value::Bytes(&token_bytes),
            Value::Bytes(&label_bytes),
            Value::Int(predicted as i64),
            Value::Int(largest.into()),
        ])
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// As [`Writer::finish`].
    pub fn finish(self) -> Result<FinishedFile, Error> {
        self.writer.finish()
    }

    /// Completes files that belong together, and gives them their names.
    ///
    /// # Errors
    /// As [`Writer::finish`].
    pub fn finish_all(texts: Vec<Self>) -> Result<Vec<FinishedFile>, Error> {
        let complete = texts.into_iter().map(|texts| texts.writer.complete());
        let (drafts, finished) = complete.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        publish_all(drafts)?;
        Ok(finished)
    }
}
