//! The frozen weights of a model on a device.

use baton_language::nf4::{BLOCK, BLOCKS_AT_ONCE, CODES, Nf4, SCALE_BLOCK, scale_codes};
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

    /// The weight in its own number format; of this `kind` if it is NF4.
    pub(super) fn dense(&self, kind: Kind) -> tch::Result<Tensor> {
        match self {
            Self::Dense(weight) => Ok(weight.shallow_clone()),
            Self::Nf4(weight) => weight.dense(kind, BLOCKS_AT_ONCE),
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
    fn dense(&self, kind: Kind, blocks_at_once: usize) -> tch::Result<Tensor> {
        debug_assert!(blocks_at_once.is_multiple_of(SCALE_BLOCK));
        let at_once = blocks_at_once as i64;
        let dense = if self.blocks <= at_once {
            self.values(0, self.blocks)?.f_to_kind(kind)?
        } else {
            let device = self.outer_scales.device();
            let dense = Tensor::f_empty([self.blocks, BLOCK as i64], (kind, device))?;
            for first in (0..self.blocks).step_by(blocks_at_once) {
                let count = at_once.min(self.blocks - first);
                dense.f_narrow(0, first, count)?.f_copy_(&self.values(first, count)?)?;
            }
            dense
        };
        dense.f_view([-1])?.f_narrow(0, 0, self.count)?.f_view(&*self.shape)
    }

    /// The values of `count` blocks, f32, as [`Nf4::values`] computes them; `first` is a multiple of [`SCALE_BLOCK`].
    fn values(&self, first: i64, count: i64) -> tch::Result<Tensor> {
        let (group, block) = (SCALE_BLOCK as i64, BLOCK as i64);
        let groups = count / group + i64::from(count % group > 0);
        // Each operation rounds once: a product and a sum are not fused.
        let codes = self.scales.f_narrow(0, first, groups * group)?.f_to_kind(Kind::Int)?;
        let scales = self.scale_codes.f_index_select(0, &codes)?.f_view([-1, group])?;
        let scales = scales.f_mul(&self.outer_scales.f_narrow(0, first / group, groups)?)?;
        let scales = scales.f_add_scalar(self.offset)?.f_view([-1])?;
        let scales = scales.f_narrow(0, 0, count)?.f_view([-1, 1])?;
        let packed = self.packed.f_narrow(0, first * block / 2, count * block / 2)?;
        let values = self.pairs.f_index_select(0, &packed.f_to_kind(Kind::Int)?)?;
        values.f_view([-1, block])?.f_mul_(&scales)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_has_the_values_of_its_bytes_exactly() {
        for shape in [[3, 5], [64, 64], [40, 24], [130, 256], [70, 513]] {
            let count = (shape[0] * shape[1]) as usize;
            let values: Vec<f32> =
                (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 900.0).collect();
            let nf4 = Nf4::quantize(&values);
            let expected = nf4.values(count);
            let tables = Nf4Tables::new(Device::Cpu).unwrap();
            let weight = tables.weight(nf4, &shape).unwrap();
            for blocks_at_once in [SCALE_BLOCK, BLOCKS_AT_ONCE] {
                let dense = |kind| weight.dense(kind, blocks_at_once).unwrap();
                assert_eq!(dense(Kind::Float).size(), shape);
                let values = Vec::<f32>::try_from(dense(Kind::Float).view(-1)).unwrap();
                assert!(values == expected, "{shape:?}");
                let rounded = Tensor::from_slice(&expected).to_kind(Kind::BFloat16);
                assert_eq!(dense(Kind::BFloat16).view(-1), rounded, "{shape:?}");
            }
        }
    }
}
