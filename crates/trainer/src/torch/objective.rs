//! What is minimised, and how often the first guesses are right.

use baton_data::Batch;
use baton_recipe::spec::{Loss, LossKind};
use tch::{Device, Kind, Reduction, Tensor};

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
    /// Refuses a batch with a label that is no output's: on a GPU, libtorch would only find it after the
    /// fact, and then the process is lost.
    pub(super) fn check_labels(&self, batch: &Batch) -> Result<(), Error> {
        let valid = 0..i64::from(self.outputs);
        match batch.labels.iter().position(|label| !valid.contains(label)) {
            None => Ok(()),
            Some(index) => Err(Error::Label {
                sample: batch.samples.get(index).copied().unwrap_or_default(),
                label: batch.labels[index],
                num_classes: self.outputs,
            }),
        }
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

    /// How many first guesses are right, a scalar. Of equals the first one is the guess. A regression has
    /// none.
    pub(super) fn right_guesses(
        &self,
        outputs: &Tensor,
        targets: &Tensor,
    ) -> tch::Result<Option<Tensor>> {
        if self.loss.kind.is_regression() {
            return Ok(None);
        }
        let guesses = outputs.f_detach()?.f_argmax(1, false)?;
        Ok(Some(guesses.f_eq_tensor(targets)?.f_sum(Kind::Float)?))
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
