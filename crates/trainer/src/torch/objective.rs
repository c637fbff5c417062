//! What is minimised, and how often the first guesses are right.

use baton_data::Batch;
use baton_job::spec::{Loss, LossKind};
use tch::{Device, Kind, Reduction, Tensor};

use super::failure::During;
use crate::learner::{Error, Sums};

/// Class index that [`Tensor::f_cross_entropy_loss`] would leave out; labels never have it.
const IGNORED: i64 = -100;

/// The loss of the recipe.
///
/// - Cross entropy with label smoothing (Szegedy et al. 2016, §7) as in `torch.nn.CrossEntropyLoss`:
///   the target is `1 - s` on the label plus `s / classes` on every class.
/// - Mean square and Huber's loss as in `torch.nn.MSELoss` and `torch.nn.HuberLoss`, the mean over a
///   sample's outputs.
#[derive(Clone, Debug)]
pub(super) struct Objective {
    /// Which one, with its numbers.
    pub(super) loss: Loss,
    /// Number of classes, or of a regression's outputs.
    pub(super) outputs: u32,
}

impl Objective {
    /// What the outputs for `batch` should be, on `device`: labels, i64, shape (samples); or values,
    /// f32, shape (samples, outputs).
    ///
    /// Each label is checked here: on a GPU, libtorch would only find a wrong one after the fact and
    /// then the process is lost.
    pub(super) fn targets(&self, batch: &Batch, device: Device) -> Result<Tensor, Error> {
        if self.loss.kind.is_regression() {
            let shape = [batch.len() as i64, i64::from(self.outputs)];
            return Tensor::f_from_slice(&batch.targets)
                .and_then(|targets| targets.f_view(shape)?.f_to_device(device))
                .during("copy targets");
        }
        let valid = 0..i64::from(self.outputs);
        if let Some(index) = batch.labels.iter().position(|label| !valid.contains(label)) {
            return Err(Error::Label {
                sample: batch.samples.get(index).copied().unwrap_or_default(),
                label: batch.labels[index],
                num_classes: self.outputs,
            });
        }
        Tensor::f_from_slice(&batch.labels)
            .and_then(|labels| labels.f_to_device(device))
            .during("copy labels")
    }

    /// Sum of the losses of all samples, a scalar. `outputs` has shape (samples, outputs).
    pub(super) fn loss(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Tensor> {
        let none = None::<&Tensor>;
        let smoothing = self.loss.label_smoothing;
        let each = f64::from(self.outputs);
        match self.loss.kind {
            LossKind::CrossEntropy => {
                outputs.f_cross_entropy_loss(targets, none, Reduction::Sum, IGNORED, smoothing)
            }
            LossKind::Mse => outputs.f_mse_loss(targets, Reduction::Sum)?.f_div_scalar(each),
            LossKind::Huber => outputs
                .f_huber_loss(targets, Reduction::Sum, self.loss.huber_delta)?
                .f_div_scalar(each),
        }
    }

    /// Loss and right guesses as numbers. With fewer than five classes every sample counts for
    /// `top5`; a regression has no guesses.
    ///
    /// This is where the host waits for the device, once per batch: three numbers in one copy.
    pub(super) fn sums(
        &self,
        loss: &Tensor,
        outputs: &Tensor,
        targets: &Tensor,
    ) -> tch::Result<Sums> {
        let count = outputs.size2()?.0 as u64;
        let loss = loss.f_detach()?.f_to_kind(Kind::Double)?;
        if self.loss.kind.is_regression() {
            return Ok(Sums { loss: f64::try_from(loss)?, count, ..Sums::default() });
        }
        let guesses = i64::from(self.outputs.min(5));
        let (_, ranked) = outputs.f_detach()?.f_topk(guesses, 1, true, true)?;
        let right = ranked.f_eq_tensor(&targets.f_unsqueeze(1)?)?;
        let sum = |right: &Tensor| right.f_sum(Kind::Double);
        let top1 = sum(&right.f_select(1, 0)?)?;
        let top5 = sum(&right)?;
        let mut numbers = [0.0_f64; 3];
        let sums = Tensor::f_stack(&[loss, top1, top5], 0)?.f_to_device(Device::Cpu)?;
        sums.f_copy_data(&mut numbers, 3)?;
        let [loss, top1, top5] = numbers;
        Ok(Sums { loss, top1: top1 as u64, top5: top5 as u64, count })
    }
}
