//! What a program's operators cost: arithmetic, data moved to and from memory, activations kept for the backward pass.
//! Only the shapes in the file are used; nothing is run.

use std::collections::BTreeMap;

use crate::{
    Argument, Dtype, Error, Graph, GraphNode, InputSource, Program, ValueId,
    rules::{AutocastRule, OperatorKind, OperatorRule, Saved, Storage, base_name},
    shape::{Shapes, TensorShape},
    size::Amount,
};

/// Number format in which a program computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkingFormat {
    /// As exported.
    Float32,
    /// 16 bits where autocast allows them.
    Half,
}

/// What a program costs in training.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramCosts<'a> {
    /// Its operators in the order of execution, without those that only compute sizes.
    pub operators: Vec<OperatorCost<'a>>,
    /// Number of operators without a rule, by name: they are assumed to keep their arguments, and to compute nothing.
    pub without_rule: BTreeMap<&'a str, u64>,
    /// Number of operators that are not counted because a size is not known, by name.
    pub without_size: BTreeMap<&'a str, u64>,
}

/// What an operator costs.
#[derive(Clone, Debug, PartialEq)]
pub struct OperatorCost<'a> {
    /// The operator.
    pub node: &'a GraphNode,
    /// Its kind.
    pub kind: OperatorKind,
    /// Forward pass in training.
    pub forward: PassWork,
    /// Backward pass.
    pub backward: PassWork,
    /// Forward pass in evaluation.
    pub evaluation: PassWork,
    /// Activations that it keeps for the backward pass and that no earlier operator keeps, bytes. Parameters, statistics
    /// and constants are not counted, except for their copies in another number format.
    pub kept: Amount,
    /// Number of values of its results.
    pub outputs: Amount,
}

/// What a pass of an operator costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassWork {
    /// Multiply-add operations; two floating-point operations each.
    pub macs: Amount,
    /// Data read and written, bytes.
    pub bytes: Amount,
    /// Number of kernels; 0 for views.
    pub launches: u64,
}

impl ProgramCosts<'_> {
    /// Activations that are kept for the backward pass, bytes.
    #[must_use]
    pub fn kept(&self) -> Amount {
        self.operators.iter().map(|operator| operator.kept).sum()
    }

    /// Multiply-add operations of a forward pass.
    #[must_use]
    pub fn macs(&self) -> Amount {
        self.operators.iter().map(|operator| operator.forward.macs).sum()
    }

    /// The operators whose costs are not complete, as a sentence; `None` if all are known.
    #[must_use]
    pub fn gaps(&self) -> Option<String> {
        let list = |names: &BTreeMap<&str, u64>| {
            let names: Vec<&str> = names.keys().copied().collect();
            names.join(", ")
        };
        let count = |names: &BTreeMap<&str, u64>| names.values().sum::<u64>();
        let all = self.operators.len() as u64 + count(&self.without_size);
        let mut gaps = Vec::new();
        if !self.without_rule.is_empty() {
            gaps.push(format!(
                "{} of {all} operators have no rule, and are assumed to keep their arguments and to compute nothing: {}",
                count(&self.without_rule),
                list(&self.without_rule)
            ));
        }
        if !self.without_size.is_empty() {
            gaps.push(format!(
                "{} of {all} operators are not counted, because a size is not known: {}",
                count(&self.without_size),
                list(&self.without_size)
            ));
        }
        (!gaps.is_empty()).then(|| gaps.join("; "))
    }
}

impl Program {
    /// The costs of its operators. Images have sides of `image_side` pixels, if it is given and the program takes images;
    /// other sizes that the export left open are those of its example.
    ///
    /// # Errors
    /// The program takes images of another size.
    pub fn costs(
        &self,
        format: WorkingFormat,
        image_side: Option<u64>,
    ) -> Result<ProgramCosts<'_>, Error> {
        let image = image_side.zip(self.image_input());
        if let Some((side, _)) = image {
            self.check_image_side(side)?;
        }
        let mut walk =
            CostWalker::new(self, Shapes::new(&self.graph, image.map(|(side, _)| side)), format);
        let nodes = self.graph.nodes.iter();
        nodes.filter(|node| !computes_sizes(node)).for_each(|node| walk.node(node));
        Ok(walk.costs)
    }
}

/// Whether a node computes numbers on the host.
fn computes_sizes(node: &GraphNode) -> bool {
    ["_operator::", "aten::sym_"].iter().any(|prefix| node.operator.starts_with(prefix))
}

/// A tensor while the costs are collected.
#[derive(Clone, Copy, Debug)]
struct ValueState {
    /// Index of its memory.
    memory: usize,
    needs_gradient: bool,
    /// Whether autocast made it 16 bits wide.
    is_half: bool,
}

/// Memory that a tensor shares with its views.
#[derive(Clone, Copy, Debug)]
struct TensorMemory {
    bytes: Amount,
    /// Whether an operator keeps it already, or it exists during the whole training.
    is_kept: bool,
    /// The tensor that is not a view.
    base: ValueId,
}

/// An argument in the number format in which the operator reads it.
#[derive(Clone, Copy, Debug)]
struct Operand {
    value: ValueId,
    /// Index of its memory.
    memory: usize,
    bytes: Amount,
    /// Data moved by its conversion, bytes.
    converted: Amount,
}

/// Visits the operators in their order.
struct CostWalker<'a> {
    shapes: Shapes<'a>,
    format: WorkingFormat,
    values: Vec<Option<ValueState>>,
    memories: Vec<TensorMemory>,
    /// Copies of parameters in 16 bits, which autocast makes once in a pass.
    copies: BTreeMap<ValueId, Option<usize>>,
    costs: ProgramCosts<'a>,
}

/// Size of a 16-bit number.
const HALF_BYTES: u64 = 2;
/// Size of a mean, a deviation or a sum.
const STATISTIC_BYTES: u64 = 4;
/// Size of an index of max pooling.
const POOL_INDEX_BYTES: u64 = 8;

impl<'a> CostWalker<'a> {
    fn new(program: &'a Program, shapes: Shapes<'a>, format: WorkingFormat) -> Self {
        let Program { graph, parameters, .. } = program;
        let mut walk = Self {
            shapes,
            format,
            values: vec![None; graph.values as usize],
            memories: Vec::new(),
            copies: BTreeMap::new(),
            costs: ProgramCosts {
                operators: Vec::new(),
                without_rule: BTreeMap::new(),
                without_size: BTreeMap::new(),
            },
        };
        walk.inputs(graph, |index| {
            parameters.get(index).is_some_and(|parameter| parameter.requires_grad)
        });
        walk
    }

    fn inputs(&mut self, graph: &Graph, is_trained: impl Fn(usize) -> bool) {
        for (value, source) in &graph.inputs {
            let bytes = self.shapes.get(*value).map(TensorShape::bytes).unwrap_or_default();
            // Only a batch can become an activation.
            let memory = self.memory(bytes, !matches!(source, InputSource::Input(_)), *value);
            let mut needs_gradient = false;
            if let InputSource::Parameter(index) = source {
                needs_gradient = is_trained(*index);
                self.copies.insert(*value, None);
            }
            self.set(*value, ValueState { memory, needs_gradient, is_half: false });
        }
    }

    fn memory(&mut self, bytes: Amount, is_kept: bool, base: ValueId) -> usize {
        self.memories.push(TensorMemory { bytes, is_kept, base });
        self.memories.len() - 1
    }

    fn set(&mut self, value: ValueId, state: ValueState) {
        if let Some(found) = self.values.get_mut(value.0 as usize) {
            *found = Some(state);
        }
    }

    fn state(&self, value: ValueId) -> Option<ValueState> {
        self.values.get(value.0 as usize).copied().flatten()
    }

    fn needs_gradient(&self, value: ValueId) -> bool {
        self.state(value).is_some_and(|state| state.needs_gradient)
    }

    fn len(&self, value: ValueId) -> Amount {
        self.shapes.get(value).map(|shape| shape.len).unwrap_or_default()
    }

    fn bytes(&self, value: ValueId) -> Amount {
        match self.state(value) {
            Some(state) if state.is_half => self.len(value).times(HALF_BYTES),
            _ => self.shapes.get(value).map(TensorShape::bytes).unwrap_or_default(),
        }
    }

    /// The tensors of an argument.
    fn named(&self, node: &GraphNode, name: &str) -> Vec<ValueId> {
        node.argument(name).map(Argument::values).unwrap_or_default()
    }

    fn shape(&self, node: &GraphNode, name: &str) -> Option<&TensorShape> {
        self.shapes.get(*self.named(node, name).first()?)
    }

    fn node(&mut self, node: &'a GraphNode) {
        let rule = OperatorRule::of(node).unwrap_or_else(|| {
            *self.costs.without_rule.entry(&node.operator).or_default() += 1;
            OperatorRule::UNKNOWN
        });
        match self.cost(node, rule) {
            Some(cost) => self.costs.operators.push(cost),
            None => *self.costs.without_size.entry(&node.operator).or_default() += 1,
        }
    }

    /// `None` if a size is not known.
    fn cost(&mut self, node: &'a GraphNode, rule: OperatorRule) -> Option<OperatorCost<'a>> {
        let name = base_name(&node.operator);
        // Numbers have no state.
        let mut inputs = node.uses();
        inputs.retain(|value| self.state(*value).is_some());
        let needs_gradient = node.has_gradient
            && name != "detach"
            && inputs.iter().any(|input| self.needs_gradient(*input));
        let results: Vec<ValueId> = node.makes().collect();
        let is_view = self.results(node, rule, &inputs, &results, needs_gradient)?;
        let mut cost = OperatorCost {
            node,
            kind: rule.kind,
            forward: PassWork::default(),
            backward: PassWork::default(),
            evaluation: PassWork::default(),
            kept: Amount::default(),
            outputs: results.iter().map(|result| self.len(*result)).sum(),
        };
        if is_view {
            return Some(cost);
        }
        inputs.sort_unstable();
        inputs.dedup();
        let operands: Vec<Operand> =
            inputs.iter().filter_map(|input| self.operand(*input, node)).collect();
        let sum = |bytes: fn(&Operand) -> Amount| operands.iter().map(bytes).sum::<Amount>();
        let (read, converted) = (sum(|operand| operand.bytes), sum(|operand| operand.converted));
        let written: Amount = results.iter().map(|result| self.bytes(*result)).sum();
        let moved = read.plus(written);
        let macs = self.macs(node, rule, *results.first()?)?;
        let is_norm = rule.kind == OperatorKind::BatchNorm;
        // Statistics first, then the normalisation.
        let reread = if is_norm { read } else { Amount::default() };
        cost.forward = PassWork { macs, bytes: moved.plus(converted).plus(reread), launches: 1 };
        if !rule.saved.contains(&Saved::Mask) {
            cost.evaluation = PassWork { macs, bytes: moved.plus(converted), launches: 1 };
        }
        if !needs_gradient {
            return Some(cost);
        }
        let saved = self.keep(node, rule, &operands, &results)?;
        cost.kept = saved.new;
        let needing = operands.iter().filter(|operand| self.needs_gradient(operand.value));
        let gradients: Amount = needing.map(|operand| operand.bytes).sum();
        let products = self.products(node, rule);
        cost.backward = match rule.kind {
            OperatorKind::Convolution | OperatorKind::Linear | OperatorKind::MatrixProduct => {
                let (macs, bytes) = (macs.times(products), moved.times(products));
                PassWork { macs, bytes, launches: products }
            }
            // Attention computes the first of its two products again, and four gradients (Dao et al. 2022).
            OperatorKind::Attention => {
                PassWork { macs: macs.times(5).over(2), bytes: moved.times(2), launches: 1 }
            }
            OperatorKind::Recurrent => {
                PassWork { macs: macs.times(2), bytes: moved.times(2), launches: 1 }
            }
            _ => {
                let reread = if is_norm { saved.all.plus(written) } else { Amount::default() };
                let bytes = written.plus(saved.all).plus(gradients).plus(reread);
                PassWork { bytes, launches: 1, ..PassWork::default() }
            }
        };
        Some(cost)
    }

    /// Gives each result its memory; returns whether all of them are views. `None` if a size is not known.
    fn results(
        &mut self,
        node: &GraphNode,
        rule: OperatorRule,
        inputs: &[ValueId],
        results: &[ValueId],
        needs_gradient: bool,
    ) -> Option<bool> {
        let is_half = self.is_half_result(node, inputs);
        let first = node.overwrites().or_else(|| inputs.first().copied());
        let (mut is_view, mut is_known) = (!rule.is_in_place, true);
        for result in results {
            let Some(shape) = self.shapes.get(*result) else {
                is_known = false;
                let memory = self.memory(Amount::default(), true, *result);
                self.set(*result, ValueState { memory, needs_gradient, is_half });
                continue;
            };
            let (dtype, len) = (shape.dtype, shape.len);
            let is_float = matches!(dtype, Dtype::F16 | Dtype::F32 | Dtype::F64 | Dtype::Bf16);
            let needs_gradient = needs_gradient && is_float;
            let viewed = first.filter(|first| self.is_viewed(rule, *first, shape));
            if let Some(state) = viewed.and_then(|viewed| self.state(viewed)) {
                self.set(*result, ValueState { needs_gradient, ..state });
                if rule.is_in_place && needs_gradient {
                    self.pass_gradient(first, state.memory);
                }
                continue;
            }
            is_view = false;
            let is_half = is_half && dtype == Dtype::F32;
            let bytes = if is_half { HALF_BYTES } else { dtype.bytes() };
            let memory = self.memory(len.times(bytes), false, *result);
            self.set(*result, ValueState { memory, needs_gradient, is_half });
        }
        is_known.then_some(is_view)
    }

    /// What is written into a view becomes part of the whole tensor.
    fn pass_gradient(&mut self, view: Option<ValueId>, memory: usize) {
        let base = self.memories.get(memory).map(|memory| memory.base);
        for value in view.into_iter().chain(base) {
            if let Some(state) = self.state(value) {
                self.set(value, ValueState { needs_gradient: true, ..state });
            }
        }
    }

    /// Whether a result shares the memory of the first tensor.
    fn is_viewed(&self, rule: OperatorRule, first: ValueId, result: &TensorShape) -> bool {
        let Some(source) = self.shapes.get(first) else { return false };
        match rule.storage {
            _ if rule.is_in_place => true,
            Storage::New => false,
            Storage::View => true,
            // A copy is contiguous.
            Storage::Reshaped => source.is_contiguous() || !result.is_contiguous(),
            Storage::Converted => source.dtype == result.dtype && source.strides == result.strides,
        }
    }

    fn autocast(&self, node: &GraphNode) -> AutocastRule {
        match self.format {
            WorkingFormat::Half if node.is_autocast => AutocastRule::of(base_name(&node.operator)),
            _ => AutocastRule::Widest,
        }
    }

    fn is_half_result(&self, node: &GraphNode, inputs: &[ValueId]) -> bool {
        let is_float = |value: &ValueId| {
            let shape = self.shapes.get(*value);
            shape.is_some_and(|shape| shape.dtype == Dtype::F32 && !shape.sizes.is_empty())
        };
        let is_half = |value: ValueId| self.state(value).is_some_and(|state| state.is_half);
        let mut floats = inputs.iter().copied().filter(is_float);
        match self.autocast(node) {
            AutocastRule::Half => true,
            AutocastRule::Single | AutocastRule::SingleResult => false,
            AutocastRule::First => floats.next().is_some_and(is_half),
            AutocastRule::Widest => floats.next().is_some_and(is_half) && floats.all(is_half),
        }
    }

    /// The argument as the operator reads it: a copy where autocast converts it, or where matrices of several batch axes
    /// are not in order.
    fn operand(&mut self, value: ValueId, node: &GraphNode) -> Option<Operand> {
        let (state, shape) = (self.state(value)?, self.shapes.get(value)?);
        let (dtype, len) = (shape.dtype, shape.len);
        let bytes = self.bytes(value);
        let value_bytes = match (self.autocast(node), state.is_half) {
            (AutocastRule::Half, false) if dtype == Dtype::F32 => HALF_BYTES,
            (AutocastRule::Single, true) => dtype.bytes(),
            (_, is_half) if node.operator == "aten::matmul" && !shape.has_one_batch() => {
                if is_half { HALF_BYTES } else { dtype.bytes() }
            }
            _ => {
                let converted = Amount::default();
                return Some(Operand { value, memory: state.memory, bytes, converted });
            }
        };
        let (read, bytes) = (bytes, len.times(value_bytes));
        let copy = self.copies.get(&value).copied();
        if let Some(Some(memory)) = copy {
            return Some(Operand { value, memory, bytes, converted: Amount::default() });
        }
        let memory = self.memory(bytes, false, value);
        if copy.is_some() {
            self.copies.insert(value, Some(memory));
        }
        Some(Operand { value, memory, bytes, converted: read.plus(bytes) })
    }

    /// Keeps what the backward pass of an operator needs. `None` if a size is not known.
    fn keep(
        &mut self,
        node: &GraphNode,
        rule: OperatorRule,
        operands: &[Operand],
        results: &[ValueId],
    ) -> Option<SavedBytes> {
        let mut bytes = SavedBytes::default();
        let overwritten = node.overwrites();
        for saved in rule.saved {
            let mut values = match saved {
                Saved::Argument(name) => self.named(node, name),
                Saved::Arguments => operands.iter().map(|operand| operand.value).collect(),
                Saved::Factor(name, other) if self.is_any_needing(node, other) => {
                    self.named(node, name)
                }
                Saved::Factor(..) => Vec::new(),
                Saved::Result(index) => {
                    // Overloads without indices keep nothing.
                    let Some(result) = results.get(*index) else { continue };
                    let memory = self.state(*result)?.memory;
                    bytes.add(self.keep_memory(memory), self.bytes(*result));
                    continue;
                }
                counted => {
                    let counted = self.counted(*counted, node, *results.first()?)?;
                    bytes.add(counted, counted);
                    continue;
                }
            };
            values.sort_unstable();
            let is_named = |operand: &&Operand| values.binary_search(&operand.value).is_ok();
            for operand in operands.iter().filter(is_named) {
                // An operator that overwrites its argument keeps a copy.
                let new = match overwritten == Some(operand.value) {
                    true => operand.bytes,
                    false => self.keep_memory(operand.memory),
                };
                bytes.add(new, operand.bytes);
            }
        }
        Some(bytes)
    }

    /// The bytes that are kept from now on.
    fn keep_memory(&mut self, memory: usize) -> Amount {
        let Some(memory) = self.memories.get_mut(memory) else { return Amount::default() };
        let was_kept = std::mem::replace(&mut memory.is_kept, true);
        if was_kept { Amount::default() } else { memory.bytes }
    }

    fn is_any_needing(&self, node: &GraphNode, name: &str) -> bool {
        self.named(node, name).iter().any(|value| self.needs_gradient(*value))
    }

    /// Bytes of what an operator computes for its backward pass besides its results.
    fn counted(&self, saved: Saved, node: &GraphNode, result: ValueId) -> Option<Amount> {
        let values = self.len(result);
        let input = self.shape(node, "input");
        let axis = |index: usize| input.and_then(|input| input.sizes.get(index).copied());
        let pairs = match saved {
            Saved::Mask => return Some(values),
            Saved::Indices => return Some(values.times(POOL_INDEX_BYTES)),
            Saved::RowSums => {
                let row = self.shape(node, "value")?.trailing_axis(0).fixed;
                return Some(values.over(row).times(STATISTIC_BYTES));
            }
            Saved::Gates => {
                // Two matrices per direction of a layer have a row for each gate; states need half as much as gates.
                let rows: u64 =
                    self.matrices(node).map(|matrix| matrix.trailing_axis(1).fixed).sum();
                let value_bytes = match self.autocast(node) {
                    AutocastRule::Half => HALF_BYTES,
                    _ => Dtype::F32.bytes(),
                };
                return Some(self.sequence(node)?.times(rows).times(value_bytes).times(3).over(4));
            }
            Saved::ChannelStatistics => axis(1)?,
            Saved::GroupStatistics => match node.argument("num_groups") {
                Some(Argument::Int(groups)) => axis(0)?.times(u64::try_from(*groups).ok()?),
                // Each channel is a group.
                _ => axis(0)?.product(axis(1)?)?,
            },
            Saved::RowStatistics => {
                let axes = match node.argument("normalized_shape") {
                    Some(Argument::List(axes)) => axes.len(),
                    _ => 1,
                };
                let input = input?;
                input.len.over(input.inner(input.sizes.len().saturating_sub(axes))?)
            }
            Saved::Argument(_) | Saved::Arguments | Saved::Factor(..) | Saved::Result(_) => {
                Amount::default()
            }
        };
        // A mean and a deviation.
        Some(pairs.times(2 * STATISTIC_BYTES))
    }

    /// Number of gradients that are products of matrices.
    fn products(&self, node: &GraphNode, rule: OperatorRule) -> u64 {
        let needing = |saved: &Saved| match saved {
            Saved::Factor(_, other) => u64::from(self.is_any_needing(node, other)),
            Saved::Argument(name) => {
                let values = self.named(node, name);
                values.iter().filter(|value| self.needs_gradient(**value)).count() as u64
            }
            _ => 0,
        };
        rule.saved.iter().map(needing).sum()
    }

    /// Multiply-add operations of a forward pass. `None` if a size is not known.
    fn macs(&self, node: &GraphNode, rule: OperatorRule, result: ValueId) -> Option<Amount> {
        let values = self.len(result);
        match rule.kind {
            OperatorKind::Convolution => {
                let per_value = self.shape(node, "weight")?.inner(1)?;
                let is_transposed = node.operator.contains("transpose")
                    || node.argument("transposed") == Some(&Argument::Bool(true));
                // A transposed convolution spreads each value of its input.
                let values = if is_transposed { self.shape(node, "input")?.len } else { values };
                Some(values.times(per_value))
            }
            OperatorKind::Linear | OperatorKind::MatrixProduct => match rule.saved.first()? {
                Saved::Factor(rows, _) => self.shape(node, rows)?.trailing_axis(0).product(values),
                _ => self.einsum(node),
            },
            OperatorKind::Attention => {
                let keys = self.shape(node, "key")?.trailing_axis(1);
                self.shape(node, "query")?.len.plus(values).product(keys)
            }
            OperatorKind::Recurrent => {
                let weights = self.matrices(node).map(|matrix| matrix.len.fixed);
                let weights = weights.fold(0, u64::saturating_add);
                Some(self.sequence(node)?.times(weights))
            }
            _ => Some(Amount::default()),
        }
    }

    /// Product of all axes of an equation such as `bij,bjk->bik`.
    fn einsum(&self, node: &GraphNode) -> Option<Amount> {
        let Some(Argument::Text(equation)) = node.argument("equation") else { return None };
        let (terms, _) = equation.split_once("->")?;
        let tensors = self.named(node, "tensors");
        let mut axes: BTreeMap<char, Amount> = BTreeMap::new();
        for (term, tensor) in terms.split(',').zip(tensors) {
            let letters: Vec<char> =
                term.chars().filter(|letter| !letter.is_whitespace()).collect();
            let sizes = &self.shapes.get(tensor)?.sizes;
            if letters.len() != sizes.len() {
                return None;
            }
            axes.extend(letters.into_iter().zip(sizes.iter().copied()));
        }
        axes.values().try_fold(Amount::fixed(1), |product, size| product.product(*size))
    }

    /// The matrices of a recurrent layer.
    fn matrices(&self, node: &GraphNode) -> impl Iterator<Item = &TensorShape> {
        let parameters = self.named(node, "params").into_iter();
        parameters
            .filter_map(|parameter| self.shapes.get(parameter))
            .filter(|shape| shape.sizes.len() == 2)
    }

    /// Number of vectors in the input of a recurrent layer.
    fn sequence(&self, node: &GraphNode) -> Option<Amount> {
        let input = self.shape(node, "input")?;
        Some(input.len.over(input.trailing_axis(0).fixed))
    }
}

/// Sizes of what an operator keeps, bytes.
#[derive(Clone, Copy, Debug, Default)]
struct SavedBytes {
    /// What no earlier operator keeps.
    new: Amount,
    all: Amount,
}

impl SavedBytes {
    fn add(&mut self, new: Amount, all: Amount) {
        self.new = self.new.plus(new);
        self.all = self.all.plus(all);
    }
}
