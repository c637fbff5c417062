//! Head and loss, in chunks of labels: of a vocabulary of 256,000, the logits of a whole micro-batch would need more
//! memory than the model.

use tch::{Kind, Reduction, Tensor};

/// Most bytes of a chunk's logits as f32.
const LOGITS_CHUNK_BYTES: i64 = 64 << 20;
/// Label that cross entropy would skip; none of the targets is.
const IGNORED: i64 = -100;

/// The last linear layer.
#[derive(Clone, Copy, Debug)]
pub(in crate::torch) struct Head<'a> {
    /// (V, C)
    pub(in crate::torch) weight: &'a Tensor,
    pub(in crate::torch) is_trained: bool,
    /// Cap of logits.
    pub(in crate::torch) cap: Option<f64>,
    pub(in crate::torch) kind: Kind,
}

/// Outputs and gradients of the head.
pub(in crate::torch) struct HeadGradients {
    /// Loss of each label, and 1 if it is the most likely token, else 0; f32, (N, 2), detached.
    pub(in crate::torch) outputs: Tensor,
    /// Gradient of the head's inputs, (N, C).
    pub(in crate::torch) inputs: Tensor,
    /// Gradient of its weight, if it is trained.
    pub(in crate::torch) weight: Option<Tensor>,
}

impl Head<'_> {
    /// Outputs for activations (N, C) and targets (N), as in [`HeadGradients`].
    pub(in crate::torch) fn outputs(&self, x: &Tensor, targets: &Tensor) -> tch::Result<Tensor> {
        let weight = self.weight.f_to_kind(self.kind)?;
        let chunks = self.chunks(x)?.into_iter().map(|(start, len)| {
            let targets = targets.f_narrow(0, start, len)?;
            let (losses, correct) = self.chunk(&x.f_narrow(0, start, len)?, &weight, &targets)?;
            Tensor::f_stack(&[losses, correct], 1)
        });
        Tensor::f_cat(&chunks.collect::<tch::Result<Vec<_>>>()?, 0)
    }

    /// The same, and the gradients of the sum of all losses, each times its share (N).
    pub(in crate::torch) fn gradients(
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

    /// Start and length of each chunk. They depend on the vocabulary alone, so that bits do not depend on the machine.
    fn chunks(&self, x: &Tensor) -> tch::Result<Vec<(i64, i64)>> {
        let rows = x.size2()?.0;
        let (vocabulary, _) = self.weight.size2()?;
        let most = (LOGITS_CHUNK_BYTES / (4 * vocabulary.max(1))).clamp(16, 4096);
        let starts = (0..rows).step_by(most as usize);
        Ok(starts.map(|start| (start, most.min(rows - start))).collect())
    }

    /// Logits (N, V), f32, of activations (N, C).
    pub(in crate::torch) fn logits(&self, x: &Tensor) -> tch::Result<Tensor> {
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
        let none = None::<&Tensor>;
        let losses = logits.f_cross_entropy_loss(targets, none, Reduction::None, IGNORED, 0.0)?;
        let correct = logits.f_detach()?.f_argmax(1, false)?.f_eq_tensor(targets)?;
        Ok((losses, correct.f_to_kind(Kind::Float)?))
    }
}
