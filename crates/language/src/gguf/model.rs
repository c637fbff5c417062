//! Description and tensors of a GGUF file → those of a model folder.

use std::{cell::RefCell, collections::BTreeSet};

use baton_model::Float;
use serde_json::{Map, Value, json};

use super::file::{GgufFile, GgufTensor, GgufValue};
use crate::{
    DecoderModel, Error, config,
    decoder::{EMBEDDING, FINAL_NORM, HEAD},
    model::{CONFIG, torch_name},
    output::{NewFolder, NewTensor},
};

/// An architecture of llama.cpp and the family of models that it is.
struct GgufArchitecture {
    name: &'static str,
    model_type: &'static str,
    class: &'static str,
    is_gemma: bool,
    /// Number of layers of the largest model, which scales attention scores by another size than that of a head.
    largest: u64,
}

const ARCHITECTURES: &[GgufArchitecture] = &[
    plain("llama", "llama", "LlamaForCausalLM"),
    plain("qwen2", "qwen2", "Qwen2ForCausalLM"),
    plain("qwen3", "qwen3", "Qwen3ForCausalLM"),
    GgufArchitecture {
        is_gemma: true,
        largest: 46,
        ..plain("gemma2", "gemma2", "Gemma2ForCausalLM")
    },
    GgufArchitecture {
        is_gemma: true,
        largest: 62,
        ..plain("gemma3", "gemma3_text", "Gemma3ForCausalLM")
    },
];

const fn plain(
    name: &'static str,
    model_type: &'static str,
    class: &'static str,
) -> GgufArchitecture {
    GgufArchitecture { name, model_type, class, is_gemma: false, largest: 0 }
}

/// Keys that do not change what the model computes.
const IGNORED_KEYS: &[&str] = &[
    "attention.causal",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "vocab_size",
];

/// Factors of rotary wavelengths, a tensor of Llama 3.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A GGUF file as a model folder.
#[derive(Debug)]
pub struct GgufModel<'a> {
    file: &'a GgufFile,
    /// What it computes.
    pub decoder: DecoderModel,
    config: String,
    tensors: Vec<NewTensor>,
    is_gemma: bool,
    /// Whether rows of queries and keys are in the order of llama.cpp.
    is_permuted: bool,
}

impl<'a> GgufModel<'a> {
    /// Plans the folder, with weights in the format `float`.
    ///
    /// # Errors
    /// An architecture, key or tensor that is not supported or is missing.
    pub fn new(file: &'a GgufFile, float: Float) -> Result<Self, Error> {
        let fail = |problem: String| Error::new(file.path(), problem);
        let found = file.text("general.architecture");
        let architecture = ARCHITECTURES.iter().find(|known| Some(known.name) == found);
        let architecture = architecture.ok_or_else(|| {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|known| known.name).collect();
            let found = found.unwrap_or("none");
            fail(format!("has the architecture {found:?}: only {} are supported", known.join(", ")))
        })?;
        let config = config(file, architecture, float).map_err(fail)?;
        let text = format!("{:#}\n", Value::Object(config));
        let decoder = config::read(&text)
            .map_err(|problem| fail(format!("describes a model whose config.json {problem}")))?;
        check_tensors(file, &decoder).map_err(fail)?;
        let tensors = decoder.tensors().into_iter();
        let tensors =
            tensors.map(|tensor| NewTensor { name: tensor.name, shape: tensor.shape, float });
        Ok(Self {
            file,
            config: text,
            tensors: tensors.collect(),
            decoder,
            is_gemma: architecture.is_gemma,
            is_permuted: architecture.name == "llama",
        })
    }

    /// Size of all weights in the new folder, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(NewTensor::bytes).sum()
    }

    /// Writes `config.json` and the weights. In memory is one tensor at a time.
    ///
    /// # Errors
    /// A file cannot be read or written; a value is too large for its format.
    pub fn write(
        &self,
        folder: &NewFolder,
        max_file_bytes: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        folder.write(CONFIG, self.config.as_bytes())?;
        let mut read = |tensor: &NewTensor| self.values(tensor);
        folder.write_weights(&self.tensors, max_file_bytes, &mut read, progress)
    }

    fn values(&self, tensor: &NewTensor) -> Result<Vec<f32>, Error> {
        let name = stored_name(&tensor.name, self.is_gemma);
        let stored = name.as_deref().and_then(|name| self.file.tensor(name));
        let missing = || Error::new(self.file.path(), format!("has no tensor for {}", tensor.name));
        let mut values = self.file.read(stored.ok_or_else(missing)?)?;
        if self.is_gemma && tensor.name.ends_with("norm.weight") {
            // Stored is what scales: 1 + w.
            values.iter_mut().for_each(|value| *value -= 1.0);
        }
        let is_of = |layer: &str| tensor.name.contains(&format!(".{layer}."));
        let heads = match (is_of("q_proj"), is_of("k_proj")) {
            (true, _) => self.decoder.heads,
            (_, true) => self.decoder.kv_heads,
            _ => return Ok(values),
        };
        if self.is_permuted {
            values = halves_apart(&values, heads as usize, self.decoder.head_dim as usize);
        }
        Ok(values)
    }
}

/// The rows of each head in the order of transformers: llama.cpp alternates rows of the first and the second half.
fn halves_apart(values: &[f32], heads: usize, head_dim: usize) -> Vec<f32> {
    let columns = values.len() / (heads * head_dim).max(1);
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact((head_dim * columns).max(1)) {
        for half in 0..2 {
            for row in head.chunks_exact(columns.max(1)).skip(half).step_by(2) {
                out.extend_from_slice(row);
            }
        }
    }
    out
}

/// Checks that the file has all tensors of the model, in the right shapes, and no others.
fn check_tensors(file: &GgufFile, decoder: &DecoderModel) -> Result<(), String> {
    let is_gemma = decoder.has_post_norms;
    let mut used = BTreeSet::from([ROPE_FACTORS.to_owned()]);
    for tensor in decoder.tensors() {
        let name = stored_name(&tensor.name, is_gemma).unwrap_or_else(|| tensor.name.clone());
        let Some(GgufTensor { shape, .. }) = file.tensor(&name) else {
            return Err(format!("has no tensor {name}: it is not complete, download it again"));
        };
        if *shape != tensor.shape {
            return Err(format!(
                "has {name} of shape {shape:?}, but its description requires {:?}",
                tensor.shape
            ));
        }
        used.insert(name);
    }
    match file.names().find(|name| !used.contains(*name)) {
        None => Ok(()),
        Some(name) => Err(format!(
            "has the tensor {name}, which Baton does not know: the model computes something that is not supported"
        )),
    }
}

/// Name in GGUF files of a tensor of a model folder.
fn stored_name(name: &str, is_gemma: bool) -> Option<String> {
    let whole = match name {
        EMBEDDING => "token_embd.weight",
        FINAL_NORM => "output_norm.weight",
        HEAD => "output.weight",
        _ => "",
    };
    if !whole.is_empty() {
        return Some(whole.to_owned());
    }
    let (layer, path) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, end) = path.rsplit_once('.')?;
    let module = match module {
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" if is_gemma => "post_attention_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        _ => return None,
    };
    Some(format!("blk.{layer}.{module}.{end}"))
}

/// The keys of the architecture, and which of them were read.
struct GgufKeys<'a> {
    file: &'a GgufFile,
    prefix: String,
    used: RefCell<BTreeSet<String>>,
}

impl<'a> GgufKeys<'a> {
    fn get(&self, key: &str) -> Option<&'a GgufValue> {
        let key = format!("{}{key}", self.prefix);
        let value = self.file.value(&key);
        self.used.borrow_mut().insert(key);
        value
    }

    fn wrong(&self, key: &str, what: &str) -> String {
        format!("has {}{key}, which must be {what}", self.prefix)
    }

    fn optional_integer(&self, key: &str) -> Result<Option<u64>, String> {
        let number = match self.get(key) {
            None => return Ok(None),
            Some(GgufValue::Integer(number)) => *number,
            // One number for each layer.
            Some(GgufValue::Integers(all)) if all.windows(2).all(|two| two[0] == two[1]) => {
                all.first().copied().unwrap_or(-1)
            }
            Some(_) => -1,
        };
        let number = u64::try_from(number).ok().filter(|number| *number > 0);
        number.map(Some).ok_or_else(|| {
            self.wrong(
                key,
                "one number above 0, the same for all layers: other models are not supported",
            )
        })
    }

    fn integer(&self, key: &str) -> Result<u64, String> {
        self.optional_integer(key)?
            .ok_or_else(|| format!("has no {}{key}: convert the model again", self.prefix))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Float(number)) => Ok(Some(*number)),
            Some(GgufValue::Integer(number)) => Ok(Some(*number as f64)),
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    /// Refuses keys that were not read and may change the computation.
    fn refuse_unknown(&self) -> Result<(), String> {
        let used = self.used.borrow();
        for (key, value) in self.file.values() {
            let Some(end) = key.strip_prefix(&self.prefix) else { continue };
            let is_unset = match value {
                GgufValue::Integer(0) | GgufValue::Flag(false) => true,
                GgufValue::Float(number) => *number == 0.0,
                GgufValue::Text(text) => text.is_empty(),
                _ => false,
            };
            if !used.contains(key) && !is_unset && !IGNORED_KEYS.contains(&end) {
                return Err(format!(
                    "has the key {key}, which Baton does not know and which may change what the model computes"
                ));
            }
        }
        Ok(())
    }
}

/// `config.json` as Hugging Face has it.
fn config(
    file: &GgufFile,
    architecture: &GgufArchitecture,
    float: Float,
) -> Result<Map<String, Value>, String> {
    let prefix = format!("{}.", architecture.name);
    let keys = GgufKeys { file, prefix, used: RefCell::default() };
    let embedding = file.tensor("token_embd.weight").map(|tensor| tensor.shape.as_slice());
    let Some([vocabulary, _]) = embedding else {
        return Err("has no tensor token_embd.weight: it is not a whole language model".to_owned());
    };
    let (layers, hidden) = (keys.integer("block_count")?, keys.integer("embedding_length")?);
    if layers > file.names().count() as u64 {
        return Err(format!(
            "has fewer tensors than its {layers} layers: it is damaged, or not complete"
        ));
    }
    let heads = keys.integer("attention.head_count")?;
    let rotated = keys.optional_integer("rope.dimension_count")?;
    let head_dim = keys.optional_integer("attention.key_length")?;
    let head_dim = head_dim.or(rotated).unwrap_or(hidden / heads);
    if rotated.is_some_and(|rotated| rotated != head_dim)
        || keys.optional_integer("attention.value_length")?.is_some_and(|values| values != head_dim)
    {
        return Err("has heads that are rotated in part, or with values of another size, which is not supported".to_owned());
    }
    if file.flag(&format!("{}attention.causal", keys.prefix)) == Some(false) {
        return Err("is no model that continues a text: attention.causal is false".to_owned());
    }
    let config = json!({
        "architectures": [architecture.class],
        "model_type": architecture.model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length")?,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional_integer("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length")?,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6),
        "tie_word_embeddings": file.tensor("output.weight").is_none(),
        "torch_dtype": torch_name(float),
    });
    let Value::Object(mut config) = config else { return Err("has no description".to_owned()) };
    let default_theta = if architecture.name == "gemma3" { 1e6 } else { 1e4 };
    let theta = keys.number("rope.freq_base")?.unwrap_or(default_theta);
    config.insert("rope_theta".to_owned(), json!(theta));
    if let Some(scaling) = rope_scaling(&keys, theta, head_dim)? {
        config.insert("rope_scaling".to_owned(), scaling);
    }
    let has = |tensor: &str| file.tensor(tensor).is_some();
    if architecture.name == "llama" {
        config.insert("attention_bias".to_owned(), has("blk.0.attn_q.bias").into());
        config.insert("mlp_bias".to_owned(), has("blk.0.ffn_gate.bias").into());
    }
    if architecture.is_gemma {
        // No file says it; llama.cpp knows the largest model by its number of layers.
        let scaled_by = if layers == architecture.largest { hidden / heads } else { head_dim };
        config.insert("query_pre_attn_scalar".to_owned(), json!(scaled_by));
        config.insert("hidden_activation".to_owned(), json!("gelu_pytorch_tanh"));
        if let Some(window) = keys.optional_integer("attention.sliding_window")? {
            config.insert("sliding_window".to_owned(), json!(window));
        }
    } else {
        config.insert("hidden_act".to_owned(), json!("silu"));
    }
    match architecture.name {
        "gemma2" => {
            for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
                config.insert(cap.to_owned(), json!(keys.number(cap)?));
            }
        }
        "gemma3" => {
            let local = keys.number("rope.freq_base_swa")?.unwrap_or(1e4);
            config.insert("rope_local_base_freq".to_owned(), json!(local));
            config.insert("sliding_window_pattern".to_owned(), json!(6));
        }
        _ => {}
    }
    for (name, key) in [("bos", "bos"), ("eos", "eos"), ("pad", "padding")] {
        if let Some(id) = file.integer(&format!("tokenizer.ggml.{key}_token_id")) {
            config.insert(format!("{name}_token_id"), json!(id));
        }
    }
    keys.refuse_unknown()?;
    Ok(config)
}

/// `rope_scaling` of `config.json`, if positions are scaled.
fn rope_scaling(keys: &GgufKeys<'_>, theta: f64, head_dim: u64) -> Result<Option<Value>, String> {
    let factor = keys.number("rope.scaling.factor")?;
    let kind = match keys.get("rope.scaling.type") {
        None => {
            if factor.is_some_and(|factor| factor != 0.0) {
                "linear"
            } else {
                "none"
            }
        }
        Some(GgufValue::Text(kind)) => kind.as_str(),
        Some(_) => return Err(keys.wrong("rope.scaling.type", "a text")),
    };
    let linear = match (kind, factor) {
        ("none" | "", _) | ("linear", None) => None,
        ("linear", Some(factor)) => Some(json!({"rope_type": "linear", "factor": factor})),
        (other, _) => {
            return Err(format!(
                "has rotary positions of type {other:?}: only none, linear and Llama 3's are supported"
            ));
        }
    };
    let Some(tensor) = keys.file.tensor(ROPE_FACTORS) else { return Ok(linear) };
    let factors = keys.file.read(tensor).map_err(|error| error.problem)?;
    llama3_scaling(&factors, theta, head_dim).map(Some).ok_or_else(|| {
        format!("has a tensor {ROPE_FACTORS} that is not that of a Llama 3: it is not supported")
    })
}

/// Llama 3's scaling, if these are the factors that llama.cpp computes from it.
fn llama3_scaling(factors: &[f32], theta: f64, head_dim: u64) -> Option<Value> {
    // The same for all published models.
    const ORIGINAL: f64 = 8192.0;
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    if factors.len() as u64 != head_dim / 2 {
        return None;
    }
    let factor = f64::from(factors.iter().copied().fold(1.0, f32::max));
    let expected = (0..head_dim / 2).map(|index| {
        let wavelength = std::f64::consts::TAU * theta.powf((2 * index) as f64 / head_dim as f64);
        let smooth = (ORIGINAL / wavelength - LOW) / (HIGH - LOW);
        match wavelength {
            short if short < ORIGINAL / HIGH => 1.0,
            long if long > ORIGINAL / LOW => factor,
            _ => 1.0 / ((1.0 - smooth) / factor + smooth),
        }
    });
    let expected: Vec<f64> = expected.collect();
    let is_near =
        |(found, expected): (&f32, &f64)| (f64::from(*found) / expected - 1.0).abs() < 1e-3;
    factors.iter().zip(&expected).all(is_near).then(|| {
        json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
            "original_max_position_embeddings": ORIGINAL as u64,
        })
    })
}
