//! Builder for a network description, block by block and layer by layer.
//!
//! The order of the calls, and of the tensors that one call adds, is their order in the state, and decides which random
//! numbers they start from. Names are torchvision's, and checkpoints and exports have them. So none of this may change
//! for a network that exists.

use crate::{Block, ConvNorm, Init, Layer, Linear, NetworkDescription, Tensor, TensorRole};

/// Builder for a [`NetworkDescription`].
///
/// ```
/// use baton_model::{Builder, builder::Conv, layer::Layer};
/// let mut network = Builder::images();
/// network.block("stem");
/// let conv = Conv { inputs: 3, outputs: 8, ..Conv::new("conv1", "bn1") };
/// network.conv_norm(conv);
/// network.block("head");
/// network.push(Layer::GlobalMean);
/// network.linear("fc", 8, 10);
/// let network = network.finish();
/// assert_eq!(network.blocks[0].name, "stem");
/// assert_eq!(network.parameters[0].name, "conv1.weight");
/// ```
#[derive(Debug)]
pub struct Builder {
    dimensions: usize,
    parameters: Vec<Tensor>,
    statistics: Vec<Tensor>,
    blocks: Vec<Block>,
}

/// A convolution with a square kernel and the BatchNorm after it.
#[derive(Clone, Copy, Debug)]
pub struct Conv<'a> {
    /// Name of the convolution.
    pub name: &'a str,
    /// Name of the BatchNorm.
    pub norm: &'a str,
    /// Input channels.
    pub inputs: u64,
    /// Output channels.
    pub outputs: u64,
    /// Kernel size: values along each side.
    pub side: u64,
    /// Stride.
    pub stride: u64,
    /// Whether the inputs are blurred first.
    pub blurred: bool,
    /// Initial value of BatchNorm's scale.
    pub scale: f32,
    /// Whether a ReLU follows.
    pub relu: bool,
}

impl<'a> Conv<'a> {
    /// A 1×1 convolution with one input and one output channel, stride 1, and a ReLU.
    #[must_use]
    pub fn new(name: &'a str, norm: &'a str) -> Self {
        Self {
            name,
            norm,
            inputs: 1,
            outputs: 1,
            side: 1,
            stride: 1,
            blurred: false,
            scale: 1.0,
            relu: true,
        }
    }
}

impl Builder {
    /// An empty network for images.
    #[must_use]
    pub fn images() -> Self {
        Self::of(2)
    }

    /// An empty network for one-dimensional signals.
    #[must_use]
    pub fn signals() -> Self {
        Self::of(1)
    }

    fn of(dimensions: usize) -> Self {
        let (parameters, statistics, blocks) = (Vec::new(), Vec::new(), Vec::new());
        Self { dimensions, parameters, statistics, blocks }
    }

    /// Begins a block: everything added after this belongs to it. The last block becomes the head.
    pub fn block(&mut self, name: &str) {
        let (parameters, statistics) = (self.parameters.len(), self.statistics.len());
        self.blocks.push(Block {
            name: name.to_owned(),
            layers: Vec::new(),
            parameters: parameters..parameters,
            statistics: statistics..statistics,
        });
    }

    /// Appends a layer. Its tensors must have been [added](Self::tensors_of_conv) in the same block.
    pub fn push(&mut self, layer: Layer) {
        if self.blocks.is_empty() {
            self.block("");
        }
        let (parameters, statistics) = (self.parameters.len(), self.statistics.len());
        if let Some(block) = self.blocks.last_mut() {
            block.layers.push(layer);
            block.parameters.end = parameters;
            block.statistics.end = statistics;
        }
    }

    /// Appends a convolution with its BatchNorm.
    pub fn conv_norm(&mut self, conv: Conv<'_>) {
        let layer = Layer::ConvNorm(self.tensors_of_conv(conv));
        self.push(layer);
    }

    /// Adds the tensors of a convolution and its BatchNorm, for a layer that contains both.
    pub fn tensors_of_conv(&mut self, conv: Conv<'_>) -> ConvNorm {
        let Conv { name, norm, inputs, outputs, side, stride, blurred, scale, relu } = conv;
        let mut shape = vec![outputs, inputs];
        shape.resize(2 + self.dimensions, side);
        let kernel_len: u64 = shape[2..].iter().product();
        // He et al. 2015 (arXiv 1502.01852) §2.2, backward case; torch's
        // `kaiming_normal_(mode="fan_out", nonlinearity="relu")`.
        let init = Init::Normal { std: (2.0 / (outputs * kernel_len) as f64).sqrt() };
        ConvNorm {
            kernel: self.kernel(format!("{name}.weight"), shape, init),
            stride,
            blurred,
            scale: self.f32_parameter(format!("{norm}.weight"), outputs, Init::Constant(scale)),
            shift: self.f32_parameter(format!("{norm}.bias"), outputs, Init::Constant(0.0)),
            mean: self.statistic(format!("{norm}.running_mean"), outputs, 0.0),
            variance: self.statistic(format!("{norm}.running_var"), outputs, 1.0),
            relu,
        }
    }

    /// Appends a linear layer.
    pub fn linear(&mut self, name: &str, inputs: u64, outputs: u64) {
        // torch's `Linear`: `kaiming_uniform_(a=sqrt(5))`, whose bound is 1/sqrt(inputs), for the weight; the same
        // bound for the bias.
        let init = Init::Uniform { bound: (inputs as f64).sqrt().recip() };
        let weight = self.kernel(format!("{name}.weight"), vec![outputs, inputs], init);
        let bias = self.f32_parameter(format!("{name}.bias"), outputs, init);
        self.push(Layer::Linear(Linear { weight, bias }));
    }

    /// Returns the network. Without blocks, the network is a head without layers.
    #[must_use]
    pub fn finish(mut self) -> NetworkDescription {
        if self.blocks.is_empty() {
            self.block("head");
        }
        let head = self.blocks.remove(self.blocks.len() - 1);
        let Self { mut parameters, statistics, blocks, .. } = self;
        parameters[head.parameters.clone()].iter_mut().for_each(|tensor| tensor.is_hidden = false);
        NetworkDescription { parameters, statistics, blocks, head }
    }

    /// Adds a parameter with weight decay, cast to the recipe's number format for computation.
    fn kernel(&mut self, name: String, shape: Vec<u64>, init: Init) -> usize {
        let tensor = self.tensor(name, shape, init);
        self.parameters.push(Tensor { decays: true, is_cast: true, is_hidden: true, ..tensor });
        self.parameters.len() - 1
    }

    /// Adds a parameter without weight decay that stays in f32.
    fn f32_parameter(&mut self, name: String, len: u64, init: Init) -> usize {
        let tensor = self.tensor(name, vec![len], init);
        self.parameters.push(tensor);
        self.parameters.len() - 1
    }

    fn statistic(&mut self, name: String, len: u64, value: f32) -> usize {
        let tensor = self.tensor(name, vec![len], Init::Constant(value));
        self.statistics.push(tensor);
        self.statistics.len() - 1
    }

    fn tensor(&self, name: String, shape: Vec<u64>, init: Init) -> Tensor {
        let position = self.parameters.len() + self.statistics.len();
        let role = TensorRole::Trained;
        Tensor {
            name,
            aliases: Vec::new(),
            shape,
            init,
            decays: false,
            is_cast: false,
            is_hidden: false,
            role,
            position,
        }
    }
}
