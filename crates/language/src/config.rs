//! `config.json` of a model → [`DecoderModel`], with transformers' defaults for keys that are absent.
//!
//! A key that is not known may change what the model computes, so it is refused by name.

use std::{cell::RefCell, collections::BTreeSet};

use serde_json::{Map, Value};

use crate::decoder::{Activation, DecoderLayer, DecoderModel, NormScale, Rope, RopeScaling};

/// Keys that do not change the computation of a forward pass.
const UNUSED_KEYS: &[&str] = &[
    "_attn_implementation_autoset",
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "return_dict",
    "rope_interleaved",
    // Gemma 2 9B has it beside `sliding_window`, which alone is read by transformers.
    "sliding_window_size",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "use_cache",
];

/// What distinguishes a family, besides the values in its `config.json`.
struct Family {
    name: &'static str,
    is_gemma: bool,
    has_head_norms: bool,
    /// Whether queries, keys and values have biases; `None`: `attention_bias` says so, for the output too.
    qkv_bias: Option<bool>,
    has_mlp_bias_key: bool,
    ties_by_default: bool,
    windows: WindowedLayers,
}

/// Which layers attend to a window only.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WindowedLayers {
    /// None.
    None,
    /// All, if `sliding_window` is a number.
    All,
    /// Those from `max_window_layers` on, if `use_sliding_window`.
    Upper,
    /// All except every `n`-th.
    Except(u64),
}

const FAMILIES: &[Family] = &[
    Family { has_mlp_bias_key: true, ..plain("llama") },
    Family { windows: WindowedLayers::All, qkv_bias: Some(false), ..plain("mistral") },
    Family { windows: WindowedLayers::Upper, qkv_bias: Some(true), ..plain("qwen2") },
    Family { windows: WindowedLayers::Upper, has_head_norms: true, ..plain("qwen3") },
    Family { windows: WindowedLayers::Except(2), ..gemma("gemma2") },
    Family { windows: WindowedLayers::Except(6), has_head_norms: true, ..gemma("gemma3_text") },
];

const fn plain(name: &'static str) -> Family {
    Family {
        name,
        is_gemma: false,
        has_head_norms: false,
        qkv_bias: None,
        has_mlp_bias_key: false,
        ties_by_default: false,
        windows: WindowedLayers::None,
    }
}

const fn gemma(name: &'static str) -> Family {
    Family { is_gemma: true, ties_by_default: true, ..plain(name) }
}

/// Most layers; the largest published models have fewer than 200.
const MAX_LAYERS: u64 = 4096;
/// Largest value of any size, so that products of two fit into 64 bits.
const MAX_SIZE: u64 = 1 << 24;
/// Largest number of values of a token within a layer; published models have at most 53,248.
const MAX_WIDTH: u64 = 1 << 18;
/// Largest number of token ids.
const MAX_VOCABULARY: u64 = 1 << 22;

/// Reads `config.json`.
///
/// # Errors
/// Not JSON, a family or a value that is not supported, a missing or unknown key: what, and its name.
pub fn read(text: &str) -> Result<DecoderModel, String> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("is not valid JSON: {error}"))?;
    let Value::Object(map) = value else { return Err("is not a JSON object".to_owned()) };
    let keys = ConfigKeys { map: &map, used: RefCell::default() };
    let name = keys.text("model_type", None)?;
    let known: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
    let Some(family) = FAMILIES.iter().find(|family| family.name == name) else {
        return Err(format!(
            "has model_type = {name:?}, which Baton does not know: choose a model of {}",
            known.join(", ")
        ));
    };
    let decoder = decoder(family, &keys)?;
    keys.refuse_unknown()?;
    check(&decoder)?;
    Ok(decoder)
}

fn decoder(family: &Family, keys: &ConfigKeys<'_>) -> Result<DecoderModel, String> {
    let hidden = keys.size("hidden_size", None)?;
    let heads = keys.size("num_attention_heads", None)?;
    let head_dim = match family.name {
        "gemma2" | "gemma3_text" => keys.size("head_dim", Some(256))?,
        "qwen3" => keys.size("head_dim", Some(128))?,
        _ => keys.size("head_dim", Some(hidden / heads.max(1)))?,
    };
    let attention_bias = match family.qkv_bias {
        Some(has_bias) => has_bias,
        None => keys.flag("attention_bias", false)?,
    };
    let activation = activation(family, keys)?;
    let score_scale = match family.is_gemma {
        true => keys.number("query_pre_attn_scalar", Some(256.0))?.powf(-0.5),
        false => (head_dim as f64).powf(-0.5),
    };
    let cap = |key: &str, default: Option<f64>| match (family.is_gemma, family.name) {
        (true, "gemma2") => keys.optional(key, default),
        (true, _) => keys.optional(key, None),
        _ => Ok(None),
    };
    let dropout = keys.read("attention_dropout", Some(0.0), "a number", Value::as_f64)?;
    if dropout != 0.0 {
        return Err(format!("has attention_dropout = {dropout}: only 0 is supported"));
    }
    Ok(DecoderModel {
        family: family.name.to_owned(),
        vocabulary: keys.size("vocab_size", None)?,
        hidden,
        intermediate: keys.size("intermediate_size", None)?,
        heads,
        kv_heads: keys.size("num_key_value_heads", (family.name == "llama").then_some(heads))?,
        head_dim,
        max_positions: keys.size("max_position_embeddings", Some(2048))?,
        layers: layers(family, keys)?,
        norm_eps: keys.number("rms_norm_eps", Some(1e-6))?,
        norm_scale: match family.is_gemma {
            true => NormScale::OnePlusWeight,
            false => NormScale::Weight,
        },
        has_post_norms: family.is_gemma,
        has_head_norms: family.has_head_norms,
        activation,
        has_qkv_bias: attention_bias,
        has_output_bias: attention_bias && family.qkv_bias.is_none(),
        has_mlp_bias: family.has_mlp_bias_key && keys.flag("mlp_bias", false)?,
        score_scale,
        score_cap: cap("attn_logit_softcapping", Some(50.0))?,
        logit_cap: cap("final_logit_softcapping", Some(30.0))?,
        embedding_scale: family.is_gemma.then(|| (hidden as f64).sqrt()),
        ties_head: keys.flag("tie_word_embeddings", family.ties_by_default)?,
    })
}

fn activation(family: &Family, keys: &ConfigKeys<'_>) -> Result<Activation, String> {
    let (key, default) = match family.is_gemma {
        true => ("hidden_activation", "gelu_pytorch_tanh"),
        false => ("hidden_act", "silu"),
    };
    if family.is_gemma {
        // Older files have it beside the other, which wins.
        keys.text("hidden_act", Some(default))?;
    }
    match keys.text(key, Some(default))?.as_str() {
        "silu" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => {
            Err(format!("has {key} = {other:?}: only silu and gelu_pytorch_tanh are supported"))
        }
    }
}

/// The layers, each with its window and rotary positions.
fn layers(family: &Family, keys: &ConfigKeys<'_>) -> Result<Vec<DecoderLayer>, String> {
    let count = keys.size("num_hidden_layers", None)?;
    if count > MAX_LAYERS {
        return Err(format!("has num_hidden_layers = {count}: at most {MAX_LAYERS} are supported"));
    }
    let window = match family.windows {
        WindowedLayers::None => None,
        WindowedLayers::Except(_) => Some(keys.size("sliding_window", Some(4096))?),
        // Absent, it is 4096; null, there is none.
        WindowedLayers::All => keys.optional_size("sliding_window", Some(4096))?,
        WindowedLayers::Upper => {
            let window = keys.optional_size("sliding_window", Some(4096))?;
            if keys.flag("use_sliding_window", false)? { window } else { None }
        }
    };
    let first = match family.windows {
        WindowedLayers::Upper => keys.size("max_window_layers", Some(28))?,
        _ => 0,
    };
    let every = match family.windows {
        WindowedLayers::Except(every) => {
            // Newer files have the name with an underscore.
            let every = keys.size("_sliding_window_pattern", Some(every))?;
            keys.size("sliding_window_pattern", Some(every))?
        }
        _ => 0,
    };
    let kinds = keys.texts("layer_types")?;
    if kinds.as_ref().is_some_and(|kinds| kinds.len() as u64 != count) {
        return Err("has layer_types and num_hidden_layers of different lengths".to_owned());
    }
    let (global, local) = ropes(family, keys)?;
    let mut layers = Vec::new();
    for layer in 0..count {
        let slides = match kinds.as_ref().and_then(|kinds| kinds.get(layer as usize)) {
            Some(kind) if kind == "sliding_attention" => true,
            Some(kind) if kind == "full_attention" => false,
            Some(kind) => {
                return Err(format!(
                    "has a layer of type {kind:?}: only full_attention and sliding_attention are supported"
                ));
            }
            None if every > 0 => !(layer + 1).is_multiple_of(every),
            None => layer >= first,
        };
        let window = window.filter(|_| slides);
        layers.push(DecoderLayer { window, rope: if slides { local } else { global } });
    }
    Ok(layers)
}

/// The rotary positions of layers without and with a window.
fn ropes(family: &Family, keys: &ConfigKeys<'_>) -> Result<(Rope, Rope), String> {
    let is_gemma3 = family.name == "gemma3_text";
    let default = if is_gemma3 { 1e6 } else { 1e4 };
    let theta = keys.number("rope_theta", Some(default))?;
    let local_theta =
        if is_gemma3 { keys.number("rope_local_base_freq", Some(1e4))? } else { theta };
    let scaling = rope(keys.object("rope_scaling")?, theta)?;
    let local =
        if is_gemma3 { Rope { theta: local_theta, scaling: RopeScaling::None } } else { scaling };
    // The form of transformers 5, which wins.
    let Some(parameters) = keys.object("rope_parameters")? else { return Ok((scaling, local)) };
    let of_kind = |kind: &str| parameters.get(kind).and_then(Value::as_object);
    match (of_kind("full_attention"), of_kind("sliding_attention")) {
        (None, None) => {
            let rope = rope(Some(parameters), theta)?;
            Ok((rope, if is_gemma3 { local } else { rope }))
        }
        (full, sliding) => Ok((rope(full, theta)?, rope(sliding, local_theta)?)),
    }
}

/// Rotary positions from `rope_scaling` or `rope_parameters`.
fn rope(map: Option<&Map<String, Value>>, theta: f64) -> Result<Rope, String> {
    let Some(map) = map else { return Ok(Rope { theta, scaling: RopeScaling::None }) };
    let keys = ConfigKeys { map, used: RefCell::default() };
    let theta = keys.number("rope_theta", Some(theta))?;
    let old = keys.text("type", Some("default"))?;
    let scaling = match keys.text("rope_type", Some(&old))?.as_str() {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: keys.number("factor", None)? },
        "llama3" => {
            let (low, high) =
                (keys.number("low_freq_factor", None)?, keys.number("high_freq_factor", None)?);
            if high <= low {
                return Err(format!(
                    "has high_freq_factor = {high}, which must be above low_freq_factor = {low}"
                ));
            }
            let original = keys.number("original_max_position_embeddings", None)?;
            RopeScaling::Llama3 { factor: keys.number("factor", None)?, low, high, original }
        }
        other => {
            return Err(format!(
                "has rotary positions of type {other:?}: only default, linear and llama3 are supported"
            ));
        }
    };
    keys.refuse_unknown()?;
    Ok(Rope { theta, scaling })
}

/// Checks what the computation relies on.
fn check(decoder: &DecoderModel) -> Result<(), String> {
    let DecoderModel { heads, kv_heads, head_dim, hidden, intermediate, vocabulary, .. } = *decoder;
    // Larger than any model; products of sizes, layers and positions stay far below 2^64.
    for (what, size) in [
        ("num_attention_heads x head_dim", heads * head_dim),
        ("hidden_size", hidden),
        ("intermediate_size", intermediate),
    ] {
        if size > MAX_WIDTH {
            return Err(format!("has {what} = {size}: at most {MAX_WIDTH} is supported"));
        }
    }
    if vocabulary > MAX_VOCABULARY {
        return Err(format!(
            "has vocab_size = {vocabulary}: at most {MAX_VOCABULARY} is supported"
        ));
    }
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!(
            "has num_attention_heads = {heads}, which is no multiple of num_key_value_heads = {kv_heads}"
        ));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(format!("has head_dim = {head_dim}, which must be even"));
    }
    Ok(())
}

/// The keys of an object, and which of them were read.
struct ConfigKeys<'a> {
    map: &'a Map<String, Value>,
    used: RefCell<BTreeSet<String>>,
}

impl<'a> ConfigKeys<'a> {
    /// The value of a key, unless it is absent or null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.used.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        key: &str,
        default: Option<T>,
        what: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<T, String> {
        match (self.get(key), default) {
            (Some(value), _) => {
                convert(value).ok_or_else(|| format!("has {key} = {value}, which must be {what}"))
            }
            (None, Some(default)) => Ok(default),
            (None, None) => Err(format!("has no {key}")),
        }
    }

    fn size(&self, key: &str, default: Option<u64>) -> Result<u64, String> {
        let what = format!("a whole number from 1 to {MAX_SIZE}");
        let convert = |value: &Value| value.as_u64().filter(|n| (1..=MAX_SIZE).contains(n));
        self.read(key, default, &what, convert)
    }

    fn number(&self, key: &str, default: Option<f64>) -> Result<f64, String> {
        let is_valid = |value: &f64| *value > 0.0 && value.is_finite();
        self.read(key, default, "a number above 0", |value| value.as_f64().filter(is_valid))
    }

    /// A number that may be null, which is not the same as absent.
    fn optional(&self, key: &str, default: Option<f64>) -> Result<Option<f64>, String> {
        match (self.map.contains_key(key), self.get(key)) {
            (false, _) => Ok(default),
            (true, None) => Ok(None),
            (true, Some(_)) => self.number(key, None).map(Some),
        }
    }

    /// A size that may be null, which is not the same as absent.
    fn optional_size(&self, key: &str, default: Option<u64>) -> Result<Option<u64>, String> {
        match (self.map.contains_key(key), self.get(key)) {
            (false, _) => Ok(default),
            (true, None) => Ok(None),
            (true, Some(_)) => self.size(key, None).map(Some),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, String> {
        self.read(key, Some(default), "true or false", Value::as_bool)
    }

    fn text(&self, key: &str, default: Option<&str>) -> Result<String, String> {
        let convert = |value: &Value| value.as_str().map(str::to_owned);
        self.read(key, default.map(str::to_owned), "a text", convert)
    }

    fn texts(&self, key: &str) -> Result<Option<Vec<String>>, String> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let convert =
            |value: &Value| value.as_array()?.iter().map(text).collect::<Option<Vec<_>>>();
        self.get(key).map(|_| self.read(key, None, "a list of texts", convert)).transpose()
    }

    fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, String> {
        self.get(key).map(|_| self.read(key, None, "an object", Value::as_object)).transpose()
    }

    /// Refuses keys that were not read and may change the computation.
    fn refuse_unknown(&self) -> Result<(), String> {
        let used = self.used.borrow();
        let is_unknown =
            |key: &&String| !used.contains(*key) && !UNUSED_KEYS.contains(&key.as_str());
        // What is null, false or empty does not switch anything on.
        let is_set = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(values) => !values.is_empty(),
            Value::Object(values) => !values.is_empty(),
            _ => true,
        };
        let mut unknown = self.map.keys().filter(is_unknown).filter(|key| is_set(&self.map[*key]));
        match unknown.next() {
            None => Ok(()),
            Some(key) => Err(format!(
                "has {key} = {}, which Baton does not know and which may change what the model computes: remove it \
                 from a copy of the file if transformers computes the same without it",
                self.map[key]
            )),
        }
    }
}
