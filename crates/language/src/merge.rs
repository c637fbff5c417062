//! A model and the weights that were trained → a model folder that needs neither Baton nor PEFT.

use std::{collections::HashSet, path::Path};

use baton_model::Float;
use serde_json::Value;

use crate::{
    Error, LanguageModel,
    adapter::PEFT_PREFIX,
    decoder::layer_prefix,
    model::{CONFIG, torch_name},
    output::{NewFolder, NewTensor},
};

/// Files of a model folder that are copied as they are, where they exist.
pub const COPIED: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
];

/// Returns the values of a trained tensor by its name.
pub type TrainedValues<'a> = dyn FnMut(&str) -> Option<Vec<f32>> + 'a;

/// A model that is to be written with the trained weights.
#[derive(Debug)]
pub struct Merge<'a> {
    model: &'a LanguageModel,
    tensors: Vec<NewTensor>,
    /// Paths of the linear layers with matrices.
    adapted: HashSet<String>,
}

impl<'a> Merge<'a> {
    /// Plans the folder, with all tensors in the format `float`, or each in that of the model's files.
    #[must_use]
    pub fn new(model: &'a LanguageModel, float: Option<Float>) -> Self {
        let tensors = model.decoder.tensors().into_iter().map(|tensor| NewTensor {
            float: float.or(model.source.float(&tensor.name)).unwrap_or_default(),
            name: tensor.name,
            shape: tensor.shape,
        });
        let linears = model.adapter.iter().flat_map(|adapter| &adapter.linears);
        let paths =
            linears.map(|linear| format!("{}{}", layer_prefix(linear.layer), linear.linear.path()));
        Self { model, tensors: tensors.collect(), adapted: paths.collect() }
    }

    /// Size of all weights in the new folder, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(NewTensor::bytes).sum()
    }

    /// Writes description, tokenizer and weights. With an adapter, a linear layer's weight is `W + scale · B A`, computed in
    /// f32; without, all weights are the trained ones. In memory is one tensor at a time.
    ///
    /// # Errors
    /// `trained` lacks a tensor; a file cannot be read or written; a value is too large for its format.
    pub fn write(
        &self,
        folder: &NewFolder,
        max_file_bytes: u64,
        trained: &mut TrainedValues<'_>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let from = self.model.source.folder();
        folder.write(CONFIG, self.config(from)?.as_bytes())?;
        folder.copy(from, COPIED)?;
        let mut read = |tensor: &NewTensor| self.values(tensor, trained);
        folder.write_weights(&self.tensors, max_file_bytes, &mut read, progress)
    }

    /// `config.json` with the number format of the new files.
    fn config(&self, from: &Path) -> Result<String, Error> {
        let text = &self.model.config;
        let mut floats = self.tensors.iter().map(|tensor| tensor.float);
        let first = floats.next().unwrap_or_default();
        if floats.any(|float| float != first) {
            return Ok(text.clone());
        }
        let mut config: Value = serde_json::from_str(text).map_err(|error| {
            Error::new(&from.join(CONFIG), format!("is not valid JSON: {error}"))
        })?;
        // transformers 5 calls it `dtype`.
        let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        let name = Value::from(torch_name(first));
        if config.get(key) == Some(&name) {
            return Ok(text.clone());
        }
        config[key] = name;
        Ok(format!("{config:#}\n"))
    }

    fn values(
        &self,
        tensor: &NewTensor,
        trained: &mut TrainedValues<'_>,
    ) -> Result<Vec<f32>, Error> {
        let mut trained = |name: &str, len: u64| {
            let values = trained(name).filter(|values| values.len() as u64 == len);
            values.ok_or_else(|| {
                let problem = format!(
                    "needs {name} with {len} values, which the checkpoint does not have: is it of another recipe?"
                );
                Error::new(self.model.source.folder(), problem)
            })
        };
        let Some(adapter) = &self.model.adapter else {
            return trained(&tensor.name, tensor.values());
        };
        let (float, bytes) = self.model.source.read(&tensor.name)?;
        let mut weight = float.decode(&bytes);
        let path = tensor.name.strip_suffix(".weight");
        let Some(path) = path.filter(|path| self.adapted.contains(*path)) else {
            return Ok(weight);
        };
        let [outputs, inputs] = tensor.shape[..] else { return Ok(weight) };
        let matrix = |name: &str| format!("{PEFT_PREFIX}{path}.{name}.weight");
        let rank = adapter.rank();
        let a = trained(&matrix("lora_A"), rank.saturating_mul(inputs))?;
        let b = trained(&matrix("lora_B"), rank.saturating_mul(outputs))?;
        add_product(&mut weight, &a, &b, inputs as usize, adapter.scale as f32);
        Ok(weight)
    }
}

/// Adds `scale · B A` to a weight, row by row.
fn add_product(weight: &mut [f32], a: &[f32], b: &[f32], inputs: usize, scale: f32) {
    let rank = a.len() / inputs.max(1);
    let mut row_of_product = vec![0.0_f32; inputs];
    for (row, b) in weight.chunks_exact_mut(inputs.max(1)).zip(b.chunks_exact(rank.max(1))) {
        row_of_product.fill(0.0);
        for (factor, a) in b.iter().zip(a.chunks_exact(inputs.max(1))) {
            for (sum, a) in row_of_product.iter_mut().zip(a) {
                *sum += factor * a;
            }
        }
        for (weight, product) in row.iter_mut().zip(&row_of_product) {
            *weight += scale * product;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_product_is_scaled_and_added() {
        // A is (2, 3), B is (2, 2).
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 2.0, -1.0]);
        let mut weight = [0.5; 6];
        add_product(&mut weight, &a, &b, 3, 2.0);
        assert_eq!(weight, [2.5, 4.5, 6.5, -3.5, -1.5, 0.5]);
    }
}
