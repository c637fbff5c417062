//! The language model of a recipe.

use std::path::{Path, PathBuf};

use baton_model::{Float, NetworkDescription};
use baton_recipe::{JobSpec, spec::BaseFormat};

use crate::{
    Error,
    adapter::{AdapterLayout, describe_whole},
    config,
    decoder::{DecoderModel, Recomputation},
    digest,
    source::{WeightSource, read_text},
};

/// Name of the file that describes a model.
pub const CONFIG: &str = "config.json";

/// A language model in a folder, and what a recipe trains of it.
#[derive(Debug)]
pub struct LanguageModel {
    /// Its computation.
    pub decoder: DecoderModel,
    /// Its weights.
    pub source: WeightSource,
    /// The adapter that is trained; all weights are trained if absent.
    pub adapter: Option<AdapterLayout>,
    /// Number format of the frozen weights.
    pub base: BaseFormat,
    /// What of each layer is recomputed for the gradient.
    pub recomputed: Vec<Recomputation>,
    /// Text of `config.json`.
    pub(crate) config: String,
}

impl LanguageModel {
    /// Opens the model of a recipe and checks that its files fit together.
    ///
    /// # Errors
    /// The folder cannot be read, is not supported, or the adapter does not fit it.
    pub fn of_recipe(spec: &JobSpec) -> Result<Self, Error> {
        let folder = PathBuf::from(&spec.model.path);
        let (config, decoder) = read_decoder(&folder)?;
        let source = WeightSource::open(&folder)?;
        source.check(&decoder.tensors())?;
        let adapter = spec.adapter.as_ref().map(|adapter| AdapterLayout::new(&decoder, adapter));
        let adapter = adapter.transpose().map_err(|problem| Error::new(&folder, problem))?;
        if u64::from(spec.data.sequence) > decoder.max_positions {
            return Err(Error::new(
                &folder.join(CONFIG),
                format!(
                    "has max_position_embeddings = {}, but data.sequence = {}: lower data.sequence",
                    decoder.max_positions, spec.data.sequence
                ),
            ));
        }
        let base = spec.adapter.as_ref().map_or(BaseFormat::Fp32, |adapter| adapter.base);
        let recomputed = decoder.recomputed(&spec.train.recompute);
        let mut recomputed = recomputed.map_err(|problem| Error::new(&folder, problem))?;
        if base == BaseFormat::Nf4 {
            // Or else every dense weight would be kept for the backward pass.
            recomputed.iter_mut().for_each(|layer| *layer = Recomputation::Layer.max(*layer));
        }
        Ok(Self { decoder, source, adapter, base, recomputed, config })
    }

    /// The tensors that training changes.
    #[must_use]
    pub fn describe(&self) -> NetworkDescription {
        match &self.adapter {
            Some(adapter) => adapter.describe(&self.decoder),
            None => describe_whole(&self.decoder),
        }
    }

    /// BLAKE3 digest of `config.json` and the files of weights. A run continues only with the same model. It is remembered
    /// beside them, and computed again only if one of them has been written since.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn digest(&self) -> Result<String, Error> {
        digest::of_model(&self.config, &self.source)
    }
}

/// The description of the model in `folder`, as text and parsed.
///
/// # Errors
/// It cannot be read, or is not supported.
pub fn read_decoder(folder: &Path) -> Result<(String, DecoderModel), Error> {
    let path = folder.join(CONFIG);
    let text = read_text(&path)?;
    let decoder = config::read(&text).map_err(|problem| Error::new(&path, problem))?;
    Ok((text, decoder))
}

/// Name of a number format in `config.json`, e.g. `bfloat16`.
pub(crate) fn torch_name(float: Float) -> &'static str {
    match float {
        Float::F32 => "float32",
        Float::F16 => "float16",
        Float::Bf16 => "bfloat16",
    }
}
