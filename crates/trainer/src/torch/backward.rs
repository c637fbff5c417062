//! One forward and backward pass.
//!
//! Activations of a block are kept for the gradient or, if the recipe says so, computed a second time
//! (Chen et al. 2016, arXiv 1604.06174): less memory for a third more work. The operations are the
//! same, hence the bits of the gradient too.

use baton_model::{Block, Description};
use tch::Tensor;

use super::network::Tensors;

/// How a pass is made.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) network: &'a Description,
    /// With the batch's statistics.
    pub(super) tensors: Tensors<'a>,
    /// So many blocks at the start have no gradient and keep their statistics.
    pub(super) frozen: usize,
    /// Names of the blocks that are computed twice.
    pub(super) recompute: &'a [String],
    /// Where the second computation leaves the batch's statistics, which the first one has told.
    pub(super) spare_statistics: &'a [Tensor],
}

/// What a pass found.
pub(super) struct Found {
    /// Outputs (samples, classes), detached.
    pub(super) outputs: Tensor,
    /// The loss, detached.
    pub(super) loss: Tensor,
    /// Gradients by index of the parameter; frozen ones have none.
    pub(super) gradients: Vec<(usize, Tensor)>,
}

/// Blocks whose gradients are found together.
struct Span<'a> {
    blocks: Vec<&'a Block>,
    /// The start of their graph.
    input: Tensor,
    /// The end of their graph; absent if it has to be computed again.
    output: Option<Tensor>,
}

impl<'a> Pass<'a> {
    /// Finds the gradient of a scalar: `loss(outputs)` yields the loss that is told, and what is derived.
    pub(super) fn run(
        &self,
        inputs: &Tensor,
        loss: impl FnOnce(&Tensor) -> tch::Result<(Tensor, Tensor)>,
    ) -> tch::Result<Found> {
        let mut x = self.through_frozen(inputs)?;
        let mut spans: Vec<Span<'_>> = Vec::new();
        for block in &self.network.blocks[self.frozen..] {
            if self.recompute.contains(&block.name) {
                let input = self.start(&x, spans.is_empty())?;
                let _no_grad = tch::no_grad_guard();
                x = self.tensors.layers(&block.layers, &input)?;
                spans.push(Span { blocks: vec![block], input, output: None });
            } else {
                let span = self.kept_span(&mut spans, &x)?;
                x = self.tensors.layers(&block.layers, span.output.as_ref().unwrap_or(&x))?;
                span.blocks.push(block);
                span.output = Some(x.shallow_clone());
            }
        }
        let head = self.kept_span(&mut spans, &x)?;
        let layers = &self.network.head.layers;
        let outputs = self.tensors.layers(layers, head.output.as_ref().unwrap_or(&x))?;
        head.blocks.push(&self.network.head);
        let (loss, objective) = loss(&outputs)?;
        let gradients = self.backward(spans, &objective)?;
        Ok(Found { outputs: outputs.f_detach()?, loss: loss.f_detach()?, gradients })
    }

    fn through_frozen(&self, inputs: &Tensor) -> tch::Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let tensors = Tensors { batch: None, ..self.tensors };
        let frozen = &self.network.blocks[..self.frozen];
        tensors.layers(frozen.iter().flat_map(|block| &block.layers), inputs)
    }

    /// The span to go on with from `x`: the last one, if its graph ends there, else a new one.
    fn kept_span<'s>(
        &self,
        spans: &'s mut Vec<Span<'a>>,
        x: &Tensor,
    ) -> tch::Result<&'s mut Span<'a>> {
        if spans.last().is_none_or(|last| last.output.is_none()) {
            let input = self.start(x, spans.is_empty())?;
            let output = Some(input.shallow_clone());
            spans.push(Span { blocks: Vec::new(), input, output });
        }
        let last = spans.len() - 1;
        Ok(&mut spans[last])
    }

    /// `x` as the start of a graph of its own. Nobody asks for the gradient of the first one.
    fn start(&self, x: &Tensor, first: bool) -> tch::Result<Tensor> {
        x.f_detach()?.f_set_requires_grad(!first)
    }

    fn backward(
        &self,
        spans: Vec<Span<'_>>,
        objective: &Tensor,
    ) -> tch::Result<Vec<(usize, Tensor)>> {
        let mut gradients = Vec::new();
        let mut upstream: Option<Tensor> = None;
        for (number, span) in spans.into_iter().enumerate().rev() {
            let output = match span.output {
                Some(output) => output,
                None => self.again(&span.blocks, &span.input)?,
            };
            let indices = span.blocks.iter().flat_map(|block| block.parameters.clone());
            let is_trained = |index: &usize| !self.network.parameters[*index].is_frozen();
            let indices: Vec<usize> = indices.filter(is_trained).collect();
            let derived = match upstream.take() {
                None => objective.shallow_clone(),
                // tch starts at scalars only; this one has `upstream` for its gradient.
                Some(upstream) => output.f_mul(&upstream)?.f_sum(None)?,
            };
            let parameters = indices.iter().map(|index| &self.tensors.parameters[*index]);
            let input = (number > 0).then_some(&span.input);
            let wanted: Vec<&Tensor> = parameters.chain(input).collect();
            let mut found = Tensor::f_run_backward(&[&derived], &wanted, false, false)?;
            upstream = input.and_then(|_| found.pop());
            gradients.extend(indices.into_iter().zip(found));
        }
        Ok(gradients)
    }

    fn again(&self, blocks: &[&Block], input: &Tensor) -> tch::Result<Tensor> {
        let tensors = Tensors { batch: Some(self.spare_statistics), ..self.tensors };
        tensors.layers(blocks.iter().flat_map(|block| &block.layers), input)
    }
}
