//! A program's network as a list of operations.

use baton_program::{
    Amount, OperatorCost, OperatorKind, Program, StoredTensor, WorkingFormat, cost::PassWork,
};
use baton_recipe::spec::Compute;

use crate::{
    layer::{NetworkOperation, OperationKind, PassCost, Traffic},
    network::{F32_BYTES, Network, hidden, input_cost},
};

/// Most bytes, values or multiplications of one operation. The file could claim any number, and sums must not overflow.
const MOST: u64 = 1 << 44;

/// The number format of a program's operators.
#[must_use]
pub fn working_format(compute: Compute) -> WorkingFormat {
    match compute {
        Compute::Fp32 => WorkingFormat::Float32,
        Compute::Bf16 | Compute::Fp16 => WorkingFormat::Half,
    }
}

impl Network {
    /// The operators of `program`, for images with sides of `resolution` pixels if it takes images.
    ///
    /// # Errors
    /// It takes images of another size.
    pub fn of_program(
        program: &Program,
        compute: Compute,
        resolution: u32,
    ) -> Result<Self, baton_program::Error> {
        let side = u64::from(resolution);
        let costs = program.costs(working_format(compute), Some(side))?;
        let mut layers = state(program);
        if program.image_input().is_some() {
            let mut input = operation("input", OperationKind::Input);
            input.forward = input_cost(3 * side * side);
            input.evaluation = input.forward;
            layers.push(input);
        }
        layers.extend(costs.operators.iter().map(of_operator));
        let kept_per_pass = costs.kept().fixed.min(MOST);
        let hidden = hidden(&program.describe());
        Ok(Self { kept_per_pass, hidden, ..Self::of_operations(layers) })
    }
}

/// The tensors of a program, as operations that compute nothing: several operators may share a tensor.
fn state(program: &Program) -> Vec<NetworkOperation> {
    let network = program.describe();
    let of = |name, frozen| {
        let values = |tensors: &[baton_model::Tensor]| {
            let tensors = tensors.iter().filter(|tensor| tensor.is_frozen() == frozen);
            tensors.map(baton_model::Tensor::len).fold(0, u64::saturating_add).min(MOST)
        };
        NetworkOperation {
            other_parameters: values(&network.parameters),
            statistics: values(&network.statistics),
            frozen,
            ..operation(name, OperationKind::Other)
        }
    };
    let mut frozen = of("frozen tensors", true);
    let transient = program.constants.iter().filter(|constant| !constant.is_persistent);
    let bytes = |tensor: &StoredTensor| tensor.len().saturating_mul(tensor.dtype.bytes());
    let bytes = transient.map(|constant| bytes(&constant.tensor)).fold(0, u64::saturating_add);
    frozen.statistics = frozen.statistics.saturating_add(bytes.div_ceil(F32_BYTES)).min(MOST);
    vec![of("trained tensors", false), frozen]
}

fn of_operator(cost: &OperatorCost<'_>) -> NetworkOperation {
    let location = &cost.node.location;
    let name = if location.module.is_empty() { &location.node } else { &location.module };
    let per_sample = |amount: Amount| amount.per_sample.min(MOST);
    let pass = |work: PassWork| PassCost {
        macs: per_sample(work.macs),
        traffic: Traffic { values: 0, bytes: per_sample(work.bytes) },
        launches: work.launches,
        ..PassCost::default()
    };
    NetworkOperation {
        outputs: per_sample(cost.outputs),
        kept: Traffic { values: 0, bytes: per_sample(cost.kept) },
        forward: pass(cost.forward),
        backward: pass(cost.backward),
        evaluation: pass(cost.evaluation),
        ..operation(name, kind(cost.kind))
    }
}

fn operation(name: &str, kind: OperationKind) -> NetworkOperation {
    NetworkOperation::new(name, None, kind, 0)
}

fn kind(kind: OperatorKind) -> OperationKind {
    match kind {
        OperatorKind::Convolution => OperationKind::Convolution,
        OperatorKind::Linear => OperationKind::Linear,
        OperatorKind::MatrixProduct => OperationKind::MatrixProduct,
        OperatorKind::Attention => OperationKind::Attention,
        OperatorKind::Recurrent => OperationKind::Recurrent,
        OperatorKind::BatchNorm => OperationKind::Norm,
        OperatorKind::Relu => OperationKind::Relu,
        OperatorKind::Add => OperationKind::Add,
        OperatorKind::Pool => OperationKind::Pool,
        OperatorKind::Other => OperationKind::Other,
    }
}

#[cfg(test)]
mod tests;
