//! Model folders for tests.

#[path = "../tests/kit/mod.rs"]
mod kit;

pub(crate) use kit::{CHATML, Model};

use crate::Tokenizer;

impl Model {
    pub(crate) fn load(&self) -> Tokenizer {
        Tokenizer::load(self.folder()).unwrap()
    }
}
