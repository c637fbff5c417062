//! The vocabulary of a GGUF file → `tokenizer.json` and `tokenizer_config.json`.
//!
//! Only byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it. The file names the rules that divide a text into words
//! instead of listing them, so that every name has to be known here; the expressions are those of the models' own
//! `tokenizer.json`.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// What a GGUF file says about its tokenizer: the keys `tokenizer.*`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GgufVocabulary {
    /// `tokenizer.ggml.model`: `gpt2` for byte-level BPE.
    pub model: String,
    /// `tokenizer.ggml.pre`: name of the rules that divide a text into words.
    pub pre: String,
    /// Texts of all tokens, by id.
    pub tokens: Vec<String>,
    /// A number for each token that says what it is.
    pub types: Vec<i64>,
    /// Pairs of tokens that become one, the first to be applied first.
    pub merges: Vec<String>,
    /// Token that starts a text.
    pub bos: Option<i64>,
    /// Token that ends a text.
    pub eos: Option<i64>,
    /// Token that fills a batch.
    pub pad: Option<i64>,
    /// Token for what has none.
    pub unknown: Option<i64>,
    /// Whether a text starts with `bos`.
    pub adds_bos: Option<bool>,
    /// The chat template.
    pub chat_template: Option<String>,
    /// Most tokens of a text.
    pub max_tokens: Option<i64>,
}

/// Content of `tokenizer.json` and `tokenizer_config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerFiles {
    /// `tokenizer.json`
    pub rules: String,
    /// `tokenizer_config.json`
    pub config: String,
}

/// Types of tokens in GGUF files.
const CONTROL_TOKEN: i64 = 3;
const USER_DEFINED_TOKEN: i64 = 4;
const UNUSED_TOKEN: i64 = 5;

/// How texts are divided into words, by `tokenizer.ggml.pre`.
const KNOWN: &[&str] = &["gpt-2", "smollm", "llama-bpe", "qwen2"];

impl GgufVocabulary {
    /// The files of a tokenizer with this vocabulary.
    ///
    /// # Errors
    /// A kind of tokenizer that is not supported, or a vocabulary that contradicts itself.
    pub fn files(&self) -> Result<TokenizerFiles, String> {
        if self.model != "gpt2" {
            return Err(format!(
                "has a tokenizer of the kind {:?}: only \"gpt2\" (byte-level BPE) can be converted; give the folder \
                 of the original model, with its tokenizer.json, by --tokenizer",
                self.model
            ));
        }
        let words = words(&self.pre)?;
        if self.tokens.is_empty() {
            return Err("has no tokens: it is not a whole model".to_owned());
        }
        if !self.types.is_empty() && self.types.len() != self.tokens.len() {
            return Err(format!(
                "has {} tokens, but {} types of tokens: it is damaged",
                self.tokens.len(),
                self.types.len()
            ));
        }
        let bos = self.named("bos", self.bos)?;
        let config = self.config(bos)?;
        let adds_bos = self.adds_bos.unwrap_or(words.adds_bos);
        let rules = json!({
            "version": "1.0",
            "truncation": Value::Null,
            "padding": Value::Null,
            "added_tokens": self.added_tokens(),
            "normalizer": words.normalizer,
            "pre_tokenizer": words.pre_tokenizer,
            "post_processor": bos.filter(|_| adds_bos).map(|(id, text)| adding(id, text)),
            "decoder": byte_level(false),
            "model": {
                "type": "BPE",
                "dropout": Value::Null,
                "unk_token": Value::Null,
                "continuing_subword_prefix": Value::Null,
                "end_of_word_suffix": Value::Null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": words.ignores_merges,
                "vocab": self.ids()?,
                "merges": self.pairs()?,
            },
        });
        Ok(TokenizerFiles { rules: format!("{rules}\n"), config })
    }

    fn kind(&self, id: usize) -> i64 {
        self.types.get(id).copied().unwrap_or_default()
    }

    /// Token texts → ids, without those that no text has.
    fn ids(&self) -> Result<Map<String, Value>, String> {
        let mut ids = Map::new();
        for (id, text) in self.tokens.iter().enumerate() {
            if self.kind(id) != UNUSED_TOKEN && ids.insert(text.clone(), id.into()).is_some() {
                return Err(format!("has the token {text:?} twice: it is damaged"));
            }
        }
        Ok(ids)
    }

    fn pairs(&self) -> Result<Vec<[&str; 2]>, String> {
        let known: BTreeSet<&str> = self.tokens.iter().map(String::as_str).collect();
        let pair = |merge: &'_ String| {
            let damaged = || {
                format!("has the merge {merge:?} of tokens that it does not have: it is damaged")
            };
            let (first, second) = merge.split_once(' ').ok_or_else(damaged)?;
            let joined = [first, second].concat();
            let is_known = [first, second, &joined].iter().all(|part| known.contains(part));
            if is_known { Ok(()) } else { Err(damaged()) }
        };
        self.merges.iter().try_for_each(pair)?;
        Ok(self
            .merges
            .iter()
            .filter_map(|merge| merge.split_once(' '))
            .map(<[&str; 2]>::from)
            .collect())
    }

    fn added_tokens(&self) -> Vec<Value> {
        let added = self.tokens.iter().enumerate().filter_map(|(id, text)| {
            let kind = self.kind(id);
            (kind == CONTROL_TOKEN || kind == USER_DEFINED_TOKEN).then(|| {
                json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind == CONTROL_TOKEN,
                })
            })
        });
        added.collect()
    }

    /// The token of an id in the description.
    fn named(&self, name: &str, id: Option<i64>) -> Result<Option<(usize, &str)>, String> {
        let Some(id) = id else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| Some((id, self.tokens.get(id)?)));
        match token {
            Some((id, text)) => Ok(Some((id, text))),
            None => Err(format!(
                "has the {name} token {id}, which is not in its vocabulary: it is damaged"
            )),
        }
    }

    fn config(&self, bos: Option<(usize, &str)>) -> Result<String, String> {
        let mut config = Map::new();
        let adds_bos = self.adds_bos.unwrap_or(words(&self.pre)?.adds_bos) && bos.is_some();
        config.insert("add_bos_token".to_owned(), adds_bos.into());
        config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        config.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        let eos = self.named("eos", self.eos)?;
        let (pad, unknown) =
            (self.named("padding", self.pad)?, self.named("unknown", self.unknown)?);
        for (name, token) in [("bos", bos), ("eos", eos), ("pad", pad), ("unk", unknown)] {
            if let Some((_, text)) = token {
                config.insert(format!("{name}_token"), text.into());
            }
        }
        if let Some(tokens) = self.max_tokens {
            config.insert("model_max_length".to_owned(), tokens.into());
        }
        if let Some(template) = &self.chat_template {
            config.insert("chat_template".to_owned(), template.as_str().into());
        }
        Ok(format!("{:#}\n", Value::Object(config)))
    }
}

/// How a text is divided into words, and what belongs to it.
struct Words {
    normalizer: Value,
    pre_tokenizer: Value,
    /// Whether a word that is a token needs no merges.
    ignores_merges: bool,
    /// Whether a text starts with BOS if the file does not say.
    adds_bos: bool,
}

fn words(pre: &str) -> Result<Words, String> {
    let plain = |steps: Vec<Value>| Words {
        normalizer: Value::Null,
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": steps}),
        ignores_merges: false,
        adds_bos: false,
    };
    Ok(match pre {
        "gpt-2" => plain(vec![byte_level(true)]),
        "smollm" => {
            plain(vec![json!({"type": "Digits", "individual_digits": true}), byte_level(true)])
        }
        "llama-bpe" => Words {
            ignores_merges: true,
            adds_bos: true,
            ..plain(vec![split("{1,3}"), byte_level(false)])
        },
        "qwen2" => Words {
            normalizer: json!({"type": "NFC"}),
            ..plain(vec![split(""), byte_level(false)])
        },
        other => {
            return Err(format!(
                "divides texts by the rules {other:?}: only {} are known; give the folder of the original model, with \
                 its tokenizer.json, by --tokenizer",
                KNOWN.join(", ")
            ));
        }
    })
}

/// Bytes as visible characters; `by_words`: after a division into words by GPT-2's expression.
fn byte_level(by_words: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": by_words})
}

/// The division of Llama 3 and Qwen 2, which differ in how many digits are a word.
fn split(digits: &str) -> Value {
    let pattern = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
        digits,
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ];
    json!({"type": "Split", "pattern": {"Regex": pattern.concat()}, "behavior": "Isolated", "invert": false})
}

/// A post-processor that puts a token in front.
fn adding(id: usize, text: &str) -> Value {
    let token = |part: u32| json!({"SpecialToken": {"id": text, "type_id": part}});
    let sequence = |name: &str, part: u32| json!({"Sequence": {"id": name, "type_id": part}});
    json!({
        "type": "TemplateProcessing",
        "single": [token(0), sequence("A", 0)],
        "pair": [token(0), sequence("A", 0), token(1), sequence("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Tokenizer;

    /// All bytes, in their visible form, two merges, and two special tokens in front.
    fn vocabulary(pre: &str) -> GgufVocabulary {
        let is_visible = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let mut invisible = 256..;
        let bytes = (0..256_u32).map(|byte| {
            let code = if is_visible(byte) { byte } else { invisible.next().unwrap() };
            char::from_u32(code).unwrap().to_string()
        });
        let special = ["<s>", "</s>"].map(str::to_owned);
        let merged = ["12", "yo", "you", "[PAD]"].map(str::to_owned);
        let tokens: Vec<String> = special.into_iter().chain(bytes).chain(merged).collect();
        let mut types = vec![1; tokens.len()];
        (types[0], types[1]) = (CONTROL_TOKEN, CONTROL_TOKEN);
        *types.last_mut().unwrap() = UNUSED_TOKEN;
        GgufVocabulary {
            model: "gpt2".to_owned(),
            pre: pre.to_owned(),
            types,
            tokens,
            merges: ["1 2", "y o", "yo u"].map(str::to_owned).into(),
            bos: Some(0),
            eos: Some(1),
            pad: Some(1),
            max_tokens: Some(64),
            chat_template: Some("{{ bos_token }}".to_owned()),
            ..GgufVocabulary::default()
        }
    }

    fn load(vocabulary: &GgufVocabulary) -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let files = vocabulary.files().unwrap();
        fs::write(folder.path().join("tokenizer.json"), files.rules).unwrap();
        fs::write(folder.path().join("tokenizer_config.json"), files.config).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    }

    fn pieces(pre: &str, text: &str) -> Vec<String> {
        let vocabulary = vocabulary(pre);
        let tokens = load(&vocabulary).encode(text).unwrap();
        tokens.iter().map(|token| vocabulary.tokens[*token as usize].clone()).collect()
    }

    #[test]
    fn texts_are_divided_by_the_rules_that_the_file_names() {
        assert_eq!(pieces("gpt-2", "you12</s>"), ["you", "12", "</s>"]);
        assert_eq!(pieces("smollm", "you12"), ["you", "1", "2"]);
        assert_eq!(pieces("llama-bpe", "you12"), ["you", "12"]);
        assert_eq!(pieces("qwen2", "you12"), ["you", "1", "2"]);
        // A letter and a combining accent, which are one character in normal form.
        let decomposed = "e\u{301}";
        assert_eq!(pieces("qwen2", decomposed), ["Ã", "©"]);
        assert_eq!(pieces("llama-bpe", decomposed).len(), 3);
    }

    #[test]
    fn special_tokens_and_the_template_are_those_of_the_file() {
        let tokenizer = load(&vocabulary("smollm"));
        let ids = [tokenizer.bos(), tokenizer.eos(), tokenizer.pad()];
        assert_eq!(ids.map(|token| token.unwrap().id), [0, 1, 1]);
        assert!(!tokenizer.adds_bos());
        assert_eq!(tokenizer.chat_template().unwrap().0, "{{ bos_token }}");
        assert_eq!(tokenizer.vocab_size(), 2 + 256 + 3, "without the unused one");
        assert!(load(&vocabulary("llama-bpe")).adds_bos(), "as llama.cpp does");
        let not = GgufVocabulary { adds_bos: Some(false), ..vocabulary("llama-bpe") };
        assert!(!load(&not).adds_bos());
    }

    #[test]
    fn vocabularies_that_cannot_be_converted_are_refused_with_the_remedy() {
        let good = vocabulary("smollm");
        let refused = |change: &dyn Fn(&mut GgufVocabulary)| {
            let mut vocabulary = good.clone();
            change(&mut vocabulary);
            vocabulary.files().unwrap_err()
        };
        for (error, expected) in [
            (
                refused(&|v| "llama".clone_into(&mut v.model)),
                "of the kind \"llama\": only \"gpt2\"",
            ),
            (
                refused(&|v| "viking".clone_into(&mut v.pre)),
                "by the rules \"viking\": only gpt-2, smollm",
            ),
            (refused(&|v| v.tokens.clear()), "has no tokens"),
            (refused(&|v| v.types.truncate(3)), "but 3 types of tokens"),
            (refused(&|v| v.eos = Some(-1)), "has the eos token -1, which is not in"),
            (refused(&|v| v.pad = Some(999)), "has the padding token 999"),
            (refused(&|v| v.tokens[5] = v.tokens[6].clone()), "twice"),
            (refused(&|v| v.merges.push("q you".to_owned())), "has the merge \"q you\""),
            (refused(&|v| v.merges.push("you".to_owned())), "has the merge \"you\""),
        ] {
            assert!(error.contains(expected), "{error}");
        }
    }
}
