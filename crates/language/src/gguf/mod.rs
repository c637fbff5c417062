//! Models in the form in which llama.cpp publishes them: one GGUF file → a model folder of Hugging Face's form.
//!
//! | file | content |
//! |---|---|
//! | `file` | [`GgufFile`]: the container |
//! | `blocks` | formats of tensors, also quantized ones, as f32 |
//! | `model` | [`GgufModel`]: description and tensors of a model folder |
//!
//! The tokenizer in the file is `baton_text::gguf`'s business.

mod blocks;
mod file;
mod model;

pub use self::{file::GgufFile, model::GgufModel};
