//! A language model as a list of operations. A sample is a sequence of tokens.
//!
//! What `crates/trainer/src/torch/decoder` computes and what autograd keeps of it, operation by operation. Symbols: T
//! tokens of a sequence, C values per token between layers, H query heads of D values, I values inside the feed-forward
//! part, r the adapter's rank, V vocabulary.

use baton_language::{
    AdapterLayout, DecoderModel, LinearKind,
    decoder::{ALL_LAYERS, BaseTensor, labels_per_chunk, layer_prefix},
};
use baton_recipe::{
    JobSpec,
    spec::{BaseFormat, Compute, Determinism},
};

use crate::{
    layer::{NetworkOperation, OperationKind, PassCost, Traffic},
    memory::{MemoryPart, value_bytes},
    network::{F32_BYTES, Network},
};

/// Bits of an NF4 weight with its share of two levels of scales: 4 + 8 / 64 + 32 / (64 · 256).
const NF4_BITS: f64 = 4.0 + 8.0 / 64.0 + 32.0 / (64.0 * 256.0);
/// Bytes that move per NF4 weight to make a dense one in f32, counted from the operations of `decoder/frozen.rs`: half a
/// byte read, an index written and read, a value written, read and written by the product with its scale.
const NF4_DENSE_BYTES: u64 = 17;
/// Multiplications of attention's backward pass per one of its forward pass.
const ATTENTION_BACKWARD: f64 = 2.5;

/// What a recipe trains of a language model.
#[derive(Clone, Copy, Debug)]
pub struct LanguagePlan<'a> {
    /// The model.
    pub decoder: &'a DecoderModel,
    /// The adapter; all weights are trained if absent.
    pub adapter: Option<&'a AdapterLayout>,
    /// Tokens of a sequence on average, which decide the time; memory must hold sequences of `data.sequence`.
    pub mean_tokens: u64,
}

/// DecoderCosts that every operation needs.
struct DecoderCosts<'a> {
    plan: LanguagePlan<'a>,
    tokens: u64,
    /// Bytes of a value in the working format.
    value: u64,
    is_nf4: bool,
    dropout: bool,
    /// Whether attention is computed by matrix products and a softmax, in f32.
    is_strict: bool,
}

impl Network {
    /// The operations for sequences of `tokens` tokens.
    #[must_use]
    pub fn of_language_model(spec: &JobSpec, plan: LanguagePlan<'_>, tokens: u64) -> Self {
        let base = spec.adapter.as_ref().map_or(BaseFormat::Fp32, |adapter| adapter.base);
        let sizes = DecoderCosts {
            plan,
            tokens,
            value: value_bytes(spec.precision.compute),
            is_nf4: base == BaseFormat::Nf4,
            dropout: plan.adapter.is_some_and(|adapter| adapter.dropout > 0.0),
            is_strict: spec.precision.determinism == Determinism::Strict,
        };
        let decoder = plan.decoder;
        let mut layers = vec![sizes.embedding()];
        for layer in 0..decoder.layers.len() {
            layers.extend(sizes.layer(layer));
        }
        layers.push(sizes.norm("model.norm", None));
        layers.push(sizes.head());
        let mut parts = vec![sizes.logits()];
        if plan.adapter.is_some() {
            parts.insert(0, model_part(decoder, base, spec.precision.compute));
        }
        if sizes.is_nf4 {
            parts.push(sizes.dense_layer());
        }
        let all = sizes.is_nf4 || spec.train.recompute.iter().any(|name| name == ALL_LAYERS);
        let recomputed = if all { 0..decoder.layers.len() } else { 0..0 };
        let recomputed = recomputed.map(block).collect();
        Self { parts, recomputed, ..Self::of_operations(layers) }
    }
}

fn block(layer: usize) -> String {
    format!("layers.{layer}")
}

/// The model's own weights, which are frozen.
fn model_part(decoder: &DecoderModel, base: BaseFormat, compute: Compute) -> MemoryPart {
    let (all, linear) = (decoder.parameters(), linear_values(decoder));
    let (bytes, how) = match base {
        BaseFormat::Nf4 => {
            let (rest, value) = (all - linear, value_bytes(compute));
            let quantised = (linear as f64 * NF4_BITS / 8.0).ceil() as u64;
            (
                quantised + rest * value,
                format!("{linear} values x {NF4_BITS:.3} bits + {rest} x {value} B"),
            )
        }
        BaseFormat::Fp32 => (all * F32_BYTES, format!("{all} values x {F32_BYTES} B")),
        BaseFormat::Bf16 => (all * 2, format!("{all} values x 2 B")),
        BaseFormat::Auto => {
            let value = value_bytes(compute);
            (all * value, format!("{all} values x {value} B"))
        }
    };
    MemoryPart { name: "model", bytes, how }
}

fn linear_values(decoder: &DecoderModel) -> u64 {
    decoder.linear_weights().iter().map(BaseTensor::values).sum()
}

impl DecoderCosts<'_> {
    fn trains_all(&self) -> bool {
        self.plan.adapter.is_none()
    }

    fn operation(
        &self,
        name: String,
        layer: Option<usize>,
        kind: OperationKind,
        outputs: u64,
    ) -> NetworkOperation {
        NetworkOperation::new(&name, layer.map(block), kind, outputs)
    }

    /// An operation that reads `read` and writes `written` values per token.
    fn moving(
        &self,
        name: String,
        layer: Option<usize>,
        kind: OperationKind,
        [read, written]: [u64; 2],
    ) -> NetworkOperation {
        let mut operation = self.operation(name, layer, kind, self.tokens * written);
        let traffic = Traffic::of(self.tokens * (read + written));
        operation.forward = PassCost { traffic, launches: 1, ..PassCost::default() };
        operation.evaluation = operation.forward;
        operation.backward =
            PassCost { traffic: Traffic::of(traffic.values * 3 / 2), ..operation.forward };
        operation
    }

    fn embedding(&self) -> NetworkOperation {
        let decoder = self.plan.decoder;
        let mut embedding = self.moving(
            "model.embed_tokens".to_owned(),
            None,
            OperationKind::Input,
            [decoder.hidden; 2],
        );
        embedding.kept = Traffic::of(self.tokens * decoder.hidden);
        if self.trains_all() {
            // A tied head has no weight of its own.
            embedding.kernel = decoder.vocabulary * decoder.hidden;
        } else {
            embedding.backward = PassCost::default();
        }
        embedding
    }

    /// RMSNorm in f32: the wide input is kept.
    fn norm(&self, name: &str, layer: Option<usize>) -> NetworkOperation {
        let hidden = self.plan.decoder.hidden;
        let mut norm =
            self.moving(name.to_owned(), layer, OperationKind::Other, [3 * hidden, 2 * hidden]);
        norm.kept = Traffic { values: 0, bytes: self.tokens * hidden * F32_BYTES };
        norm.forward.launches = 6;
        norm.backward.launches = 8;
        norm.evaluation.launches = 6;
        if self.trains_all() {
            norm.other_parameters = hidden;
        }
        norm
    }

    fn layer(&self, layer: usize) -> Vec<NetworkOperation> {
        let decoder = self.plan.decoder;
        let prefix = layer_prefix(layer);
        let norms = decoder.norm_names();
        let norm = |number: usize| {
            norms.get(number).map(|name| self.norm(&format!("{prefix}{name}"), Some(layer)))
        };
        let linear = |linear| self.linear(layer, linear);
        let sum = |name: &str| {
            let hidden = decoder.hidden;
            self.moving(
                format!("{prefix}{name}"),
                Some(layer),
                OperationKind::Add,
                [2 * hidden, hidden],
            )
        };
        let mut operations: Vec<NetworkOperation> =
            self.is_nf4.then(|| self.dense(layer)).into_iter().collect();
        operations.extend(norm(0));
        operations.extend([LinearKind::Query, LinearKind::Key, LinearKind::Value].map(linear));
        operations.push(self.attention(layer));
        operations.push(linear(LinearKind::Output));
        operations.extend(norm(2));
        operations.push(sum("attention"));
        operations.extend(norm(1));
        operations.extend([LinearKind::Gate, LinearKind::Up].map(linear));
        let inner = decoder.intermediate;
        let name = format!("{prefix}mlp.activation");
        let mut gate = self.moving(name, Some(layer), OperationKind::Other, [3 * inner, 2 * inner]);
        // The gate before and after its activation, and what it multiplies.
        gate.kept = Traffic::of(self.tokens * 3 * inner);
        operations.push(gate);
        operations.push(linear(LinearKind::Down));
        operations.extend(norm(3));
        operations.push(sum("mlp"));
        operations
    }

    fn linear(&self, layer: usize, linear: LinearKind) -> NetworkOperation {
        let decoder = self.plan.decoder;
        let [outputs, inputs] = decoder.linear_shape(linear);
        let weight = outputs * inputs;
        let adapted = self.plan.adapter.and_then(|adapter| {
            let mut linears = adapter.linears.iter();
            linears.any(|one| one.layer == layer && one.linear == linear).then(|| adapter.rank())
        });
        let name = format!("{}{}", layer_prefix(layer), linear.path());
        let mut operation =
            self.operation(name, Some(layer), OperationKind::Linear, self.tokens * outputs);
        let low = adapted.map_or(0, |rank| rank * (inputs + outputs));
        let traffic = Traffic::of(self.tokens * (inputs + outputs));
        let launches = 1 + 3 * u64::from(adapted.is_some());
        let macs = self.tokens * (weight + low);
        operation.forward = PassCost { macs, traffic, bytes_per_pass: 0, launches };
        operation.evaluation = operation.forward;
        let of_weight = if self.trains_all() { 2 } else { 1 };
        operation.backward = PassCost {
            macs: self.tokens * (of_weight * weight + 2 * low),
            traffic: Traffic::of(2 * traffic.values),
            bytes_per_pass: 0,
            launches: of_weight + 4 * u64::from(adapted.is_some()),
        };
        operation.kernel = if self.trains_all() { weight } else { low };
        if self.trains_all() && decoder.has_bias(linear) {
            operation.other_parameters = outputs;
        }
        // The gradient of a trained matrix needs the inputs. Queries, keys and values have the same ones, and so have gate
        // and up; but each adapter drops others.
        let shares = matches!(linear, LinearKind::Key | LinearKind::Value | LinearKind::Up);
        let kept_inputs = match adapted {
            Some(rank) if self.dropout => 2 * inputs + rank,
            Some(rank) => rank + if shares { 0 } else { inputs },
            None if self.trains_all() && !shares => inputs,
            None => 0,
        };
        operation.kept = Traffic::of(self.tokens * kept_inputs);
        operation
    }

    /// Makes the dense weights of a layer, before the products: in the forward pass, and in the recomputation, whose weights
    /// the backward pass uses.
    fn dense(&self, layer: usize) -> NetworkOperation {
        let name = format!("{}dense", layer_prefix(layer));
        let mut dense = self.operation(name, Some(layer), OperationKind::Other, 0);
        dense.forward.bytes_per_pass =
            self.layer_weights() * (NF4_DENSE_BYTES + F32_BYTES + self.value);
        dense.forward.launches = 8 * LinearKind::ALL.len() as u64;
        dense.evaluation = dense.forward;
        dense
    }

    /// Number of linear weights of a layer.
    fn layer_weights(&self) -> u64 {
        let count = |linear| self.plan.decoder.linear_shape(linear).iter().product::<u64>();
        LinearKind::ALL.map(count).iter().sum()
    }

    fn attention(&self, layer: usize) -> NetworkOperation {
        let decoder = self.plan.decoder;
        let heads = decoder.heads * decoder.head_dim;
        let window = decoder.layers[layer].window.unwrap_or(u64::MAX);
        // Each token attends to those before it, half of all on average.
        let seen = if decoder.score_cap.is_some() { self.tokens } else { (self.tokens / 2).max(1) };
        let seen = seen.min(window);
        let name = format!("{}self_attn", layer_prefix(layer));
        let mut attention =
            self.moving(name, Some(layer), OperationKind::Attention, [3 * heads, heads]);
        let macs = 2 * self.tokens * seen * heads;
        attention.forward.macs = macs;
        attention.evaluation.macs = macs;
        attention.backward.macs = (ATTENTION_BACKWARD * macs as f64) as u64;
        // Rotations of queries and keys.
        attention.forward.launches = 16;
        attention.evaluation.launches = 16;
        attention.backward.launches = 20;
        // Queries, keys and values, once for each query head, and the result.
        attention.kept = Traffic::of(self.tokens * 4 * heads);
        if decoder.score_cap.is_none() && self.is_strict {
            // Queries, keys, values and the result in f32, and the matrix after the softmax.
            let scores = decoder.heads * self.tokens * self.tokens;
            attention.kept.bytes += (self.tokens * 4 * heads + scores) * F32_BYTES;
            attention.outputs = 2 * scores;
            attention.forward.traffic.bytes += 4 * scores * F32_BYTES;
            attention.evaluation.traffic.bytes += 4 * scores * F32_BYTES;
            attention.backward.traffic.bytes += 5 * scores * F32_BYTES;
        }
        if decoder.score_cap.is_some() {
            // Whole matrices of scores: after tanh, after the softmax in f32, and in the working format.
            let scores = decoder.heads * self.tokens * self.tokens;
            attention.kept.values += 2 * scores;
            attention.kept.bytes += scores * (F32_BYTES + 1);
            attention.outputs = scores;
            attention.forward.traffic.values += 8 * scores;
            attention.evaluation.traffic.values += 8 * scores;
            attention.backward.traffic.values += 10 * scores;
        }
        attention
    }

    /// The head and the loss, as if every token had a label.
    fn head(&self) -> NetworkOperation {
        let decoder = self.plan.decoder;
        let weight = decoder.vocabulary * decoder.hidden;
        let mut head = self.operation(
            "lm_head".to_owned(),
            None,
            OperationKind::Linear,
            self.tokens * decoder.hidden,
        );
        let logits = Traffic {
            values: 2 * self.tokens * decoder.vocabulary,
            bytes: 3 * self.tokens * decoder.vocabulary * F32_BYTES,
        };
        let chunks = self.tokens.div_ceil(labels_per_chunk(decoder.vocabulary));
        head.forward = PassCost {
            macs: self.tokens * weight,
            traffic: logits,
            bytes_per_pass: 0,
            launches: 6 * chunks,
        };
        head.evaluation = head.forward;
        let directions = if self.trains_all() { 2 } else { 1 };
        head.backward = PassCost {
            macs: directions * self.tokens * weight,
            launches: 6 * chunks,
            ..head.forward
        };
        if self.trains_all() && !decoder.ties_head {
            head.kernel = weight;
        }
        head
    }

    fn logits(&self) -> MemoryPart {
        let vocabulary = self.plan.decoder.vocabulary;
        let chunk = labels_per_chunk(vocabulary);
        // In f32: logits, their log probabilities, the gradient; in the working format: the product and its gradient.
        let value = 3 * F32_BYTES + 2 * self.value;
        MemoryPart {
            name: "logits",
            bytes: chunk * vocabulary * value,
            how: format!("a chunk of {chunk} labels x {vocabulary} tokens x {value} B"),
        }
    }

    /// The dense weights of the layer that is being computed.
    fn dense_layer(&self) -> MemoryPart {
        let decoder = self.plan.decoder;
        let of_layer = self.layer_weights();
        let largest = LinearKind::ALL
            .iter()
            .map(|linear| decoder.linear_shape(*linear).iter().product::<u64>());
        let largest = largest.max().unwrap_or_default();
        MemoryPart {
            name: "dense weights",
            bytes: of_layer * self.value + largest * 2 * F32_BYTES,
            how: format!(
                "of one layer: {of_layer} x {} B, and the largest in f32 with its indices: {largest} x {} B",
                self.value,
                2 * F32_BYTES
            ),
        }
    }
}

#[cfg(test)]
mod tests;
