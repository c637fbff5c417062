//! Layout of the tensors in flat buffers.
//!
//! | buffer | values, f32 |
//! |---|---|
//! | weights, gradient, optimizer moments | trained parameters: first those with a working copy in the recipe's number format, among them first those with weight decay |
//! | running statistics | mean and unbiased variance of every trained BatchNorm layer |
//! | frozen | parameters and statistics that training does not change |
//! | leaf | batch statistics (same layout as running statistics), gradient, tail |
//!
//! A convolution's weight (OIHW) is stored in OHWI order when the network computes in channels-last format, so that no
//! operation has to reorder it. Every tensor begins at a multiple of [`TENSOR_ALIGNMENT`]; the padding between two
//! tensors is zero. The leaf begins with the statistics; they are short, and the gradient after them is aligned too.

use std::ops::Range;

use baton_model::{Init, Integers, NetworkDescription, TensorRole};
use tch::Tensor;

use super::optimizer::Segment;
use crate::learner::TensorLocation;

/// Name of the region of all trained parameters.
pub(super) const WEIGHTS: &str = "weights";
/// Name of the region of BatchNorm's running statistics.
pub(super) const BN_RUNNING: &str = "bn_running";
/// Name of the region of frozen parameters and statistics.
pub(super) const FROZEN_REGION: &str = "frozen";

/// Alignment of tensors in values, 64 bytes: a cache line. With it, vectorised kernels take the same code path for a
/// tensor at any offset, and so compute the same bits.
pub(super) const TENSOR_ALIGNMENT: i64 = baton_checkpoint::ALIGNMENT as i64;

/// One tensor and its position in a buffer.
#[derive(Clone, Debug)]
pub(super) struct FlatTensor {
    /// Name in checkpoints and exports.
    pub(super) name: String,
    /// Its other names there.
    pub(super) aliases: Vec<String>,
    /// Dimensions; (out, in, height, width) for convolutions.
    pub(super) shape: Vec<i64>,
    /// Index of the first value in the buffer of trained or of frozen tensors.
    pub(super) offset: i64,
    /// Whether the values are stored in OHWI order.
    pub(super) channels_last: bool,
    /// Initial value.
    pub(super) init: Init,
    /// Whether training leaves the values unchanged.
    pub(super) frozen: bool,
    /// Whether it is part of the network, so that files of weights may lack it.
    pub(super) is_constant: bool,
    /// The type of a constant that is not f32 in PyTorch.
    integers: Option<Integers>,
    /// Whether weight decay applies even if the recipe excludes norms and biases; LARS and LAMB then use a separate
    /// learning rate for it.
    pub(super) decays: bool,
    /// Whether the network computes with a copy in the recipe's number format.
    pub(super) is_cast: bool,
    /// Whether it is the weight of a hidden layer.
    is_hidden: bool,
    /// Number of layers above its own.
    layers_above: u32,
    /// Index in the order of a state dict.
    position: usize,
}

impl FlatTensor {
    fn new(tensor: &baton_model::Tensor, channels_last: bool) -> Self {
        Self {
            name: tensor.name.clone(),
            aliases: tensor.aliases.clone(),
            shape: tensor.shape.iter().map(|&dim| dim as i64).collect(),
            offset: 0,
            channels_last: channels_last && tensor.shape.len() == 4,
            init: tensor.init,
            frozen: tensor.is_frozen(),
            is_constant: matches!(tensor.role, TensorRole::Constant(_)),
            integers: match tensor.role {
                TensorRole::Constant(integers) => integers,
                _ => None,
            },
            decays: tensor.decays,
            is_cast: tensor.is_cast,
            is_hidden: tensor.is_hidden,
            layers_above: 0,
            position: tensor.position,
        }
    }

    /// Whether it is the weight of a hidden layer, and none of its names is `excluded`.
    pub(super) fn is_hidden(&self, excluded: impl Fn(&str) -> bool) -> bool {
        let mut names = std::iter::once(&self.name).chain(&self.aliases);
        self.is_hidden && !names.any(|name| excluded(name))
    }

    /// Number of values.
    pub(super) fn len(&self) -> i64 {
        self.shape.iter().product()
    }

    fn end(&self) -> i64 {
        self.offset + self.len()
    }

    /// A view of this tensor in `buffer`, which may itself be a view.
    pub(super) fn view(&self, buffer: &Tensor) -> tch::Result<Tensor> {
        buffer.f_narrow(0, self.offset, self.len())?.f_as_strided(
            &self.shape,
            self.strides(),
            None::<i64>,
        )
    }

    /// The values of `tensor`, which must have the shape of `self`, as one dimension in stored order. No copy is made
    /// if it also has the strides of `self`.
    pub(super) fn flatten(&self, tensor: &Tensor) -> tch::Result<Tensor> {
        if self.channels_last {
            tensor.f_permute([0, 2, 3, 1])?.f_reshape([-1])
        } else {
            tensor.f_reshape([-1])
        }
    }

    fn strides(&self) -> Vec<i64> {
        match *self.shape {
            [_, i, h, w] if self.channels_last => vec![h * w * i, 1, w * i, i],
            ref shape => (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect(),
        }
    }

    /// Where it is, under each of its names.
    fn locations(&self, region: &'static str) -> impl Iterator<Item = TensorLocation> {
        let names = std::iter::once(&self.name).chain(&self.aliases);
        names.map(move |name| TensorLocation {
            name: name.clone(),
            shape: self.shape.iter().map(|&dim| to_usize(dim)).collect(),
            region,
            offset: to_usize(self.offset),
            channels_last: self.channels_last,
            integers: self.integers,
        })
    }
}

/// All tensors of a network, in the order of its description.
#[derive(Debug)]
pub(super) struct FlatLayout {
    /// Weights, scales, shifts and biases.
    pub(super) parameters: Vec<FlatTensor>,
    /// Mean, variance, mean, variance, …
    pub(super) statistics: Vec<FlatTensor>,
    /// Number of values at the start of the trained parameters that have a working copy.
    pub(super) cast_len: i64,
    /// Number of values at the start of the frozen tensors that have a working copy.
    pub(super) frozen_cast_len: i64,
    /// Offset and length of the gaps that frozen parameters would fill between the trained ones.
    pub(super) gaps: Vec<(i64, i64)>,
}

impl FlatLayout {
    /// Gives every tensor of `network` its offset.
    pub(super) fn new(network: &NetworkDescription, channels_last: bool) -> Self {
        let entries = |tensors: &[baton_model::Tensor]| -> Vec<FlatTensor> {
            tensors.iter().map(|tensor| FlatTensor::new(tensor, channels_last)).collect()
        };
        let (mut parameters, mut statistics) =
            (entries(&network.parameters), entries(&network.statistics));
        let names: Vec<&str> =
            network.parameters.iter().map(|tensor| tensor.name.as_str()).collect();
        for (entry, above) in parameters.iter_mut().zip(baton_model::layers_above(&names)) {
            entry.layers_above = above;
        }
        let gaps = gaps(&mut parameters);
        let cast_len = assign_offsets(parameters.iter_mut().filter(|entry| !entry.frozen));
        assign_offsets(statistics.iter_mut().filter(|entry| !entry.frozen));
        let all = parameters.iter_mut().chain(&mut statistics);
        let frozen_cast_len = assign_offsets(all.filter(|entry| entry.frozen));
        Self { parameters, statistics, cast_len, frozen_cast_len, gaps }
    }

    /// Ranges that an optimizer updates, in order, as few as possible; one of its own for each tensor that `is_alone`. The
    /// learning rate falls by `layer_decay` from each layer to the one below it.
    pub(super) fn segments(
        &self,
        layer_decay: f64,
        is_alone: impl Fn(&FlatTensor) -> bool,
    ) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        for entry in in_order(self.parameters.iter().filter(|entry| !entry.frozen)) {
            let rows = entry.shape.first().copied().filter(|_| is_alone(entry));
            let next = Segment {
                start: entry.offset,
                len: entry.len(),
                decays: entry.decays,
                rate: libm::pow(layer_decay, entry.layers_above.into()),
                rows,
            };
            match segments.last_mut() {
                Some(last)
                    if (last.rows, next.rows) == (None, None)
                        && (last.decays, last.rate) == (next.decays, next.rate)
                        && aligned(last.start + last.len) == next.start =>
                {
                    last.len = next.start + next.len - last.start;
                }
                _ => segments.push(next),
            }
        }
        segments
    }

    /// Length of the buffer of trained parameters, with padding.
    pub(super) fn parameters_len(&self) -> i64 {
        end_of(self.parameters.iter().filter(|entry| !entry.frozen))
    }

    /// Length of the buffer of running statistics, with padding.
    pub(super) fn statistics_len(&self) -> i64 {
        end_of(self.statistics.iter().filter(|entry| !entry.frozen))
    }

    /// Ranges of the trained statistics, start and length, with what `of` says for all statistics of a range.
    pub(super) fn trained_statistics(&self, of: impl Fn(usize) -> f64) -> Vec<(i64, i64, f64)> {
        let mut ranges: Vec<(i64, i64, f64)> = Vec::new();
        let trained = self.statistics.iter().enumerate().filter(|(_, entry)| !entry.frozen);
        for (index, entry) in trained {
            let value = of(index);
            match ranges.last_mut() {
                Some((start, len, last)) if *last == value => *len = entry.end() - *start,
                _ => ranges.push((entry.offset, entry.len(), value)),
            }
        }
        ranges
    }

    /// Length of the buffer of frozen tensors, with padding.
    pub(super) fn frozen_len(&self) -> i64 {
        end_of(self.parameters.iter().chain(&self.statistics).filter(|entry| entry.frozen))
    }

    /// Offset of the gradient in a leaf.
    pub(super) fn gradient_start(&self) -> i64 {
        aligned(self.statistics_len())
    }

    /// The longest contiguous range of a leaf that holds gradients of these parameters only.
    pub(super) fn span_of(&self, parameters: &[usize]) -> Range<usize> {
        let entries = parameters.iter().filter_map(|index| self.parameters.get(*index));
        let (mut longest, mut current) = (0..0, 0..0);
        for entry in in_order(entries.filter(|entry| !entry.frozen)) {
            if aligned(current.end) != entry.offset {
                current.start = entry.offset;
            }
            current.end = entry.end();
            if current.end - current.start > longest.end - longest.start {
                longest = current.clone();
            }
        }
        let end = aligned(longest.end).min(self.parameters_len());
        let start = self.gradient_start();
        to_usize(start + longest.start)..to_usize(start + end)
    }

    /// Every tensor with its region, in the order of a state dict.
    pub(super) fn state_dict(&self) -> Vec<(&FlatTensor, &'static str)> {
        let region =
            |entry: &FlatTensor, trained| if entry.frozen { FROZEN_REGION } else { trained };
        let parameters = self.parameters.iter().map(|entry| (entry, region(entry, WEIGHTS)));
        let statistics = self.statistics.iter().map(|entry| (entry, region(entry, BN_RUNNING)));
        let mut entries: Vec<_> = parameters.chain(statistics).collect();
        entries.sort_by_key(|(entry, _)| entry.position);
        entries
    }

    /// [`Self::state_dict`] as locations, for readers without libtorch.
    pub(super) fn tensor_locations(&self) -> Vec<TensorLocation> {
        self.state_dict().into_iter().flat_map(|(entry, region)| entry.locations(region)).collect()
    }
}

/// Assigns consecutive offsets to `entries`, first to those with a working copy; returns the end of these.
fn assign_offsets<'a>(entries: impl Iterator<Item = &'a mut FlatTensor>) -> i64 {
    let mut entries: Vec<_> = entries.collect();
    // A stable sort keeps the order otherwise.
    entries.sort_by_key(|entry| (!entry.is_cast, !entry.decays));
    entries.iter_mut().fold(0, |end, entry| {
        entry.offset = aligned(end);
        entry.end()
    });
    end_of(entries.iter().map(|entry| &**entry).filter(|entry| entry.is_cast))
}

/// Gaps that frozen parameters would fill among the others. The norm of a gradient is summed in blocks, and the block
/// boundaries depend on these gaps.
fn gaps(entries: &mut [FlatTensor]) -> Vec<(i64, i64)> {
    assign_offsets(entries.iter_mut());
    let (mut gaps, mut trained): (Vec<(i64, i64)>, i64) = (Vec::new(), 0);
    for entry in in_order(entries.iter()) {
        match gaps.last_mut() {
            _ if !entry.frozen => trained = aligned(trained) + entry.len(),
            Some((at, len)) if *at == aligned(trained) => *len = aligned(*len) + entry.len(),
            _ => gaps.push((aligned(trained), entry.len())),
        }
    }
    gaps.iter_mut().for_each(|(_, len)| *len = aligned(*len));
    gaps
}

/// Those with values, by offset. One without has the offset of its neighbour.
fn in_order<'a>(entries: impl Iterator<Item = &'a FlatTensor>) -> Vec<&'a FlatTensor> {
    let mut entries: Vec<_> = entries.filter(|entry| entry.len() > 0).collect();
    entries.sort_by_key(|entry| entry.offset);
    entries
}

fn end_of<'a>(entries: impl Iterator<Item = &'a FlatTensor>) -> i64 {
    entries.map(FlatTensor::end).max().unwrap_or_default()
}

/// The first aligned offset that is not before `end`.
fn aligned(end: i64) -> i64 {
    (end + TENSOR_ALIGNMENT - 1) / TENSOR_ALIGNMENT * TENSOR_ALIGNMENT
}

/// Converts a dimension or an offset: a sum or product of small positive constants.
fn to_usize(value: i64) -> usize {
    usize::try_from(value).unwrap_or_default()
}

/// Views of `entries` in the buffers of trained and of frozen tensors.
///
/// Each view is detached: a separate tensor for autograd.
pub(super) fn views(
    entries: &[FlatTensor],
    trained: &Tensor,
    frozen: &Tensor,
) -> tch::Result<Vec<Tensor>> {
    let buffer = |entry: &FlatTensor| if entry.frozen { frozen } else { trained };
    entries.iter().map(|entry| entry.view(buffer(entry))?.f_detach()).collect()
}
