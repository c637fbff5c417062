//! From the loader's bytes to what the network sees, on the device.

use baton_data::{Batch, Inputs};
use baton_gpu::{Ticket, Uploads};
use baton_recipe::spec::Data;
use bytemuck::cast_slice;
use tch::{Device, Kind, Tensor};

use super::failure::During;
use crate::learner::Error;

/// Images become `(pixel - mean) / std` per channel, in 0..255 units; signals stay as they are.
#[derive(Debug)]
pub(super) struct Input {
    mean: Tensor,
    std: Tensor,
    device: Device,
    channels_last: bool,
    kind: Kind,
    /// On a GPU.
    crossing: Option<Crossing>,
}

/// A batch on the device.
pub(super) struct Loaded {
    /// Images, shape (samples, 3, resolution, resolution), in channels-last memory order if the network is;
    /// or signals, shape (samples, channels, length).
    pub(super) inputs: Tensor,
    /// Labels, i64, shape (samples); or values, f32, shape (samples, outputs).
    pub(super) targets: Tensor,
}

/// Batches on their way to a GPU.
#[derive(Debug)]
struct Crossing {
    uploads: Uploads,
    /// The one that was sent before its turn.
    ahead: Option<(Identity, Ticket)>,
}

/// Two batches with the same one hold the same bytes: what a sample looks like follows from these.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    epoch: u32,
    samples: Vec<u64>,
    /// Length of all inputs, which tells the resolution.
    bytes: usize,
}

impl Input {
    /// Puts the constants on `device`; inputs will have `kind`.
    pub(super) fn new(
        data: &Data,
        device: Device,
        channels_last: bool,
        kind: Kind,
    ) -> Result<Self, Error> {
        let constant = |values: &[f32]| Tensor::f_from_slice(values)?.f_to_device(device);
        let mean = constant(&data.mean).during("copy constants")?;
        let std = constant(&data.std).during("copy constants")?;
        let crossing = match device {
            Device::Cuda(ordinal) => {
                let device = baton_gpu::Device::open(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
                Some(Crossing { uploads: Uploads::new(device)?, ahead: None })
            }
            _ => None,
        };
        Ok(Self { mean, std, device, channels_last, kind, crossing })
    }

    /// Begins to bring `batch` to a GPU, while that computes.
    pub(super) fn prefetch(&mut self, batch: &Batch) -> Result<(), Error> {
        if let Some(crossing) = &mut self.crossing {
            crossing.give_up()?;
            let ticket = crossing.uploads.send(&[bytes_of(batch), bytes_of_targets(batch)])?;
            crossing.ahead = Some((Identity::of(batch), ticket));
        }
        Ok(())
    }

    /// The batch as the network sees it.
    pub(super) fn load(&mut self, batch: &Batch) -> Result<Loaded, Error> {
        let Some(crossing) = &mut self.crossing else {
            let inputs = flat_inputs(batch).and_then(|flat| self.normalise(batch, &flat));
            return Ok(Loaded {
                inputs: inputs.during("copy inputs")?,
                targets: targets(batch).during("copy targets")?,
            });
        };
        let ticket = match crossing.ahead.take() {
            Some((identity, ticket)) if identity == Identity::of(batch) => ticket,
            other => {
                crossing.ahead = other;
                crossing.give_up()?;
                crossing.uploads.send(&[bytes_of(batch), bytes_of_targets(batch)])?
            }
        };
        let address = crossing.uploads.receive(&ticket)?;
        let (inputs, targets) = (address + ticket.offset(0), address + ticket.offset(1));
        // SAFETY: `Uploads` lends what was sent to work that is queued on libtorch's stream before `release`.
        #[allow(unsafe_code)]
        let loaded = unsafe { self.copied_from(batch, inputs, targets) }.during("copy inputs");
        if let Some(crossing) = &mut self.crossing {
            crossing.uploads.release(ticket)?;
        }
        loaded
    }

    /// Queues copies of what lies at these addresses, and keeps nothing that points there.
    ///
    /// # Safety
    /// They are of this device, and as many bytes as `batch` has lie there until the copies are made.
    #[allow(unsafe_code)]
    unsafe fn copied_from(&self, batch: &Batch, inputs: u64, targets: u64) -> tch::Result<Loaded> {
        let view = |address: u64, shape: &[i64], kind: Kind| {
            let strides: Vec<i64> =
                (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect();
            // SAFETY: the caller's promise; the tensor does not outlive this function.
            unsafe { Tensor::f_from_blob(address as *const u8, shape, &strides, kind, self.device) }
        };
        let (shape, kind) = match &batch.inputs {
            Inputs::Images { pixels, .. } => (pixels.len(), Kind::Uint8),
            Inputs::Arrays { values, .. } => (values.len(), Kind::Float),
        };
        let flat = view(inputs, &[shape as i64], kind)?;
        let inputs = self.normalise(batch, &flat)?;
        let (shape, kind) = target_shape(batch);
        let lent = view(targets, &shape, kind)?;
        let mut targets = lent.f_empty_like()?;
        targets.f_copy_(&lent)?;
        Ok(Loaded { inputs, targets })
    }

    /// What the network sees of inputs as they lie in `batch`; a copy.
    fn normalise(&self, batch: &Batch, flat: &Tensor) -> tch::Result<Tensor> {
        let samples = batch.len() as i64;
        match &batch.inputs {
            Inputs::Images { resolution, .. } => {
                let side = i64::from(*resolution);
                let mut nhwc = flat.f_view([samples, side, side, 3])?.f_to_kind(Kind::Float)?;
                let nhwc = nhwc.f_sub_(&self.mean)?.f_div_(&self.std)?.f_to_kind(self.kind)?;
                let nchw = nhwc.f_permute([0, 3, 1, 2])?;
                if self.channels_last { Ok(nchw) } else { nchw.f_contiguous() }
            }
            Inputs::Arrays { shape, .. } => {
                let [channels, length] = signal_shape(shape).unwrap_or_default();
                let values = flat.f_view([samples, channels, length])?;
                let mut copy = values.f_empty_like()?.f_to_kind(self.kind)?;
                copy.f_copy_(&values)?;
                Ok(copy)
            }
        }
    }
}

impl Crossing {
    /// Gives back what was sent ahead of a turn that never came.
    fn give_up(&mut self) -> Result<(), Error> {
        match self.ahead.take() {
            None => Ok(()),
            Some((_, ticket)) => {
                // Else its memory could be written to while it is still being filled.
                self.uploads.receive(&ticket)?;
                Ok(self.uploads.release(ticket)?)
            }
        }
    }
}

impl Identity {
    fn of(batch: &Batch) -> Self {
        Self { epoch: batch.epoch, samples: batch.samples.clone(), bytes: bytes_of(batch).len() }
    }
}

/// Pixels cross as bytes: a quarter of what floats would be.
fn bytes_of(batch: &Batch) -> &[u8] {
    match &batch.inputs {
        Inputs::Images { pixels, .. } => pixels,
        Inputs::Arrays { values, .. } => cast_slice(values),
    }
}

fn bytes_of_targets(batch: &Batch) -> &[u8] {
    match batch.labels.is_empty() {
        true => cast_slice(&batch.targets),
        false => cast_slice(&batch.labels),
    }
}

fn flat_inputs(batch: &Batch) -> tch::Result<Tensor> {
    match &batch.inputs {
        Inputs::Images { pixels, .. } => Tensor::f_from_slice(pixels),
        Inputs::Arrays { values, .. } => Tensor::f_from_slice(values),
    }
}

fn targets(batch: &Batch) -> tch::Result<Tensor> {
    let (shape, _) = target_shape(batch);
    match batch.labels.is_empty() {
        true => Tensor::f_from_slice(&batch.targets)?.f_view(&shape[..]),
        false => Tensor::f_from_slice(&batch.labels),
    }
}

fn target_shape(batch: &Batch) -> (Vec<i64>, Kind) {
    let samples = batch.len();
    match batch.labels.is_empty() {
        true => (vec![samples as i64, (batch.targets.len() / samples.max(1)) as i64], Kind::Float),
        false => (vec![batch.labels.len() as i64], Kind::Int64),
    }
}

/// Channels and length of an array that is a signal: (length) or (channels, length).
pub(super) fn signal_shape(shape: &[u64]) -> Option<[i64; 2]> {
    let side = |side: u64| i64::try_from(side).ok();
    match *shape {
        [length] => Some([1, side(length)?]),
        [channels, length] => Some([side(channels)?, side(length)?]),
        _ => None,
    }
}
