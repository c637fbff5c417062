//! Changes of a graph where bits or the mode of execution depend on it.

use crate::{
    graph::{Argument, Graph, GraphNode, ValueId},
    schema::JsonSize,
};

/// A BatchNorm of the graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormNode {
    /// Index of its node.
    pub(crate) node: usize,
    /// Statistic: running mean.
    pub mean: usize,
    /// Statistic: running variance.
    pub variance: usize,
    /// Share of the running statistics that one update replaces.
    pub momentum: f64,
    /// Whether the module was in training mode; otherwise its statistics are frozen.
    pub is_training: bool,
    /// Whether it gets one value per channel and sample.
    pub(crate) has_one_value: bool,
}

/// A BatchNorm whose buffers have no role yet.
pub(crate) struct FoundNorm {
    pub(crate) node: usize,
    /// Indices of the running mean and variance among the buffers.
    pub(crate) buffers: [usize; 2],
    pub(crate) momentum: f64,
    pub(crate) is_training: bool,
    pub(crate) has_one_value: bool,
}

/// Arguments that say whether a module trains, in the schemas of dropout, BatchNorm, LSTM and others.
const TRAINING_FLAGS: [&str; 2] = ["train", "training"];

impl Graph {
    /// The graph for training: BatchNorm replaces its statistics by those of the batch. With frozen statistics, it uses
    /// them and leaves them as they are.
    #[must_use]
    pub fn for_training(&self, norms: &[NormNode]) -> Self {
        let mut graph = self.clone();
        for norm in norms {
            let node = &mut graph.nodes[norm.node];
            set(node, "training", Argument::Bool(norm.is_training));
            // Momentum 1 replaces the old values.
            set(node, "momentum", Argument::Float(1.0));
            set(node, "cudnn_enabled", Argument::Bool(true));
        }
        graph
    }

    /// The graph for evaluation: BatchNorm uses the running statistics, nothing is dropped.
    ///
    /// # Errors
    /// Random numbers whose counterpart in evaluation mode is unknown, or a BatchNorm without running statistics.
    pub(crate) fn for_evaluation(&self) -> Result<Self, String> {
        let mut graph = self.clone();
        let scaled: Vec<bool> =
            (0..graph.nodes.len()).map(|index| is_scaled_bernoulli(&graph, index)).collect();
        for (node, is_scaled) in graph.nodes.iter_mut().zip(scaled) {
            let has_statistics = matches!(node.argument("running_mean"), Some(Argument::Value(_)));
            if node.operator == "aten::batch_norm" && !has_statistics {
                return Err(format!(
                    "{}: a BatchNorm without running statistics normalises an evaluation by the samples that happen to be in \
                     a batch: set track_running_stats=True, or use GroupNorm",
                    node.location
                ));
            }
            for flag in TRAINING_FLAGS {
                if let Some(Argument::Bool(value)) = node.argument_mut(flag) {
                    *value = false;
                }
            }
            if let Some(Argument::Float(probability)) = node.argument_mut("dropout_p") {
                *probability = 0.0;
            }
            if is_scaled {
                // Stochastic depth: what is kept is divided by the probability to keep it, and p / p is exactly 1.
                "aten::fill_".clone_into(&mut node.operator);
                "Scalar".clone_into(&mut node.overload);
                node.arguments.truncate(2);
            } else if is_random(&node.operator) {
                return Err(format!(
                    "{}: {} draws random numbers in evaluation too: use torch.nn.Dropout, or noise that is \
                     divided by the probability to keep it",
                    node.location, node.operator
                ));
            }
        }
        Ok(graph)
    }

    /// All BatchNorms. `buffer_of` gives the index of a buffer for a value that is one.
    pub(crate) fn norms(
        &self,
        buffer_of: impl Fn(ValueId) -> Option<usize>,
    ) -> Result<Vec<FoundNorm>, String> {
        let mut norms = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let buffers = ["running_mean", "running_var"].map(|name| match node.argument(name) {
                Some(Argument::Value(value)) => Some(buffer_of(*value)),
                _ => None,
            });
            let found = match (buffers, node.argument("momentum"), node.argument("training")) {
                ([None, None], ..) => continue,
                (
                    [Some(Some(mean)), Some(Some(variance))],
                    Some(Argument::Float(momentum)),
                    Some(Argument::Bool(is_training)),
                ) if node.operator == "aten::batch_norm" => FoundNorm {
                    node: index,
                    buffers: [mean, variance],
                    momentum: *momentum,
                    is_training: *is_training,
                    has_one_value: self.has_one_value_per_channel(node),
                },
                _ => {
                    return Err(format!(
                        "{}: {} keeps running statistics in a way that is exact only for torch.nn.BatchNorm: set \
                         track_running_stats=False, or use BatchNorm or GroupNorm",
                        node.location, node.operator
                    ));
                }
            };
            norms.push(found);
        }
        Ok(norms)
    }

    /// Whether the input of a BatchNorm has the shape (samples, channels), or axes of length 1 after these.
    fn has_one_value_per_channel(&self, node: &GraphNode) -> bool {
        let Some(Argument::Value(input)) = node.argument("input") else { return false };
        let meta = self.tensors.get(*input);
        meta.is_some_and(|meta| meta.sizes.iter().skip(2).all(|size| *size == JsonSize::AsInt(1)))
    }

    /// Whether modules were in training mode; `None` if no operator says.
    pub(crate) fn is_training(&self) -> Option<bool> {
        let flags = self.nodes.iter().flat_map(|node| {
            TRAINING_FLAGS.iter().filter_map(|flag| match node.argument(flag) {
                Some(Argument::Bool(value)) => Some(*value),
                _ => None,
            })
        });
        flags.reduce(|any, flag| any || flag)
    }

    /// Removes counters that nothing reads, such as BatchNorm's `num_batches_tracked`.
    pub(crate) fn remove_counters(&mut self, is_scalar_buffer: impl Fn(ValueId) -> bool) {
        let uses = self.use_counts();
        let is_counter = |node: &GraphNode| {
            let made: Vec<ValueId> = node.makes().collect();
            match (node.uses().as_slice(), made.as_slice()) {
                ([counter], [result]) => {
                    node.operator == "aten::add_"
                        && is_scalar_buffer(*counter)
                        && uses[counter.0 as usize] == 1
                        && uses[result.0 as usize] == 0
                }
                _ => false,
            }
        };
        let counters: Vec<bool> = self.nodes.iter().map(is_counter).collect();
        let mut counters = counters.into_iter();
        self.nodes.retain(|_| !counters.next().unwrap_or_default());
    }
}

fn set(node: &mut GraphNode, name: &str, value: Argument) {
    if let Some(argument) = node.argument_mut(name) {
        *argument = value;
    }
}

/// Whether a node draws zeros and ones with a probability by which the next one, the only user, divides them.
fn is_scaled_bernoulli(graph: &Graph, index: usize) -> bool {
    let node = &graph.nodes[index];
    let (true, "float", Some(probability)) =
        (node.operator == "aten::bernoulli_", node.overload.as_str(), node.argument("p"))
    else {
        return false;
    };
    let made: Vec<ValueId> = node.makes().collect();
    let mut users =
        graph.nodes.iter().filter(|user| user.uses().iter().any(|value| made.contains(value)));
    let divides = |user: &GraphNode| {
        matches!(user.operator.as_str(), "aten::div_" | "aten::div")
            && user.argument("other") == Some(probability)
    };
    users.next().is_some_and(divides) && users.next().is_none()
}

/// Operators that draw random numbers whatever their flags say.
fn is_random(operator: &str) -> bool {
    const RANDOM: [&str; 19] = [
        "bernoulli",
        "bernoulli_",
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "normal",
        "normal_",
        "uniform_",
        "random_",
        "multinomial",
        "poisson",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
    ];
    operator.strip_prefix("aten::").is_some_and(|name| RANDOM.contains(&name))
}
