//! Language models in the form in which Hugging Face publishes them, read without libtorch.
//!
//! A folder with `config.json` and safetensors files. The files are not trusted: everything is
//! checked, and what a model needs but Baton does not compute is refused by name.
//!
//! | module | contents |
//! |---|---|
//! | [`decoder`] | [`DecoderModel`]: the computation of all supported families, with their differences as data |
//! | [`config`] | `config.json` → [`DecoderModel`] |
//! | [`source`] | [`WeightSource`]: the tensors of a folder |
//! | [`adapter`] | [`AdapterLayout`]: which linear layers get LoRA matrices |
//! | [`model`] | [`LanguageModel`]: all of it, for a recipe |
//! | [`peft`] | the description of an adapter, as PEFT reads it |
//! | [`nf4`] | 4-bit weights, and the file that holds them beside the model |
//! | [`mod@merge`] | model and trained weights → a model folder |
//! | [`gguf`] | a GGUF file → a model folder |
//! | [`output`] | [`NewFolder`], and files of weights in it |
//!
//! `crates/trainer/src/torch/decoder` computes the model; `crates/text` is its tokenizer and data.

#![forbid(unsafe_code)]

pub mod adapter;
pub mod config;
pub mod decoder;
mod digest;
pub mod gguf;
pub mod merge;
pub mod model;
pub mod nf4;
pub mod output;
pub mod peft;
pub mod source;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use self::{
    adapter::{AdaptedLinear, AdapterLayout},
    decoder::{
        Activation, DecoderLayer, DecoderModel, LinearKind, NormScale, Recomputation, Rope,
        RopeScaling,
    },
    gguf::{GgufFile, GgufModel},
    model::LanguageModel,
    output::NewFolder,
    source::WeightSource,
};

/// A model that cannot be read, trained or written.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{} {problem}", path.display())]
pub struct Error {
    path: PathBuf,
    /// What is wrong and what to do, after the name of the file.
    problem: String,
    may_pass: bool,
}

impl Error {
    pub(crate) fn new(path: &Path, problem: impl Into<String>) -> Self {
        Self { path: path.to_owned(), problem: problem.into(), may_pass: false }
    }

    /// An error of the machine while it writes, such as a full disk.
    pub(crate) fn write(path: &Path, error: &io::Error) -> Self {
        Self { may_pass: true, ..Self::new(path, format!("cannot be written: {error}")) }
    }

    /// Whether a retry may help without a change of the input.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        self.may_pass
    }
}
