//! Small models of every family, with random weights, for tests of this and other crates.
#![allow(dead_code, reason = "every test uses a part")]
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

pub(crate) mod gguf;

use std::{fs, path::Path};

use baton_language::{DecoderModel, config, decoder::BaseTensor};
use safetensors::{Dtype, serialize_to_file, tensor::TensorView};
use serde_json::{Value, json};

/// The families, each with what distinguishes it.
pub(crate) const FAMILIES: [&str; 6] =
    ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"];

/// Token ids of the models.
pub(crate) const VOCABULARY: u32 = 61;

/// A `config.json` of a family, with windows of 6 tokens where it has such.
pub(crate) fn config_of(family: &str) -> Value {
    let mut config = json!({
        "model_type": family, "architectures": ["ForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 24,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 6, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "bos_token_id": 1, "use_cache": true,
        "torch_dtype": "float32",
    });
    let more = match family {
        "mistral" => json!({"sliding_window": 6}),
        "qwen2" => json!({"use_sliding_window": true, "sliding_window": 6, "max_window_layers": 1}),
        "gemma2" => {
            json!({"sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"})
        }
        "gemma3_text" => {
            json!({"sliding_window": 6, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2})
        }
        _ => json!({"tie_word_embeddings": true}),
    };
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Writes a model with weights that depend on its name and `seed` alone.
pub(crate) fn write_model(folder: &Path, config: &Value, seed: u64) -> DecoderModel {
    let text = config.to_string();
    let decoder = config::read(&text).unwrap();
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), text).unwrap();
    write_weights(&folder.join("model.safetensors"), &decoder, seed, |_| true);
    decoder
}

/// Writes the tensors of a model that are `chosen` by name.
pub(crate) fn write_weights(
    path: &Path,
    decoder: &DecoderModel,
    seed: u64,
    chosen: impl Fn(&str) -> bool,
) {
    let mut state = seed;
    let mut next = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u32 << 24) as f32 - 0.5
    };
    // All values are made, so that they do not depend on what is chosen.
    let all = decoder.tensors().into_iter().map(|tensor| {
        // Norms scale by about one.
        let offset = if tensor.name.ends_with("norm.weight") { 0.9 } else { 0.0 };
        let values = (0..tensor.values()).map(|_| offset + 0.4 * next()).collect();
        (tensor, values)
    });
    let all: Vec<_> = all.filter(|(tensor, _)| chosen(&tensor.name)).collect();
    write_tensors(path, &all);
}

/// Writes tensors with these values as f32.
pub(crate) fn write_tensors(path: &Path, tensors: &[(BaseTensor, Vec<f32>)]) {
    let all: Vec<(&str, &[u64], Vec<u8>)> = tensors
        .iter()
        .map(|(tensor, values)| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            (tensor.name.as_str(), tensor.shape.as_slice(), bytes)
        })
        .collect();
    let views = all.iter().map(|(name, shape, bytes)| {
        let shape = shape.iter().map(|dim| *dim as usize).collect();
        (name, TensorView::new(Dtype::F32, shape, bytes).unwrap())
    });
    serialize_to_file(views.collect::<Vec<_>>(), None, path).unwrap();
}
