//! Text for language models: instruction data or plain text → a `.beton` file of tokens and labels.
//!
//! ```text
//! JSON lines ─▶ samples ─▶ chat: text of the whole conversation ─▶ encode: tokens, labels ─▶ write: file
//!                          (template of the model)                 (tokenizer of the model)
//! ```
//!
//! Start with [`tokenize`], or with [`Tokenizer`] to encode and decode text. A model folder is not trusted: a damaged
//! file is an error, and a template that loops for ever is stopped.
//!
//! | module | content |
//! |---|---|
//! | [`tokenizer`] | [`Tokenizer`]: the tokenizer of a model folder, its special tokens and its chat template |
//! | [`chat`] | [`ChatTemplate`]: a conversation as text |
//! | [`samples`] | lines of JSON → samples, in one of five formats |
//! | [`encode`] | [`Encoder`]: a sample → tokens, and labels where the loss counts |
//! | `split` | which samples are for validation |
//! | [`mod@write`] | [`tokenize`]: the file, and statistics of it |
//! | [`read`] | [`TokenFile`]: tokens and labels of a file, also as text |

#![forbid(unsafe_code)]

pub mod chat;
pub mod encode;
mod error;
pub mod read;
pub mod samples;
mod split;
#[cfg(test)]
mod testing;
pub mod tokenizer;
pub mod write;

pub use self::{
    chat::ChatTemplate,
    encode::{EncodedSample, Encoder, LossTokens},
    error::Error,
    read::{TextPart, TokenFile, TokenSample},
    samples::TextFormat,
    tokenizer::{SpecialToken, Tokenizer},
    write::{
        LengthBin, OnBadLine, TemplateSource, TokenSetSize, TokenizeEvent, TokenizeOptions,
        TokenizedText, ValSet, tokenize,
    },
};

/// Name of the Bytes field with the tokens of a sample: ids as u32, little-endian.
pub const TOKENS_FIELD: &str = "tokens";
/// Name of the Bytes field with the labels of a sample: i32, little-endian, one per token: the token where the loss
/// counts, [`NO_LOSS`] elsewhere. Labels are not shifted: label i is to be predicted from the tokens before i.
pub const LABELS_FIELD: &str = "labels";
/// Name of the Int field with the number of labels that are predicted: those at position 1 and later that are not
/// [`NO_LOSS`].
pub const PREDICTED_FIELD: &str = "predicted";
/// Name of the Int field with the largest token of a sample.
pub const LARGEST_FIELD: &str = "largest";
/// The label of a token without loss.
pub const NO_LOSS: i32 = -100;
