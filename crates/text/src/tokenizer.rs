//! The tokenizer of a model folder, as Hugging Face's `save_pretrained` writes it.
//!
//! | file | content |
//! |---|---|
//! | `tokenizer.json` | vocabulary and rules |
//! | `tokenizer_config.json` | special tokens, `add_bos_token`, `chat_template`; optional |
//! | `special_tokens_map.json`, `config.json` | special tokens that the former does not name; optional |
//! | `chat_template.jinja` | the chat template; wins over the one in `tokenizer_config.json`; optional |

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use baton_data::NO_LABEL;
use serde_json::Value;
use tokenizers::PostProcessorWrapper;

use crate::{EncodedSample, Error};

/// Name of the file with vocabulary and rules.
pub const VOCABULARY_FILE: &str = "tokenizer.json";
const CONFIG_FILE: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_FILE: &str = "special_tokens_map.json";
const MODEL_CONFIG_FILE: &str = "config.json";
const GENERATION_CONFIG_FILE: &str = "generation_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";

/// The tokenizer of a model.
#[derive(Debug)]
pub struct Tokenizer {
    /// Without post-processor, truncation and padding: adding tokens is our business, and a post-processor may move the
    /// offsets of tokens.
    rules: tokenizers::Tokenizer,
    folder: PathBuf,
    bos: Option<SpecialToken>,
    eos: Option<SpecialToken>,
    pad: Option<SpecialToken>,
    ends: BTreeSet<u32>,
    adds_bos: bool,
    /// Whether a text gets a space in front, as tokenizers of SentencePiece's kind do.
    adds_space: bool,
    vocab_size: u32,
    special_texts: BTreeMap<String, String>,
    chat_template: Option<(String, PathBuf)>,
}

/// A token with a meaning of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its id.
    pub id: u32,
    /// Its text, e.g. `</s>`.
    pub text: String,
}

/// A token and the bytes of the text that it stands for.
pub(crate) type TokenSpan = (u32, Range<usize>);

impl Tokenizer {
    /// Loads the tokenizer of a model folder.
    ///
    /// # Errors
    /// There is no `tokenizer.json`, or a file cannot be read or understood.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self, Error> {
        let folder = folder.as_ref();
        let path = folder.join(VOCABULARY_FILE);
        let bytes = read_optional(&path)?.ok_or_else(|| missing_vocabulary(folder))?;
        let rules = guarded(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(|reason| {
            Error::file(&path, format!("cannot be read as a tokenizer: {reason}"))
        })?;
        let sources =
            [read_json(&folder.join(CONFIG_FILE))?, read_json(&folder.join(SPECIAL_TOKENS_FILE))?];
        let model_config = read_json(&folder.join(MODEL_CONFIG_FILE))?;
        let mut tokenizer = Self::new(folder, rules, &sources, &model_config)?;
        let generation = read_json(&folder.join(GENERATION_CONFIG_FILE))?;
        for config in [&model_config, &generation] {
            tokenizer.ends.extend(all_ids(&config["eos_token_id"]));
        }
        Ok(tokenizer)
    }

    fn new(
        folder: &Path,
        mut rules: tokenizers::Tokenizer,
        sources: &[Value],
        model_config: &Value,
    ) -> Result<Self, Error> {
        let path = folder.join(VOCABULARY_FILE);
        let failed = |reason: String| Error::file(&path, format!("cannot be used: {reason}"));
        // Settings of the program that saved it: they would cut or fill every text.
        guarded(|| rules.with_truncation(None).map(|_| ())).map_err(failed)?;
        rules.with_padding(None);
        let added = guarded(|| added_in_front(&rules)).map_err(failed)?;
        rules.with_post_processor(None::<PostProcessorWrapper>);
        let adds_space = guarded(|| adds_space(&rules)).map_err(failed)?;

        let special_texts = special_texts(sources);
        let named = |name: &str| {
            let text = special_texts.get(&format!("{name}_token")).cloned();
            let text = text.or_else(|| {
                rules.id_to_token(all_ids(&model_config[format!("{name}_token_id")]).next()?)
            })?;
            let id = rules.token_to_id(&text)?;
            Some(SpecialToken { id, text })
        };
        let of_id = |id: u32| Some(SpecialToken { id, text: rules.id_to_token(id)? });
        let bos = named("bos").or_else(|| added.and_then(of_id));
        let adds_bos = match sources[0]["add_bos_token"].as_bool() {
            Some(true) if bos.is_none() => {
                let reason = "add_bos_token is set, but bos_token is not in the vocabulary: correct one of them";
                return Err(Error::file(folder.join(CONFIG_FILE), reason));
            }
            Some(adds) => adds,
            None => bos.as_ref().is_some_and(|bos| added == Some(bos.id)),
        };
        let (eos, pad) = (named("eos"), named("pad"));
        let largest = rules.get_vocab(true).into_values().max();
        Ok(Self {
            folder: folder.to_owned(),
            ends: eos.iter().map(|eos| eos.id).collect(),
            bos,
            eos,
            pad,
            adds_bos,
            adds_space,
            vocab_size: largest.map_or(0, |id| id.saturating_add(1)),
            chat_template: chat_template(folder, &sources[0])?,
            special_texts,
            rules,
        })
    }

    /// Folder of the model.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// One more than the largest id: the least number of rows that a model's embedding must have.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// The token that starts a text.
    #[must_use]
    pub fn bos(&self) -> Option<&SpecialToken> {
        self.bos.as_ref()
    }

    /// The token that ends a text.
    #[must_use]
    pub fn eos(&self) -> Option<&SpecialToken> {
        self.eos.as_ref()
    }

    /// All tokens that end a generated text: [`eos`](Self::eos), and those that the model's files name, such as the end of
    /// a turn.
    #[must_use]
    pub fn ends(&self) -> &BTreeSet<u32> {
        &self.ends
    }

    /// The special token with which the last learned part of a sample ends, perhaps before a line break, if the model's
    /// files do not name it as an end: the model learns to write it, and then goes on.
    pub(crate) fn unknown_end(&self, sample: &EncodedSample) -> Option<String> {
        let counted = sample.tokens.iter().zip(&sample.labels).rev();
        let counted = counted.skip_while(|(_, label)| **label == NO_LABEL);
        let counted = counted.take_while(|(_, label)| **label != NO_LABEL);
        let last: Vec<u32> = counted.take(MAX_TOKENS_FROM_END).map(|(token, _)| *token).collect();
        if last.iter().any(|token| self.ends.contains(token)) {
            return None;
        }
        let added = self.rules.get_added_tokens_decoder();
        let special = last.iter().find_map(|token| added.get(token).filter(|added| added.special));
        special.map(|token| token.content.clone())
    }

    /// The token that fills a batch.
    #[must_use]
    pub fn pad(&self) -> Option<&SpecialToken> {
        self.pad.as_ref()
    }

    /// Whether the model's texts start with [`bos`](Self::bos): `add_bos_token`, or else what `tokenizer.json` does.
    #[must_use]
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// The model's chat template, and the file that it is from.
    #[must_use]
    pub fn chat_template(&self) -> Option<(&str, &Path)> {
        self.chat_template.as_ref().map(|(template, path)| (template.as_str(), path.as_path()))
    }

    /// Texts of the special tokens by their names, e.g. `eos_token`, as chat templates use them.
    #[must_use]
    pub fn special_texts(&self) -> &BTreeMap<String, String> {
        &self.special_texts
    }

    /// The tokens of a text. No token is added; special tokens that are written in the text are recognised.
    ///
    /// # Errors
    /// The tokenizer has no token for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoded = guarded(|| self.rules.encode_fast(text, false)).map_err(Error::Tokenizer)?;
        Ok(encoded.get_ids().to_vec())
    }

    /// As [`encode`](Self::encode), with the bytes of the text that each token stands for.
    pub(crate) fn encode_spans(&self, text: &str) -> Result<Vec<TokenSpan>, Error> {
        let encoded = guarded(|| self.rules.encode(text, false)).map_err(Error::Tokenizer)?;
        let spans = encoded.get_offsets().iter().map(|(start, end)| *start..*end);
        Ok(encoded.get_ids().iter().copied().zip(spans).collect())
    }

    /// As [`encode_spans`](Self::encode_spans), for a text that continues another one, so that it gets no space in front.
    pub(crate) fn encode_continuation(&self, text: &str) -> Result<Vec<TokenSpan>, Error> {
        if !self.adds_space {
            return self.encode_spans(text);
        }
        let spans = self.encode_spans(&[GUARD, text].concat())?;
        let is_separate =
            spans.iter().all(|(_, span)| span.end <= GUARD.len() || span.start >= GUARD.len());
        if !is_separate {
            return self.encode_spans(text);
        }
        let shifted = |(token, span): TokenSpan| {
            Some((token, span.start.checked_sub(GUARD.len())?..span.end - GUARD.len()))
        };
        Ok(spans.into_iter().filter_map(shifted).collect())
    }

    /// The text of tokens, special ones included. Ids that are not in the vocabulary are left out.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        guarded(|| self.rules.decode(tokens, false)).map_err(Error::Tokenizer)
    }

    /// The text of tokens up to the first one that [ends](Self::ends) it. A model stops there, and a chat template may
    /// write a line break after it.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_until_end(&self, tokens: &[u32]) -> Result<String, Error> {
        let end = tokens.iter().position(|token| self.ends.contains(token));
        self.decode(tokens.get(..end.unwrap_or(tokens.len())).unwrap_or_default())
    }
}

/// How near the end of a sample its last special token is: a template may write a line break or two after it.
const MAX_TOKENS_FROM_END: usize = 3;

/// What stands before a text that continues another one: tokens seldom contain a line break and what follows.
const GUARD: &str = "\n";

fn adds_space(rules: &tokenizers::Tokenizer) -> tokenizers::Result<bool> {
    let (alone, after) = (rules.encode("a", false)?, rules.encode([GUARD, "a"].concat(), false)?);
    Ok(!after.get_ids().ends_with(alone.get_ids())
        || after.get_ids().len() == alone.get_ids().len())
}

/// The last token that the post-processor adds in front of a text.
fn added_in_front(rules: &tokenizers::Tokenizer) -> tokenizers::Result<Option<u32>> {
    let of = |added| rules.encode_fast("a", added).map(|encoded| encoded.get_ids().to_vec());
    let (plain, all) = (of(false)?, of(true)?);
    let start = (0..all.len()).find(|start| all[*start..].starts_with(&plain));
    Ok(start.filter(|start| *start > 0).map(|start| all[start - 1]))
}

/// All `…_token` keys; earlier sources win. A value is a text or an object with `content`.
fn special_texts(sources: &[Value]) -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    for (key, value) in sources.iter().filter_map(Value::as_object).flatten() {
        let text = value.as_str().or_else(|| value["content"].as_str());
        if let Some(text) = text.filter(|text| key.ends_with("_token") && !text.is_empty()) {
            texts.entry(key.clone()).or_insert_with(|| text.to_owned());
        }
    }
    texts
}

/// An id, or several, as some models have more than one end of text.
fn all_ids(value: &Value) -> impl Iterator<Item = u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok())
}

fn chat_template(folder: &Path, config: &Value) -> Result<Option<(String, PathBuf)>, Error> {
    let path = folder.join(TEMPLATE_FILE);
    if let Some(bytes) = read_optional(&path)? {
        let text = String::from_utf8(bytes);
        let text =
            text.map_err(|_| Error::file(&path, "is not UTF-8: it must be a Jinja template"))?;
        return Ok(Some((text, path)));
    }
    let template = match &config["chat_template"] {
        Value::String(template) => Some(template.as_str()),
        Value::Array(list) => {
            let default = list.iter().find(|entry| entry["name"] == "default");
            default.and_then(|entry| entry["template"].as_str())
        }
        _ => None,
    };
    Ok(template.map(|template| (template.to_owned(), folder.join(CONFIG_FILE))))
}

fn missing_vocabulary(folder: &Path) -> Error {
    let reason = match folder.is_dir() {
        true => {
            "has no tokenizer.json: give the folder of a model that has one; transformers' `save_pretrained` of a \
                 fast tokenizer writes it"
        }
        false => "is not a folder: give the folder of a model, with its tokenizer.json",
    };
    Error::file(folder, reason)
}

/// The bytes of a file; `None` if it does not exist.
fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(None)
        }
        Err(error) => Err(Error::io("read", path)(error)),
    }
}

/// The JSON object in a file; null if the file does not exist.
fn read_json(path: &Path) -> Result<Value, Error> {
    let Some(bytes) = read_optional(path)? else { return Ok(Value::Null) };
    let value: Value = serde_json::from_slice(&bytes)
        .map_err(|error| Error::file(path, format!("is not valid JSON: {error}")))?;
    if !value.is_object() {
        return Err(Error::file(path, "must be a JSON object"));
    }
    Ok(value)
}

/// Calls the library, which panics on some inputs, and returns its error as text.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("its library panicked, see the message on stderr".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::Model;

    #[test]
    fn text_is_encoded_and_decoded_and_special_tokens_in_it_are_recognised() {
        let model = Model::new();
        let tokenizer = model.load();
        let tokens = tokenizer.encode("<|im_start|>user\nhi, you<|im_end|>").unwrap();
        assert_eq!(tokenizer.decode(&tokens).unwrap(), "<|im_start|>user\nhi, you<|im_end|>");
        assert_eq!(tokens.first(), Some(&model.id("<|im_start|>")));
        assert_eq!(tokens.last(), Some(&model.id("<|im_end|>")));
        assert_eq!(tokenizer.vocab_size(), model.vocab_size());
    }

    #[test]
    fn every_end_that_a_file_of_the_model_names_ends_a_text() {
        let model = Model::new();
        let [eos, turn, text] = ["</s>", "<|im_end|>", "<|eot_id|>"].map(|token| model.id(token));
        model.config(&json!({"eos_token": "</s>"}));
        assert_eq!(*model.load().ends(), [eos].into());
        model.write("config.json", &json!({"eos_token_id": turn}).to_string());
        let ends = json!({"eos_token_id": [eos, text]}).to_string();
        model.write("generation_config.json", &ends);
        assert_eq!(*model.load().ends(), [eos, turn, text].into());
    }

    #[test]
    fn a_text_is_decoded_until_its_first_end() {
        let model = Model::new();
        model.config(&json!({"eos_token": "<|im_end|>"}));
        let tokenizer = model.load();
        for (text, expected) in [
            ("hi, you", "hi, you"),
            ("hi, you<|im_end|>", "hi, you"),
            ("hi, you<|im_end|>\n<|im_start|>user\n", "hi, you"),
            ("<|im_end|>hi", ""),
        ] {
            let tokens = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode_until_end(&tokens).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn special_tokens_are_texts_or_objects_or_ids_of_the_model() {
        let model = Model::new();
        let ids = |tokenizer: &Tokenizer| {
            [tokenizer.bos(), tokenizer.eos(), tokenizer.pad()]
                .map(|token| token.map(|token| token.id))
        };
        let [bos, eos] = ["<s>", "</s>"].map(|token| Some(model.id(token)));
        model.config(
            &json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": null}),
        );
        assert_eq!(ids(&model.load()), [bos, eos, None]);
        // As GPT-2's folder, which names no special token.
        model.config(&json!({"model_max_length": 1024}));
        model.write(
            "config.json",
            &json!({"eos_token_id": [eos, bos], "pad_token_id": eos}).to_string(),
        );
        assert_eq!(ids(&model.load()), [None, eos, eos]);
        model.write("special_tokens_map.json", &json!({"eos_token": "<s>"}).to_string());
        assert_eq!(ids(&model.load()), [None, bos, eos]);
    }

    #[test]
    fn bos_is_added_as_the_configuration_says_or_else_as_the_rules_do() {
        let model = Model::new();
        let adds = |config: Value| {
            model.config(&config);
            model.load().adds_bos()
        };
        assert!(!adds(json!({"bos_token": "<s>"})));
        assert!(adds(json!({"bos_token": "<s>", "add_bos_token": true})));
        model.add_bos_by_rules();
        assert!(adds(json!({"bos_token": "<s>"})));
        assert!(adds(json!({})), "the token that is added must be BOS");
        assert!(!adds(json!({"bos_token": "<s>", "add_bos_token": false})));
        assert_eq!(model.load().encode("a").unwrap().len(), 1, "encode never adds a token");
    }

    #[test]
    fn stored_truncation_and_padding_are_not_applied() {
        let model = Model::new();
        model.change_rules(|rules| {
            rules["truncation"] =
                json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
            rules["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"});
        });
        assert_eq!(model.load().encode("a b c").unwrap().len(), 4);
    }

    #[test]
    fn a_chat_template_is_a_text_or_the_default_of_a_list_or_a_file() {
        let model = Model::new();
        let template = || model.load().chat_template().map(|(text, _)| text.to_owned());
        assert_eq!(template(), None);
        model.config(&json!({"chat_template": "one"}));
        assert_eq!(template().unwrap(), "one");
        model.config(&json!({"chat_template":
            [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]}));
        assert_eq!(template().unwrap(), "two");
        model.config(&json!({"chat_template": [{"name": "rag", "template": "x"}]}));
        assert_eq!(template(), None, "templates for other purposes");
        model.write("chat_template.jinja", "three");
        assert_eq!(template().unwrap(), "three");
    }

    #[test]
    fn a_damaged_model_folder_is_refused_with_the_file_and_a_remedy() {
        let refused = |model: &Model| Tokenizer::load(model.folder()).unwrap_err().to_string();
        let error = Tokenizer::load("/nowhere").unwrap_err().to_string();
        assert!(
            error.starts_with("/nowhere: is not a folder: give the folder of a model"),
            "{error}"
        );
        let model = Model::new();
        for (config, reason) in [
            ("{", "tokenizer_config.json: is not valid JSON: EOF"),
            ("[]", "tokenizer_config.json: must be a JSON object"),
            (
                r#"{"add_bos_token": true, "bos_token": "<no>"}"#,
                "bos_token is not in the vocabulary",
            ),
        ] {
            model.write("tokenizer_config.json", config);
            let error = refused(&model);
            assert!(error.contains(reason), "{error}");
        }
        model.write("tokenizer.json", "{\"model\": 3}");
        assert!(
            refused(&model).contains("tokenizer.json: cannot be read as a tokenizer: "),
            "{}",
            refused(&model)
        );
        fs::remove_file(model.folder().join("tokenizer.json")).unwrap();
        assert!(
            refused(&model)
                .contains("has no tokenizer.json: give the folder of a model that has one")
        );
    }
}
