//! Parts of a graph whose activations are recomputed: the nodes of one module.

use std::{collections::BTreeSet, ops::Range};

use crate::graph::{Graph, GraphNode, ValueId};

/// The nodes of a module, which follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleSpan {
    /// Path of the module.
    pub module: String,
    /// Indices of the nodes.
    pub nodes: Range<usize>,
    /// Values that its nodes use and earlier nodes or the inputs make.
    pub inputs: Vec<ValueId>,
    /// Values that it makes and later nodes use, or the program returns.
    pub outputs: Vec<ValueId>,
}

impl Graph {
    /// The nodes of each of these modules, in the order of execution.
    ///
    /// # Errors
    /// A module does not exist, its nodes do not follow each other, or two modules share nodes.
    pub fn spans(&self, modules: &[String]) -> Result<Vec<ModuleSpan>, String> {
        let spans = modules.iter().map(|module| self.span(module));
        let mut spans: Vec<ModuleSpan> = spans.collect::<Result<_, _>>()?;
        spans.sort_by_key(|span| span.nodes.start);
        let mut pairs = spans.iter().zip(spans.iter().skip(1));
        match pairs.find(|(span, next)| next.nodes.start < span.nodes.end) {
            None => Ok(spans),
            Some((span, next)) => Err(format!(
                "{} and {} share operators: name one of them",
                span.module, next.module
            )),
        }
    }

    fn span(&self, module: &str) -> Result<ModuleSpan, String> {
        let is_inside = |node: &GraphNode| {
            let rest = node.location.module.strip_prefix(module);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let first = self.nodes.iter().position(is_inside);
        let last = self.nodes.iter().rposition(is_inside);
        let (Some(first), Some(last)) = (first, last) else {
            return Err(format!(
                "{module} is no module of the program: choose among {}",
                self.modules()
            ));
        };
        let (nodes, inner) = (first..last + 1, &self.nodes[first..=last]);
        if let Some(other) = inner.iter().find(|node| !is_inside(node)) {
            return Err(format!(
                "{module} is called in several parts, as {} comes in between: name modules inside of it",
                other.location
            ));
        }
        let made: BTreeSet<ValueId> = inner.iter().flat_map(GraphNode::makes).collect();
        let used: BTreeSet<ValueId> = inner.iter().flat_map(GraphNode::uses).collect();
        let inputs: Vec<ValueId> = used.difference(&made).copied().collect();
        let changes_input =
            |node: &&GraphNode| node.overwrites().is_some_and(|value| inputs.contains(&value));
        if let Some(node) = inner.iter().find(changes_input) {
            return Err(format!(
                "{module} changes its own input and cannot be computed again ({}): name a larger module",
                node.location
            ));
        }
        let later: BTreeSet<ValueId> = self.nodes[last + 1..]
            .iter()
            .flat_map(GraphNode::uses)
            .chain(self.outputs.iter().copied())
            .collect();
        Ok(ModuleSpan {
            module: module.to_owned(),
            nodes,
            inputs,
            outputs: made.intersection(&later).copied().collect(),
        })
    }

    /// The outermost modules, for a message.
    fn modules(&self) -> String {
        const SHOWN: usize = 12;
        let mut names: Vec<&str> = Vec::new();
        for node in &self.nodes {
            let name = node.location.module.split('.').next().unwrap_or_default();
            if !name.is_empty() && !names.contains(&name) {
                names.push(name);
            }
        }
        let more = if names.len() > SHOWN { " and the others" } else { "" };
        names.truncate(SHOWN);
        format!("{}{more}, or modules inside of them such as layer1.0", names.join(", "))
    }
}
