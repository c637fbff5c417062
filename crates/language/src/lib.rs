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
//!
//! `crates/trainer/src/torch/decoder` computes the model; `crates/text` is its tokenizer and data.

#![forbid(unsafe_code)]

pub mod adapter;
pub mod config;
pub mod decoder;
pub mod model;
pub mod source;

use std::path::{Path, PathBuf};

pub use self::{
    adapter::{AdaptedLinear, AdapterLayout},
    decoder::{Activation, DecoderLayer, DecoderModel, LinearKind, NormScale, Rope, RopeScaling},
    model::LanguageModel,
    source::{StoredKind, WeightSource},
};

/// A model that cannot be read or trained.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{} {problem}", path.display())]
pub struct Error {
    path: PathBuf,
    /// What is wrong and what to do, after the name of the file.
    problem: String,
}

impl Error {
    pub(crate) fn new(path: &Path, problem: impl Into<String>) -> Self {
        Self { path: path.to_owned(), problem: problem.into() }
    }
}
