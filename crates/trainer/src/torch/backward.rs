//! One forward and backward pass.
//!
//! Activations of a block are kept for the gradient or, if the recipe requests it, recomputed (Chen et al. 2016, arXiv
//! 1604.06174): less memory for a third more computation. The operations are the same, so the gradient has the same
//! bits.

use baton_model::{Block, NetworkDescription};
use tch::Tensor;

use super::{
    layers::Tensors,
    network::{NetworkState, PassResult},
};

/// Inputs of one forward and backward pass.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) network: &'a NetworkDescription,
    /// `tensors.state.batch` receives the batch statistics.
    pub(super) tensors: Tensors<'a>,
    /// Number of blocks at the start of the network that are frozen: no gradient, statistics not updated.
    pub(super) frozen: usize,
    /// Names of the blocks whose activations are recomputed.
    pub(super) recompute: &'a [String],
    /// Receives the batch statistics of a recomputation; the first computation has stored the same values already.
    pub(super) spare_statistics: &'a [Tensor],
}

/// Consecutive blocks whose gradients are computed together.
struct BlockGroup<'a> {
    blocks: Vec<&'a Block>,
    /// The start of their graph.
    input: Tensor,
    /// The end of their graph; `None` if the blocks have to be recomputed.
    output: Option<Tensor>,
}

impl<'a> Pass<'a> {
    /// Computes the gradients of a scalar. `loss(outputs)` returns the loss to report, and the scalar to differentiate.
    pub(super) fn run(
        &self,
        inputs: &Tensor,
        loss: &mut dyn FnMut(&Tensor) -> tch::Result<(Tensor, Tensor)>,
    ) -> tch::Result<PassResult> {
        let mut x = self.through_frozen(inputs)?;
        let mut groups: Vec<BlockGroup<'_>> = Vec::new();
        for block in &self.network.blocks[self.frozen..] {
            if self.recompute.contains(&block.name) {
                let input = self.start(&x, groups.is_empty())?;
                let _no_grad = tch::no_grad_guard();
                x = self.tensors.layers(&block.layers, &input)?;
                groups.push(BlockGroup { blocks: vec![block], input, output: None });
            } else {
                let group = self.kept_group(&mut groups, &x)?;
                x = self.tensors.layers(&block.layers, group.output.as_ref().unwrap_or(&x))?;
                group.blocks.push(block);
                group.output = Some(x.shallow_clone());
            }
        }
        let head = self.kept_group(&mut groups, &x)?;
        let layers = &self.network.head.layers;
        let outputs = self.tensors.layers(layers, head.output.as_ref().unwrap_or(&x))?;
        head.blocks.push(&self.network.head);
        let (loss, objective) = loss(&outputs)?;
        let gradients = self.backward(groups, &objective)?;
        Ok(PassResult { outputs: outputs.f_detach()?, loss: loss.f_detach()?, gradients })
    }

    fn through_frozen(&self, inputs: &Tensor) -> tch::Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let tensors = self.tensors.with_running();
        let frozen = &self.network.blocks[..self.frozen];
        tensors.layers(frozen.iter().flat_map(|block| &block.layers), inputs)
    }

    /// The group that continues from `x`: the last one, if its graph ends there, else a new one.
    fn kept_group<'s>(
        &self,
        groups: &'s mut Vec<BlockGroup<'a>>,
        x: &Tensor,
    ) -> tch::Result<&'s mut BlockGroup<'a>> {
        if groups.last().is_none_or(|last| last.output.is_none()) {
            let input = self.start(x, groups.is_empty())?;
            let output = Some(input.shallow_clone());
            groups.push(BlockGroup { blocks: Vec::new(), input, output });
        }
        let last = groups.len() - 1;
        Ok(&mut groups[last])
    }

    /// `x` as the start of a separate graph. The input of the first graph needs no gradient.
    fn start(&self, x: &Tensor, first: bool) -> tch::Result<Tensor> {
        x.f_detach()?.f_set_requires_grad(!first)
    }

    fn backward(
        &self,
        groups: Vec<BlockGroup<'_>>,
        objective: &Tensor,
    ) -> tch::Result<Vec<(usize, Tensor)>> {
        let mut gradients = Vec::new();
        let mut upstream: Option<Tensor> = None;
        for (number, group) in groups.into_iter().enumerate().rev() {
            let output = match group.output {
                Some(output) => output,
                None => self.recompute(&group.blocks, &group.input)?,
            };
            let indices = group.blocks.iter().flat_map(|block| block.parameters.clone());
            let is_trained = |index: &usize| !self.network.parameters[*index].is_frozen();
            let indices: Vec<usize> = indices.filter(is_trained).collect();
            let derived = match upstream.take() {
                None => objective.shallow_clone(),
                // tch can start only at scalars; the gradient of this scalar is `upstream`.
                Some(upstream) => output.f_mul(&upstream)?.f_sum(None)?,
            };
            let parameters = indices.iter().map(|index| &self.tensors.state.parameters[*index]);
            let input = (number > 0).then_some(&group.input);
            let with_respect_to: Vec<&Tensor> = parameters.chain(input).collect();
            let mut computed = Tensor::f_run_backward(&[&derived], &with_respect_to, false, false)?;
            upstream = input.and_then(|_| computed.pop());
            gradients.extend(indices.into_iter().zip(computed));
        }
        Ok(gradients)
    }

    fn recompute(&self, blocks: &[&Block], input: &Tensor) -> tch::Result<Tensor> {
        let state = NetworkState { batch: Some(self.spare_statistics), ..self.tensors.state };
        let tensors = Tensors { state, ..self.tensors };
        tensors.layers(blocks.iter().flat_map(|block| &block.layers), input)
    }
}
