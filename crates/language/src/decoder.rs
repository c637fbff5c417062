//! The computation of a decoder: what the families share is code in the trainer, their differences are these fields.
//!
//! With `norm` as RMSNorm, a layer computes
//!
//! ```text
//! x += [post](attention(norm(x)))        [post]: a further norm, if `has_post_norms`
//! x += [post](down(activation(gate(h)) · up(h)))        h = norm(x)
//! ```

/// A decoder-only transformer with rotary positions, RMSNorm and a gated feed-forward part.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderModel {
    /// `model_type` in `config.json`.
    pub family: String,
    /// Number of token ids.
    pub vocabulary: u64,
    /// Values per token between layers.
    pub hidden: u64,
    /// Values per token inside the feed-forward part.
    pub intermediate: u64,
    /// Number of query heads.
    pub heads: u64,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Values per head.
    pub head_dim: u64,
    /// Most tokens of a sequence.
    pub max_positions: u64,
    /// The layers, in order.
    pub layers: Vec<DecoderLayer>,
    /// Added to the mean square before its root.
    pub norm_eps: f64,
    /// How a norm's weight scales.
    pub norm_scale: NormScale,
    /// Whether the outputs of attention and feed-forward are normalised too (Gemma).
    pub has_post_norms: bool,
    /// Whether queries and keys are normalised per head (Qwen 3, Gemma 3).
    pub has_head_norms: bool,
    /// Activation of the gate.
    pub activation: Activation,
    /// Whether the projections to queries, keys and values have biases.
    pub has_qkv_bias: bool,
    /// Whether the projection of the attention's output has a bias.
    pub has_output_bias: bool,
    /// Whether the projections of the feed-forward part have biases.
    pub has_mlp_bias: bool,
    /// Factor of attention scores.
    pub score_scale: f64,
    /// Cap `c` of attention scores: `c · tanh(score / c)`.
    pub score_cap: Option<f64>,
    /// Cap of logits.
    pub logit_cap: Option<f64>,
    /// Factor of embeddings, rounded to the number format of the weights.
    pub embedding_scale: Option<f64>,
    /// Whether the head's weight is that of the embedding.
    pub ties_head: bool,
}

/// What differs between the layers of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderLayer {
    /// Number of the newest tokens that a token attends to, including itself; all if absent.
    pub window: Option<u64>,
    /// Its rotary positions.
    pub rope: Rope,
}

/// Rotary positions (Su et al. 2021, arXiv 2104.09864), as transformers' `rotate_half` pairs values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the wavelengths.
    pub theta: f64,
    /// Change of the frequencies for longer sequences.
    pub scaling: RopeScaling,
}

/// Change of the rotary frequencies for longer sequences; transformers' `rope_type`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// `default`: none.
    None,
    /// `linear`: all frequencies are divided.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// `llama3`: long wavelengths are divided, with a smooth transition.
    Llama3 {
        /// Divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low` are long.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Sequence length of pretraining.
        original: f64,
    },
}

/// How a norm's weight `w` scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormScale {
    /// By `w`, after rounding the normalised values to the number format of the inputs.
    Weight,
    /// By `1 + w` in f32 (Gemma).
    OnePlusWeight,
}

/// Activation of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`
    Silu,
    /// GELU, approximated by tanh.
    GeluTanh,
}

/// A linear layer within each layer of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinearKind {
    /// Queries.
    Query,
    /// Keys.
    Key,
    /// Values.
    Value,
    /// Output of the attention.
    Output,
    /// Gate of the feed-forward part.
    Gate,
    /// What the gate multiplies.
    Up,
    /// Output of the feed-forward part.
    Down,
}

impl LinearKind {
    /// All, in the order of a state dict.
    pub const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// Name within its layer, e.g. `self_attn.q_proj`.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Query => "self_attn.q_proj",
            Self::Key => "self_attn.k_proj",
            Self::Value => "self_attn.v_proj",
            Self::Output => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// Whether it belongs to attention, else to the feed-forward part.
    #[must_use]
    pub fn is_attention(self) -> bool {
        matches!(self, Self::Query | Self::Key | Self::Value | Self::Output)
    }

    /// The last part of its name, e.g. `q_proj`: PEFT's `target_modules`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.path().rsplit('.').next().unwrap_or_default()
    }

    /// Its index in [`ALL`](Self::ALL).
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// Name and shape of a tensor in the files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseTensor {
    /// Name, e.g. `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Shape; (out, in) for a linear layer.
    pub shape: Vec<u64>,
}

impl BaseTensor {
    /// Number of values.
    #[must_use]
    pub fn values(&self) -> u64 {
        self.shape.iter().product()
    }
}

impl DecoderModel {
    /// What of each layer is recomputed, by the names in `train.recompute`.
    ///
    /// # Errors
    /// There is no layer of a name.
    pub fn recomputed(&self, names: &[String]) -> Result<Vec<Recomputation>, String> {
        let mut recomputed = vec![Recomputation::None; self.layers.len()];
        for name in names {
            let of_all = match name.as_str() {
                ALL_LAYERS => Some(Recomputation::Layer),
                SUBLAYERS => Some(Recomputation::Sublayers),
                _ => None,
            };
            if let Some(recomputation) = of_all {
                recomputed.iter_mut().for_each(|layer| *layer = recomputation.max(*layer));
                continue;
            }
            let layer = (0..self.layers.len()).find(|layer| *name == format!("layers.{layer}"));
            let Some(layer) = layer else {
                let last = self.layers.len().saturating_sub(1);
                return Err(format!(
                    "train.recompute: {name} is not a layer of this model: choose among layers.0 … layers.{last}, or \
                     all with {ALL_LAYERS} or {SUBLAYERS}"
                ));
            };
            recomputed[layer] = recomputed[layer].max(Recomputation::Layer);
        }
        Ok(recomputed)
    }

    /// Outputs and inputs of a linear layer.
    #[must_use]
    pub fn linear_shape(&self, linear: LinearKind) -> [u64; 2] {
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        match linear {
            LinearKind::Query => [queries, self.hidden],
            LinearKind::Key | LinearKind::Value => [keys, self.hidden],
            LinearKind::Output => [self.hidden, queries],
            LinearKind::Gate | LinearKind::Up => [self.intermediate, self.hidden],
            LinearKind::Down => [self.hidden, self.intermediate],
        }
    }

    /// Whether a linear layer has a bias.
    #[must_use]
    pub fn has_bias(&self, linear: LinearKind) -> bool {
        match linear {
            LinearKind::Query | LinearKind::Key | LinearKind::Value => self.has_qkv_bias,
            LinearKind::Output => self.has_output_bias,
            LinearKind::Gate | LinearKind::Up | LinearKind::Down => self.has_mlp_bias,
        }
    }

    /// Names of the norms of a layer, in the order of the computation: before the attention, before the feed-forward
    /// part, and after each of them if there are such.
    #[must_use]
    pub fn norm_names(&self) -> &'static [&'static str] {
        if self.has_post_norms {
            &[
                "input_layernorm",
                "pre_feedforward_layernorm",
                "post_attention_layernorm",
                "post_feedforward_layernorm",
            ]
        } else {
            &["input_layernorm", "post_attention_layernorm"]
        }
    }

    /// All tensors that its files must have.
    #[must_use]
    pub fn tensors(&self) -> Vec<BaseTensor> {
        let tensor = |name: String, shape: &[u64]| BaseTensor { name, shape: shape.to_owned() };
        let mut all = vec![tensor(EMBEDDING.to_owned(), &[self.vocabulary, self.hidden])];
        for layer in 0..self.layers.len() {
            let prefix = layer_prefix(layer);
            for linear in LinearKind::ALL {
                let shape = self.linear_shape(linear);
                all.push(tensor(format!("{prefix}{}.weight", linear.path()), &shape));
                if self.has_bias(linear) {
                    all.push(tensor(format!("{prefix}{}.bias", linear.path()), &shape[..1]));
                }
            }
            if self.has_head_norms {
                for name in HEAD_NORMS {
                    all.push(tensor(format!("{prefix}{name}.weight"), &[self.head_dim]));
                }
            }
            for name in self.norm_names() {
                all.push(tensor(format!("{prefix}{name}.weight"), &[self.hidden]));
            }
        }
        all.push(tensor(FINAL_NORM.to_owned(), &[self.hidden]));
        if !self.ties_head {
            all.push(tensor(HEAD.to_owned(), &[self.vocabulary, self.hidden]));
        }
        all
    }

    /// The weights of all linear layers, in the order of [`tensors`](Self::tensors).
    #[must_use]
    pub fn linear_weights(&self) -> Vec<BaseTensor> {
        let weights = (0..self.layers.len()).flat_map(|layer| {
            LinearKind::ALL.map(|linear| BaseTensor {
                name: format!("{}{}.weight", layer_prefix(layer), linear.path()),
                shape: self.linear_shape(linear).to_vec(),
            })
        });
        weights.collect()
    }

    /// Number of weights.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.tensors().iter().map(BaseTensor::values).sum()
    }
}

/// Name of the embedding's weight.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the last norm's weight.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Name of the head's weight, if it is not the embedding's.
pub const HEAD: &str = "lm_head.weight";
/// Names of the norms of queries and keys within a layer.
pub const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm", "self_attn.k_norm"];

/// Number of labels whose logits are computed at a time: those of a chunk have at most 64 MiB as f32. It depends on the
/// vocabulary alone, so that bits do not depend on the machine.
#[must_use]
pub fn labels_per_chunk(vocabulary: u64) -> u64 {
    ((64 << 20) / (4 * vocabulary.max(1))).clamp(16, 4096)
}

/// Number of capped scores that are computed at a time, unless one head of a text has more: 16 MiB as f32.
pub const SCORES_AT_ONCE: u64 = 1 << 22;

/// The name in `train.recompute` that stands for all layers.
pub const ALL_LAYERS: &str = "layers";
/// The name in `train.recompute` that stands for the sublayers of all layers.
pub const SUBLAYERS: &str = "sublayers";

/// What of a layer is computed again for the gradient instead of kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recomputation {
    /// Nothing.
    None,
    /// All at once, from the layer's input.
    Layer,
    /// First the feed-forward part, then attention, so that the activations of one of them exist at a time. Attention is computed
    /// three times in all, as the input of the feed-forward part is not kept.
    Sublayers,
}

/// Prefix of the names of a layer's tensors.
#[must_use]
pub fn layer_prefix(layer: usize) -> String {
    format!("model.layers.{layer}.")
}
