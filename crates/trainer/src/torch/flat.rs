//! Where each tensor lies in its flat buffer.
//!
//! | buffer | values, f32 |
//! |---|---|
//! | weights, gradient, optimizer moments | all parameters: first those with a working copy in the recipe's number format, among them first those that decay |
//! | running statistics | mean and unbiased variance of every BatchNorm layer |
//! | leaf | batch statistics (as running statistics), gradient, tail |
//!
//! A convolution's weight (OIHW) is stored in OHWI order when the network computes in channels-last
//! format, so that no operation has to reorder it. Every tensor begins at a multiple of [`ALIGNMENT`];
//! what is between two of them is zero. The leaf begins with the statistics, which are short, so that
//! tensors begin there alike.

use baton_model::{Description, Init};
use tch::Tensor;

use super::optimizer::Segment;
use crate::learner::TensorPlace;

/// Name of the region of all parameters.
pub(super) const WEIGHTS: &str = "weights";
/// Name of the region of BatchNorm's running statistics.
pub(super) const BN_RUNNING: &str = "bn_running";

/// Values, of 64 bytes: a cache line, and what vectorised kernels need to take the same path for each
/// tensor wherever it lies, hence to find the same bits.
pub(super) const ALIGNMENT: i64 = baton_checkpoint::ALIGNMENT as i64;

/// One tensor and its place.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// Name in checkpoints and exports.
    pub(super) name: String,
    /// Sides; (out, in, height, width) for convolutions.
    pub(super) shape: Vec<i64>,
    /// First value in the buffer.
    pub(super) offset: i64,
    /// Stored in OHWI order.
    pub(super) channels_last: bool,
    /// Value before training.
    pub(super) init: Init,
    /// Keeps its value.
    pub(super) frozen: bool,
    /// Decays whatever the recipe says, and has a rate of its own with LARS.
    pub(super) decays: bool,
    /// Is computed with in the recipe's number format.
    pub(super) is_cast: bool,
    /// Place in the order of a state dict.
    position: usize,
}

impl Slot {
    fn new(tensor: &baton_model::Tensor, channels_last: bool) -> Self {
        Self {
            name: tensor.name.clone(),
            shape: tensor.shape.iter().map(|&side| side as i64).collect(),
            offset: 0,
            channels_last: channels_last && tensor.shape.len() == 4,
            init: tensor.init,
            frozen: tensor.is_frozen(),
            decays: tensor.decays,
            is_cast: tensor.is_cast,
            position: tensor.position,
        }
    }

    /// Number of values.
    pub(super) fn len(&self) -> i64 {
        self.shape.iter().product()
    }

    fn end(&self) -> i64 {
        self.offset + self.len()
    }

    /// This tensor in a buffer whose first tensor starts at the buffer's value `start`.
    pub(super) fn view(&self, buffer: &Tensor, start: i64) -> tch::Result<Tensor> {
        buffer.f_as_strided(&self.shape, self.strides(), start + self.offset)
    }

    /// The values of `tensor`, shaped as this slot, as one dimension in stored order. No copy is
    /// made if `tensor` has this slot's strides.
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

    fn place(&self, region: &'static str) -> TensorPlace {
        TensorPlace {
            name: self.name.clone(),
            shape: self.shape.iter().map(|&side| to_usize(side)).collect(),
            region,
            offset: to_usize(self.offset),
            channels_last: self.channels_last,
        }
    }
}

/// All tensors of a network, in the order of its description.
#[derive(Debug)]
pub(super) struct Layout {
    /// What the optimizer updates.
    pub(super) parameters: Vec<Slot>,
    /// Mean, variance, mean, variance, …
    pub(super) statistics: Vec<Slot>,
    /// So many values at the start of the parameters have a working copy.
    pub(super) cast_len: i64,
}

impl Layout {
    /// Gives every tensor of `network` its offset.
    pub(super) fn new(network: &Description, channels_last: bool) -> Self {
        let slots = |tensors: &[baton_model::Tensor]| -> Vec<Slot> {
            tensors.iter().map(|tensor| Slot::new(tensor, channels_last)).collect()
        };
        let (mut parameters, mut statistics) =
            (slots(&network.parameters), slots(&network.statistics));
        let mut in_turn: Vec<&mut Slot> = parameters.iter_mut().collect();
        // Stable, so that otherwise the order stays.
        in_turn.sort_by_key(|slot| (!slot.is_cast, !slot.decays));
        place_in_turn(in_turn);
        place_in_turn(statistics.iter_mut());
        let cast = parameters.iter().filter(|slot| slot.is_cast);
        let cast_len = cast.map(Slot::end).max().unwrap_or_default();
        Self { parameters, statistics, cast_len }
    }

    /// What an optimizer updates, in order; one segment per tensor, or as few as there can be.
    pub(super) fn segments(&self, per_tensor: bool) -> Vec<Segment> {
        let mut slots: Vec<&Slot> = self.parameters.iter().filter(|slot| !slot.frozen).collect();
        slots.sort_by_key(|slot| slot.offset);
        let mut segments: Vec<Segment> = Vec::new();
        for slot in slots {
            let (start, len, decays) = (slot.offset, slot.len(), slot.decays);
            match segments.last_mut() {
                Some(last)
                    if !per_tensor
                        && last.decays == decays
                        && aligned(last.start + last.len) == start =>
                {
                    last.len = start + len - last.start;
                }
                _ => segments.push(Segment { start, len, decays }),
            }
        }
        segments
    }

    /// Values of all parameters, with what is between them.
    pub(super) fn parameters_len(&self) -> i64 {
        self.parameters.iter().map(Slot::end).max().unwrap_or_default()
    }

    /// Values of all running statistics, with what is between them.
    pub(super) fn statistics_len(&self) -> i64 {
        self.statistics.iter().map(Slot::end).max().unwrap_or_default()
    }

    /// Where the gradient begins in a leaf.
    pub(super) fn gradient_start(&self) -> i64 {
        aligned(self.statistics_len())
    }

    /// Every tensor with its region, in the order of a state dict.
    pub(super) fn state_dict(&self) -> Vec<(&Slot, &'static str)> {
        let parameters = self.parameters.iter().map(|slot| (slot, WEIGHTS));
        let statistics = self.statistics.iter().map(|slot| (slot, BN_RUNNING));
        let mut slots: Vec<_> = parameters.chain(statistics).collect();
        slots.sort_by_key(|(slot, _)| slot.position);
        slots
    }

    /// [`Self::state_dict`] for readers without libtorch.
    pub(super) fn places(&self) -> Vec<TensorPlace> {
        self.state_dict().into_iter().map(|(slot, region)| slot.place(region)).collect()
    }
}

/// Lays `slots` one after the other.
fn place_in_turn<'a>(slots: impl IntoIterator<Item = &'a mut Slot>) {
    slots.into_iter().fold(0, |end, slot| {
        slot.offset = aligned(end);
        slot.end()
    });
}

/// The first offset from `end` on at which a tensor may begin.
fn aligned(end: i64) -> i64 {
    (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
}

/// Sides and offsets are sums and products of small positive constants.
fn to_usize(value: i64) -> usize {
    usize::try_from(value).unwrap_or_default()
}

/// `slots` as views of `buffer`, whose first tensor starts at `start`.
///
/// `detach` makes each a tensor of its own for autograd.
pub(super) fn views(slots: &[Slot], buffer: &Tensor, start: i64) -> tch::Result<Vec<Tensor>> {
    slots.iter().map(|slot| slot.view(buffer, start)?.f_detach()).collect()
}
