//! A small language model and texts for it.

#![allow(dead_code, reason = "each test uses a part")]

#[path = "../../../crates/language/tests/kit/mod.rs"]
pub(crate) mod models;

use baton_data::write::TextWriter;
use baton_tests::Cluster;
use models::{VOCABULARY, config_of, write_model};
use tempfile::TempDir;

/// A model, and texts of 3 to 16 tokens in which each token follows from the one before.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        write_model(&files.path("model"), &config_of("gemma2"), 7);
        files.write_texts("train.beton", 0..90);
        files.write_texts("val.beton", 90..110);
        files
    }

    /// Gives the model a tokenizer: a word for each token.
    pub(crate) fn write_tokenizer(&self) {
        let words: serde_json::Map<_, _> =
            (0..VOCABULARY).map(|token| (format!("w{token}"), token.into())).collect();
        let rules = serde_json::json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
        });
        std::fs::write(self.path("model/tokenizer.json"), rules.to_string()).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn write_texts(&self, name: &str, numbers: std::ops::Range<u32>) {
        let count = u64::from(numbers.end - numbers.start);
        let mut writer = TextWriter::create(&self.path(name), count).unwrap();
        for number in numbers {
            let follow = |token: u32, step: u32| (token * 3 + step * 7 + 11) % VOCABULARY;
            let mut tokens = vec![number % VOCABULARY];
            for step in 1..3 + number * 7 % 14 {
                tokens.push(follow(tokens[step as usize - 1], step));
            }
            let labels = tokens.iter().enumerate();
            let labels = labels.map(|(at, token)| if at == 0 { -100 } else { *token as i32 });
            writer.push(&tokens, &labels.collect::<Vec<_>>()).unwrap();
        }
        writer.finish().unwrap();
    }

    /// A job that trains an adapter of the model on the packed texts.
    pub(crate) fn train(&self, cluster: Cluster) -> Cluster {
        cluster
            .set("model={ arch='causal_lm' }")
            .set(&format!("model.path={}", self.path("model").display()))
            .set("adapter={ rank=4, alpha=8, dropout=0.1 }")
            .set(&format!("data.train={}", self.path("train.beton").display()))
            .set(&format!("data.val={}", self.path("val.beton").display()))
            .set("data.sequence=32")
            .set("data.packing=true")
            .set("train.global_batch=8")
            .set("optimizer={ kind='adamw', weight_decay=0.01 }")
            .set("schedule={ kind='constant', lr=2e-2 }")
            .set("loss={ kind='next_token' }")
    }
}
