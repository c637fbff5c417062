//! Writes GGUF files, for tests of this and other crates.

use std::{fs, path::Path};

/// A GGUF file that is being put together.
#[derive(Clone, Default)]
pub(crate) struct GgufWriter {
    values: Vec<u8>,
    value_count: u64,
    infos: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl GgufWriter {
    pub(crate) fn text(&mut self, key: &str, text: &str) -> &mut Self {
        let bytes = self.key(key, 8);
        push_text(bytes, text);
        self
    }

    pub(crate) fn texts(&mut self, key: &str, texts: &[String]) -> &mut Self {
        let bytes = self.key(key, 9);
        bytes.extend(8_u32.to_le_bytes());
        bytes.extend((texts.len() as u64).to_le_bytes());
        for text in texts {
            push_text(bytes, text);
        }
        self
    }

    pub(crate) fn integer(&mut self, key: &str, number: u32) -> &mut Self {
        self.key(key, 4).extend(number.to_le_bytes());
        self
    }

    pub(crate) fn integers(&mut self, key: &str, numbers: &[i32]) -> &mut Self {
        let bytes = self.key(key, 9);
        bytes.extend(5_u32.to_le_bytes());
        bytes.extend((numbers.len() as u64).to_le_bytes());
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        self
    }

    pub(crate) fn float(&mut self, key: &str, number: f32) -> &mut Self {
        self.key(key, 6).extend(number.to_le_bytes());
        self
    }

    /// `shape` is in the order of PyTorch.
    pub(crate) fn tensor(
        &mut self,
        name: &str,
        shape: &[u64],
        kind: u32,
        data: &[u8],
    ) -> &mut Self {
        let offset = self.data.len() as u64;
        push_text(&mut self.infos, name);
        self.infos.extend((shape.len() as u32).to_le_bytes());
        self.infos.extend(shape.iter().rev().flat_map(|size| size.to_le_bytes()));
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self.tensor_count += 1;
        self.data.extend(data);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self
    }

    pub(crate) fn floats(&mut self, name: &str, shape: &[u64], values: &[f32]) -> &mut Self {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, shape, 0, &data)
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut all = b"GGUF".to_vec();
        all.extend(3_u32.to_le_bytes());
        all.extend(self.tensor_count.to_le_bytes());
        all.extend(self.value_count.to_le_bytes());
        all.extend(&self.values);
        all.extend(&self.infos);
        all.resize(all.len().next_multiple_of(32), 0);
        all.extend(&self.data);
        all
    }

    pub(crate) fn write(&self, path: &Path) {
        fs::write(path, self.bytes()).unwrap();
    }

    fn key(&mut self, key: &str, kind: u32) -> &mut Vec<u8> {
        self.value_count += 1;
        push_text(&mut self.values, key);
        self.values.extend(kind.to_le_bytes());
        &mut self.values
    }
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// A small model of an architecture of llama.cpp, with these values for each tensor, by its name in the file.
pub(crate) fn small_model(architecture: &str, values: impl Fn(&str, usize) -> f32) -> GgufWriter {
    let is_gemma = architecture.starts_with("gemma");
    let mut writer = GgufWriter::default();
    let key = |name: &str| format!("{architecture}.{name}");
    writer.text("general.architecture", architecture);
    for (name, number) in [
        ("block_count", 2),
        ("context_length", 128),
        ("embedding_length", 8),
        ("feed_forward_length", 12),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 4),
        ("attention.value_length", 4),
    ] {
        writer.integer(&key(name), number);
    }
    writer.float(&key("attention.layer_norm_rms_epsilon"), 1e-5);
    writer.float(&key("rope.freq_base"), 5e4);
    if is_gemma {
        writer.integer(&key("attention.sliding_window"), 6);
    }
    if architecture == "gemma2" {
        writer.float(&key("attn_logit_softcapping"), 50.0);
        writer.float(&key("final_logit_softcapping"), 30.0);
    }
    let mut tensors = vec![("token_embd.weight".to_owned(), vec![261, 8])];
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[u64]| {
            tensors.push((format!("blk.{layer}.{name}"), shape.to_owned()));
        };
        add("attn_norm.weight", &[8]);
        add("attn_q.weight", &[16, 8]);
        add("attn_k.weight", &[8, 8]);
        add("attn_v.weight", &[8, 8]);
        if architecture == "qwen2" {
            add("attn_q.bias", &[16]);
            add("attn_k.bias", &[8]);
            add("attn_v.bias", &[8]);
        }
        if matches!(architecture, "qwen3" | "gemma3") {
            add("attn_q_norm.weight", &[4]);
            add("attn_k_norm.weight", &[4]);
        }
        add("attn_output.weight", &[8, 16]);
        add("ffn_norm.weight", &[8]);
        add("ffn_gate.weight", &[12, 8]);
        add("ffn_up.weight", &[12, 8]);
        add("ffn_down.weight", &[8, 12]);
        if is_gemma {
            add("post_attention_norm.weight", &[8]);
            add("post_ffw_norm.weight", &[8]);
        }
    }
    tensors.push(("output_norm.weight".to_owned(), vec![8]));
    for (name, shape) in tensors {
        let count = shape.iter().product::<u64>() as usize;
        let all: Vec<f32> = (0..count).map(|index| values(&name, index)).collect();
        writer.floats(&name, &shape, &all);
    }
    writer
}
