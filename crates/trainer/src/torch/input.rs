//! From the loader's bytes to normalised pixels on the device.

use baton_data::Batch;
use tch::{Device, Kind, Tensor};

/// `(pixel - mean) / std` per channel, in 0..255 units.
#[derive(Debug)]
pub(super) struct Input {
    mean: Tensor,
    std: Tensor,
    device: Device,
    channels_last: bool,
}

impl Input {
    /// Puts the constants on `device`.
    pub(super) fn new(
        mean: [f32; 3],
        std: [f32; 3],
        device: Device,
        channels_last: bool,
    ) -> tch::Result<Self> {
        let mean = Tensor::f_from_slice(&mean)?.f_to_device(device)?;
        let std = Tensor::f_from_slice(&std)?.f_to_device(device)?;
        Ok(Self { mean, std, device, channels_last })
    }

    /// Images f32, shape (samples, 3, resolution, resolution), in channels-last memory order if the
    /// network is.
    pub(super) fn images(&self, batch: &Batch) -> tch::Result<Tensor> {
        // `Inputs::open` lets no arrays come here; they would fail in the view below.
        let (pixels, resolution) = batch.images().unwrap_or_default();
        let side = i64::from(resolution);
        // Bytes cross to the device: a quarter of what floats would be.
        let bytes = Tensor::f_from_slice(pixels)?.f_to_device(self.device)?;
        let nhwc = bytes.f_view([batch.len() as i64, side, side, 3])?;
        let nhwc = nhwc.f_to_kind(Kind::Float)?.f_sub_(&self.mean)?.f_div_(&self.std)?;
        let nchw = nhwc.f_permute([0, 3, 1, 2])?;
        if self.channels_last { Ok(nchw) } else { nchw.f_contiguous() }
    }
}
