//! Programs: networks that `torch.export` has written to a `.pt2` file, read without libtorch.
//!
//! The file is not trusted: everything is checked, and no allocation is larger than the file times a small factor.
//! `crates/trainer/src/torch/program` runs the graph.
//!
//! | module | contents |
//! |---|---|
//! | [`program`] | [`Program`]: tensors, inputs, outputs |
//! | [`graph`] | the list of operators |
//! | [`rewrite`] | the graphs for training and for evaluation |
//! | [`metadata`] | what the outputs mean and how inputs are normalised, if `baton.export` wrote the file |
//! | [`cost`], [`rules`], [`size`] | arithmetic, memory traffic and kept activations of each operator |
//! | [`span`] | the nodes of a module, whose activations are recomputed |
//! | [`tensor`] | tensors in the file |
//! | `archive`, `schema`, `shape` | the zip file and its JSON; shapes in it |

#![forbid(unsafe_code)]

mod archive;
pub mod cost;
pub mod graph;
pub mod metadata;
pub mod program;
pub mod rewrite;
pub mod rules;
mod schema;
mod shape;
pub mod size;
pub mod span;
pub mod tensor;

use std::path::{Path, PathBuf};

pub use self::{
    cost::{OperatorCost, ProgramCosts, WorkingFormat},
    graph::{Argument, Graph, GraphNode, InputSource, NodeResult, ValueId},
    metadata::{ExportMetadata, ExportTask, Normalisation},
    program::{InputRoles, InputTensor, OutputTensor, Parameter, Program},
    rewrite::NormNode,
    rules::OperatorKind,
    size::Amount,
    span::ModuleSpan,
    tensor::{Dtype, StoredTensor},
};

/// A program that cannot be read or trained.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("program {} {problem}", path.display())]
pub struct Error {
    path: PathBuf,
    /// What is wrong and what to do, after the name of the file.
    problem: String,
}

impl Error {
    pub(crate) fn new(path: &Path, problem: impl Into<String>) -> Self {
        Self { path: path.to_owned(), problem: problem.into() }
    }
}
