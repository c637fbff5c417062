//! Weights as the network reads them: views of a flat f32 buffer, and with bf16 or fp16 a working copy
//! of the parameters that say so, made by one cast of the buffer's first part.
//!
//! The others, such as BatchNorm's parameters and biases, stay f32.

use baton_recipe::spec::Compute;
use tch::{Kind, Tensor};

use super::flat::{Layout, views};

/// The number format of a recipe.
pub(super) fn kind(compute: Compute) -> Kind {
    match compute {
        Compute::Fp32 => Kind::Float,
        Compute::Bf16 => Kind::BFloat16,
        Compute::Fp16 => Kind::Half,
    }
}

/// Readable weights.
#[derive(Debug)]
pub(super) struct Working {
    /// In the order of [`Layout::parameters`].
    pub(super) parameters: Vec<Tensor>,
    /// The copy in the working format, if it is not that of the masters.
    cast: Option<Tensor>,
    stale: bool,
}

impl Working {
    /// Views of `masters`, or of a copy in `kind`.
    pub(super) fn new(layout: &Layout, masters: &Tensor, kind: Kind) -> tch::Result<Self> {
        let mut parameters = views(&layout.parameters, masters, 0)?;
        let mut cast = None;
        if kind != Kind::Float {
            let buffer = Tensor::f_zeros([layout.cast_len], (kind, masters.device()))?;
            for (parameter, slot) in parameters.iter_mut().zip(&layout.parameters) {
                if slot.is_cast {
                    *parameter = slot.view(&buffer, 0)?.f_detach()?;
                }
            }
            cast = Some(buffer);
        }
        Ok(Self { parameters, cast, stale: true })
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

    /// The working copy of the first masters, if there is one: who changes those may change it alike
    /// instead of [invalidating](Self::invalidate) it.
    pub(super) fn cast(&self) -> Option<&Tensor> {
        self.cast.as_ref()
    }

    /// The masters have changed.
    pub(super) fn invalidate(&mut self) {
        self.stale = true;
    }

    /// Brings the working copy up to date with `masters`.
    pub(super) fn refresh(&mut self, masters: &Tensor) -> tch::Result<()> {
        if let (true, Some(cast)) = (self.stale, &mut self.cast) {
            let kernels = masters.f_narrow(0, 0, cast.size1()?)?;
            cast.f_copy_(&kernels)?;
        }
        self.stale = false;
        Ok(())
    }
}
