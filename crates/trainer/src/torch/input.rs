//! From the loader's bytes to what the network sees, on the device.

use baton_data::{Batch, Inputs};
use baton_job::spec::Data;
use tch::{Device, Kind, Tensor};

/// Images become `(pixel - mean) / std` per channel, in 0..255 units; signals stay as they are.
#[derive(Debug)]
pub(super) struct Input {
    mean: Tensor,
    std: Tensor,
    device: Device,
    channels_last: bool,
    kind: Kind,
}

impl Input {
    /// Puts the constants on `device`; inputs will have `kind`.
    pub(super) fn new(
        data: &Data,
        device: Device,
        channels_last: bool,
        kind: Kind,
    ) -> tch::Result<Self> {
        let mean = Tensor::f_from_slice(&data.mean)?.f_to_device(device)?;
        let std = Tensor::f_from_slice(&data.std)?.f_to_device(device)?;
        Ok(Self { mean, std, device, channels_last, kind })
    }

    /// Images, shape (samples, 3, resolution, resolution), in channels-last memory order if the
    /// network is; or signals, shape (samples, channels, length).
    pub(super) fn load(&self, batch: &Batch) -> tch::Result<Tensor> {
        let samples = batch.len() as i64;
        match &batch.inputs {
            Inputs::Images { pixels, resolution } => {
                let side = i64::from(*resolution);
                // Bytes cross to the device: a quarter of what floats would be.
                let bytes = Tensor::f_from_slice(pixels)?.f_to_device(self.device)?;
                let mut nhwc = bytes.f_view([samples, side, side, 3])?.f_to_kind(Kind::Float)?;
                let nhwc = nhwc.f_sub_(&self.mean)?.f_div_(&self.std)?.f_to_kind(self.kind)?;
                let nchw = nhwc.f_permute([0, 3, 1, 2])?;
                if self.channels_last { Ok(nchw) } else { nchw.f_contiguous() }
            }
            Inputs::Arrays { values, shape } => {
                let [channels, length] = signal_shape(shape).unwrap_or_default();
                let values = Tensor::f_from_slice(values)?.f_to_device(self.device)?;
                values.f_view([samples, channels, length])?.f_to_kind(self.kind)
            }
        }
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
