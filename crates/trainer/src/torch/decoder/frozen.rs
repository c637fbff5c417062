//! The frozen weights of a model on a device.

use baton_language::nf4::{BLOCK, CODES, Nf4, SCALE_BLOCK, scale_codes};
use tch::{Device, Kind, Tensor};

/// A weight that training does not change.
#[derive(Debug)]
pub(super) enum FrozenWeight {
    Dense(Tensor),
    Nf4(Nf4Weight),
}

impl FrozenWeight {
    /// The same on the device of the tables, without a copy if it is there.
    pub(super) fn moved_to(self, tables: &Nf4Tables) -> tch::Result<Self> {
        let device = tables.device;
        Ok(match self {
            Self::Dense(weight) => Self::Dense(weight.f_to_device(device)?),
            Self::Nf4(weight) => Self::Nf4(Nf4Weight {
                packed: weight.packed.f_to_device(device)?,
                scales: weight.scales.f_to_device(device)?,
                outer_scales: weight.outer_scales.f_to_device(device)?,
                pairs: tables.pairs.shallow_clone(),
                scale_codes: tables.scales.shallow_clone(),
                ..weight
            }),
        })
    }

    /// The weight in its own number format; f32 if it is NF4.
    pub(super) fn dense(&self) -> tch::Result<Tensor> {
        match self {
            Self::Dense(weight) => Ok(weight.shallow_clone()),
            Self::Nf4(weight) => weight.dense(),
        }
    }
}

/// What all NF4 weights of a device share.
#[derive(Debug)]
pub(super) struct Nf4Tables {
    /// (256, 2) f32: the values of the two codes in a byte.
    pairs: Tensor,
    /// (256) f32: the values of the scales' codes.
    scales: Tensor,
    device: Device,
}

impl Nf4Tables {
    pub(super) fn new(device: Device) -> tch::Result<Self> {
        let values = |code: u8| CODES[usize::from(code)];
        let pairs: Vec<f32> =
            (0..=u8::MAX).flat_map(|byte| [values(byte >> 4), values(byte & 15)]).collect();
        let pairs = Tensor::f_from_slice(&pairs)?.f_view([-1, 2])?.f_to_device(device)?;
        let scales = Tensor::f_from_slice(&scale_codes())?.f_to_device(device)?;
        Ok(Self { pairs, scales, device })
    }

    /// Copies a weight of this shape to the device. Its last blocks are filled up.
    pub(super) fn weight(&self, mut nf4: Nf4, shape: &[i64]) -> tch::Result<Nf4Weight> {
        let count = shape.iter().product::<i64>();
        let blocks = nf4.scales.len();
        nf4.packed.resize(blocks * BLOCK / 2, 0);
        nf4.scales.resize(nf4.outer_scales.len() * SCALE_BLOCK, 0);
        let to_device = |tensor: Tensor| tensor.f_to_device(self.device);
        Ok(Nf4Weight {
            packed: to_device(Tensor::f_from_slice(&nf4.packed)?)?,
            scales: to_device(Tensor::f_from_slice(&nf4.scales)?)?,
            outer_scales: to_device(Tensor::f_from_slice(&nf4.outer_scales)?.f_view([-1, 1])?)?,
            offset: f64::from(nf4.offset),
            blocks: blocks as i64,
            count,
            shape: shape.to_vec(),
            pairs: self.pairs.shallow_clone(),
            scale_codes: self.scales.shallow_clone(),
        })
    }
}

/// A weight of 4.127 bits per value.
#[derive(Debug)]
pub(super) struct Nf4Weight {
    packed: Tensor,
    scales: Tensor,
    /// (S, 1)
    outer_scales: Tensor,
    offset: f64,
    blocks: i64,
    count: i64,
    shape: Vec<i64>,
    pairs: Tensor,
    scale_codes: Tensor,
}

impl Nf4Weight {
    /// All values, f32, as [`Nf4::values`] computes them.
    fn dense(&self) -> tch::Result<Tensor> {
        // Each operation rounds once: a product and a sum are not fused.
        let scales = self.scale_codes.f_index_select(0, &self.scales.f_to_kind(Kind::Int)?)?;
        let scales = scales.f_view([-1, SCALE_BLOCK as i64])?.f_mul(&self.outer_scales)?;
        let scales = scales.f_add_scalar(self.offset)?.f_view([-1])?;
        let scales = scales.f_narrow(0, 0, self.blocks)?.f_view([-1, 1])?;
        let values = self.pairs.f_index_select(0, &self.packed.f_to_kind(Kind::Int)?)?;
        let mut values = values.f_view([-1, BLOCK as i64])?;
        values.f_mul_(&scales)?.f_view([-1])?.f_narrow(0, 0, self.count)?.f_view(&*self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_has_the_values_of_its_bytes_exactly() {
        for shape in [[3, 5], [64, 64], [40, 24], [130, 256]] {
            let count = (shape[0] * shape[1]) as usize;
            let values: Vec<f32> =
                (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 900.0).collect();
            let nf4 = Nf4::quantize(&values);
            let expected = nf4.values(count);
            let tables = Nf4Tables::new(Device::Cpu).unwrap();
            let weight = FrozenWeight::Nf4(tables.weight(nf4, &shape).unwrap()).dense().unwrap();
            assert_eq!(weight.size(), shape);
            assert!(Vec::<f32>::try_from(weight.view(-1)).unwrap() == expected, "{shape:?}");
        }
    }
}
