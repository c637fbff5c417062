//! Where each tensor lies in its flat buffer.
//!
//! | buffer | values, f32 |
//! |---|---|
//! | weights, gradient, optimizer moments | all parameters: first the weights of convolutions and of the linear layer, which decay; then BatchNorm parameters and biases, which by default do not |
//! | running statistics | mean and unbiased variance of every BatchNorm layer |
//! | leaf | batch statistics (as running statistics), gradient, tail |
//!
//! A convolution's weight (OIHW) is stored in OHWI order when the network computes in channels-last
//! format, so that no operation has to reorder it. A leaf begins with the statistics because their
//! length is a multiple of 64 values: every part but the tail then starts at a cache line, whatever
//! the number of classes.

use tch::Tensor;

use super::{init::Init, optimizer::Segment};
use crate::learner::TensorPlace;

/// Name of the region of all parameters.
pub(super) const WEIGHTS: &str = "weights";
/// Name of the region of BatchNorm's running statistics.
pub(super) const BN_RUNNING: &str = "bn_running";

/// One tensor and its place.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// torchvision's name.
    pub(super) name: String,
    /// torchvision's shape; (out, in, height, width) for convolutions.
    pub(super) shape: Vec<i64>,
    /// First value in the buffer.
    pub(super) offset: i64,
    /// Stored in OHWI order.
    pub(super) channels_last: bool,
    /// Value before training.
    pub(super) init: Init,
    /// Keeps its value.
    pub(super) frozen: bool,
    /// Place in the order of torchvision's `state_dict`.
    position: usize,
}

impl Slot {
    /// Number of values.
    pub(super) fn len(&self) -> i64 {
        self.shape.iter().product()
    }

    /// Whether it is the weight of a convolution or of a linear layer: only those have more than one
    /// dimension. They decay whatever the recipe says, and are computed with in its number format.
    pub(super) fn is_kernel(&self) -> bool {
        self.shape.len() > 1
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

/// All tensors of a network, in torchvision's order.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// What the optimizer updates.
    pub(super) parameters: Vec<Slot>,
    /// Mean, variance, mean, variance, …
    pub(super) statistics: Vec<Slot>,
    /// So many values at the start of the parameters are kernels'.
    pub(super) kernels_len: i64,
    /// Whether tensors added from now on keep their values.
    pub(super) freeze: bool,
}

impl Layout {
    /// Appends a parameter and returns its index in `parameters`.
    pub(super) fn parameter(
        &mut self,
        name: String,
        shape: Vec<i64>,
        channels_last: bool,
        init: Init,
    ) -> usize {
        let position = self.parameters.len() + self.statistics.len();
        let channels_last = channels_last && shape.len() == 4;
        let frozen = self.freeze;
        let slot = Slot { name, shape, offset: 0, channels_last, init, frozen, position };
        self.parameters.push(slot);
        self.parameters.len() - 1
    }

    /// Appends a running statistic of `channels` values and returns its index in `statistics`.
    pub(super) fn statistic(&mut self, name: String, channels: i64, init: Init) -> usize {
        let position = self.parameters.len() + self.statistics.len();
        let shape = vec![channels];
        let (channels_last, frozen) = (false, self.freeze);
        let slot = Slot { name, shape, offset: 0, channels_last, init, frozen, position };
        self.statistics.push(slot);
        self.statistics.len() - 1
    }

    /// Gives every tensor its offset.
    pub(super) fn finish(mut self) -> Self {
        self.kernels_len =
            place_in_turn(self.parameters.iter_mut().filter(|slot| slot.is_kernel()), 0);
        place_in_turn(
            self.parameters.iter_mut().filter(|slot| !slot.is_kernel()),
            self.kernels_len,
        );
        place_in_turn(self.statistics.iter_mut(), 0);
        self
    }

    /// What an optimizer updates, in order; one segment per tensor, or as few as there can be.
    pub(super) fn segments(&self, per_tensor: bool) -> Vec<Segment> {
        let mut slots: Vec<&Slot> = self.parameters.iter().filter(|slot| !slot.frozen).collect();
        slots.sort_by_key(|slot| slot.offset);
        let mut segments: Vec<Segment> = Vec::new();
        for slot in slots {
            let (start, len, is_kernel) = (slot.offset, slot.len(), slot.is_kernel());
            match segments.last_mut() {
                Some(last)
                    if !per_tensor
                        && last.is_kernel == is_kernel
                        && last.start + last.len == start =>
                {
                    last.len += len;
                }
                _ => segments.push(Segment { start, len, is_kernel }),
            }
        }
        segments
    }

    /// Values of all parameters.
    pub(super) fn parameters_len(&self) -> i64 {
        self.parameters.iter().map(Slot::len).sum()
    }

    /// Values of all running statistics.
    pub(super) fn statistics_len(&self) -> i64 {
        self.statistics.iter().map(Slot::len).sum()
    }

    /// Every tensor with its region, in the order of torchvision's `state_dict`.
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

/// Lays `slots` one after the other from `start`; returns the end.
fn place_in_turn<'a>(slots: impl Iterator<Item = &'a mut Slot>, start: i64) -> i64 {
    slots.fold(start, |end, slot| {
        slot.offset = end;
        end + slot.len()
    })
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
