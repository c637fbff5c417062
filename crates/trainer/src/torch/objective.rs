//! What is minimised, and how often the first guesses are right.

use baton_data::Batch;
use tch::{Device, Kind, Reduction, Tensor};

use super::failure::During;
use crate::learner::{Error, Sums};

/// Class index that [`Tensor::f_cross_entropy_loss`] would leave out; labels never have it.
const IGNORED: i64 = -100;

/// Cross entropy with label smoothing (Szegedy et al. 2016, §7) as in `torch.nn.CrossEntropyLoss`:
/// the target is `1 - s` on the label plus `s / classes` on every class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Objective {
    /// The `s` above.
    pub(super) label_smoothing: f64,
    /// Number of classes.
    pub(super) num_classes: u32,
}

impl Objective {
    /// The labels of `batch` on `device`, i64, shape (samples).
    ///
    /// Each is checked here: on a GPU, libtorch would only find a wrong one after the fact and then
    /// the process is lost.
    pub(super) fn labels(self, batch: &Batch, device: Device) -> Result<Tensor, Error> {
        let valid = 0..i64::from(self.num_classes);
        if let Some(index) = batch.labels.iter().position(|label| !valid.contains(label)) {
            return Err(Error::Label {
                sample: batch.samples.get(index).copied().unwrap_or_default(),
                label: batch.labels[index],
                num_classes: self.num_classes,
            });
        }
        Tensor::f_from_slice(&batch.labels)
            .and_then(|labels| labels.f_to_device(device))
            .during("copy labels")
    }

    /// Sum of the losses of all samples, a scalar. `logits` has shape (samples, classes).
    pub(super) fn loss(self, logits: &Tensor, labels: &Tensor) -> tch::Result<Tensor> {
        let none = None::<&Tensor>;
        logits.f_cross_entropy_loss(labels, none, Reduction::Sum, IGNORED, self.label_smoothing)
    }

    /// Loss and right guesses as numbers. With fewer than five classes every sample counts for
    /// `top5`.
    ///
    /// This is where the host waits for the device, once per batch: three numbers in one copy.
    pub(super) fn sums(self, loss: &Tensor, logits: &Tensor, labels: &Tensor) -> tch::Result<Sums> {
        let guesses = i64::from(self.num_classes.min(5));
        let (_, ranked) = logits.f_detach()?.f_topk(guesses, 1, true, true)?;
        let right = ranked.f_eq_tensor(&labels.f_unsqueeze(1)?)?;
        let count = |right: &Tensor| right.f_sum(Kind::Double);
        let top1 = count(&right.f_select(1, 0)?)?;
        let top5 = count(&right)?;
        let loss = loss.f_detach()?.f_to_kind(Kind::Double)?;
        let mut numbers = [0.0_f64; 3];
        let sums = Tensor::f_stack(&[loss, top1, top5], 0)?.f_to_device(Device::Cpu)?;
        sums.f_copy_data(&mut numbers, 3)?;
        let [loss, top1, top5] = numbers;
        let count = labels.size1()? as u64;
        Ok(Sums { loss, top1: top1 as u64, top5: top5 as u64, count })
    }
}
