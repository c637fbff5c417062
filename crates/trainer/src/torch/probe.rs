//! What one step of a network computes for given inputs, so that a user can compare it with PyTorch.

use std::{collections::BTreeMap, fs, path::Path};

use baton_data::{
    Batch, InputType, Inputs, Labels,
    random::{Draws, RandomPurpose},
};
use baton_recipe::JobSpec;
use tch::{Kind, Tensor};

use super::{
    failure::During,
    learner::{TorchLearner, copy_out, state},
    network::NetworkInputs,
};
use crate::learner::{Error, rest};

/// Inputs and targets of one micro-batch, from a safetensors file.
#[derive(Debug)]
pub struct ProbeBatch {
    /// As the network takes them, already normalised: images (samples, 3, height, width), arrays (samples, …), or token
    /// ids (samples, tokens).
    inputs: Tensor,
    /// The inputs that the recipe names in `data.extra_fields`.
    extras: Vec<Tensor>,
    /// Classes, i64, (samples); values, f32, (samples, outputs); or a label for each token, i64, (samples, tokens).
    targets: Tensor,
    labels: Labels,
}

/// What a step computes.
#[derive(Debug)]
pub struct Probe {
    /// Mean loss of the samples.
    pub loss: f64,
    /// `loss`, `output`, `grad.<parameter>`, `buffer.<name>`, on the CPU.
    pub tensors: Vec<(String, Tensor)>,
}

impl ProbeBatch {
    /// Reads the tensors `input`, or `input.<name>`, those of the recipe's `data.extra_fields`, and `target`.
    ///
    /// # Errors
    /// The file does not consist of these tensors, or the target is not what the recipe's loss takes.
    pub fn read(path: &Path, spec: &JobSpec) -> Result<Self, Error> {
        let fail = |problem: String| Error::Recipe(format!("inputs {}: {problem}", path.display()));
        let tensors = Tensor::read_safetensors(path).map_err(|error| fail(error.to_string()))?;
        let mut tensors: BTreeMap<String, Tensor> = tensors.into_iter().collect();
        let samples = |tensor: &Tensor| tensor.size().first().copied().unwrap_or_default();
        let mut take = |name: String| {
            tensors.remove(&name).ok_or_else(|| fail(format!("has no tensor {name}")))
        };
        let targets = take("target".to_owned())?;
        let extras = spec.data.extra_fields.iter().map(|field| take(format!("input.{field}")));
        let extras: Vec<Tensor> = extras.collect::<Result<_, _>>()?;
        let mut rest = tensors.into_iter();
        let (inputs, other) = match (rest.next(), rest.next()) {
            (Some((name, inputs)), other) if name.split('.').next() == Some("input") => {
                (inputs, other.map(|(name, _)| name))
            }
            (Some((name, _)), _) => (Tensor::new(), Some(name)),
            (None, _) => return Err(fail("has no tensor input".to_owned())),
        };
        if let Some(name) = other {
            return Err(fail(format!(
                "{name} is neither the input nor the target: remove it, or name it in data.extra_fields"
            )));
        }
        let expected = samples(&targets);
        if let Some(found) = extras.iter().chain([&inputs]).map(samples).find(|n| *n != expected) {
            return Err(fail(format!("has {found} inputs and {expected} targets")));
        }
        if expected == 0 {
            return Err(fail("has no samples".to_owned()));
        }
        let labels = Labels::of_recipe(spec);
        let targets = match labels {
            Labels::Tokens => labels_of_tokens(&inputs, &targets),
            _ => shaped(&targets, labels),
        };
        let targets = targets.map_err(fail)?;
        Ok(Self { inputs, extras, targets, labels })
    }

    /// The type of the inputs, which decides how many channels a network of `crates/model` gets. To a program, images are
    /// arrays: the batch has their size, and not the recipe.
    #[must_use]
    pub fn input_type(&self, spec: &JobSpec) -> InputType {
        let sizes = self.inputs.size();
        match sizes.as_slice() {
            _ if self.labels == Labels::Tokens => InputType::Tokens,
            [_, _, _, _] if !spec.model.arch.is_program() => InputType::Image,
            sizes => {
                InputType::Array(sizes.iter().skip(1).map(|size| size.unsigned_abs()).collect())
            }
        }
    }
}

/// The labels of token ids, as a learner gets them.
fn labels_of_tokens(inputs: &Tensor, targets: &Tensor) -> Result<Tensor, String> {
    let is_list = |tensor: &Tensor| tensor.kind() == Kind::Int64 && tensor.dim() == 2;
    if !is_list(inputs) || !is_list(targets) || inputs.size() != targets.size() {
        return Err(format!(
            "input is {:?} {:?} and target {:?} {:?}, but a language model needs int64 token ids and labels \
             (-100: none), both of shape (samples, tokens)",
            inputs.kind(),
            inputs.size(),
            targets.kind(),
            targets.size()
        ));
    }
    let flat = targets.f_reshape([-1]).map_err(|error| error.to_string())?;
    Ok(flat)
}

/// The targets as a learner gets them.
fn shaped(targets: &Tensor, labels: Labels) -> Result<Tensor, String> {
    let (kind, sizes) = (targets.kind(), targets.size());
    let samples = sizes.first().copied().unwrap_or_default();
    let (kinds, shape, expected) = match labels {
        Labels::Values(values) => (
            &[Kind::Float, Kind::Int64][..],
            vec![samples, values.into()],
            format!("float32 or int64 of shape (samples, {values})"),
        ),
        _ => (&[Kind::Int64][..], vec![samples], "int64 of shape (samples)".to_owned()),
    };
    if !kinds.contains(&kind) || targets.numel() as i64 != shape.iter().product::<i64>() {
        return Err(format!(
            "target is {kind:?} {sizes:?}, but the recipe's loss needs {expected}"
        ));
    }
    let kind = if shape.len() == 1 { Kind::Int64 } else { Kind::Float };
    let shaped = targets.f_to_kind(kind).and_then(|targets| targets.f_reshape(shape));
    shaped.map_err(|error| error.to_string())
}

impl Probe {
    /// Writes the tensors, at once: a reader never sees a part of the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), String> {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        // libtorch's text would not say so.
        fs::File::create(&part).map_err(|error| error.to_string())?;
        Tensor::write_safetensors(&self.tensors, &part).map_err(|error| error.to_string())?;
        fs::rename(&part, path).map_err(|error| error.to_string())
    }
}

impl TorchLearner {
    /// Computes one step of one virtual rank without the optimizer's update: the mean loss, the outputs in training mode,
    /// the loss's gradient for each trained parameter (without a loss scale), and the running statistics after the step;
    /// before it, except of a language model, the outputs in evaluation mode. Random operators draw as at the first step of
    /// a job.
    ///
    /// # Errors
    /// The device failed, or the inputs do not fit the network.
    pub fn probe(&mut self, batch: &ProbeBatch) -> Result<Probe, Error> {
        let inputs = match batch.labels {
            Labels::Tokens => self.texts(batch)?,
            _ => self.samples(batch)?,
        };
        let samples = inputs.targets.size().first().copied().unwrap_or_default();
        let evaluated = match batch.labels {
            Labels::Tokens => None,
            _ => self.evaluated(&inputs)?,
        };
        let leaf = self.leaf().during("allocate a leaf")?;
        let state = state(&self.working, &self.running_views, Some(&leaf.statistics_views));
        let random = Draws::new(self.recipe.seed, 0, 0, RandomPurpose::Layer);
        let scale = 1.0 / samples as f32;
        let mut loss = |outputs: &Tensor| {
            let loss = self.task.loss(outputs, &inputs.targets)?;
            let scaled = loss.f_mul_scalar(f64::from(scale))?;
            Ok((scaled.shallow_clone(), scaled))
        };
        let result = self.network.gradients(&inputs, state, random, &mut loss, None)?;
        let whole = rest(&[], leaf.gradient.numel());
        self.write_gradients(&result.gradients, &leaf.gradient, &whole)?;
        let _no_grad = tch::no_grad_guard();
        self.mix_statistics(&leaf.statistics).during("statistics update")?;
        let output = match self.network.scores(&inputs, state)? {
            None => result.outputs,
            Some(scores) => {
                let shape = [batch.inputs.size(), vec![-1]].concat();
                scores.f_view(shape.as_slice()).during("forward pass")?
            }
        };

        let mut tensors = vec![
            ("loss".to_owned(), copy_out(&result.loss)?),
            ("output".to_owned(), copy_out(&output)?),
        ];
        tensors.extend(evaluated.map(|outputs| ("evaluated".to_owned(), outputs)));
        let named = |kind: &str, name: &str| format!("{kind}.{name}");
        let gradients = self.gradients(&leaf)?.into_iter();
        tensors.extend(gradients.map(|(name, gradient)| (named("grad", &name), gradient)));
        let entries = self.layout.statistics.iter().zip(&self.running_views);
        for (entry, view) in entries.filter(|(entry, _)| !entry.is_constant) {
            tensors.push((named("buffer", &entry.name), copy_out(view)?));
        }
        let loss = f64::try_from(&result.loss).during("read the loss")?;
        Ok(Probe { loss, tensors })
    }

    /// The outputs in evaluation mode.
    fn evaluated(&self, inputs: &NetworkInputs) -> Result<Option<Tensor>, Error> {
        let _no_grad = tch::no_grad_guard();
        // A program may change its inputs in place. The copies have the same order in memory.
        let copy = |tensor: &Tensor| {
            let mut copy = tensor.f_empty_like()?;
            copy.f_copy_(tensor)?;
            Ok::<_, tch::TchError>(copy)
        };
        let copies = || {
            Ok(NetworkInputs {
                main: copy(&inputs.main)?,
                extras: inputs.extras.iter().map(copy).collect::<Result<_, _>>()?,
                targets: inputs.targets.shallow_clone(),
                lengths: inputs.lengths.clone(),
            })
        };
        let copies = copies().during("copy the inputs")?;
        let state = state(&self.working, &self.running_views, None);
        let outputs = self.network.outputs(&copies, state, &mut || false)?;
        outputs.as_ref().map(copy_out).transpose()
    }

    /// The texts of a batch on the device.
    fn texts(&mut self, batch: &ProbeBatch) -> Result<NetworkInputs, Error> {
        let values = |tensor: &Tensor| -> Result<Vec<i64>, Error> {
            let flat = tensor.f_reshape([-1]).during("read the tokens")?;
            Vec::try_from(&flat).during("read the tokens")
        };
        let (samples, length) = batch.inputs.size2().during("read the tokens")?;
        let lengths = vec![length; samples as usize];
        let tokens = values(&batch.inputs)?;
        let labels = values(&batch.targets)?;
        let batch =
            Batch { inputs: Inputs::Tokens { tokens, lengths }, labels, ..Batch::default() };
        self.refresh()?;
        let inputs = self.input.load(&batch)?;
        if inputs.targets.numel() == 0 {
            return Err(Error::Recipe("no token has a label".to_owned()));
        }
        self.network.prepared(inputs)
    }

    /// The samples of a batch on the device.
    fn samples(&mut self, batch: &ProbeBatch) -> Result<NetworkInputs, Error> {
        let samples = batch.targets.size().first().copied().unwrap_or_default();
        self.task.check(&Batch {
            labels: match batch.labels {
                Labels::Values(_) => Vec::new(),
                _ => Vec::try_from(&batch.targets).during("read the targets")?,
            },
            samples: (0..samples.unsigned_abs()).collect(),
            ..Batch::default()
        })?;
        self.refresh()?;
        let main = self.input.placed(&batch.inputs).during("copy inputs")?;
        let targets = batch.targets.f_to_device(main.device()).during("copy targets")?;
        let extras = batch
            .extras
            .iter()
            .map(|extra| extra.f_to_kind(Kind::Float)?.f_to_device(main.device()));
        let extras = extras.collect::<tch::Result<_>>().during("copy inputs")?;
        self.network.prepared(NetworkInputs { main, extras, targets, lengths: Vec::new() })
    }
}
