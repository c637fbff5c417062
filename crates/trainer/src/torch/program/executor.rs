//! A graph prepared for libtorch: the Rust side of executor.cpp and recompute.cpp.

use std::{
    ffi::{CString, c_char},
    ops::Range,
    ptr::NonNull,
};

use baton_program::{
    Argument, Dtype, Graph, GraphNode, InputSource, ModuleSpan, NodeResult, ValueId,
    graph::{CodeLocation, MemoryFormat},
};
use tch::{Device, TchError, Tensor};
use torch_sys::C_tensor;

use super::super::error_text::ErrorText;

/// A graph whose operators and constant arguments libtorch has looked up.
#[derive(Debug)]
pub(super) struct Executor {
    graph: NonNull<CGraph>,
    nodes: Vec<NodeSettings>,
    inputs: Vec<(ValueId, InputSource)>,
    /// Parts whose activations are recomputed for the gradient.
    recomputed: Vec<RecomputedNodes>,
    values: u32,
    outputs: Vec<ValueId>,
}

#[derive(Debug)]
struct NodeSettings {
    has_gradient: bool,
    is_autocast: bool,
    location: CodeLocation,
}

/// Nodes whose activations are recomputed.
#[derive(Debug)]
struct RecomputedNodes {
    nodes: Range<usize>,
    inputs: Vec<u32>,
    outputs: Vec<u32>,
    /// Inputs that BatchNorm writes to.
    statistics: Vec<u32>,
}

/// How a graph is run.
pub(super) struct HowToRun<'a> {
    pub(super) has_gradient: bool,
    /// Number format of autocast.
    pub(super) autocast: Option<Dtype>,
    /// The seed of the next node.
    pub(super) seed: &'a mut dyn FnMut() -> u64,
}

/// An error of an operator.
pub(super) struct RunError {
    pub(super) location: String,
    pub(super) error: TchError,
}

impl Executor {
    /// Looks up the operators of `graph`. Activations of the `recomputed` parts are not kept for the gradient.
    ///
    /// # Errors
    /// An operator does not exist or does not take these arguments.
    pub(super) fn new(
        graph: &Graph,
        recomputed: Vec<ModuleSpan>,
        device: Device,
    ) -> Result<Self, String> {
        let (is_gpu, ordinal) = match device {
            Device::Cuda(ordinal) => (true, i32::try_from(ordinal).unwrap_or(i32::MAX)),
            _ => (false, 0),
        };
        // SAFETY: returns a new object, or ends the process if there is no memory.
        let handle = NonNull::new(unsafe { baton_graph_new(is_gpu, ordinal) });
        let mut executor = Self {
            graph: handle.ok_or("out of memory")?,
            nodes: Vec::with_capacity(graph.nodes.len()),
            inputs: graph.inputs.clone(),
            recomputed: recomputed
                .into_iter()
                .map(|span| RecomputedNodes::new(span, graph))
                .collect(),
            values: graph.values,
            outputs: graph.outputs.clone(),
        };
        for node in &graph.nodes {
            executor.add(node).map_err(|error| {
                let text = error.to_string();
                let text = text.lines().next().unwrap_or_default();
                format!("{}: {}: {text}", node.location, node.operator)
            })?;
            executor.nodes.push(NodeSettings {
                has_gradient: node.has_gradient,
                is_autocast: node.is_autocast,
                location: node.location.clone(),
            });
        }
        Ok(executor)
    }

    fn add(&mut self, node: &GraphNode) -> tch::Result<()> {
        for argument in &node.arguments {
            self.push(&argument.value);
            let name = c_string(&argument.name)?;
            // SAFETY: the graph is alive, and an argument was pushed.
            unsafe { baton_graph_name(self.graph.as_ptr(), name.as_ptr()) };
        }
        let operator = node.operator.strip_prefix("_operator::").unwrap_or(&node.operator);
        let (operator, overload) = (c_string(operator)?, c_string(&node.overload)?);
        let mut results = Vec::new();
        for (returned, result) in (0..).zip(&node.results) {
            match result {
                NodeResult::Unused => {}
                NodeResult::One(value) => {
                    results.push(CResult { returned, element: -1, value: value.0 });
                }
                NodeResult::Many(values) => {
                    let each = (0..).zip(values);
                    results.extend(each.map(|(element, value)| CResult {
                        returned,
                        element,
                        value: value.0,
                    }));
                }
            }
        }
        let last_uses: Vec<u32> = node.last_uses.iter().map(|value| value.0).collect();
        ErrorText::captured(|message| {
            // SAFETY: the graph is alive; the texts end with zero; the lists have these lengths.
            let is_added = unsafe {
                baton_graph_add(
                    self.graph.as_ptr(),
                    operator.as_ptr(),
                    overload.as_ptr(),
                    results.as_ptr(),
                    results.len(),
                    last_uses.as_ptr(),
                    last_uses.len(),
                    message,
                )
            };
            is_added.then_some(())
        })
    }

    fn push(&mut self, argument: &Argument) {
        let graph = self.graph.as_ptr();
        // SAFETY: the graph is alive, and a list takes as many arguments as were pushed for it.
        unsafe {
            match argument {
                Argument::Value(value) => baton_graph_push_value(graph, value.0),
                Argument::None => baton_graph_push_none(graph),
                Argument::Int(value) => baton_graph_push_int(graph, *value),
                Argument::Float(value) => baton_graph_push_float(graph, *value),
                Argument::Bool(value) => baton_graph_push_bool(graph, *value),
                Argument::Text(text) => {
                    baton_graph_push_text(graph, text.as_ptr().cast(), text.len());
                }
                Argument::List(items) => {
                    items.iter().for_each(|item| self.push(item));
                    baton_graph_push_list(graph, items.len());
                }
                Argument::Dtype(dtype) => baton_graph_push_int(graph, scalar_type(*dtype).into()),
                Argument::MemoryFormat(format) => {
                    baton_graph_push_int(graph, memory_format(*format));
                }
                // c10::Layout::Strided
                Argument::Strided => baton_graph_push_int(graph, 0),
                Argument::Device => baton_graph_push_device(graph),
            }
        }
    }

    /// The outputs for the tensors that `source` gives. `is_interrupted` is called before each operator; `None` if it
    /// returned true.
    pub(super) fn run<'a>(
        &self,
        source: &dyn Fn(InputSource) -> &'a Tensor,
        how: HowToRun<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<Tensor>>, RunError> {
        let values = RunValues::new(self.values);
        for (value, from) in &self.inputs {
            values.set(*value, source(*from));
        }
        let autocast = how.autocast.map_or(-1, scalar_type);
        let mut run_of = |node: &NodeSettings| CRun {
            seed: (how.seed)(),
            has_gradient: how.has_gradient && node.has_gradient,
            autocast: if node.is_autocast { autocast } else { -1 },
        };
        let mut recomputed = self.recomputed.iter().filter(|_| how.has_gradient).peekable();
        let mut index = 0;
        while let Some(node) = self.nodes.get(index) {
            if is_interrupted() {
                return Ok(None);
            }
            let part = recomputed.next_if(|part| part.nodes.start == index);
            let graph = self.graph.as_ptr();
            let done = match part {
                None => {
                    let run = run_of(node);
                    // SAFETY: both objects are alive, and the values are as many as the graph has.
                    ErrorText::captured(|message| unsafe {
                        baton_graph_run(graph, index, values.0, run, message).then_some(())
                    })
                }
                Some(part) => {
                    let runs: Vec<CRun> =
                        self.nodes[part.nodes.clone()].iter().map(&mut run_of).collect();
                    // SAFETY: as above; there is a way to run for each node of the part. The graph outlives the
                    // backward pass, as the learner that makes it owns the graph.
                    ErrorText::captured(|message| unsafe {
                        let span = part.c_span();
                        baton_graph_run_recomputed(graph, span, values.0, runs.as_ptr(), message)
                            .then_some(())
                    })
                }
            };
            done.map_err(|error| RunError { location: node.location.to_string(), error })?;
            index = part.map_or(index + 1, |part| part.nodes.end);
        }
        let outputs: Option<Vec<Tensor>> =
            self.outputs.iter().map(|output| values.get(*output)).collect();
        outputs.map(Some).ok_or_else(|| RunError {
            location: "output".to_owned(),
            error: TchError::Torch("is not a tensor".to_owned()),
        })
    }
}

impl RecomputedNodes {
    fn new(span: ModuleSpan, graph: &Graph) -> Self {
        let is_statistic = |value: &ValueId| {
            let mut inputs = graph.inputs.iter();
            inputs.any(|(input, source)| {
                input == value && matches!(source, InputSource::Statistic(_))
            })
        };
        let indices = |values: &[ValueId]| values.iter().map(|value| value.0).collect();
        let statistics = span.inputs.iter().filter(|value| is_statistic(value));
        Self {
            statistics: statistics.map(|value| value.0).collect(),
            inputs: indices(&span.inputs),
            outputs: indices(&span.outputs),
            nodes: span.nodes,
        }
    }

    fn c_span(&self) -> CSpan {
        CSpan {
            first: self.nodes.start,
            end: self.nodes.end,
            inputs: self.inputs.as_ptr(),
            inputs_len: self.inputs.len(),
            outputs: self.outputs.as_ptr(),
            outputs_len: self.outputs.len(),
            statistics: self.statistics.as_ptr(),
            statistics_len: self.statistics.len(),
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // SAFETY: made by `baton_graph_new`, and freed once.
        unsafe { baton_graph_free(self.graph.as_ptr()) };
    }
}

// SAFETY: the graph is changed only while it is made; a run only reads it.
unsafe impl Send for Executor {}

/// The values of one run.
struct RunValues(*mut CValues);

impl RunValues {
    fn new(len: u32) -> Self {
        // SAFETY: returns a new object, or ends the process if there is no memory.
        Self(unsafe { baton_values_new(len as usize) })
    }

    fn set(&self, value: ValueId, tensor: &Tensor) {
        // SAFETY: both are alive; the value is one of the graph.
        unsafe { baton_values_set(self.0, value.0, tensor.as_ptr()) };
    }

    fn get(&self, value: ValueId) -> Option<Tensor> {
        // SAFETY: the values are alive; the result is a new reference.
        let tensor = unsafe { baton_values_get(self.0, value.0) };
        // SAFETY: no other code has this pointer.
        (!tensor.is_null()).then(|| unsafe { Tensor::from_ptr(tensor) })
    }
}

impl Drop for RunValues {
    fn drop(&mut self) {
        // SAFETY: made by `baton_values_new`, and freed once.
        unsafe { baton_values_free(self.0) };
    }
}

/// Counts the changes of a tensor and its views.
pub(super) fn version(tensor: &Tensor) -> u32 {
    // SAFETY: the tensor is alive.
    unsafe { baton_tensor_version(tensor.as_ptr()) }
}

fn c_string(text: &str) -> tch::Result<CString> {
    CString::new(text).map_err(|error| TchError::Torch(format!("{text:?} is not a name: {error}")))
}

/// c10::ScalarType
fn scalar_type(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::U8 => 0,
        Dtype::I8 => 1,
        Dtype::I16 => 2,
        Dtype::I32 => 3,
        Dtype::I64 => 4,
        Dtype::F16 => 5,
        Dtype::F32 => 6,
        Dtype::F64 => 7,
        Dtype::Bool => 11,
        Dtype::Bf16 => 15,
    }
}

/// c10::MemoryFormat
fn memory_format(format: MemoryFormat) -> i64 {
    match format {
        MemoryFormat::Contiguous => 0,
        MemoryFormat::Preserve => 1,
        MemoryFormat::ChannelsLast => 2,
        MemoryFormat::ChannelsLast3d => 3,
    }
}

// --- The same declarations are in executor.h, executor.cpp and recompute.cpp ----------------------

#[repr(C)]
struct CGraph {
    _private: [u8; 0],
}

#[repr(C)]
struct CValues {
    _private: [u8; 0],
}

#[repr(C)]
struct CResult {
    returned: u32,
    element: i32,
    value: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CRun {
    seed: u64,
    has_gradient: bool,
    autocast: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CSpan {
    first: usize,
    end: usize,
    inputs: *const u32,
    inputs_len: usize,
    outputs: *const u32,
    outputs_len: usize,
    statistics: *const u32,
    statistics_len: usize,
}

unsafe extern "C" {
    fn baton_graph_new(is_gpu: bool, ordinal: i32) -> *mut CGraph;
    fn baton_graph_free(graph: *mut CGraph);
    fn baton_graph_push_value(graph: *mut CGraph, value: u32);
    fn baton_graph_push_none(graph: *mut CGraph);
    fn baton_graph_push_int(graph: *mut CGraph, value: i64);
    fn baton_graph_push_float(graph: *mut CGraph, value: f64);
    fn baton_graph_push_bool(graph: *mut CGraph, value: bool);
    fn baton_graph_push_device(graph: *mut CGraph);
    fn baton_graph_push_text(graph: *mut CGraph, text: *const c_char, len: usize);
    fn baton_graph_push_list(graph: *mut CGraph, len: usize);
    fn baton_graph_name(graph: *mut CGraph, name: *const c_char);
    fn baton_graph_add(
        graph: *mut CGraph,
        name: *const c_char,
        overload: *const c_char,
        results: *const CResult,
        results_len: usize,
        last_uses: *const u32,
        last_uses_len: usize,
        message: ErrorText,
    ) -> bool;
    fn baton_values_new(len: usize) -> *mut CValues;
    fn baton_values_free(values: *mut CValues);
    fn baton_values_set(values: *mut CValues, index: u32, tensor: *const C_tensor);
    fn baton_values_get(values: *const CValues, index: u32) -> *mut C_tensor;
    fn baton_graph_run(
        graph: *const CGraph,
        node: usize,
        values: *mut CValues,
        how: CRun,
        message: ErrorText,
    ) -> bool;
    fn baton_graph_run_recomputed(
        graph: *const CGraph,
        span: CSpan,
        values: *mut CValues,
        how: *const CRun,
        message: ErrorText,
    ) -> bool;
    fn baton_tensor_version(tensor: *const C_tensor) -> u32;
}
