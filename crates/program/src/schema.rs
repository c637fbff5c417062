//! The JSON of `models/model.json`, as written by `torch.export.save` (torch/_export/serde/schema.py, version 8).
//! Fields that are not needed are not read.

use std::collections::BTreeMap;

use serde::{Deserialize, de::IgnoredAny};

/// The major version that this module reads. A new minor version only adds what may be ignored.
pub(crate) const MAJOR_VERSION: u64 = 8;

/// Only the version, which is checked before anything else is read.
#[derive(Debug, Deserialize)]
pub(crate) struct Versions {
    pub(crate) schema_version: SchemaVersion,
    #[serde(default)]
    pub(crate) torch_version: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SchemaVersion {
    pub(crate) major: u64,
    pub(crate) minor: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ExportedProgram {
    pub(crate) graph_module: GraphModule,
    #[serde(default)]
    pub(crate) range_constraints: BTreeMap<String, RangeConstraint>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RangeConstraint {
    pub(crate) min_val: Option<i64>,
    pub(crate) max_val: Option<i64>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct GraphModule {
    pub(crate) graph: Graph,
    pub(crate) signature: Signature,
    /// The signatures of modules; the first is the whole program's.
    #[serde(default)]
    pub(crate) module_call_graph: Vec<ModuleCall>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ModuleCall {
    pub(crate) signature: Option<CallSignature>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct CallSignature {
    /// JSON that describes how the outputs are nested.
    #[serde(default)]
    pub(crate) out_spec: String,
    pub(crate) forward_arg_names: Option<Vec<String>>,
}

/// How values are nested, in `out_spec`.
#[derive(Debug, Deserialize)]
pub(crate) struct TreeSpec {
    /// `None` for a value.
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    /// For a dictionary, JSON with its keys.
    pub(crate) context: Option<String>,
    pub(crate) children_spec: Vec<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Signature {
    pub(crate) input_specs: Vec<InputSpec>,
    pub(crate) output_specs: Vec<OutputSpec>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum InputSpec {
    Parameter { arg: Name, parameter_name: String },
    Buffer { arg: Name, buffer_name: String, persistent: bool },
    TensorConstant { arg: Name, tensor_constant_name: String },
    UserInput { arg: Argument },
    ConstantInput(IgnoredAny),
    CustomObj(IgnoredAny),
    Token(IgnoredAny),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OutputSpec {
    UserOutput { arg: Argument },
    LossOutput(IgnoredAny),
    BufferMutation { buffer_name: String },
    ParameterMutation { parameter_name: String },
    GradientToParameter(IgnoredAny),
    GradientToUserInput(IgnoredAny),
    UserInputMutation { user_input_name: String },
    Token(IgnoredAny),
}

#[derive(Debug, Deserialize)]
pub(crate) struct Graph {
    pub(crate) inputs: Vec<Argument>,
    pub(crate) outputs: Vec<Argument>,
    pub(crate) nodes: Vec<JsonNode>,
    pub(crate) tensor_values: BTreeMap<String, TensorMeta>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct JsonNode {
    pub(crate) target: String,
    pub(crate) inputs: Vec<NamedArgument>,
    pub(crate) outputs: Vec<Argument>,
    #[serde(default)]
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) name: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct NamedArgument {
    /// The schema's name; empty for arguments of higher-order operators.
    pub(crate) name: String,
    pub(crate) arg: Argument,
}

/// An argument or a result.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::enum_variant_names, reason = "the file's names")]
pub(crate) enum Argument {
    AsNone(IgnoredAny),
    AsTensor(Name),
    AsTensors(Vec<Name>),
    AsOptionalTensor(OptionalTensor),
    AsOptionalTensors(Vec<OptionalTensor>),
    AsNestedTensors(IgnoredAny),
    AsInt(i64),
    AsInts(Vec<i64>),
    AsFloat(JsonFloat),
    AsFloats(Vec<JsonFloat>),
    AsBool(bool),
    AsBools(Vec<bool>),
    AsString(String),
    AsStrings(IgnoredAny),
    AsSymInt(Symbol<i64>),
    AsSymInts(Vec<Symbol<i64>>),
    AsSymFloat(Symbol<JsonFloat>),
    AsSymFloats(Vec<Symbol<JsonFloat>>),
    AsSymBool(Symbol<bool>),
    AsSymBools(Vec<Symbol<bool>>),
    AsScalarType(u8),
    AsMemoryFormat(u8),
    AsLayout(u8),
    AsDevice(IgnoredAny),
    AsGraph(GraphArgument),
    AsCustomObj(IgnoredAny),
    AsOperator(IgnoredAny),
    AsComplex(IgnoredAny),
    AsIntLists(IgnoredAny),
    AsStringToArgument(IgnoredAny),
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Name {
    pub(crate) name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OptionalTensor {
    AsTensor(Name),
    AsNone(IgnoredAny),
}

/// A number that an earlier node computes, or a constant.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Symbol<T> {
    AsName(String),
    #[serde(alias = "as_float", alias = "as_bool")]
    AsInt(T),
}

/// JSON has no infinity.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum JsonFloat {
    Number(f64),
    Name(String),
}

#[derive(Debug, Deserialize)]
pub(crate) struct GraphArgument {
    pub(crate) graph: Graph,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct TensorMeta {
    pub(crate) dtype: u8,
    pub(crate) sizes: Vec<JsonSize>,
    pub(crate) requires_grad: bool,
    pub(crate) strides: Vec<JsonSize>,
    pub(crate) storage_offset: JsonSize,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum JsonSize {
    AsInt(i64),
    AsExpr(Expression),
}

impl JsonSize {
    /// How a size that is not fixed depends on others.
    pub(crate) fn expression(&self) -> Option<&str> {
        match self {
            Self::AsInt(_) => None,
            Self::AsExpr(expression) => Some(&expression.expr_str),
        }
    }
}

/// A size that depends on the input's.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Expression {
    pub(crate) expr_str: String,
    /// Its value for the inputs with which the program was exported.
    #[serde(default)]
    pub(crate) hint: Option<Hint>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::enum_variant_names, reason = "the file's names")]
pub(crate) enum Hint {
    AsInt(i64),
    AsFloat(JsonFloat),
    AsBool(bool),
}

/// `data/weights/model_weights_config.json` and its twin for constants.
#[derive(Debug, Deserialize)]
pub(crate) struct Payload {
    pub(crate) config: BTreeMap<String, PayloadEntry>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct PayloadEntry {
    pub(crate) path_name: String,
    pub(crate) use_pickle: bool,
    pub(crate) tensor_meta: Option<TensorMeta>,
}
