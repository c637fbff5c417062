//! ResNet-18 to ResNet-152: He et al. 2015 (arXiv 1512.03385), with the stride of a bottleneck on its
//! 3×3 convolution ("v1.5", as in torchvision and in all published speed records); and ResNet-34 in one dimension.
//!
//! Names, shapes, order and the distribution of initial values are the same as in torchvision. In one dimension a
//! kernel has nine values, as many as a 3×3 kernel (the first kernel has fifteen), so that ResNet-34 keeps its 21 M
//! parameters.

use crate::{Builder, Layer, NetworkDescription, NetworkOptions, builder::Conv};

/// Width (number of channels) of the first residual stage.
const FIRST_WIDTH: u64 = 64;
/// Strided convolutions with at least this many input channels get blurred inputs, as in ffcv-imagenet: all but the
/// first.
const MIN_BLURRED_CHANNELS: u64 = 16;

/// The two kinds of residual block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockKind {
    /// 3×3, 3×3.
    Basic,
    /// 1×1, 3×3, 1×1 with four times the channels.
    Bottleneck,
}

/// A ResNet for images.
pub(crate) fn images(
    options: &NetworkOptions,
    kind: BlockKind,
    depths: [u64; 4],
) -> NetworkDescription {
    Resnet { options, kind, side: 3, network: Builder::images() }.describe(7, depths)
}

/// A ResNet for signals.
pub(crate) fn signals(
    options: &NetworkOptions,
    kind: BlockKind,
    depths: [u64; 4],
) -> NetworkDescription {
    Resnet { options, kind, side: 9, network: Builder::signals() }.describe(15, depths)
}

struct Resnet<'a> {
    options: &'a NetworkOptions,
    kind: BlockKind,
    /// Side of the kernels that are larger than 1, except the first kernel.
    side: u64,
    network: Builder,
}

/// Channels, kernel size and stride of a convolution.
#[derive(Clone, Copy)]
struct ConvShape {
    inputs: u64,
    outputs: u64,
    side: u64,
    stride: u64,
}

impl Resnet<'_> {
    fn describe(mut self, stem_side: u64, depths: [u64; 4]) -> NetworkDescription {
        self.network.block("stem");
        let shape = ConvShape {
            inputs: self.options.channels,
            outputs: FIRST_WIDTH,
            side: stem_side,
            stride: 2,
        };
        let stem = self.conv("conv1", "bn1", shape);
        self.network.conv_norm(stem);
        self.network.push(Layer::MaxPool { side: 3, stride: 2 });
        let (mut inputs, mut width) = (FIRST_WIDTH, FIRST_WIDTH);
        for (number, depth) in (1..).zip(depths) {
            self.network.block(&format!("layer{number}"));
            for index in 0..depth {
                let stride = if number > 1 && index == 0 { 2 } else { 1 };
                inputs = self.residual(&format!("layer{number}.{index}"), inputs, width, stride);
            }
            width *= 2;
        }
        self.network.block("head");
        self.network.push(Layer::GlobalMean);
        self.network.linear("fc", inputs, self.options.outputs);
        self.network.finish()
    }

    /// Appends a residual block and returns its number of output channels.
    fn residual(&mut self, name: &str, inputs: u64, width: u64, stride: u64) -> u64 {
        let (side, one) = (self.side, 1);
        let (outputs, shapes) = match self.kind {
            BlockKind::Basic => (
                width,
                vec![
                    ConvShape { inputs, outputs: width, side, stride },
                    ConvShape { inputs: width, outputs: width, side, stride: 1 },
                ],
            ),
            BlockKind::Bottleneck => (
                4 * width,
                vec![
                    ConvShape { inputs, outputs: width, side: one, stride: 1 },
                    ConvShape { inputs: width, outputs: width, side, stride },
                    ConvShape { inputs: width, outputs: 4 * width, side: one, stride: 1 },
                ],
            ),
        };
        let last = shapes.len();
        let last_scale = if self.options.zero_init_gamma { 0.0 } else { 1.0 };
        let mut body = Vec::new();
        for (number, shape) in (1..).zip(shapes) {
            let (conv, norm) = (format!("{name}.conv{number}"), format!("{name}.bn{number}"));
            let conv = self.conv(&conv, &norm, shape);
            body.push(self.network.tensors_of_conv(match number == last {
                true => Conv { scale: last_scale, relu: false, ..conv },
                false => conv,
            }));
        }
        let shortcut = (stride != 1 || inputs != outputs).then(|| {
            let (conv, norm) = (format!("{name}.downsample.0"), format!("{name}.downsample.1"));
            let conv = self.conv(&conv, &norm, ConvShape { inputs, outputs, side: one, stride });
            self.network.tensors_of_conv(Conv { relu: false, ..conv })
        });
        self.network.push(Layer::Residual { name: name.to_owned(), body, shortcut });
        outputs
    }

    fn conv<'n>(&self, name: &'n str, norm: &'n str, shape: ConvShape) -> Conv<'n> {
        let ConvShape { inputs, outputs, side, stride } = shape;
        let blurred = self.options.blur_pool && stride > 1 && inputs >= MIN_BLURRED_CHANNELS;
        Conv { inputs, outputs, side, stride, blurred, ..Conv::new(name, norm) }
    }
}
