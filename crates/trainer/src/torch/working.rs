//! Weights in the form that the network reads: views of a flat f32 buffer (the master weights) and, with bf16 or fp16,
//! of a working copy. One cast of the buffer's first part makes the copy.
//!
//! Parameters such as those of BatchNorm, and biases, are always f32.

use baton_recipe::spec::Compute;
use tch::{Device, Kind, Tensor};

use super::flat::{FlatLayout, views};

/// The number format of a recipe.
pub(super) fn kind(compute: Compute) -> Kind {
    match compute {
        Compute::Fp32 => Kind::Float,
        Compute::Bf16 => Kind::BFloat16,
        Compute::Fp16 => Kind::Half,
    }
}

/// A copy of the first values of a buffer in the recipe's number format, if that is not f32.
#[derive(Debug)]
pub(super) struct CastCopy {
    copy: Option<Tensor>,
    stale: bool,
}

/// The weights that the network reads.
#[derive(Debug)]
pub(super) struct WorkingWeights {
    /// In the order of [`FlatLayout::parameters`].
    pub(super) parameters: Vec<Tensor>,
    /// Copy of the trained f32 weights.
    pub(super) cast: CastCopy,
}

/// Parameters and statistics that training does not change.
#[derive(Debug)]
pub(super) struct FrozenTensors {
    /// The f32 values.
    pub(super) masters: Tensor,
    pub(super) cast: CastCopy,
}

impl CastCopy {
    fn new(len: i64, kind: Kind, device: Device) -> tch::Result<Self> {
        let copy = (kind != Kind::Float).then(|| Tensor::f_zeros([len], (kind, device)));
        Ok(Self { copy: copy.transpose()?, stale: true })
    }

    /// The copy, if there is one. Code that changes the masters may change the copy too, instead of
    /// [invalidating](Self::invalidate) it.
    pub(super) fn copy(&self) -> Option<&Tensor> {
        self.copy.as_ref()
    }

    /// Marks the copy as stale after a change of the masters.
    pub(super) fn invalidate(&mut self) {
        self.stale = true;
    }

    /// Casts `masters` again if the copy is stale.
    pub(super) fn refresh(&mut self, masters: &Tensor) -> tch::Result<()> {
        if let (true, Some(copy)) = (self.stale, &mut self.copy) {
            let first = masters.f_narrow(0, 0, copy.size1()?)?;
            copy.f_copy_(&first)?;
        }
        self.stale = false;
        Ok(())
    }
}

impl FrozenTensors {
    /// Zeros, with a copy in `kind`.
    pub(super) fn new(layout: &FlatLayout, kind: Kind, device: Device) -> tch::Result<Self> {
        let masters = Tensor::f_zeros([layout.frozen_len()], (Kind::Float, device))?;
        Ok(Self { masters, cast: CastCopy::new(layout.frozen_cast_len, kind, device)? })
    }

    /// Casts the masters again if the copy is stale.
    pub(super) fn refresh(&mut self) -> tch::Result<()> {
        self.cast.refresh(&self.masters)
    }
}

impl WorkingWeights {
    /// Views of `masters` and `frozen`, or of their copies in `kind`.
    pub(super) fn new(
        layout: &FlatLayout,
        masters: &Tensor,
        frozen: &FrozenTensors,
        kind: Kind,
    ) -> tch::Result<Self> {
        let mut parameters = views(&layout.parameters, masters, &frozen.masters)?;
        let cast = CastCopy::new(layout.cast_len, kind, masters.device())?;
        for (parameter, entry) in parameters.iter_mut().zip(&layout.parameters) {
            let copy = if entry.frozen { frozen.cast.copy() } else { cast.copy() };
            if let (true, Some(copy)) = (entry.is_cast, copy) {
                *parameter = entry.view(copy)?.f_detach()?;
            }
        }
        Ok(Self { parameters, cast })
    }

    /// Makes autograd compute the gradients of all trained parameters.
    pub(super) fn require_gradients(&self, layout: &FlatLayout) -> tch::Result<()> {
        for (parameter, entry) in self.parameters.iter().zip(&layout.parameters) {
            if !entry.frozen {
                let _ = parameter.f_set_requires_grad(true)?;
            }
        }
        Ok(())
    }
}
