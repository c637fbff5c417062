//! Networks that `torch.export` wrote: their operators, called by name through libtorch's dispatcher (executor.cpp).
//!
//! Where bits depend on it, the graph is not run as it is. BatchNorm's statistics go into the leaf. Operators that draw
//! random numbers get their seed from (seed, epoch, first sample of the micro-batch, node): the same on any number of
//! ranks, and after a resume.
#![allow(unsafe_code)]

mod executor;

use baton_data::{InputType, random::Draws};
use baton_model::{InputShape, NetworkDescription};
use baton_program::{
    Dtype, InputRoles, InputSource, InputTensor, Program, StoredTensor,
    program::{NO_GRADIENT, changes, shape_text},
};
use baton_recipe::{
    JobSpec,
    spec::{Compute, LossKind},
};
use tch::{Device, Kind, Tensor};

use self::executor::{Executor, HowToRun, RunError};
use super::{
    failure::During,
    network::{NetworkInputs, NetworkState, PassResult, StageFinished, TorchNetwork},
};
use crate::learner::Error;

/// A program on a device.
#[derive(Debug)]
pub(super) struct ProgramNetwork {
    program: Program,
    description: NetworkDescription,
    constants: Vec<Tensor>,
    training: Executor,
    evaluation: Executor,
    roles: InputRoles,
    /// The outputs that are the loss and its metrics, if the program computes them.
    losses: Option<Vec<usize>>,
    /// Number format of autocast.
    autocast: Option<Dtype>,
}

impl ProgramNetwork {
    /// Reads the program of a recipe. Weights are read later.
    ///
    /// # Errors
    /// The program cannot be read, run, or does not fit the recipe.
    pub(super) fn read(
        spec: &JobSpec,
        input_type: &InputType,
        device: Device,
    ) -> Result<Self, Error> {
        let (program, roles) = Program::of_recipe(spec).map_err(recipe)?;
        if *input_type == InputType::Image {
            program.check_images(spec).map_err(recipe)?;
        }
        let fail = |problem: String| recipe(program.error(problem));
        let losses = match spec.loss.kind {
            LossKind::Program => program.loss_outputs(&spec.loss.metrics),
            _ => None,
        };
        let without_decay = spec.model.no_decay_patterns();
        let description = program.describe().without_decay(|name| without_decay.matches(name));
        let evaluation = program.evaluation().map_err(recipe)?;
        let training = program.graph.for_training(&program.norms);
        let recomputed = program.recomputed(&spec.train.recompute).map_err(recipe)?;
        let constants = program.constants.iter();
        let constants = constants.map(|constant| value(&program, &constant.tensor, device));
        Ok(Self {
            constants: constants.collect::<Result<_, _>>()?,
            training: Executor::new(&training, recomputed, device).map_err(&fail)?,
            evaluation: Executor::new(&evaluation, Vec::new(), device).map_err(&fail)?,
            autocast: match spec.precision.compute {
                Compute::Fp32 => None,
                Compute::Bf16 => Some(Dtype::Bf16),
                Compute::Fp16 => Some(Dtype::F16),
            },
            roles,
            losses,
            description,
            program,
        })
    }

    /// The tensor behind an input of the graph.
    fn source<'a>(
        &'a self,
        source: InputSource,
        inputs: &'a NetworkInputs,
        state: NetworkState<'a>,
    ) -> &'a Tensor {
        match source {
            InputSource::Parameter(index) => &state.parameters[index],
            InputSource::Statistic(index) if self.description.statistics[index].is_frozen() => {
                &state.running[index]
            }
            InputSource::Statistic(index) => &state.batch.unwrap_or(state.running)[index],
            InputSource::Constant(index) => &self.constants[index],
            InputSource::Input(index) if self.roles.target == Some(index) => &inputs.targets,
            InputSource::Input(index) => {
                let extra = self.roles.extras.iter().position(|extra| *extra == index);
                extra.map_or(&inputs.main, |extra| &inputs.extras[extra])
            }
        }
    }

    fn run(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        mut random: Option<Draws>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Tensor>, Error> {
        let executor = if state.batch.is_some() { &self.training } else { &self.evaluation };
        let given = || self.constants.iter().chain(state.parameters).chain(state.running);
        let versions = || -> Vec<u32> { given().map(executor::version).collect() };
        let before = versions();
        let how = HowToRun {
            has_gradient: random.is_some(),
            autocast: self.autocast,
            seed: &mut || random.as_mut().map_or(0, Draws::bits),
        };
        let outputs =
            executor.run(&|source| self.source(source, inputs, state), how, is_interrupted);
        let changed = before.iter().zip(versions()).position(|(before, after)| *before != after);
        if let Some(index) = changed {
            // The file does not show every change. All parameters share their memory, so that any may be meant.
            let constant = self.program.constants.get(index);
            let what = constant.map_or("a parameter", |constant| &constant.tensor.name);
            return Err(recipe(self.program.error(changes(what))));
        }
        match outputs {
            Ok(Some(outputs)) => {
                self.check_outputs(&outputs, inputs)?;
                self.output(&outputs).map(Some).during("forward pass")
            }
            Ok(None) => Ok(None),
            Err(RunError { location, error }) => {
                let text = match error {
                    tch::TchError::Torch(text) => text,
                    other => other.to_string(),
                };
                let located = format!("{location}: {text}");
                // libtorch's errors are texts: recompute.cpp begins those about the recipe with its key.
                if text.starts_with("train.recompute") {
                    let line = located.lines().next().unwrap_or_default();
                    return Err(recipe(self.program.error(format!("cannot be run: {line}"))));
                }
                Err(tch::TchError::Torch(located)).during("forward pass")
            }
        }
    }
}

impl ProgramNetwork {
    /// Checks that the outputs have the samples of the inputs: the file tells their shapes for several samples only.
    fn check_outputs(&self, outputs: &[Tensor], inputs: &NetworkInputs) -> Result<(), Error> {
        let samples = inputs.main.size().first().copied().unwrap_or_default();
        for (output, declared) in outputs.iter().zip(&self.program.outputs) {
            let size = |size: &Option<u64>| size.map_or(samples, |size| size as i64);
            let (found, expected) =
                (output.size(), declared.shape.iter().map(size).collect::<Vec<_>>());
            if found != expected {
                let remedy = match samples {
                    1 => {
                        "squeeze() without an axis drops that of a single sample; name the axis, as in squeeze(-1)"
                    }
                    _ => "write forward for any number of samples",
                };
                return Err(recipe(self.program.error(format!(
                    "returns the shape {found:?} for a batch of {samples}, in place of {expected:?}: {remedy}, and export \
                     it again"
                ))));
            }
        }
        Ok(())
    }

    /// Scores or values, f32; or the loss and the metrics of each sample.
    fn output(&self, outputs: &[Tensor]) -> tch::Result<Tensor> {
        let Some(losses) = &self.losses else { return outputs[0].f_to_kind(Kind::Float) };
        let losses = losses.iter().zip(0..).map(|(index, number)| {
            let values = outputs[*index].f_to_kind(Kind::Float)?;
            // Metrics come after the loss. Zero times an infinite derivative would be a gradient that is no number.
            if number == 0 { Ok(values) } else { values.f_detach() }
        });
        Tensor::f_stack(&losses.collect::<tch::Result<Vec<_>>>()?, 1)
    }

    /// The input of `data.input_field`.
    fn main_input(&self, inputs: Tensor) -> Result<Tensor, Error> {
        let expected = &self.program.inputs[self.roles.main];
        // A signal of one channel may come without its axis of channels, and the other way round.
        let inputs = match (inputs.size().as_slice(), expected.shape.as_slice()) {
            ([_, 1, _], [_, _]) => inputs.f_squeeze_dim(1).during("prepare inputs")?,
            ([_, _], [_, Some(1), _]) => inputs.f_unsqueeze(1).during("prepare inputs")?,
            _ => inputs,
        };
        let sizes = inputs.size();
        let fits = |(size, expected): (&i64, &Option<u64>)| {
            expected.is_none_or(|expected| i64::try_from(expected) == Ok(*size))
        };
        if sizes.len() != expected.shape.len() || !sizes.iter().zip(&expected.shape).all(fits) {
            return Err(self.misfit(
                expected,
                &sizes,
                "set train.resolution, or export it for this shape",
            ));
        }
        self.check_samples(expected, &sizes)?;
        inputs.f_to_kind(kind(expected.dtype)).during("prepare inputs")
    }

    /// Values (samples, values) in the shape of an input. Field and input agree on the number of values.
    fn shaped(&self, expected: &InputTensor, values: Tensor) -> Result<Tensor, Error> {
        let sizes = values.size();
        let samples = sizes.first().copied().unwrap_or_default();
        let shape =
            expected.shape.iter().skip(1).map(|size| size.and_then(|n| i64::try_from(n).ok()));
        let shape: Option<Vec<i64>> = std::iter::once(Some(samples)).chain(shape).collect();
        let product = |shape: &[i64]| shape.iter().try_fold(1_i64, |all, n| all.checked_mul(*n));
        let shape = shape.filter(|shape| product(shape) == i64::try_from(values.numel()).ok());
        let Some(shape) = shape else {
            return Err(self.misfit(
                expected,
                &sizes,
                "name another field, or export it for this shape",
            ));
        };
        self.check_samples(expected, &sizes)?;
        let shaped =
            values.f_reshape(shape).and_then(|values| values.f_to_kind(kind(expected.dtype)));
        shaped.during("prepare inputs")
    }

    fn misfit(&self, expected: &InputTensor, sizes: &[i64], remedy: &str) -> Error {
        let (name, shape) = (&expected.name, shape_text(&expected.shape));
        let found: Vec<Option<u64>> =
            sizes.iter().skip(1).map(|size| u64::try_from(*size).ok()).collect();
        let found = shape_text(&[&[None], &found[..]].concat());
        recipe(
            self.program.error(format!(
                "takes {name} of shape {shape}, but the data are {found}: {remedy}"
            )),
        )
    }

    fn check_samples(&self, expected: &InputTensor, sizes: &[i64]) -> Result<(), Error> {
        let samples = sizes.first().copied().unwrap_or_default().unsigned_abs();
        match expected.max_samples {
            Some(max) if samples > max => Err(recipe(self.program.error(format!(
                "takes at most {max} samples, but a batch has {samples}: export it with a larger max, or lower \
                 train.global_batch or evaluation.batch"
            )))),
            _ => Ok(()),
        }
    }
}

impl TorchNetwork for ProgramNetwork {
    fn description(&self) -> &NetworkDescription {
        &self.description
    }

    fn digest(&self) -> Option<&str> {
        Some(&self.program.digest)
    }

    fn min_batch(&self, _input: InputShape) -> u64 {
        self.program.min_batch()
    }

    fn momentum(&self, statistic: usize) -> f64 {
        let mut norms = self.program.norms.iter();
        let norm = norms.find(|norm| [norm.mean, norm.variance].contains(&statistic));
        norm.map_or(0.0, |norm| norm.momentum)
    }

    fn initial_values(&self) -> Result<Option<Vec<(String, Tensor)>>, Error> {
        let parameters = self.program.parameters.iter().map(|parameter| &parameter.tensor);
        let constants = self.program.persistent_constants().map(|constant| &constant.tensor);
        let all = parameters.chain(&self.program.statistics).chain(constants);
        let values = all.map(|tensor| {
            let value = value(&self.program, tensor, Device::Cpu)?;
            let kept = value.f_to_kind(Kind::Float).during("read the weights")?;
            Ok((tensor.name.clone(), kept))
        });
        values.collect::<Result<_, _>>().map(Some)
    }

    fn prepared(&self, inputs: NetworkInputs) -> Result<NetworkInputs, Error> {
        let NetworkInputs { main, extras, targets, lengths } = inputs;
        let named = |index: usize, values| self.shaped(&self.program.inputs[index], values);
        let extras = self.roles.extras.iter().zip(extras);
        Ok(NetworkInputs {
            main: self.main_input(main)?,
            extras: extras
                .map(|(index, values)| named(*index, values))
                .collect::<Result<_, _>>()?,
            targets: match self.roles.target {
                None => targets,
                Some(index) => named(index, targets)?,
            },
            lengths,
        })
    }

    fn input_kind(&self) -> Kind {
        // Autocast converts where it has to.
        Kind::Float
    }

    fn outputs(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Tensor>, Error> {
        self.run(inputs, state, None, is_interrupted)
    }

    fn gradients(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        random: Draws,
        loss: &mut dyn FnMut(&Tensor) -> tch::Result<(Tensor, Tensor)>,
        _finished: Option<&mut StageFinished<'_>>,
    ) -> Result<PassResult, Error> {
        let outputs = self.run(inputs, state, Some(random), &mut || false)?;
        // It was not interrupted.
        let outputs = outputs.ok_or_else(|| Error::Recipe("no outputs".to_owned()))?;
        let (loss, objective) = loss(&outputs).during("forward pass")?;
        // libtorch's backward pass would read what is not there.
        if !objective.requires_grad() {
            return Err(recipe(self.program.error(NO_GRADIENT)));
        }
        let backward = || {
            let indices = (0..state.parameters.len())
                .filter(|index| !self.description.parameters[*index].is_frozen());
            let indices: Vec<usize> = indices.collect();
            let parameters: Vec<&Tensor> =
                indices.iter().map(|index| &state.parameters[*index]).collect();
            let gradients = Tensor::f_run_backward(&[&objective], &parameters, false, false)?;
            let gradients = indices.into_iter().zip(gradients);
            Ok(PassResult {
                outputs: outputs.f_detach()?,
                loss: loss.f_detach()?,
                gradients: gradients.filter(|(_, gradient)| gradient.defined()).collect(),
            })
        };
        backward().during("backward pass")
    }
}

fn recipe(error: baton_program::Error) -> Error {
    Error::Recipe(format!("model.program: {error}"))
}

fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::U8 => Kind::Uint8,
        Dtype::I8 => Kind::Int8,
        Dtype::I16 => Kind::Int16,
        Dtype::I32 => Kind::Int,
        Dtype::I64 => Kind::Int64,
        Dtype::F16 => Kind::Half,
        Dtype::F32 => Kind::Float,
        Dtype::F64 => Kind::Double,
        Dtype::Bool => Kind::Bool,
        Dtype::Bf16 => Kind::BFloat16,
    }
}

/// A tensor of the file, contiguous.
fn value(program: &Program, tensor: &StoredTensor, device: Device) -> Result<Tensor, Error> {
    let storage = program.storage(tensor).map_err(recipe)?;
    let signed = |sizes: &[u64]| sizes.iter().map(|size| *size as i64).collect::<Vec<i64>>();
    let kind = kind(tensor.dtype);
    let elements = storage.len() as u64 / tensor.dtype.bytes();
    let read = || {
        let flat = Tensor::f_from_data_size(&storage, &[elements as i64], kind)?;
        let offset = tensor.offset as i64;
        let view = flat.f_as_strided(signed(&tensor.shape), signed(&tensor.strides), offset)?;
        view.f_contiguous()?.f_to_device(device)
    };
    read().during("read the weights")
}
