//! Head and loss, in chunks of labels: of a vocabulary of 256,000, the logits of a whole micro-batch would need more
//! memory than the model.

use baton_data::NO_LABEL;
use baton_language::decoder::labels_per_chunk;
use tch::{Kind, Reduction, Tensor};

/// The last linear layer.
#[derive(Debug)]
pub(super) struct Head {
    /// (V, C)
    pub(super) weight: Tensor,
    pub(super) is_trained: bool,
    /// Cap of logits.
    pub(super) cap: Option<f64>,
    pub(super) kind: Kind,
}

/// Outputs and gradients of the head.
pub(super) struct HeadGradients {
    /// Loss of each label, and 1 if it is the most likely token, else 0; f32, (N, 2), detached.
    pub(super) outputs: Tensor,
    /// Gradient of the head's inputs, (N, C).
    pub(super) inputs: Tensor,
    /// Gradient of its weight, if it is trained.
    pub(super) weight: Option<Tensor>,
}

impl Head {
    /// Outputs for activations (N, C) and targets (N), as in [`HeadGradients`].
    pub(super) fn outputs(&self, x: &Tensor, targets: &Tensor) -> tch::Result<Tensor> {
        let weight = self.weight.f_to_kind(self.kind)?;
        let chunks = self.chunks(x)?.into_iter().map(|(start, len)| {
            let targets = targets.f_narrow(0, start, len)?;
            let (losses, correct) = self.chunk(&x.f_narrow(0, start, len)?, &weight, &targets)?;
            Tensor::f_stack(&[losses, correct], 1)
        });
        Tensor::f_cat(&chunks.collect::<tch::Result<Vec<_>>>()?, 0)
    }

    /// The same, and the gradients of the sum of all losses, each times its share (N).
    pub(super) fn gradients(
        &self,
        x: &Tensor,
        targets: &Tensor,
        shares: &Tensor,
    ) -> tch::Result<HeadGradients> {
        let weight = self.weight.f_to_kind(self.kind)?.f_detach()?;
        let weight = weight.f_set_requires_grad(self.is_trained)?;
        let (mut outputs, mut inputs) = (Vec::new(), Vec::new());
        let mut of_weight: Option<Tensor> = None;
        for (start, len) in self.chunks(x)? {
            let part = |tensor: &Tensor| tensor.f_narrow(0, start, len);
            let x = part(x)?.f_detach()?.f_set_requires_grad(true)?;
            let (losses, correct) = self.chunk(&x, &weight, &part(targets)?)?;
            let objective = losses.f_mul(&part(shares)?)?.f_sum(Kind::Float)?;
            let with_respect_to = [&x, &weight];
            let trained = if self.is_trained { 2 } else { 1 };
            let gradients =
                Tensor::f_run_backward(&[&objective], &with_respect_to[..trained], false, false)?;
            let mut gradients = gradients.into_iter();
            inputs.extend(gradients.next());
            if let Some(gradient) = gradients.next() {
                // In f32: the sum of many chunks would lose the small ones.
                let gradient = gradient.f_to_kind(Kind::Float)?;
                of_weight = Some(match of_weight {
                    None => gradient,
                    Some(mut sum) => sum.f_add_(&gradient)?,
                });
            }
            outputs.push(Tensor::f_stack(&[losses.f_detach()?, correct], 1)?);
        }
        let (outputs, inputs) = (Tensor::f_cat(&outputs, 0)?, Tensor::f_cat(&inputs, 0)?);
        Ok(HeadGradients { outputs, inputs, weight: of_weight })
    }

    /// Start and length of each chunk.
    fn chunks(&self, x: &Tensor) -> tch::Result<Vec<(i64, i64)>> {
        let rows = x.size2()?.0;
        let (vocabulary, _) = self.weight.size2()?;
        let most = labels_per_chunk(vocabulary as u64) as i64;
        let starts = (0..rows).step_by(most as usize);
        Ok(starts.map(|start| (start, most.min(rows - start))).collect())
    }

    /// Logits (N, V), f32, of activations (N, C).
    pub(super) fn logits(&self, x: &Tensor) -> tch::Result<Tensor> {
        self.logits_by(x, &self.weight.f_to_kind(self.kind)?)
    }

    fn logits_by(&self, x: &Tensor, weight: &Tensor) -> tch::Result<Tensor> {
        let mut logits = x.f_linear(weight, None::<&Tensor>)?;
        if let Some(cap) = self.cap {
            logits = logits.f_div_scalar(cap)?.f_tanh()?.f_mul_scalar(cap)?;
        }
        logits.f_to_kind(Kind::Float)
    }

    /// Loss of each label, and whether it is the most likely token.
    fn chunk(
        &self,
        x: &Tensor,
        weight: &Tensor,
        targets: &Tensor,
    ) -> tch::Result<(Tensor, Tensor)> {
        let logits = self.logits_by(x, weight)?;
        // None of the targets is.
        let ignored = i64::from(NO_LABEL);
        let none = None::<&Tensor>;
        let losses = logits.f_cross_entropy_loss(targets, none, Reduction::None, ignored, 0.0)?;
        let correct = logits.f_detach()?.f_argmax(1, false)?.f_eq_tensor(targets)?;
        Ok((losses, correct.f_to_kind(Kind::Float)?))
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::torch::{device, tests::relative_error};

    #[test]
    fn the_head_in_chunks_is_the_head_at_once() {
        device::set_threads(1);
        tch::manual_seed(3);
        // 262,144 tokens: chunks of 64.
        let weight = Tensor::randn([262_144, 4], (Kind::Float, Device::Cpu));
        let x = Tensor::randn([150, 4], (Kind::Float, Device::Cpu));
        let targets = Tensor::randint(262_144, [150], (Kind::Int64, Device::Cpu));
        let shares = Tensor::ones([150], (Kind::Float, Device::Cpu));
        let head = Head {
            weight: weight.shallow_clone(),
            is_trained: true,
            cap: Some(3.0),
            kind: Kind::Float,
        };
        let chunked = head.gradients(&x, &targets, &shares).unwrap();
        let (x, free) = (x.set_requires_grad(true), weight.detach().set_requires_grad(true));
        let logits = (x.linear::<Tensor>(&free, None) / 3.0).tanh() * 3.0;
        let losses =
            logits.cross_entropy_loss::<Tensor>(&targets, None, Reduction::None, -100, 0.0);
        let whole = Tensor::run_backward(&[losses.sum(Kind::Float)], &[&x, &free], false, false);
        assert!(relative_error(&chunked.outputs.select(1, 0), &losses.detach()) < 1e-6);
        assert!(relative_error(&chunked.inputs, &whole[0]) < 1e-6);
        assert!(relative_error(&chunked.weight.unwrap(), &whole[1]) < 1e-6);
        assert!(
            relative_error(&head.outputs(&x.detach(), &targets).unwrap(), &chunked.outputs) < 1e-6
        );
    }
}
