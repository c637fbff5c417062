//! Networks that `torch.export` wrote: their operators, called by name through libtorch's dispatcher (executor.cpp).
//!
//! Where bits depend on it, the graph is not run as it is. BatchNorm's statistics go into the leaf. Operators that draw
//! random numbers get their seed from (seed, epoch, first sample of the micro-batch, node): the same on any number of
//! ranks, and after a resume.
#![allow(unsafe_code)]

mod executor;

use std::path::Path;

use baton_data::random::Draws;
use baton_model::{InputShape, NetworkDescription};
use baton_program::{
    Dtype, InputSource, Normalisation, Parameter, Program, StoredTensor, program::shape_text,
};
use baton_recipe::{JobSpec, spec::Compute};
use tch::{Device, Kind, Tensor};

use self::executor::{Executor, HowToRun, RunError};
use super::{
    failure::During,
    network::{NetworkState, PassResult, TorchNetwork},
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
    /// Number format of autocast.
    autocast: Option<Dtype>,
}

impl ProgramNetwork {
    /// Reads the program of a recipe. Weights are read later.
    ///
    /// # Errors
    /// The program cannot be read, run, or does not fit the recipe.
    pub(super) fn read(spec: &JobSpec, device: Device) -> Result<Self, Error> {
        let program = Program::read(Path::new(&spec.model.program)).map_err(recipe)?;
        let fail = |problem: String| recipe(program.error(problem));
        let normalisation = Normalisation { mean: spec.data.mean, std: spec.data.std };
        program.fits(spec.model.num_classes, &normalisation).map_err(recipe)?;
        let parameters = program.parameters.iter().flat_map(Parameter::names);
        let statistics = program.statistics.iter().map(|tensor| tensor.name.as_str());
        spec.model.check_patterns(parameters, statistics).map_err(Error::Recipe)?;
        let description = program.describe(|name| spec.model.is_frozen_in_program(name));
        let description = description.without_decay(|name| spec.model.is_without_decay(name));
        if description.parameters.iter().all(baton_model::Tensor::is_frozen) {
            return Err(fail(
                "has no parameter to train: set requires_grad, or change model.freeze".to_owned(),
            ));
        }
        let is_frozen = |index: usize| description.statistics[index].is_frozen();
        let evaluation = program.evaluation().map_err(recipe)?;
        let training = program.graph.for_training(&program.norms, is_frozen);
        let constants = program.constants.iter();
        let constants = constants.map(|constant| value(&program, &constant.tensor, device));
        Ok(Self {
            constants: constants.collect::<Result<_, _>>()?,
            training: Executor::new(&training, device).map_err(&fail)?,
            evaluation: Executor::new(&evaluation, device).map_err(&fail)?,
            autocast: match spec.precision.compute {
                Compute::Fp32 => None,
                Compute::Bf16 => Some(Dtype::Bf16),
                Compute::Fp16 => Some(Dtype::F16),
            },
            description,
            program,
        })
    }

    /// The tensor behind an input of the graph.
    fn source<'a>(
        &'a self,
        source: InputSource,
        inputs: &'a Tensor,
        state: NetworkState<'a>,
    ) -> &'a Tensor {
        match source {
            InputSource::Parameter(index) => &state.parameters[index],
            InputSource::Statistic(index) if self.description.statistics[index].is_frozen() => {
                &state.running[index]
            }
            InputSource::Statistic(index) => &state.batch.unwrap_or(state.running)[index],
            InputSource::Constant(index) => &self.constants[index],
            InputSource::Input => inputs,
        }
    }

    fn run(
        &self,
        inputs: &Tensor,
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
            // All parameters share their memory, so that any of them may be meant.
            let what = match self.program.constants.get(index) {
                Some(constant) => format!("buffer {}", constant.tensor.name),
                None => "a parameter".to_owned(),
            };
            return Err(recipe(self.program.error(format!(
                "changes {what} in a step, and only BatchNorm's statistics are kept exactly: compute it from the \
                 inputs, or let the optimizer change it"
            ))));
        }
        match outputs {
            Ok(Some(outputs)) => outputs.f_to_kind(Kind::Float).map(Some).during("forward pass"),
            Ok(None) => Ok(None),
            Err(RunError { location, error }) => {
                let located = |text: String| tch::TchError::Torch(format!("{location}: {text}"));
                let located = match error {
                    tch::TchError::Torch(text) => located(text),
                    other => located(other.to_string()),
                };
                Err(located).during("forward pass")
            }
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
        self.program.min_batch
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
            let back = kept.f_to_kind(value.kind()).during("read the weights")?;
            if !back.f_equal(&value).during("read the weights")? && tensor.dtype != Dtype::F32 {
                return Err(recipe(self.program.error(format!(
                    "keeps buffer {} with integers that float32 has not: register it with persistent=False",
                    tensor.name
                ))));
            }
            Ok((tensor.name.clone(), kept))
        });
        values.collect::<Result<_, _>>().map(Some)
    }

    fn prepared(&self, inputs: Tensor) -> Result<Tensor, Error> {
        let expected = &self.program.input;
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
        let samples = sizes.first().copied().unwrap_or_default();
        let too_many = expected.max_samples.is_some_and(|max| samples as u64 > max);
        if sizes.len() != expected.shape.len() || !sizes.iter().zip(&expected.shape).all(fits) {
            let (name, shape) = (&expected.name, shape_text(&expected.shape));
            let found: Vec<Option<u64>> =
                sizes.iter().skip(1).map(|size| u64::try_from(*size).ok()).collect();
            let found = shape_text(&[&[None], &found[..]].concat());
            return Err(recipe(self.program.error(format!(
                "takes {name} of shape {shape}, but the data are {found}: set train.resolution, or export it for this shape"
            ))));
        }
        if too_many {
            return Err(recipe(self.program.error(format!(
                "takes at most {} samples, but a batch has {samples}: export it with a larger max, or lower \
                 train.global_batch or evaluation.batch",
                expected.max_samples.unwrap_or_default()
            ))));
        }
        inputs.f_to_kind(kind(expected.dtype)).during("prepare inputs")
    }

    fn input_kind(&self) -> Kind {
        // Autocast converts where it has to.
        Kind::Float
    }

    fn outputs(
        &self,
        inputs: &Tensor,
        state: NetworkState<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Tensor>, Error> {
        self.run(inputs, state, None, is_interrupted)
    }

    fn gradients(
        &self,
        inputs: &Tensor,
        state: NetworkState<'_>,
        random: Draws,
        loss: &mut dyn FnMut(&Tensor) -> tch::Result<(Tensor, Tensor)>,
    ) -> Result<PassResult, Error> {
        let outputs = self.run(inputs, state, Some(random), &mut || false)?;
        // It was not interrupted.
        let outputs = outputs.ok_or_else(|| Error::Recipe("no outputs".to_owned()))?;
        let mut backward = || {
            let (loss, objective) = loss(&outputs)?;
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
