//! A language model as a list of operations. A sample is a sequence of tokens.
//!
//! What `crates/trainer/src/torch/decoder` computes and what autograd keeps of it, operation by operation. Symbols: T
//! tokens of a sequence, C values per token between layers, H query heads of D values, I values inside the feed-forward
//! part, r the adapter's rank, V vocabulary.

use baton_language::{
    AdapterLayout, DecoderModel, LinearKind,
    decoder::{ALL_LAYERS, BaseTensor, SCORES_AT_ONCE, SUBLAYERS, labels_per_chunk, layer_prefix},
    nf4::{BLOCK, BLOCKS_AT_ONCE},
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
/// Bytes per value while dense weights are made: in f32, and an index of 32 bits for two of them.
const INDEXED_BYTES: u64 = 6;
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
    /// Whether the sublayers of a layer are recomputed apart.
    by_sublayers: bool,
}

impl Network {
    /// The operations for sequences of `tokens` tokens.
    #[must_use]
    pub fn of_language_model(spec: &JobSpec, plan: LanguagePlan<'_>, tokens: u64) -> Self {
        let base = spec.adapter.as_ref().map_or(BaseFormat::Fp32, |adapter| adapter.base);
        let names = |all: &str| spec.train.recompute.iter().any(|name| name == all);
        let sizes = DecoderCosts {
            plan,
            tokens,
            value: value_bytes(spec.precision.compute),
            is_nf4: base == BaseFormat::Nf4,
            dropout: plan.adapter.is_some_and(|adapter| adapter.dropout > 0.0),
            is_strict: spec.precision.determinism == Determinism::Strict,
            by_sublayers: names(SUBLAYERS),
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
        parts.extend(sizes.scores());
        let all = sizes.is_nf4 || sizes.by_sublayers || names(ALL_LAYERS);
        let blocks = |is_chosen: bool, block: fn(usize) -> String| {
            let layers = if is_chosen { 0..decoder.layers.len() } else { 0..0 };
            layers.map(block).collect::<Vec<_>>()
        };
        let recomputed_twice = blocks(sizes.by_sublayers, attention_block);
        let mut recomputed = blocks(all, block);
        recomputed.extend_from_slice(&recomputed_twice);
        Self { parts, recomputed, recomputed_twice, ..Self::of_operations(layers) }
    }
}

fn block(layer: usize) -> String {
    format!("layers.{layer}")
}

/// The first sublayer, if they are recomputed apart; the second one has the name of the layer.
fn attention_block(layer: usize) -> String {
    format!("layers.{layer}.self_attn")
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
        let dense = |is_attention: bool| self.is_nf4.then(|| self.dense(layer, is_attention));
        let mut operations: Vec<NetworkOperation> = dense(true).into_iter().collect();
        operations.extend(norm(0));
        operations.extend([LinearKind::Query, LinearKind::Key, LinearKind::Value].map(linear));
        operations.push(self.attention(layer));
        operations.push(linear(LinearKind::Output));
        operations.extend(norm(2));
        operations.push(sum("attention"));
        if self.by_sublayers {
            operations.iter_mut().for_each(|one| one.block = Some(attention_block(layer)));
        }
        operations.extend(dense(false));
        operations.extend(norm(1));
        operations.extend([LinearKind::Gate, LinearKind::Up].map(linear));
        let inner = decoder.intermediate;
        let name = format!("{prefix}mlp.activation");
        let mut gate = self.moving(name, Some(layer), OperationKind::Other, [3 * inner, 2 * inner]);
        // The gate before and after its activation, and what it multiplies. Their gradients are as large as the product's.
        gate.kept = Traffic::of(self.tokens * 3 * inner);
        gate.outputs = self.tokens * inner;
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
        let (values, bytes) = match adapted {
            // A byte says whether a value is dropped.
            Some(rank) if self.dropout => (inputs + rank, inputs),
            Some(rank) => (rank + if shares { 0 } else { inputs }, 0),
            None if self.trains_all() && !shares => (inputs, 0),
            None => (0, 0),
        };
        operation.kept = Traffic { values: self.tokens * values, bytes: self.tokens * bytes };
        operation
    }

    /// Makes the dense weights of a sublayer, before the products: in the forward pass, and in the recomputation, whose
    /// weights the backward pass uses.
    fn dense(&self, layer: usize, is_attention: bool) -> NetworkOperation {
        let sublayer = if is_attention { "self_attn" } else { "mlp" };
        let name = format!("{}{sublayer}.dense", layer_prefix(layer));
        let mut dense = self.operation(name, Some(layer), OperationKind::Other, 0);
        let weights: Vec<u64> = self.sublayer_weights(is_attention).collect();
        dense.forward.bytes_per_pass =
            weights.iter().sum::<u64>() * (NF4_DENSE_BYTES + F32_BYTES + self.value);
        dense.forward.launches = 8 * weights.len() as u64;
        dense.evaluation = dense.forward;
        dense
    }

    /// Sizes of the linear weights of attention or of the feed-forward part.
    fn sublayer_weights(&self, is_attention: bool) -> impl Iterator<Item = u64> {
        let linears = LinearKind::ALL.into_iter();
        let linears = linears.filter(move |linear| linear.is_attention() == is_attention);
        linears.map(|linear| self.plan.decoder.linear_shape(linear).iter().product())
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
            // Whole matrices of scores, which the backward pass computes again.
            let scores = decoder.heads * self.tokens * self.tokens;
            attention.forward.traffic.values += 8 * scores;
            attention.evaluation.traffic.values += 8 * scores;
            attention.backward.traffic.values += (8 + 10) * scores;
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

    /// The dense weights of the layer or sublayer that is being computed.
    fn dense_layer(&self) -> MemoryPart {
        let [attention, rest] = [true, false].map(|one| self.sublayer_weights(one).sum::<u64>());
        let (weights, of) = match self.by_sublayers {
            true => (attention.max(rest), "one sublayer"),
            false => (attention + rest, "one layer"),
        };
        let at_once = (BLOCK * BLOCKS_AT_ONCE) as u64;
        let largest = self.sublayer_weights(true).chain(self.sublayer_weights(false)).max();
        let at_once = largest.unwrap_or_default().min(at_once);
        MemoryPart {
            name: "dense weights",
            bytes: weights * self.value + at_once * INDEXED_BYTES,
            how: format!(
                "of {of}: {weights} x {} B, and of those that are being made in f32 with their indices: {at_once} x \
                 {INDEXED_BYTES} B",
                self.value
            ),
        }
    }

    /// The capped scores that are being computed.
    fn scores(&self) -> Option<MemoryPart> {
        self.plan.decoder.score_cap?;
        let scores = (self.tokens * self.tokens).max(SCORES_AT_ONCE);
        // After tanh, after the softmax in f32, and in the working format; the gradients of the last two, and of what went
        // into the softmax in f32.
        let value = 3 * self.value + 3 * F32_BYTES;
        Some(MemoryPart {
            name: "scores",
            bytes: scores * value,
            how: format!("at most {scores} at a time x {value} B"),
        })
    }
}

#[cfg(test)]
mod tests;
