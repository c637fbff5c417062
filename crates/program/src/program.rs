//! A program: its graph, and the tensors that belong to it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use baton_model::{Block, Init, Integers, NetworkDescription, Tensor, TensorRole};
use baton_recipe::{
    JobSpec,
    spec::{LossKind, NamePatterns, OptimizerSpec, TARGET_INPUT},
};
use serde::Deserialize;

use crate::{
    Error,
    archive::Archive,
    graph::{Argument, FlattenSettings, Flattener, Graph, InputSource, Scope, ValueId},
    metadata::{ExportMetadata, Normalisation},
    rewrite::{FoundNorm, NormNode},
    rules::base_name,
    schema::{self, InputSpec, JsonSize, OutputSpec, Payload},
    size::symbol,
    span::ModuleSpan,
    tensor::{Dtype, StoredTensor, stored},
};

/// A program in a file.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    archive: Archive,
    /// Version of PyTorch that wrote it.
    pub torch_version: String,
    /// Parameters, each once even if several modules share it.
    pub parameters: Vec<Parameter>,
    /// Running means and variances of BatchNorm.
    pub statistics: Vec<StoredTensor>,
    /// Tensors that training does not change.
    pub constants: Vec<Constant>,
    /// The BatchNorms.
    pub norms: Vec<NormNode>,
    /// The inputs of a batch, in the order of `forward`.
    pub inputs: Vec<InputTensor>,
    /// What it returns.
    pub outputs: Vec<OutputTensor>,
    /// What `baton.export` wrote about it; `None` if plain `torch.export.save` wrote the file.
    pub metadata: Option<ExportMetadata>,
    /// The operators.
    pub graph: Graph,
    /// BLAKE3 digest of the graph and of the checksums of all tensors, hexadecimal.
    pub digest: String,
}

/// A parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its values; the name is the first of its names.
    pub tensor: StoredTensor,
    /// Whether it is trained.
    pub requires_grad: bool,
    /// Its other names, if modules share it.
    pub aliases: Vec<String>,
}

/// A tensor that training does not change.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    /// Its values.
    pub tensor: StoredTensor,
    /// Whether the module's state dict contains it.
    pub is_persistent: bool,
}

/// What the program takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputTensor {
    /// Name of the argument of `forward`; in a file without metadata that of the graph's value, which may differ.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Shape; the first axis counts samples. `None` for sizes that may change.
    pub shape: Vec<Option<u64>>,
    /// Most samples of a batch, if there is a limit.
    pub max_samples: Option<u64>,
}

/// What the program returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTensor {
    /// Its key, if the program returns a dictionary.
    pub name: Option<String>,
    /// Shape; `None` for sizes that depend on the input.
    pub shape: Vec<Option<u64>>,
    /// Whether the first axis counts samples.
    pub(crate) counts_samples: bool,
}

/// Which input of a program is which; indices into [`Program::inputs`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputRoles {
    /// Images or arrays of `data.input_field`.
    pub main: usize,
    /// Those of `data.extra_fields`, in their order.
    pub extras: Vec<usize>,
    /// The target, if the program computes the loss.
    pub target: Option<usize>,
}

/// Key of the loss of each sample.
pub const LOSS_OUTPUT: &str = "loss";

impl InputTensor {
    /// Whether it is images, of shape (samples, 3, height, width).
    fn is_image(&self) -> bool {
        matches!(self.shape.as_slice(), [_, Some(3), _, _])
    }
}

/// Fewest samples that `torch.export` can leave open. It treats 1 differently only where PyTorch itself does.
const SMALLEST_OPEN_SIZE: i64 = 2;

impl Parameter {
    /// All of its names.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        std::iter::once(&self.tensor.name).chain(&self.aliases).map(String::as_str)
    }
}

impl Program {
    /// Reads a `.pt2` file that `torch.export.save` wrote. Weights are not read yet.
    ///
    /// # Errors
    /// Not such a file, damaged, or a program that cannot be trained.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let archive = Archive::open(path).map_err(|problem| Error::new(path, problem))?;
        Self::of(path, archive).map_err(|problem| Error::new(path, problem))
    }

    fn of(path: &Path, archive: Archive) -> Result<Self, String> {
        let name = model_name(&archive)?;
        let text = archive.read(&format!("models/{name}.json"))?;
        let versions: schema::Versions = parse(&text, &name)?;
        let schema::SchemaVersion { major, minor } = versions.schema_version;
        if major != schema::MAJOR_VERSION {
            return Err(format!(
                "has schema version {major}.{minor}, written by PyTorch {}, but this Baton reads version {}: export \
                 it with PyTorch 2.11",
                versions.torch_version,
                schema::MAJOR_VERSION
            ));
        }
        let program: schema::ExportedProgram = parse(&text, &name)?;
        let stored = Stored::read(&archive, &name)?;
        let mut digest = blake3::Hasher::new();
        digest.update(&text);

        let mut inputs = GraphInputs::default();
        let mut flattener = Flattener::new();
        let graph = &program.graph_module.graph;
        let mut scope = flattener.scope(graph);
        for spec in &program.graph_module.signature.input_specs {
            if let Some((name, origin)) = inputs.add(spec, &stored, graph)? {
                inputs.values.insert(flattener.value(name, &mut scope), origin);
            }
        }
        flattener.add(graph, &mut scope, FlattenSettings::OUTERMOST)?;
        let (output_values, outputs) = outputs(&program.graph_module, &scope)?;
        let Flattener { values, nodes, tensors } = flattener;
        let GraphInputs { parameters, buffers, values: sources, inputs } = inputs;
        if inputs.is_empty() {
            return Err("takes no input: give it a tensor of samples".to_owned());
        }
        let mut graph =
            Graph { values, inputs: Vec::new(), nodes, outputs: output_values, tensors };
        let buffer_of = |value: ValueId| match sources.get(&value) {
            Some(InputOrigin::Buffer(index)) => Some(*index),
            _ => None,
        };
        graph.remove_counters(|value| {
            buffer_of(value).is_some_and(|index| {
                let tensor = &buffers[index].tensor;
                tensor.shape.is_empty() && tensor.dtype == Dtype::I64
            })
        });
        if graph.is_training() == Some(false) {
            return Err(
                "was exported in evaluation mode: call model.train() before torch.export.export"
                    .to_owned(),
            );
        }
        let found = graph.norms(buffer_of)?;
        let (roles, norms, statistics) = statistics(&found, &buffers, &graph)?;
        let kept_name = |value: ValueId| match sources.get(&value)? {
            InputOrigin::Parameter(index) => Some(&parameters[*index].tensor.name),
            InputOrigin::Buffer(index) => Some(&buffers[*index].tensor.name),
            InputOrigin::Input(_) => None,
        };
        if let Some((node, name)) = graph.find_change(kept_name) {
            return Err(format!("{}: {}", node.location, changes(name)));
        }
        let uses = graph.use_counts();
        for (value, origin) in &sources {
            // The BatchNorm itself is one.
            if let InputOrigin::Buffer(index) = origin
                && uses[value.0 as usize] > 1
                && let Some(norm) = roles.get(index).and_then(|statistic| {
                    norms.iter().find(|norm| [norm.mean, norm.variance].contains(statistic))
                })
                && norm.is_training
            {
                let (name, node) = (&buffers[*index].tensor.name, &graph.nodes[norm.node]);
                return Err(format!("{}: {}", node.location, uses_statistics(name)));
            }
        }
        let mut constants = Vec::new();
        for (value, origin) in &sources {
            let source = match origin {
                InputOrigin::Parameter(index) => InputSource::Parameter(*index),
                InputOrigin::Input(index) => InputSource::Input(*index),
                InputOrigin::Buffer(index) => match roles.get(index) {
                    Some(statistic) => InputSource::Statistic(*statistic),
                    // An export counts the updates itself.
                    None if is_update_count(&buffers[*index].tensor.name)
                        && uses[value.0 as usize] == 0 =>
                    {
                        continue;
                    }
                    None => {
                        constants.push(buffers[*index].clone());
                        InputSource::Constant(constants.len() - 1)
                    }
                },
            };
            graph.inputs.push((*value, source));
        }
        check_gradients(&graph, &parameters)?;
        graph.set_last_uses();
        archive.digest("data/", &mut digest);
        let inputs = inputs.into_iter().map(|input| input.finish(&program.range_constraints));
        let mut inputs: Vec<InputTensor> = inputs.collect::<Result<_, _>>()?;
        let metadata = ExportMetadata::read(&archive)?;
        if let Some(metadata) = &metadata {
            metadata.check(inputs.len(), &outputs)?;
        }
        let in_code =
            signature(&program.graph_module).and_then(|call| call.forward_arg_names.as_ref());
        let names = metadata.as_ref().map(|metadata| &metadata.inputs).or(in_code);
        // An argument that is a list or None stands for several inputs, or none.
        if let Some(names) = names.filter(|names| names.len() == inputs.len()) {
            inputs.iter_mut().zip(names).for_each(|(input, name)| input.name.clone_from(name));
        }
        Ok(Self {
            path: path.to_owned(),
            torch_version: versions.torch_version,
            inputs,
            outputs,
            metadata,
            parameters,
            statistics,
            constants,
            norms,
            graph,
            digest: digest.finalize().to_hex().to_string(),
            archive,
        })
    }

    /// The program of a recipe, with what the recipe freezes, and what its inputs are.
    ///
    /// # Errors
    /// It cannot be read, or not be trained by this recipe.
    pub fn of_recipe(spec: &JobSpec) -> Result<(Self, InputRoles), Error> {
        let mut program = Self::read(Path::new(&spec.model.program))?;
        let roles = program.fits(spec)?;
        let frozen = spec.model.freeze_patterns();
        let frozen = program.freeze(|name| frozen.matches(name));
        frozen.map_err(|problem| program.error(problem))?;
        if !program.parameters.iter().any(|parameter| parameter.requires_grad) {
            return Err(program
                .error("has no parameter to train: set requires_grad, or change model.freeze"));
        }
        let adamw = NamePatterns::of(spec.optimizer.adamw());
        let is_muons = |weight: &Tensor| {
            weight.is_hidden && !weight.is_frozen() && !weight.has_name(|name| adamw.matches(name))
        };
        let is_muon = matches!(spec.optimizer, OptimizerSpec::Muon { .. });
        if is_muon && !program.describe().parameters.iter().any(is_muons) {
            return Err(program.error(
                "has no weight for optimizer.kind = \"muon\", that is of a convolution or linear layer before the last one, \
                 trained and not in optimizer.adamw: take adamw",
            ));
        }
        Ok((program, roles))
    }

    /// Freezes the parameters of which `is_frozen` says so by one of their names, and the BatchNorms of which it says so
    /// by mean and variance.
    fn freeze(&mut self, is_frozen: impl Fn(&str) -> bool) -> Result<(), String> {
        for parameter in &mut self.parameters {
            if parameter.names().any(&is_frozen) {
                parameter.requires_grad = false;
            }
        }
        for norm in &mut self.norms {
            let [mean, variance] = [norm.mean, norm.variance].map(|one| &self.statistics[one].name);
            match (is_frozen(mean), is_frozen(variance)) {
                (true, true) => norm.is_training = false,
                (false, false) => {}
                _ => {
                    return Err(format!(
                        "keeps {mean} and {variance} together: freeze both or none"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that it can be trained by a recipe, and says what its inputs are.
    ///
    /// # Errors
    /// It takes or returns something else, expects other images, lacks a parameter that the recipe names, or cannot be
    /// evaluated or exported.
    pub fn fits(&self, spec: &JobSpec) -> Result<InputRoles, Error> {
        let roles = self.roles(spec).map_err(|problem| self.error(problem))?;
        self.check_outputs(spec).map_err(|problem| self.error(problem))?;
        let normalisation = Normalisation { mean: spec.data.mean, std: spec.data.std };
        let expected = self.metadata.as_ref().and_then(|metadata| metadata.normalisation);
        if let Some(expected) = expected.filter(|expected| !expected.is_close_to(&normalisation)) {
            return Err(self.error(format!(
                "expects images of {expected}, but the recipe has {normalisation}: set the recipe to the program's, or \
                 export it with those of the recipe"
            )));
        }
        let parameters = self.parameters.iter().flat_map(Parameter::names);
        let statistics = self.statistics.iter().map(|tensor| tensor.name.as_str());
        spec.check_patterns(parameters, statistics).map_err(|problem| self.error(problem))?;
        self.check_constants()?;
        self.recomputed(&spec.train.recompute)?;
        self.evaluation().map(|_| roles)
    }

    /// Checks that checkpoints, which hold f32, can hold the constants of the module's state dict.
    ///
    /// # Errors
    /// One has another type, or integers that f32 has not.
    pub fn check_constants(&self) -> Result<(), Error> {
        for Constant { tensor, .. } in self.persistent_constants() {
            let is_exact = match tensor.dtype {
                Dtype::F32 | Dtype::Bool => true,
                Dtype::I32 => {
                    let storage = self.storage(tensor)?;
                    let values = tensor.span(&storage).iter();
                    values.copied().map(i32::from_le_bytes).all(|value| is_in_f32(value.into()))
                }
                Dtype::I64 => {
                    let storage = self.storage(tensor)?;
                    tensor.span(&storage).iter().copied().map(i64::from_le_bytes).all(is_in_f32)
                }
                dtype => {
                    return Err(self.error(format!(
                        "keeps buffer {} as {}: make it float32, or register it with persistent=False",
                        tensor.name,
                        dtype.name()
                    )));
                }
            };
            if !is_exact {
                return Err(self.error(format!(
                    "keeps buffer {} with integers that float32 has not: register it with persistent=False",
                    tensor.name
                )));
            }
        }
        Ok(())
    }

    /// Checks that it takes all images of a recipe whose data are images.
    ///
    /// # Errors
    /// A phase of training or the evaluation has images of another size.
    pub fn check_images(&self, spec: &JobSpec) -> Result<(), Error> {
        spec.resolutions().try_for_each(|side| self.check_image_side(side.into()))
    }

    pub(crate) fn check_image_side(&self, side: u64) -> Result<(), Error> {
        let fits = |size: &Option<u64>| size.is_none_or(|size| size == side);
        match self.image_input() {
            Some(input) if !input.shape.iter().skip(2).all(fits) => {
                let (name, shape) = (&input.name, shape_text(&input.shape));
                Err(self.error(format!(
                    "takes {name} of shape {shape}, but the recipe has images of {side} px: set train.resolution, \
                     those of train.phases and evaluation.resolution, or export it for this size"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Which input is which.
    fn roles(&self, spec: &JobSpec) -> Result<InputRoles, String> {
        let all =
            || self.inputs.iter().map(|input| input.name.as_str()).collect::<Vec<_>>().join(", ");
        let index = |name: &str, why: &str| {
            let found = self.inputs.iter().position(|input| input.name == name);
            found.ok_or_else(|| format!("takes no input {name}, {why}; its inputs are {}", all()))
        };
        let extras =
            spec.data.extra_fields.iter().map(|name| index(name, "which data.extra_fields names"));
        let extras: Vec<usize> = extras.collect::<Result<_, _>>()?;
        let target = match spec.loss.kind {
            LossKind::Program => Some(index(
                TARGET_INPUT,
                "but with loss.kind = \"program\" it must compute the loss from it",
            )?),
            _ => None,
        };
        let is_main = |index: &usize| !extras.contains(index) && Some(*index) != target;
        let rest: Vec<usize> = (0..self.inputs.len()).filter(is_main).collect();
        match rest.as_slice() {
            [main] => Ok(InputRoles { main: *main, extras, target }),
            _ => Err(format!(
                "takes {}, but data.input_field and data.extra_fields are {} of them: name the fields of the data set for \
                 all inputs but the first in data.extra_fields",
                all(),
                1 + extras.len()
            )),
        }
    }

    fn check_outputs(&self, spec: &JobSpec) -> Result<(), String> {
        if spec.loss.kind == LossKind::Program {
            return self.check_losses(&spec.loss.metrics);
        }
        let classes = spec.model.num_classes;
        match self.outputs.as_slice() {
            [output]
                if output.shape == [None, Some(u64::from(classes))] && output.counts_samples =>
            {
                Ok(())
            }
            outputs => {
                let shapes: Vec<String> =
                    outputs.iter().map(|output| shape_text(&output.shape)).collect();
                Err(format!(
                    "returns {}, but the recipe has model.num_classes = {classes}: it must return (samples, {classes})",
                    shapes.join(" and ")
                ))
            }
        }
    }

    fn check_losses(&self, metrics: &[String]) -> Result<(), String> {
        for output in &self.outputs {
            let name = output.name.as_deref().unwrap_or(LOSS_OUTPUT);
            if output.shape != [None] {
                return Err(format!(
                    "returns {name} of shape {}, but it must be one number for each sample: reduction=\"none\"",
                    shape_text(&output.shape)
                ));
            }
            if !output.counts_samples {
                return Err(format!(
                    "returns {name} with another number of values than samples, for example one for each token: average \
                     it over all axes but the first"
                ));
            }
        }
        match self.loss_outputs(metrics) {
            Some(found) if found.len() == self.outputs.len() => Ok(()),
            _ => {
                let names =
                    self.outputs.iter().map(|output| output.name.as_deref().unwrap_or("a tensor"));
                Err(format!(
                    "returns {}, but the recipe needs a dictionary of {LOSS_OUTPUT} and loss.metrics = [{}]",
                    names.collect::<Vec<_>>().join(", "),
                    metrics.join(", ")
                ))
            }
        }
    }

    /// Where the loss and these metrics are among the outputs. A program that returns one tensor returns the loss.
    #[must_use]
    pub fn loss_outputs(&self, metrics: &[String]) -> Option<Vec<usize>> {
        if let ([OutputTensor { name: None, .. }], []) = (self.outputs.as_slice(), metrics) {
            return Some(vec![0]);
        }
        let index = |name: &str| {
            self.outputs.iter().position(|output| output.name.as_deref() == Some(name))
        };
        let names = std::iter::once(LOSS_OUTPUT).chain(metrics.iter().map(String::as_str));
        names.map(index).collect()
    }

    /// The nodes of `train.recompute`.
    ///
    /// # Errors
    /// As [`Graph::spans`].
    pub fn recomputed(&self, modules: &[String]) -> Result<Vec<ModuleSpan>, Error> {
        let spans = self.graph.spans(modules);
        spans.map_err(|problem| {
            self.error(format!("cannot recompute all of train.recompute: {problem}"))
        })
    }

    /// Smallest batch with which every BatchNorm in training mode gets more than one value per channel.
    #[must_use]
    pub fn min_batch(&self) -> u64 {
        let has_one_value = self.norms.iter().any(|norm| norm.is_training && norm.has_one_value);
        if has_one_value { 2 } else { 1 }
    }

    /// The input that is images, if there is one.
    #[must_use]
    pub fn image_input(&self) -> Option<&InputTensor> {
        self.inputs.iter().find(|input| input.is_image())
    }

    /// The graph for evaluation.
    ///
    /// # Errors
    /// Random numbers whose counterpart in evaluation mode is unknown.
    pub fn evaluation(&self) -> Result<Graph, Error> {
        self.graph.for_evaluation().map_err(|problem| self.error(problem))
    }

    /// The bytes of a tensor's storage.
    ///
    /// # Errors
    /// The file has changed or is damaged.
    pub fn storage(&self, tensor: &StoredTensor) -> Result<Vec<u8>, Error> {
        self.archive.read(&tensor.entry).map_err(|problem| Error::new(&self.path, problem))
    }

    /// An error about this program.
    #[must_use]
    pub fn error(&self, problem: impl Into<String>) -> Error {
        Error::new(&self.path, problem)
    }

    /// Its tensors as those of a network whose head is the whole program. Initial values are in the file.
    ///
    /// Constants that are part of the module's state dict follow the statistics, frozen.
    #[must_use]
    pub fn describe(&self) -> NetworkDescription {
        let tensor = |stored: &StoredTensor, role| Tensor {
            name: stored.name.clone(),
            aliases: Vec::new(),
            shape: stored.shape.clone(),
            init: Init::Constant(0.0),
            decays: false,
            is_cast: false,
            is_hidden: false,
            role,
            position: 0,
        };
        let role = |is_trained| if is_trained { TensorRole::Trained } else { TensorRole::Frozen };
        let hidden = self.graph.hidden_weights();
        let parameters = self.parameters.iter().enumerate().map(|(index, parameter)| Tensor {
            // Weights of layers have two axes or more; biases and scales of norms have one.
            decays: parameter.tensor.shape.len() > 1,
            is_hidden: hidden.contains(&index),
            aliases: parameter.aliases.clone(),
            ..tensor(&parameter.tensor, role(parameter.requires_grad))
        });
        let mut parameters: Vec<Tensor> = parameters.collect();
        let is_trained = |index: usize| {
            let mut norms = self.norms.iter();
            norms.any(|norm| norm.is_training && [norm.mean, norm.variance].contains(&index))
        };
        let statistics = self.statistics.iter().enumerate();
        let statistics = statistics.map(|(index, stored)| tensor(stored, role(is_trained(index))));
        let constants = self.persistent_constants();
        let constants = constants.map(|Constant { tensor: stored, .. }| {
            let integers = match stored.dtype {
                Dtype::I64 => Some(Integers::I64),
                Dtype::I32 => Some(Integers::I32),
                Dtype::Bool => Some(Integers::Bool),
                _ => None,
            };
            tensor(stored, TensorRole::Constant(integers))
        });
        let mut statistics: Vec<Tensor> = statistics.chain(constants).collect();
        for (position, tensor) in parameters.iter_mut().chain(&mut statistics).enumerate() {
            tensor.position = position;
        }
        let head = Block {
            name: "program".to_owned(),
            layers: Vec::new(),
            parameters: 0..parameters.len(),
            statistics: 0..statistics.len(),
        };
        NetworkDescription { parameters, statistics, blocks: Vec::new(), head }
    }

    /// Constants that are part of the module's state dict.
    pub fn persistent_constants(&self) -> impl Iterator<Item = &Constant> {
        self.constants.iter().filter(|constant| constant.is_persistent)
    }
}

/// Whether an f32 can have this value.
fn is_in_f32(value: i64) -> bool {
    // At the largest values a cast back to i64 would not show the difference.
    value as f32 as i128 == value.into()
}

/// Says that a step changes this parameter or buffer, and what to do.
#[must_use]
pub fn changes(name: &str) -> String {
    format!(
        "changes {name} in a step, and only BatchNorm's statistics are kept exactly: compute it from the inputs, or let \
         the optimizer change it"
    )
}

/// Says that nothing can be trained, and what to do.
pub const NO_GRADIENT: &str = "returns nothing that depends on a trained parameter through operators with a gradient: \
     detach(), torch.no_grad(), comparisons and argmax have none, and torch.utils.checkpoint needs use_reentrant=False";

/// Refuses a graph whose outputs can have no gradient, or that has gradients which cannot be summed over ranks.
fn check_gradients(graph: &Graph, parameters: &[Parameter]) -> Result<(), String> {
    let is_trained = |source: &InputSource| matches!(source, InputSource::Parameter(index) if parameters[*index].requires_grad);
    let mut dependent = vec![false; graph.values as usize];
    for (value, source) in &graph.inputs {
        dependent[value.0 as usize] = is_trained(source);
    }
    // Without any, the recipe is refused elsewhere.
    let mut may_depend = !dependent.contains(&true);
    for node in &graph.nodes {
        let is_detached = matches!(base_name(&node.operator), "detach" | "detach_copy");
        let depends = node.has_gradient
            && !is_detached
            && node.uses().iter().any(|value| dependent[value.0 as usize]);
        if depends {
            if node.argument("sparse") == Some(&Argument::Bool(true)) {
                return Err(format!(
                    "{}: makes a sparse gradient, which ranks cannot add up: use sparse=False",
                    node.location
                ));
            }
            // The tensor that it writes into may be a view of an output.
            may_depend |= node.overwrites().is_some();
            node.makes().for_each(|value| dependent[value.0 as usize] = true);
        }
    }
    may_depend |= graph.outputs.iter().any(|value| dependent[value.0 as usize]);
    if may_depend { Ok(()) } else { Err(NO_GRADIENT.to_owned()) }
}

/// A shape as text, such as `(samples, 3, any)`.
#[must_use]
pub fn shape_text(shape: &[Option<u64>]) -> String {
    let size = |(axis, size): (usize, &Option<u64>)| match (size, axis) {
        (Some(size), _) => size.to_string(),
        (None, 0) => "samples".to_owned(),
        (None, _) => "any".to_owned(),
    };
    let sizes: Vec<String> = shape.iter().enumerate().map(size).collect();
    format!("({})", sizes.join(", "))
}

/// The only model of a file.
fn model_name(archive: &Archive) -> Result<String, String> {
    let names = archive
        .names("models/")
        .filter_map(|name| name.strip_prefix("models/")?.strip_suffix(".json").map(str::to_owned));
    let names: Vec<String> = names.collect();
    match names.as_slice() {
        [name] => Ok(name.clone()),
        [] => {
            Err("has no models/model.json: write it with torch.export.save of PyTorch 2.11"
                .to_owned())
        }
        names => Err(format!("has several models, {}: save one", names.join(", "))),
    }
}

fn parse<'a, T: Deserialize<'a>>(text: &'a [u8], name: &str) -> Result<T, String> {
    serde_json::from_slice(text).map_err(|error| {
        format!("models/{name}.json cannot be read ({error}): export it with PyTorch 2.11")
    })
}

/// The lists of weights and constants.
struct Stored<'a> {
    archive: &'a Archive,
    weights: Payload,
    constants: Payload,
}

const WEIGHTS_FOLDER: &str = "data/weights";
const CONSTANTS_FOLDER: &str = "data/constants";

impl<'a> Stored<'a> {
    fn read(archive: &'a Archive, name: &str) -> Result<Self, String> {
        let list = |folder: &str, kind: &str| {
            let path = format!("{folder}/{name}_{kind}_config.json");
            let text = archive.read(&path)?;
            serde_json::from_slice(&text).map_err(|error| format!("{path} is damaged: {error}"))
        };
        let (weights, constants) =
            (list(WEIGHTS_FOLDER, "weights")?, list(CONSTANTS_FOLDER, "constants")?);
        Ok(Self { archive, weights, constants })
    }

    /// A parameter or buffer. Buffers that are not persistent are among the constants.
    fn find(&self, name: &str) -> Result<(StoredTensor, bool), String> {
        let lists = [(&self.weights, WEIGHTS_FOLDER), (&self.constants, CONSTANTS_FOLDER)];
        let found =
            lists.into_iter().find_map(|(list, folder)| Some((list.config.get(name)?, folder)));
        let (entry, folder) =
            found.ok_or_else(|| format!("has no values of {name}: it is damaged"))?;
        let tensor = stored(name, entry, folder, |path| self.archive.size(path))?;
        let requires_grad = entry.tensor_meta.as_ref().is_some_and(|meta| meta.requires_grad);
        Ok((tensor, requires_grad))
    }
}

/// What a value of the graph's inputs is.
enum InputOrigin {
    Parameter(usize),
    Buffer(usize),
    Input(usize),
}

/// The inputs of the graph while they are read.
#[derive(Default)]
struct GraphInputs {
    parameters: Vec<Parameter>,
    buffers: Vec<Constant>,
    values: BTreeMap<ValueId, InputOrigin>,
    inputs: Vec<OpenInput>,
}

/// An input, with the symbol of its number of samples.
struct OpenInput {
    name: String,
    dtype: Dtype,
    sizes: Vec<JsonSize>,
}

impl GraphInputs {
    /// Adds an input; returns its name in the graph.
    fn add<'a>(
        &mut self,
        spec: &'a InputSpec,
        stored: &Stored<'_>,
        graph: &schema::Graph,
    ) -> Result<Option<(&'a str, InputOrigin)>, String> {
        let (name, origin) = match spec {
            InputSpec::Parameter { arg, parameter_name } => {
                (&arg.name, InputOrigin::Parameter(self.parameter(parameter_name, stored)?))
            }
            InputSpec::Buffer { arg, buffer_name, persistent } => {
                (&arg.name, self.buffer(buffer_name, *persistent, stored)?)
            }
            InputSpec::TensorConstant { arg, tensor_constant_name } => {
                (&arg.name, self.buffer(tensor_constant_name, false, stored)?)
            }
            InputSpec::UserInput { arg: schema::Argument::AsTensor(name) } => {
                let meta = graph.tensor_values.get(&name.name);
                let meta =
                    meta.ok_or_else(|| format!("does not describe its input {}", name.name))?;
                let dtype = Dtype::of(meta.dtype)
                    .ok_or_else(|| format!("input {} has an unknown type", name.name))?;
                let sizes = meta.sizes.clone();
                self.inputs.push(OpenInput { name: name.name.clone(), dtype, sizes });
                (&name.name, InputOrigin::Input(self.inputs.len() - 1))
            }
            // A constant argument such as None or True: it is part of the nodes already.
            InputSpec::UserInput { .. } | InputSpec::ConstantInput(_) => return Ok(None),
            InputSpec::CustomObj(_) | InputSpec::Token(_) => {
                return Err("uses a custom object, which only Python can make".to_owned());
            }
        };
        Ok(Some((name, origin)))
    }

    fn parameter(&mut self, name: &str, stored: &Stored<'_>) -> Result<usize, String> {
        let (tensor, requires_grad) = stored.find(name)?;
        if tensor.dtype != Dtype::F32 {
            return Err(format!(
                "parameter {name} is {}, but master weights are float32: call model.float() before the export, and \
                 set precision.compute",
                tensor.dtype.name()
            ));
        }
        let tied = self.parameters.iter().position(|other| other.tensor.is_tied_to(&tensor));
        if let Some(index) = tied {
            self.parameters[index].aliases.push(name.to_owned());
            return Ok(index);
        }
        self.parameters.push(Parameter { tensor, requires_grad, aliases: Vec::new() });
        Ok(self.parameters.len() - 1)
    }

    fn buffer(
        &mut self,
        name: &str,
        is_persistent: bool,
        stored: &Stored<'_>,
    ) -> Result<InputOrigin, String> {
        let (tensor, _) = stored.find(name)?;
        self.buffers.push(Constant { tensor, is_persistent });
        Ok(InputOrigin::Buffer(self.buffers.len() - 1))
    }
}

impl OpenInput {
    fn finish(
        self,
        ranges: &BTreeMap<String, schema::RangeConstraint>,
    ) -> Result<InputTensor, String> {
        let Self { name, dtype, sizes } = self;
        let samples = match sizes.first() {
            Some(JsonSize::AsExpr(expression)) => &expression.expr_str,
            Some(JsonSize::AsInt(samples)) => {
                return Err(format!(
                    "takes exactly {samples} samples: export it with dynamic_shapes=({{0: torch.export.Dim(\"b\", min=2, \
                     max=4096)}},)"
                ));
            }
            None => return Err(format!("input {name} is a single number, not a batch")),
        };
        let range = ranges.get(symbol(samples));
        let min = range.and_then(|range| range.min_val).unwrap_or(SMALLEST_OPEN_SIZE);
        if min > SMALLEST_OPEN_SIZE {
            return Err(format!(
                "takes at least {min} samples, but the last batch of an evaluation may be smaller: export it with min=2"
            ));
        }
        let max_samples =
            range.and_then(|range| range.max_val).and_then(|max| u64::try_from(max).ok());
        Ok(InputTensor { name, dtype, shape: shape(&sizes), max_samples })
    }
}

fn shape(sizes: &[JsonSize]) -> Vec<Option<u64>> {
    let size = |size: &JsonSize| match size {
        JsonSize::AsInt(size) => u64::try_from(*size).ok(),
        JsonSize::AsExpr(_) => None,
    };
    sizes.iter().map(size).collect()
}

/// The whole program's signature.
fn signature(module: &schema::GraphModule) -> Option<&schema::CallSignature> {
    module.module_call_graph.first()?.signature.as_ref()
}

/// Keys of the outputs, if the program returns a dictionary of tensors.
fn output_names(module: &schema::GraphModule) -> Option<Vec<String>> {
    let (_version, spec): (u64, schema::TreeSpec) =
        serde_json::from_str(&signature(module)?.out_spec).ok()?;
    let names: Vec<String> = match spec.kind.as_deref() {
        Some("builtins.dict") => serde_json::from_str(&spec.context?).ok()?,
        _ => return None,
    };
    (names.len() == spec.children_spec.len()).then_some(names)
}

/// The number of samples, as the file writes it: the first size of the first input.
fn samples(module: &schema::GraphModule) -> Option<&str> {
    let input = module.signature.input_specs.iter().find_map(|spec| match spec {
        InputSpec::UserInput { arg: schema::Argument::AsTensor(name) } => Some(&name.name),
        _ => None,
    });
    module.graph.tensor_values.get(input?)?.sizes.first()?.expression()
}

/// The values that the program returns, with their descriptions.
fn outputs(
    module: &schema::GraphModule,
    scope: &Scope,
) -> Result<(Vec<ValueId>, Vec<OutputTensor>), String> {
    let (mut values, mut outputs) = (Vec::new(), Vec::new());
    let samples = samples(module);
    for spec in &module.signature.output_specs {
        match spec {
            OutputSpec::UserOutput { arg: schema::Argument::AsTensor(name) } => {
                let meta = module.graph.tensor_values.get(&name.name);
                let value = scope.get(&name.name);
                let (value, meta) = value.zip(meta).ok_or_else(|| {
                    format!("does not make its output {}: it is damaged", name.name)
                })?;
                values.push(value);
                let first = meta.sizes.first().and_then(JsonSize::expression);
                outputs.push(OutputTensor {
                    name: None,
                    shape: shape(&meta.sizes),
                    counts_samples: first.is_some() && first == samples,
                });
            }
            OutputSpec::UserOutput { .. } => {
                return Err("returns something else than tensors: export a module that returns a tensor of shape \
                            (samples, outputs)"
                    .to_owned());
            }
            OutputSpec::BufferMutation { buffer_name: name }
            | OutputSpec::ParameterMutation { parameter_name: name }
            | OutputSpec::UserInputMutation { user_input_name: name } => {
                return Err(format!(
                    "returns a new {name}, as programs do after run_decompositions: save the result of \
                     torch.export.export itself"
                ));
            }
            OutputSpec::LossOutput(_)
            | OutputSpec::GradientToParameter(_)
            | OutputSpec::GradientToUserInput(_)
            | OutputSpec::Token(_) => {
                return Err(
                    "is a joint graph with its gradients: export the module itself".to_owned()
                );
            }
        }
    }
    if let Some(names) = output_names(module).filter(|names| names.len() == outputs.len()) {
        outputs.iter_mut().zip(names).for_each(|(output, name)| output.name = Some(name));
    }
    match outputs.is_empty() {
        true => Err("returns nothing: export a module that returns a tensor".to_owned()),
        false => Ok((values, outputs)),
    }
}

/// Why another operator cannot use the statistics of a BatchNorm.
fn uses_statistics(name: &str) -> String {
    format!(
        "another operator uses {name} of this BatchNorm in training, which PyTorch changes in the forward pass and Baton at \
         the end of the step: compute the statistics of the batch, or keep a buffer that does not change"
    )
}

/// Whether a buffer is BatchNorm's number of updates.
fn is_update_count(name: &str) -> bool {
    name.rsplit('.').next() == Some("num_batches_tracked")
}

type Statistics = (BTreeMap<usize, usize>, Vec<NormNode>, Vec<StoredTensor>);

/// Which buffers are statistics, by their index among the buffers.
fn statistics(
    found: &[FoundNorm],
    buffers: &[Constant],
    graph: &Graph,
) -> Result<Statistics, String> {
    let (mut roles, mut tensors) = (BTreeMap::new(), Vec::new());
    let mut norms = Vec::new();
    for FoundNorm { node, buffers: pair, momentum, is_training, has_one_value } in found {
        let mut indices = [0; 2];
        for (index, buffer) in indices.iter_mut().zip(pair) {
            let tensor = &buffers[*buffer].tensor;
            if tensor.dtype != Dtype::F32 {
                return Err(format!("{} is {}, not float32", tensor.name, tensor.dtype.name()));
            }
            if roles.contains_key(buffer) {
                return Err(format!(
                    "{}: this BatchNorm is used twice in a step, and its statistics would depend on the order: use \
                     two modules",
                    graph.nodes[*node].location
                ));
            }
            *index = tensors.len();
            roles.insert(*buffer, tensors.len());
            tensors.push(tensor.clone());
        }
        let [mean, variance] = indices;
        norms.push(NormNode {
            node: *node,
            mean,
            variance,
            momentum: *momentum,
            is_training: *is_training,
            has_one_value: *has_one_value,
        });
    }
    Ok((roles, norms, tensors))
}
