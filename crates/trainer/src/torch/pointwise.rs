//! 1×1 convolutions on a CPU: as libtorch's convolutions, or as products of matrices. Which is faster depends on the
//! processor: `docs/decisions/0007-pointwise-products.md`.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use baton_model::{ConvNorm, Layer, NetworkDescription, size::Size};
use baton_recipe::spec::Pointwise;
use tch::{Device, Kind, Tensor};

/// Convolutions replace products only if they take at most this share of their time, so that two runs on one machine
/// choose alike although their measurements differ.
const MAX_SHARE: f64 = 0.75;

/// No measurement, and products, if a smaller share of a network's multiplications is in 1×1 convolutions: the choice
/// would hardly matter.
const MIN_OF_NETWORK: f64 = 0.25;

/// Nothing is measured again, and no further shape, after so long.
const MAX_TIME: Duration = Duration::from_secs(1);

/// Measurements of a shape, each way; the shortest counts, because other programs may use the machine.
const TRIES: u32 = 3;

/// Convolution of the channels-last images `x` with `kernel` (out, in, 1, 1), as a product of its pixels with the weights.
pub(super) fn product(x: &Tensor, kernel: &Tensor, stride: i64) -> tch::Result<Tensor> {
    let mut pixels = x.f_permute([0, 2, 3, 1])?;
    if stride > 1 {
        pixels = pixels.f_slice(1, None, None, stride)?.f_slice(2, None, None, stride)?;
    }
    // With more than two dimensions, `linear` chooses between one product and one per image depending on whether the
    // weight requires a gradient, and the two round differently on some processors. Averaged and frozen weights, which
    // require none, must give the same bits as trained ones.
    let mut shape = pixels.size();
    let channels = shape.pop().unwrap_or_default();
    shape.push(-1);
    let matrix = kernel.f_flatten(1, -1)?;
    let product = pixels.f_reshape([-1, channels])?.f_linear(&matrix, None::<&Tensor>)?;
    product.f_reshape(&shape)?.f_permute([0, 3, 1, 2])
}

/// The faster way for training `network` with batches of `samples` inputs of this size, as measured now; `None` if it has
/// too few 1×1 convolutions.
pub(super) fn measure(
    network: &NetworkDescription,
    input: Size,
    samples: u64,
    kind: Kind,
) -> tch::Result<Option<Pointwise>> {
    let Some(shapes) = shapes(network, input) else { return Ok(None) };
    let until = Instant::now() + MAX_TIME;
    let (mut products, mut convolutions) = (0.0, 0.0);
    for (shape, count) in shapes {
        let [product, convolution] = shape.seconds(samples, kind, until)?;
        products += count * product;
        convolutions += count * convolution;
        if Instant::now() > until {
            break;
        }
    }
    let chosen = choose(products, convolutions);
    tracing::info!(
        "1×1 convolutions: {chosen} for this run, because libtorch's convolutions take {:.2} times as long as products",
        convolutions / products
    );
    Ok(Some(chosen))
}

/// The faster way, by the seconds that each takes.
fn choose(products: f64, convolutions: f64) -> Pointwise {
    match convolutions <= MAX_SHARE * products {
        true => Pointwise::Convolution,
        false => Pointwise::Product,
    }
}

/// A 1×1 convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PointwiseShape {
    /// Size of its input.
    input: [u64; 3],
    /// Number of output channels.
    outputs: u64,
    stride: u64,
}

/// The 1×1 convolutions of `network` with their numbers, those with the most multiplications first; `None` if they are a
/// small part of the network.
fn shapes(network: &NetworkDescription, input: Size) -> Option<Vec<(PointwiseShape, f64)>> {
    let mut found: BTreeMap<PointwiseShape, u64> = BTreeMap::new();
    let (mut all, mut pointwise) = (0, 0);
    let mut visit = |layer: &ConvNorm, size: Size| {
        let after = layer.after(size, network);
        let kernel = &network.parameters[layer.kernel].shape;
        let macs = after.values() * kernel.iter().skip(1).product::<u64>();
        all += macs;
        if let [outputs, _, 1, 1] = kernel[..] {
            pointwise += macs;
            let input = [size.channels, size.height, size.width];
            *found.entry(PointwiseShape { input, outputs, stride: layer.stride }).or_default() +=
                macs;
        }
        after
    };
    let mut size = input;
    for layer in network.all_blocks().flat_map(|block| &block.layers) {
        match layer {
            Layer::ConvNorm(layer) => {
                visit(layer, size);
            }
            Layer::Residual { body, shortcut, .. } => {
                body.iter().fold(size, |size, layer| visit(layer, size));
                shortcut.iter().for_each(|layer| {
                    visit(layer, size);
                });
            }
            Layer::MaxPool { .. } | Layer::GlobalMean | Layer::Linear(_) => {}
        }
        size = layer.after(size, network);
    }
    if (pointwise as f64) < MIN_OF_NETWORK * all as f64 || found.is_empty() {
        return None;
    }
    let mut shapes: Vec<_> = found.into_iter().collect();
    shapes.sort_by_key(|(_, macs)| std::cmp::Reverse(*macs));
    let counted = shapes.into_iter().map(|(shape, macs)| (shape, (macs / shape.macs()) as f64));
    Some(counted.collect())
}

impl PointwiseShape {
    /// Multiplications per sample.
    fn macs(self) -> u64 {
        let [channels, height, width] = self.input;
        height.div_ceil(self.stride) * width.div_ceil(self.stride) * channels * self.outputs
    }

    /// Shortest times of a forward and a backward pass as a product and as a convolution, measured in turn.
    fn seconds(self, samples: u64, kind: Kind, until: Instant) -> tch::Result<[f64; 2]> {
        let [channels, height, width] = self.input.map(|length| length as i64);
        let random = |shape: [i64; 4]| {
            let values = Tensor::f_randn(shape, (Kind::Float, Device::Cpu))?.f_to_kind(kind)?;
            let values = values.f_permute([0, 3, 1, 2])?;
            values.f_set_requires_grad(true)
        };
        let x = random([samples as i64, height, width, channels])?;
        let kernel = random([self.outputs as i64, 1, 1, channels])?;
        let stride = self.stride as i64;
        let pass = |forward: &dyn Fn() -> tch::Result<Tensor>| {
            let began = Instant::now();
            // Its gradient is a whole tensor, as in a network.
            let objective = forward()?.f_square()?.f_sum(Kind::Float)?;
            Tensor::f_run_backward(&[&objective], &[&x, &kernel], false, false)?;
            Ok::<_, tch::TchError>(began.elapsed().as_secs_f64())
        };
        let by_convolution =
            || x.f_conv2d(&kernel, None::<&Tensor>, [stride; 2], [0; 2], [1, 1], 1);
        let mut best = [f64::INFINITY; 2];
        // The first ones also compile libtorch's kernels.
        for _ in 0..=TRIES {
            let seconds = [pass(&|| product(&x, &kernel, stride))?, pass(&by_convolution)?];
            best = [best[0].min(seconds[0]), best[1].min(seconds[1])];
            if Instant::now() > until {
                break;
            }
        }
        Ok(best)
    }
}

#[cfg(test)]
mod tests {
    use baton_model::{Arch, NetworkOptions};

    use super::*;

    fn network(arch: &str) -> NetworkDescription {
        let options =
            NetworkOptions { channels: 3, outputs: 10, zero_init_gamma: false, blur_pool: false };
        Arch::named(arch).unwrap().describe(&options).unwrap()
    }

    const IMAGE: Size = Size { channels: 3, height: 64, width: 64 };

    #[test]
    fn the_choice_is_measured_only_for_networks_of_which_1x1_convolutions_are_a_large_part() {
        assert_eq!(shapes(&network("resnet18"), IMAGE), None);
        let shapes = shapes(&network("resnet50"), IMAGE).unwrap();
        // Two in each of 16 blocks, and four shortcuts.
        assert_eq!(shapes.iter().map(|(_, count)| *count as u64).sum::<u64>(), 36);
        let strided = |(shape, _): &&(PointwiseShape, f64)| shape.stride == 2;
        assert_eq!(shapes.iter().filter(strided).count(), 3);
        let of_last_block = PointwiseShape { input: [2_048, 2, 2], outputs: 512, stride: 1 };
        assert!(shapes.contains(&(of_last_block, 2.0)), "{shapes:?}");
        let most = shapes.iter().map(|(shape, count)| *count as u64 * shape.macs());
        assert!(most.is_sorted_by(|more, fewer| more >= fewer));
    }

    #[test]
    fn convolutions_are_chosen_only_if_they_are_clearly_faster() {
        assert_eq!(choose(1.0, 0.53), Pointwise::Convolution);
        for convolutions in [0.85, 1.0, 1.7] {
            assert_eq!(choose(1.0, convolutions), Pointwise::Product);
        }
        assert_eq!(measure(&network("resnet18"), IMAGE, 2, Kind::Float).unwrap(), None);
        assert!(measure(&network("resnet50"), IMAGE, 2, Kind::Float).unwrap().is_some());
    }

    #[test]
    fn a_product_is_the_convolution() {
        for stride in [1, 2] {
            let x = Tensor::randn([3, 5, 7, 16], (Kind::Float, Device::Cpu)).permute([0, 3, 1, 2]);
            let kernel = Tensor::randn([8, 16, 1, 1], (Kind::Float, Device::Cpu));
            let convolved = x.conv2d(&kernel, None::<&Tensor>, [stride; 2], [0; 2], [1, 1], 1);
            let product = product(&x, &kernel, stride).unwrap();
            assert!(product.allclose(&convolved, 1e-4, 1e-4, false), "stride {stride}");
        }
    }
}
