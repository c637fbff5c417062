//! Classification: predicts one class out of several.

use baton_data::Batch;
use tch::{Device, Kind, Reduction, Tensor};

use super::Task;
use crate::learner::{BatchEvaluation, Error, Sums};

/// Class index that [`Tensor::f_cross_entropy_loss`] would skip; no label has it.
const IGNORED: i64 = -100;

/// Cross entropy with label smoothing (Szegedy et al. 2016, §7) as in `torch.nn.CrossEntropyLoss`: the
/// target is `1 - s` on the label plus `s / classes` on every class.
#[derive(Debug)]
pub(in crate::torch) struct Classification {
    pub(in crate::torch) classes: u32,
    pub(in crate::torch) smoothing: f64,
    /// Factors of the losses of the classes, on the device of the outputs; `None` if all are 1.
    pub(in crate::torch) weights: Option<Tensor>,
    /// Compare the output of each class by itself with its target, as in `torch.nn.BCEWithLogitsLoss`; the mean over the
    /// classes.
    pub(in crate::torch) is_binary: bool,
}

impl Classification {
    fn binary_loss(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Tensor> {
        let classes = f64::from(self.classes);
        let labels = targets.f_one_hot(self.classes.into())?.f_to_kind(outputs.kind())?;
        let smoothed =
            labels.f_mul_scalar(1.0 - self.smoothing)?.f_add_scalar(self.smoothing / classes)?;
        let none = None::<&Tensor>;
        let loss =
            outputs.f_binary_cross_entropy_with_logits(&smoothed, none, none, Reduction::Sum)?;
        loss.f_div_scalar(classes)
    }
}

impl Task for Classification {
    fn check(&self, batch: &Batch) -> Result<(), Error> {
        let valid = 0..i64::from(self.classes);
        match batch.labels.iter().position(|label| !valid.contains(label)) {
            None => Ok(()),
            Some(index) => Err(Error::Label {
                sample: batch.samples.get(index).copied().unwrap_or_default(),
                label: batch.labels[index],
                num_classes: self.classes,
            }),
        }
    }

    fn loss(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Tensor> {
        if self.is_binary {
            return self.binary_loss(outputs, targets);
        }
        let weights = self.weights.as_ref().map(|weights| weights.f_to_kind(outputs.kind()));
        let weights = weights.transpose()?;
        outputs.f_cross_entropy_loss(targets, weights, Reduction::Sum, IGNORED, self.smoothing)
    }

    /// Number of correct top-1 predictions. Among equal outputs the first class is the prediction.
    fn first_metric(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Option<Tensor>> {
        let guesses = outputs.f_detach()?.f_argmax(1, false)?;
        Ok(Some(guesses.f_eq_tensor(targets)?.f_sum(Kind::Float)?))
    }

    /// With fewer than five classes every sample counts as correct for `top5`.
    fn evaluate(
        &self,
        _batch: &Batch,
        outputs: &Tensor,
        targets: &Tensor,
    ) -> tch::Result<BatchEvaluation> {
        let loss = self.loss(outputs, targets)?.f_detach()?.f_to_kind(Kind::Double)?;
        let guesses = i64::from(self.classes.min(5));
        let (_, ranked) = outputs.f_detach()?.f_topk(guesses, 1, true, true)?;
        let correct = ranked.f_eq_tensor(&targets.f_unsqueeze(1)?)?;
        let sum = |correct: &Tensor| correct.f_sum(Kind::Double);
        let top1 = sum(&correct.f_select(1, 0)?)?;
        let top5 = sum(&correct)?;
        // One copy for three numbers.
        let mut numbers = [0.0_f64; 3];
        let sums = Tensor::f_stack(&[loss, top1, top5], 0)?.f_to_device(Device::Cpu)?;
        sums.f_copy_data(&mut numbers, 3)?;
        let [loss, top1, top5] = numbers;
        let count = outputs.size2()?.0 as u64;
        Ok(BatchEvaluation {
            sums: Sums { loss, others: vec![top1, top5], count },
            ..BatchEvaluation::default()
        })
    }
}
