//! Copies batches from the loader to the device and normalises them.

use baton_data::{Batch, Inputs, NO_LABEL};
use baton_gpu::{Ticket, Uploads};
use baton_recipe::spec::Data;
use bytemuck::cast_slice;
use tch::{Device, Kind, Tensor};

use super::{failure::During, network::NetworkInputs};
use crate::learner::Error;

/// Images become `(pixel - mean) / std` per channel, with pixels from 0 to 255; signals are not changed.
#[derive(Debug)]
pub(super) struct DeviceInput {
    mean: Tensor,
    std: Tensor,
    device: Device,
    channels_last: bool,
    kind: Kind,
    /// Uploads to a GPU; `None` on a CPU.
    uploader: Option<BatchUploader>,
}

/// Uploads batches to a GPU.
#[derive(Debug)]
struct BatchUploader {
    uploads: Uploads,
    /// The batch that `prefetch` has sent and that is not used yet.
    ahead: Option<(BatchIdentity, Ticket)>,
}

/// Two batches of equal identity contain the same bytes: these fields determine the samples and their augmentation.
#[derive(Debug, PartialEq, Eq)]
struct BatchIdentity {
    epoch: u32,
    samples: Vec<u64>,
    /// Length of all inputs, which depends on the resolution.
    bytes: usize,
}

impl DeviceInput {
    /// Copies the constants to `device`; inputs will be of type `kind`.
    pub(super) fn new(
        data: &Data,
        device: Device,
        channels_last: bool,
        kind: Kind,
    ) -> Result<Self, Error> {
        let constant = |values: &[f32]| Tensor::f_from_slice(values)?.f_to_device(device);
        let mean = constant(&data.mean).during("copy constants")?;
        let std = constant(&data.std).during("copy constants")?;
        let uploader = match device {
            Device::Cuda(ordinal) => {
                let device = baton_gpu::Device::open(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
                Some(BatchUploader { uploads: Uploads::new(device)?, ahead: None })
            }
            _ => None,
        };
        Ok(Self { mean, std, device, channels_last, kind, uploader })
    }

    /// Starts copying `batch` to a GPU while the GPU computes.
    pub(super) fn prefetch(&mut self, batch: &Batch) -> Result<(), Error> {
        if let Inputs::Tokens { .. } = batch.inputs {
            return Ok(());
        }
        if let Some(uploader) = &mut self.uploader {
            uploader.discard_ahead()?;
            let ticket = uploader.uploads.send(&parts(batch))?;
            uploader.ahead = Some((BatchIdentity::of(batch), ticket));
        }
        Ok(())
    }

    /// The batch on the device, normalised.
    pub(super) fn load(&mut self, batch: &Batch) -> Result<NetworkInputs, Error> {
        if let Inputs::Tokens { tokens, lengths } = &batch.inputs {
            return self.load_texts(tokens, lengths, &batch.labels).during("copy inputs");
        }
        let Some(uploader) = &mut self.uploader else {
            let inputs = flat_inputs(batch).and_then(|flat| self.normalise(batch, &flat));
            let extras = batch.extras.iter().map(|values| extra(batch, values));
            return Ok(NetworkInputs {
                main: inputs.during("copy inputs")?,
                extras: extras.collect::<tch::Result<_>>().during("copy inputs")?,
                targets: targets(batch).during("copy targets")?,
                lengths: Vec::new(),
            });
        };
        let ticket = match uploader.ahead.take() {
            Some((identity, ticket)) if identity == BatchIdentity::of(batch) => ticket,
            other => {
                uploader.ahead = other;
                uploader.discard_ahead()?;
                uploader.uploads.send(&parts(batch))?
            }
        };
        let address = uploader.uploads.receive(&ticket)?;
        let addresses: Vec<u64> =
            (0..parts(batch).len()).map(|part| address + ticket.offset(part)).collect();
        // SAFETY: `Uploads` keeps the memory valid for work that is queued on libtorch's stream before `release`.
        #[allow(unsafe_code)]
        let loaded = unsafe { self.copy_from_device(batch, &addresses) }.during("copy inputs");
        if let Some(uploader) = &mut self.uploader {
            uploader.uploads.release(ticket)?;
        }
        loaded
    }

    /// Texts on the device. They are small, and copied when they are needed.
    fn load_texts(
        &self,
        tokens: &[i64],
        lengths: &[i64],
        labels: &[i64],
    ) -> tch::Result<NetworkInputs> {
        let (mut positions, mut targets) = (Vec::new(), Vec::new());
        let mut start = 0;
        for length in lengths {
            // The first token of a text is predicted by no other.
            for position in start + 1..start + length {
                match labels.get(position as usize) {
                    Some(label) if *label != i64::from(NO_LABEL) => {
                        positions.push(position - 1);
                        targets.push(*label);
                    }
                    _ => {}
                }
            }
            start += length;
        }
        let on_device = |values: &[i64]| Tensor::f_from_slice(values)?.f_to_device(self.device);
        Ok(NetworkInputs {
            main: on_device(tokens)?,
            extras: vec![on_device(&positions)?],
            targets: on_device(&targets)?,
            lengths: lengths.to_vec(),
        })
    }

    /// Queues copies of the [`parts`] at these device addresses; the result contains no pointer to them.
    ///
    /// # Safety
    /// The addresses are of this device, and as many bytes as each part has are valid there until the copies are made.
    #[allow(unsafe_code)]
    unsafe fn copy_from_device(
        &self,
        batch: &Batch,
        addresses: &[u64],
    ) -> tch::Result<NetworkInputs> {
        let view = |address: u64, shape: &[i64], kind: Kind| {
            let strides: Vec<i64> =
                (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect();
            // SAFETY: guaranteed by the caller; the tensor does not outlive this function.
            unsafe { Tensor::f_from_blob(address as *const u8, shape, &strides, kind, self.device) }
        };
        let (shape, kind) = match &batch.inputs {
            Inputs::Images { pixels, .. } => (pixels.len(), Kind::Uint8),
            Inputs::Arrays { values, .. } => (values.len(), Kind::Float),
            Inputs::Tokens { tokens, .. } => (tokens.len(), Kind::Int64),
        };
        let copy = |part: usize, shape: &[i64], kind: Kind| {
            let uploaded = view(addresses[part], shape, kind)?;
            let mut copy = uploaded.f_empty_like()?;
            copy.f_copy_(&uploaded).map(|()| copy)
        };
        let main = self.normalise(batch, &view(addresses[0], &[shape as i64], kind)?)?;
        let (shape, kind) = target_shape(batch);
        let targets = copy(1, &shape, kind)?;
        let extras = batch.extras.iter().zip(2..);
        let extras =
            extras.map(|(values, part)| copy(part, &extra_shape(batch, values), Kind::Float));
        let extras = extras.collect::<tch::Result<_>>()?;
        Ok(NetworkInputs { main, extras, targets, lengths: Vec::new() })
    }

    /// Inputs that are normalised already, as the network takes them; images (samples, channels, height, width).
    pub(super) fn placed(&self, inputs: &Tensor) -> tch::Result<Tensor> {
        let inputs = inputs.f_to_device(self.device)?.f_to_kind(self.kind)?;
        if !self.channels_last || inputs.dim() != 4 {
            return Ok(inputs);
        }
        inputs.f_permute([0, 2, 3, 1])?.f_contiguous()?.f_permute([0, 3, 1, 2])
    }

    /// The network's inputs, computed from the flat inputs of `batch`; always a copy.
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
                let sides = shape.iter().map(|side| *side as i64);
                let sizes: Vec<i64> = std::iter::once(samples).chain(sides).collect();
                let values = flat.f_view(sizes.as_slice())?;
                let mut copy = values.f_empty_like()?.f_to_kind(self.kind)?;
                copy.f_copy_(&values)?;
                Ok(copy)
            }
            Inputs::Tokens { .. } => flat.f_clone(flat),
        }
    }
}

impl BatchUploader {
    /// Releases a batch that was sent ahead but not used.
    fn discard_ahead(&mut self) -> Result<(), Error> {
        match self.ahead.take() {
            None => Ok(()),
            Some((_, ticket)) => {
                // Wait for the upload first; otherwise its memory could be reused while it is still written.
                self.uploads.receive(&ticket)?;
                Ok(self.uploads.release(ticket)?)
            }
        }
    }
}

impl BatchIdentity {
    fn of(batch: &Batch) -> Self {
        Self { epoch: batch.epoch, samples: batch.samples.clone(), bytes: bytes_of(batch).len() }
    }
}

/// What is uploaded: inputs, targets, extra inputs.
fn parts(batch: &Batch) -> Vec<&[u8]> {
    let extras = batch.extras.iter().map(|values| cast_slice(values));
    [bytes_of(batch), bytes_of_targets(batch)].into_iter().chain(extras).collect()
}

/// The inputs as bytes. Pixels are uploaded as bytes: a quarter of their size as f32.
fn bytes_of(batch: &Batch) -> &[u8] {
    match &batch.inputs {
        Inputs::Images { pixels, .. } => pixels,
        Inputs::Arrays { values, .. } => cast_slice(values),
        Inputs::Tokens { tokens, .. } => cast_slice(tokens),
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
        Inputs::Tokens { tokens, .. } => Tensor::f_from_slice(tokens),
    }
}

fn targets(batch: &Batch) -> tch::Result<Tensor> {
    let (shape, _) = target_shape(batch);
    match batch.labels.is_empty() {
        true => Tensor::f_from_slice(&batch.targets)?.f_view(&shape[..]),
        false => Tensor::f_from_slice(&batch.labels),
    }
}

/// An extra input, f32, shape (samples, values).
fn extra(batch: &Batch, values: &[f32]) -> tch::Result<Tensor> {
    Tensor::f_from_slice(values)?.f_view(extra_shape(batch, values))
}

fn extra_shape(batch: &Batch, values: &[f32]) -> [i64; 2] {
    let samples = batch.len();
    [samples as i64, (values.len() / samples.max(1)) as i64]
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
    let dim = |dim: u64| i64::try_from(dim).ok();
    match *shape {
        [length] => Some([1, dim(length)?]),
        [channels, length] => Some([dim(channels)?, dim(length)?]),
        _ => None,
    }
}
