//! Weights as the network reads them: views of a flat f32 buffer, and with bf16 or fp16 a working copy
//! of the parameters that say so, made by one cast of the buffer's first part.
//!
//! The others, such as BatchNorm's parameters and biases, stay f32.

use baton_recipe::spec::Compute;
use tch::{Device, Kind, Tensor};

use super::flat::{Layout, views};

/// The number format of a recipe.
pub(super) fn kind(compute: Compute) -> Kind {
    match compute {
        Compute::Fp32 => Kind::Float,
        Compute::Bf16 => Kind::BFloat16,
        Compute::Fp16 => Kind::Half,
    }
}

/// A copy of the first values of a buffer in the working format, if that is not f32.
#[derive(Debug)]
pub(super) struct Cast {
    copy: Option<Tensor>,
    stale: bool,
}

/// Readable weights.
#[derive(Debug)]
pub(super) struct Working {
    /// In the order of [`Layout::parameters`].
    pub(super) parameters: Vec<Tensor>,
    /// Of the masters of what is trained.
    pub(super) cast: Cast,
}

/// What training leaves as it is.
#[derive(Debug)]
pub(super) struct Frozen {
    pub(super) masters: Tensor,
    pub(super) cast: Cast,
}

impl Cast {
    fn new(len: i64, kind: Kind, device: Device) -> tch::Result<Self> {
        let copy = (kind != Kind::Float).then(|| Tensor::f_zeros([len], (kind, device)));
        Ok(Self { copy: copy.transpose()?, stale: true })
    }

    /// The copy, if there is one: who changes the masters may change it alike instead of
    /// [invalidating](Self::invalidate) it.
    pub(super) fn copy(&self) -> Option<&Tensor> {
        self.copy.as_ref()
    }

    /// The masters have changed.
    pub(super) fn invalidate(&mut self) {
        self.stale = true;
    }

    /// Brings the copy up to date with `masters`.
    pub(super) fn refresh(&mut self, masters: &Tensor) -> tch::Result<()> {
        if let (true, Some(copy)) = (self.stale, &mut self.copy) {
            let first = masters.f_narrow(0, 0, copy.size1()?)?;
            copy.f_copy_(&first)?;
        }
        self.stale = false;
        Ok(())
    }
}

impl Frozen {
    /// Zeros, with a copy in `kind`.
    pub(super) fn new(layout: &Layout, kind: Kind, device: Device) -> tch::Result<Self> {
        let masters = Tensor::f_zeros([layout.frozen_len()], (Kind::Float, device))?;
        Ok(Self { masters, cast: Cast::new(layout.frozen_cast_len, kind, device)? })
    }

    /// Brings the copy up to date.
    pub(super) fn refresh(&mut self) -> tch::Result<()> {
        self.cast.refresh(&self.masters)
    }
}

impl Working {
    /// Views of `masters` and of what is `frozen`, or of their copies in `kind`.
    pub(super) fn new(
        layout: &Layout,
        masters: &Tensor,
        frozen: &Frozen,
        kind: Kind,
    ) -> tch::Result<Self> {
        let mut parameters = views(&layout.parameters, masters, &frozen.masters)?;
        let cast = Cast::new(layout.cast_len, kind, masters.device())?;
        for (parameter, slot) in parameters.iter_mut().zip(&layout.parameters) {
            let copy = if slot.frozen { frozen.cast.copy() } else { cast.copy() };
            if let (true, Some(copy)) = (slot.is_cast, copy) {
                *parameter = slot.view(copy)?.f_detach()?;
            }
        }
        Ok(Self { parameters, cast })
    }

    /// Makes every parameter that is trained the start of a gradient.
    pub(super) fn require_gradients(&self, layout: &Layout) -> tch::Result<()> {
        for (parameter, slot) in self.parameters.iter().zip(&layout.parameters) {
            if !slot.frozen {
                let _ = parameter.f_set_requires_grad(true)?;
            }
        }
        Ok(())
    }
}
