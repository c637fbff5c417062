//! ResNet-18 to ResNet-152: He et al. 2015 (arXiv 1512.03385), with the stride of a bottleneck on its
//! 3×3 convolution ("v1.5", as in torchvision and in every published speed record); and ResNet-34 in
//! one dimension.
//!
//! Names, shapes, order and the distribution of initial values are torchvision's. In one dimension a
//! kernel has nine samples, as many as a 3×3 kernel has pixels (the first has fifteen), so that
//! ResNet-34 keeps its 21 M parameters.

use crate::{Builder, Description, Layer, Options, builder::Conv};

/// Width of the first residual stage.
const WIDTH: u64 = 64;
/// Strided convolutions of at least so many channels are blurred before, as in ffcv-imagenet: all but
/// the first.
const LEAST_BLURRED: u64 = 16;

/// The two kinds of residual block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// 3×3, 3×3.
    Basic,
    /// 1×1, 3×3, 1×1 with four times the channels.
    Bottleneck,
}

/// One that sees images.
pub(crate) fn images(options: &Options, kind: Kind, depths: [u64; 4]) -> Description {
    Resnet { options, kind, side: 3, network: Builder::images() }.describe(7, depths)
}

/// One that sees signals.
pub(crate) fn signals(options: &Options, kind: Kind, depths: [u64; 4]) -> Description {
    Resnet { options, kind, side: 9, network: Builder::signals() }.describe(15, depths)
}

struct Resnet<'a> {
    options: &'a Options,
    kind: Kind,
    /// Of the kernels larger than one, but the first.
    side: u64,
    network: Builder,
}

/// A convolution in a residual block.
#[derive(Clone, Copy)]
struct Shape {
    inputs: u64,
    outputs: u64,
    side: u64,
    stride: u64,
}

impl Resnet<'_> {
    fn describe(mut self, stem_side: u64, depths: [u64; 4]) -> Description {
        self.network.block("stem");
        let shape =
            Shape { inputs: self.options.channels, outputs: WIDTH, side: stem_side, stride: 2 };
        let stem = self.conv("conv1", "bn1", shape);
        self.network.conv_norm(stem);
        self.network.push(Layer::MaxPool { side: 3, stride: 2 });
        let (mut inputs, mut width) = (WIDTH, WIDTH);
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

    /// Appends a residual block and returns the number of its outputs.
    fn residual(&mut self, name: &str, inputs: u64, width: u64, stride: u64) -> u64 {
        let (side, one) = (self.side, 1);
        let (outputs, shapes) = match self.kind {
            Kind::Basic => (
                width,
                vec![
                    Shape { inputs, outputs: width, side, stride },
                    Shape { inputs: width, outputs: width, side, stride: 1 },
                ],
            ),
            Kind::Bottleneck => (
                4 * width,
                vec![
                    Shape { inputs, outputs: width, side: one, stride: 1 },
                    Shape { inputs: width, outputs: width, side, stride },
                    Shape { inputs: width, outputs: 4 * width, side: one, stride: 1 },
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
            let conv = self.conv(&conv, &norm, Shape { inputs, outputs, side: one, stride });
            self.network.tensors_of_conv(Conv { relu: false, ..conv })
        });
        self.network.push(Layer::Residual { name: name.to_owned(), body, shortcut });
        outputs
    }

    fn conv<'n>(&self, name: &'n str, norm: &'n str, shape: Shape) -> Conv<'n> {
        let Shape { inputs, outputs, side, stride } = shape;
        let blurred = self.options.blur_pool && stride > 1 && inputs >= LEAST_BLURRED;
        Conv { inputs, outputs, side, stride, blurred, ..Conv::new(name, norm) }
    }
}
