//! A loss that the network itself computes: a program, or a language model.

use baton_data::Batch;
use tch::{Device, Kind, Tensor};

use super::Task;
use crate::learner::{BatchEvaluation, Sums};

/// Outputs (samples, 1 + metrics): the loss of each sample, then its metrics. A language model's samples are predicted
/// tokens.
#[derive(Clone, Copy, Debug)]
pub(in crate::torch) struct NetworkLoss {
    /// Number of metrics.
    pub(in crate::torch) metrics: usize,
}

impl Task for NetworkLoss {
    fn loss(&self, outputs: &Tensor, _targets: &Tensor) -> tch::Result<Tensor> {
        outputs.f_select(1, 0)?.f_sum(Kind::Float)
    }

    fn first_metric(&self, outputs: &Tensor, _targets: &Tensor) -> tch::Result<Option<Tensor>> {
        let sum = |outputs: &Tensor| outputs.f_detach()?.f_select(1, 1)?.f_sum(Kind::Float);
        (self.metrics > 0).then(|| sum(outputs)).transpose()
    }

    fn evaluate(
        &self,
        _batch: &Batch,
        outputs: &Tensor,
        _targets: &Tensor,
    ) -> tch::Result<BatchEvaluation> {
        let dims: &[i64] = &[0];
        let sums = outputs.f_detach()?.f_sum_dim_intlist(dims, false, Kind::Double)?;
        let sums: Vec<f64> = Vec::try_from(&sums.f_to_device(Device::Cpu)?)?;
        let (loss, others) =
            sums.split_first().map_or((0.0, Vec::new()), |(loss, others)| (*loss, others.to_vec()));
        let count = outputs.size2()?.0 as u64;
        Ok(BatchEvaluation { sums: Sums { loss, others, count }, ..BatchEvaluation::default() })
    }
}
