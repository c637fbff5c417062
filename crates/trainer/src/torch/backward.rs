//! One forward and backward pass.
//!
//! Activations of a block are kept for the gradient or, if the recipe requests it, recomputed (Chen et al. 2016, arXiv
//! 1604.06174): less memory for a third more computation. The operations are the same, so the gradient has the same
//! bits.

use baton_model::{Block, NetworkDescription};
use tch::Tensor;

use super::{
    failure::During,
    layers::Tensors,
    network::{NetworkState, PassResult, StageFinished},
};
use crate::learner::Error;

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
    /// Indices of the blocks before which the graph is cut, so that the gradients behind are finished first; the head is
    /// one more than the last.
    pub(super) cuts: &'a [usize],
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
    /// Number of cuts before it.
    stage: usize,
}

/// Where the backward pass of a group starts.
enum Upstream {
    /// The scalar to differentiate.
    Objective(Tensor),
    /// The gradient of its output.
    Gradient(Tensor),
}

impl<'a> Pass<'a> {
    /// Computes the gradients of a scalar. `loss(outputs)` returns the loss to report, and the scalar to differentiate.
    /// `finished` gets the gradients behind each cut, the last cut first; the others are in the result.
    pub(super) fn run(
        &self,
        inputs: &Tensor,
        loss: &mut dyn FnMut(&Tensor) -> tch::Result<(Tensor, Tensor)>,
        finished: &mut StageFinished<'_>,
    ) -> Result<PassResult, Error> {
        let mut forward = || {
            let mut groups: Vec<BlockGroup<'_>> = Vec::new();
            let outputs = self.forward(inputs, &mut groups)?;
            let (loss, objective) = loss(&outputs)?;
            Ok((groups, outputs.f_detach()?, loss.f_detach()?, objective))
        };
        let (groups, outputs, loss, objective) = forward().during("forward pass")?;
        let gradients = self.backward(groups, objective, finished)?;
        Ok(PassResult { outputs, loss, gradients })
    }

    fn forward(&self, inputs: &Tensor, groups: &mut Vec<BlockGroup<'a>>) -> tch::Result<Tensor> {
        let mut x = self.through_frozen(inputs)?;
        for (index, block) in self.network.blocks.iter().enumerate().skip(self.frozen) {
            let stage = self.stage(index);
            if self.recompute.contains(&block.name) {
                let input = self.start(&x, groups.is_empty())?;
                let _no_grad = tch::no_grad_guard();
                x = self.tensors.layers(&block.layers, &input)?;
                groups.push(BlockGroup { blocks: vec![block], input, output: None, stage });
            } else {
                let group = self.kept_group(groups, &x, stage)?;
                x = self.tensors.layers(&block.layers, group.output.as_ref().unwrap_or(&x))?;
                group.blocks.push(block);
                group.output = Some(x.shallow_clone());
            }
        }
        let head = self.kept_group(groups, &x, self.stage(self.network.blocks.len()))?;
        let layers = &self.network.head.layers;
        let outputs = self.tensors.layers(layers, head.output.as_ref().unwrap_or(&x))?;
        head.blocks.push(&self.network.head);
        Ok(outputs)
    }

    /// Number of cuts before this block or before one that precedes it.
    fn stage(&self, block: usize) -> usize {
        self.cuts.iter().filter(|cut| **cut <= block).count()
    }

    fn through_frozen(&self, inputs: &Tensor) -> tch::Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let tensors = self.tensors.with_running();
        let frozen = &self.network.blocks[..self.frozen];
        tensors.layers(frozen.iter().flat_map(|block| &block.layers), inputs)
    }

    /// The group that continues from `x`: the last one, if its graph ends there and is of this stage, else a new one.
    fn kept_group<'s>(
        &self,
        groups: &'s mut Vec<BlockGroup<'a>>,
        x: &Tensor,
        stage: usize,
    ) -> tch::Result<&'s mut BlockGroup<'a>> {
        if groups.last().is_none_or(|last| last.output.is_none() || last.stage != stage) {
            let input = self.start(x, groups.is_empty())?;
            let output = Some(input.shallow_clone());
            groups.push(BlockGroup { blocks: Vec::new(), input, output, stage });
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
        mut groups: Vec<BlockGroup<'_>>,
        objective: Tensor,
        finished: &mut StageFinished<'_>,
    ) -> Result<Vec<(usize, Tensor)>, Error> {
        let mut gradients = Vec::new();
        let mut upstream = Upstream::Objective(objective);
        while let Some(group) = groups.pop() {
            let is_first = groups.is_empty();
            let stage = group.stage;
            let below = self.through_group(group, upstream, is_first, &mut gradients);
            let Some(gradient) = below.during("backward pass")? else { break };
            upstream = Upstream::Gradient(gradient);
            if groups.last().is_some_and(|next| next.stage != stage) {
                finished(std::mem::take(&mut gradients))?;
            }
        }
        Ok(gradients)
    }

    /// Adds the gradients of a group's parameters to `gradients`; returns that of its input, unless it is the first.
    fn through_group(
        &self,
        group: BlockGroup<'_>,
        upstream: Upstream,
        is_first: bool,
        gradients: &mut Vec<(usize, Tensor)>,
    ) -> tch::Result<Option<Tensor>> {
        let output = match group.output {
            Some(output) => output,
            None => self.recompute(&group.blocks, &group.input)?,
        };
        let indices = group.blocks.iter().flat_map(|block| block.parameters.clone());
        let is_trained = |index: &usize| !self.network.parameters[*index].is_frozen();
        let indices: Vec<usize> = indices.filter(is_trained).collect();
        let derived = match upstream {
            Upstream::Objective(objective) => objective,
            // tch can start only at scalars; the gradient of this scalar is `upstream`.
            Upstream::Gradient(upstream) => output.f_mul(&upstream)?.f_sum(None)?,
        };
        let parameters = indices.iter().map(|index| &self.tensors.state.parameters[*index]);
        let input = (!is_first).then_some(&group.input);
        let with_respect_to: Vec<&Tensor> = parameters.chain(input).collect();
        let mut computed = Tensor::f_run_backward(&[&derived], &with_respect_to, false, false)?;
        let below = input.and_then(|_| computed.pop());
        gradients.extend(indices.into_iter().zip(computed));
        Ok(below)
    }

    fn recompute(&self, blocks: &[&Block], input: &Tensor) -> tch::Result<Tensor> {
        let state = NetworkState { batch: Some(self.spare_statistics), ..self.tensors.state };
        let tensors = Tensors { state, ..self.tensors };
        tensors.layers(blocks.iter().flat_map(|block| &block.layers), input)
    }
}
