//! How a network is written down: block by block, layer by layer.

use crate::{Block, ConvNorm, Description, Init, Layer, Linear, Role, Tensor};

/// A network that is being written down.
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

/// A convolution with equal sides and the BatchNorm after it, by their names.
#[derive(Clone, Copy, Debug)]
pub struct Conv<'a> {
    /// Name of the convolution.
    pub name: &'a str,
    /// Name of the BatchNorm.
    pub norm: &'a str,
    /// Channels before.
    pub inputs: u64,
    /// Channels after.
    pub outputs: u64,
    /// Values along each side of the kernel.
    pub side: u64,
    /// Values from one window to the next.
    pub stride: u64,
    /// Blur the inputs before.
    pub blurred: bool,
    /// First value of BatchNorm's factor.
    pub scale: f32,
    /// ReLU behind it.
    pub relu: bool,
}

impl<'a> Conv<'a> {
    /// A pointwise one of one channel, with ReLU.
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
    /// A network that sees images.
    #[must_use]
    pub fn images() -> Self {
        Self::of(2)
    }

    /// A network that sees signals.
    #[must_use]
    pub fn signals() -> Self {
        Self::of(1)
    }

    fn of(dimensions: usize) -> Self {
        let (parameters, statistics, blocks) = (Vec::new(), Vec::new(), Vec::new());
        Self { dimensions, parameters, statistics, blocks }
    }

    /// Begins a block, to which belongs what is added from here on. The last one is the head.
    pub fn block(&mut self, name: &str) {
        let (parameters, statistics) = (self.parameters.len(), self.statistics.len());
        self.blocks.push(Block {
            name: name.to_owned(),
            layers: Vec::new(),
            parameters: parameters..parameters,
            statistics: statistics..statistics,
        });
    }

    /// Appends a layer. Its tensors must have been [added](Self::tensors_of_conv) in this block.
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
        let taps: u64 = shape[2..].iter().product();
        // He et al. 2015 (arXiv 1502.01852) §2.2, backward case; torch's
        // `kaiming_normal_(mode="fan_out", nonlinearity="relu")`.
        let init = Init::Normal { std: (2.0 / (outputs * taps) as f64).sqrt() };
        ConvNorm {
            kernel: self.kernel(format!("{name}.weight"), shape, init),
            stride,
            blurred,
            scale: self.other(format!("{norm}.weight"), outputs, Init::Constant(scale)),
            shift: self.other(format!("{norm}.bias"), outputs, Init::Constant(0.0)),
            mean: self.statistic(format!("{norm}.running_mean"), outputs, 0.0),
            variance: self.statistic(format!("{norm}.running_var"), outputs, 1.0),
            relu,
        }
    }

    /// Appends a linear layer.
    pub fn linear(&mut self, name: &str, inputs: u64, outputs: u64) {
        // torch's `Linear`: `kaiming_uniform_(a=sqrt(5))`, which comes to 1/sqrt(inputs) for the
        // weight, and the same bound for the bias.
        let init = Init::Uniform { bound: (inputs as f64).sqrt().recip() };
        let weight = self.kernel(format!("{name}.weight"), vec![outputs, inputs], init);
        let bias = self.other(format!("{name}.bias"), outputs, init);
        self.push(Layer::Linear(Linear { weight, bias }));
    }

    /// The network. A builder without blocks gives a head without layers.
    #[must_use]
    pub fn finish(mut self) -> Description {
        if self.blocks.is_empty() {
            self.block("head");
        }
        let head = self.blocks.remove(self.blocks.len() - 1);
        let Self { parameters, statistics, blocks, .. } = self;
        Description { parameters, statistics, blocks, head }
    }

    /// A parameter that decays and is computed with in the recipe's number format.
    fn kernel(&mut self, name: String, shape: Vec<u64>, init: Init) -> usize {
        let tensor = Tensor { decays: true, is_cast: true, ..self.tensor(name, shape, init) };
        self.parameters.push(tensor);
        self.parameters.len() - 1
    }

    /// A parameter that does neither.
    fn other(&mut self, name: String, len: u64, init: Init) -> usize {
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
        let role = Role::Trained;
        Tensor { name, shape, init, decays: false, is_cast: false, role, position }
    }
}
