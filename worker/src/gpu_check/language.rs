//! Language models for the checks: random weights in a temporary folder, as models are read from files.
//!
//! Two of them, which compute attention in different ways: Gemma 2 caps its scores and has windows, so the scores are
//! computed one by one; Llama's attention is libtorch's.

use std::path::Path;

use baton_data::{Batch, InputType, Inputs, NO_LABEL};
use baton_job::exit::Failure;
use baton_language::{
    NewFolder, config,
    output::{MAX_FILE_BYTES, NewTensor},
};
use baton_model::Float;
use baton_recipe::spec::Compute;
use baton_trainer::torch::Device;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    Case, all, computing, difference, gradient_at, no_wait, parse, same_bits, text, trained_state,
};

/// Sizes of the models and of their texts.
#[derive(Clone, Copy)]
pub(super) struct ModelSize {
    /// Values of a token between the layers, a multiple of 16.
    pub(super) hidden: u64,
    /// Tokens of each text of a batch; a text of one token predicts nothing.
    pub(super) lengths: &'static [i64],
    /// Threads that compute on a CPU.
    pub(super) threads: u32,
}

impl ModelSize {
    /// An odd number of token ids.
    fn vocabulary(self) -> u64 {
        8 * self.hidden - 1
    }
}

/// The width of Gemma-2-2B is 2,304; libraries choose algorithms by size.
pub(super) const FULL: ModelSize =
    ModelSize { hidden: 2048, lengths: &[700, 1, 33, 512, 258], threads: 8 };

/// The families with their bases.
const CHECKED_MODELS: [(&str, &str); 4] =
    [("gemma2", "auto"), ("gemma2", "nf4"), ("llama", "auto"), ("llama", "nf4")];

/// The models' files, which are removed at the end.
pub(super) struct Models {
    folder: TempDir,
    size: ModelSize,
}

impl Models {
    pub(super) fn write(size: ModelSize) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("baton-gpu-check-").tempdir().map_err(text)?;
        for family in ["gemma2", "llama"] {
            write_model(&folder.path().join(family), &config_of(family, size))?;
        }
        Ok(Self { folder, size })
    }

    /// All models, by name.
    fn cases(&self) -> Result<Vec<(String, Case)>, Failure> {
        CHECKED_MODELS.into_iter().map(|(family, base)| self.case(family, base)).collect()
    }

    fn case(&self, family: &str, base: &str) -> Result<(String, Case), Failure> {
        let recipe = format!(
            r#"
            name = "gpu-check"
            model = {{ arch = "causal_lm", path = {path:?}, zero_init_gamma = false, num_classes = 0 }}
            adapter = {{ rank = 8, alpha = 16, dropout = 0.1, base = "{base}" }}
            data = {{ train = "none", val = "none", sequence = 1024 }}
            train = {{ epochs = 1, global_batch = {texts}, virtual_ranks = 1, recompute = ["layers.1"] }}
            optimizer = {{ kind = "sgd", momentum = 0.9, weight_decay = 0.0 }}
            schedule = {{ kind = "constant", lr = 0.01 }}
            loss = {{ kind = "next_token" }}
            cluster = {{ device = "cuda", threads_per_rank = {threads} }}
            "#,
            path = self.folder.path().join(family),
            texts = self.size.lengths.len(),
            threads = self.size.threads,
        );
        let batch = batch(self.size);
        let case = Case { recipe: parse(&recipe)?, batch, input: InputType::Tokens };
        Ok((format!("{family} {base}"), case))
    }
}

/// Compares the gradients of adapters after a few steps on one batch on both devices, in fp32.
pub(super) fn same_gradient(models: &Models, gpu: Device) -> Result<String, String> {
    each(models, |case| super::same_gradient(case, gpu))
}

/// Checks that gradients in bf16 are no further from fp32 than rounding explains: than twice as far as on the CPU.
pub(super) fn near_fp32(models: &Models, gpu: Device) -> Result<String, String> {
    each(models, |case| {
        let state = trained_state(case, gpu)?;
        let exact = gradient_at(case, Device::Cpu, &state)?;
        let rounded = computing(case, Compute::Bf16);
        let [on_gpu, on_cpu] = [gpu, Device::Cpu].map(|device| {
            gradient_at(&rounded, device, &state).map(|found| difference(&found, &exact))
        });
        let (on_gpu, on_cpu) = (on_gpu?, on_cpu?);
        let detail = format!("{on_gpu:.1e} from fp32, on the CPU {on_cpu:.1e}");
        if on_gpu <= 2.0 * on_cpu { Ok(detail) } else { Err(detail) }
    })
}

/// Checks that a repeated computation gives the same bits in every number format.
pub(super) fn same_bits_in_all(models: &Models, device: Device) -> Result<String, String> {
    each(models, |case| {
        let formats = [Compute::Fp32, Compute::Bf16, Compute::Fp16];
        all(formats
            .map(|compute| (format!("{compute:?}"), same_bits(&computing(case, compute), device))))
    })
}

/// Counts the host's waits and the kernels of a step in bf16.
pub(super) fn no_waits(models: &Models, gpu: Device) -> Result<String, String> {
    each(models, |case| no_wait(&computing(case, Compute::Bf16), gpu))
}

/// Runs a check on every model.
fn each(
    models: &Models,
    check: impl Fn(&Case) -> Result<String, String>,
) -> Result<String, String> {
    let cases = models.cases().map_err(text)?;
    all(cases.iter().map(|(name, case)| (name.clone(), check(case))))
}

/// A batch of texts of these lengths. The first third of each has no labels.
fn batch(size: ModelSize) -> Batch {
    let vocabulary = size.vocabulary() as i64;
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    for (text, length) in (1..).zip(size.lengths) {
        for position in 0..*length {
            let token = (text * 17 + position * 5 + position * position) % vocabulary;
            tokens.push(token);
            labels.push(if position < length / 3 { i64::from(NO_LABEL) } else { token });
        }
    }
    let lengths = size.lengths.to_vec();
    let samples = (0..lengths.len() as u64).collect();
    Batch { inputs: Inputs::Tokens { tokens, lengths }, labels, samples, ..Batch::default() }
}

fn config_of(family: &str, size: ModelSize) -> Value {
    let longest = size.lengths.iter().max().copied().unwrap_or_default();
    let mut config = json!({
        "model_type": family, "vocab_size": size.vocabulary(), "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": size.hidden / 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
    });
    let more = match family {
        "gemma2" => json!({
            "sliding_window": longest / 4, "query_pre_attn_scalar": size.hidden / 8, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
        }),
        _ => json!({}),
    };
    if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
        config.extend(more);
    }
    config
}

/// Writes a model with weights that depend on its config alone, in bf16.
fn write_model(folder: &Path, config: &Value) -> Result<(), String> {
    let decoder = config::read(&config.to_string())?;
    let new = NewFolder::create(folder).map_err(text)?;
    new.write("config.json", config.to_string().as_bytes()).map_err(text)?;
    let tensors = decoder.tensors().into_iter().map(|tensor| NewTensor {
        name: tensor.name,
        shape: tensor.shape,
        float: Float::Bf16,
    });
    let tensors: Vec<_> = tensors.collect();
    let mut state = 1_u64;
    let mut values = |tensor: &NewTensor| {
        // So that values keep their size from layer to layer; norms scale by about one.
        let width = tensor.shape.last().copied().unwrap_or(1) as f32;
        let (offset, scale) = match tensor.shape.len() {
            1 => (0.9, 0.2),
            _ => (0.0, 2.0 / width.sqrt()),
        };
        let values = (0..tensor.values()).map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            offset + scale * ((state >> 40) as f32 / (1_u32 << 24) as f32 - 0.5)
        });
        Ok(values.collect())
    };
    new.write_weights(&tensors, MAX_FILE_BYTES, &mut values, &mut |_| {}).map_err(text)?;
    new.finish().map_err(text)
}
