//! Which linear layers of a decoder get LoRA matrices, and the tensors that training changes.
//!
//! Tensors have PEFT's names, so that a checkpoint's export is an adapter that PEFT reads.

use baton_model::{Block, Init, NetworkDescription, Tensor, TensorRole};
use baton_recipe::spec::{ALL_LINEAR, Adapter};

use crate::decoder::{DecoderModel, LinearKind, layer_prefix};

/// Prefix of the names of all tensors in PEFT's adapter files.
pub const PEFT_PREFIX: &str = "base_model.model.";

/// A linear layer with LoRA matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptedLinear {
    /// Number of the layer.
    pub layer: usize,
    /// The linear layer in it.
    pub linear: LinearKind,
    /// Parameter: `A`, shape (rank, in).
    pub a: usize,
    /// Parameter: `B`, shape (out, rank).
    pub b: usize,
}

/// All linear layers with LoRA matrices, in the order of a state dict.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterLayout {
    /// The linear layers.
    pub linears: Vec<AdaptedLinear>,
    /// Factor of `B (A x)`.
    pub scale: f64,
    /// Share of the inputs of `A` that are dropped in training.
    pub dropout: f64,
    rank: u64,
}

impl AdapterLayout {
    /// The layout of a recipe's adapter.
    ///
    /// # Errors
    /// A target that is the end of no linear layer's name.
    pub fn new(decoder: &DecoderModel, adapter: &Adapter) -> Result<Self, String> {
        let mut used = vec![false; adapter.targets.len()];
        let mut linears = Vec::new();
        for layer in 0..decoder.layers.len() {
            for linear in LinearKind::ALL {
                let name = format!("{}{}", layer_prefix(layer), linear.path());
                let mut is_target = false;
                for (target, used) in adapter.targets.iter().zip(&mut used) {
                    let matches = target == ALL_LINEAR || is_end_of_name(&name, target);
                    *used |= matches;
                    is_target |= matches;
                }
                if is_target {
                    let a = linears.len() * 2;
                    linears.push(AdaptedLinear { layer, linear, a, b: a + 1 });
                }
            }
        }
        let unused = adapter.targets.iter().zip(used).find(|(_, used)| !used);
        if let Some((target, _)) = unused {
            let names: Vec<&str> = LinearKind::ALL.iter().map(|linear| linear.name()).collect();
            return Err(format!(
                "adapter.targets: {target} is the name of no linear layer: choose {ALL_LINEAR}, or among {}",
                names.join(", ")
            ));
        }
        Ok(Self {
            linears,
            scale: adapter.scale(),
            dropout: adapter.dropout,
            rank: adapter.rank.into(),
        })
    }

    /// Rows of every `A`, columns of every `B`.
    #[must_use]
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// The matrices, with PEFT's initial values: `A` uniform with torch's `kaiming_uniform_(a=sqrt(5))`, `B` zero, so that
    /// training begins with the outputs of the model itself. One block for each layer.
    #[must_use]
    pub fn describe(&self, decoder: &DecoderModel) -> NetworkDescription {
        let mut parameters = Vec::new();
        for AdaptedLinear { layer, linear, .. } in &self.linears {
            let [outputs, inputs] = decoder.linear_shape(*linear);
            let path = format!("{PEFT_PREFIX}{}{}", layer_prefix(*layer), linear.path());
            let bound = (inputs as f64).sqrt().recip();
            let matrices = [
                ("lora_A", [self.rank, inputs], Init::Uniform { bound }),
                ("lora_B", [outputs, self.rank], Init::Constant(0.0)),
            ];
            for (name, shape, init) in matrices {
                parameters.push(trained(
                    format!("{path}.{name}.weight"),
                    &shape,
                    init,
                    parameters.len(),
                ));
            }
        }
        let blocks = (0..decoder.layers.len()).map(|layer| {
            let before = self.linears.iter().take_while(|linear| linear.layer < layer).count();
            let until = self.linears.iter().take_while(|linear| linear.layer <= layer).count();
            block(format!("layers.{layer}"), before * 2..until * 2)
        });
        NetworkDescription {
            blocks: blocks.collect(),
            head: block("head".to_owned(), parameters.len()..parameters.len()),
            parameters,
            statistics: Vec::new(),
        }
    }
}

/// All weights of a decoder as trained parameters, in the order of [`DecoderModel::tensors`]. Their initial values are in the
/// model's files.
#[must_use]
pub fn describe_whole(decoder: &DecoderModel) -> NetworkDescription {
    let (mut parameters, mut blocks): (Vec<Tensor>, Vec<Block>) = (Vec::new(), Vec::new());
    for tensor in decoder.tensors() {
        let index = parameters.len();
        let name = match tensor.name.strip_prefix("model.layers.") {
            Some(rest) => format!("layers.{}", rest.split('.').next().unwrap_or_default()),
            None if index == 0 => "embedding".to_owned(),
            None => "head".to_owned(),
        };
        if blocks.last().is_none_or(|block| block.name != name) {
            blocks.push(block(name, index..index));
        }
        if let Some(block) = blocks.last_mut() {
            block.parameters.end = index + 1;
        }
        let init = Init::Constant(0.0);
        parameters.push(trained(tensor.name, &tensor.shape, init, index));
    }
    let head = blocks.pop().unwrap_or_else(|| block("head".to_owned(), 0..0));
    NetworkDescription { parameters, statistics: Vec::new(), blocks, head }
}

fn block(name: String, parameters: std::ops::Range<usize>) -> Block {
    Block { name, layers: Vec::new(), parameters, statistics: 0..0 }
}

fn trained(name: String, shape: &[u64], init: Init, position: usize) -> Tensor {
    Tensor {
        name,
        aliases: Vec::new(),
        shape: shape.to_owned(),
        init,
        decays: shape.len() > 1,
        is_cast: shape.len() > 1,
        is_hidden: false,
        role: TensorRole::Trained,
        position,
    }
}

/// Whether `end` is the whole name, or its last parts.
pub(crate) fn is_end_of_name(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}
