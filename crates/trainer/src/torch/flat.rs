//! Where each tensor lies in its flat buffer.
//!
//! | buffer | values, f32 |
//! |---|---|
//! | weights, gradient, optimizer moments | trained parameters: first those with a working copy in the recipe's number format, among them first those that decay |
//! | running statistics | mean and unbiased variance of every BatchNorm layer that is trained |
//! | frozen | parameters and statistics that keep their values |
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

/// Name of the region of all trained parameters.
pub(super) const WEIGHTS: &str = "weights";
/// Name of the region of BatchNorm's running statistics.
pub(super) const BN_RUNNING: &str = "bn_running";
/// Name of the region of frozen parameters and statistics.
pub(super) const FROZEN: &str = "frozen";

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
    /// First value in its buffer: that of what is trained, or of what is frozen.
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

    /// This tensor in its buffer, which may be a view of another one.
    pub(super) fn view(&self, buffer: &Tensor) -> tch::Result<Tensor> {
        buffer.f_narrow(0, self.offset, self.len())?.f_as_strided(
            &self.shape,
            self.strides(),
            None::<i64>,
        )
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
    /// Weights, scales, shifts and biases.
    pub(super) parameters: Vec<Slot>,
    /// Mean, variance, mean, variance, …
    pub(super) statistics: Vec<Slot>,
    /// So many values at the start of the trained parameters have a working copy.
    pub(super) cast_len: i64,
    /// So many values at the start of what is frozen have one.
    pub(super) frozen_cast_len: i64,
    /// Where frozen parameters would lie among the trained ones, and how many values they have.
    pub(super) gaps: Vec<(i64, i64)>,
}

impl Layout {
    /// Gives every tensor of `network` its offset.
    pub(super) fn new(network: &Description, channels_last: bool) -> Self {
        let slots = |tensors: &[baton_model::Tensor]| -> Vec<Slot> {
            tensors.iter().map(|tensor| Slot::new(tensor, channels_last)).collect()
        };
        let (mut parameters, mut statistics) =
            (slots(&network.parameters), slots(&network.statistics));
        let gaps = gaps(&mut parameters);
        let cast_len = place_in_turn(parameters.iter_mut().filter(|slot| !slot.frozen));
        place_in_turn(statistics.iter_mut().filter(|slot| !slot.frozen));
        let all = parameters.iter_mut().chain(&mut statistics);
        let frozen_cast_len = place_in_turn(all.filter(|slot| slot.frozen));
        Self { parameters, statistics, cast_len, frozen_cast_len, gaps }
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

    /// Values of all trained parameters, with what is between them.
    pub(super) fn parameters_len(&self) -> i64 {
        end_of(self.parameters.iter().filter(|slot| !slot.frozen))
    }

    /// Values of all running statistics that are trained, with what is between them.
    pub(super) fn statistics_len(&self) -> i64 {
        end_of(self.statistics.iter().filter(|slot| !slot.frozen))
    }

    /// Values of all that is frozen, with what is between.
    pub(super) fn frozen_len(&self) -> i64 {
        end_of(self.parameters.iter().chain(&self.statistics).filter(|slot| slot.frozen))
    }

    /// Where the gradient begins in a leaf.
    pub(super) fn gradient_start(&self) -> i64 {
        aligned(self.statistics_len())
    }

    /// Every tensor with its region, in the order of a state dict.
    pub(super) fn state_dict(&self) -> Vec<(&Slot, &'static str)> {
        let region = |slot: &Slot, trained| if slot.frozen { FROZEN } else { trained };
        let parameters = self.parameters.iter().map(|slot| (slot, region(slot, WEIGHTS)));
        let statistics = self.statistics.iter().map(|slot| (slot, region(slot, BN_RUNNING)));
        let mut slots: Vec<_> = parameters.chain(statistics).collect();
        slots.sort_by_key(|(slot, _)| slot.position);
        slots
    }

    /// [`Self::state_dict`] for readers without libtorch.
    pub(super) fn places(&self) -> Vec<TensorPlace> {
        self.state_dict().into_iter().map(|(slot, region)| slot.place(region)).collect()
    }
}

/// Lays `slots` one after the other, those that are cast first; returns the end of those.
fn place_in_turn<'a>(slots: impl Iterator<Item = &'a mut Slot>) -> i64 {
    let mut slots: Vec<_> = slots.collect();
    // Stable, so that otherwise the order stays.
    slots.sort_by_key(|slot| (!slot.is_cast, !slot.decays));
    slots.iter_mut().fold(0, |end, slot| {
        slot.offset = aligned(end);
        slot.end()
    });
    end_of(slots.iter().map(|slot| &**slot).filter(|slot| slot.is_cast))
}

/// Where frozen ones would lie among the others: the norm of a gradient is summed up in blocks, whose
/// borders depend on it.
fn gaps(slots: &mut [Slot]) -> Vec<(i64, i64)> {
    place_in_turn(slots.iter_mut());
    let mut in_turn: Vec<&Slot> = slots.iter().collect();
    in_turn.sort_by_key(|slot| slot.offset);
    let (mut gaps, mut trained): (Vec<(i64, i64)>, i64) = (Vec::new(), 0);
    for slot in in_turn {
        match gaps.last_mut() {
            _ if !slot.frozen => trained = aligned(trained) + slot.len(),
            Some((at, len)) if *at == aligned(trained) => *len = aligned(*len) + slot.len(),
            _ => gaps.push((aligned(trained), slot.len())),
        }
    }
    gaps.iter_mut().for_each(|(_, len)| *len = aligned(*len));
    gaps
}

fn end_of<'a>(slots: impl Iterator<Item = &'a Slot>) -> i64 {
    slots.map(Slot::end).max().unwrap_or_default()
}

/// The first offset from `end` on at which a tensor may begin.
fn aligned(end: i64) -> i64 {
    (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
}

/// Sides and offsets are sums and products of small positive constants.
fn to_usize(value: i64) -> usize {
    usize::try_from(value).unwrap_or_default()
}

/// `slots` as views of the buffers of what is trained and of what is frozen.
///
/// `detach` makes each a tensor of its own for autograd.
pub(super) fn views(slots: &[Slot], trained: &Tensor, frozen: &Tensor) -> tch::Result<Vec<Tensor>> {
    let buffer = |slot: &Slot| if slot.frozen { frozen } else { trained };
    slots.iter().map(|slot| slot.view(buffer(slot))?.f_detach()).collect()
}
