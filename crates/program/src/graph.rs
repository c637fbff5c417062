//! The graph of a program as a list of operators, with nested graphs put in place.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use crate::{
    rules::{OperatorKind, OperatorRule, Storage},
    schema::{self, TensorMeta},
    tensor::Dtype,
};

/// Index of a value: an input of the graph, or a result of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// A list of operators; each uses only values of the inputs and of earlier nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// Number of values.
    pub values: u32,
    /// Values that exist before the first node.
    pub inputs: Vec<(ValueId, InputSource)>,
    /// The operators in the order of execution.
    pub nodes: Vec<GraphNode>,
    /// What the program returns.
    pub outputs: Vec<ValueId>,
    /// Types and shapes as the file describes them.
    pub(crate) tensors: TensorTable,
}

/// The descriptions of a graph's tensors. Several values may share one, so that a short file cannot have many long ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TensorTable {
    /// The descriptions in the file.
    pub(crate) metas: Vec<TensorMeta>,
    /// Index into `metas` by value; `None` for numbers, and where the file has no description.
    pub(crate) of_value: Vec<Option<u32>>,
}

/// What an input of a graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputSource {
    /// A parameter of the program, by index.
    Parameter(usize),
    /// A mean or variance of BatchNorm, by index.
    Statistic(usize),
    /// A tensor that nothing changes, by index.
    Constant(usize),
    /// An input of a batch, by index.
    Input(usize),
}

/// A call of an operator.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphNode {
    /// Namespace and name, e.g. `aten::conv2d`; `_operator::mul` for arithmetic of sizes.
    pub operator: String,
    /// Overload, often empty.
    pub overload: String,
    /// Arguments. Those that are missing have the operator's default.
    pub arguments: Vec<NodeArgument>,
    /// Where each result is kept.
    pub results: Vec<NodeResult>,
    /// Whether gradients flow through it.
    pub has_gradient: bool,
    /// Whether autocast may choose its number format.
    pub is_autocast: bool,
    /// Values that no later node uses.
    pub last_uses: Vec<ValueId>,
    /// Where it comes from, for messages.
    pub location: CodeLocation,
}

/// An argument of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeArgument {
    /// Name in the operator's schema; empty if it has none, and is given by position.
    pub name: String,
    /// Its value.
    pub value: Argument,
}

/// The value of an argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// A value of the graph.
    Value(ValueId),
    /// Nothing.
    None,
    /// An integer.
    Int(i64),
    /// A number.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// Several arguments.
    List(Vec<Argument>),
    /// A number format.
    Dtype(Dtype),
    /// A memory format.
    MemoryFormat(MemoryFormat),
    /// The layout of ordinary tensors.
    Strided,
    /// The device of the computation.
    Device,
}

/// Order of a tensor's elements in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFormat {
    /// The last axis is contiguous.
    Contiguous,
    /// Channels of images are contiguous.
    ChannelsLast,
    /// Channels of volumes are contiguous.
    ChannelsLast3d,
    /// That of the input.
    Preserve,
}

/// A result of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeResult {
    /// Nobody uses it.
    Unused,
    /// One value.
    One(ValueId),
    /// The elements of a list.
    Many(Vec<ValueId>),
}

/// Where a node comes from in the user's code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodeLocation {
    /// Name of the node in the exported graph.
    pub node: String,
    /// Path of the module, e.g. `layer1.0.conv1`; empty for the outermost.
    pub module: String,
    /// File and line of the Python code; empty if the file does not say.
    pub line: String,
}

impl fmt::Display for CodeLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.node)?;
        if !self.module.is_empty() {
            write!(f, " of {}", self.module)?;
        }
        if !self.line.is_empty() {
            write!(f, " ({})", self.line)?;
        }
        Ok(())
    }
}

impl Argument {
    /// The values of the graph in it, in their order.
    pub(crate) fn values(&self) -> Vec<ValueId> {
        match self {
            Self::Value(value) => vec![*value],
            Self::List(list) => list.iter().flat_map(Self::values).collect(),
            _ => Vec::new(),
        }
    }
}

impl TensorTable {
    pub(crate) fn get(&self, value: ValueId) -> Option<&TensorMeta> {
        let index = (*self.of_value.get(value.0 as usize)?)?;
        self.metas.get(index as usize)
    }
}

impl GraphNode {
    /// The argument with this name.
    #[must_use]
    pub fn argument(&self, name: &str) -> Option<&Argument> {
        self.arguments.iter().find(|argument| argument.name == name).map(|named| &named.value)
    }

    pub(crate) fn argument_mut(&mut self, name: &str) -> Option<&mut Argument> {
        let mut arguments = self.arguments.iter_mut();
        arguments.find(|argument| argument.name == name).map(|named| &mut named.value)
    }

    /// All values that it uses, in the order of its arguments.
    pub fn uses(&self) -> Vec<ValueId> {
        self.arguments.iter().flat_map(|argument| argument.value.values()).collect()
    }

    /// The value that it changes: by PyTorch's convention, the argument `out`, or the first of an operator whose name
    /// ends with `_`.
    pub(crate) fn overwrites(&self) -> Option<ValueId> {
        if let Some(Argument::Value(out)) = self.argument("out") {
            return Some(*out);
        }
        // `__and__` changes nothing.
        let is_in_place = self.operator.ends_with('_') && !self.operator.ends_with("__");
        self.uses().first().copied().filter(|_| is_in_place)
    }

    /// All values that it makes.
    pub fn makes(&self) -> impl Iterator<Item = ValueId> {
        self.results
            .iter()
            .flat_map(|result| match result {
                NodeResult::Unused => &[],
                NodeResult::One(value) => std::slice::from_ref(value),
                NodeResult::Many(values) => values.as_slice(),
            })
            .copied()
    }
}

impl Graph {
    /// Lists for each node the values that no later one uses.
    pub(crate) fn set_last_uses(&mut self) {
        let mut is_used = vec![false; self.values as usize];
        for output in &self.outputs {
            if let Some(used) = is_used.get_mut(output.0 as usize) {
                *used = true;
            }
        }
        for node in self.nodes.iter_mut().rev() {
            node.last_uses.clear();
            let values: Vec<ValueId> = node.uses().into_iter().chain(node.makes()).collect();
            for value in values {
                if let Some(used) = is_used.get_mut(value.0 as usize)
                    && !std::mem::replace(used, true)
                {
                    node.last_uses.push(value);
                }
            }
        }
    }

    /// The parameters that are weights of convolutions and linear layers, except that of the last one, by index.
    pub(crate) fn hidden_weights(&self) -> BTreeSet<usize> {
        let inputs: BTreeMap<ValueId, InputSource> = self.inputs.iter().copied().collect();
        let weight = |node: &GraphNode| {
            let kind = OperatorRule::of(node)?.kind;
            let Argument::Value(value) = node.argument("weight")? else { return None };
            match (kind, inputs.get(value)?) {
                (
                    OperatorKind::Linear | OperatorKind::Convolution,
                    InputSource::Parameter(index),
                ) => Some(*index),
                _ => None,
            }
        };
        let weights: Vec<usize> = self.nodes.iter().filter_map(weight).collect();
        let last = weights.last();
        weights.iter().filter(|index| Some(*index) != last).copied().collect()
    }

    /// The first node that changes a value of which `kept` gives something, or a view of it. What may or may not be a
    /// view is taken for a copy: the trainer compares the versions of tensors too.
    pub(crate) fn find_change<T>(
        &self,
        kept: impl Fn(ValueId) -> Option<T>,
    ) -> Option<(&GraphNode, T)> {
        let mut base: Vec<ValueId> = (0..self.values).map(ValueId).collect();
        for node in &self.nodes {
            let overwritten = node.overwrites();
            let seen = overwritten.or_else(|| node.uses().first().copied());
            let Some(seen) = seen.and_then(|value| base.get(value.0 as usize).copied()) else {
                continue;
            };
            let is_view = OperatorRule::of(node).is_some_and(|rule| rule.storage == Storage::View);
            if overwritten.is_some() || is_view {
                node.makes().for_each(|value| base[value.0 as usize] = seen);
            }
            // These change how autograd sees it, not its values.
            let keeps_values =
                ["aten::detach_", "aten::requires_grad_"].contains(&node.operator.as_str());
            if let (Some(_), false, Some(found)) = (overwritten, keeps_values, kept(seen)) {
                return Some((node, found));
            }
        }
        None
    }

    /// Number of uses of each value by nodes.
    pub(crate) fn use_counts(&self) -> Vec<u32> {
        let mut counts = vec![0_u32; self.values as usize];
        for value in self.nodes.iter().flat_map(GraphNode::uses) {
            counts[value.0 as usize] += 1;
        }
        counts
    }
}

/// Puts nested graphs in place and numbers the values.
pub(crate) struct Flattener {
    pub(crate) values: u32,
    pub(crate) nodes: Vec<GraphNode>,
    pub(crate) tensors: TensorTable,
}

/// The values of a graph by name, and its first description in [`TensorTable::metas`].
#[derive(Default)]
pub(crate) struct Scope {
    values: BTreeMap<String, ValueId>,
    metas: BTreeMap<String, u32>,
}

impl Scope {
    pub(crate) fn get(&self, name: &str) -> Option<ValueId> {
        self.values.get(name).copied()
    }

    fn insert(&mut self, name: String, value: ValueId) {
        self.values.insert(name, value);
    }
}

/// Settings of the surrounding graphs.
#[derive(Clone, Copy)]
pub(crate) struct FlattenSettings {
    has_gradient: bool,
    is_autocast: bool,
}

impl FlattenSettings {
    pub(crate) const OUTERMOST: Self = Self { has_gradient: true, is_autocast: true };
}

/// Operators that check something at run time and compute nothing. Sizes that do not fit are found by the operators
/// that use them, and those of number formats do not hold under autocast.
const CHECKS: [&str; 6] = [
    "aten::_assert_scalar",
    "aten::_assert_async",
    "aten::_assert_tensor_metadata",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
    "aten::_functional_assert_scalar",
];

/// Arithmetic of sizes, which the executor computes itself.
const SIZE_OPERATORS: [&str; 17] = [
    "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "eq", "ne", "lt", "le",
    "gt", "ge", "sym_max", "sym_min",
];

impl Flattener {
    pub(crate) fn new() -> Self {
        Self { values: 0, nodes: Vec::new(), tensors: TensorTable::default() }
    }

    /// The scope of `graph`, still without values.
    pub(crate) fn scope(&mut self, graph: &schema::Graph) -> Scope {
        let mut scope = Scope::default();
        for ((name, meta), index) in graph.tensor_values.iter().zip(self.tensors.metas.len()..) {
            // More than four billion do not fit into memory.
            scope.metas.extend(u32::try_from(index).ok().map(|index| (name.clone(), index)));
            self.tensors.metas.push(meta.clone());
        }
        scope
    }

    /// A new value with this name.
    pub(crate) fn value(&mut self, name: &str, scope: &mut Scope) -> ValueId {
        self.tensors.of_value.push(scope.metas.get(name).copied());
        self.values += 1;
        let value = ValueId(self.values - 1);
        scope.insert(name.to_owned(), value);
        value
    }

    pub(crate) fn add(
        &mut self,
        graph: &schema::Graph,
        scope: &mut Scope,
        settings: FlattenSettings,
    ) -> Result<(), String> {
        for node in &graph.nodes {
            let location = location(node);
            let added = match node.target.strip_prefix("torch.ops.higher_order.") {
                Some(name) => self.add_nested(name, node, scope, settings),
                None => self.add_node(node, scope, settings, &location),
            };
            added.map_err(|problem| format!("{location}: {problem}"))?;
        }
        Ok(())
    }

    fn add_node(
        &mut self,
        node: &schema::JsonNode,
        scope: &mut Scope,
        settings: FlattenSettings,
        location: &CodeLocation,
    ) -> Result<(), String> {
        let (operator, overload) = operator(&node.target)?;
        if CHECKS.contains(&operator.as_str()) {
            return Ok(());
        }
        let arguments = node.inputs.iter().map(|input| {
            Ok(NodeArgument { name: input.name.clone(), value: argument(&input.arg, scope)? })
        });
        let arguments = arguments.collect::<Result<_, String>>()?;
        let results = node.outputs.iter().map(|output| self.result(output, scope));
        let results = results.collect::<Result<_, String>>()?;
        self.nodes.push(GraphNode {
            operator,
            overload,
            arguments,
            results,
            has_gradient: settings.has_gradient,
            is_autocast: settings.is_autocast,
            last_uses: Vec::new(),
            location: location.clone(),
        });
        Ok(())
    }

    /// A graph that is called with other settings.
    fn add_nested(
        &mut self,
        name: &str,
        node: &schema::JsonNode,
        scope: &mut Scope,
        settings: FlattenSettings,
    ) -> Result<(), String> {
        let mut arguments = node.inputs.iter().map(|input| &input.arg);
        let settings = match name {
            "wrap_with_set_grad_enabled" => match arguments.next() {
                Some(schema::Argument::AsBool(has_gradient)) => {
                    FlattenSettings { has_gradient: *has_gradient, ..settings }
                }
                _ => return Err("has no flag for gradients: the file is damaged".to_owned()),
            },
            "wrap_with_autocast" => {
                // The type of device, the number format, whether it is enabled, and whether casts are kept.
                match (arguments.nth(2), arguments.next()) {
                    (Some(schema::Argument::AsBool(false)), Some(_)) => {
                        FlattenSettings { is_autocast: false, ..settings }
                    }
                    _ => {
                        return Err("enables autocast in the module: remove it and set \
                                    precision.compute in the recipe"
                            .to_owned());
                    }
                }
            }
            name => {
                return Err(format!(
                    "{name} is control flow that depends on data or a custom operator, which cannot be \
                     trained: express it with tensor operators such as torch.where"
                ));
            }
        };
        let Some(schema::Argument::AsGraph(nested)) = arguments.next() else {
            return Err("has no nested graph: the file is damaged".to_owned());
        };
        let mut inner = self.scope(&nested.graph);
        for (input, outer) in nested.graph.inputs.iter().zip(arguments) {
            match argument(outer, scope)? {
                Argument::Value(value) => inner.insert(name_of(input)?, value),
                _ => return Err("gives a constant to a nested graph".to_owned()),
            };
        }
        self.add(&nested.graph, &mut inner, settings)?;
        let outer = node.outputs.iter().flat_map(|output| match output {
            schema::Argument::AsTensors(names) => {
                names.iter().map(|name| Ok(name.name.clone())).collect()
            }
            output => vec![name_of(output)],
        });
        for (outer, result) in outer.zip(&nested.graph.outputs) {
            let Argument::Value(value) = argument(result, &inner)? else {
                return Err("returns a constant from a nested graph".to_owned());
            };
            scope.insert(outer?, value);
        }
        Ok(())
    }

    fn result(
        &mut self,
        output: &schema::Argument,
        scope: &mut Scope,
    ) -> Result<NodeResult, String> {
        let mut new = |name: &str| self.value(name, scope);
        Ok(match output {
            schema::Argument::AsNone(_) => NodeResult::Unused,
            schema::Argument::AsOptionalTensor(schema::OptionalTensor::AsNone(_)) => {
                NodeResult::Unused
            }
            schema::Argument::AsTensors(names) => {
                NodeResult::Many(names.iter().map(|name| new(&name.name)).collect())
            }
            output => NodeResult::One(new(&name_of(output)?)),
        })
    }
}

/// `aten::add_` and `Tensor`, from `torch.ops.aten.add_.Tensor`.
fn operator(target: &str) -> Result<(String, String), String> {
    if let Some(path) = target.strip_prefix("torch.ops.") {
        let mut parts = path.splitn(3, '.');
        if let (Some(namespace), Some(name)) = (parts.next(), parts.next()) {
            if namespace != "aten" {
                return Err(format!(
                    "operator {namespace}::{name} is a custom one, not PyTorch's: write it with PyTorch's \
                     operators"
                ));
            }
            if matches!(name, "item" | "_local_scalar_dense") {
                return Err("a number is read from a tensor (.item() or a comparison in Python), so that the \
                            computation depends on data: keep it in tensors"
                    .to_owned());
            }
            let overload = parts.next().filter(|overload| *overload != "default");
            return Ok((format!("{namespace}::{name}"), overload.unwrap_or_default().to_owned()));
        }
    }
    let arithmetic = target.strip_prefix("_operator.").or_else(|| target.strip_prefix("torch."));
    match arithmetic {
        Some(name) if SIZE_OPERATORS.contains(&name) => {
            Ok((format!("_operator::{name}"), String::new()))
        }
        _ => Err(format!("{target} is not supported: express it with tensor operators")),
    }
}

fn name_of(argument: &schema::Argument) -> Result<String, String> {
    use schema::{Argument as A, Symbol};
    match argument {
        A::AsTensor(name) | A::AsOptionalTensor(schema::OptionalTensor::AsTensor(name)) => {
            Ok(name.name.clone())
        }
        A::AsSymInt(Symbol::AsName(name))
        | A::AsSymFloat(Symbol::AsName(name))
        | A::AsSymBool(Symbol::AsName(name)) => Ok(name.clone()),
        _ => Err("has a result that is neither a tensor nor a size".to_owned()),
    }
}

fn argument(argument: &schema::Argument, scope: &Scope) -> Result<Argument, String> {
    use schema::Argument as A;
    let value = |name: &str| {
        let value = scope.get(name).map(Argument::Value);
        value.ok_or_else(|| {
            format!("uses {name}, which no node before it makes: the file is damaged")
        })
    };
    let optional = |tensor: &schema::OptionalTensor| match tensor {
        schema::OptionalTensor::AsTensor(name) => value(&name.name),
        schema::OptionalTensor::AsNone(_) => Ok(Argument::None),
    };
    fn list<T>(
        items: &[T],
        each: impl FnMut(&T) -> Result<Argument, String>,
    ) -> Result<Argument, String> {
        items.iter().map(each).collect::<Result<_, _>>().map(Argument::List)
    }
    fn symbol<T>(
        symbol: &schema::Symbol<T>,
        value: impl Fn(&str) -> Result<Argument, String>,
        constant: impl Fn(&T) -> Result<Argument, String>,
    ) -> Result<Argument, String> {
        match symbol {
            schema::Symbol::AsName(name) => value(name),
            schema::Symbol::AsInt(number) => constant(number),
        }
    }
    let int = |number: &i64| Ok(Argument::Int(*number));
    let truth = |truth: &bool| Ok(Argument::Bool(*truth));
    match argument {
        A::AsNone(_) => Ok(Argument::None),
        A::AsTensor(name) => value(&name.name),
        A::AsTensors(names) => list(names, |name| value(&name.name)),
        A::AsOptionalTensor(tensor) => optional(tensor),
        A::AsOptionalTensors(tensors) => list(tensors, optional),
        A::AsInt(number) => int(number),
        A::AsInts(numbers) => list(numbers, int),
        A::AsFloat(number) => float(number),
        A::AsFloats(numbers) => list(numbers, float),
        A::AsBool(flag) => truth(flag),
        A::AsBools(flags) => list(flags, truth),
        A::AsString(text) => Ok(Argument::Text(text.clone())),
        A::AsSymInt(size) => symbol(size, value, int),
        A::AsSymInts(sizes) => list(sizes, |size| symbol(size, value, int)),
        A::AsSymFloat(number) => symbol(number, value, float),
        A::AsSymFloats(numbers) => list(numbers, |number| symbol(number, value, float)),
        A::AsSymBool(flag) => symbol(flag, value, truth),
        A::AsSymBools(flags) => list(flags, |flag| symbol(flag, value, truth)),
        A::AsScalarType(number) => Dtype::of(*number)
            .map(Argument::Dtype)
            .ok_or_else(|| format!("has number format {number}, which is not supported")),
        A::AsMemoryFormat(number) => Ok(Argument::MemoryFormat(match number {
            2 => MemoryFormat::ChannelsLast,
            3 => MemoryFormat::ChannelsLast3d,
            4 => MemoryFormat::Preserve,
            _ => MemoryFormat::Contiguous,
        })),
        // 7 is torch.strided.
        A::AsLayout(7) => Ok(Argument::Strided),
        A::AsLayout(_) => Err("makes a sparse tensor, which is not supported".to_owned()),
        A::AsDevice(_) => Ok(Argument::Device),
        A::AsNestedTensors(_)
        | A::AsStrings(_)
        | A::AsGraph(_)
        | A::AsCustomObj(_)
        | A::AsOperator(_)
        | A::AsComplex(_)
        | A::AsIntLists(_)
        | A::AsStringToArgument(_) => {
            Err("has an argument of a type that is not supported".to_owned())
        }
    }
}

fn float(number: &schema::JsonFloat) -> Result<Argument, String> {
    match number {
        schema::JsonFloat::Number(number) => Ok(Argument::Float(*number)),
        schema::JsonFloat::Name(name) => match name.as_str() {
            "Infinity" => Ok(Argument::Float(f64::INFINITY)),
            "-Infinity" => Ok(Argument::Float(f64::NEG_INFINITY)),
            "NaN" => Ok(Argument::Float(f64::NAN)),
            _ => Err(format!("{name:?} is not a number")),
        },
    }
}

/// The innermost module, and the last line of code that is not PyTorch's.
fn location(node: &schema::JsonNode) -> CodeLocation {
    let metadata = |key: &str| node.metadata.get(key).map_or("", String::as_str);
    // Entries are `key,path,type`.
    let entry = metadata("nn_module_stack").rsplit(';').next();
    let module = entry.and_then(|entry| entry.split(',').nth(1)).unwrap_or_default();
    let is_placeholder = module.starts_with("_empty_nn_module_stack");
    let mut frames = metadata("stack_trace").lines().filter_map(|line| {
        let (file, rest) = line.trim().strip_prefix("File \"")?.split_once("\", line ")?;
        let (line, _) = rest.split_once(',')?;
        Some((file, line))
    });
    let frame = frames.rfind(|(file, _)| !file.contains("/site-packages/torch/"));
    let line = frame.map(|(file, line)| {
        let file = file.rsplit('/').next().unwrap_or(file);
        format!("{file}, line {line}")
    });
    let target = || node.target.clone();
    CodeLocation {
        node: node.name.clone().filter(|name| !name.is_empty()).unwrap_or_else(target),
        module: if is_placeholder { String::new() } else { module.to_owned() },
        line: line.unwrap_or_default(),
    }
}
