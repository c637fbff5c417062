//! A small model folder for tests, also for those of the command line: a byte-level BPE tokenizer, as GPT-2, Llama 3
//! and Qwen have, with a few merges and special tokens.

#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Tokens with a meaning of their own, of several families of models.
const SPECIAL: [&str; 12] = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
];

/// Pairs that are one token. `Ġ` is a space.
const MERGES: [&str; 8] = ["h i", "y o", "yo u", "Ġ a", "Ġ b", "u s", "e r", "us er"];

pub(crate) const CHATML: &str = "\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
";

/// A model folder, removed on drop.
pub(crate) struct Model(TempDir);

impl Model {
    /// Without `tokenizer_config.json`.
    pub(crate) fn new() -> Self {
        let model = Self(tempfile::tempdir().unwrap());
        model.write("tokenizer.json", &rules().to_string());
        model
    }

    /// With BOS `<s>`, EOS `</s>` and the template of ChatML.
    pub(crate) fn chatml() -> Self {
        let model = Self::new();
        model.config(&json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}));
        model
    }

    pub(crate) fn folder(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn config(&self, config: &Value) {
        self.write("tokenizer_config.json", &config.to_string());
    }

    pub(crate) fn change_rules(&self, change: impl FnOnce(&mut Value)) {
        let mut rules = rules();
        change(&mut rules);
        self.write("tokenizer.json", &rules.to_string());
    }

    /// Makes `tokenizer.json` itself put `<s>` in front of a text, as Llama's does.
    pub(crate) fn add_bos_by_rules(&self) {
        let id = self.id("<s>");
        self.change_rules(|rules| {
            rules["post_processor"] = json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [id], "tokens": ["<s>"]}},
            });
        });
    }

    /// Id of a token as it is in the vocabulary.
    pub(crate) fn id(&self, token: &str) -> u32 {
        let special = SPECIAL.iter().position(|special| *special == token);
        let ordinary = || vocabulary().iter().position(|ordinary| ordinary == token);
        let id = special.map(|id| vocabulary().len() + id).or_else(ordinary);
        u32::try_from(id.unwrap()).unwrap()
    }

    pub(crate) fn vocab_size(&self) -> u32 {
        u32::try_from(vocabulary().len() + SPECIAL.len()).unwrap()
    }
}

/// All bytes, in their visible form, and the merged pairs.
fn vocabulary() -> Vec<String> {
    let is_visible = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut invisible = 256..;
    let bytes =
        (0..256).map(|byte| if is_visible(byte) { byte } else { invisible.next().unwrap() });
    let bytes = bytes.map(|code| char::from_u32(code).unwrap().to_string());
    bytes.chain(MERGES.map(|pair| pair.replace(' ', ""))).collect()
}

fn rules() -> Value {
    let words = vocabulary();
    let special = SPECIAL.iter().enumerate().map(|(id, content)| {
        json!({"id": words.len() + id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let vocabulary: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| (word.clone(), id.into())).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": special.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
            "merges": MERGES},
    })
}
