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
//! | [`gguf`] | [`GgufVocabulary`]: the vocabulary of a GGUF file → the files of a tokenizer |
//! | [`score`] | metrics of generated text: BLEU, valid syntax |
//! | [`read`] | [`TokenFile`]: tokens and labels of a file, also as text |

#![forbid(unsafe_code)]

pub mod chat;
pub mod encode;
mod error;
pub mod gguf;
pub mod read;
pub mod samples;
pub mod score;
mod split;
#[cfg(test)]
mod testing;
pub mod tokenizer;
pub mod write;

pub use self::{
    chat::ChatTemplate,
    encode::{EncodedSample, Encoder, LossTokens},
    error::Error,
    gguf::{GgufVocabulary, TokenizerFiles},
    read::{TextPart, TokenFile, TokenSample},
    samples::TextFormat,
    tokenizer::{SpecialToken, Tokenizer},
    write::{
        LengthBin, OnBadLine, TemplateSource, TokenSetSize, TokenizeEvent, TokenizeOptions,
        TokenizedText, ValSet, tokenize,
    },
};
