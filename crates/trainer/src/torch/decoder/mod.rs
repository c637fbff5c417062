//! Language models of `crates/language`: LoRA, or training of all weights.
//!
//! A micro-batch is a list of texts of any length. Their tokens are rows of one matrix, without padding; only attention
//! looks at each text alone, or on a GPU at padded texts of similar lengths. The head is computed only where a label is, in chunks, each with its gradient, so that the
//! logits of all tokens never exist together.
//!
//! Tensor shapes: T tokens of a micro-batch, L tokens of a text, N labels, H heads, K key and value heads, D values per
//! head, C values per token, V vocabulary.

mod attention;
mod capped;
mod dropout;
mod frozen;
mod generate;
mod head;
mod rope;

use std::ops::Range;

use baton_data::random::Draws;
use baton_language::{
    AdaptedLinear, DecoderModel, LanguageModel, LinearKind, NormScale, Recomputation,
    decoder::{BaseTensor, EMBEDDING, FINAL_NORM, HEAD, HEAD_NORMS, layer_prefix},
    nf4::Nf4Source,
};
use baton_model::{Float, InputShape, NetworkDescription};
use baton_recipe::{JobSpec, spec::BaseFormat};
use tch::{Device, Kind, Tensor};

use self::{
    attention::{Attention, PaddedTexts},
    dropout::Dropout,
    frozen::{FrozenWeight, Nf4Tables},
    generate::KvCache,
    head::Head,
    rope::{RopeTable, rotate},
};
use super::{
    device::set_threads,
    failure::During,
    network::{NetworkInputs, NetworkState, PassResult, StageFinished, TorchNetwork},
    working,
};
use crate::{
    learner::Error,
    sampling::{Prompt, Sampling},
};

/// A language model on a device.
#[derive(Debug)]
pub(super) struct DecoderNetwork {
    decoder: DecoderModel,
    description: NetworkDescription,
    digest: String,
    weights: ModelWeights,
    layers: Vec<LayerTensors>,
    parts: Vec<DecoderPart>,
    final_norm: usize,
    head: usize,
    /// Factor of `B (A x)`.
    adapter_scale: f64,
    dropout: f64,
    device: Device,
    /// Number format of activations.
    kind: Kind,
}

/// The weights of the model itself, in the order of [`DecoderModel::tensors`].
#[derive(Debug)]
enum ModelWeights {
    /// Only an adapter is trained.
    Frozen(Vec<FrozenWeight>),
    /// They are the parameters, with these initial values.
    Trained(LanguageModel),
}

/// The frozen weights of a recipe's language model, read into the memory of the host before the device is known.
#[derive(Debug)]
pub struct LoadedModel {
    /// Digest of the model's files.
    digest: String,
    weights: Vec<FrozenWeight>,
}

impl LoadedModel {
    /// Reads them, with as many threads as training has. `None` if all weights of the recipe are trained.
    ///
    /// # Errors
    /// The model cannot be read, is not supported, or does not fit the recipe; out of memory.
    pub fn read(spec: &JobSpec) -> Result<Option<Self>, Error> {
        if spec.adapter.is_none() {
            return Ok(None);
        }
        set_threads(spec.cluster.threads_per_rank);
        let model = LanguageModel::of_recipe(spec).map_err(|error| recipe(&error))?;
        let digest = model.digest().map_err(|error| recipe(&error))?;
        let weights = frozen(&model, &digest, working::kind(spec.precision.compute), Device::Cpu)?;
        Ok(Some(Self { digest, weights }))
    }

    fn on(self, device: Device) -> tch::Result<Vec<FrozenWeight>> {
        let tables = Nf4Tables::new(device)?;
        self.weights.into_iter().map(|weight| weight.moved_to(&tables)).collect()
    }
}

/// One of the parts that are computed one after the other.
#[derive(Debug)]
struct DecoderPart {
    kind: PartKind,
    /// Indices of the trained parameters that it uses. The tied head is not among them.
    trained: Vec<usize>,
    recomputation: Recomputation,
}

/// Which part: each layer has two.
#[derive(Clone, Copy, Debug)]
enum PartKind {
    Embedding,
    Attention { layer: usize },
    FeedForward { layer: usize },
    FinalNorm,
}

/// Indices of a layer's tensors.
#[derive(Debug, Default)]
struct LayerTensors {
    /// Weight, bias and adapter of each [`LinearKind`].
    linears: [LinearTensors; LinearKind::ALL.len()],
    /// In the order of [`DecoderModel::norm_names`].
    norms: Vec<usize>,
    /// Norms of queries and keys.
    head_norms: Option<[usize; 2]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct LinearTensors {
    weight: usize,
    bias: Option<usize>,
    /// Parameters `A` and `B`.
    adapter: Option<(usize, usize)>,
}

impl DecoderNetwork {
    /// Reads the model of a recipe, but not the weights that are `loaded`.
    ///
    /// # Errors
    /// The model cannot be read, is not supported, or does not fit the recipe; out of memory.
    pub(super) fn read(
        spec: &JobSpec,
        device: Device,
        loaded: Option<LoadedModel>,
    ) -> Result<Self, Error> {
        let model = LanguageModel::of_recipe(spec).map_err(|error| recipe(&error))?;
        let without_decay = spec.model.no_decay_patterns();
        let freeze = spec.model.freeze_patterns();
        let mut description = model.describe().without_decay(|name| without_decay.matches(name));
        for tensor in &mut description.parameters {
            if freeze.matches(&tensor.name) {
                tensor.role = baton_model::TensorRole::Frozen;
            }
        }
        let names = || description.parameters.iter().map(|tensor| tensor.name.as_str());
        spec.check_patterns(names(), std::iter::empty()).map_err(Error::Recipe)?;
        let tensors = model.decoder.tensors();
        let index = |name: &str| {
            let index = tensors.iter().position(|tensor| tensor.name == name);
            index.ok_or_else(|| Error::Recipe(format!("model.path: the model has no {name}")))
        };
        let layers = (0..model.decoder.layers.len())
            .map(|layer| layer_tensors(&model, layer, &index))
            .collect::<Result<Vec<_>, _>>()?;
        let final_norm = index(FINAL_NORM)?;
        let kind = working::kind(spec.precision.compute);
        let parts = parts(&model, &description, &layers, final_norm);
        let digest = model.digest().map_err(|error| recipe(&error))?;
        let adapter = model.adapter.as_ref();
        // The files may have changed since.
        let loaded = loaded.filter(|loaded| loaded.digest == digest);
        Ok(Self {
            head: index(if model.decoder.ties_head { EMBEDDING } else { HEAD })?,
            adapter_scale: adapter.map_or(0.0, |adapter| adapter.scale),
            dropout: adapter.map_or(0.0, |adapter| adapter.dropout),
            decoder: model.decoder.clone(),
            weights: match (adapter, loaded) {
                (None, _) => ModelWeights::Trained(model),
                (Some(_), Some(loaded)) => {
                    tracing::info!("this process uses the weights that it has loaded");
                    ModelWeights::Frozen(loaded.on(device).during("copy the model's weights")?)
                }
                (Some(_), None) => ModelWeights::Frozen(frozen(&model, &digest, kind, device)?),
            },
            digest,
            layers,
            parts,
            final_norm,
            description,
            device,
            kind,
        })
    }

    /// A tensor of the model, by its index in [`DecoderModel::tensors`].
    fn tensor(&self, index: usize, state: NetworkState<'_>) -> tch::Result<Tensor> {
        match &self.weights {
            ModelWeights::Frozen(base) => base[index].dense(self.kind),
            ModelWeights::Trained(_) => Ok(state.parameters[index].shallow_clone()),
        }
    }

    /// The outputs of consecutive parts.
    fn run(&self, mut parts: Range<usize>, x: &Tensor, pass: &Pass<'_>) -> tch::Result<Tensor> {
        parts.try_fold(x.shallow_clone(), |x, part| match self.parts[part].kind {
            PartKind::Embedding => self.embed(pass),
            PartKind::Attention { layer } => self.attention_part(layer, &x, pass),
            PartKind::FeedForward { layer } => self.feed_forward_part(layer, &x, pass),
            PartKind::FinalNorm => self.norm(self.final_norm, &x, pass.state),
        })
    }

    fn embed(&self, pass: &Pass<'_>) -> tch::Result<Tensor> {
        let weight = self.tensor(0, pass.state)?;
        // A CPU adds the gradients of equal tokens in the number format of the table, where the sum of many loses the small
        // ones. Values that were rounded to 16 bits stay as they are.
        let is_trained_on_cpu = weight.requires_grad() && weight.device() == Device::Cpu;
        let table = match is_trained_on_cpu {
            true => weight.f_to_kind(Kind::Float)?,
            false => weight.shallow_clone(),
        };
        let x = Tensor::f_embedding(&table, pass.tokens, -1, false, false)?;
        let x = x.f_to_kind(weight.kind())?;
        let x = match self.decoder.embedding_scale {
            None => x,
            // Rounded to the number format of the weights, as transformers does.
            Some(scale) => x.f_mul(
                &Tensor::f_from_slice(&[scale as f32])?
                    .f_to_kind(x.kind())?
                    .f_to_device(self.device)?,
            )?,
        };
        x.f_to_kind(self.kind)
    }

    fn attention_part(&self, layer: usize, x: &Tensor, pass: &Pass<'_>) -> tch::Result<Tensor> {
        let attended = self.attention(layer, &self.layer_norm(layer, 0, x, pass)?, pass)?;
        x.f_add(&self.layer_norm(layer, 2, &attended, pass)?)
    }

    fn feed_forward_part(&self, layer: usize, x: &Tensor, pass: &Pass<'_>) -> tch::Result<Tensor> {
        let fed = self.feed_forward(layer, &self.layer_norm(layer, 1, x, pass)?, pass)?;
        x.f_add(&self.layer_norm(layer, 3, &fed, pass)?)
    }

    /// One of a layer's norms, in the order of [`DecoderModel::norm_names`]; `x` if it has no such norm.
    fn layer_norm(
        &self,
        layer: usize,
        number: usize,
        x: &Tensor,
        pass: &Pass<'_>,
    ) -> tch::Result<Tensor> {
        match self.layers[layer].norms.get(number) {
            Some(index) => self.norm(*index, x, pass.state),
            None => Ok(x.shallow_clone()),
        }
    }

    fn attention(&self, layer: usize, x: &Tensor, pass: &Pass<'_>) -> tch::Result<Tensor> {
        let DecoderModel { heads, kv_heads, head_dim, .. } = self.decoder;
        let settings = &self.decoder.layers[layer];
        let project = |linear, heads: u64, norm: Option<usize>| -> tch::Result<Tensor> {
            let projected = self.linear(layer, linear, x, pass)?;
            let split = projected.f_view([-1, heads as i64, head_dim as i64])?;
            norm.map_or(Ok(split.shallow_clone()), |norm| self.norm(norm, &split, pass.state))
        };
        let head_norms = self.layers[layer].head_norms;
        let queries = project(LinearKind::Query, heads, head_norms.map(|norms| norms[0]))?;
        let keys = project(LinearKind::Key, kv_heads, head_norms.map(|norms| norms[1]))?;
        let values = project(LinearKind::Value, kv_heads, None)?;
        let table = pass.ropes.iter().find(|table| table.rope == settings.rope);
        let (queries, keys) = match table {
            Some(table) => (rotate(&queries, table)?, rotate(&keys, table)?),
            None => (queries, keys),
        };
        let attention = Attention {
            scale: self.decoder.score_scale,
            cap: self.decoder.score_cap,
            window: settings.window,
            groups: (heads / kv_heads.max(1)) as i64,
        };
        let earlier = |text: usize, new: [Tensor; 2]| match pass.cache {
            None => Ok(new),
            Some(cache) => cache.add(layer, text, new),
        };
        let inputs = [&queries, &keys, &values];
        let attended = match &pass.padded {
            None => attention.of_texts(inputs, pass.lengths, &earlier),
            Some(texts) => attention.of_padded_texts(inputs, texts),
        }?;
        self.linear(layer, LinearKind::Output, &attended, pass)
    }

    fn feed_forward(&self, layer: usize, x: &Tensor, pass: &Pass<'_>) -> tch::Result<Tensor> {
        let gate = self.linear(layer, LinearKind::Gate, x, pass)?;
        let up = self.linear(layer, LinearKind::Up, x, pass)?;
        let gate = match self.decoder.activation {
            baton_language::Activation::Silu => gate.f_silu()?,
            baton_language::Activation::GeluTanh => gate.f_gelu("tanh")?,
        };
        self.linear(layer, LinearKind::Down, &gate.f_mul(&up)?, pass)
    }

    /// `W x + bias + scale · B (A x)`
    fn linear(
        &self,
        layer: usize,
        linear: LinearKind,
        x: &Tensor,
        pass: &Pass<'_>,
    ) -> tch::Result<Tensor> {
        let LinearTensors { weight, bias, adapter } = self.layers[layer].linears[linear.index()];
        let cast = |index: usize| self.tensor(index, pass.state)?.f_to_kind(self.kind);
        let bias = bias.map(cast).transpose()?;
        let y = x.f_linear(&cast(weight)?, bias.as_ref())?;
        let Some((a, b)) = adapter else { return Ok(y) };
        let dropped = match &pass.dropout {
            None => x.shallow_clone(),
            Some(dropout) => {
                dropout.apply(x, (layer * LinearKind::ALL.len() + linear.index()) as u64)?
            }
        };
        let [a, b] = [a, b].map(|index| &pass.state.parameters[index]);
        let low = dropped.f_matmul(&a.f_transpose(0, 1)?)?.f_mul_scalar(self.adapter_scale)?;
        y.f_addmm(&low, &b.f_transpose(0, 1)?)
    }

    /// RMSNorm over the last axis (Zhang & Sennrich 2019, arXiv 1910.07467), in f32.
    fn norm(&self, weight: usize, x: &Tensor, state: NetworkState<'_>) -> tch::Result<Tensor> {
        let weight = self.tensor(weight, state)?;
        let wide = x.f_to_kind(Kind::Float)?;
        let mean = wide.f_square()?.f_mean_dim(&[-1_i64][..], true, Kind::Float)?;
        let wide = wide.f_mul(&mean.f_add_scalar(self.decoder.norm_eps)?.f_rsqrt()?)?;
        match self.decoder.norm_scale {
            NormScale::Weight => wide.f_to_kind(x.kind())?.f_mul(&weight.f_to_kind(x.kind())?),
            NormScale::OnePlusWeight => {
                let weight = weight.f_to_kind(Kind::Float)?.f_add_scalar(1.0)?;
                wide.f_mul(&weight)?.f_to_kind(x.kind())
            }
        }
    }

    /// The rotary positions of texts of these lengths, which begin at position 0 or at `starts`.
    fn ropes(&self, lengths: &[i64], starts: Option<&[i64]>) -> tch::Result<Vec<RopeTable>> {
        let zeros = vec![0; lengths.len()];
        let mut tables: Vec<RopeTable> = Vec::new();
        for layer in &self.decoder.layers {
            if tables.iter().all(|table| table.rope != layer.rope) {
                let head_dim = self.decoder.head_dim as i64;
                tables.push(RopeTable::new(
                    layer.rope,
                    head_dim,
                    (lengths, starts.unwrap_or(&zeros)),
                    (self.kind, self.device),
                )?);
            }
        }
        Ok(tables)
    }

    fn padded(&self, lengths: &[i64]) -> tch::Result<Option<PaddedTexts>> {
        self.device.is_cuda().then(|| PaddedTexts::new(lengths, self.device)).transpose()
    }

    fn head(&self, state: NetworkState<'_>) -> tch::Result<Head> {
        let weight = self.tensor(self.head, state)?;
        let is_trained = match self.weights {
            ModelWeights::Frozen(_) => false,
            ModelWeights::Trained(_) => !self.description.parameters[self.head].is_frozen(),
        };
        Ok(Head { weight, is_trained, cap: self.decoder.logit_cap, kind: self.kind })
    }
}

/// What the parts of one pass use.
struct Pass<'a> {
    /// (T)
    tokens: &'a Tensor,
    lengths: &'a [i64],
    /// The texts in blocks that are computed at once; `None` if each is computed alone, as on a CPU and with a cache.
    padded: Option<PaddedTexts>,
    ropes: Vec<RopeTable>,
    state: NetworkState<'a>,
    dropout: Option<Dropout>,
    /// Keys and values of the tokens before these, while text is generated.
    cache: Option<&'a KvCache>,
}

/// Consecutive parts whose gradients are computed together.
struct PartGroup {
    parts: Range<usize>,
    /// The start of their graph.
    input: Tensor,
    /// The end of their graph; `None` if they have to be recomputed.
    output: Option<Tensor>,
    /// Whether they are recomputed one after the other, each from the input of the group.
    by_sublayers: bool,
}

impl TorchNetwork for DecoderNetwork {
    fn description(&self) -> &NetworkDescription {
        &self.description
    }

    fn digest(&self) -> Option<&str> {
        Some(&self.digest)
    }

    fn min_batch(&self, _input: InputShape) -> u64 {
        1
    }

    fn initial_values(&self) -> Result<Option<Vec<(String, Tensor)>>, Error> {
        let ModelWeights::Trained(model) = &self.weights else { return Ok(None) };
        let values = self.decoder.tensors().into_iter().map(|tensor| {
            let values = value(model, &tensor, Kind::Float, Device::Cpu)?;
            Ok((tensor.name, values))
        });
        values.collect::<Result<_, _>>().map(Some)
    }

    fn prepared(&self, inputs: NetworkInputs) -> Result<NetworkInputs, Error> {
        Ok(inputs)
    }

    fn input_kind(&self) -> Kind {
        Kind::Int64
    }

    fn outputs(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Tensor>, Error> {
        let _no_grad = tch::no_grad_guard();
        let Some(x) = self.activations(inputs, state, is_interrupted)? else { return Ok(None) };
        let predict = || {
            let x = x.f_index_select(0, positions(inputs)?)?;
            self.head(state)?.outputs(&x, &inputs.targets)
        };
        predict().during("forward pass").map(Some)
    }

    /// Logits (T, V), f32.
    fn scores(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
    ) -> Result<Option<Tensor>, Error> {
        let _no_grad = tch::no_grad_guard();
        let x = self.activations(inputs, state, &mut || false)?;
        let logits = |x: Tensor| self.head(state)?.logits(&x);
        x.map(logits).transpose().during("forward pass")
    }

    fn generate(
        &self,
        prompts: &[Prompt],
        state: NetworkState<'_>,
        sampling: &Sampling,
        on_token: &mut dyn FnMut(usize, i64) -> bool,
    ) -> Result<bool, Error> {
        self.generated(prompts, state, sampling, on_token)
    }

    fn gradients(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        mut random: Draws,
        loss: &mut dyn FnMut(&Tensor) -> tch::Result<(Tensor, Tensor)>,
        _finished: Option<&mut StageFinished<'_>>,
    ) -> Result<PassResult, Error> {
        let ropes = self.ropes(&inputs.lengths, None).during("rotary positions")?;
        let dropout = (self.dropout > 0.0)
            .then(|| Dropout::new(self.dropout, random.bits(), self.kind))
            .transpose()
            .during("dropout")?;
        let (tokens, lengths) = (&inputs.main, inputs.lengths.as_slice());
        let padded = self.padded(lengths).during("pad texts")?;
        let pass = Pass { tokens, lengths, padded, ropes, state, dropout, cache: None };
        let (x, groups) = self.forward(&pass).during("forward pass")?;
        let result = || {
            // Each label's part of the objective, which is linear in the outputs.
            let targets = &inputs.targets;
            let outputs = Tensor::f_zeros([targets.size1()?, 2], (Kind::Float, self.device))?;
            let outputs = outputs.f_set_requires_grad(true)?;
            let (_, objective) = loss(&outputs)?;
            let mut shares = Tensor::f_run_backward(&[&objective], &[&outputs], false, false)?;
            let shares = shares.pop().filter(Tensor::defined).unwrap_or(outputs);
            let chosen = x.f_index_select(0, positions(inputs)?)?;
            let head = self.head(state)?.gradients(&chosen, targets, &shares.f_select(1, 0)?)?;
            let (loss, _) = loss(&head.outputs)?;
            let upstream = x.f_zeros_like()?.f_index_add(0, positions(inputs)?, &head.inputs)?;
            let mut gradients = self.backward(groups, upstream, &pass)?;
            if let Some(gradient) = head.weight {
                match gradients.iter_mut().find(|(index, _)| *index == self.head) {
                    // A tied weight has two parts.
                    Some((_, sum)) => *sum = sum.f_to_kind(Kind::Float)?.f_add(&gradient)?,
                    None => gradients.push((self.head, gradient)),
                }
            }
            Ok(PassResult { outputs: head.outputs, loss: loss.f_detach()?, gradients })
        };
        result().during("backward pass")
    }
}

impl DecoderNetwork {
    /// The last activations (T, C) of a pass without a gradient; `None` if it was interrupted.
    fn activations(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Tensor>, Error> {
        let ropes = self.ropes(&inputs.lengths, None).during("rotary positions")?;
        let (tokens, lengths) = (&inputs.main, inputs.lengths.as_slice());
        let padded = self.padded(lengths).during("pad texts")?;
        let pass = Pass { tokens, lengths, padded, ropes, state, dropout: None, cache: None };
        let mut x = tokens.shallow_clone();
        for part in 0..self.parts.len() {
            if is_interrupted() {
                return Ok(None);
            }
            x = self.run(part..part + 1, &x, &pass).during("forward pass")?;
        }
        Ok(Some(x))
    }

    /// The last activations (T, C), and the groups to go back through.
    fn forward(&self, pass: &Pass<'_>) -> tch::Result<(Tensor, Vec<PartGroup>)> {
        let first = self.parts.iter().position(|part| !part.trained.is_empty());
        let mut x = pass.tokens.shallow_clone();
        let mut groups: Vec<PartGroup> = Vec::new();
        for (part, &DecoderPart { kind, recomputation, .. }) in self.parts.iter().enumerate() {
            let run = |x: &Tensor| self.run(part..part + 1, x, pass);
            if first.is_none_or(|first| part < first) {
                x = tch::no_grad(|| run(&x))?;
                continue;
            }
            let is_recomputed = recomputation != Recomputation::None;
            // A recomputed layer is a group of its own.
            let continues = groups.last().is_some_and(|last| match is_recomputed {
                true => matches!(kind, PartKind::FeedForward { .. }),
                false => last.output.is_some(),
            });
            if !continues {
                let needs_gradient = !groups.is_empty();
                x = x.f_detach()?.f_set_requires_grad(needs_gradient)?;
                groups.push(PartGroup {
                    parts: part..part,
                    input: x.shallow_clone(),
                    output: None,
                    by_sublayers: recomputation == Recomputation::Sublayers,
                });
            }
            x = if is_recomputed { tch::no_grad(|| run(&x)) } else { run(&x) }?;
            if let Some(last) = groups.last_mut() {
                last.parts.end = part + 1;
                last.output = (!is_recomputed).then(|| x.shallow_clone());
            }
        }
        Ok((x.f_detach()?, groups))
    }

    /// Gradients of all trained parameters, given that of the last activations.
    fn backward(
        &self,
        groups: Vec<PartGroup>,
        mut upstream: Tensor,
        pass: &Pass<'_>,
    ) -> tch::Result<Vec<(usize, Tensor)>> {
        let mut gradients = Vec::new();
        for (number, group) in groups.into_iter().enumerate().rev() {
            let PartGroup { parts, input, mut output, by_sublayers } = group;
            let together: Vec<Range<usize>> = match by_sublayers {
                true => parts.clone().map(|part| part..part + 1).collect(),
                false => vec![parts.clone()],
            };
            for some in together.into_iter().rev() {
                let is_first = some.start == parts.start;
                let start = match is_first {
                    true => input.shallow_clone(),
                    false => tch::no_grad(|| self.run(parts.start..some.start, &input, pass))?
                        .f_detach()?
                        .f_set_requires_grad(true)?,
                };
                let end = match output.take() {
                    Some(output) => output,
                    None => self.run(some.clone(), &start, pass)?,
                };
                let start = (number > 0 || !is_first).then_some(&start);
                let gradient =
                    self.backward_of(some, start, &end, &upstream, pass, &mut gradients)?;
                if let Some(gradient) = gradient {
                    upstream = gradient;
                }
            }
        }
        Ok(gradients)
    }

    /// Adds the gradients of the trained parameters of some parts to `gradients`, given that of their output. Returns that of
    /// their input, if it is wanted.
    fn backward_of(
        &self,
        parts: Range<usize>,
        input: Option<&Tensor>,
        output: &Tensor,
        upstream: &Tensor,
        pass: &Pass<'_>,
        gradients: &mut Vec<(usize, Tensor)>,
    ) -> tch::Result<Option<Tensor>> {
        let trained = self.parts[parts].iter().flat_map(|part| &part.trained);
        let indices: Vec<usize> = trained.copied().collect();
        // tch can start only at scalars; the gradient of this scalar is `upstream`.
        let scalar = output.f_mul(upstream)?.f_sum(Kind::Float)?;
        let parameters = indices.iter().map(|index| &pass.state.parameters[*index]);
        let with_respect_to: Vec<&Tensor> = parameters.chain(input).collect();
        let mut computed = Tensor::f_run_backward(&[&scalar], &with_respect_to, false, false)?;
        let of_input = input.and_then(|_| computed.pop());
        let computed = indices.into_iter().zip(computed);
        gradients.extend(computed.filter(|(_, gradient)| gradient.defined()));
        Ok(of_input)
    }
}

/// The positions (N) before each label, which predict it.
fn positions(inputs: &NetworkInputs) -> tch::Result<&Tensor> {
    inputs.extras.first().ok_or_else(|| tch::TchError::Torch("a batch without labels".to_owned()))
}

/// The parts of a network.
fn parts(
    model: &LanguageModel,
    description: &NetworkDescription,
    layers: &[LayerTensors],
    final_norm: usize,
) -> Vec<DecoderPart> {
    // With an adapter, nothing else is a parameter.
    let is_whole = model.adapter.is_none();
    let is_trained = |index: &usize| !description.parameters[*index].is_frozen();
    let part = |kind, all: Vec<usize>, recomputation| DecoderPart {
        kind,
        trained: all.into_iter().filter(is_trained).collect(),
        recomputation,
    };
    let whole = |index| if is_whole { vec![index] } else { Vec::new() };
    let mut parts = vec![part(PartKind::Embedding, whole(0), Recomputation::None)];
    for (layer, (tensors, recomputation)) in layers.iter().zip(&model.recomputed).enumerate() {
        for is_attention in [true, false] {
            let kind = match is_attention {
                true => PartKind::Attention { layer },
                false => PartKind::FeedForward { layer },
            };
            parts.push(part(kind, tensors.parameters(is_attention, is_whole), *recomputation));
        }
    }
    parts.push(part(PartKind::FinalNorm, whole(final_norm), Recomputation::None));
    parts
}

impl LayerTensors {
    /// Parameters of the attention or of the feed-forward part: all weights, or those of the adapter.
    fn parameters(&self, is_attention: bool, is_whole: bool) -> Vec<usize> {
        let linears = LinearKind::ALL.iter().zip(&self.linears);
        let linears = linears.filter(|(linear, _)| linear.is_attention() == is_attention);
        if !is_whole {
            return linears
                .filter_map(|(_, tensors)| tensors.adapter)
                .flat_map(|(a, b)| [a, b])
                .collect();
        }
        let linears =
            linears.flat_map(|(_, tensors)| [Some(tensors.weight), tensors.bias]).flatten();
        let norms = self.norms.iter().skip(usize::from(!is_attention)).step_by(2);
        let head_norms = self.head_norms.iter().flatten().filter(|_| is_attention);
        linears.chain(norms.copied()).chain(head_norms.copied()).collect()
    }
}

fn layer_tensors(
    model: &LanguageModel,
    layer: usize,
    index: &dyn Fn(&str) -> Result<usize, Error>,
) -> Result<LayerTensors, Error> {
    let prefix = layer_prefix(layer);
    let decoder = &model.decoder;
    let weight = |name: &str| index(&format!("{prefix}{name}.weight"));
    let adapted = |linear: LinearKind| {
        let mut linears = model.adapter.iter().flat_map(|adapter| &adapter.linears);
        let is_this = |one: &&AdaptedLinear| one.layer == layer && one.linear == linear;
        linears.find(is_this).map(|one| (one.a, one.b))
    };
    let mut linears = [LinearTensors::default(); LinearKind::ALL.len()];
    for (tensors, linear) in linears.iter_mut().zip(LinearKind::ALL) {
        let bias = || index(&format!("{prefix}{}.bias", linear.path()));
        *tensors = LinearTensors {
            weight: weight(linear.path())?,
            bias: decoder.has_bias(linear).then(bias).transpose()?,
            adapter: adapted(linear),
        };
    }
    let [queries, keys] = HEAD_NORMS;
    let head_norms = || Ok::<_, Error>([weight(queries)?, weight(keys)?]);
    Ok(LayerTensors {
        linears,
        norms: decoder.norm_names().iter().map(|name| weight(name)).collect::<Result<_, _>>()?,
        head_norms: decoder.has_head_norms.then(head_norms).transpose()?,
    })
}

/// The tensors of a model whose adapter is trained.
fn frozen(
    model: &LanguageModel,
    digest: &str,
    kind: Kind,
    device: Device,
) -> Result<Vec<FrozenWeight>, Error> {
    let (base_kind, is_quantized) = match model.base {
        BaseFormat::Auto => (kind, false),
        BaseFormat::Fp32 => (Kind::Float, false),
        BaseFormat::Bf16 => (Kind::BFloat16, false),
        BaseFormat::Nf4 => (kind, true),
    };
    let tensors = model.decoder.tensors();
    let quantized = match is_quantized {
        false => None,
        true => {
            let mut note = |line: String| tracing::info!("{line}");
            let source =
                Nf4Source::open(model, digest, &mut note).map_err(|error| recipe(&error))?;
            Some((source, Nf4Tables::new(device).during("read the model's weights")?))
        }
    };
    let linears = model.decoder.linear_weights();
    let weight = |tensor: &BaseTensor| match &quantized {
        Some((source, tables)) if linears.contains(tensor) => {
            let nf4 = source.read(tensor).map_err(|error| recipe(&error))?;
            let weight =
                tables.weight(nf4, &shape_of(tensor)).during("read the model's weights")?;
            Ok(FrozenWeight::Nf4(weight))
        }
        _ => value(model, tensor, base_kind, device).map(FrozenWeight::Dense),
    };
    tensors.iter().map(weight).collect()
}

fn shape_of(tensor: &BaseTensor) -> Vec<i64> {
    tensor.shape.iter().map(|dim| *dim as i64).collect()
}

/// A tensor of the model's files, converted.
fn value(
    model: &LanguageModel,
    tensor: &BaseTensor,
    kind: Kind,
    device: Device,
) -> Result<Tensor, Error> {
    let (stored, bytes) = model.source.read(&tensor.name).map_err(|error| recipe(&error))?;
    let stored = match stored {
        Float::F32 => Kind::Float,
        Float::F16 => Kind::Half,
        Float::Bf16 => Kind::BFloat16,
    };
    let read = || {
        let values = Tensor::f_from_data_size(&bytes, &shape_of(tensor), stored)?;
        let values = values.f_to_kind(kind)?.f_to_device(device)?;
        // It needs no memory, unlike a test of each value.
        let sum = values.f_sum(Kind::Float)?.f_double_value(&[])?;
        Ok((values, sum))
    };
    let (values, sum) = read().during("read the model's weights")?;
    match sum.is_finite() {
        true => Ok(values),
        false => Err(Error::Recipe(format!(
            "model.path: {} has values that are not finite numbers as {kind:?}: download the model again, or set \
             precision.compute = \"bf16\" or \"fp32\" if it is fp16",
            tensor.name
        ))),
    }
}

fn recipe(error: &baton_language::Error) -> Error {
    Error::Recipe(format!("model.path: {error}"))
}
